"""`gpuctl bench PHASE`: deploys each server of a phase, measures its cells through crashes, goes on where it was.

Resuming is a set difference: cells of the phase less those whose record is good under today's fingerprint. Nothing
else is remembered, so the same command continues after any end, of gpuctl or of the machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from gpuctl import cells as cells_
from gpuctl import deploy, hosts, plugins, staging, together
from gpuctl.cells import Cell
from gpuctl.config import Inventory, Model, PhasePlan, Server
from gpuctl.engines import Launch, environment
from gpuctl.facts.boot import RESTARTS, Happened
from gpuctl.finding import Remedy
from gpuctl.gauges import Gauges
from gpuctl.guard import Guard, Stopped, Ways
from gpuctl.load import Result, load_all
from gpuctl.measuring import Measured, measure
from gpuctl.planning import known as knowing
from gpuctl.planning.servers import Foresight
from gpuctl.records import MEASURED, CellId, Failure, Record, State
from gpuctl.restore import NotAllowed, Restorer, Wants, models_of
from gpuctl.serving import StartFailed, Tell, Up, bring_up, take_down, unit_name
from gpuctl.staging import StagingError
from gpuctl.store import Run, now
from gpuctl.supervision import Processes, SupervisionError, Supervisor, Units, UnitState
from gpuctl.transport import AGENTS, Refused, Transport, TransportError, agent


class BenchError(Exception):
    """The phase cannot be run. One line."""


@dataclass(frozen=True)
class Options:
    fresh: bool = False
    retry_failed: bool = False
    only: tuple[str, ...] = ()
    check: bool = False  # say what would be measured, and why; change nothing
    force: bool = False  # start servers of which the plan says that they cannot work
    allowed: Callable[[Remedy, str, str], bool] | None = None  # asked before healing changes a machine; None: it may
    within_s: float = 1800.0  # how long a box that went away is waited for
    command: tuple[str, ...] = ()  # what repeats the phase, for whoever reads the run folder later


@dataclass
class Outcome:
    """What a bench ended with, by cell."""

    done: list[Record] = field(default_factory=list)  # measured now
    kept: list[Record] = field(default_factory=list)  # measured before, still true
    failed: list[Record] = field(default_factory=list)  # now or before
    pending: list[tuple[Cell, str]] = field(default_factory=list)  # with --check: what would be measured, and why


@dataclass(frozen=True)
class Target:
    """The machine that serves: how to reach it, and which Python {python} stands for there."""

    name: str
    transport: Transport
    python: str
    base: Path | None = None  # folder that relative model paths start from (this machine only)
    machines: hosts.Inventory | None = None
    node: Transport | None = None  # the way to its node, where it has one
    vmid: int | None = None


TRIES = 3  # of a cell that something outside of it broke off: once, and twice again
# Failures that say nothing of a configuration: the cell is measured again.
_OUTSIDE = frozenset({"machine_away", "measuring_failed"})
# What a log's diagnosis says of a server that somebody killed, or the kernel did: it has no cause of its own.
_NO_CAUSE = frozenset({"killed-without-reason", "scheduler-killed"})


class _BrokenOff(Exception):
    """Measuring a server was broken off by something outside of it. `state`: its process, as it was started."""

    def __init__(self, failure: Failure, away: str, state: UnitState | None) -> None:
        super().__init__(failure.summary)
        self.failure, self.away, self.state = failure, away, state


@dataclass(frozen=True)
class _Todo:
    server: str
    launch: Launch
    engine: ModuleType
    pending: list[tuple[Cell, Mapping[str, Any]]]  # with today's fingerprint
    model: Model | None


def target(inventory: Inventory, name: str) -> Target:
    """The machine of that name in the inventory's hosts.yml. Raises hosts.BadInventory."""
    return target_of(hosts.load(inventory.folder), name)


def target_of(machines: hosts.Inventory, name: str) -> Target:
    """A machine of those. Raises hosts.BadInventory."""
    (machine, *_) = machines.chosen([name])
    ways = hosts.transports(machines)
    way, node = ways[machine.name], ways.get(machine.node or "")
    if machine.connection == "local":
        return Target(machine.name, way, sys.executable, Path.cwd(), machines, node, machine.vmid)
    return Target(machine.name, way, "python3", None, machines, node, machine.vmid)


