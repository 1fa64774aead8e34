"""What planning knows of a machine: asked now, remembered from the last time, or stated in the inventory.

What a machine told is kept under $XDG_CACHE_HOME/gpuctl: `machines/` one file a machine, `flags/` the --help of each
installed version of an engine, named by the digest of the files that define its flags. So a plan works without the
machine, and an engine that takes half a minute to print its flags is asked once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from gpuctl import plugins
from gpuctl.config import Inventory
from gpuctl.engines import Launch, environment, program
from gpuctl.store import StoreError, now, write
from gpuctl.transport import Transport, TransportError, agent

ASK_S, HELP_S = 120, 600  # seconds
_SCHEMA = "gpuctl.capacity/1"


class NotAnswered(TransportError):
    """The machine ran something else than asked, or cannot run Python. One line."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as it was told or stated. Sizes are MiB, as nvidia-smi counts."""

    name: str
    total_mib: int
    free_mib: int | None = None
    bus_bits: int | None = None
    memory_mhz: float | None = None


@dataclass(frozen=True)
class Known:
    """What there is to plan from. `answer` is agent/capacity.py's, {} where the machine has never been asked."""

    machine: str
    basis: str  # for people: asked now | remembered from ... | stated in the inventory
    answer: Mapping[str, Any] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] | None = None  # None: not known; (): there are none
    stated: Mapping[str, str] = field(default_factory=dict)  # model name -> text of the config.json in the inventory
    help: Mapping[str, str] = field(default_factory=dict)  # digest -> help text
    asked: bool = False

    def engine(self, launch: Launch, engine: ModuleType) -> Mapping[str, Any]:
        """What is installed where that server runs; {} where it is not known."""
        wanted = _asking(launch, engine)
        for found in self.answer.get("engines") or ():
            if wanted is not None and all(found.get(key) == wanted.get(key) for key in ("python", "program", "path")):
                return dict(found)
        return {}

    def help_of(self, launch: Launch, engine: ModuleType) -> str:
        return self.help.get(str(self.engine(launch, engine).get("digest")), "")

    def missing(self, launch: Launch, engine: ModuleType) -> str:
        """The program that a server cannot be started without, where the machine said now that it is not there."""
        gone = self.asked and not launch.server.url and self.engine(launch, engine).get("missing")
        return words_of(launch, engine)[0] if gone else ""


# What is asked


def job(launches: Sequence[tuple[Launch, ModuleType]]) -> dict[str, Any]:
    """The job for agent/capacity.py, but for help texts: those are asked once it is known which are missing."""
    models = sorted({path for launch, _ in launches for path in (launch.model, launch.draft) if path})
    engines: list[dict[str, Any]] = []
    for launch, engine in launches:
        wanted = _asking(launch, engine)
        if wanted is not None and wanted not in engines:
            engines.append(wanted)
    return {"models": models, "engines": engines, "space": models}


def words_of(launch: Launch, engine: ModuleType) -> tuple[str, ...]:
    """The words that start an engine, before its flags."""
    return program(launch, getattr(engine, "PROGRAM", ()))


def _asking(launch: Launch, engine: ModuleType) -> dict[str, Any] | None:
    words = words_of(launch, engine)
    if not words:
        return None
    path = environment(engine, launch).get("PATH")
    if engine.PACKAGE is None:
        return {"python": None, "program": list(words), "path": path}
    first = Path(words[0])
    python = words[0] if "python" in first.name else str(first.with_name("python3")) if first.parent.name else "python3"
    return {"python": python, "program": list(words), "path": path, "package": engine.PACKAGE,
            "files": list(engine.SOURCES), "flags": list(engine.FLAGS)}  # fmt: skip


def ask(
    transport: Transport,
    launches: Sequence[tuple[Launch, ModuleType]],
    machine: str,
    inventory: Path,
    *,
    python: str = "python3",
    tell: Callable[[str], None] = lambda _words: None,
    flags: bool = True,
) -> Known:
    """Asks the machine, and remembers what it told. Raises TransportError."""
    answer = _run(transport, job(launches), python, ASK_S)
    helps: dict[str, str] = {}
    missing: dict[str, list[list[str]]] = {}
    for launch, engine in launches:
        found = _installed(answer, launch, engine)
        key = str(found.get("digest") or "")
        if not key or not flags or key in helps or key in missing:
            continue
        text = recalled_help(engine, key)
        if text:
            helps[key] = text
        else:
            words = words_of(launch, engine)  # may end with the word of the engine that HELP begins with
            missing[key] = [[*words, *(more[1:] if words[-1:] == more[:1] else more)] for more in engine.HELP]
    if missing:
        tell(
            f"asking {machine} for the flags of {len(missing)} installed version{'s' if len(missing) > 1 else ''}, once"
        )
        said = _run(transport, {"help": missing}, python, HELP_S)["help"]
        for launch, engine in launches:
            found = _installed(answer, launch, engine)
            key = str(found.get("digest") or "")
            told = (said.get(key) or {}).get("text")
            if told and key not in helps:
                helps[key] = told
                _keep(_flags_file(engine, key), told.encode())
    kept = {"schema": _SCHEMA, "machine": machine, "asked": now(), "answer": answer}
    _keep(_machine_file(inventory, machine), json.dumps(kept).encode())
    return Known(machine, "asked now", answer, _gpus(answer), help=helps, asked=True)


