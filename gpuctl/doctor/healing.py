"""Healing a box: the lowest fault first, one remedy, one restart, a second look before anything is called mended."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpuctl.box import Box
from gpuctl.doctor.diagnosis import Diagnosis, diagnose
from gpuctl.finding import Finding, Remedy, Severity
from gpuctl.remedies import mere_restart

MAX_ROUNDS = 12


@dataclass(frozen=True)
class Played:
    """What became of a remedy: did every step succeed, did anything change; `text` is one line where it did not."""

    ok: bool
    changed: bool = True
    text: str = ""


@dataclass(frozen=True)
class Step:
    """One round: the finding, its remedy as it was played, what became of it, and whether the finding was gone then."""

    finding: Finding
    remedy: Remedy
    played: Played
    gone: bool


@dataclass(frozen=True)
class Healing:
    """state: well (nothing was or is wrong), mended, stuck (faults are left that no remedy took away), failed (a remedy
    could not be played), unknown (afterwards nobody could tell)."""

    state: str
    before: Diagnosis
    after: Diagnosis
    steps: tuple[Step, ...] = ()
    left: tuple[Finding, ...] = ()  # what is still wrong
    box: Box | None = None  # as it was seen last


def mendable(finding: Finding) -> bool:
    """What stops CUDA, and warnings that have a remedy."""
    return finding.severity is Severity.CRITICAL or (finding.severity is Severity.WARNING and bool(ways(finding)))


def heal(
    box: Box,
    probe: Callable[[], Box],
    play: Callable[[Remedy], Played],
    *,
    wanted: Callable[[Finding], bool] = mendable,
    on_step: Callable[[Finding, Step | None], None] = lambda finding, step: None,
) -> Healing:
    """Plays remedies until the box is clean or nothing helps any more.

    `probe` looks at the box again; `play` applies one remedy with the restart it asks for. A remedy that was played is
    not played again; one that should have done without a restart of the guest is followed by one with it. `wanted`
    says which findings have to go; `on_step` hears of each before its remedy is played, and how it went. Raises what
    probe and play raise.
    """
    before = diagnosis = diagnose(box)
    tried: set[str] = set()
    steps: list[Step] = []
    for _ in range(MAX_ROUNDS):
        chosen = choose(diagnosis, tried, wanted=wanted)
        if chosen is None:
            break
        finding, remedy = chosen
        tried.add(key(remedy))
        on_step(finding, None)
        played = play(remedy)
        box = probe()
        diagnosis = diagnose(box)
        gone = all(other.id != finding.id for other in diagnosis.all)
        steps.append(Step(finding, remedy, played, gone))
        on_step(finding, steps[-1])
        if not played.ok and finding.severity is Severity.CRITICAL:
            return Healing("failed", before, diagnosis, tuple(steps), wrong(diagnosis, wanted), box)
    left = wrong(diagnosis, wanted)
    if left:
        state = "stuck"
    elif diagnosis.verdict == "unknown":
        state = "unknown"
    else:
        state = "mended" if steps else "well"
    return Healing(state, before, diagnosis, tuple(steps), left, box)


def together(first: Healing, then: Healing) -> Healing:
    """Two healings of one box, one after the other, as one."""
    state = first.state if then.state == "well" else then.state
    return Healing(state, first.before, then.after, first.steps + then.steps, then.left, then.box)


def wrong(diagnosis: Diagnosis, wanted: Callable[[Finding], bool] = mendable) -> tuple[Finding, ...]:
    """Findings that have to go before the box is mended."""
    return tuple(finding for finding in diagnosis.all if wanted(finding))


def choose(
    diagnosis: Diagnosis, tried: set[str], *, wanted: Callable[[Finding], bool] = mendable
) -> tuple[Finding, Remedy] | None:
    """The next remedy: of the lowest layer first, what stops CUDA before what only will; None when none is left."""
    asked = wrong(diagnosis, wanted)
    critical = [finding for finding in asked if finding.severity is Severity.CRITICAL]
    later = [finding for finding in asked if finding.severity is Severity.WARNING]
    ordered = sorted(critical, key=_order) + sorted(later, key=_order)
    left = [(finding, way) for finding in ordered for way in ways(finding) if key(way) not in tried]
    # What goes into no memory file system goes to what lies below, and takes the room of that.
    unmounted = {
        name
        for finding in ordered
        if finding.remedy is not None and finding.remedy.playbook == "tmpfs"
        for name in finding.remedy.vars["models"]
    }
    left = [(f, way) for f, way in left if way.playbook != "stage" or way.vars["model"] not in unmounted]
    if not left:
        return None
    if left[0][1].playbook == "container":  # it may start the guest, which needs the node's device nodes
        everything = [(finding, way) for finding in diagnosis.all for way in ways(finding)]
        left = [each for each in everything if each[1].playbook == "devices" and key(each[1]) not in tried] + left
    return left[0]


def _order(finding: Finding) -> tuple[int, bool]:
    """Lowest layer first; a mere restart after what changes something, for it may fail for the same reason."""
    return finding.layer, finding.remedy is not None and mere_restart(finding.remedy)


def ways(finding: Finding) -> list[Remedy]:
    """The finding's remedy, and what to try when it did not help: the same with a restart of the guest."""
    remedy = finding.remedy
    if remedy is None:
        return []
    if finding.severity is not Severity.CRITICAL:  # it works now: nothing is restarted for what may come
        return [] if mere_restart(remedy) else [with_restart(remedy, None)]
    found = [remedy]
    if remedy.playbook == "container" and remedy.restarts != "guest":
        found.append(with_restart(remedy, "guest"))
    return found


def with_restart(remedy: Remedy, restarts: str | None) -> Remedy:
    values = dict(remedy.vars)
    if "restart" in values:
        values["restart"] = restarts == "guest"
    return replace(remedy, vars=values, restarts=restarts)


def key(remedy: Remedy) -> str:
    """Two remedies with the same key change the same thing in the same way."""
    return json.dumps([remedy.playbook, remedy.on, dict(remedy.vars), remedy.restarts], sort_keys=True, default=str)