def bench(
    inventory: Inventory, phase: str, target: Target, run: Run, tell: Tell, options: Options | None = None
) -> Outcome:
    """Runs a phase. `run` is locked by the caller. Raises BenchError, StoreError, TransportError."""
    options = options or Options()
    plan = inventory.phase(phase)
    by_server = cells_.of_phase(plan, lambda name: plugins.get("workloads", name), options.only)
    if not by_server:
        raise BenchError(f"{phase}: no cell of it is named by {' '.join(options.only)}")
    outcome = Outcome()
    tell("phase", phase=plan.name, title=plan.title, servers=len(by_server), cells=sum(map(len, by_server.values())))
    launches = {name: launch_of(inventory, name, target) for name in by_server}
    _check_places(launches, target)
    if not options.check:
        run.put("campaign.json", _campaign(inventory, launches, {**run.commands(), phase: list(options.command)}))
        run.event("run_started", phase=phase, target=target.name)
        _make_models(inventory, launches, tell)
    guard = Guard(
        Ways(target.name, target.transport, target.node, target.vmid),
        run,
        tell,
        lambda _: _heal(inventory, by_server, target, options, tell),
        within_s=options.within_s,
    )
    guard.begin(check=options.check)
    if options.check:
        survey = ask_survey(target, launches, inventory)
    else:
        survey, supervisor, _ = _surveyed(guard, target, launches, inventory, run, tell)
        staged = [inventory.models[name].path for name in models_of(inventory, list(by_server))]
        if any("error" in survey["models"].get(path, {}) for path in staged):
            guard.tend(None)  # it was in memory, and somebody took it away
            survey, supervisor, _ = _surveyed(guard, target, launches, inventory, run, tell)
    tries: Counter[CellId] = Counter()
    try:
        todos = []
        for name, cells in by_server.items():
            todo = _compare(name, cells, launches[name], inventory, survey, run, options, outcome, tell)
            if todo is not None:
                todos.append(todo)
        if options.check:
            return outcome
        foresight = _foresight(todos, inventory, target, options, tell)
        while todos:
            try:
                if (bad := _bad_model(todos[0], inventory, target, guard)) is not None:
                    for cell, parts in todos.pop(0).pending:
                        _keep(cell, parts, now(), _failed(bad), None, survey, run, tell, outcome)
                    continue
                with Gauges(target.transport, _agent_python(target)) as gauges:
                    _serve_and_measure(
                        todos[0], inventory, plan, target, supervisor, gauges, survey, run, tell, outcome, guard, tries,
                        foresight,
                    )  # fmt: skip
                    _wait_until_free(gauges, todos[0].server, run, tell)
                todos.pop(0)
            except _BrokenOff as broken:
                what = _recovered(broken, guard, supervisor, run, tell)
                survey, supervisor, again = _surveyed(guard, target, launches, inventory, run, tell)
                if what in RESTARTS or again:
                    todos = [
                        todo
                        for name, cells in by_server.items()
                        if (todo := _again(name, cells, launches[name], inventory, survey, run, outcome, tries, tell))
                    ]
                if todos:
                    _give_up_tried(todos, tries, broken.failure, survey, run, tell, outcome)
                todos = [todo for todo in todos if todo.pending]
    except BaseException:
        # Whatever it was interrupted in, also in stopping a server: nothing that this campaign started stays behind.
        if not options.check:
            with contextlib.suppress(TransportError, SupervisionError):  # where it is there
                _stop_orphans(supervisor, inventory.campaign, run, lambda _event, **_facts: None)
        raise
    run.event("run_finished", phase=phase, done=len(outcome.done), kept=len(outcome.kept), failed=len(outcome.failed))
    return outcome


