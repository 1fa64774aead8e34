"""The words in which an engine describes its log: stages, facts and rules. Data and small pure functions.

An engine's `log.py` holds one `Engine`; what can appear in the log of any engine (the GPU, the host, Python)
is written with the same words in cuda.py, host.py and packages.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

from gpuctl.finding import Certainty, Finding, Layer, Severity

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Line:
    """One line as the program wrote it: colours, timestamps and the journal's prefix are gone."""

    text: str  # at most 64 KiB, of which rules search the first 4
    rank: str = ""  # "TP1", "DP0 TP3", "EngineCore"; empty where the line does not say
    source: str = ""  # the journal's identifier ("kernel", "systemd"); empty outside a journal
    order: int = 0  # grows along the log
    raised: Raised | None = None  # the exception that this line ends, with its traceback


@dataclass(frozen=True)
class Raised:
    """An exception as a traceback printed it."""

    type: str  # as printed: "torch.OutOfMemoryError"
    message: str
    frames: tuple[str, ...] = ()  # "file:line function", outermost first, the last forty
    rank: str = ""
    order: int = 0
    fatal: bool = False  # the line before the traceback says that the process dies of it
    stage: str = ""  # reached when it was raised
    ready: bool = False  # raised after the server said that it is ready
    root: Raised | None = None  # the first exception of a chain ("During handling of the above ...")

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type

    def passed(self, name: str) -> bool:
        """Whether a frame of the traceback, or of an exception it was raised from, names `name`."""
        if any(name in frame for frame in self.frames):
            return True
        return self.root is not None and self.root.passed(name)


@dataclass(frozen=True)
class Stage:
    """A step of starting. `text` is a literal that only the line of this step holds."""

    name: str  # one word, stable
    text: str
    title: str  # for people: what has been done when this line appears


@dataclass
class Capacity:
    """What the log says the server can hold. None: the log does not say. Bytes are of one GPU."""

    kv_tokens: int | None = None
    state_slots: int | None = None  # recurrent (Mamba, GDN) states
    max_running_requests: int | None = None  # what the server will really run at once
    requested_running_requests: int | None = None  # what it was asked for, where the log says that it was cut
    context_tokens: int | None = None
    free_before_bytes: int | None = None  # free on the GPU before anything was loaded
    weights_bytes: int | None = None
    draft_weights_bytes: int | None = None
    free_after_weights_bytes: int | None = None  # after all weights, the drafter's included
    kv_bytes: int | None = None
    state_bytes: int | None = None
    verify_bytes: int | None = None  # intermediate states that speculation keeps for verifying
    graph_bytes: int | None = None
    free_after_pools_bytes: int | None = None
    free_when_ready_bytes: int | None = None
    concurrency: float | None = None  # requests of full context that fit, where the engine says so
    accept_length: float | None = None  # the last that the log shows

    def as_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass
class Story:
    """What is known when the log has been read, for the rules that have to weigh it."""

    engine: str | None = None
    version: str = ""
    arguments: dict[str, str] = field(default_factory=dict)  # the server's own words for its flags
    capacity: Capacity = field(default_factory=Capacity)
    stages: list[str] = field(default_factory=list)  # reached, in order, each once
    counts: dict[str, int] = field(default_factory=dict)  # how often a stage's line came
    hits: dict[str, Hit] = field(default_factory=dict)  # by rule: its first line
    raised: list[Raised] = field(default_factory=list)
    exit_status: int | None = None  # negative: the signal
    running: bool | None = None  # the caller knows that the process is still there
    previous: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # earlier starts: cause, arguments
    notes: dict[str, str] = field(default_factory=dict)  # what facts keep for rules (free text)
    died: bool = False  # the log, or the exit status, says that the server is gone
    last: Line | None = None

    @property
    def stage(self) -> str:
        return self.stages[-1] if self.stages else ""

    @property
    def ready(self) -> bool:
        return "ready" in self.stages

    def flag(self, name: str) -> str | None:
        """A server argument as the log prints it, None where it is absent or the log's word for nothing."""
        value = self.arguments.get(name)
        return None if value in (None, "None", "") else value

    def number(self, name: str) -> float | None:
        value = self.flag(name)
        try:
            return None if value is None else float(value)
        except ValueError:
            return None


class Kind(IntEnum):
    CAUSE = 1
    WARNING = 2  # the server works, or worked, and this will bite
    INFO = 3


SEVERITY = {Kind.CAUSE: Severity.CRITICAL, Kind.WARNING: Severity.WARNING, Kind.INFO: Severity.INFO}


@dataclass(frozen=True)
class Hit:
    rule: Rule
    line: Line
    match: re.Match[str]
    stage: str  # reached when the line came
    ready: bool

    def __getitem__(self, group: str) -> str:
        return self.match.groupdict()[group] or ""


