"""Boxes side by side as one glance saw them: rows, what needs somebody's attention, as text. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class Unit:
    """A unit of gpuctl's. `state`: active | activating | inactive | failed ...; `since` in epoch seconds."""

    name: str
    state: str
    result: str
    since: float | None
    at_boot: bool


@dataclass(frozen=True)
class Weights:
    """A model of the inventory on a box. `staged`: it is meant to lie in memory; `complete` None: nobody can tell."""

    name: str
    size_bytes: int | None  # None: not there
    staged: bool
    complete: bool | None


@dataclass(frozen=True)
class Gpu:
    index: int
    used_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True)
class Glance:
    """A box. `why`: it did not answer."""

    name: str
    why: str = ""
    started: float | None = None
    now: float = 0.0
    units: tuple[Unit, ...] = ()
    models: tuple[Weights, ...] = ()
    gpus: tuple[Gpu, ...] | None = None  # None: not known
    attention: tuple[str, ...] = ()


@dataclass(frozen=True)
class Campaign:
    """A run folder on this machine that somebody works on, or whose last work broke off."""

    name: str
    folder: str
    running: str  # who, since when; empty: nobody
    doing: str
    cells: int
    failed: int
    quiet_s: float | None  # since its last event


def glance(
    name: str, answer: Mapping[str, Any], models: Mapping[str, tuple[str, bool]], wanted: Collection[str]
) -> Glance:
    """Reads the agent's answer. `models`: path -> its name in the inventory and whether it is staged; `wanted`: names
    of those that servers of this box need.
    """
    attention: list[str] = []
    units = tuple(_units(answer))
    weights = tuple(model for model in _weights(answer, models) if model.name in wanted or model.size_bytes is not None)
    if answer.get("sshd"):
        attention.append(f"seen through its node only, since over SSH: {answer['sshd']}")
    said = answer.get("units")
    if isinstance(said, Mapping):
        attention.append(f"units cannot be seen: {said.get('error')}")
    notes = answer.get("failed") or {}
    for unit in units:
        if unit.state == "failed" or f"{unit.name}.service" in notes:
            since = f" at {notes[f'{unit.name}.service']}" if f"{unit.name}.service" in notes else f": {unit.result}"
            attention.append(f"{unit.name} failed{since}; journalctl -u {unit.name} -b says why")
        elif unit.at_boot and unit.state == "inactive":
            attention.append(f"{unit.name} is meant to run from boot on and does not: systemctl start {unit.name}")
    known = {f"{unit.name}.service" for unit in units}
    attention += [
        f"{unit.removesuffix('.service')} failed at {note}" for unit, note in notes.items() if unit not in known
    ]
    for model in weights:
        if model.name in wanted and not model.staged and model.size_bytes is None:
            attention.append(f"model {model.name} is not there; models.yml says where it should be")
        if model.name in wanted and model.staged and not model.complete:
            state = "is not in memory" if model.size_bytes is None else "is not complete in memory"
            attention.append(f"model {model.name} {state}: gpuctl stage {model.name} -t {name}")
    gpus = answer.get("gpus")
    if isinstance(gpus, Mapping):
        attention.append(f"GPUs cannot be asked: {gpus.get('error')}; gpuctl doctor -t {name}")
    for path, word in (answer.get("nodes") or {}).items():
        if word != "OK":
            attention.append(f"{path} cannot be opened ({word}), so CUDA does not start: gpuctl doctor -t {name}")
    found = gpus if isinstance(gpus, Sequence) else None
    return Glance(
        name,
        started=answer.get("started"),
        now=float(answer.get("now") or 0),
        units=units,
        models=weights,
        gpus=None
        if found is None
        else tuple(Gpu(g["index"], _bytes(g["memory_used_mib"]), _bytes(g["memory_total_mib"])) for g in found),
        attention=tuple(attention),
    )


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib << 20


def _units(answer: Mapping[str, Any]) -> Iterator[Unit]:
    said = answer.get("units")
    for unit in said if isinstance(said, Sequence) else ():
        if "@" not in unit["Id"]:  # gpuctl-failed@ is how notes are written
            yield Unit(
                unit["Id"].removesuffix(".service"),
                unit.get("ActiveState", ""),
                unit.get("Result", ""),
                unit.get("since"),
                unit.get("UnitFileState") == "enabled",
            )


def _weights(answer: Mapping[str, Any], models: Mapping[str, tuple[str, bool]]) -> Iterator[Weights]:
    for path, seen in (answer.get("models") or {}).items():
        name, staged = models.get(path, (path, False))
        size = seen.get("bytes")
        # a staged copy has its manifest last, by which it is known to be whole; nothing says that of one on disk
        complete = (bool(seen.get("manifest")) if staged else None) if size is not None else False
        yield Weights(name, size, staged, complete)


# -- text


