"""The JSON of every answer, key by key as the releases write it. Recorded bodies of 0.5.16 hold it to that in the tests."""

import datetime
import time
import zlib

from sglang._double.release import RELEASE


def token_id(piece):
    return zlib.crc32(piece.encode()) % 248_000


def error(message, kind, code):
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


def longest(server):
    """The longest sequence the server takes, prompt and completion."""
    return min(server.settings.context - 1, server.facts["tokens"] - 1)


def models(settings):
    name = settings["served_model_name"]
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "sglang",
                "root": name,
                "parent": None,
                "max_model_len": settings.context,
            }
        ],
    }


def model_info(settings):
    model = settings.model
    return {
        "model_path": settings["model_path"],
        "tokenizer_path": settings["tokenizer_path"],
        "is_generation": True,
        "preferred_sampling_params": settings["preferred_sampling_params"],
        "weight_version": settings["weight_version"] or "default",
        "has_image_understanding": model.multimodal,
        "has_audio_understanding": False,
        "model_type": model.type,
        "architectures": model.config.get("architectures"),
    }


def server_info(server):
    settings, facts = server.settings, server.facts
    state = {
        **settings.fields,
        "max_mamba_cache_size": facts["slots"],
        "grpc_worker_threads": 4,
        "max_speculative_num_draft_tokens": settings.draft_tokens,
        "last_gen_throughput": server.stats.get("throughput", 0.0),
        "memory_usage": {
            "weight": round(facts["weights_gib"], 2),
            "kvcache": round(facts["kv_gib"], 2),
            "token_capacity": facts["tokens"],
            "graph": round(facts["graph_gib"], 2),
        },
        "effective_max_running_requests_per_dp": facts["requests"],
    }
    if settings.draft_tokens and server.stats.get("verify"):
        state["avg_spec_accept_length"] = server.stats["accepted"] / server.stats["verify"]
    return {
        **settings.fields,
        "status": "ready",
        "max_total_num_tokens": facts["tokens"],
        "max_req_input_len": longest(server) - 5,
        "internal_states": [state],
        "version": RELEASE,
    }


def load(server):
    stats = server.stats
    return [
        {
            "dp_rank": 0,
            "num_reqs": stats.get("running", 0) + stats.get("queue", 0),
            "num_waiting_reqs": stats.get("queue", 0),
            "num_tokens": stats.get("used", 0),
            "num_pending_tokens": 0,
            "ts_tic": time.monotonic(),
        }
    ]


def loads(server):
    stats, facts = server.stats, server.facts
    used, running, queue = stats.get("used", 0), stats.get("running", 0), stats.get("queue", 0)
    now = time.time()
    return {
        "timestamp": datetime.datetime.fromtimestamp(now, datetime.timezone.utc).isoformat(),
        "version": RELEASE,
        "loads": [
            {
                "timestamp": now,
                "dp_rank": 0,
                "num_running_reqs": running,
                "num_waiting_reqs": queue,
                "num_waiting_uncached_tokens": 0,
                "num_used_tokens": used,
                "num_total_tokens": used,
                "max_total_num_tokens": facts["tokens"],
                "max_running_requests": facts["requests"],
                "token_usage": round(used / facts["tokens"], 4),
                "gen_throughput": round(stats.get("throughput", 0.0), 2),
                "cache_hit_rate": 0.0,
                "utilization": 0.0,
                "memory": {
                    "weight_gb": round(facts["weights_gib"], 3),
                    "kv_cache_gb": round(facts["kv_gib"], 3),
                    "graph_gb": round(facts["graph_gib"], 3),
                    "token_capacity": facts["tokens"],
                },
                "disaggregation": {
                    "mode": "null",
                    "prefill_bootstrap_queue_reqs": 0,
                    "prefill_inflight_queue_reqs": 0,
                    "decode_prealloc_queue_reqs": 0,
                    "decode_transfer_queue_reqs": 0,
                    "decode_retracted_queue_reqs": 0,
                    "kv_transfer_speed_gb_s": 0.0,
                    "kv_transfer_latency_ms": 0.0,
                },
                "queues": {"waiting": queue, "grammar": 0, "paused": 0, "retracted": 0},
            }
        ],
    }


# -- generation


def _usage(prompt, completion, details=True, cached=None):
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    if details:
        usage["prompt_tokens_details"] = cached
    usage["reasoning_tokens"] = 0
    return usage


def _cached(exchange):
    """Tokens of the prompt that were in the cache; told only where the server was asked to."""
    if not exchange.settings["enable_cache_report"]:
        return None
    return {"cached_tokens": sum(part.cached for part in exchange.parts)}


def _total(exchange, details):
    # The copies of one prompt (`n`) count it once.
    prompts = {id(part.prompt): part.count for part in exchange.parts}
    made = sum(part.made for part in exchange.parts)
    return _usage(sum(prompts.values()), made, details, _cached(exchange))


def _head(exchange, kind):
    return {"id": exchange.id, "object": kind, "created": exchange.created, "model": exchange.model}


def _running(exchange, part):
    return _usage(part.count, part.made, True, _cached(exchange))


