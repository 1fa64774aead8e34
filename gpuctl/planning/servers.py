"""Each server of a phase against what is known of its machine: memory, flags, context, speed and time. Pure."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from gpuctl import flags, roofline, tiny_model
from gpuctl.cells import Cell, Decision
from gpuctl.config import Inventory, Model
from gpuctl.engines import Launch, environment
from gpuctl.facts import gguf, gpus, model_config
from gpuctl.facts.model import ModelFacts
from gpuctl.finding import Finding, Severity
from gpuctl.flags import arguments
from gpuctl.memory import Change, Fit, Gpu, Plan, Question, Verdict
from gpuctl.planning.known import Known, words_of
from gpuctl.records import MEASURED, CellId, Failure, Record
from gpuctl.roofline import PREFILL_REACHED, REACHED, REACHED_BY_MANY, Decoder

MIB = 1 << 20
WARM_UP_TOKENS = 32
LOAD_BYTES_S = 2e9  # weights come onto a GPU at about this speed from a tmpfs; an estimate
START_S, STOP_S, CELL_S = 60.0, 10.0, 2.0  # a start beside loading; a stop; what a cell costs beside its requests

TP = ("--tp-size", "--tensor-parallel-size", "--tp", "-tp")


def ranks(argv: Sequence[str]) -> int:
    """GPUs that share each layer."""
    return max(1, arguments(argv).whole(*TP) or 1)


@dataclass(frozen=True)
class CellPlan:
    """What will become of one cell."""

    cell: CellId
    prompt: int  # tokens, of the longest request; estimated unless the point says it
    tokens: int  # of its answer
    concurrency: int
    outcome: str  # measured | limited | refused | impossible | unknown
    why: str  # for what is not simply measured
    roofline_tok_s: float | None  # of one request, without what speculation adds
    seconds: float | None
    seconds_from: str  # an earlier run | the roofline | ""
    pending: bool | None  # None: not known without the machine
    pending_why: str

    def as_json(self) -> dict[str, Any]:
        return {
            "cell": str(self.cell), "prompt_tokens": self.prompt, "max_tokens": self.tokens,
            "concurrency": self.concurrency, "outcome": self.outcome, "why": self.why,
            "roofline_tok_s": _rounded(self.roofline_tok_s), "seconds": _rounded(self.seconds),
            "seconds_from": self.seconds_from, "pending": self.pending, "pending_why": self.pending_why,
        }  # fmt: skip


@dataclass(frozen=True)
class ServerPlan:
    """One server: its memory, its cells, how long it takes."""

    name: str
    title: str
    argv: tuple[str, ...]
    tp: int
    gpu: Gpu | None
    plan: Plan
    cells: tuple[CellPlan, ...] = ()
    start_s: float | None = None
    start_from: str = ""
    speed: str = ""  # where the bandwidth is from
    flags_from: str = ""  # what the flags were checked against

    @property
    def seconds(self) -> float | None:
        """For what is pending; None where it cannot be told."""
        left = [cell for cell in self.cells if cell.pending is not False and cell.outcome not in ("impossible",)]
        if not left:
            return 0.0
        known = [cell.seconds for cell in left if cell.seconds is not None]
        if len(known) < len(left) or self.start_s is None:
            return None
        return self.start_s + STOP_S + sum(known)

    @property
    def verdict(self) -> Verdict:
        """The plan's; limited, where some cell will be refused or run fewer requests than it asks."""
        if self.plan.verdict is not Verdict.FITS:
            return self.plan.verdict
        less = any(cell.outcome in ("limited", "refused") for cell in self.cells)
        return Verdict.LIMITED if less else Verdict.FITS

    def as_json(self) -> dict[str, Any]:
        return {
            "server": self.name, "title": self.title, "verdict": self.verdict.value, "argv": list(self.argv),
            "gpus": self.tp, "gpu": None if self.gpu is None else
            {"name": self.gpu.name, "total_bytes": self.gpu.total_bytes, "free_bytes": self.gpu.free_bytes},
            "memory": self.plan.as_json(), "flags_checked_against": self.flags_from, "bandwidth": self.speed,
            "start_s": _rounded(self.start_s), "start_from": self.start_from, "seconds": _rounded(self.seconds),
            "cells": [cell.as_json() for cell in self.cells],
        }  # fmt: skip


