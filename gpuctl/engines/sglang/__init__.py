"""SGLang: `python -m sglang.launch_server`. Pure.

Endpoints as in srt/entrypoints/http_server.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuctl.engines import Identity, Launch, flags, nested, program, served_ids

HEALTH = ("/health_generate", "/health")
IDENTITY = ("/server_info", "/get_server_info", "/v1/models")
FLUSH = ("POST", "/flush_cache")
FIXED_LENGTH: Mapping[str, Any] = {"temperature": 0, "ignore_eos": True}
ANY_LENGTH: Mapping[str, Any] = {"temperature": 0}
MULTI_NODE = True
VERSIONS = ("sglang", "sglang-kernel", "sgl-kernel", "flashinfer-python", "torch", "triton", "transformers",
            "compressed-tensors", "nvidia-nccl-cu12", "nvidia-nccl-cu13")  # fmt: skip
PROGRAM = ("{python}", "-m", "sglang.launch_server")
PACKAGE = "sglang"
SOURCES = ("srt/model_executor/model_runner_kv_cache_mixin.py", "srt/mem_cache/kv_cache_configurator.py")
FLAGS = ("srt/server_args.py", "srt/arg_groups/*.py", "srt/arg_groups/fields/*.py")
HELP = (("--help",),)


def argv(launch: Launch) -> tuple[str, ...]:
    server = launch.server
    words = [*program(launch, PROGRAM), "--model-path", str(launch.model)]
    if launch.draft:
        words += ["--speculative-draft-model-path", launch.draft]
    if launch.ranks > 1:
        words += ["--nnodes", str(launch.ranks), "--node-rank", str(launch.rank), "--dist-init-addr", str(launch.head)]
    return (*words, "--host", server.host, "--port", str(server.port), *flags(server.flags))


def environment(launch: Launch) -> dict[str, str]:
    # SPT_NOENV: its processes keep their environment when they give themselves a title; they are found by it
    return {"HF_HUB_OFFLINE": "1", "SPT_NOENV": "1"}


def identity(answers: Mapping[str, Any]) -> Identity:
    info = answers.get("/server_info") or answers.get("/get_server_info")
    inside = nested(info, "internal_states", 0)
    entry = nested(answers.get("/v1/models"), "data", 0)
    return Identity(
        models=served_ids(answers.get("/v1/models")),
        model_path=nested(info, "model_path"),
        version=nested(info, "version"),
        context=nested(entry, "max_model_len") or nested(info, "context_length"),
        requests_at_once=_of_all(info, nested(inside, "effective_max_running_requests_per_dp"))
        or nested(info, "max_running_requests"),
        kv_tokens=_of_all(
            info, nested(inside, "memory_usage", "token_capacity") or nested(info, "max_total_num_tokens")
        ),
        facts={"memory_usage": nested(inside, "memory_usage"), "startup_time": nested(info, "startup_time")},
    )


def _of_all(info: Any, of_one: Any) -> int | None:
    """What all data-parallel workers have together: each says what it has itself, and all have the same."""
    workers = nested(info, "dp_size")
    many = workers if isinstance(workers, int) and workers > 1 else 1
    return of_one * many if isinstance(of_one, int) else None
