"""The results of a campaign as one model: what every table, plot and file of a report is made from. Pure.

A `Run` is what lies in a run folder, already read (report.py does that) or imported from another tool.
Nothing here is computed from anything but records, events and what was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gpuctl.records import MEASURED, CellId, Estimate, Record, State, estimate

# --- metrics -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """How a metric is shown and which way is better: +1 more, -1 less, 0 neither."""

    name: str
    title: str
    better: int
    unit: str = ""


_METRICS = {
    m.name: m
    for m in (
        Metric("decode_tok_s", "Decode speed per request", +1, "tok/s"),
        Metric("output_tok_s", "Output throughput", +1, "tok/s"),
        Metric("total_tok_s", "Total throughput", +1, "tok/s"),
        Metric("steady_output_tok_s", "Output throughput, steady", +1, "tok/s"),
        Metric("request_tok_s", "Tokens per second of a request, waiting included", +1, "tok/s"),
        Metric("requests_s", "Requests per second", +1, "1/s"),
        Metric("ttft_ms", "Time to first token", -1, "ms"),
        Metric("time_per_token_ms", "Time per token", -1, "ms"),
        Metric("tpot_ms", "TPOT (customary)", -1, "ms"),
        Metric("ttft_p99_ms", "Time to first token, 99th percentile", -1, "ms"),
        Metric("itl_ms", "Inter-token latency", -1, "ms"),
        Metric("e2e_ms", "End-to-end latency", -1, "ms"),
        Metric("prefill_tok_s", "Prefill speed", +1, "tok/s"),
        Metric("acceptance_length", "Acceptance length", +1, "tokens"),
        Metric("gpu_power_w", "GPU power", -1, "W"),
        Metric("gpu_memory_bytes", "GPU memory", -1, "bytes"),
        Metric("energy_per_token_j", "Energy per token", -1, "J"),
        Metric("prompt_tokens", "Prompt tokens", 0, "tokens"),
        Metric("completion_tokens", "Completion tokens", 0, "tokens"),
        Metric("load_kept", "Load kept", 0, ""),
    )
}
_ORDER = {name: i for i, name in enumerate(_METRICS)}


def metric(name: str, unit: str = "") -> Metric:
    """What is known of a metric. One that nobody described is judged by its unit: a rate is better when higher."""
    known = _METRICS.get(name)
    if known is not None:
        return known
    better = +1 if unit.endswith("/s") else -1 if unit in ("ms", "s", "us", "ns", "J", "W") else 0
    return Metric(name, name.replace("_", " "), better, unit)


def ordered(names: Iterable[str]) -> list[str]:
    """Metric names in the order of a report: the known ones first, then by name."""
    return sorted(set(names), key=lambda name: (_ORDER.get(name, len(_ORDER)), name))


# What a workload is about: the figure that stands for a cell comes first.
_HEADLINES: Mapping[str, tuple[str, ...]] = {
    "decode": ("decode_tok_s", "output_tok_s"),
    "concurrency": ("output_tok_s", "decode_tok_s", "ttft_ms"),
    "context": ("ttft_ms", "prefill_tok_s", "decode_tok_s"),
    "agentic": ("output_tok_s", "decode_tok_s", "ttft_ms", "e2e_ms"),
}
_ANY_HEADLINES = ("output_tok_s", "decode_tok_s", "ttft_ms", "e2e_ms")


def headlines(workload: str, present: Iterable[str]) -> list[str]:
    """The metrics a table of this workload shows, the most important first; only those `present`."""
    have = set(present)
    chosen = [name for name in _HEADLINES.get(workload, _ANY_HEADLINES) if name in have]
    if workload == "decode":
        chosen = chosen[:1]
    return chosen or ordered(have)[:4]


def headline(record: Record) -> tuple[str, Estimate] | None:
    """The one figure that stands for a cell, with its name; None where there is no number."""
    names = headlines(record.cell.workload, record.metrics)
    return (names[0], record.metrics[names[0]]) if names else None


def derived(record: Record) -> Record:
    """The record with what follows from its metrics: the energy per token, where the GPUs' power was measured.

    Power (W) by output throughput (tok/s), repetition by repetition where those are kept.
    """
    if "energy_per_token_j" in record.metrics or not {"gpu_power_w", "output_tok_s"} <= set(record.metrics):
        return record
    reps = [_mapping(rep.get("metrics")) for rep in record.reps]
    pairs = [(rep.get("gpu_power_w"), rep.get("output_tok_s")) for rep in reps]
    values = [p / t for p, t in pairs if isinstance(p, int | float) and isinstance(t, int | float) and t > 0]
    throughput = record.metrics["output_tok_s"].mean
    if len(values) != len(pairs) or not values:
        values = [record.metrics["gpu_power_w"].mean / throughput] if throughput > 0 else []
    if not values:
        return record
    return replace(record, metrics={**record.metrics, "energy_per_token_j": estimate(values, "J")})


def roofline_share(record: Record, server: Server) -> float | None:
    """Decode speed as a share of what the memory bandwidth allows (1 = all of it); None where that is not known.

    The ceiling of one request (tok/s, without speculation) is the record's or the server's; speculation may go beyond
    it by as many tokens as are accepted at a time.
    """
    speed = record.metrics.get("decode_tok_s")
    ceiling = record.server.get("roofline_tok_s", server.roofline_tok_s)
    if speed is None or not isinstance(ceiling, int | float) or isinstance(ceiling, bool) or not ceiling > 0:
        return None
    accepted = record.metrics.get("acceptance_length")
    return speed.mean / (ceiling * (max(1.0, accepted.mean) if accepted is not None else 1.0))


# --- servers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """One configuration of an engine, as it was asked for and as it ran."""

    phase: str
    name: str
    argv: tuple[str, ...] = ()
    engine: str = ""
    model: str = ""
    method: str = ""
    tp: int | None = None
    budget: int | None = None
    roofline_tok_s: float | None = None  # of one request without speculation, where it was computed

    @property
    def kin(self) -> str:
        """What it has in common with the same configuration in another phase: its name without the phase's."""
        return _method(self.phase, self.name)


