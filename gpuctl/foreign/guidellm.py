"""guidellm (`--output kind=json`): one JSON document with a benchmark a load (guidellm 0.5 to 0.8, schemas/report.py).

Of each metric the distribution over the successful requests is taken. guidellm's own "time per output token" counts the
first token too and is no TPOT as others mean it; its inter-token latency is.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from gpuctl.results.imported import Imported, at, text, whole

TOOL = "guidellm"


def recognise(document: Any) -> bool:
    benchmarks = document.get("benchmarks") if isinstance(document, dict) else None
    return isinstance(benchmarks, list) and all("metrics" in b for b in benchmarks if isinstance(b, dict))


def runs(document: Any) -> list[Imported]:
    asked = at(document, "config", "spec", "backend", "model") or at(document, "args", "model")
    return [_run(benchmark, text(asked)) for benchmark in document["benchmarks"] if isinstance(benchmark, dict)]


def _run(benchmark: dict[str, Any], asked: str) -> Imported:
    strategy = at(benchmark, "config", "strategy") or {}
    kind = text(at(strategy, "type_"))
    concurrency = 1 if kind == "synchronous" else whole(at(strategy, "streams")) if kind == "concurrent" else None
    rate = at(strategy, "rate")
    totals = at(benchmark, "metrics", "request_totals") or {}

    def mean(name: str, factor: float = 1.0) -> float | None:
        value = at(benchmark, "metrics", name, "successful", "mean")
        return value * factor if isinstance(value, int | float) else None

    return Imported(
        model=text(at(benchmark, "config", "backend", "model")) or asked,
        concurrency=concurrency,
        load="" if concurrency is not None else f"{kind} {rate:g}" if isinstance(rate, int | float) else kind,
        completed=whole(at(totals, "successful")),
        failed=whole(at(totals, "errored")),
        started=_time(benchmark.get("start_time")),
        ended=_time(benchmark.get("end_time")),
        metrics={
            "output_tok_s": mean("output_tokens_per_second"),
            "total_tok_s": mean("tokens_per_second"),
            "requests_s": mean("requests_per_second"),
            "ttft_ms": mean("time_to_first_token_ms"),
            "ttft_p99_ms": at(benchmark, "metrics", "time_to_first_token_ms", "successful", "percentiles", "p99"),
            "itl_ms": mean("inter_token_latency_ms"),
            "e2e_ms": mean("request_latency", 1000.0),
            "prompt_tokens": mean("prompt_token_count"),
            "completion_tokens": mean("output_token_count"),
        },
    )


def _time(value: Any) -> str:
    if not isinstance(value, int | float) or not 0 < value < 1e11:
        return ""
    return datetime.fromtimestamp(value, UTC).isoformat(timespec="seconds")
