"""A server that somebody else runs: a base URL, nothing deployed, nothing stopped. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuctl.engines import Identity, Launch, nested, served_ids

HEALTH = ("/health", "/v1/models")
IDENTITY = ("/v1/models", "/version", "/server_info", "/get_server_info", "/props")
FLUSH = None
FIXED_LENGTH: Mapping[str, Any] = {"temperature": 0, "ignore_eos": True}
ANY_LENGTH: Mapping[str, Any] = {"temperature": 0}
VERSIONS: tuple[str, ...] = ()


def argv(launch: Launch) -> tuple[str, ...]:
    return ()


def environment(launch: Launch) -> dict[str, str]:
    return {}


def identity(answers: Mapping[str, Any]) -> Identity:
    sglang = answers.get("/server_info") or answers.get("/get_server_info")
    version = nested(answers.get("/version"), "version") or nested(sglang, "version")
    entry = nested(answers.get("/v1/models"), "data", 0)
    return Identity(
        models=served_ids(answers.get("/v1/models")),
        model_path=nested(sglang, "model_path") or nested(answers.get("/props"), "model_path"),
        version=version or nested(answers.get("/props"), "build_info"),
        context=nested(entry, "max_model_len"),
    )
