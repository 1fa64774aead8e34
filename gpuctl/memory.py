"""The words of a memory plan: what one GPU's memory is divided into, what fits, and what to change. Pure data.

Each engine divides memory by its own rules (gpuctl/engines/<engine>/memory.py); the answer has one shape. All sizes are
bytes of one GPU. Every plan says on what it rests: measured numbers, or estimates before anything was started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpuctl.facts.model import ModelFacts
from gpuctl.finding import Certainty, Finding, Layer, Severity

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """Memory of one GPU as the driver tells it."""

    total_bytes: int
    free_bytes: int | None = None  # now; None: not asked, then nothing else is assumed to use it
    name: str = ""


@dataclass(frozen=True)
class Question:
    """What is to be planned: a command line, a model, a GPU, and what will be asked of the server."""

    argv: Sequence[str]
    target: ModelFacts
    gpu: Gpu
    draft: ModelFacts | None = None
    gpus: int | None = None  # that the server can see; None: not known
    env: Mapping[str, str] = field(default_factory=dict)
    requests: int = 1  # at once, the most that will be asked
    contexts: Sequence[int] = ()  # prompt and answer together, in tokens, of the requests that will be sent
    installed: Mapping[str, str] = field(default_factory=dict)  # file name -> text of the installed engine's source
    version: str = ""  # of the engine, where known
    before_bytes: float | None = None  # measured: free before loading
    after_bytes: float | None = None  # measured: free after all weights


class Verdict(StrEnum):
    FITS = "fits"
    LIMITED = "limited"  # starts, and runs fewer or shorter requests than asked
    IMPOSSIBLE = "impossible"  # does not start, or dies at the first long prompt
    UNKNOWN = "unknown"  # the rules of this engine, or facts of this model, are not known well enough


@dataclass(frozen=True)
class Term:
    """A part of the GPU's memory."""

    name: str  # weights | drafter | states | verify | kv | graphs | context | reserve | free | held
    title: str
    bytes: int
    how: str = ""  # the arithmetic, for people


@dataclass(frozen=True)
class Change:
    """A change of one flag that makes the plan fit, and what it costs."""

    flag: str
    to: str
    was: str = ""
    gives: str = ""  # what then runs
    cost: str = ""

    def __str__(self) -> str:
        was = f" (was {self.was})" if self.was else ""
        flag = f"{self.flag} {self.to}".strip() if self.flag else self.to
        effect = "; ".join(words for words in (self.gives, self.cost) if words)
        return f"{flag}{was}" + (f": {effect}" if effect else "")


@dataclass(frozen=True)
class Fit:
    """How many requests of one length really fit at once."""

    context: int
    requests: int
    limit: str  # what ends it: requests | KV cache | states | window


@dataclass(frozen=True)
class Plan:
    engine: str
    rules: str  # which of the engine's rules, and how they were chosen
    verdict: Verdict
    summary: str  # one sentence: what comes out, or why not
    cause: str = ""  # for what cannot start: the id that diagnose gives the log of the same failure
    message: str = ""  # what the engine itself would say, where it says something
    terms: tuple[Term, ...] = ()
    kv_tokens: int | None = None
    state_slots: int | None = None
    requests: int | None = None  # that it runs at once
    context: int | None = None  # the window, in tokens
    fits: tuple[Fit, ...] = ()
    limit: str = ""  # the term that ends it
    change: Change | None = None
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    measured: bool = False  # rests on measured numbers, not on estimates

    def as_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "rules": self.rules,
            "verdict": self.verdict.value,
            "summary": self.summary,
            "cause": self.cause,
            "message": self.message,
            "terms": [{"name": t.name, "title": t.title, "bytes": t.bytes, "how": t.how} for t in self.terms],
            "kv_tokens": self.kv_tokens,
            "state_slots": self.state_slots,
            "requests": self.requests,
            "context": self.context,
            "fits": [{"context": f.context, "requests": f.requests, "limit": f.limit} for f in self.fits],
            "limit": self.limit,
            "change": None
            if self.change is None
            else {"flag": self.change.flag, "to": self.change.to, "was": self.change.was, "gives": self.change.gives,
                  "cost": self.change.cost},
            "findings": [finding.as_json() for finding in self.findings],
            "notes": list(self.notes),
            "measured": self.measured,
        }  # fmt: skip

    def finding(self) -> Finding | None:
        """The plan as a finding, for what is not simply well."""
        if self.verdict is Verdict.FITS:
            return None
        bad = self.verdict is Verdict.IMPOSSIBLE
        return Finding(
            summary=self.summary,
            layer=Layer.SERVER,
            severity=Severity.CRITICAL if bad else Severity.WARNING,
            certainty=Certainty.PROVED if self.measured else Certainty.LIKELY,
            evidence=tuple(f"{term.title}: {size(term.bytes)}{f' = {term.how}' if term.how else ''}"
                           for term in self.terms),
            advice=f"{self.change}" if self.change else "",
            id=self.cause or f"memory-{self.verdict.value}",
        )  # fmt: skip


def size(count: float) -> str:
    """Bytes for people: "16.42 GiB", "146.8 MiB"."""
    if abs(count) >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / MIB:.1f} MiB" if abs(count) >= MIB else f"{count / 1024:.1f} KiB"


def at_once(count: int) -> str:
    """Requests that run together, for people: "1 request at once", "1,024 requests at once"."""
    return f"{count:,} request{'' if count == 1 else 's'} at once"


def fits(plan_requests: int, tokens: int, contexts: Sequence[int], window: int | None, states: int | None = None,
         page: int = 1) -> tuple[Fit, ...]:  # fmt: skip
    """For each length how many requests run at once: bounded by slots, by the KV cache, and by the window."""
    found = []
    for length in sorted(set(contexts)):
        if window is not None and length > window:
            found.append(Fit(length, 0, "window"))
            continue
        rounded = -(-length // page) * page
        by_tokens = tokens // rounded if rounded else plan_requests
        least = min(plan_requests, by_tokens)
        by_states = states is not None and states == plan_requests
        limit = "KV cache" if by_tokens < plan_requests else "states" if by_states else "requests"
        found.append(Fit(length, least, limit))
    return tuple(found)