def flag(argv: Sequence[str], *names: str) -> str | None:
    """The value of the last of these flags in an argument vector (`--tp 4` or `--tp=4`), None when absent."""
    value = None
    for i, word in enumerate(argv):
        head, equals, tail = word.partition("=")
        if head in names:
            value = tail if equals else argv[i + 1] if i + 1 < len(argv) else ""
    return value


def _number(text: Any) -> int | None:
    try:
        return int(text)
    except (TypeError, ValueError):
        return None


def _method(phase: str, name: str) -> str:
    """`tp1-ddtree-b15` of phase tp1 is the method `ddtree-b15`."""
    return name[len(phase) + 1 :] if name.startswith(f"{phase}-") and len(name) > len(phase) + 1 else name


_BUDGET = re.compile(r"-b(\d{1,4})$")


def _server(phase: str, name: str, asked: Mapping[str, Any], record: Record | None) -> Server:
    ran = record.fingerprint if record is not None else {}
    argv = asked.get("argv") or ran.get("argv") or ()
    argv = tuple(str(word) for word in argv) if isinstance(argv, list | tuple) else ()
    budget = _number(flag(argv, "--speculative-ddtree-budget"))
    by_name = _BUDGET.search(name)
    if budget is None and by_name:
        budget = int(by_name[1])
    tp = _number(asked.get("tp")) or _number(flag(argv, "--tp", "--tp-size", "--tensor-parallel-size", "-tp"))
    ceiling = asked.get("roofline_tok_s")
    return Server(
        phase=phase,
        name=name,
        argv=argv,
        engine=_word(asked.get("engine") or ran.get("engine")),
        model=_word(asked.get("model") or flag(argv, "--model-path", "--model", "-m") or ran.get("model")),
        method=_word(asked.get("method")) or _method(phase, name),
        tp=tp,
        budget=budget,
        roofline_tok_s=float(ceiling) if isinstance(ceiling, int | float) and ceiling > 0 else None,
    )


def _word(value: Any) -> str:
    """A name out of what may be a name or a mapping that has one."""
    if isinstance(value, Mapping):
        value = value.get("name") or value.get("id") or ""
    return value if isinstance(value, str) else ""


# --- a run ---------------------------------------------------------------------------------------


