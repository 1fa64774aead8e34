"""Cells of a phase, what their results depend on, and which are still to be measured. Pure."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from gpuctl.config import ConfigError, PhasePlan
from gpuctl.records import MEASURED, CellId, Record, State

# Causes that have to do with the moment and not with the configuration: tried again without being asked.
PASSING = frozenset(
    {"interrupted", "machine_away", "no_model", "no_room", "port_in_use", "unreachable", "rebooted", "refused"}
)


@dataclass(frozen=True)
class Point:
    """One cell of a server: its name, how many requests at once, and what is asked."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int = 1
    prompt_tokens: int | None = None  # wanted length, checked against usage; None: as the prompt comes
    max_tokens: int = 256
    chat: bool = False
    exact_length: bool = True  # the answer must have max_tokens tokens (end-of-sequence is ignored)


@dataclass(frozen=True)
class Cell:
    """One server under one point of one workload."""

    id: CellId
    point: Point
    reps: int
    requests: Callable[[Point, int, int], list[dict[str, Any]]]  # (point, repetition, words) -> what is asked

    def definition(self) -> dict[str, Any]:
        """What the workload's part of the fingerprint is made of: the texts themselves, and how often."""
        asked = json.dumps(self.requests(self.point, 0, self.point.prompt_tokens or 0), sort_keys=True)
        return {
            "parameters": dict(self.point.parameters),
            "concurrency": self.point.concurrency,
            "repetitions": self.reps,
            "requests": hashlib.sha256(asked.encode()).hexdigest()[:16],
        }


def of_phase(plan: PhasePlan, workload: Callable[[str], ModuleType], only: Iterable[str] = ()) -> dict[str, list[Cell]]:
    """Cells by server, in the order in which they are measured. `only`: patterns of server or server/workload/point.

    Raises ConfigError when two workloads of a phase name the same cell.
    """
    patterns = tuple(only)
    result: dict[str, list[Cell]] = {}
    for server in plan.servers:
        seen: dict[CellId, Point] = {}
        for use in plan.workloads:
            if server not in use.servers:
                continue
            module = workload(use.workload)
            for point in module.points(module.Parameters(**use.parameters)):
                name = CellId(plan.name, server, use.workload, point.name)
                if name in seen:
                    if seen[name] == point:
                        continue
                    raise ConfigError(
                        [f"phases.yml: {plan.name}: two different cells are named {server}/{use.workload}/{point.name}"]
                    )
                seen[name] = point
                short = f"{server}/{use.workload}/{point.name}"
                if not patterns or any(
                    fnmatch.fnmatchcase(server, p) or fnmatch.fnmatchcase(short, p) for p in patterns
                ):
                    result.setdefault(server, []).append(Cell(name, point, plan.reps, module.requests))
    return result


def fingerprint_id(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key in value:
            yield from _flat(value[key], f"{path} {key}".strip())
    else:
        yield path, value


def differences(before: Mapping[str, Any], now: Mapping[str, Any], limit: int = 4) -> str:
    """What differs between two fingerprints, in words: "driver 580.1 -> 595.7, engine sglang 0.5.11 -> 0.5.16"."""
    # what went through a JSON file is compared with what would come back from one
    old, new = dict(_flat(before)), dict(_flat(json.loads(json.dumps(now))))
    said = []
    for path in [*old, *(p for p in new if p not in old)]:
        a, b = old.get(path), new.get(path)
        if a == b:
            continue
        if isinstance(a, list) and isinstance(b, list):
            gone = [str(x) for x in a if x not in b]
            come = [str(x) for x in b if x not in a]
            words = (["without", *gone] if gone else []) + (["with", *come] if come else [])
            said.append(" ".join([path, *(words or ["in another order"])]))
        else:
            said.append(f"{path} {_word(a)} -> {_word(b)}")
    more = f", and {len(said) - limit} more" if len(said) > limit else ""
    return ", ".join(said[:limit]) + more


def _word(value: Any) -> str:
    text = "nothing" if value in (None, "", {}, []) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Decision:
    """Whether a cell is measured now, and why (or why not) in words."""

    measure: bool
    why: str


def decide(
    record: Record | None, parts: Mapping[str, Any], *, fresh: bool = False, retry_failed: bool = False
) -> Decision:
    """A cell is left out only when its result is there and all that could change it is as it was."""
    if record is None:
        return Decision(True, "not measured yet")
    if fresh:
        return Decision(True, "asked for afresh")
    if record.fingerprint_id != fingerprint_id(parts):
        return Decision(True, f"measured under other conditions: {differences(record.fingerprint, parts)}")
    if record.state in MEASURED:
        return Decision(False, f"measured {record.ended}, nothing has changed")
    kind = record.failure.kind if record.failure else "unknown"
    if record.state is State.SKIPPED or kind in PASSING:
        return Decision(True, f"was {record.state.value}: {record.failure.summary if record.failure else 'not tried'}")
    if retry_failed:
        return Decision(True, "failed before, asked for again")
    return Decision(False, f"failed: {record.failure.summary if record.failure else 'no cause kept'}")
