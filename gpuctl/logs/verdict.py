"""What the lines of a log amount to: which of its failures is the cause, and what a log without one means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gpuctl.finding import Certainty, Finding, Layer, Severity
from gpuctl.logs.rule import Engine, Hit, Kind, Raised, Stage, Story, shown

Weighed = tuple[float, int, Finding]


def weigh(hits: list[Hit], story: Story, first: Raised | None) -> tuple[list[Weighed | None], list[Finding]]:
    """The findings of the hits: causes with their weight and place, and warnings."""
    causes: list[Weighed | None] = []
    warnings: list[Finding] = []
    told: set[tuple[str, str]] = set()
    for hit in hits:
        if (hit.rule.id, hit.line.rank) in told:
            continue
        finding = hit.rule.finding(hit, story)
        if finding is None:
            continue
        told.add((hit.rule.id, hit.line.rank))
        if finding.severity is not Severity.CRITICAL or hit.rule.kind is not Kind.CAUSE:
            warnings.append(finding)
            continue
        weight = float(hit.rule.specificity)
        raised = hit.line.raised
        if raised is not None and first is not None and raised is not first and not _related(raised, first):
            # Another exception: of a rank that died later, or one that was caught while starting.
            weight -= 30
            if not raised.fatal:
                finding = replace(finding, certainty=Certainty.POSSIBLE)
        causes.append((weight, hit.line.order, finding))
    return causes, warnings


def first_raised(story: Story, engine: Engine | None) -> Raised | None:
    """The first exception of the first rank that died."""
    envelope = engine.envelope if engine else ()
    raised = [r for r in story.raised if not any(text in str(r) for text in envelope)]
    fatal = [r for r in raised if r.fatal]
    if fatal:
        return fatal[0]
    # Without the words that announce death, the last is what ended the process, if the process ended.
    return raised[-1] if raised and (story.died or not story.ready) else None


def _related(one: Raised, other: Raised) -> bool:
    """Whether one was raised from the other, or says the same."""
    if str(one) == str(other):
        return True
    return (one.root is not None and _related(one.root, other)) or (
        other.root is not None and _related(one, other.root)
    )


def explained(causes: list[Weighed | None], first: Raised | None, hits: list[Hit]) -> bool:
    """Whether a rule knows the exception: it matched its last line, the lines after it, or those shortly before it."""
    if first is None:
        return True
    known = {finding.evidence[0] for _, _, finding in filter(None, causes) if finding.evidence}
    for hit in hits:
        if hit.rule.kind is not Kind.CAUSE or hit.rule.specificity < 20 or shown(hit.line) not in known:
            continue
        raised = hit.line.raised
        if raised is not None and (raised is first or _related(raised, first)):
            return True
        if raised is None and -3 <= hit.line.order - first.order <= 12:
            return True
        if hit.rule.specificity >= 90:
            return True
    return False


def unrecognised(first: Raised, story: Story) -> Finding:
    where = f"{first.frames[-1]}" if first.frames else ""
    during = f" while {first.stage}" if first.stage else ""
    speculation = story.flag("speculative_algorithm") or story.flag("speculative_config")
    evidence = [str(first)[:500]]
    if where:
        evidence.append(f"raised at {where}")
    if first.root is not None:
        evidence.append(f"first: {str(first.root)[:300]}")
    return Finding(
        summary=f"The server died of an exception{during}: {str(first)[:300]}",
        layer=Layer.SERVER,
        certainty=Certainty.LIKELY,
        evidence=tuple(evidence),
        separates=f"whether it starts without speculation ({speculation})" if speculation else "",
        advice="gpuctl does not know this failure: its own words are the best there is. "
        + (
            "If it starts without speculation, the engine does not support this speculation for this model."
            if speculation
            else "Try the engine's newest release, then search its issues for the last line."
        ),
        id="unrecognised-failure",
    )


def silence(story: Story, engine: Engine | None) -> Finding | None:
    """What a log that names no cause means: killed, still starting, or hung."""
    last = story.last.text if story.last is not None else ""
    status = story.exit_status
    if story.died:
        return _ended(story, engine, last, status)
    if engine is None or story.ready or not (story.stages or last):
        return None
    if any(text in last for text in ("is using nccl==", "Init torch distributed begin", "NCCL INFO")):
        return Finding(
            summary="The log ends where the GPUs first talk to each other. If it stays there, PCIe peer-to-peer "
            "traffic is redirected by the IOMMU or ACS and never arrives",
            layer=Layer.TUNING,
            severity=Severity.WARNING,
            certainty=Certainty.POSSIBLE,
            evidence=(last[:300],),
            separates="GPUs at 100 % use and a third of their power with a few hundred MiB in use: hung. Otherwise "
            "starting",
            advice="`gpuctl topo` shows ACS and IOMMU. Disable ACS on the bridges or the IOMMU in the BIOS "
            "(amd_iommu=off, iommu=pt); to get by, NCCL_P2P_DISABLE=1 together with --disable-custom-all-reduce.",
            id="gpus-do-not-answer",
        )
    if "utotun" in last:
        return Finding(
            summary="The log ends while FlashInfer tunes its kernels. If it stays there, something still uses "
            "peer-to-peer between the GPUs although NCCL does not",
            layer=Layer.TUNING,
            severity=Severity.WARNING,
            certainty=Certainty.POSSIBLE,
            evidence=(last[:300],),
            separates="GPUs at 100 % use and a third of their power: hung. Otherwise tuning",
            advice="With NCCL_P2P_DISABLE=1 also turn off custom all-reduce (--disable-custom-all-reduce) and "
            "symmetric memory.",
            id="autotune-hang",
        )
    doing = engine.loading.get(story.stage, "")
    return Finding(
        summary=f"The log ends while starting, after: {title(engine.stages, story.stage) or 'the first lines'}. "
        + (f"{doing}" if doing else "Nothing says why it goes no further"),
        layer=Layer.SERVER,
        severity=Severity.WARNING,
        certainty=Certainty.POSSIBLE,
        evidence=(last[:300],),
        separates="no disk reads, no growth of GPU memory and no new line for minutes: hung. Otherwise starting",
        advice="Wait, or look again with `gpuctl status`.",
        id="still-starting",
    )


def _ended(story: Story, engine: Engine | None, last: str, status: int | None) -> Finding:
    if status == -9:
        kills_itself = engine is not None and engine.name == "sglang"
        return Finding(
            summary="The server was ended with SIGKILL and its log gives no reason"
            + ("; SGLang ends so after an ordinary stop, too" if kills_itself and story.ready else ""),
            layer=Layer.SERVER,
            certainty=Certainty.POSSIBLE,
            evidence=(f"exit status {status}", f"last line: {last[:300]}"),
            separates="`journalctl -k -g 'Out of memory'` on the host: the kernel's OOM killer, or not",
            advice="Look there. Otherwise: who stopped it (`journalctl -u UNIT`), and is the log complete?",
            id="killed-without-reason",
        )
    if status == 1 and not story.stages[1:] and engine is not None and engine.name == "sglang":
        return Finding(
            summary="The server ended with status 1 before any of its processes said a word: what starts them failed. "
            "In a container that is often numactl, which may not bind memory",
            layer=Layer.CONTAINER,
            certainty=Certainty.POSSIBLE,
            evidence=(f"exit status {status}", f"last line: {last[:300]}"),
            separates="`numactl --membind=0 true` in the container fails",
            advice="Set SGLANG_NUMA_BIND_V2=0.",
            id="numa-binding",
        )
    said = f"exit status {status}" if status is not None else "its last lines say so"
    return Finding(
        summary=f"The server died ({said}) and its log names no cause",
        layer=Layer.SERVER,
        certainty=Certainty.POSSIBLE,
        evidence=(f"last line: {last[:300]}",),
        advice="Look at the whole log (a part may be missing), and at `journalctl -u UNIT`.",
        id="died-without-reason",
    )


def title(stages: Iterable[Stage], name: str) -> str:
    return next((stage.title for stage in stages if stage.name == name), "")


def once(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Each id once, the first."""
    kept: dict[str, Finding] = {}
    for finding in findings:
        kept.setdefault(finding.id, finding)
    return tuple(kept.values())