def _surveyed(
    guard: Guard, target: Target, launches: Mapping[str, Launch], inventory: Inventory, run: Run, tell: Tell
) -> tuple[dict[str, Any], Supervisor, bool]:
    """The machine as it is now, with nothing of this campaign left running on it; whether it started anew meanwhile.

    A machine that goes away while it is asked is waited for. Raises Stopped.
    """
    anew = False
    for _ in range(TRIES):
        try:
            survey = ask_survey(target, launches, inventory)
            supervisor = _supervisor(inventory, target, survey, tell)
            _stop_orphans(supervisor, inventory.campaign, run, tell)
            return survey, supervisor, anew
        except Refused:
            raise
        except (TransportError, SupervisionError) as error:
            anew |= guard.recover(str(error), lambda: None) in RESTARTS
    raise Stopped(f"{target.name} went away {TRIES} times while it was asked; look what ails it")


def _heal(
    inventory: Inventory, servers: Iterable[str], target: Target, options: Options, tell: Tell
) -> list[Mapping[str, Any]]:
    """Has the box mended as far as these servers need it before they are started; says what was done.

    Raises Stopped where something is left that keeps CUDA from starting.
    """
    if target.machines is None or target.base is not None:
        return []  # this machine: it is ours to measure, not to mend
    wants = Wants(models_of(inventory, list(servers)))
    allowed = options.allowed

    def asked(remedy: Remedy, where: str, shown: str) -> bool:
        # What the inventory says of models is done unasked, as units of servers are placed unasked.
        return allowed is None or remedy.playbook in ("tmpfs", "stage") or allowed(remedy, where, shown)

    restorer = Restorer(
        target.machines, target.name, inventory, wants, tell=tell, allowed=asked if allowed else None, verify=True
    )
    began = time.monotonic()
    try:
        healing = restorer.heal()
    except NotAllowed as error:
        raise Stopped(f"{target.name} {error}") from None
    finally:
        restorer.close()
    took = time.monotonic() - began
    tell("healthy", box=target.name, state=healing.state, took_s=took, spent=restorer.spent, looks=restorer.looks)
    done: list[Mapping[str, Any]] = [
        {
            "finding": step.finding.id,
            "saw": step.finding.summary,
            "did": step.remedy.playbook,
            "gone": step.gone,
            **({"why": step.played.text} if step.played.text else {}),
        }
        for step in healing.steps
    ]
    if healing.state in ("stuck", "failed") and healing.after.works is False:
        why = healing.left[0].summary if healing.left else "it does not work afterwards"
        text = next((step.played.text for step in healing.steps if not step.played.ok), "")
        raise Stopped(f"{target.name} is not mended: {why}{f' ({text})' if text else ''}", stuck=True)
    return done


def _bad_model(todo: _Todo, inventory: Inventory, target: Target, guard: Guard) -> Failure | None:
    """Reads a server's models in memory before they are served: a bit that turned would make numbers that look well.

    Has the box healed where one is not what it was staged as; the failure, where that did not help. Raises _BrokenOff
    when the machine is away.
    """
    names = models_of(inventory, [todo.server])
    if target.machines is None or target.base is not None or not names:
        return None
    machine = target.machines.machines[target.name]

    def bad(why: str = "") -> Failure | None:
        for name in names:
            found = staging.look(target.transport, staging.job_for(name, inventory.models[name], machine), verify=True)
            if not found.well:
                what = f"model {name} is not in order: {why or next(iter(found.missing), found.state)}"
                return Failure("no_model", what, found.missing[:8], f"gpuctl stage {name} says more")
        return None

    try:
        if not guard.tended_just_now():
            if bad() is None:
                return None
            done = guard.tend(None)
            return bad(next((str(step["why"]) for step in done if step.get("why")), ""))
        return bad()
    except StagingError as error:
        return Failure("no_model", str(error))
    except Refused:
        raise
    except TransportError as error:
        raise _BrokenOff(Failure("machine_away", str(error)), guard.away() or str(error), None) from None


def _recovered(broken: _BrokenOff, guard: Guard, supervisor: Supervisor, run: Run, tell: Tell) -> Happened:
    """Has the guard wait for the box and heal it. Raises Stopped."""
    wanted = broken.state

    def serves() -> bool | None:
        if wanted is None:
            return None
        units, _ = supervisor.status()
        return any(u.running and (u.pid, u.start) == (wanted.pid, wanted.start) for u in units)

    if not broken.away and broken.failure.kind != "machine_away":  # the box is there: only the server ended
        run.event("server_died", why=broken.failure.summary)
        tell("broken_off", failure=broken.failure)
        try:
            guard.tend(Happened.SERVICE_DIED)
            return Happened.SERVICE_DIED
        except Refused:
            raise
        except TransportError as error:  # it went on from there
            return guard.recover(str(error), serves)
    return guard.recover(broken.away or broken.failure.summary, serves)