@dataclass(frozen=True)
class Space:
    """What a model's files need where they will lie."""

    model: str
    path: str
    bytes: int | None
    kind: str  # tmpfs | disk
    there: bool | None  # whether they lie there already; None: not known
    free_bytes: int | None = None
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class History:
    """What earlier runs say of time."""

    records: Mapping[CellId, Record] = field(default_factory=dict)
    decisions: Mapping[CellId, Decision] = field(default_factory=dict)  # which cells are pending, and why
    sure: bool = True  # the decisions rest on the machine as it is now

    def ready_s(self, server: str) -> float | None:
        told = [r.server.get("ready_s") for r in self.records.values() if r.cell.server == server]
        known = [float(s) for s in told if isinstance(s, int | float) and s > 0]
        return known[-1] if known else None

    def accepted(self, server: str) -> float | None:
        """Tokens accepted a step under speculation, on average of what was measured of that server."""
        found = [
            record.metrics["acceptance_length"].mean
            for record in self.records.values()
            if record.cell.server == server and record.state in MEASURED and "acceptance_length" in record.metrics
        ]
        return sum(found) / len(found) if found else None


# Facts


def facts_of(name: str | None, path: str | None, model: Model | None, known: Known) -> tuple[ModelFacts | None, str]:
    """A model's facts, from its own files on the machine or from the inventory; or why there are none."""
    if name is None or path is None:
        return None, ""
    told = (known.answer.get("models") or {}).get(path) or {}
    try:
        if told.get("gguf"):
            return gguf.read(told["gguf"], int(told.get("bytes") or 0)), ""
        if told.get("config"):
            return _as_stored(model_config.read(json.loads(told["config"]), stored_bytes=told.get("stored"))), ""
        if name in known.stated:
            return model_config.read(json.loads(known.stated[name])), ""
    except (model_config.NotAModel, ValueError) as error:
        return None, f"{name}: its configuration cannot be read: {error}"
    if model is not None and model.make == "tiny":
        return tiny_model.facts(), ""
    if told.get("error"):
        return None, str(told["error"])
    if known.answer:
        return None, f"{path}: no config.json and no GGUF header there"
    return None, f"nothing is known of {name}: `config:` in models.yml names a copy of its config.json"


def _as_stored(facts: ModelFacts) -> ModelFacts:
    """Files that hold less than half of what the configuration describes are not all there, or dummies."""
    if facts.stored_bytes is None or facts.stored_bytes >= facts.computed_bytes() / 2:
        return facts
    note = f"the index of its files says {_gib(facts.stored_bytes)}: planned by the configuration instead"
    return replace(facts, stored_bytes=None, notes=(*facts.notes, note))


def visible(known: Known, env: Mapping[str, str]) -> tuple[Any, ...] | None:
    """The GPUs that a server with these variables sees; None: not known."""
    if known.gpus is None:
        return None
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return known.gpus
    indices = [word.strip() for word in chosen.split(",") if word.strip()]
    if not all(word.isdigit() for word in indices):
        return known.gpus[: len(indices)] if indices and "-1" not in indices else ()
    return tuple(known.gpus[int(word)] for word in indices if int(word) < len(known.gpus))


def question_of(
    launch: Launch, engine: ModuleType, inventory: Inventory, known: Known, *, requests: int = 1,
    contexts: Sequence[int] = (), as_is: bool = False, version: str | None = None,
) -> tuple[Question | None, str]:  # fmt: skip
    """What is to be planned of a server; or why it cannot be. `as_is`: beside what others hold of the GPUs now."""
    server = launch.server
    target, why = facts_of(server.model, launch.model, inventory.models.get(server.model or ""), known)
    if target is None:
        return None, why
    draft, no_draft = facts_of(server.draft, launch.draft, inventory.models.get(server.draft or ""), known)
    if server.draft is not None and draft is None:
        return None, no_draft
    env = environment(engine, launch)
    argv = tuple(engine.argv(launch))[len(words_of(launch, engine)) :]
    if server.engine in flags.UNDERSCORES:
        argv = tuple(map(flags.dashed, argv))
    seen = visible(known, env)
    told = known.engine(launch, engine)
    memory = known.answer.get("memory") or {}
    if seen is None:
        return None, (
            f"nothing is known of {known.machine}'s GPUs: `gpuctl_gpus: {{count: 1, name: ..., memory_mib: ...}}` in "
            "hosts.yml states them"
        )
    if not seen:
        if engine.__name__.rpartition(".")[2] != "llamacpp":
            return None, f"there is no GPU on {known.machine} that {server.engine} could see"
        gpu = Gpu(int(memory.get("MemTotal") or 0), int(memory["MemAvailable"]) if "MemAvailable" in memory else None,
                  "the machine's memory")  # fmt: skip
    else:
        first = min(seen[: ranks(argv)], key=lambda one: one.free_mib if one.free_mib is not None else one.total_mib)
        free = first.free_mib * MIB if as_is and first.free_mib is not None else None
        gpu = Gpu(first.total_mib * MIB, free, first.name)
    installed = dict(told.get("files") or {})
    if text := known.help_of(launch, engine):
        installed["--help"] = text
    return Question(
        argv=argv, target=target, draft=draft, gpu=gpu, gpus=len(seen), env=env, requests=requests, contexts=contexts,
        installed=installed, version=version or str(told.get("version") or "") or server.version or "",
    ), ""  # fmt: skip


