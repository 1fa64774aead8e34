"""Programs that serve a model: one package an engine; its name is the id. Pure.

An engine has
    argv(launch)         the command line, argument by argument
    environment(launch)  variables it needs beyond the user's
    HEALTH               paths of which the first one it knows answers 200 when it can generate
    IDENTITY             paths asked once it is ready, and identity(answers): who is answering
    requests_at_once(launch)  how many its flags let run at once, where its answers do not tell it; may be left out
    FLUSH                (method, path) that empties its prefix cache, or None
    FIXED_LENGTH         body fields that make an answer exactly max_tokens long; ANY_LENGTH where it may end
    MULTI_NODE           true where one server can run over several machines (Launch.ranks); may be left out
    on_processor(flags)  whether a server with these flags uses no GPU; may be left out: it uses one
    VERSIONS             Python packages whose version can change a number
and, where its memory can be planned (memory.py beside it: plan(question), doubt(question); NUMBERS and WORDS, what the
flags that it reads take; read(argv) where flags.arguments does not read them all;
and flags.txt, names of flags of its releases):
    PROGRAM              the words that start it, unless a server has its own
    PACKAGE              the Python package it is, or None: PROGRAM is a binary
    SOURCES, FLAGS       files of that package whose text the plan reads; and those that define its flags (patterns)
    HELP                 what is said behind the program to get all its flags, the newest form first
What its log means lies beside it, too (log.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from gpuctl import nccl
from gpuctl.config import Server


@dataclass(frozen=True)
class Launch:
    """One server on one machine: names replaced by paths. `rank` counts the machines of a multi-node server."""

    name: str
    server: Server
    model: str | None = None  # path on the machine
    draft: str | None = None
    python: str = "python3"  # what {python} stands for in `program`
    rank: int = 0
    ranks: int = 1
    head: str | None = None  # host:port where the ranks meet

    @property
    def base_url(self) -> str:
        if self.server.url:
            return self.server.url.rstrip("/").removesuffix("/v1")  # as clients of OpenAI's are given it
        host = "127.0.0.1" if self.server.host in {"0.0.0.0", "::"} else self.server.host  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server.port}"


@dataclass(frozen=True)
class Identity:
    """Who answers. None where the engine does not say."""

    models: tuple[str, ...] = ()  # ids it serves
    model_path: str | None = None
    version: str | None = None
    context: int | None = None  # tokens, prompt and answer together
    requests_at_once: int | None = None
    kv_tokens: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # what else is worth keeping with a result


def flags(values: Mapping[str, Any], *, dash: str = "--") -> tuple[str, ...]:
    """{"tp-size": 4, "trust-remote-code": true, "off": false, "cuda-graph-bs": [1, 2]} as arguments, in order.

    true is the bare flag, false and null leave it out, a list follows its flag, a mapping becomes JSON.
    """
    words: list[str] = []
    for key, value in values.items():
        if value is None or value is False:
            continue
        words.append(key if key.startswith("-") else f"{dash}{key}")
        if value is True:
            continue
        if isinstance(value, Mapping):
            words.append(json.dumps(value, separators=(",", ":")))
        elif isinstance(value, list):
            words += [str(item) for item in value]
        else:
            words.append(str(value))
    return tuple(words)


def environment(engine: ModuleType, launch: Launch) -> dict[str, str]:
    """All variables of a server: its NCCL profile's, what the engine needs, and the user's own, which win."""
    own = {
        key: "1" if value is True else "0" if value is False else str(value) for key, value in launch.server.env.items()
    }
    return {**nccl.environment(launch.server.nccl), **engine.environment(launch), **own}


def program(launch: Launch, default: Iterable[str]) -> tuple[str, ...]:
    """The words that start the engine, with {python} filled in."""
    return tuple(word.replace("{python}", launch.python) for word in launch.server.program or default)


def nested(answer: Any, *keys: str | int) -> Any:
    """answer[k1][k2]... or None where the way ends."""
    for key in keys:
        try:
            answer = answer[key]
        except (KeyError, IndexError, TypeError):
            return None
    return answer


def served_ids(models: Any) -> tuple[str, ...]:
    """Ids of an OpenAI-compatible /v1/models answer."""
    data = nested(models, "data")
    return tuple(str(nested(entry, "id")) for entry in data) if isinstance(data, list) else ()
