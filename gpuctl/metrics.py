"""From what the load generator saw of each request to the numbers people compare. Pure.

Two steps. `request_metrics` reads one line of `gpuctl load --raw` (a mapping: see gpuctl/agent/load.py). `repetition`
reads all lines of one run and its summary. `METRICS` says what each name means; the unit is in the name.

Tokens are what the server says it made: its running count in each chunk (continuous usage; llama.cpp's
timings_per_token), else its final usage. Chunks are never counted as tokens, the tokens asked for neither. A request
that failed has no metrics and counts as failed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Metric(NamedTuple):
    unit: str
    what: str


# Of a request; of a repetition it is the mean over its requests that succeeded (decode_tok_s: from their mean time).
_OF_REQUESTS = {
    "ttft_ms": Metric("ms", "time to first token: first chunk with content - request sent"),
    "time_per_token_ms": Metric("ms", "(last chunk - first chunk) / (tokens - tokens in the first chunk)"),
    "tpot_ms": Metric("ms", "customary TPOT: (E2E - TTFT) / (tokens - 1), as other tools print it"),
    "e2e_ms": Metric("ms", "last chunk with content - request sent"),
    "decode_tok_s": Metric("tok/s", "1000 / time_per_token_ms: how fast one stream is written"),
    "request_tok_s": Metric("tok/s", "tokens / E2E: what one user gets, waiting included"),
    "prompt_tokens": Metric("tokens", "tokens of the prompt, by the server's usage"),
    "completion_tokens": Metric("tokens", "tokens made, by the server's usage"),
    "cached_tokens": Metric("tokens", "tokens of the prompt that were in the server's prefix cache"),
    "prefill_tok_s": Metric("tok/s", "prompt tokens not cached / time to read them; see the source"),
    "acceptance_length": Metric(
        "tokens", "tokens made for each step of the target model (speculation); see the source"
    ),
}
_PERCENTILES = ("ttft_ms", "time_per_token_ms", "tpot_ms", "e2e_ms")
_OF_REPETITION = {
    "itl_ms": Metric("ms", "inter-token latency, mean over all tokens; only where each chunk's tokens are known"),
    "itl_p50_ms": Metric("ms", "median of the same"),
    "itl_p90_ms": Metric("ms", "90th percentile of the same"),
    "itl_p99_ms": Metric("ms", "99th percentile of the same"),
    "output_tok_s": Metric("tok/s", "all tokens made / (first request sent to last chunk)"),
    "steady_output_tok_s": Metric("tok/s", "tokens made in the steady window / its length: neither ramp nor tail"),
    "requests_s": Metric("1/s", "requests that succeeded / (first request sent to last chunk)"),
    "load_kept": Metric("", "share of the load asked for that the generator really kept up (1 = all)"),
}
_OF_GPUS = {  # of a repetition, where gauges.py knows the server's GPUs
    "gpu_power_w": Metric("W", "mean power of the server's GPUs together, first request sent to last chunk"),
    "gpu_memory_bytes": Metric("bytes", "the most that the server's GPUs held together in that time"),
    "energy_per_token_j": Metric("J", "gpu_power_w / output_tok_s: what a token written costs, prompts included"),
}
METRICS: Mapping[str, Metric] = {
    **_OF_REQUESTS,
    **{
        f"{name.removesuffix('_ms')}_{p}_ms": Metric("ms", f"{nth} of {name} over the requests")
        for name in _PERCENTILES
        for p, nth in (("p50", "median"), ("p90", "90th percentile"), ("p99", "99th percentile"))
    },
    **_OF_REPETITION,
    **_OF_GPUS,
}

# No model makes more in one answer: larger numbers are a server's mistake.
_BELIEVABLE = 100_000_000
_AT_ONCE_S = 20e-6  # a token, of one stream: ten times faster than any model is served


def believable(value: object) -> int | None:
    """A count a server sent, if it can be one."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _BELIEVABLE:
        return None
    return value


@dataclass(frozen=True)
class Tokens:
    """How many tokens a request made. `first` and `last`: the running count at the first and last chunk."""

    total: int
    first: int
    last: int
    running: tuple[int, ...] | None  # at each chunk, where the server says it
    source: str  # continuous_usage | final_usage