def as_text(boxes: Sequence[Glance], campaigns: Sequence[Campaign]) -> str:
    """A table with a row a box, the campaigns, and last what needs attention."""
    rows: list[tuple[str, ...]] = [("BOX", "UP SINCE", "GPU MEMORY", "UNITS", "MODELS")]
    for box in boxes:
        columns = [[box.name], *([[box.why], [], [], []] if box.why else _columns(box))]
        rows += list(itertools.zip_longest(*columns, fillvalue=""))
    unreachable = {box.name for box in boxes if box.why}
    wide = [max(len(row[n]) for row in rows if n == 0 or row[0] not in unreachable) for n in range(4)]
    lines = []
    for row in rows:
        if row[0] in unreachable:
            lines.append(f"{row[0]:<{wide[0]}}  not reachable")
        else:
            lines.append(
                "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, wide, strict=False)), row[4]]).rstrip()
            )
    lines += ["", *map(_campaign, campaigns)] if campaigns else []
    attention = list(attention_of(boxes))
    lines += (
        ["", "needs attention:", *(f"  {line}" for line in attention)] if attention else ["", "nothing needs attention"]
    )
    return "\n".join(lines) + "\n"


def attention_of(boxes: Sequence[Glance]) -> Iterator[str]:
    """All lines, each with its box."""
    for box in boxes:
        if box.why:
            yield box.why if box.why.startswith(f"{box.name}:") else f"{box.name}: {box.why}"
        yield from (f"{box.name}: {line}" for line in box.attention)


def _columns(box: Glance) -> list[list[str]]:
    up = "not known" if box.started is None else f"{_clock(box.started)} ({ago(box.now - box.started)})"
    state = max((len(unit.name) for unit in box.units), default=0)
    units = [f"{unit.name:<{state}}  {_state(unit, box.now)}" for unit in box.units]
    wide = max((len(model.name) for model in box.models), default=0)
    models = [f"{model.name:<{wide}}  {_where(model)}" for model in box.models]
    return [[up], _memory(box.gpus), units or ["none"], models or ["none"]]


def _state(unit: Unit, now: float) -> str:
    if unit.since is None or unit.state not in ("active", "activating", "failed"):
        return unit.state
    return f"{unit.state} {ago(now - unit.since)}"


def _where(model: Weights) -> str:
    if model.size_bytes is None:
        return "not there"
    if model.staged:
        return f"in memory, {gigabytes(model.size_bytes)}" if model.complete else "not complete in memory"
    return gigabytes(model.size_bytes)


def _memory(gpus: Sequence[Gpu] | None) -> list[str]:
    if not gpus:
        return ["not known" if gpus is None else "no GPU"]
    used = [gpu for gpu in gpus if gpu.used_bytes and gpu.total_bytes and gpu.used_bytes > 0.02 * gpu.total_bytes]
    totals = [gpu.total_bytes for gpu in gpus if gpu.total_bytes]
    kind = f"{len(gpus)} x {totals[0] / 2**30:.0f} GiB" if totals and len(set(totals)) == 1 else f"{len(gpus)} GPUs"
    if not used:
        return [f"{kind}, free"]
    parts: dict[str, list[int]] = {}
    for gpu in used:
        parts.setdefault(f"{(gpu.used_bytes or 0) / 2**30:.0f} GiB", []).append(gpu.index)
    return [f"{kind}, {len(used)} used:", *(f"  {ranges(indices)}: {size}" for size, indices in parts.items())]


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> 0-2,5"""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in found)


def _campaign(found: Campaign) -> str:
    quiet = f", last event {ago(found.quiet_s)} ago" if found.quiet_s is not None else ""
    cells = f"{found.cells} cell{'s' * (found.cells != 1)} in it, {found.failed} failed"
    if found.running:
        at = f": {found.doing}" if found.doing else ""
        return f"campaign {found.name}: running ({found.running}){at}; {cells}{quiet}"
    return f"campaign {found.name}: nobody works on it; {cells}{quiet}"


def ago(seconds: float) -> str:
    """45 s, 12 min, 3 h 20 min, 5 d"""
    s = max(0, round(seconds))
    if s < 100:
        return f"{s} s"
    minutes = s // 60
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def _clock(epoch: float) -> str:
    return datetime.fromtimestamp(epoch).astimezone().strftime("%Y-%m-%d %H:%M")


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def doing(events: Sequence[Mapping[str, Any]]) -> str:
    """What a run is at, in words, from its events."""
    for event in reversed(events):
        server = event.get("server")
        match event.get("event"):
            case "server_started":
                return f"{server} is starting"
            case "server_ready":
                return f"{server} is measured"
            case "server_stopped" | "server_died":
                return f"{server} is done, the next one is not started yet"
            case "run_finished" | "run_interrupted":
                return ""
    return ""