def _installed(answer: Mapping[str, Any], launch: Launch, engine: ModuleType) -> Mapping[str, Any]:
    words = list(words_of(launch, engine))
    return next((dict(one) for one in answer["engines"] if one.get("program") == words), {})


def _run(transport: Transport, wanted: Mapping[str, Any], python: str, timeout: float) -> dict[str, Any]:
    command, stdin = agent("capacity", wanted, python=python)
    done = transport.run(command, stdin=stdin, timeout=timeout)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or "gpus" not in answer:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise NotAnswered(f"{transport.name}: {said[-1] if said else f'exit status {done.rc}'}")
    return answer


def _gpus(answer: Mapping[str, Any]) -> tuple[Gpu, ...]:
    found = []
    for gpu in answer.get("gpus") or ():
        try:
            free = str(gpu.get("free_mib"))
            clock = str(gpu.get("memory_mhz"))
            found.append(
                Gpu(
                    str(gpu["name"]),
                    int(gpu["total_mib"]),
                    int(free) if free.isdigit() else None,
                    gpu.get("bus_bits"),
                    float(clock) if re.fullmatch(r"\d+(\.\d+)?", clock) else None,
                )
            )
        except (KeyError, TypeError, ValueError):
            continue  # a GPU that has fallen off the bus tells no size
    return tuple(found)


# What is remembered


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuctl"


def _machine_file(inventory: Path, machine: str) -> Path:
    """Two inventories may have a machine of one name."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", machine)
    return cache() / "machines" / f"{name}-{digest(str(inventory.resolve()))[:8]}.json"


def _flags_file(engine: ModuleType, key: str) -> Path:
    return cache() / "flags" / f"{engine.__name__.rpartition('.')[2]}-{key}.txt"


def _keep(path: Path, data: bytes) -> None:
    """What cannot be remembered is asked again the next time."""
    try:
        write(path, data, make_folder=True)
    except StoreError:
        pass


def recalled_help(engine: ModuleType, key: str) -> str:
    try:
        return _flags_file(engine, key).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def recall(machine: str, inventory: Path, launches: Sequence[tuple[Launch, ModuleType]]) -> Known | None:
    """What the machine told the last time; None where it never did."""
    try:
        kept = json.loads(_machine_file(inventory, machine).read_bytes())
        if kept["schema"] != _SCHEMA or not isinstance(kept["answer"], dict):
            return None
        answer, when = kept["answer"], str(kept["asked"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    known = Known(machine, f"remembered from {when}", answer, _gpus(answer))
    helps = {}
    for launch, engine in launches:
        key = str(known.engine(launch, engine).get("digest") or "")
        if key and (text := recalled_help(engine, key)):
            helps[key] = text
    return replace(known, help=helps)


# What is stated


def state(known: Known | None, inventory: Inventory, machine: str, variables: Mapping[str, Any]) -> Known:
    """Adds what the inventory states to what is known: GPUs of the machine, and config.json files of models.

    `variables`: the machine's in hosts.yml, of which `gpuctl_gpus: {count, name, memory_mib}` is used where the machine
    was never asked; hosts.py has checked it. Raises ValueError for a config.json that cannot be read.
    """
    known = known or Known(machine, "stated in the inventory")
    texts = {}
    for name, model in inventory.models.items():
        if model.config is not None:
            try:
                texts[name] = (inventory.folder / model.config).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or "not UTF-8 text"
                raise ValueError(f"{inventory.folder / model.config}: {why} (models.yml: {name}: config)") from None
    gpus = known.gpus
    if not known.answer and (told := variables.get("gpuctl_gpus")) is not None:
        gpus = (Gpu(str(told["name"]), int(told["memory_mib"])),) * int(told["count"])
    return replace(known, gpus=gpus, stated=texts)


def engines_of(launches: Sequence[Launch]) -> list[tuple[Launch, ModuleType]]:
    """Each with its engine, for those whose memory can be planned."""
    found = []
    for launch in launches:
        engine = plugins.get("engines", launch.server.engine)
        if hasattr(engine, "PROGRAM"):
            found.append((launch, engine))
    return found


def without_sources(known: Known) -> Known:
    """As if nothing were installed: to plan for a version that is not."""
    return replace(known, answer={**known.answer, "engines": []}, help={})


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