def tokens(row: Row) -> Tokens | str:
    """Tokens of a request, or in words why they cannot be known.

    Without running counts the first chunk is taken to hold one token, which is what a prefill makes.
    """
    usage = row.get("usage")
    timings = row.get("timings")
    said: object = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    if said is None and isinstance(timings, Mapping):
        said = timings.get("predicted_n")
    running = row.get("tokens")
    if said is None and isinstance(running, Sequence) and running:
        said = running[-1]
    if said is None:
        return "the server sent no usage"
    total = believable(said)
    if total is None or total == 0:
        return f"usage says {said!r} tokens"
    asked = believable(row.get("max_tokens"))
    if asked is not None and total > asked:
        return f"usage says {total} tokens, at most {asked} were asked for"
    chunks = row.get("t_chunks")
    if isinstance(running, Sequence) and isinstance(chunks, Sequence) and len(running) == len(chunks) > 0:
        counts = [believable(value) for value in running]
        known = tuple(value for value in counts if value is not None)
        if (
            len(known) == len(counts)
            and known[0] > 0
            and known[-1] <= total
            and all(a <= b for a, b in pairwise(known))
        ):
            return Tokens(total, known[0], known[-1], known, "continuous_usage")
    return Tokens(total, 1, total, None, "final_usage")


def itl_ms(row: Row) -> list[float] | None:
    """Inter-token latencies: a chunk's gap to the one before, shared equally by its tokens. None without counts."""
    made = tokens(row)
    if isinstance(made, str) or made.running is None:
        return None
    out: list[float] = []
    since = row["t_chunks"][0]
    for (before, after), t in zip(pairwise(made.running), row["t_chunks"][1:], strict=True):
        if after > before:
            out += [(t - since) * 1e3 / (after - before)] * (after - before)
            since = t
    return out


_SEVERAL = 1.05  # tokens a chunk above which chunks show speculation; two of a hundred may have travelled together


def acceptance(row: Row) -> tuple[float, str] | None:
    """Tokens made for each step of the target model, with its source; None where nothing speaks of speculation.

    Sources, most trusted first: `spec` (SGLang's spec_accept_length, or tokens / spec_verify_ct), `timings` (llama.cpp:
    each draft token accepted saves one step, so tokens / (tokens - draft_n_accepted)), `chunks` (running counts: tokens
    after the first chunk / chunks after it; a server that gathers several steps in a chunk makes it too high, so it is
    only given when some chunk held several tokens).
    """
    found = _made_a_step(row)
    return None if found is None or (found[1] == "chunks" and found[0] <= _SEVERAL) else found


def _made_a_step(row: Row) -> tuple[float, str] | None:
    """As `acceptance`, also where chunks show none."""
    spec = row.get("spec")
    made = tokens(row)
    total = None if isinstance(made, str) else made.total
    if isinstance(spec, Mapping):
        length = spec.get("spec_accept_length")
        if isinstance(length, int | float) and not isinstance(length, bool) and 1 <= length < 1000:
            return float(length), "spec"
        steps = believable(spec.get("spec_verify_ct"))
        if steps and total and total >= steps:
            return total / steps, "spec"
    timings = row.get("timings")
    if isinstance(timings, Mapping) and "draft_n_accepted" in timings:
        accepted, count = believable(timings["draft_n_accepted"]), believable(timings.get("predicted_n"))
        if accepted is not None and count and accepted < count:
            return count / (count - accepted), "timings"
    if not isinstance(made, str) and made.running is not None and len(made.running) > 1:
        return (made.last - made.first) / (len(made.running) - 1), "chunks"
    return None


def prefill(row: Row) -> tuple[float, str] | None:
    """Tokens of the prompt read in a second, with its source.

    `timings`: the server's own clock (llama.cpp: prompt_n / prompt_ms). `ttft`: prompt tokens not cached / TTFT, which
    holds queueing and the first token too: no more than a lower bound.
    """
    timings = row.get("timings")
    if isinstance(timings, Mapping):
        count, ms = believable(timings.get("prompt_n")), timings.get("prompt_ms")
        if count and isinstance(ms, int | float) and ms > 0:
            return count / ms * 1e3, "timings"
    prompt, cached = _prompt(row)
    seconds = row["t_chunks"][0] - row["t_request"]
    if prompt and prompt > (cached or 0) and seconds > 0:
        return (prompt - (cached or 0)) / seconds, "ttft"
    return None


def _prompt(row: Row) -> tuple[int | None, int | None]:
    """Tokens of the prompt, and how many of them came from the cache."""
    usage = row.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    details = usage.get("prompt_tokens_details")
    cached = believable(details.get("cached_tokens")) if isinstance(details, Mapping) else None
    timings = row.get("timings")
    if cached is None and isinstance(timings, Mapping):
        cached = believable(timings.get("cache_n"))
    prompt = believable(usage.get("prompt_tokens"))
    return prompt, cached if prompt is None or cached is None or cached <= prompt else None