def planner(engine: str) -> ModuleType | None:
    """gpuctl/engines/<engine>/memory.py, where there is one."""
    try:
        return importlib.import_module(f"gpuctl.engines.{engine}.memory")
    except ModuleNotFoundError as error:
        if error.name not in (f"gpuctl.engines.{engine}.memory", f"gpuctl.engines.{engine}"):
            raise
        return None


def plan_of(question: Question, engine: str) -> Plan:
    """Memory and flags together: flags that the installed version refuses make it impossible."""
    module = planner(engine)
    assert module is not None
    given = getattr(module, "read", arguments)(question.argv)
    bad = tuple(flags.unreadable(given, module.NUMBERS))
    found: Plan = _unreadable(engine, bad) if bad else module.plan(question)
    names = importlib.import_module(f"gpuctl.engines.{engine}.arguments") if engine == "sglang" else module
    text = question.installed.get("--help")
    if not text:
        slips, others = flags.unknown(question.argv, _names(module, names))
        slips = (*slips, *flags.unread(given, module.WORDS))
        notes = (f"flags not known offline, and not checked: {', '.join(others)}",) if others else ()
        return replace(found, findings=flags.worst((*slips, *found.findings)), notes=(*notes, *found.notes))
    try:
        known = flags.parse_help(text, engine=engine)
    except flags.NoFlags:
        return replace(found, notes=(*found.notes, "the installed version's --help could not be read"))
    wrong = tuple(flags.check(question.argv, known, engine=engine, renamed=names.RENAMED, foreign=names.FOREIGN))
    worst = next((f for f in wrong if f.severity is Severity.CRITICAL), None)
    if worst is None:
        return replace(found, findings=flags.worst((*wrong, *found.findings)))
    return replace(
        found, verdict=Verdict.IMPOSSIBLE, summary=worst.summary, cause=worst.id, message="",
        change=Change("", worst.advice), requests=0, findings=flags.worst((*wrong, *found.findings)), limit="flags",
    )  # fmt: skip


def _names(module: ModuleType, arguments: ModuleType) -> set[str]:
    """Flags that are known of an engine without its --help: flags.txt beside it, and what its rules speak of."""
    listed = Path(str(module.__file__)).with_name("flags.txt").read_text(encoding="utf-8").split()
    read = {name for number in module.NUMBERS for name in number.names}
    return {*listed, *read, *arguments.RENAMED, *arguments.RENAMED.values()}


def _unreadable(engine: str, bad: tuple[Finding, ...]) -> Plan:
    """Values that are no numbers: nothing can be computed from them."""
    return Plan(engine, "", Verdict.IMPOSSIBLE, bad[0].summary, bad[0].id, requests=0, limit="flags",
                change=Change("", bad[0].advice), findings=bad)  # fmt: skip


def refusal(question: Question, engine: str) -> Plan | None:
    """The plan of a server that cannot work, whatever the doubt in it; None for one that may."""
    if planner(engine) is None:
        return None
    found = plan_of(question, engine)
    if found.verdict is not Verdict.IMPOSSIBLE:
        return None
    module = planner(engine)
    assert module is not None
    gpu, doubt = question.gpu, module.doubt(question)
    free = gpu.free_bytes + doubt if gpu.free_bytes is not None else None
    better = replace(question, gpu=replace(gpu, total_bytes=gpu.total_bytes + doubt, free_bytes=free))
    return found if plan_of(better, engine).verdict is Verdict.IMPOSSIBLE else None


# Speed


