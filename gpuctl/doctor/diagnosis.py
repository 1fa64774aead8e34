"""What is wrong with a box: every check is made, the lowest faulty layer leads, the rest are its consequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpuctl import plugins
from gpuctl.box import Box, Fact, Unknown
from gpuctl.facts import access, cuda, kernel_log, nodes, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity
from gpuctl.remedies import mere_restart

_ORDER = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
_SURE = {Certainty.PROVED: 0, Certainty.LIKELY: 1, Certainty.POSSIBLE: 2}


@dataclass(frozen=True)
class Diagnosis:
    """What was found in a box.

    verdict       well | findings | unknown
    headline      what CUDA says, in one line
    findings      ranked: the cause that leads first
    consequences  critical findings of higher layers, which the leading one may explain
    fine          what was seen to be in order
    unknowns      check -> why it could not be made
    recognised    false where all there is are lines in which nothing of a GPU box was recognised
    """

    box: str
    machines: tuple[str, ...]
    verdict: str
    headline: str
    findings: tuple[Finding, ...] = ()
    consequences: tuple[Finding, ...] = ()
    fine: tuple[str, ...] = ()
    unknowns: Mapping[str, str] = field(default_factory=dict)
    works: bool | None = None  # CUDA starts for everyone who was asked; None: nobody was
    recognised: bool = True

    @property
    def all(self) -> tuple[Finding, ...]:
        return (*self.findings, *self.consequences)


def ids() -> tuple[str, ...]:
    return plugins.names("checks")


def examine(box: Box, checks: Sequence[str] | None = None) -> tuple[list[Finding], dict[str, str]]:
    """Every check's findings, and the checks that could not be made with the reason."""
    found: list[Finding] = []
    unknowns: dict[str, str] = {}
    for name in checks if checks is not None else ids():
        module = plugins.get("checks", name)
        try:
            for finding in module.check(box):
                evidence = tuple(access.together(list(dict.fromkeys(finding.evidence))))
                found.append(replace(finding, id=name, evidence=evidence))
        except Unknown as unknown:
            unknowns[name] = str(unknown)
        except Exception as error:  # noqa: BLE001 - one check that breaks must not hide what the others see
            unknowns[name] = f"the check itself failed ({type(error).__name__}: {error}); please report it"
    return found, unknowns


def diagnose(box: Box) -> Diagnosis:
    """Runs every check on the box. Never raises for what a snapshot holds or lacks."""
    found, unknowns = examine(box)
    sure = [f for f in found if f.severity is Severity.CRITICAL and f.certainty is not Certainty.POSSIBLE]
    if sure:  # a known cause settles what several causes would explain
        found = [f for f in found if f.certainty is not Certainty.POSSIBLE or f.severity is not Severity.CRITICAL]
    found.sort(key=_rank)
    lead: Layer | None = min((f.layer for f in sure), default=None)
    leading = [f for f in found if f.severity is not Severity.CRITICAL or lead is None or f.layer <= lead]
    consequences = [f for f in found if f not in leading]
    works = access.works(box)
    fine = _fine(box)
    if (unseen := box.guest.mapping("service").get("error")) is not None:
        unknowns["service"] = str(unseen)
    if any(f.severity is not Severity.INFO for f in found):
        verdict = "findings"
    elif works and unseen is None:
        verdict = "well"
    else:
        verdict = "unknown"
    return Diagnosis(
        name_of(box),
        tuple(s.name for s in box.snapshots),
        verdict,
        headline(box),
        tuple(leading),
        tuple(consequences),
        fine,
        unknowns,
        works,
        bool(found) or _recognised(box),
    )


def _recognised(box: Box) -> bool:
    """Is anything known of the box? Loose lines count where a fact was read from them."""
    facts: tuple[Fact[Any], ...] = (cuda.VIEWS, nvidia.NVML, kernel_log.LINES, nodes.NODES, nodes.OPENS)
    return any(
        set(snapshot.document) - {"errors"} or any(snapshot.get(fact) is not None for fact in facts)
        for snapshot in box.snapshots
    )


def _rank(finding: Finding) -> tuple[int, int, bool, int]:
    """What stops CUDA first, the lowest layer first; "it does not run" after what keeps it from running."""
    bare = finding.remedy is not None and mere_restart(finding.remedy)
    layer = int(finding.layer) if finding.severity is Severity.CRITICAL else 0
    return _ORDER[finding.severity], layer, bare, _SURE[finding.certainty]


def name_of(box: Box) -> str:
    """`ct200 on kpro6`, or the machine's name."""
    name = box.wanted.name or box.guest.name
    if box.node.present and box.node is not box.guest:
        return f"{name} on {box.node.name}"
    return name


def headline(box: Box) -> str:
    """What CUDA and NVML say, in one line."""
    views = box.guest.get(cuda.VIEWS)
    nvml = box.guest.get(nvidia.NVML)
    parts = []
    shown = views.get("user") or views.get("root") or views.get("reported") if views else None
    if shown is not None:
        parts.append("cuInit does not return" if shown.hang else str(shown))
    if nvml is not None and not (shown is not None and shown.works):
        parts.append("nvidia-smi works" if nvml.works and nvml.count != 0 else str(nvml))
    return ", ".join(parts)


def _fine(box: Box) -> tuple[str, ...]:
    """What was seen to be in order: said, so that nobody looks there again."""
    fine = []
    views = box.guest.get(cuda.VIEWS)
    for who, view in (views or {}).items():
        if view.works:
            name = access.user_name(box) if who == "user" else who
            count = f", {view.count} device{'s' if view.count != 1 else ''}" if view.count is not None else ""
            fine.append(f"CUDA starts for {name}: cuInit = 0{count}")
    return tuple(fine)