def request_metrics(row: Row) -> dict[str, float]:
    """Metrics of one request by name; what cannot be known is left out. Empty for a request that failed."""
    chunks = row.get("t_chunks")
    if row.get("error") is not None or not chunks:
        return {}
    first, last, sent = chunks[0], chunks[-1], row["t_request"]
    ttft, e2e = (first - sent) * 1e3, (last - sent) * 1e3
    out = {"ttft_ms": ttft, "e2e_ms": e2e}
    prompt, cached = _prompt(row)
    if prompt is not None:
        out["prompt_tokens"] = prompt
    if cached is not None:
        out["cached_tokens"] = cached
    made = tokens(row)
    if not isinstance(made, str):
        out["completion_tokens"] = made.total
        if e2e > 0:
            out["request_tok_s"] = made.total / e2e * 1e3
        if made.last > made.first and last > first and not came_at_once(row):
            out["time_per_token_ms"] = (last - first) * 1e3 / (made.last - made.first)
            out["decode_tok_s"] = 1e3 / out["time_per_token_ms"]
        if made.total > 1 and last > first and not came_at_once(row):
            out["tpot_ms"] = (e2e - ttft) / (made.total - 1)
    speed = prefill(row)
    if speed is not None:
        out["prefill_tok_s"] = speed[0]
    accepted = acceptance(row)
    if accepted is not None:
        out["acceptance_length"] = accepted[0]
    return out


def came_at_once(row: Row) -> bool:
    """Whether an answer's chunks were read in one go, faster than any server writes: something on the way held them
    back (a proxy, a load generator that had to wait for a processor), and when they were made is not known any more.
    """
    chunks, made = row.get("t_chunks"), tokens(row)
    if not chunks or isinstance(made, str) or made.last <= made.first:
        return False
    return bool((chunks[-1] - chunks[0]) < _AT_ONCE_S * (made.last - made.first))