# Events after which a run that is not said to have finished has not.
_AT_WORK = frozenset({"run_started", "server_started", "server_ready", "cell_done"})


@dataclass(frozen=True)
class LeftOut:
    """A file that is in the run folder and not in the report, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class Run:
    """A campaign: what was asked, what was measured, what happened, and what could not be read."""

    name: str
    records: tuple[Record, ...] = ()
    campaign: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Mapping[str, Any], ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    foreign: frozenset[str] = frozenset()  # phases whose numbers another tool measured
    baseline: str | None = None  # the server everything is compared with, when named by the reader

    # Computed once: a report asks for them hundreds of times.

    @cached_property
    def by_cell(self) -> dict[CellId, Record]:
        return {record.cell: record for record in self.records}

    @cached_property
    def phases(self) -> list[str]:
        """In the order they were asked for; what nobody asked for after that, by first measurement.

        Without those that nobody ran yet, unless none was run.
        """
        found = _in_order(self._phases, (record.cell.phase for record in self.records))
        return [phase for phase in found if phase not in self.waiting]

    @cached_property
    def waiting(self) -> list[str]:
        """The phases that were asked for and have no record, where others have."""
        begun = {record.cell.phase for record in self.records}
        return [phase for phase in self._phases if phase not in begun] if begun else []

    @cached_property
    def servers(self) -> dict[str, list[Server]]:
        """Servers by phase, in the order asked for, those without a record included."""
        first: dict[tuple[str, str], Record] = {}
        for record in self.records:
            first.setdefault((record.cell.phase, record.cell.server), record)
        found: dict[str, list[Server]] = {}
        for phase in self.phases:
            names = _in_order(_named(self._phase(phase).get("servers")), (s for p, s in first if p == phase))
            found[phase] = [
                _server(phase, name, self._servers.get(name, {}), first.get((phase, name))) for name in names
            ]
        return found

    @cached_property
    def workloads(self) -> list[str]:
        """decode, concurrency, context, agentic, then the others as they came."""
        return _in_order(
            [w for w in _HEADLINES if any(r.cell.workload == w for r in self.records)],
            (record.cell.workload for record in self.records),
        )

    @cached_property
    def _index(self) -> dict[tuple[str, str], list[Record]]:
        found: dict[tuple[str, str], list[Record]] = {}
        for record in self.records:
            found.setdefault((record.cell.phase, record.cell.workload), []).append(record)
        return found

    def cells(self, phase: str, workload: str) -> list[Record]:
        """The records of one phase and workload."""
        return self._index.get((phase, workload), [])

    def points(self, phase: str, workload: str) -> list[str]:
        """The points of a workload in reading order: by size, then as they were measured."""
        known = self._points.get((phase, workload))
        if known is None:
            known = self._points[phase, workload] = self._ordered_points(phase, workload)
        return known

    @cached_property
    def _points(self) -> dict[tuple[str, str], list[str]]:
        return {}

    def _ordered_points(self, phase: str, workload: str) -> list[str]:
        # As they were measured: a server that never started has all its cells at one moment, in no order.
        first: dict[str, tuple[Any, ...]] = {}
        for place, record in enumerate(self.cells(phase, workload)):
            key = (*_sizes(record), record.state not in MEASURED, place)
            first[record.cell.point] = min(first.get(record.cell.point, key), key)
        return sorted(first, key=lambda point: first[point])

    def title(self, phase: str) -> str:
        """The phase's title, where one was given."""
        title = self._phase(phase).get("title")
        return title if isinstance(title, str) else ""

    @property
    def commands(self) -> list[list[str]]:
        """What repeats the campaign: each command that was given, once, in the order they were given.

        Of a phase whose starts do not say how they were asked for, what the campaign says of it.
        """
        starts = [event for event in self.events if event.get("event") == "run_started" and event.get("command")]
        told = {str(event.get("phase")) for event in starts}
        given = [self.campaign.get("command")]
        given += [self._phase(phase).get("command") for phase in self.phases if phase not in told]
        given += [event["command"] for event in starts]
        found = [
            [str(word) for word in command] if isinstance(command, list | tuple) else [command]
            for command in given
            if command and isinstance(command, list | tuple | str)
        ]
        return [command for i, command in enumerate(found) if command not in found[:i]]

    def baseline_of(self, phase: str) -> str | None:
        """The server the others of this phase are compared with.

        In this order: the reader's choice, the phase's, the one marked as baseline among its servers, and one
        that is called `auto` or `baseline` (`tp1-auto`, too).
        """
        names = [server.name for server in self.servers.get(phase, [])]
        for name in (self.baseline, f"{phase}-{self.baseline}", self._phase(phase).get("baseline")):
            if isinstance(name, str) and name in names:
                return name
        for name in names:
            mark = self._servers.get(name, {}).get("baseline")
            if mark is True:
                return name
            if isinstance(mark, str) and mark in names:
                return mark
        return next((name for name in names if _method(phase, name) in ("auto", "baseline")), None)

    def baseline_cell(self, cell: CellId) -> Record | None:
        """The record a cell's speed-up is against: same workload point, the phase's baseline. None for its own."""
        name = self.baseline_of(cell.phase)
        if name is None or name == cell.server:
            return None
        record = self.by_cell.get(cell._replace(server=name))
        return record if record is not None and record.state in MEASURED else None

    def count(self, *states: State) -> int:
        return sum(record.state in states for record in self.records)

    @property
    def unfinished(self) -> str | None:
        """When the run last did something, if its end was not recorded after that; None when it ended, or never ran."""
        last = max((i for i, event in enumerate(self.events) if event.get("event") in _AT_WORK), default=-1)
        ended = any(event.get("event") == "run_finished" for event in self.events[last:])
        return None if last < 0 or ended else str(self.events[-1].get("t", "an unknown time"))

    @cached_property
    def _phases(self) -> dict[str, Mapping[str, Any]]:
        return _named(self.campaign.get("phases"))

    @cached_property
    def _servers(self) -> dict[str, Mapping[str, Any]]:
        """What was asked for of each server. A name that several phases share is one server."""
        return _named(self.campaign.get("servers"))

    def _phase(self, phase: str) -> Mapping[str, Any]:
        return self._phases.get(phase, {})