def _from_outside(failure: Failure) -> bool:
    """Whether a failure says nothing of the configuration: the way to the machine, or a signal without a cause."""
    if failure.kind in _OUTSIDE:
        return True
    ended = failure.kind in ("server_died", "start_failed") and failure.signal in ("SIGKILL", "SIGTERM")
    without = failure.finding is None or failure.finding.get("id") in _NO_CAUSE
    return ended and without and "out of memory" not in failure.summary


def _again(
    name: str,
    cells: Sequence[Cell],
    launch: Launch,
    inventory: Inventory,
    survey: Mapping[str, Any],
    run: Run,
    outcome: Outcome,
    tries: Counter[CellId],
    tell: Tell,
) -> _Todo | None:
    """After a restart: what is left of a server's cells, and those whose results hold no longer."""
    engine = plugins.get("engines", launch.server.engine)
    todo = _Todo(name, launch, engine, [], inventory.models.get(launch.server.model or ""))
    settled = {record.cell: record for record in (*outcome.done, *outcome.kept, *outcome.failed)}
    changed: Counter[str] = Counter()
    for cell in cells:
        parts = fingerprint(cell, launch, engine, survey)
        record = settled.get(cell.id)
        if record is not None:
            if record.fingerprint_id == cells_.fingerprint_id(parts) or tries[cell.id] >= TRIES:
                continue
            changed[f"the restart changed {cells_.differences(record.fingerprint, parts)}"] += 1
            for records in (outcome.done, outcome.kept, outcome.failed):
                records[:] = [one for one in records if one.cell != cell.id]
        todo.pending.append((cell, parts))
    for why, count in changed.items():
        tell("pending", server=name, cells=count, why=why)
    return todo if todo.pending else None


def _give_up_tried(
    todos: Sequence[_Todo],
    tries: Counter[CellId],
    failure: Failure,
    survey: Mapping[str, Any],
    run: Run,
    tell: Tell,
    outcome: Outcome,
) -> None:
    """Cells that were broken off too often become failures; a later run tries them again."""
    for todo in todos:
        for cell, parts in [(cell, parts) for cell, parts in todo.pending if tries[cell.id] >= TRIES]:
            todo.pending.remove((cell, parts))
            what = replace(failure, summary=f"broken off {tries[cell.id]} times, at last: {failure.summary}")
            if what.kind not in cells_.PASSING and what.signal is None:
                what = replace(what, kind="interrupted")
            _keep(cell, parts, now(), _failed(what), None, survey, run, tell, outcome)


def _failed(failure: Failure) -> Measured:
    return Measured(State.FAILED, {}, (), failure, {}, (), ())


def _keep(
    cell: Cell,
    parts: Mapping[str, Any],
    began: str,
    what: Measured,
    up: Up | None,
    survey: Mapping[str, Any],
    run: Run,
    tell: Tell,
    outcome: Outcome,
) -> Record:
    """Saves what became of a cell as its record.

    A failure of the moment (a model that is not in memory, a port in use) is told and never takes a number's place:
    when the moment has passed, the number may hold as it did.
    """
    record = Record(
        cell=cell.id,
        state=what.state,
        started=began,
        ended=now(),
        fingerprint=parts,
        fingerprint_id=cells_.fingerprint_id(parts),
        boot={key: survey["machine"].get(key) for key in ("boot_id", "pid1_start")},
        metrics=what.metrics,
        reps=what.reps,
        failure=what.failure,
        server=up.as_json() if up else {},
        generator=what.generator,
        notes=what.notes,
        parameters={"concurrency": cell.point.concurrency, **cell.point.parameters},
    )
    before = run.load(cell.id) if record.failure is not None and record.failure.kind in cells_.PASSING else None
    if before is None or before.state not in MEASURED:
        run.save(record, what.raw)
    run.event("cell_done", cell=str(cell.id), state=record.state.value)
    (outcome.done if record.state in MEASURED else outcome.failed).append(record)
    tell("cell", cell=cell.id, record=record)
    return record


