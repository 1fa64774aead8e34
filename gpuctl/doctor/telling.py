"""A diagnosis as text for people and as JSON for programs. Pure: returns lines, prints nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpuctl import plugins
from gpuctl.doctor.diagnosis import Diagnosis
from gpuctl.doctor.healing import Healing
from gpuctl.finding import Certainty, Finding, Severity

SCHEMA = "gpuctl.doctor/1"

_BOLD, _RED, _YELLOW, _GREEN, _DIM, _END = "\033[1m", "\033[31m", "\033[33m", "\033[32m", "\033[2m", "\033[0m"
_SHADES = {Severity.CRITICAL: _RED, Severity.WARNING: _YELLOW, Severity.INFO: _DIM}


class _Pen:
    def __init__(self, colour: bool, width: int) -> None:
        self.colour, self.width = colour, max(60, width)

    def shade(self, text: str, *codes: str) -> str:
        return f"{''.join(codes)}{text}{_END}" if self.colour and codes else text

    def wrapped(self, text: str, indent: int, *codes: str) -> Iterator[str]:
        """Lines of a text, later ones indented further; what was indented stays so (commands are not broken)."""
        for line in text.splitlines():
            own = len(line) - len(line.lstrip())
            pad = " " * (indent + own)
            if own:
                yield self.shade(pad + line.lstrip(), *codes)
                continue
            parts = _wrap(line, self.width, pad, pad + "  ")
            yield from (self.shade(part, *codes) for part in parts or [""])


def _wrap(text: str, width: int, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def render_text(
    diagnosis: Diagnosis, colour: bool = False, *, width: int = 100, everything: bool = False, fix: str = ""
) -> list[str]:
    """Lines of a diagnosis. `everything` also shows consequences in full, remarks and checks that could not be made;
    `fix` is the command that applies the remedies, told where there are any."""
    pen = _Pen(colour, width)
    lines = [_title(diagnosis, pen)]
    shown = [f for f in diagnosis.findings if everything or f.severity is not Severity.INFO]
    advice: set[str] = set()
    for finding in shown:
        repeated = finding.advice in advice and "\n" in finding.advice
        lines += _finding(replace(finding, advice="mended by the same change") if repeated else finding, pen,
                          diagnosis.headline)  # fmt: skip
        advice.add(finding.advice)
    if diagnosis.consequences:
        if everything:
            lines.append("  also seen; the cause above may explain it:")
            for finding in diagnosis.consequences:
                lines += _finding(finding, pen)
        else:
            lines += list(pen.wrapped("also seen; the cause above may explain it: "
                          + "; ".join(f"{f.summary} ({f.id})" for f in diagnosis.consequences), 2))  # fmt: skip
    if fix and any(finding.remedy is not None for finding in diagnosis.all):
        lines.append(f"  apply:  {fix}")
    for line in diagnosis.fine:
        lines += list(pen.wrapped(f"in order: {line}", 2, _GREEN))
    if not diagnosis.recognised:
        text = "nothing in it was recognised: docs/snapshot.md says what is; a pasted terminal needs its prompts"
        return [*lines, *pen.wrapped(text, 2)]
    if diagnosis.verdict == "unknown" and not shown:
        lines += list(pen.wrapped("nothing was found, and not enough is known to say that all is well", 2))
    lines += _unknowns(diagnosis, pen, everything)
    return lines


def _title(diagnosis: Diagnosis, pen: _Pen) -> str:
    critical = [finding for finding in diagnosis.all if finding.severity is Severity.CRITICAL]
    if critical and not diagnosis.works:
        state, shade = "CUDA cannot start", _RED
    elif critical:
        state, shade = "CUDA starts, and something is wrong", _RED
    elif diagnosis.verdict == "findings":
        tried = {True: "CUDA starts; ", False: "CUDA does not start yet; ", None: ""}[diagnosis.works]
        state = tried + "not all is well"
        shade = _YELLOW
    elif diagnosis.verdict == "well":
        state, shade = "well", _GREEN
    else:
        state, shade = "could not tell", _YELLOW
    left = f"{diagnosis.box}: {state}"
    gap = max(2, pen.width - len(left) - len(diagnosis.headline))
    return pen.shade(left, _BOLD, shade) + (" " * gap + diagnosis.headline if diagnosis.headline else "")


def _finding(finding: Finding, pen: _Pen, said: str = "") -> list[str]:
    """`said`: what the headline says already."""
    shade = _SHADES[finding.severity]
    certainty = finding.certainty.value
    if finding.severity is not Severity.CRITICAL:
        certainty += f", {finding.severity.value}"
    mark = f"[{certainty}; {finding.id}]"
    head = f"{finding.layer.name:<10} {finding.summary}"
    lines: list[str] = []
    wrapped = _wrap(head, pen.width - 2, "", " " * 11)
    if len(wrapped[-1]) + len(mark) + 4 <= pen.width:
        pad = " " * (pen.width - 2 - len(wrapped[-1]) - len(mark))
        wrapped[-1] = pen.shade(wrapped[-1], _BOLD, shade) + pad + pen.shade(mark, _DIM)
        lines += ["  " + (pen.shade(line, _BOLD, shade) if line is not wrapped[-1] else line) for line in wrapped]
    else:
        lines += ["  " + pen.shade(line, _BOLD, shade) for line in wrapped]
        lines.append(" " * 13 + pen.shade(mark, _DIM))
    for line in finding.evidence:
        if line not in said.split(", "):
            lines += list(pen.wrapped(line, 5))
    for line in finding.against:
        lines += list(pen.wrapped(f"against it: {line}", 5, _YELLOW))
    if finding.separates and finding.certainty is not Certainty.PROVED:
        lines += list(pen.wrapped(f"to be sure: {finding.separates}", 5))
    if finding.advice:
        lines += list(pen.wrapped(finding.advice, 3))
    return lines


def _unknowns(diagnosis: Diagnosis, pen: _Pen, everything: bool) -> list[str]:
    if not diagnosis.unknowns:
        return []
    reasons: dict[str, list[str]] = {}
    for name, reason in diagnosis.unknowns.items():
        reasons.setdefault(reason, []).append(name)
    broken = [reason for reason in reasons if reason.startswith("the check itself failed")]
    if everything or diagnosis.verdict == "unknown":
        lines = ["  not known:"]
        for reason, names in reasons.items():
            which = ", ".join(names) if everything or len(names) <= 3 else f"{len(names)} checks"
            lines += list(pen.wrapped(f"{reason} ({which})", 5))
        return lines
    lines = [f"  {reasons[reason][0]}: {reason}" for reason in broken]
    count = len(diagnosis.unknowns)
    lines.append(pen.shade(f"  {count} check{'s' * (count != 1)} could not be made (--all tells why)", _DIM))
    return lines


def render_healing(healing: Healing, colour: bool = False, *, width: int = 100) -> list[str]:
    """What was done and what came of it, step by step."""
    pen = _Pen(colour, width)
    lines = []
    for number, step in enumerate(healing.steps, start=1):
        done = f"{number}. {step.finding.summary}: {step.remedy.playbook}.yml on the {step.remedy.on}"
        if step.remedy.restarts is not None:
            done += f", {step.remedy.restarts} restarted"
        if not step.played.ok:
            done += f"; failed: {step.played.text}"
        else:
            done += "; gone" if step.gone else "; still there"
        lines += list(pen.wrapped(done, 2, _GREEN if step.gone else _RED))
    words = {
        "well": "nothing to mend",
        "mended": "mended, as a second look shows",
        "stuck": "not mended: what is left has no remedy, or its remedy did not help"
        if healing.steps
        else "not mended: what is wrong has no remedy that gpuctl could apply",
        "failed": "stopped: a remedy could not be applied",
        "unknown": "cannot tell whether it is mended: CUDA's answer is missing",
    }
    good = healing.state in ("well", "mended")
    lines += list(pen.wrapped(f"{healing.after.box}: {words[healing.state]}", 0, _BOLD, _GREEN if good else _RED))
    if healing.steps:  # else all of it was told when the box was looked at
        for finding in healing.left:
            lines += _finding(finding, pen)
    return lines


def explain(name: str) -> list[str]:
    """A check's title and reasons. Raises LookupError for an unknown id."""
    module = plugins.get("checks", name)
    return [f"{name} ({module.LAYER.name})", "", *(module.__doc__ or "").strip().splitlines()]


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "box": diagnosis.box,
        "machines": list(diagnosis.machines),
        "verdict": diagnosis.verdict,
        "headline": diagnosis.headline,
        "findings": [finding.as_json() for finding in diagnosis.findings],
        "consequences": [finding.as_json() for finding in diagnosis.consequences],
        "fine": list(diagnosis.fine),
        "unknown": dict(diagnosis.unknowns),
        "recognised": diagnosis.recognised,
    }
