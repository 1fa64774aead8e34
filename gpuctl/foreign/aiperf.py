"""aiperf (profile_export_aiperf.json): a JSON document a run, a metric a key (aiperf 0.13, exporters/)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuctl.results.imported import Imported, at, text, whole

TOOL = "aiperf"

# unit in the file -> factor to ours
_FACTORS: Mapping[str, float] = {
    "ms": 1.0,
    "sec": 1000.0,
    "s": 1000.0,
    "us": 1e-3,
    "ns": 1e-6,
    "tokens": 1.0,
    "tokens/sec": 1.0,
    "tokens/sec/user": 1.0,
    "requests/sec": 1.0,
    "requests": 1.0,
}


def recognise(document: Any) -> bool:
    return isinstance(document, dict) and "input_config" in document and "request_throughput" in document


def runs(document: Any) -> list[Imported]:
    config = document["input_config"]
    phases = at(config, "phases")
    concurrency = next(
        (
            count
            for phase in (phases if isinstance(phases, list) else [])
            if at(phase, "kind") != "warmup" and (count := whole(at(phase, "concurrency"))) is not None
        ),
        whole(at(config, "loadgen", "concurrency")),  # aiperf before 0.10
    )
    models = at(config, "models", "items")
    model = at(models[0], "name") if isinstance(models, list) and models else None
    names = at(config, "endpoint", "model_names")
    if model is None and isinstance(names, list) and names:
        model = names[0]

    def figure(name: str, statistic: str = "avg") -> float | None:
        value, unit = at(document, name, statistic), at(document, name, "unit")
        factor = _FACTORS.get(unit) if isinstance(unit, str) else None
        return value * factor if factor is not None and isinstance(value, int | float) else None

    failed = figure("error_request_count")
    completed = figure("request_count")
    notes = ("the run was cancelled",) if document.get("was_cancelled") is True else ()
    return [
        Imported(
            model=text(model),
            concurrency=concurrency,
            load="" if concurrency is not None else "all",
            completed=None if completed is None else round(completed),
            failed=None if failed is None else round(failed),
            started=text(document.get("start_time")),
            ended=text(document.get("end_time")),
            metrics={
                "output_tok_s": figure("output_token_throughput"),
                "total_tok_s": figure("total_token_throughput"),
                "decode_tok_s": figure("output_token_throughput_per_user"),
                "requests_s": figure("request_throughput"),
                "ttft_ms": figure("time_to_first_token"),
                "ttft_p99_ms": figure("time_to_first_token", "p99"),
                "tpot_ms": figure("inter_token_latency"),
                "e2e_ms": figure("request_latency"),
                "prompt_tokens": figure("input_sequence_length"),
                "completion_tokens": figure("output_sequence_length"),
            },
            notes=notes,
        )
    ]
