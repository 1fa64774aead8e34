"""What another tool measured, as records of our kind: foreign, without fingerprint, never compared. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuctl.records import CellId, Failure, Record, State, estimate

# The metrics an import may have, with their units; the tools' own definitions are close, not equal, to ours.
UNITS: Mapping[str, str] = {
    "output_tok_s": "tok/s",
    "total_tok_s": "tok/s",
    "decode_tok_s": "tok/s",
    "requests_s": "1/s",
    "ttft_ms": "ms",
    "ttft_p99_ms": "ms",
    "tpot_ms": "ms",
    "itl_ms": "ms",
    "e2e_ms": "ms",
    "prompt_tokens": "tokens",
    "completion_tokens": "tokens",
    "acceptance_length": "tokens",
}


@dataclass(frozen=True)
class Imported:
    """One run of another tool at one load. `metrics` by our names; what is None or no number is left out."""

    model: str
    metrics: Mapping[str, Any]
    concurrency: int | None = None  # None: the load was not a number of streams
    load: str = ""  # what it was instead: `rate 4`, `sweep` ...
    lengths: str = ""  # what was asked: `256/64`
    completed: int | None = None
    failed: int | None = None
    started: str = ""
    ended: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)


def records(tool: str, runs: Iterable[Imported]) -> list[Record]:
    """The runs as records of a phase named after the tool. Runs of the same point are repetitions of one cell."""
    points: dict[CellId, list[Imported]] = {}
    for run in runs:
        model = run.model.rstrip("/").rpartition("/")[2] or "server"
        server = f"{model} {run.lengths}".strip()
        point = f"c{run.concurrency}" if run.concurrency is not None else run.load or "all"
        workload = "concurrency" if run.concurrency is not None else "load"
        points.setdefault(CellId(tool, server, workload, point), []).append(run)
    return [_record(cell, several) for cell, several in points.items()]


def _record(cell: CellId, runs: list[Imported]) -> Record:
    names = [name for name in UNITS if all(_number(run.metrics.get(name)) is not None for run in runs)]
    values = {name: [v for run in runs if (v := _number(run.metrics.get(name))) is not None] for name in names}
    failed = sum(run.failed or 0 for run in runs)
    completed = sum(run.completed or 0 for run in runs)
    failure = None
    if failed or not values:
        # As in our own cells: a number that leaves requests out is none.
        total = failed + completed
        why = f"{failed} of {total} requests failed" if failed else "the file has no numbers"
        failure = Failure("request_failed", why, advice="the tool's averages leave out the requests that failed")
    first = runs[0]
    concurrency = {} if first.concurrency is None else {"concurrency": first.concurrency}
    return Record(
        cell=cell,
        state=State.OK if failure is None else State.FAILED,
        started=min(run.started for run in runs),
        ended=max(run.ended for run in runs),
        fingerprint={},
        fingerprint_id="",
        metrics={} if failure is not None else {name: estimate(values[name], UNITS[name]) for name in names},
        failure=failure,
        notes=tuple(dict.fromkeys(note for run in runs for note in run.notes)),
        parameters={**concurrency, **({"lengths": first.lengths} if first.lengths else {})},
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def per(total: Any, count: Any) -> float | None:
    """total / count, None where that is no number."""
    a, b = _number(total), _number(count)
    return a / b if a is not None and b else None


def whole(value: Any) -> int | None:
    """A count, None where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def at(value: Any, *path: str) -> Any:
    """value[path[0]][path[1]]..., None where there is nothing."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
