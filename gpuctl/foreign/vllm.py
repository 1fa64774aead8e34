"""vllm bench serve (`--save-result`, `--append-result`): JSON, one object a run (vllm 0.33, vllm/benchmarks/serve.py).

Older releases have no `failed`; what is missing of `num_prompts` failed.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from gpuctl.results.imported import Imported, per, text, whole

TOOL = "vllm bench serve"


def recognise(document: Any) -> bool:
    wanted = {"model_id", "tokenizer_id", "num_prompts", "request_rate", "request_throughput"}
    return isinstance(document, dict) and wanted <= set(document)


def runs(document: Any) -> list[Imported]:
    concurrency = whole(document.get("max_concurrency"))
    completed, failed = whole(document.get("completed")), whole(document.get("failed"))
    asked = whole(document.get("num_prompts"))
    if failed is None and completed is not None and asked is not None:
        failed = max(0, asked - completed)
    return [
        Imported(
            model=text(document.get("model_id")),
            concurrency=concurrency,
            load="" if concurrency is not None else f"rate {document.get('request_rate')}",
            completed=completed,
            failed=failed,
            started=_date(document.get("date")),
            ended=_date(document.get("date")),
            metrics={
                "output_tok_s": document.get("output_throughput"),
                "total_tok_s": document.get("total_token_throughput"),
                "requests_s": document.get("request_throughput"),
                "ttft_ms": document.get("mean_ttft_ms"),
                "ttft_p99_ms": document.get("p99_ttft_ms"),
                "tpot_ms": document.get("mean_tpot_ms"),
                "itl_ms": document.get("mean_itl_ms"),
                "e2e_ms": document.get("mean_e2el_ms"),
                "prompt_tokens": per(document.get("total_input_tokens"), completed),
                "completion_tokens": per(document.get("total_output_tokens"), completed),
                "acceptance_length": document.get("spec_decode_acceptance_length"),
            },
            # Under speculation a chunk has several tokens: its ITL is per chunk, and longer than per token.
            notes=("vllm bench serve gives the inter-token latency per chunk",)
            if document.get("spec_decode_acceptance_length")
            else (),
        )
    ]


def _date(value: Any) -> str:
    try:
        return datetime.strptime(text(value), "%Y%m%d-%H%M%S").isoformat()
    except ValueError:
        return ""