def speed_of(known: Known, name: str) -> gpus.Speed | None:
    told = next((gpu for gpu in known.gpus or () if gpu.name == name), None)
    return gpus.speed(
        name, bus_bits=told.bus_bits if told else None, memory_mhz=told.memory_mhz if told else None
    )  # fmt: skip


def decoder_of(question: Question) -> Decoder:
    """What the server of a question reads a step, from flags that all engines have under some name."""
    given = arguments(question.argv)
    dtype = given.text("--kv-cache-dtype", "--cache-type-k", "-ctk") or ""
    drafted = given.whole("--speculative-num-draft-tokens", "--spec-draft-n-max") or 0
    element = 1.0 if dtype.startswith(("fp8", "q8")) else 2.0
    half = (given.text("--mamba-ssm-dtype") or "").startswith(("bfloat16", "float16"))
    draft = question.draft
    if draft is not None and not drafted:
        drafted = draft.draft_block or 4
    passes = 1 if draft is None or draft.draft_block else given.whole("--speculative-num-steps") or max(drafted - 1, 1)
    return Decoder(question.target, ranks(question.argv), element, 2 if half else 4, draft, passes, drafted)


def ceiling(question: Question, known: Known, cell: Cell, at_once: int | None = None) -> float | None:
    """Tokens a second that one request of a cell can at most get, without what speculation adds; None: not known."""
    speed = speed_of(known, question.gpu.name)
    if speed is None:
        return None
    running = max(1, min(cell.point.concurrency, at_once or cell.point.concurrency))
    context = prompt_tokens(cell, question.target) + cell.point.max_tokens // 2
    return roofline.tok_s(decoder_of(question), speed, requests=running, context=context)


_WORD = re.compile(r"\w+|[^\w\s]")