Explain = Callable[[Hit, Story], "Finding | None"]


@dataclass(frozen=True)
class Rule:
    """A line that means something. `needle` is a literal the line must hold: it is looked for first.

    `summary` and `advice` may name groups of `pattern` in braces. A rule whose words depend on more than its line
    has `explain`, which may also say that the line means nothing (None). Of several causes the more specific comes
    first: 90 names the very thing, 50 is a usual cause, 20 is what usually follows from another.
    """

    id: str
    needle: str
    pattern: re.Pattern[str]
    summary: str = ""
    advice: str = ""
    kind: Kind = Kind.CAUSE
    specificity: int = 60
    layer: Layer = Layer.SERVER
    certainty: Certainty = Certainty.PROVED
    separates: str = ""
    within: str = ""  # a name that the traceback of the line must pass through
    explain: Explain | None = None

    def match(self, line: Line) -> re.Match[str] | None:
        if self.needle not in line.text:
            return None
        if self.within and (line.raised is None or not line.raised.passed(self.within)):
            return None
        return self.pattern.search(line.text, 0, 4096)

    def finding(self, hit: Hit, story: Story) -> Finding | None:
        if self.explain is not None:
            return self.explain(hit, story)
        return self.say(hit)

    def say(self, hit: Hit, **changes: Any) -> Finding:
        """The finding in the rule's own words, with `changes` to any field of it."""
        groups = _Groups(hit.match.groupdict(default=""))
        known: dict[str, Any] = {
            "summary": self.summary.format_map(groups),
            "advice": self.advice.format_map(groups),
            "layer": self.layer,
            "severity": SEVERITY[self.kind],
            "certainty": self.certainty,
            "separates": self.separates,
            "id": self.id,
        }
        known.update(changes)
        evidence = tuple(known.pop("evidence", ()))
        return Finding(evidence=(shown(hit.line), *evidence), **known)


class _Groups(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "?"


def rule(id: str, needle: str, pattern: str, summary: str = "", advice: str = "", **more: Any) -> Rule:
    return Rule(id, needle, re.compile(pattern), summary, advice, **more)


def warning(id: str, needle: str, pattern: str, summary: str = "", advice: str = "", **more: Any) -> Rule:
    return Rule(id, needle, re.compile(pattern), summary, advice, kind=Kind.WARNING, **more)


def shown(line: Line, limit: int = 500) -> str:
    """The line as evidence: its rank in front, cut to a readable length."""
    text = line.text.strip()
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return f"[{line.rank}] {text}" if line.rank else text


Note = Callable[[re.Match[str], Story], None]


@dataclass(frozen=True)
class FactLine:
    """A line that says a number of the server: `note` writes it into the story."""

    needle: str
    pattern: re.Pattern[str]
    note: Note


def fact(needle: str, pattern: str, note: Note) -> FactLine:
    return FactLine(needle, re.compile(pattern), note)


@dataclass(frozen=True)
class Engine:
    """How one engine's log reads."""

    name: str
    marks: tuple[str, ...]  # literals that only this engine writes: how its log is recognised
    start: tuple[str, ...]  # literals of the line with which a start begins
    stages: tuple[Stage, ...]
    facts: tuple[FactLine, ...]
    rules: tuple[Rule, ...]
    envelope: tuple[str, ...]  # lines that say only that something died, never of what
    fatal: tuple[str, ...]  # of these: the ones that a traceback follows
    benign: tuple[str, ...]  # lines that look like failures and are none
    dead: tuple[str, ...] = ()  # lines after which the process is gone
    stopped: tuple[str, ...] = ()  # lines that say that it was told to stop
    loading: Mapping[str, str] = field(default_factory=dict)  # stage -> what a silent log at this stage means


def gib(text: str | float) -> int:
    """Bytes of a number of GiB as the engines print it (SGLang and vLLM write GB and mean GiB)."""
    return round(float(text) * GIB)


def mib(text: str | float) -> int:
    return round(float(text) * MIB)


def shortage(hit: Hit) -> str:
    """The end of "Out of GPU memory", as far as the line tells: ": 2.00 GiB wanted, 1.21 GiB free"."""
    groups = hit.match.groupdict()
    told = [f"{groups[name]} {name}" for name in ("wanted", "free") if groups.get(name)]
    return f": {', '.join(told)}" if told else ""


def size(count: float) -> str:
    """Bytes for people: "16.42 GiB", "146.8 MiB"."""
    if abs(count) >= GIB:
        return f"{count / GIB:.2f} GiB"
    if abs(count) >= MIB:
        return f"{count / MIB:.1f} MiB"
    return f"{count / 1024:.1f} KiB" if abs(count) >= 1024 else f"{count:.0f} B"