def joined(runs: Sequence[Run], name: str) -> Run:
    """Several runs in one report. A cell that is in two of them is the later run's."""
    records: dict[CellId, Record] = {}
    campaign: dict[str, Any] = {}
    for run in runs:
        records.update(run.by_cell)
        for key, value in run.campaign.items():
            if isinstance(value, Mapping) and isinstance(campaign.get(key), Mapping):
                campaign[key] = {**campaign[key], **value}
            else:
                campaign[key] = value
    return Run(
        name=name,
        records=tuple(records.values()),
        campaign=campaign,
        events=tuple(event for run in runs for event in run.events),
        left_out=tuple(left for run in runs for left in run.left_out),
        foreign=frozenset().union(*(run.foreign for run in runs)),
        baseline=runs[0].baseline if runs else None,
    )


def with_foreign(run: Run, foreign: Sequence[Record]) -> Run:
    """The run with numbers that other tools measured; each tool's phase is marked as foreign."""
    phases = frozenset(record.cell.phase for record in foreign)
    return replace(run, records=run.records + tuple(foreign), foreign=run.foreign | phases)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _named(value: Any) -> dict[str, Mapping[str, Any]]:
    """Things by name, out of a mapping by name, a list of names, or a list of mappings with a `name`."""
    if isinstance(value, Mapping):
        return {name: _mapping(thing) for name, thing in value.items() if isinstance(name, str)}
    found: dict[str, Mapping[str, Any]] = {}
    for thing in value if isinstance(value, list | tuple) else ():
        name = thing.get("name") if isinstance(thing, Mapping) else thing
        if isinstance(name, str):
            found[name] = _mapping(thing)
    return found


def _in_order(asked: Iterable[str], met: Iterable[str]) -> list[str]:
    """What was asked for and is there, in the order asked; then what was only met."""
    return list(dict.fromkeys([*asked, *met]))


def _sizes(record: Record) -> tuple[float, ...]:
    """What a workload's points are ordered by; unknown sizes come last."""
    return tuple(
        float(value) if isinstance(value := record.parameters.get(key), int | float) else float("inf")
        for key in ("max_tokens", "context", "concurrency")
    )