def prompt_tokens(cell: Cell, target: ModelFacts | None = None) -> int:
    """Tokens of the longest prompt of a cell. Where the point does not say, an estimate from its text."""
    if cell.point.prompt_tokens:
        return cell.point.prompt_tokens
    longest = 0
    for asked in cell.requests(cell.point, 0, 0):
        turns = asked.get("turns") or [asked.get("prompt") or ""]
        text = " ".join(str(turn) for turn in turns)
        if target is not None and 0 < target.vocab < 1000:
            count = len(text.encode())  # a token a byte
        else:
            count = sum(-(-len(word) // 6) for word in _WORD.findall(text)) + 8 * len(turns)
        longest = max(longest, count + (len(turns) - 1) * cell.point.max_tokens)
    return longest


# Cells


def plan_server(
    launch: Launch, engine: ModuleType | None, cells: Sequence[Cell], inventory: Inventory, known: Known,
    history: History, *, requests: int | None = None, contexts: Sequence[int] = (), as_is: bool = False,
    version: str | None = None,
) -> ServerPlan:  # fmt: skip
    """One server with its cells. `requests`, `contexts`: asked for beside what its cells ask."""
    title = launch.server.title or launch.server.engine
    if engine is None:
        what = (
            "It is not deployed by gpuctl" if launch.server.url else f"{launch.server.engine}'s memory is not planned"
        )
        plan = Plan(launch.server.engine, "", Verdict.UNKNOWN, f"{what}: nothing is known of its memory")
        return ServerPlan(launch.name, title, (), 0, None, plan, _unplanned(cells, plan, history))
    argv = tuple(engine.argv(launch))
    if gone := known.missing(launch, engine):
        plan = Plan(
            launch.server.engine, "", Verdict.IMPOSSIBLE, f"The server cannot be started there: {gone}: not found",
            "program-missing", change=Change("", "install it there, or correct `program:` in servers.yml"), requests=0,
        )  # fmt: skip
        return ServerPlan(launch.name, title, argv, ranks(argv), None, plan,
                          _unplanned(cells, plan, history, "impossible"))  # fmt: skip
    wanted = max([requests or 1, *(cell.point.concurrency for cell in cells)])
    question, why = question_of(
        launch, engine, inventory, known, requests=requests or wanted, contexts=contexts, as_is=as_is, version=version
    )
    if question is None:
        plan = Plan(launch.server.engine, "", Verdict.UNKNOWN, why[:1].upper() + why[1:])
        return ServerPlan(launch.name, title, argv, ranks(argv), None, plan,
                          _unplanned(cells, plan, history))  # fmt: skip
    plan = plan_of(question, launch.server.engine)
    lengths = {cell.id: prompt_tokens(cell, question.target) + cell.point.max_tokens for cell in cells}
    fits = {}
    if lengths and plan.verdict is not Verdict.IMPOSSIBLE:
        module = planner(launch.server.engine)
        assert module is not None
        every = module.plan(replace(question, contexts=tuple(set(lengths.values())), requests=1))
        fits = {fit.context: fit for fit in every.fits}
    speed = speed_of(known, question.gpu.name)
    start, start_from = _start_s(launch, question, history)
    return ServerPlan(
        launch.name, title, argv, ranks(question.argv), question.gpu, plan,
        tuple(_cell(cell, lengths[cell.id], plan, fits.get(lengths[cell.id]), question, known, speed, history)
              for cell in cells),
        start, start_from, speed.source if speed is not None else "",
        "" if "--help" not in question.installed else f"its own --help ({known.basis})",
    )  # fmt: skip


def _unplanned(cells: Iterable[Cell], plan: Plan, history: History, outcome: str = "unknown") -> tuple[CellPlan, ...]:
    return tuple(
        CellPlan(cell.id, prompt_tokens(cell), cell.point.max_tokens, cell.point.concurrency, outcome, plan.summary,
                 None, *_earlier(cell, history), *_pending(cell, history))
        for cell in cells
    )  # fmt: skip


def _cell(
    cell: Cell, length: int, plan: Plan, fit: Fit | None, question: Question, known: Known, speed: gpus.Speed | None,
    history: History,
) -> CellPlan:  # fmt: skip
    outcome, why = "measured", ""
    wanted = cell.point.concurrency
    if plan.verdict is Verdict.IMPOSSIBLE:
        outcome, why = "impossible", plan.summary
    elif fit is not None and fit.limit == "window" and fit.requests == 0:
        outcome = "refused"
        why = f"{length - cell.point.max_tokens} + {cell.point.max_tokens} tokens exceed the window of {plan.context}"
        why += ": HTTP 400"
    elif fit is not None and fit.requests == 0:
        outcome, why = "refused", f"{length} tokens exceed the KV cache of {plan.kv_tokens}: HTTP 400"
    elif fit is not None and fit.requests < wanted:
        outcome, why = "limited", f"{fit.requests} of {wanted} requests run at once"
    running = max(1, min(wanted, fit.requests if fit is not None else wanted))
    top = ceiling(question, known, cell, running) if plan.terms else None
    seconds, source = _earlier(cell, history)
    if seconds is None and top is not None and speed is not None:
        seconds, source = _from_roofline(cell, length, question, speed, top, running, history), "the roofline"
    if outcome in ("impossible", "refused"):
        seconds, source = (0.0, "") if outcome == "impossible" else (CELL_S, "")
    return CellPlan(cell.id, length - cell.point.max_tokens, cell.point.max_tokens, wanted, outcome, why, top, seconds,
                    source, *_pending(cell, history))  # fmt: skip


def _pending(cell: Cell, history: History) -> tuple[bool | None, str]:
    decision = history.decisions.get(cell.id)
    if decision is None:
        return None, ""
    if decision.measure or history.sure:
        return decision.measure, decision.why
    return False, f"{decision.why}, as far as it can be told without the machine"


def _earlier(cell: Cell, history: History) -> tuple[float | None, str]:
    record = history.records.get(cell.id)
    if record is None or record.state not in MEASURED:
        return None, ""
    try:
        took = datetime.fromisoformat(record.ended) - datetime.fromisoformat(record.started)
    except ValueError:
        return None, ""
    return max(took.total_seconds(), 0.0), "an earlier run"


def _from_roofline(
    cell: Cell, length: int, question: Question, speed: gpus.Speed, top: float, running: int, history: History
) -> float:
    """Warm-up and repetitions of a cell at what servers reach of the roofline."""
    point = cell.point
    many = ranks(question.argv) > 1
    accepted = history.accepted(cell.id.server) or 1.0
    rate = top * accepted * (REACHED_BY_MANY if many else REACHED)
    reads = roofline.prefill_tok_s(question.target, speed, ranks(question.argv))
    prompt = length - point.max_tokens
    asked = cell.requests(point, 0, point.prompt_tokens or 0)
    turns = sum(len(one.get("turns") or [1]) for one in asked)
    read_s = prompt * len(asked) / (reads * PREFILL_REACHED) if reads else 0.0
    repetition = read_s + turns * point.max_tokens / running / rate
    warm = read_s + min(WARM_UP_TOKENS, point.max_tokens) / rate
    lengths = 3 * read_s / max(len(asked), 1) if point.prompt_tokens else 0.0  # prompts sent to find their length
    return CELL_S + warm + lengths + cell.reps * repetition


def _start_s(launch: Launch, question: Question, history: History) -> tuple[float, str]:
    earlier = history.ready_s(launch.name)
    if earlier is not None:
        return earlier, "an earlier run"
    loaded = question.target.weight_bytes() + (question.draft.weight_bytes() if question.draft is not None else 0)
    if question.gpus == 0:
        return 2.0 + loaded / LOAD_BYTES_S, "an estimate"
    return START_S + loaded / LOAD_BYTES_S, "an estimate"


# Space


def spaces(launches: Iterable[Launch], inventory: Inventory, known: Known) -> tuple[Space, ...]:
    """What the models of these servers need where they will lie; each model once."""
    found: dict[str, Space] = {}
    for launch in launches:
        for name, path in ((launch.server.model, launch.model), (launch.server.draft, launch.draft)):
            if name is None or path is None or name in found:
                continue
            found[name] = _space(name, path, inventory.models[name], known)
    return tuple(found.values())


def _space(name: str, path: str, model: Model, known: Known) -> Space:
    told = (known.answer.get("models") or {}).get(path) or {}
    facts, _ = facts_of(name, path, model, known)
    lies = (known.answer.get("space") or {}).get(path) or {}
    there = None if not known.answer else not told.get("error")
    size = told.get("bytes") or (round(facts.stored_bytes or facts.computed_bytes()) if facts is not None else None)
    if facts is not None and not told.get("bytes") and facts.stored_bytes is None:
        size = facts.computed_bytes() + facts.computed_bytes(1, facts.mtp_parts)
    kind = "tmpfs" if model.stage or lies.get("kind") == "tmpfs" else "disk"
    free = lies.get("free") if isinstance(lies.get("free"), int) else None
    problem = ""
    if size is not None and not there and known.answer:
        memory = (known.answer.get("memory") or {}).get("MemAvailable")
        if model.stage and lies.get("kind") not in (None, "tmpfs"):
            problem = f"{lies.get('mount')} is no tmpfs but {lies.get('kind')}: `gpuctl stage {name}` makes one"
        elif free is not None and free < size and lies.get("kind") == kind:
            problem = f"{_gib(size)} are needed at {path}, {_gib(free)} are free there"
        if model.stage and isinstance(memory, int) and memory < size:
            problem = f"a tmpfs of {_gib(size)} needs as much memory; {_gib(memory)} of the machine's are available"
    return Space(name, path, size, kind, there, free, problem)


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def held(known: Known, tp: int) -> tuple[str, ...]:
    """GPUs of which others hold more than a GiB now."""
    return tuple(
        f"GPU {index}: {_gib((gpu.total_mib - gpu.free_mib) * MIB)} are held now"
        for index, gpu in enumerate(known.gpus or ())
        if gpu.free_mib is not None and gpu.total_mib - gpu.free_mib > 1024 + 620 and index < max(tp, 1)
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


class Foresight:
    """What bench asks of plans: which servers it need not start, and the ceiling of a cell. `known` None: nothing."""

    def __init__(self, inventory: Inventory, known: Known | None, *, force: bool = False) -> None:
        self._inventory, self._known, self._force = inventory, known, force

    def _question(self, launch: Launch, engine: ModuleType) -> Question | None:
        if self._known is None or not hasattr(engine, "PROGRAM"):
            return None
        return question_of(launch, engine, self._inventory, self._known)[0]

    def refused(self, launch: Launch, engine: ModuleType) -> Failure | None:
        """Why a server is not started: it cannot work, and nobody forces it."""
        question = None if self._force else self._question(launch, engine)
        found = refusal(question, launch.server.engine) if question is not None else None
        return refused(found) if found is not None else None

    def ceiling(self, launch: Launch, engine: ModuleType, cell: Cell) -> float | None:
        """The most tokens a second that memory allows one request of a cell, where it is known."""
        question = self._question(launch, engine)
        return ceiling(question, self._known, cell) if question is not None and self._known is not None else None


def refused(plan: Plan) -> Failure:
    """The plan's sentence as the failure of a cell that was not tried."""
    found = plan.finding()
    assert found is not None  # the plan of a server that cannot work
    change = f"{plan.change}; --force starts it all the same" if plan.change else "--force starts it all the same"
    return Failure("refused", f"not started, since it cannot work: {plan.summary}", found.evidence, change,
                   finding=found.as_json())  # fmt: skip
