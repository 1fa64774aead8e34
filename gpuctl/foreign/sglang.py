"""sglang.bench_serving (`--output-file`): JSON lines, one a run (sglang 0.5.16, sglang/bench_serving.py)."""

from __future__ import annotations

from typing import Any

from gpuctl.results.imported import Imported, at, per, text, whole

TOOL = "sglang.bench_serving"


def recognise(document: Any) -> bool:
    return isinstance(document, dict) and {"backend", "max_concurrency", "mean_e2e_latency_ms"} <= set(document)


def runs(document: Any) -> list[Imported]:
    lengths = ""
    if document.get("dataset_name") == "random":
        lengths = f"{document.get('random_input_len')}/{document.get('random_output_len')}"
    notes: tuple[str, ...] = ()
    if text(document.get("backend")).endswith("-oai"):
        notes = ("sglang.bench_serving counts the tokens asked for, not those made, where the server sends no usage",)
    concurrency = whole(document.get("max_concurrency"))
    completed = document.get("completed")
    return [
        Imported(
            model=text(at(document, "server_info", "served_model_name") or at(document, "server_info", "model_path")),
            concurrency=concurrency,
            load="" if concurrency is not None else f"rate {document.get('request_rate')}",
            lengths=lengths,
            completed=whole(completed),
            metrics={
                "output_tok_s": document.get("output_throughput"),
                "total_tok_s": document.get("total_throughput"),
                "requests_s": document.get("request_throughput"),
                "ttft_ms": document.get("mean_ttft_ms"),
                "ttft_p99_ms": document.get("p99_ttft_ms"),
                "tpot_ms": document.get("mean_tpot_ms"),
                "itl_ms": document.get("mean_itl_ms"),
                "e2e_ms": document.get("mean_e2e_latency_ms"),
                "prompt_tokens": per(document.get("total_input_tokens"), completed),
                "completion_tokens": per(document.get("total_output_tokens"), completed),
                "acceptance_length": document.get("accept_length"),
            },
            notes=notes,
        )
    ]