def percentile(values: Iterable[float], share: float) -> float:
    """Percentile by linear interpolation between the two nearest ranks (numpy's default). Needs a value."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def steady_window(rows: Sequence[Row], *, open_loop: bool = False) -> tuple[float, float] | None:
    """The part of a run in which the load was whole: (start, end) in seconds, None when there is none.

    Closed loop: from when as many requests as ever run at once have had their first chunk, until the load begins to
    drain (the first end after the last start). Open loop: from the first chunk until the last arrival.
    """
    good = [row for row in rows if row.get("error") is None and row.get("t_chunks")]
    if not good:
        return None
    starts = sorted(row["t_request"] for row in good)
    firsts = sorted(row["t_chunks"][0] for row in good)
    ends = sorted(row["t_chunks"][-1] for row in good)
    if open_loop:
        start, end = firsts[0], starts[-1]
    else:
        start = firsts[_peak(starts, ends) - 1]
        end = next((t for t in ends if t > starts[-1]), start)
    return (start, end) if end > start else None


def _peak(starts: Sequence[float], ends: Sequence[float]) -> int:
    """Most requests at a time."""
    now = most = 0
    for _, change in sorted([(t, 1) for t in starts] + [(t, -1) for t in ends]):
        now += change
        most = max(most, now)
    return most


def tokens_between(row: Row, start: float, end: float) -> float:
    """Tokens of a request that came in start < t <= end; without running counts, spread evenly over its time."""
    made = tokens(row)
    if isinstance(made, str):
        return 0.0
    chunks = row["t_chunks"]
    if made.running is not None:
        before = 0
        count = 0
        for t, running in zip(chunks, made.running, strict=True):
            if start < t <= end:
                count += running - before
            before = running
        return float(count)
    first, last = chunks[0], chunks[-1]
    inside = max(0.0, min(end, last) - max(start, first))
    spread = inside / (last - first) * (made.total - 1) if last > first else 0.0
    return spread + (1.0 if start < first <= end else 0.0)


@dataclass(frozen=True)
class Repetition:
    """Numbers of one run. `metrics` holds names of METRICS; the rest says what stands behind them."""

    metrics: Mapping[str, float]
    requests: int  # all that were to be made, failed ones included
    failed: int
    wall_s: float  # first request sent to last chunk
    errors: Mapping[str, int] = field(default_factory=dict)  # kind -> how many
    finish_reasons: Mapping[str, int] = field(default_factory=dict)  # of requests that succeeded
    sources: Mapping[str, str] = field(default_factory=dict)  # tokens, prefill_tok_s, acceptance_length -> where from
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "metrics": dict(self.metrics),
            "requests": self.requests,
            "failed": self.failed,
            "wall_s": self.wall_s,
            "errors": dict(self.errors),
            "finish_reasons": dict(self.finish_reasons),
            "sources": dict(self.sources),
            "notes": list(self.notes),
        }


def repetition(rows: Sequence[Row], summary: Mapping[str, Any]) -> Repetition:
    """Metrics of one run from its rows and its summary line. Never raises on what a server may have sent."""
    good = [row for row in rows if row.get("error") is None and row.get("t_chunks")]
    each = [request_metrics(row) for row in good]
    out: dict[str, float] = {}
    notes: list[str] = []
    for name in _OF_REQUESTS:
        values = [metrics[name] for metrics in each if name in metrics]
        if not values:
            continue
        out[name] = math.fsum(values) / len(values)
        if name in _PERCENTILES:
            for share in (50, 90, 99):
                out[f"{name.removesuffix('_ms')}_p{share}_ms"] = percentile(values, share / 100)
        if len(values) < len(each) and name == "completion_tokens":
            notes.append(f"tokens are known of {len(values)} of {len(each)} requests only")
    if "acceptance_length" in out:  # of all requests: those in which nothing was accepted count as well
        lengths = [found[0] for row in good if (found := _made_a_step(row)) is not None]
        out["acceptance_length"] = math.fsum(lengths) / len(lengths)
    made = [tokens(row) for row in good]
    notes += [f"tokens not known: {why}" for why in sorted({m for m in made if isinstance(m, str)})]
    at_once = sum(came_at_once(row) for row in good)
    if at_once:
        notes.append(
            f"{at_once} of {len(good)} answers were held back on the way and read at once: their speed is lost"
        )
    if "time_per_token_ms" in out:  # not the mean of speeds, which one stream that was held back for a while would rule
        out["decode_tok_s"] = 1e3 / out["time_per_token_ms"]
    gaps = [] if at_once else [itl_ms(row) for row in good]
    if gaps and all(gap is not None for gap in gaps):
        every = [value for gap in gaps for value in gap or ()]
        if every:
            out["itl_ms"] = math.fsum(every) / len(every)
            for share in (50, 90, 99):
                out[f"itl_p{share}_ms"] = percentile(every, share / 100)
    wall = 0.0
    if good:
        sent = [row["t_request"] for row in rows if row.get("t_request") is not None]
        wall = max(row["t_chunks"][-1] for row in good) - min(sent)
    whole = bool(made) and all(isinstance(m, Tokens) for m in made)
    if wall > 0:
        out["requests_s"] = len(good) / wall
        if whole:
            out["output_tok_s"] = sum(m.total for m in made if isinstance(m, Tokens)) / wall
    window = steady_window(rows, open_loop=summary.get("rate") is not None)
    if window is not None and whole:
        out["steady_output_tok_s"] = math.fsum(tokens_between(row, *window) for row in good) / (window[1] - window[0])
    notes += _late(good, summary)
    kept = summary.get("load_kept")
    if isinstance(kept, int | float):
        out["load_kept"] = float(kept)
    return Repetition(
        metrics=out,
        requests=len(rows),
        failed=len(rows) - len(good),
        wall_s=wall,
        errors=dict(Counter(_kind(row) for row in rows if row.get("error") is not None or not row.get("t_chunks"))),
        finish_reasons=dict(Counter(str(row.get("finish_reason")) for row in good)),
        sources=_sources(good, made),
        notes=tuple(notes),
    )


def of_gpus(told: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of the GPUs, as gauges.py tells them of a repetition, with the energy a token costs (see METRICS)."""
    out = dict(told)
    speed = metrics.get("output_tok_s", 0.0)
    if "gpu_power_w" in out and speed > 0:
        out["energy_per_token_j"] = out["gpu_power_w"] / speed
    return out


def _late(good: Sequence[Row], summary: Mapping[str, Any]) -> list[str]:
    """A note when the generator read later than chunks follow each other: what it reads together has the last stamp."""
    lag = summary.get("lag_ms")
    gaps = [(b - a) * 1e3 for row in good for a, b in pairwise(row["t_chunks"]) if b > a]
    if not isinstance(lag, Mapping) or not gaps:
        return []
    gap, late = percentile(gaps, 0.5), lag.get("p99")
    if not isinstance(late, int | float) or late <= gap:
        return []
    return [f"chunks came every {gap:.2f} ms and were read up to {late:.2f} ms late (p99): single times are blurred"]


def _kind(row: Row) -> str:
    error = row.get("error")
    return str(error.get("kind")) if isinstance(error, Mapping) else "empty"


def _sources(good: Sequence[Row], made: Sequence[Tokens | str]) -> dict[str, str]:
    found = {
        "tokens": {m.source for m in made if isinstance(m, Tokens)},
        "prefill_tok_s": {got[1] for row in good if (got := prefill(row)) is not None},
        "acceptance_length": {got[1] for row in good if (got := acceptance(row)) is not None},
    }
    return {name: "+".join(sorted(names)) for name, names in found.items() if names}
