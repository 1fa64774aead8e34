"""Two runs, phases or servers side by side, without fooling oneself. Pure.

A pair of cells is compared only when it was measured in the same way (same workload definition, same load agent) and,
between runs, of the same model. Everything else that differs is said in words. A change counts when Welch's 95 %
interval excludes zero *and* the change is larger than the noise band: repetitions within one cell scatter less than
the same cell does from one start of a server to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpuctl.records import MEASURED, CellId, Record, State
from gpuctl.results.intervals import Interval, change_percent
from gpuctl.results.provenance import MEASUREMENT, words
from gpuctl.results.run import Run, headlines, metric

NOISE_PERCENT = 2.0
_MODEL = ("model", "models")


class Verdict(StrEnum):
    WORSE = "worse"
    BETTER = "better"
    UNCLEAR = "unclear"  # larger than the noise band, and not told apart from zero
    SAME = "no difference"


@dataclass(frozen=True)
class Difference:
    """One metric of one cell on both sides. `change` is (new - old) / old in per cent."""

    new: Record
    old: Record
    metric: str
    change: Interval
    verdict: Verdict

    @property
    def worse_by(self) -> float:
        """Per cent by which the new side is worse; negative where it is better."""
        return -self.change.value * metric(self.metric, self.new.metrics[self.metric].unit).better


@dataclass(frozen=True)
class Condition:
    """What differs between the two sides apart from the numbers, and for how many cells."""

    where: str
    words: tuple[str, ...]
    cells: int


@dataclass(frozen=True)
class Comparison:
    new: str
    old: str
    noise_percent: float
    differences: tuple[Difference, ...] = ()
    broken: tuple[tuple[Record, Record], ...] = ()  # (new, old): had a number, has none now
    mended: tuple[tuple[Record, Record], ...] = ()  # (new, old): has a number now
    not_comparable: tuple[tuple[CellId, str], ...] = ()
    only_new: tuple[CellId, ...] = ()
    only_old: tuple[CellId, ...] = ()
    conditions: tuple[Condition, ...] = ()

    def count(self, verdict: Verdict) -> int:
        return sum(difference.verdict is verdict for difference in self.differences)


class Outcome(StrEnum):
    PASSED = "passed"
    REGRESSED = "regressed"
    UNDECIDED = "undecided"  # nothing could be compared, or the intervals are too wide to tell


@dataclass(frozen=True)
class Gate:
    """Whether a comparison stays within a limit, and the sentences that say why."""

    outcome: Outcome
    reasons: tuple[str, ...]


def compare(new: Run, old: Run, *, noise_percent: float = NOISE_PERCENT) -> Comparison:
    """The cells that both runs have, by name."""
    pairs = [(record, old.by_cell[record.cell]) for record in new.records if record.cell in old.by_cell]
    return _compared(
        pairs,
        new.name,
        old.name if old.name != new.name else f"{old.name} (the other run)",
        noise_percent,
        must_agree=(*MEASUREMENT, *_MODEL),
        only_new=tuple(record.cell for record in new.records if record.cell not in old.by_cell),
        only_old=tuple(record.cell for record in old.records if record.cell not in new.by_cell),
    )


def compare_phases(run: Run, phase: str, other: str, *, noise_percent: float = NOISE_PERCENT) -> Comparison:
    """One phase against another of the same run: the same server but for the phase in its name, the same point."""
    kin = {(s.phase, s.name): s.kin for servers in run.servers.values() for s in servers}
    old = {
        (kin[other, record.cell.server], record.cell.workload, record.cell.point): record
        for record in run.records
        if record.cell.phase == other
    }
    pairs = [
        (record, old[key])
        for record in run.records
        if record.cell.phase == phase
        and (key := (kin[phase, record.cell.server], record.cell.workload, record.cell.point)) in old
    ]
    return _compared(pairs, phase, other, noise_percent, must_agree=MEASUREMENT)


def compare_servers(run: Run, phase: str, other: str, *, noise_percent: float = NOISE_PERCENT) -> Comparison:
    """All other servers of a phase against one of them: the same workload point."""
    pairs = [
        (record, old)
        for record in run.records
        if record.cell.phase == phase
        and record.cell.server != other
        and (old := run.by_cell.get(record.cell._replace(server=other))) is not None
    ]
    return _compared(pairs, phase, f"{phase}/{other}", noise_percent, must_agree=MEASUREMENT)


def gate(comparison: Comparison, limit_percent: float) -> Gate:
    """Fails when a figure is worse by more than the limit and Welch's interval excludes zero, or a number is gone.

    What is worse by more than the limit but cannot be told apart from zero is undecided, and so is a comparison
    without a single comparable cell: neither may pass for good.
    """
    failed = [
        f"{d.new.cell} {d.metric} {d.change.value:+.1f} % {_of(d.change)}"
        for d in comparison.differences
        if d.verdict is Verdict.WORSE and d.worse_by > limit_percent
    ]
    failed += [f"{new.cell} has no number now: {_why_none(new)}" for new, _ in comparison.broken]
    if failed:
        return Gate(Outcome.REGRESSED, tuple(failed))
    unclear = [
        f"{d.new.cell} {d.metric} {d.change.value:+.1f} % {_of(d.change)}"
        for d in comparison.differences
        if d.verdict is Verdict.UNCLEAR and d.worse_by > limit_percent
    ]
    if not comparison.differences:
        unclear.append(f"{comparison.new} and {comparison.old} have no cell that can be compared")
    return Gate(Outcome.UNDECIDED if unclear else Outcome.PASSED, tuple(unclear))


def _compared(
    pairs: Sequence[tuple[Record, Record]],
    new_name: str,
    old_name: str,
    noise_percent: float,
    must_agree: Sequence[str],
    only_new: tuple[CellId, ...] = (),
    only_old: tuple[CellId, ...] = (),
) -> Comparison:
    differences: list[Difference] = []
    broken: list[tuple[Record, Record]] = []
    mended: list[tuple[Record, Record]] = []
    refused: list[tuple[CellId, str]] = []
    compared: list[tuple[Record, Record]] = []
    for new, old in pairs:
        had, has = old.state in MEASURED, new.state in MEASURED
        if had != has:
            (broken if had else mended).append((new, old))
            continue
        if not has:
            continue
        why = _not_comparable(new, old, must_agree)
        if why:
            refused.append((new.cell, why))
            continue
        compared.append((new, old))
        for name in headlines(new.cell.workload, set(new.metrics) & set(old.metrics)):
            change = change_percent(new.metrics[name], old.metrics[name])
            better = metric(name, new.metrics[name].unit).better
            if change is not None and better:
                differences.append(Difference(new, old, name, change, _verdict(change, better, noise_percent)))
    return Comparison(
        new_name,
        old_name,
        noise_percent,
        tuple(differences),
        tuple(broken),
        tuple(mended),
        tuple(refused),
        only_new,
        only_old,
        tuple(_conditions(compared)),
    )


def _verdict(change: Interval, better: int, noise_percent: float) -> Verdict:
    large = abs(change.value) > noise_percent
    if not large:
        return Verdict.SAME
    if not change.excludes(0):
        return Verdict.UNCLEAR
    return Verdict.BETTER if change.value * better > 0 else Verdict.WORSE


def _not_comparable(new: Record, old: Record, must_agree: Sequence[str]) -> str:
    if not new.fingerprint or not old.fingerprint:
        return "one side has no fingerprint: another tool measured it"
    if (new.state is State.CAPACITY_LIMITED) != (old.state is State.CAPACITY_LIMITED):
        return "one side is limited by its capacity, the other is not"
    a = {key: old.fingerprint[key] for key in must_agree if key in old.fingerprint}
    b = {key: new.fingerprint[key] for key in must_agree if key in new.fingerprint}
    return "; ".join(words(a, b))


def _conditions(pairs: Iterable[tuple[Record, Record]]) -> list[Condition]:
    """What differs, once for all servers that it is true of."""
    by_server: dict[str, dict[tuple[str, ...], int]] = {}
    cached: dict[tuple[str, str], tuple[str, ...]] = {}
    for new, old in pairs:
        key = (new.fingerprint_id, old.fingerprint_id)
        if key not in cached:
            cached[key] = tuple(words(_without(old.fingerprint), _without(new.fingerprint)))
        if cached[key]:
            where = f"{new.cell.phase}/{new.cell.server}"
            by_server.setdefault(where, {}).setdefault(cached[key], 0)
            by_server[where][cached[key]] += 1
    alike: dict[tuple[str, ...], tuple[list[str], int]] = {}
    for where, said in by_server.items():
        for what, count in said.items():
            places, total = alike.get(what, ([], 0))
            alike[what] = ([*places, where], total + count)
    return [
        Condition(places[0] if len(places) == 1 else f"{len(places)} servers", what, total)
        for what, (places, total) in alike.items()
    ]


def _without(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fingerprint.items() if key not in MEASUREMENT}


def _of(change: Interval) -> str:
    if change.low is None or change.high is None:
        return "(measured once: no interval)"
    return f"[{change.low:+.1f}, {change.high:+.1f}]"


def _why_none(record: Record) -> str:
    return record.failure.summary if record.failure is not None else "; ".join(record.notes) or record.state.value
