"""What was measured, as it is kept: one record a cell. Pure: reading and writing files is store.py's.

A cell is the smallest thing that is measured, saved, skipped and repeated: one server under one workload
point. A record of a cell that did not work carries its cause and never a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

SCHEMA = "gpuctl.cell/1"


class CellId(NamedTuple):
    """Names a cell, and its file: cells/<phase>/<server>/<workload>/<point>.json."""

    phase: str
    server: str
    workload: str
    point: str

    def __str__(self) -> str:
        return "/".join(self)


class State(StrEnum):
    OK = "ok"
    FAILED = "failed"  # has a failure, no metrics
    SKIPPED = "skipped"  # not tried, with the reason (the server never came up)
    CAPACITY_LIMITED = "capacity_limited"  # measured, but the server ran fewer requests at once than asked
    UNSTABLE = "unstable"  # measured, but the repetitions differ too much


MEASURED = frozenset({State.OK, State.CAPACITY_LIMITED, State.UNSTABLE})


@dataclass(frozen=True)
class Failure:
    """Why a cell has no number. `kind` is a stable word; `exit` is the server's, where it died."""

    kind: str  # server_died | start_failed | http_error | timeout | wrong_answer | wrong_identity | interrupted | ...
    summary: str
    evidence: tuple[str, ...] = ()
    advice: str = ""
    exit_status: int | None = None
    signal: str | None = None
    finding: Mapping[str, Any] | None = None  # the log's diagnosis (Finding.as_json), where there is one


@dataclass(frozen=True)
class Estimate:
    """A metric over the repetitions. `ci95` is the half-width of the 95 % interval (Student's t), None for n = 1."""

    mean: float
    sd: float | None
    ci95: float | None
    n: int
    unit: str


@dataclass(frozen=True)
class Record:
    cell: CellId
    state: State
    started: str  # ISO 8601, UTC
    ended: str
    fingerprint: Mapping[str, Any]  # part -> value, everything that could change the number
    fingerprint_id: str
    boot: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Estimate] = field(default_factory=dict)
    reps: tuple[Mapping[str, Any], ...] = ()  # per repetition: metrics by name, requests, failed, wall_s
    failure: Failure | None = None
    server: Mapping[str, Any] = field(default_factory=dict)  # identity, capacity facts, log
    generator: Mapping[str, Any] = field(default_factory=dict)  # lag, ceiling and load kept of load.py
    notes: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of the point: concurrency, max_tokens, prompt ...

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "cell": self.cell._asdict(),
            "state": self.state.value,
            "started": self.started,
            "ended": self.ended,
            "parameters": dict(self.parameters),
            "metrics": {
                name: {"mean": e.mean, "sd": e.sd, "ci95": e.ci95, "n": e.n, "unit": e.unit}
                for name, e in self.metrics.items()
            },
            "reps": [dict(rep) for rep in self.reps],
            "failure": None
            if self.failure is None
            else {
                "kind": self.failure.kind,
                "summary": self.failure.summary,
                "evidence": list(self.failure.evidence),
                "advice": self.failure.advice,
                "exit_status": self.failure.exit_status,
                "signal": self.failure.signal,
                "finding": self.failure.finding,
            },
            "notes": list(self.notes),
            "server": dict(self.server),
            "generator": dict(self.generator),
            "boot": dict(self.boot),
            "fingerprint_id": self.fingerprint_id,
            "fingerprint": dict(self.fingerprint),
        }


class NotARecord(ValueError):
    """The document is not a cell record; the message says what is wrong with it."""


def from_json(document: Any) -> Record:
    """Reads what `Record.as_json` wrote. Raises NotARecord."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise NotARecord(f"no {SCHEMA} record")
    try:
        failure = document["failure"]
        return Record(
            cell=CellId(**document["cell"]),
            state=State(document["state"]),
            started=document["started"],
            ended=document["ended"],
            parameters=document.get("parameters", {}),
            metrics={name: Estimate(**e) for name, e in document["metrics"].items()},
            reps=tuple(document["reps"]),
            failure=None if failure is None else Failure(**{**failure, "evidence": tuple(failure["evidence"])}),
            notes=tuple(document.get("notes", ())),
            server=document.get("server", {}),
            generator=document.get("generator", {}),
            boot=document.get("boot", {}),
            fingerprint_id=document["fingerprint_id"],
            fingerprint=document["fingerprint"],
        )
    except KeyError as error:
        raise NotARecord(f"has no {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise NotARecord(f"{type(error).__name__}: {error}") from error


# Student's t, two-sided 95 %, by degrees of freedom 1..30; beyond that 1.96 + 2.5/degrees is within 0.1 %.
# fmt: off
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
# fmt: on


def t95(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t (any table of the distribution)."""
    return _T95[degrees - 1] if degrees <= len(_T95) else 1.96 + 2.5 / degrees


def estimate(values: Sequence[float], unit: str) -> Estimate:
    """Mean, sample standard deviation and half-width of the 95 % interval. Needs at least one value."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, None, 1, unit)
    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return Estimate(mean, sd, t95(n - 1) * sd / math.sqrt(n), n, unit)
