"""vLLM: `vllm serve`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuctl.engines import Identity, Launch, flags, nested, program, served_ids
from gpuctl.flags import arguments

HEALTH = ("/health",)
IDENTITY = ("/v1/models", "/version")
FLUSH = ("POST", "/reset_prefix_cache")
FIXED_LENGTH: Mapping[str, Any] = {"temperature": 0, "ignore_eos": True}
ANY_LENGTH: Mapping[str, Any] = {"temperature": 0}
MULTI_NODE = True
VERSIONS = ("vllm", "flashinfer-python", "torch", "triton", "transformers", "compressed-tensors", "nvidia-nccl-cu12",
            "nvidia-nccl-cu13")  # fmt: skip
PROGRAM = ("vllm",)
PACKAGE = "vllm"
SOURCES = ("config/cache.py",)
FLAGS = ("engine/arg_utils.py", "entrypoints/openai/cli_args.py", "config/*.py")
HELP = (("serve", "--help=all"), ("serve", "--help"))  # older releases know the second only

_WORKERS = ("--data-parallel-size", "--data_parallel_size", "-dp")


def argv(launch: Launch) -> tuple[str, ...]:
    server = launch.server
    given = dict(server.flags)
    speculative = given.get("speculative-config")
    if launch.draft and isinstance(speculative, dict):
        given["speculative-config"] = {"model": launch.draft, **speculative}
    words = list(program(launch, PROGRAM))
    words += [] if words[-1] == "serve" else ["serve"]  # `program` may end with it
    words += [str(launch.model), "--host", server.host, "--port", str(server.port)]
    if launch.ranks > 1:
        address, _, port = str(launch.head).rpartition(":")
        words += ["--nnodes", str(launch.ranks), "--node-rank", str(launch.rank)]
        words += ["--master-addr", address, "--master-port", port]
        if launch.rank:
            words.append("--headless")
    return (*words, *flags(given))


def environment(launch: Launch) -> dict[str, str]:
    # /reset_prefix_cache and /server_info exist only in development mode
    return {"HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}


def requests_at_once(launch: Launch) -> int | None:
    """All data-parallel workers together; None where its own default holds, which it does not tell."""
    given = arguments(argv(launch))
    each = given.whole("--max-num-seqs", "--max_num_seqs")
    return None if each is None else each * (given.whole(*_WORKERS) or 1)


def identity(answers: Mapping[str, Any]) -> Identity:
    entry = nested(answers.get("/v1/models"), "data", 0)
    return Identity(
        models=served_ids(answers.get("/v1/models")),
        model_path=nested(entry, "root"),
        version=nested(answers.get("/version"), "version"),
        context=nested(entry, "max_model_len"),
    )