def _foresight(todos: Sequence[_Todo], inventory: Inventory, target: Target, options: Options, tell: Tell) -> Foresight:
    """What the machine tells that plans are made from. One that does not tell it is measured all the same."""
    pairs = knowing.engines_of([todo.launch for todo in todos])
    try:
        known = None
        if pairs:
            known = knowing.ask(
                target.transport, pairs, target.name, inventory.folder, python=_agent_python(target),
                tell=lambda words: tell("asking", what=words),
            )  # fmt: skip
    except TransportError as error:  # one that is away is waited for when a server is started
        tell("asking", what=f"servers are started unplanned: {error}")
    return Foresight(inventory, known, force=options.force)


def _supervisor(inventory: Inventory, target: Target, survey: Mapping[str, Any], tell: Tell) -> Supervisor:
    """Of the machine, and of those that servers also run on which it is the head of."""
    head = _supervisor_of(inventory, target, survey, tell)
    if not survey["others"]:
        return head
    machines = hosts.load(inventory.folder)
    others = {name: target_of(machines, name) for name in survey["others"]}
    crews = {}
    for name, server in inventory.servers.items():
        if len(server.nodes) > 1 and server.nodes[0] == target.name and set(server.nodes[1:]) <= set(others):
            engine = plugins.get("engines", server.engine)
            ranks = [(node, launch_of(inventory, name, others[node])) for node in server.nodes[1:]]
            crews[unit_name(name)] = [
                (node, engine.argv(together.ranked(launch, machines)[rank]))
                for rank, (node, launch) in enumerate(ranks, 1)
            ]
    supervisors = {
        name: _supervisor_of(inventory, other, survey["others"][name], tell) for name, other in others.items()
    }
    return together.Crews(head, supervisors, crews)


def _supervisor_of(inventory: Inventory, target: Target, survey: Mapping[str, Any], tell: Tell) -> Supervisor:
    """systemd's units where there is one and we may use it, else supervised processes."""
    if not survey["machine"].get("systemd"):
        return Processes(target.transport, python=_agent_python(target))

    machines = hosts.load(inventory.folder)
    place = deploy.placer(
        machines,
        machines.machines[target.name],
        target.transport,
        {unit_name(name): server for name, server in inventory.servers.items()},
        models=[model.path for model in inventory.models.values() if model.stage],
        on_step=lambda step: tell("placing", machine=step.machine, task=step.task),
        on_trap=lambda unit, trap: tell("trap", unit=unit, trap=trap),
    )
    return Units(target.transport, place, python=_agent_python(target))


def _agent_python(target: Target) -> str:
    return target.python if target.base is not None else "python3"


