"""Why a server did not start, or died: read from its log, whatever the engine, however long and mangled the log.

`diagnose` takes the bytes of a log and what the caller knows of the process, and gives a `Diagnosis`: how far the
server came, what it can hold, and the causes, the most specific first. Lines that only say that something died are
never causes; neither are warnings that every healthy log has. Pure: reading files and journals is the caller's.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import gpuctl.engines
from gpuctl.finding import Finding, Severity
from gpuctl.logs import cuda, host, packages, verdict
from gpuctl.logs.lines import BLOCK, Sieve, read
from gpuctl.logs.rule import Capacity, Engine, Hit, Line, Rule, Story
from gpuctl.logs.trace import Traces

_COMMON = (*host.RULES, *packages.RULES, *cuda.RULES)
STARTS_KEPT = 20

# Every literal that a rule, fact, stage or traceback looks for holds one of these (a test sees to it); few, because a
# line of a new shape is searched for each.
GATES = (
    b"rror", b"iled", b"mem", b"model", b"ize", b"not ", b"server", b"ache ", b"len", b"No ", b"id ", b"weight",
    b"ece", b"CUDA", b"nit", b"ill", b"t an ", b"raph ", b"able ", b"pool", b"alread", b"num_", b"tart", b"exit",
    b"build", b"_re", b"default", b"TllmGen", b"n_slots", b"capped", b"reduced", b"Maximum", b"supported", b"TMA",
    b"HAMI", b"tensor", b"Unknown", b"ambiguous", b"offloaded", b"W4A16", b"watchdog", b"libvgpu", b"vocab", b"nvcc",
    b"Traceback", b"listening", b"following", b"undefined", b"SIGTERM", b"disabled", b"FusedMoe", b"MoE", b"xception",
    b"entation", b"onnection", b"complete", b"took", b"image", b"Sleeping", b"missing and no",
)  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """What a log says of one start of a server: the last one in it."""

    engine: str | None  # None: no engine's words were found
    version: str  # of the engine, where the log says it
    stage: str  # the furthest reached, a stage's name; "" for none
    stage_title: str
    stages: tuple[str, ...]
    ready: bool
    died: bool
    stopped: bool  # it was told to stop, and stopped
    exit_status: int | None  # negative: the signal
    starts: int  # how many starts the log holds
    capacity: Capacity
    arguments: dict[str, str]  # as the server printed them
    causes: tuple[Finding, ...]  # the most specific first
    warnings: tuple[Finding, ...]
    exception: str  # the first of the first rank that died; "" for none

    @property
    def verdict(self) -> str:
        """failed | stopped | serving | starting. A server that is there and has a cause does not serve, either."""
        if self.died or self.causes:
            return "failed"
        if self.stopped:
            return "stopped"
        return "serving" if self.ready else "starting"

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "engine": self.engine,
            "version": self.version,
            "stage": self.stage,
            "stages": list(self.stages),
            "ready": self.ready,
            "died": self.died,
            "stopped": self.stopped,
            "exit_status": self.exit_status,
            "starts": self.starts,
            "capacity": self.capacity.as_json(),
            "causes": [finding.as_json() for finding in self.causes],
            "warnings": [finding.as_json() for finding in self.warnings],
            "exception": self.exception,
        }


def diagnose(
    log: Iterable[bytes],
    *,
    engine: str | None = None,
    exit_status: int | None = None,
    running: bool | None = None,
) -> Diagnosis:
    """Reads a log given as lines or pieces of any size.

    `engine`: its name, where the caller knows it (else it is recognised). `exit_status`: the process's, as a shell or
    as Python gives it (137 and -9 are the same). `running`: whether the process is still there, where that is known.
    """
    reader = Reader(engine)
    parts: list[bytes] = []
    held = 0
    for piece in log:
        parts.append(piece)
        held += len(piece)
        if held >= BLOCK:
            reader.feed(b"".join(parts))
            parts, held = [], 0
    reader.feed(b"".join(parts))
    return reader.diagnosis(exit_status=exit_status, running=running)


def common_rules() -> tuple[Rule, ...]:
    """The rules for what can stand in the log of any engine."""
    return _COMMON


def engines() -> dict[str, Engine]:
    """The engines that can be recognised: every folder of gpuctl/engines that holds a log.py."""
    found = {}
    for module in pkgutil.iter_modules(gpuctl.engines.__path__):
        if not module.ispkg:
            continue
        try:
            found[module.name] = importlib.import_module(f"gpuctl.engines.{module.name}.log").ENGINE
        except ModuleNotFoundError as error:
            if error.name != f"gpuctl.engines.{module.name}.log":
                raise
    return found


@dataclass
class _Start:
    """What is gathered of one start."""

    story: Story = field(default_factory=Story)
    hits: list[Hit] = field(default_factory=list)
    votes: dict[str, int] = field(default_factory=dict)
    seen: dict[str, set[str]] = field(default_factory=dict)  # by engine: the stages reached
    dead: dict[str, bool] = field(default_factory=dict)  # by engine: the log says that it died
    told: dict[str, bool] = field(default_factory=dict)  # by engine: the log says that it was told to stop
    stopped: int | None = None  # exit status that a journal tells
    owner: dict[str, str] = field(default_factory=dict)  # by fact: the rank whose numbers are taken, the first


class Reader:
    """Reads a log as it grows. `feed` takes bytes; `diagnosis` may be asked for at any time."""

    def __init__(self, engine: str | None = None) -> None:
        self._engines = engines()
        if engine is not None and engine not in self._engines:
            raise ValueError(f"no engine {engine!r}; there are {', '.join(sorted(self._engines))}")
        self._asked = engine
        self._sieve = Sieve(GATES)
        self._traces = Traces(tuple(text for e in self._engines.values() for text in e.fatal))
        self._start = _Start()
        self._starts = 0
        self._previous: list[tuple[str, dict[str, str]]] = []
        self._order = 0
        self._stage: dict[str, str] = {}  # by engine: the stage of the last line that names one
        self._rules: tuple[tuple[str, tuple[Rule, ...]], ...] = (
            *((name, e.rules) for name, e in self._engines.items()),
            ("", _COMMON),
        )
        self._benign = tuple(text for e in self._engines.values() for text in e.benign)

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the log, cut anywhere."""
        for raw in self._sieve.feed(data):
            self._line(raw)

    def stage(self) -> str:
        """The furthest stage of starting that the complete lines so far show; "" for none."""
        for raw in self._sieve.flush():
            self._line(raw)
        return self._story(self._start).stage

    def title(self) -> str:
        """The same in words for people: what has been done; "" for none."""
        stage, name = self.stage(), self._engine_name(self._start)
        return verdict.title(self._engines[name].stages, stage) if name and stage else ""

    def dying(self) -> bool:
        """Whether a line so far says that the server goes down, and none that it was told to."""
        name = self._engine_name(self._start)
        return name is not None and bool(self._start.dead.get(name)) and not self._start.told.get(name)

    def diagnosis(self, *, exit_status: int | None = None, running: bool | None = None) -> Diagnosis:
        for raw in self._sieve.close():
            self._line(raw)
        return self._finish(self._start, exit_status, running)

    # One line

    def _line(self, raw: bytes) -> None:
        text, rank, source, tagged = read(raw)
        if not text or any(benign in text for benign in self._benign):
            return
        self._order += 1
        self._begin(text, source)
        start = self._start
        for name, engine in self._engines.items():
            if any(mark in text for mark in engine.marks):
                start.votes[name] = start.votes.get(name, 0) + 1
        line = self._traces.line(Line(text, rank, source, self._order), tagged, self._where())
        self._sieve.attend = self._traces.open
        if line is None:  # inside a traceback
            return
        if line.raised is not None:
            start.story.raised.append(line.raised)
            del start.story.raised[200:]
        for name, engine in self._engines.items():
            self._engine(name, engine, line)
        if source == "systemd":
            self._systemd(text)
        for name, rules in self._rules:
            for rule in rules:
                match = rule.match(line)
                if match is not None:
                    start.hits.append(Hit(rule, line, match, *self._where(name)))
                    if len(start.hits) > 2000:
                        del start.hits[1000:]

    def _begin(self, text: str, source: str) -> None:
        """Notices the beginning of another start of the server."""
        if source == "systemd":
            begins = text.startswith("Started ")
        else:
            begins = any(mark in text for engine in self._engines.values() for mark in engine.start)
        if not begins:
            return
        start = self._start
        outside = [hit for hit in start.hits if hit.line.source == "systemd"]
        if start.seen or start.story.raised or len(start.hits) > len(outside):
            finished = self._finish(start, None, None)
            cause = finished.causes[0].id if finished.causes else ""
            self._previous.append((cause, finished.arguments))
            del self._previous[:-STARTS_KEPT]
            self._starts += 1
            self._start = _Start(hits=outside[-1:])  # what systemd said last belongs to the start that follows
            self._stage = {}
            self._traces.reset()

    def _engine(self, name: str, engine: Engine, line: Line) -> None:
        start, text = self._start, line.text
        for stage in engine.stages:
            if stage.text in text:
                start.seen.setdefault(name, set()).add(stage.name)
                self._stage[name] = stage.name
                key = f"{name} {stage.name} {line.rank}"
                start.story.counts[key] = start.story.counts.get(key, 0) + 1
                break
        for dead in engine.dead:
            if dead in text:
                start.dead[name] = True
        for stopped in engine.stopped:
            if stopped in text:
                start.told[name] = True
        for fact in engine.facts:
            match = fact.pattern.search(text) if fact.needle in text else None
            if match is not None and start.owner.setdefault(fact.needle, line.rank) == line.rank:
                fact.note(match, start.story)

    def _systemd(self, text: str) -> None:
        """Takes the exit status from systemd's own words."""
        if "Main process exited" not in text and "Control process exited" not in text:
            return
        _, _, status = text.partition("status=")
        number = status.split("/")[0].strip()
        if number.isdigit():
            killed = "code=killed" in text or "code=dumped" in text
            self._start.stopped = -int(number) if killed else int(number)

    def _where(self, name: str = "") -> tuple[str, bool]:
        """The stage reached now, and whether the server has been ready: of one engine, or of the likeliest."""
        name = name or self._engine_name(self._start) or ""
        return self._stage.get(name, ""), "ready" in self._start.seen.get(name, set())

    def _engine_name(self, start: _Start) -> str | None:
        if self._asked is not None:
            return self._asked
        if start.seen:
            return max(start.seen, key=lambda name: (len(start.seen[name]), start.votes.get(name, 0)))
        return max(start.votes, key=lambda name: start.votes[name]) if start.votes else None

    # The whole

    def _story(self, start: _Start) -> Story:
        name = self._engine_name(start)
        story = replace(start.story, engine=name, stages=[], counts={}, previous=list(self._previous))
        if name is not None:
            seen = start.seen.get(name, set())
            story.stages = list(dict.fromkeys(s.name for s in self._engines[name].stages if s.name in seen))
            for key, count in start.story.counts.items():
                engine, stage, _rank = key.split(" ", 2)
                if engine == name:
                    story.counts[stage] = max(story.counts.get(stage, 0), count)
        return story

    def _finish(self, start: _Start, exit_status: int | None, running: bool | None) -> Diagnosis:
        story = self._story(start)
        name = story.engine
        engine = self._engines[name] if name else None
        status = start.stopped if exit_status is None else exit_status
        if status is not None and status > 128:
            status = 128 - status
        story.exit_status, story.running = status, running
        told = bool(name and start.told.get(name)) and not any(raised.fatal for raised in story.raised)
        ended = status is not None and status not in (0, -2, -15)
        story.died = running is not True and not told and (ended or bool(name and start.dead.get(name)))
        last = read(self._sieve.last)
        story.last = Line(last[0], last[1], last[2], self._order)

        others = {id(rule) for e in self._engines.values() if engine not in (None, e) for rule in e.rules}
        hits = [hit for hit in start.hits if id(hit.rule) not in others]
        for hit in hits:
            story.hits.setdefault(hit.rule.id, hit)
        first = verdict.first_raised(story, engine)
        causes, warnings = verdict.weigh(hits, story, first)
        if not verdict.explained(causes, first, hits):
            causes.append((45.0, first.order if first else 0, verdict.unrecognised(first, story)) if first else None)
        ranked = [c for c in causes if c is not None]
        ranked.sort(key=lambda cause: (-cause[0], cause[1]))
        found = [finding for specific, _, finding in ranked if specific >= 45 or ranked[0][0] < 45]
        if not found:
            silent = verdict.silence(story, engine)
            if silent is not None:
                (found if silent.severity is Severity.CRITICAL else warnings).append(silent)
        stages = engine.stages if engine else ()
        return Diagnosis(
            engine=name,
            version=story.version,
            stage=story.stage,
            stage_title=verdict.title(stages, story.stage),
            stages=tuple(story.stages),
            ready=story.ready,
            died=story.died,
            stopped=told or status in (0, -2, -15),
            exit_status=status,
            starts=self._starts + 1,
            capacity=story.capacity,
            arguments=dict(story.arguments),
            causes=verdict.once(found),
            warnings=verdict.once(warnings),
            exception=str(first) if first else "",
        )
