"""/metrics in Prometheus' text format: the series of a real server (metrics.json), filled with what is known here."""

import json
import os
import time
from bisect import bisect_left
from collections import Counter

from sglang._double.release import PACKAGE

ROWS = json.loads((PACKAGE / "_double" / "metrics.json").read_text())
HISTOGRAMS = {row["name"]: row["buckets"] for row in ROWS if row["type"] == "histogram"}


class Counts:
    """What the HTTP process counts."""

    def __init__(self):
        self.requests, self.responses = Counter(), Counter()
        self.generated = 0
        self.observed = {name: [] for name in HISTOGRAMS}
        self.began = time.time()

    def request(self, method, path):
        self.requests[(path, method)] += 1

    def response(self, method, path, status):
        self.responses[(path, method, str(status))] += 1

    def observe(self, name, value):
        values = self.observed["sglang:" + name]
        values.append(value)
        if len(values) > 100_000:
            del values[:50_000]

    def finished(self, exchange, part):
        """Notes a sequence that ended, as the engine does: only now do its tokens count."""
        if part.first_at is None:
            return
        self.observe("time_to_first_token_seconds", part.first_at - exchange.received)
        self.observe("e2e_request_latency_seconds", part.last_at - exchange.received)
        self.observe("prompt_tokens_histogram", part.count)
        self.observe("uncached_prompt_tokens_histogram", part.count - part.cached)
        self.observe("generation_tokens_histogram", part.made)
        if part.made > 1:
            self.observe("inter_token_latency_seconds", (part.last_at - part.first_at) / (part.made - 1))
        self.generated += part.made


def _values(server, counts):
    settings, facts, stats = server.settings, server.facts, server.stats
    drafts, verify = settings.draft_tokens or 0, stats.get("verify", 0)
    length = stats.get("accepted", 0) / verify if verify and drafts else 0.0
    slots = facts["slots"] or 0
    used = stats.get("used", 0)
    return {
        "max_total_num_tokens": facts["tokens"],
        "engine_startup_time": counts.began - server.created,
        "engine_load_weights_time": facts["load_s"],
        "page_size": settings["page_size"],
        "num_pages": facts["tokens"] // settings["page_size"],
        "context_len": settings.context,
        "startup_available_gpu_memory_gb": facts["free_gib"],
        "num_running_reqs": stats.get("running", 0),
        "num_queue_reqs": stats.get("queue", 0),
        "gen_throughput": stats.get("throughput", 0.0),
        "token_usage": used / facts["tokens"],
        "full_token_usage": used / facts["tokens"],
        "num_used_tokens": used,
        "kv_used_tokens": used,
        "kv_available_tokens": facts["tokens"] - used,
        "decode_sum_seq_lens": used,
        "mamba_usage": stats.get("slots", 0) / slots if slots else 0.0,
        "mamba_used_tokens": stats.get("slots", 0),
        "mamba_available_tokens": slots - stats.get("slots", 0),
        "spec_accept_length": length,
        "spec_accept_rate": (length - 1) / (drafts - 1) if length and drafts > 1 else 0.0,
        "spec_num_draft_tokens": drafts,
        "spec_num_steps": settings["speculative_num_steps"] or 0,
        "is_cuda_graph": 1 if settings.graphs else 0,
        "prompt_tokens_total": stats.get("prompt", 0),
        "generation_tokens_total": counts.generated,
        "spec_verify_calls_total": verify if drafts else 0,
        "num_requests_total": stats.get("requests", 0),
        "cached_tokens_total": stats.get("cached", 0),
        "process_cpu_seconds_total": sum(os.times()[:2]),
        "weight_memory_usage_gb": facts["weights_gib"],
        "kv_cache_memory_usage_gb": facts["kv_gib"],
        "graph_memory_usage_gb": facts["graph_gib"],
    }


def _series(name, labels, value):
    shown = "{%s}" % ",".join('%s="%s"' % pair for pair in sorted(labels.items())) if labels else ""
    return "%s%s %s" % (name, shown, repr(float(value)))


def text(server, counts):
    settings = server.settings
    values, lines = _values(server, counts), []
    model = {"model_name": settings["served_model_name"]}
    for row in ROWS:
        name = row["name"]
        if name == "sglang:spec_verify_calls_total" and not settings.draft_tokens:
            continue
        lines += ["# HELP %s %s" % (name, row["help"]), "# TYPE %s %s" % (name, row["type"])]
        own = model if row.get("model") else {}
        if name == "sglang:http_requests_total":
            for (path, method), count in counts.requests.items():
                lines.append(_series(name, {"endpoint": path, "method": method}, count))
        elif name == "sglang:http_responses_total":
            for (path, method, status), count in counts.responses.items():
                lines.append(_series(name, {"endpoint": path, "method": method, "status_code": status}, count))
        elif name == "sglang:http_requests_active":
            for path, method in counts.requests:
                lines.append(_series(name, {"endpoint": path, "method": method}, 1 if path == "/metrics" else 0))
        elif row["type"] == "histogram":
            for labels in row["labels"]:
                lines += _histogram(name, {**labels, **own}, row["buckets"], counts.observed[name])
        else:
            for labels in row["labels"]:
                lines.append(_series(name, {**labels, **own}, values.get(name.partition(":")[2], 0)))
    return "\n".join(lines) + "\n"


def _histogram(name, labels, buckets, observed):
    counted = [0] * (len(buckets) + 1)
    for value in observed:
        counted[bisect_left(buckets, value)] += 1
    lines, running = [_series(name + "_sum", labels, sum(observed))], 0
    for edge, count in zip([*map(repr, buckets), "+Inf"], counted):
        running += count
        lines.append(_series(name + "_bucket", {**labels, "le": edge}, running))
    lines.append(_series(name + "_count", labels, running))
    return lines