def _campaign(
    inventory: Inventory, launches: Mapping[str, Launch], commands: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """What was asked, for whoever reads the folder later. Environments stay out: a person may put secrets there.

    `commands`: by phase, what repeats it; the phases that nobody has run yet have none.
    """
    servers: dict[str, dict[str, Any]] = {}
    for phase in inventory.phases.values():
        for name in phase.servers:
            server = inventory.server(name)
            servers[name] = {"engine": server.engine, "model": server.model, "title": server.title}
            if name in launches:
                engine = plugins.get("engines", server.engine)
                servers[name]["argv"] = list(engine.argv(launches[name])) or [server.url]
    return {
        "schema": "gpuctl.campaign/1",
        "name": inventory.campaign,
        "inventory": str(inventory.folder),
        "phases": {
            name: {
                "title": phase.title,
                "baseline": phase.baseline,
                "servers": list(phase.servers),
                "repetitions": phase.reps,
                "command": list(commands.get(name, ())),
                "workloads": [
                    {"workload": use.workload, "parameters": dict(use.parameters), "servers": list(use.servers)}
                    for use in phase.workloads
                ],
            }
            for name, phase in inventory.phases.items()
        },
        "servers": servers,
    }


def _stop_orphans(supervisor: Supervisor, campaign: str, run: Run, tell: Tell) -> None:
    """Servers that a killed run of this campaign left behind."""
    units, _ = supervisor.status()
    for unit in units:
        if unit.running and unit.owner == campaign:
            supervisor.stop(unit.unit)
            run.event("orphan_stopped", unit=unit.unit, pid=unit.pid)
            tell("orphan_stopped", unit=unit.unit, pid=unit.pid)


def launch_of(inventory: Inventory, name: str, target: Target) -> Launch:
    """A server of the inventory with the paths and the Python of its machine."""
    server = inventory.server(name)

    def path(model: str | None) -> str | None:
        if model is None:
            return None
        where = inventory.models[model].path
        return str(target.base / where) if target.base is not None and not where.startswith("~") else where

    launch = Launch(name, server, path(server.model), path(server.draft), target.python)
    return together.ranked(launch, hosts.load(inventory.folder))[0] if len(server.nodes) > 1 else launch


def _check_places(launches: Mapping[str, Launch], target: Target) -> None:
    """A server that names its machines is measured on the first of them."""
    for name, launch in launches.items():
        nodes = launch.server.nodes
        if nodes and nodes[0] != target.name:
            raise BenchError(
                f"{name} runs on {', '.join(nodes)}, not on {target.name}: -t {nodes[0]} measures it there"
            )


def _make_models(inventory: Inventory, launches: Mapping[str, Launch], tell: Tell) -> None:
    """Writes the embedded default model where it is missing."""
    from gpuctl import tiny_model

    for launch in launches.values():
        model = inventory.models.get(launch.server.model or "")
        if model is None or model.make is None or launch.model is None:
            continue
        if model.make != "tiny":
            raise BenchError(f"{inventory.folder}/models.yml: make: {model.make!r} is not known; there is: tiny")
        if not Path(launch.model).exists():
            tell("model_made", path=launch.model)
            try:
                tiny_model.write(Path(launch.model))
            except ImportError as error:
                raise BenchError(f"{launch.model}: {error.name} is missing: pip install 'gpuctl-llm[local]'") from error
            except OSError as error:
                raise BenchError(f"{launch.model}: {error.strerror}") from error


def ask_survey(target: Target, launches: Mapping[str, Launch], inventory: Inventory) -> dict[str, Any]:
    """Models, packages and machine as they are now, in one round trip.

    "others": the same of each further machine that one of the servers runs on.
    """
    answer = _survey_of(target, launches)
    answer["others"] = {}
    names = {node for launch in launches.values() for node in launch.server.nodes[1:]}
    if names:
        machines = hosts.load(inventory.folder)
        for name in sorted(names):
            its = {server: launch for server, launch in launches.items() if name in launch.server.nodes}
            answer["others"][name] = _survey_of(target_of(machines, name), its)
    return answer


def _survey_of(target: Target, launches: Mapping[str, Launch]) -> dict[str, Any]:
    models = sorted({path for launch in launches.values() for path in (launch.model, launch.draft) if path})
    pythons: dict[str, set[str]] = {}
    for launch in launches.values():
        engine = plugins.get("engines", launch.server.engine)
        words = engine.argv(launch)
        if words and engine.VERSIONS:
            python = words[0] if "python" in Path(words[0]).name else str(Path(words[0]).with_name("python3"))
            pythons.setdefault(python, set()).update(engine.VERSIONS)
    job = {"models": models, "pythons": {python: sorted(names) for python, names in pythons.items()}}
    command, stdin = agent("survey", job, python=_agent_python(target))
    done = target.transport.run(command, stdin=stdin, timeout=300)
    if done.rc < 0:
        raise TransportError(f"{target.name}: the survey was killed (signal {-done.rc})")
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise BenchError(f"{target.name}: {said[-1] if said else f'exit status {done.rc}'}") from None
    return answer


def _versions(launch: Launch, engine: ModuleType, survey: Mapping[str, Any]) -> Mapping[str, str]:
    words = engine.argv(launch)
    for python, found in survey["pythons"].items():
        if words and Path(python).parent == Path(words[0]).parent:
            return {name: version for name, version in found.items() if name in (*engine.VERSIONS, "python", "error")}
    return {}


LOAD_VERSION = hashlib.sha256((AGENTS / "load.py").read_bytes()).hexdigest()[:12]


def fingerprint(cell: Cell, launch: Launch, engine: ModuleType, survey: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that can change the number of a cell, as far as the machine tells."""
    others = {name: _of_machine(launch, engine, survey["others"][name]) for name in launch.server.nodes[1:]}
    return {
        **_of_machine(launch, engine, survey),
        **({"others": others} if others else {}),
        **intended(cell, launch, engine),
    }


def intended(cell: Cell, launch: Launch, engine: ModuleType) -> dict[str, Any]:
    """The part of a fingerprint that is known without the machine."""
    return {
        "argv": list(engine.argv(launch)) or [launch.server.url],
        "environment": environment(engine, launch),
        "workload": cell.definition(),
        "load_agent": LOAD_VERSION,
    }


def _of_machine(launch: Launch, engine: ModuleType, survey: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a fingerprint that a machine tells."""
    of_a_boot = {"boot_id", "pid1_start", "systemd"}
    machine = {key: value for key, value in survey["machine"].items() if key not in of_a_boot}
    # by their place on the bus, so that a difference names the card
    machine["gpus"] = {gpu["pci"]: {k: v for k, v in gpu.items() if k != "pci"} for gpu in machine.get("gpus", ())}
    return {
        "model": survey["models"].get(launch.model or "", {}).get("id"),
        "draft": survey["models"].get(launch.draft or "", {}).get("id"),
        "engine": {"name": launch.server.engine, **_versions(launch, engine, survey)},
        "machine": machine,
    }


def _compare(
    name: str,
    cells: Sequence[Cell],
    launch: Launch,
    inventory: Inventory,
    survey: Mapping[str, Any],
    run: Run,
    options: Options,
    outcome: Outcome,
    tell: Tell,
) -> _Todo | None:
    """Which cells of a server are to be measured; says of each other one why not."""
    engine = plugins.get("engines", launch.server.engine)
    todo = _Todo(name, launch, engine, [], inventory.models.get(launch.server.model or ""))
    reasons: dict[str, int] = {}
    for cell in cells:
        parts = fingerprint(cell, launch, engine, survey)
        record = run.load(cell.id)
        decision = cells_.decide(record, parts, fresh=options.fresh, retry_failed=options.retry_failed)
        if decision.measure:
            todo.pending.append((cell, parts))
            outcome.pending.append((cell, decision.why))
            reasons[decision.why] = reasons.get(decision.why, 0) + 1
        else:
            assert record is not None
            (outcome.kept if record.state in MEASURED else outcome.failed).append(record)
            tell("skip", cell=cell.id, why=decision.why, record=record)
    for why, count in reasons.items():
        tell("pending", server=name, cells=count, why=why)
    return todo if todo.pending else None


def _serve_and_measure(
    todo: _Todo,
    inventory: Inventory,
    plan: PhasePlan,
    target: Target,
    supervisor: Supervisor,
    gauges: Gauges,
    survey: Mapping[str, Any],
    run: Run,
    tell: Tell,
    outcome: Outcome,
    guard: Guard,
    tries: Counter[CellId],
    foresight: Foresight,
) -> None:
    """One server: up, its pending cells, down. A server that does not work makes records with causes.

    Cells leave `todo.pending` as they get records. Raises _BrokenOff where something outside of it ended it.
    """
    server = todo.launch.server
    tell("server", server=todo.server, title=server.title or todo.server, engine=server.engine, cells=len(todo.pending))
    missing = _missing_model(todo.launch, survey)
    api_key = _api_key(server)

    def keep(cell: Cell, parts: Mapping[str, Any], began: str, what: Measured, up: Up | None) -> Record:
        return _keep(cell, parts, began, what, up, survey, run, tell, outcome)

    def give_up(failure: Failure, left: Iterable[tuple[Cell, Mapping[str, Any]]], up: Up | None) -> None:
        for cell, parts in left:
            keep(cell, parts, now(), _failed(failure), up)

    if missing is not None:
        give_up(missing, todo.pending, None)
        return
    refused = foresight.refused(todo.launch, todo.engine)
    if refused is not None:
        run.event("server_refused", server=todo.server, why=refused.summary)
        tell("server_failed", server=todo.server, failure=refused)
        give_up(refused, todo.pending, None)
        return
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    run.event("server_started", server=todo.server)
    tries[todo.pending[0][0].id] += 1
    try:
        up = bring_up(
            todo.engine,
            todo.launch,
            supervisor,
            run=run,
            owner=inventory.campaign,
            tell=tell,
            known_answer=todo.model.known_answer if todo.model else None,
            headers=headers,
        )
    except Refused:
        raise
    except (TransportError, SupervisionError) as error:
        raise _BrokenOff(Failure("machine_away", str(error)), guard.away() or str(error), None) from None
    except StartFailed as error:
        away = guard.away()
        if away or _from_outside(error.failure):
            raise _BrokenOff(error.failure, away, None) from None
        if error.failure.kind == "no_room":
            raise Stopped(error.failure.summary) from None  # no other server would find room either
        run.event("server_died", server=todo.server, why=error.failure.summary)
        tell("server_failed", server=todo.server, failure=error.failure)
        give_up(error.failure, todo.pending, None)
        return
    run.event("server_ready", server=todo.server, ready_s=round(up.ready_s, 3))
    tell("ready", server=todo.server, ready_s=up.ready_s, identity=up.identity)

    def load(jobs: Sequence[Mapping[str, Any]]) -> list[Result]:
        return load_all(target.transport, jobs, python=_agent_python(target))

    left, first = todo.pending, True
    try:
        while left:
            cell, parts = left[0]
            began = now()
            tries[cell.id] += not first  # the first one was counted when its server was started
            first = False
            tell("measuring", cell=cell.id)
            what = measure(
                cell,
                up,
                supervisor,
                load,
                gauge=gauges.during,
                api_key=api_key,
                unstable_above=plan.unstable_above,
            )
            away = guard.away()
            if away or (what.failure is not None and _from_outside(what.failure)):
                # also a cell that came out well: whatever it measured, it was not one boot
                raise _BrokenOff(what.failure or Failure("rebooted", away), away, up.state)
            if top := foresight.ceiling(todo.launch, todo.engine, cell):
                up.facts["roofline_tok_s"] = top
            record = keep(cell, parts, began, what, up)
            left.pop(0)
            if record.failure is not None and record.failure.kind == "server_died":
                run.event("server_died", server=todo.server, why=record.failure.summary)
                tell("server_failed", server=todo.server, failure=record.failure)
                give_up(replace(record.failure, summary=f"not measured: {record.failure.summary}"), left, up)
                return
    finally:
        _stopped(up, supervisor, guard)
        run.event("server_stopped", server=todo.server)


def _wait_until_free(gauges: Gauges, server: str, run: Run, tell: Tell) -> None:
    """The next server would not find the memory that this one still holds."""
    held = gauges.wait_until_free()
    if held:
        run.event("memory_held", server=server, bytes={str(gpu): size for gpu, size in held.items()})
        tell("memory_held", server=server, held=held)


def _stopped(up: Up, supervisor: Supervisor, guard: Guard) -> None:
    """Stops a server. On a machine that is away it is found and stopped later, by its mark."""
    try:
        take_down(up, supervisor)
    except Refused:
        raise
    except (TransportError, SupervisionError):
        if not guard.away():
            raise


def _missing_model(launch: Launch, survey: Mapping[str, Any]) -> Failure | None:
    for where, found in (("", survey), *((f" on {name}", survey["others"][name]) for name in launch.server.nodes[1:])):
        for path in (launch.model, launch.draft):
            error = found["models"].get(path or "", {}).get("error")
            if error:
                advice = "`gpuctl stage` brings a model to its place"
                return Failure("no_model", f"{launch.name}: {error}{where}", advice=advice)
    return None


def _api_key(server: Server) -> str | None:
    if server.api_key_file is None:
        return None
    try:
        return Path(server.api_key_file).expanduser().read_text().strip()
    except OSError as error:
        raise BenchError(f"{server.api_key_file}: {error.strerror} (api_key_file)") from error
