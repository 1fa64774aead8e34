"""llama.cpp's llama-server (flags and endpoints: its tools/server/README.md). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuctl.engines import Identity, Launch, flags, nested, program, served_ids

HEALTH = ("/health",)
IDENTITY = ("/props", "/v1/models")
FLUSH = None  # cache_prompt: false leaves nothing to empty
# The server's own defaults are temperature 0.8 and cache_prompt true.
FIXED_LENGTH: Mapping[str, Any] = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
ANY_LENGTH: Mapping[str, Any] = {"temperature": 0, "cache_prompt": False}
VERSIONS = ("xllamacpp",)
PROGRAM = ("llama-server",)
PACKAGE = None  # one binary
SOURCES = FLAGS = ()
HELP = (("--help",),)


def argv(launch: Launch) -> tuple[str, ...]:
    server = launch.server
    words = [*program(launch, PROGRAM), "--model", str(launch.model)]
    if launch.draft:
        words += ["--model-draft", launch.draft]
    return (*words, "--host", server.host, "--port", str(server.port), *flags(server.flags))


def on_processor(flags: Mapping[str, Any]) -> bool:
    layers = (flags.get(name) for name in ("gpu-layers", "n-gpu-layers", "ngl"))
    return flags.get("device") == "none" or any(str(one) == "0" for one in layers)


def environment(launch: Launch) -> dict[str, str]:
    return {}


def identity(answers: Mapping[str, Any]) -> Identity:
    props = answers.get("/props")
    settings = nested(props, "default_generation_settings")
    return Identity(
        models=served_ids(answers.get("/v1/models")),
        model_path=nested(props, "model_path"),
        version=nested(props, "build_info"),
        # n_ctx of one slot: --fit may have made it smaller than what was asked
        context=nested(settings, "n_ctx"),
        requests_at_once=nested(props, "total_slots"),
    )