def _delta(role=None, content=None):
    delta = {"reasoning_content": None}
    if role is not None:
        delta["role"] = role
    if content is not None:
        delta["content"] = content
    return delta


def _chat_chunk(exchange, part, delta, reason=None, matched=None):
    body = {
        **_head(exchange, "chat.completion.chunk"),
        "choices": [
            {"index": part.index, "delta": delta, "logprobs": None, "finish_reason": reason, "matched_stop": matched}
        ],
    }
    if exchange.continuous and delta.get("content"):
        body["usage"] = _running(exchange, part)  # neither with the role nor with the end
    return body


def opening(exchange, part):
    """The first chunk of a chat: the role, no content."""
    return _chat_chunk(exchange, part, _delta("assistant", ""))


def chunk(exchange, part, piece):
    """The events for a piece of text, and for the end where it is reached."""
    if exchange.kind == "generate":
        return [_generate(exchange, part, part.reason is not None)]
    if exchange.kind == "chat":
        events = [_chat_chunk(exchange, part, _delta(content=piece))] if piece else []
        if part.reason:
            events.append(_chat_chunk(exchange, part, _delta(), part.reason, part.matched))
        return events
    return [
        {
            **_head(exchange, "text_completion"),
            "choices": [
                {
                    "index": part.index,
                    "text": piece,
                    "logprobs": None,
                    "finish_reason": part.reason,
                    "matched_stop": part.matched,
                }
            ],
            "usage": _running(exchange, part) if exchange.continuous else None,
        }
    ]


def usage_chunk(exchange):
    """The chunk with no choices that carries the usage."""
    kind = "chat.completion.chunk" if exchange.kind == "chat" else "text_completion"
    return {**_head(exchange, kind), "choices": [], "usage": _total(exchange, exchange.kind == "chat")}


def whole(exchange):
    """The body of an answer that is not streamed."""
    if exchange.kind == "generate":
        answers = [_generate(exchange, part, True) for part in exchange.parts]
        return answers[0] if len(answers) == 1 else answers
    chat = exchange.kind == "chat"
    choices = []
    for part in exchange.parts:
        end = {"logprobs": None, "finish_reason": part.reason, "matched_stop": part.matched}
        if chat:
            message = {"role": "assistant", "content": part.text, "reasoning_content": None, "tool_calls": None}
            choices.append({"index": part.index, "message": message, **end})
        else:
            choices.append({"index": part.index, "text": part.text, **end})
    body = {
        **_head(exchange, "chat.completion" if chat else "text_completion"),
        "choices": choices,
        "usage": _total(exchange, True),
        "metadata": {"weight_version": exchange.settings["weight_version"] or "default"},
    }
    if exchange.document.get("return_spec_tokens_details") and exchange.settings.draft_tokens and RELEASE == "0.5.23":
        body["sglext"] = {"spec_tokens_details": speculation(exchange, exchange.parts[0])}
    return body


def _generate(exchange, part, last):
    meta = {
        "id": exchange.id,
        "finish_reason": None,
        "prompt_tokens": part.count,
        "weight_version": exchange.settings["weight_version"] or "default",
        "num_retractions": 0,
        "queue_time": 0.0,
        "reasoning_tokens": 0,
        "completion_tokens": part.made,
        "cached_tokens": part.cached,
        "cached_tokens_details": {"device": part.cached, "host": 0},
        "dp_rank": None,
    }
    if part.reason:
        meta["finish_reason"] = (
            {"type": "length", "length": part.made}
            if part.reason == "length"
            else {"type": "stop", "matched": part.matched}
        )
    if last:
        now = time.time()
        meta["e2e_latency"] = now - exchange.received
        if exchange.settings.draft_tokens:
            meta.update(speculation(exchange, part))
        span = (part.last_at or now) - (part.first_at or now)
        ends = {"request_finished_ts": part.last_at, "decode_throughput": (part.made - 1) / span if span > 0 else 0.0}
        sent = {"response_sent_to_client_ts": now}
        meta["request_received_ts"] = exchange.received
        meta["api_server_dispatch_finish_ts"] = exchange.received + 0.0008
        meta.update({**sent, **ends} if exchange.stream else {**ends, **sent})
    elif part.steps == 1:
        meta["response_sent_to_client_ts"] = time.time()
    return {"text": part.text, "output_ids": [token_id(str(i)) for i in range(part.made)], "meta_info": meta}


def speculation(exchange, part):
    """What a speculating server adds: the first token comes from the prefill, the rest from `verify` steps."""
    most, steps = exchange.settings.draft_tokens, part.histogram[1:]
    correct = sum(count - 1 for count in steps)
    proposed = len(steps) * (most - 1)
    histogram = [0] * most
    for count in steps:
        histogram[count - 1] += 1
    return {
        "spec_accept_rate": correct / proposed if proposed else 0.0,
        "spec_accept_length": part.made / len(steps) if steps else 0.0,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": len(steps),
        "spec_accepted_drafts": correct,
        "spec_proposed_drafts": proposed,
        "spec_correct_drafts_histogram": histogram,
        "spec_accept_histogram": histogram,
    }
