"""`gpuctl bench PHASE`: deploys each server of a phase, measures its cells through crashes, goes on where it was.

Resuming is a set difference: cells of the phase less those whose record is good under today's fingerprint. Nothing
else is remembered, so the same command continues after any end, of gpuctl or of the machine.
"""

from __future__ import annotations

import contextlib
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
from gpuctl.config import Inventory, Model, PhasePlan
from gpuctl.engines import Launch
from gpuctl.facts.boot import RESTARTS, Happened
from gpuctl.finding import Remedy
from gpuctl.gauges import Gauges
from gpuctl.guard import Guard, Guards, Stopped, Ways
from gpuctl.load import Result, load_all
from gpuctl.measuring import Measured, measure
from gpuctl.planning import known as knowing
from gpuctl.planning.servers import Foresight
from gpuctl.records import MEASURED, CellId, Failure, Record, State
from gpuctl.restore import NotAllowed, Restorer, Wants, models_of
from gpuctl.results.provenance import sealed_argv
from gpuctl.serving import StartFailed, Tell, Up, bearer, bring_up, key_of, take_down, unit_name
from gpuctl.staging import StagingError
from gpuctl.store import Run, now
from gpuctl.supervision import Processes, SupervisionError, Supervisor, Units, UnitState
from gpuctl.surveying import Target, ask_survey, fingerprint, launch_of, missing_programs, target_of
from gpuctl.transport import Refused, TransportError


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
    missing: dict[str, str] = field(default_factory=dict)  # with --check: server -> its program that is not there


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

    @property
    def only_the_server(self) -> bool:
        """Whether the box is there, and only the server ended."""
        return not self.away and self.failure.kind != "machine_away"


@dataclass(frozen=True)
class _Todo:
    server: str
    launch: Launch
    engine: ModuleType
    pending: list[tuple[Cell, Mapping[str, Any]]]  # with today's fingerprint
    model: Model | None


def bench(
    inventory: Inventory, phase: str, target: Target, run: Run, tell: Tell, options: Options | None = None
) -> Outcome:
    """Runs a phase. `run` is locked by the caller.

    Raises BenchError, NoKey, SurveyError, StoreError, Stopped, TransportError.
    """
    options = options or Options()
    plan = inventory.phase(phase)
    by_server = cells_.of_phase(plan, lambda name: plugins.get("workloads", name), options.only)
    if not by_server:
        raise BenchError(f"{phase}: no cell of it is named by {' '.join(options.only)}")
    tell("phase", phase=plan.name, title=plan.title, servers=len(by_server), cells=sum(map(len, by_server.values())))
    launches = {name: launch_of(inventory, name, target) for name in by_server}
    _check_places(launches, target)
    work = _Bench(inventory, plan, target, run, tell, options, by_server, launches)
    return work.check() if options.check else work.measure()


class _Bench:
    """One phase on its machine, as it was at the last look: what it told (`survey`), what starts servers there
    (`supervisor`), and what was foreseen of them (`foresight`)."""

    survey: dict[str, Any]
    supervisor: Supervisor
    foresight: Foresight

    def __init__(
        self,
        inventory: Inventory,
        plan: PhasePlan,
        target: Target,
        run: Run,
        tell: Tell,
        options: Options,
        by_server: Mapping[str, Sequence[Cell]],
        launches: Mapping[str, Launch],
    ) -> None:
        self.inventory, self.plan, self.target, self.run, self.tell = inventory, plan, target, run, tell
        self.options, self.by_server, self.launches = options, by_server, launches
        self.keys = {name: key_of(launch.server) for name, launch in launches.items()}
        self.identity = run.identity()
        self.owner = f"{inventory.campaign} (run {self.identity})"  # two people may give one name to their campaigns
        self.outcome = Outcome()
        self.tries: Counter[CellId] = Counter()
        self.targets = {target.name: target}
        others = {node for launch in launches.values() for node in launch.server.nodes[1:]}
        machines = hosts.load(inventory.folder) if others else None
        self.targets |= {name: target_of(machines, name) for name in sorted(others) if machines is not None}
        self.guards = Guards([self._guard(one) for one in self.targets.values()])

    def _guard(self, target: Target) -> Guard:
        """Of one machine: the one measured on, or a further one of servers over several."""
        first = target is self.target
        its = [name for name, launch in self.launches.items() if first or target.name in launch.server.nodes]
        return Guard(
            Ways(target.name, target.transport, target.node, target.vmid),
            self.run,
            self.tell,
            lambda _: _heal(self.inventory, its, target, self.options, self.tell),
            within_s=self.options.within_s,
            first=first,
        )

    def _places(self, launch: Launch) -> tuple[str, ...]:
        """The machines of a server, the one measured on first."""
        return (self.target.name, *launch.server.nodes[1:])

    def check(self) -> Outcome:
        """What would be measured, and why; nothing is changed."""
        self.guards.begin(check=True)
        self.survey = ask_survey(self.target, self.launches, self.inventory)
        self._todos()
        self.outcome.missing.update(missing_programs(self.launches, self.survey))
        return self.outcome

    def measure(self) -> Outcome:
        run, inventory, phase = self.run, self.inventory, self.plan.name
        commands = {**run.commands(), phase: list(self.options.command)}
        run.put("campaign.json", {"run": self.identity, **_campaign(inventory, self.launches, commands)})
        _make_models(inventory, self.launches, self.tell)
        self._begin()
        self._look()
        if lost := self._without_models():
            try:
                self.guards.tend(None, lost)  # it was in memory, and somebody took it away
            except Refused:
                raise
            except TransportError as error:
                self.guards.recover(str(error), lambda: None, lost)
            self._look()
        try:
            todos = self._todos()
            self.foresight = _foresight(todos, inventory, self.target, self.options, self.tell)
            while todos:
                try:
                    self._server(todos[0])
                    todos.pop(0)
                except _BrokenOff as broken:
                    todos = self._after(broken, todos)
        except BaseException:
            # Whatever it was interrupted in, also in stopping a server: nothing that we started stays behind.
            with contextlib.suppress(TransportError, SupervisionError):  # where it is there
                self._stop_orphans(lambda _event, **_facts: None)
            raise
        done, kept, failed = (len(part) for part in (self.outcome.done, self.outcome.kept, self.outcome.failed))
        run.event("run_finished", phase=phase, done=done, kept=kept, failed=failed)
        return self.outcome

    # -- the machine

    def _begin(self) -> None:
        """Each event has the boot it was in, also that the run started; one whose machine said nothing has none."""
        told = False

        def started() -> None:
            nonlocal told
            if not told:
                told = True
                command = list(self.options.command)
                self.run.event("run_started", phase=self.plan.name, target=self.target.name, command=command)

        try:
            self.guards.begin(started=started)
        finally:
            started()

    def _without_models(self) -> list[str]:
        """The machines on which a model is missing that is to be staged there."""
        found = []
        for name in self.targets:
            its = [server for server, launch in self.launches.items() if name in self._places(launch)]
            seen = (self.survey if name == self.target.name else self.survey["others"][name])["models"]
            paths = [self.inventory.models[model].path for model in models_of(self.inventory, its)]
            if any("error" in seen.get(path, {}) for path in paths):
                found.append(name)
        return found

    def _look(self) -> bool:
        """Asks the machine what it is now, and stops what of this campaign still runs there.

        One that goes away while it is asked is waited for; True: it started anew meanwhile. Raises Stopped.
        """
        anew = False
        for _ in range(TRIES):
            try:
                self.survey = ask_survey(self.target, self.launches, self.inventory)
                self.supervisor = _supervisor(self.inventory, self.target, self.survey, self.tell)
                self._stop_orphans(self.tell)
                return anew
            except Refused:
                raise
            except (TransportError, SupervisionError) as error:
                anew |= self.guards.recover(str(error), lambda: None, ()) in RESTARTS
        raise Stopped(f"{self.target.name} went away {TRIES} times while it was asked; look what ails it")

    def _stop_orphans(self, tell: Tell) -> None:
        """Servers that a killed run of this campaign left behind."""
        units, _ = self.supervisor.status()
        for unit in units:
            if unit.running and unit.owner == self.owner:
                self.supervisor.stop(unit.unit)
                self.run.event("orphan_stopped", unit=unit.unit, pid=unit.pid)
                tell("orphan_stopped", unit=unit.unit, pid=unit.pid)

    def _after(self, broken: _BrokenOff, todos: Sequence[_Todo]) -> list[_Todo]:
        """Has the machine mended after what broke off the first of these; what is left to measure. Raises Stopped."""
        what = self._recovered(broken, self._places(todos[0].launch))
        if self._look() or what in RESTARTS:
            todos = self._todos_after_restart()
        self._give_up_tried(todos, broken.failure)
        return [todo for todo in todos if todo.pending]

    def _recovered(self, broken: _BrokenOff, places: Sequence[str]) -> Happened:
        """Has the machines of the server waited for and healed. Raises Stopped."""
        wanted = broken.state

        def serves() -> bool | None:
            if wanted is None:
                return None
            units, _ = self.supervisor.status()
            return any(u.running and (u.pid, u.start) == (wanted.pid, wanted.start) for u in units)

        if broken.only_the_server:
            try:
                self.guards.tend(Happened.SERVICE_DIED, places)
                return Happened.SERVICE_DIED
            except Refused:
                raise
            except TransportError as error:  # it went on from there
                return self.guards.recover(str(error), serves, places)
        return self.guards.recover(broken.away or broken.failure.summary, serves, places)

    def _bad_model(self, todo: _Todo) -> Failure | None:
        """Reads a server's models in memory before they are served: a turned bit would make numbers that look well.

        Has the box healed where one is not what it was staged as; the failure, where that did not help. Raises
        _BrokenOff when the machine is away.
        """
        places = self._places(todo.launch)

        def bad(why: str = "") -> Failure | None:
            for place, job in self._staged(todo):
                found = staging.look(self.targets[place].transport, job, verify=True)
                if not found.well:
                    where = f" on {place}" if place != self.target.name else ""
                    what = (
                        f"model {job['model']} is not in order{where}: {why or next(iter(found.missing), found.state)}"
                    )
                    return Failure("no_model", what, found.missing[:8], f"gpuctl stage {job['model']} says more")
            return None

        try:
            if bad() is None:
                return None
            done = self.guards.tend(None, places, same=True)
            return bad(next((str(step["why"]) for step in done if step.get("why")), ""))
        except StagingError as error:
            return Failure("no_model", str(error))
        except Refused:
            raise
        except TransportError as error:
            away = self.guards.away(places)
            raise _BrokenOff(Failure("machine_away", str(error)), away or str(error), None) from None

    def _spoilt(self, todo: _Todo) -> bool:
        """Whether a model of a server that failed is not as it was when it was started: that is no fault of its own."""
        with contextlib.suppress(StagingError, TransportError):
            return not all(staging.look(self.targets[place].transport, job).well for place, job in self._staged(todo))
        return False

    def _staged(self, todo: _Todo) -> list[tuple[str, dict[str, Any]]]:
        """(machine, staging job) of each model that a server reads from memory, on each of its machines."""
        names = models_of(self.inventory, [todo.server])
        if self.target.machines is None or self.target.ours:
            return []
        machines = self.target.machines.machines
        return [
            (place, staging.job_for(name, self.inventory.models[name], machines[place]))
            for place in self._places(todo.launch)
            for name in names
        ]

    # -- what is to be measured

    def _todo(self, name: str) -> _Todo:
        launch = self.launches[name]
        engine = plugins.get("engines", launch.server.engine)
        return _Todo(name, launch, engine, [], self.inventory.models.get(launch.server.model or ""))

    def _told(self, todo: _Todo, reasons: Mapping[str, int]) -> None:
        for why, count in reasons.items():
            self.tell("pending", server=todo.server, cells=count, why=why)

    def _todos(self) -> list[_Todo]:
        """By server which cells are to be measured; says of each other one why not."""
        found = []
        for name, cells in self.by_server.items():
            todo = self._todo(name)
            reasons: Counter[str] = Counter()
            for cell in cells:
                parts = fingerprint(cell, todo.launch, todo.engine, self.survey)
                record = self.run.load(cell.id)
                decision = cells_.decide(
                    record, parts, fresh=self.options.fresh, retry_failed=self.options.retry_failed
                )
                if decision.measure:
                    todo.pending.append((cell, parts))
                    self.outcome.pending.append((cell, decision.why))
                    reasons[decision.why] += 1
                else:
                    assert record is not None
                    (self.outcome.kept if record.state in MEASURED else self.outcome.failed).append(record)
                    self.tell("skip", cell=cell.id, why=decision.why, record=record)
            self._told(todo, reasons)
            found.append(todo)
        return [todo for todo in found if todo.pending]

    def _todos_after_restart(self) -> list[_Todo]:
        """What is left of each server's cells, and those whose results hold no longer."""
        found = []
        outcome = self.outcome
        settled = {record.cell: record for record in (*outcome.done, *outcome.kept, *outcome.failed)}
        for name, cells in self.by_server.items():
            todo = self._todo(name)
            changed: Counter[str] = Counter()
            for cell in cells:
                parts = fingerprint(cell, todo.launch, todo.engine, self.survey)
                record = settled.get(cell.id)
                if record is not None:
                    if record.fingerprint_id == cells_.fingerprint_id(parts) or self.tries[cell.id] >= TRIES:
                        continue
                    changed[f"the restart changed {cells_.differences(record.fingerprint, parts)}"] += 1
                    for records in (outcome.done, outcome.kept, outcome.failed):
                        records[:] = [one for one in records if one.cell != cell.id]
                todo.pending.append((cell, parts))
            self._told(todo, changed)
            found.append(todo)
        return [todo for todo in found if todo.pending]

    def _give_up_tried(self, todos: Sequence[_Todo], failure: Failure) -> None:
        """Cells that were broken off too often become failures; a later run tries them again."""
        for todo in todos:
            for cell, parts in [(cell, parts) for cell, parts in todo.pending if self.tries[cell.id] >= TRIES]:
                todo.pending.remove((cell, parts))
                summary = f"broken off {self.tries[cell.id]} times, at last: {failure.summary}"
                what = replace(failure, summary=summary)
                if what.kind not in cells_.PASSING and what.signal is None:
                    what = replace(what, kind="interrupted")
                self._fail(what, [(cell, parts)])

    # -- records

    def _fail(self, failure: Failure, left: Iterable[tuple[Cell, Mapping[str, Any]]], up: Up | None = None) -> None:
        for cell, parts in left:
            self._keep(cell, parts, now(), Measured(State.FAILED, {}, (), failure, {}, (), ()), up)

    def _keep(self, cell: Cell, parts: Mapping[str, Any], began: str, what: Measured, up: Up | None) -> Record:
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
            boot={key: self.survey["machine"].get(key) for key in ("boot_id", "pid1_start")},
            metrics=what.metrics,
            reps=what.reps,
            failure=what.failure,
            server=up.as_json() if up else {},
            generator=what.generator,
            notes=what.notes,
            parameters={"concurrency": cell.point.concurrency, **cell.point.parameters},
        )
        before = (
            self.run.load(cell.id) if record.failure is not None and record.failure.kind in cells_.PASSING else None
        )
        if before is None or before.state not in MEASURED:
            self.run.save(record, what.raw)
        self.run.event("cell_done", cell=str(cell.id), state=record.state.value)
        (self.outcome.done if record.state in MEASURED else self.outcome.failed).append(record)
        self.tell("cell", cell=cell.id, record=record)
        return record

    # -- one server

    def _server(self, todo: _Todo) -> None:
        """One server and what belongs to it: its models read before, the memory of its GPUs free afterwards."""
        if (bad := self._bad_model(todo)) is not None:
            self._fail(bad, todo.pending)
            return
        machines = [self.targets[name] for name in self._places(todo.launch)]
        with contextlib.ExitStack() as stack:
            gauges = [
                stack.enter_context(Gauges(machine.transport, machine.agent_python, whole=len(machines) == 1))
                for machine in machines
            ]
            self._measured(todo, gauges[0])
            for machine, seen in zip(machines, gauges, strict=True):
                self._wait_until_free(seen, todo.server, machine.name)

    def _measured(self, todo: _Todo, gauges: Gauges) -> None:
        """One server: up, its pending cells, down. A server that does not work makes records with causes.

        Cells leave `todo.pending` as they get records. Raises _BrokenOff where something outside of it ended it.
        """
        self.tell(
            "server",
            server=todo.server,
            title=todo.launch.server.title or todo.server,
            engine=todo.launch.server.engine,
            cells=len(todo.pending),
        )
        up = None if self._hopeless(todo) else self._brought_up(todo)
        if up is None:
            return
        try:
            self._measure_cells(todo, up, gauges)
        finally:
            self._stopped(up, self._places(todo.launch))
            self.run.event("server_stopped", server=todo.server)

    def _hopeless(self, todo: _Todo) -> bool:
        """Whether the server cannot work, as is known without starting it; its cells have their records then."""
        impossible = _missing_model(todo.launch, self.survey) or _not_bound(todo.launch, self.survey)
        if impossible is not None:
            self._fail(impossible, todo.pending)
            return True
        refused = self.foresight.refused(todo.launch, todo.engine)
        if refused is not None:
            self.run.event("server_refused", server=todo.server, why=refused.summary)
            self.tell("server_failed", server=todo.server, failure=refused)
            self._fail(refused, todo.pending)
            return True
        return False

    def _brought_up(self, todo: _Todo) -> Up | None:
        """The server, ready; None where it did not come up by its own fault, and its cells have their records."""
        places = self._places(todo.launch)
        self.run.event("server_started", server=todo.server)
        self.tries[todo.pending[0][0].id] += 1
        try:
            up = bring_up(
                todo.engine,
                todo.launch,
                self.supervisor,
                run=self.run,
                owner=self.owner,
                tell=self.tell,
                known_answer=todo.model.known_answer if todo.model else None,
                headers=bearer(self.keys[todo.server]),
            )
        except Refused:
            raise
        except (TransportError, SupervisionError) as error:
            away = self.guards.away(places)
            raise _BrokenOff(Failure("machine_away", str(error)), away or str(error), None) from None
        except StartFailed as error:
            away = self.guards.away(places)
            if away or _from_outside(error.failure) or self._spoilt(todo):
                raise self._broken_off(todo, error.failure, away, None) from None
            if error.failure.kind in ("no_room", "in_use"):  # as for every other server of the phase
                raise Stopped(error.failure.summary) from None
            self.run.event("server_died", server=todo.server, why=error.failure.summary)
            self.tell("server_failed", server=todo.server, failure=error.failure)
            self._fail(error.failure, todo.pending)
            return None
        self.run.event("server_ready", server=todo.server, ready_s=round(up.ready_s, 3))
        self.tell("ready", server=todo.server, ready_s=up.ready_s, identity=up.identity)
        return up

    def _measure_cells(self, todo: _Todo, up: Up, gauges: Gauges) -> None:
        """Each pending cell of a server that is up; a server that dies makes failures of those behind it."""

        def load(jobs: Sequence[Mapping[str, Any]]) -> list[Result]:
            return load_all(self.target.transport, jobs, python=self.target.agent_python)

        places, left, first = self._places(todo.launch), todo.pending, True
        while left:
            cell, parts = left[0]
            began = now()
            self.tries[cell.id] += not first  # the first one was counted when its server was started
            first = False
            self.tell("measuring", cell=cell.id)
            what = measure(
                cell,
                up,
                self.supervisor,
                load,
                gauge=gauges.during,
                api_key=self.keys[todo.server],
                unstable_above=self.plan.unstable_above,
            )
            away = self.guards.away(places)
            if away or (what.failure is not None and (_from_outside(what.failure) or self._spoilt(todo))):
                # also a cell that came out well: whatever it measured, it was not one boot
                raise self._broken_off(todo, what.failure or Failure("rebooted", away), away, up.state)
            top = self.foresight.ceiling(todo.launch, todo.engine, cell)  # of this cell, and of none behind it
            of_cell = replace(up, facts={**up.facts, "roofline_tok_s": top}) if top else up
            record = self._keep(cell, parts, began, what, of_cell)
            left.pop(0)
            if record.failure is not None and record.failure.kind == "server_died":
                self.run.event("server_died", server=todo.server, why=record.failure.summary)
                self.tell("server_failed", server=todo.server, failure=record.failure)
                self._fail(replace(record.failure, summary=f"not measured: {record.failure.summary}"), left, up)
                return

    def _broken_off(self, todo: _Todo, failure: Failure, away: str, state: UnitState | None) -> _BrokenOff:
        """To be raised. A server that ended is told of at once: stopping what is left of it, and the GPUs' memory, take
        their time."""
        broken = _BrokenOff(failure, away, state)
        if broken.only_the_server:
            self.run.event("server_died", server=todo.server, why=failure.summary)
            self.tell("broken_off", failure=failure)
        return broken

    def _wait_until_free(self, gauges: Gauges, server: str, machine: str) -> None:
        """The next server would not find the memory that this one still holds."""
        held = gauges.wait_until_free()
        if held:
            sizes = {str(gpu): size for gpu, size in held.items()}
            self.run.event("memory_held", server=server, machine=machine, bytes=sizes)
            self.tell("memory_held", server=server, machine=machine, held=held)

    def _stopped(self, up: Up, places: Sequence[str]) -> None:
        """Stops a server. On a machine that is away it is found and stopped later, by its mark."""
        try:
            take_down(up, self.supervisor)
        except Refused:
            raise
        except (TransportError, SupervisionError):
            if not self.guards.away(places):
                raise


def _heal(
    inventory: Inventory, servers: Iterable[str], target: Target, options: Options, tell: Tell
) -> list[Mapping[str, Any]]:
    """Has the box mended as far as these servers need it before they are started; says what was done.

    Raises Stopped where something is left that keeps CUDA from starting, and one of them needs it.
    """
    if target.machines is None or target.ours:
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
    if healing.state in ("stuck", "failed") and healing.after.works is False and _need_a_gpu(inventory, servers):
        why = healing.left[0].summary if healing.left else "it does not work afterwards"
        text = next((step.played.text for step in healing.steps if not step.played.ok), "")
        raise Stopped(f"{target.name} is not mended: {why}{f' ({text})' if text else ''}", stuck=True)
    return done


def _need_a_gpu(inventory: Inventory, servers: Iterable[str]) -> bool:
    """Whether one of these servers does; llama.cpp on a machine without any is measured as it is."""
    for server in map(inventory.server, servers):
        on_processor = getattr(plugins.get("engines", server.engine), "on_processor", None)
        if on_processor is None or not on_processor(server.flags):
            return True
    return False


def _from_outside(failure: Failure) -> bool:
    """Whether a failure says nothing of the configuration: the way to the machine, or a signal without a cause."""
    if failure.kind in _OUTSIDE:
        return True
    ended = failure.kind in ("server_died", "start_failed") and failure.signal in ("SIGKILL", "SIGTERM")
    without = failure.finding is None or failure.finding.get("id") in _NO_CAUSE
    return ended and without and "out of memory" not in failure.summary


def _foresight(todos: Sequence[_Todo], inventory: Inventory, target: Target, options: Options, tell: Tell) -> Foresight:
    """What the machine tells that plans are made from. One that does not tell it is measured all the same."""
    pairs = knowing.engines_of([todo.launch for todo in todos])
    try:
        known = None
        if pairs:
            known = knowing.ask(
                target.transport, pairs, target.name, inventory.folder, python=target.agent_python,
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
        return Processes(target.transport, python=target.agent_python)

    machines = hosts.load(inventory.folder)
    place = deploy.placer(
        machines,
        machines.machines[target.name],
        target.transport,
        {unit_name(name): server for name, server in inventory.servers.items()},
        models=[model.path for model in inventory.models.values() if model.stage],
        on_step=lambda step: tell("placing", machine=step.machine, task=step.task),
        on_trap=lambda unit, trap: tell("trap", unit=unit, trap=trap),
        on_boot_lost=lambda unit: tell("boot_lost", machine=target.name, unit=unit),
        on_placed=lambda unit, exposure: tell("placed", machine=target.name, unit=unit, exposure=exposure),
    )
    return Units(target.transport, place, python=target.agent_python)


def _campaign(
    inventory: Inventory, launches: Mapping[str, Launch], commands: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """What was asked, for whoever reads the folder later. Environments stay out: a person may put secrets there.

    `commands`: by phase, the last that was given for it; the phases that nobody has run yet have none.
    """
    servers: dict[str, dict[str, Any]] = {}
    for phase in inventory.phases.values():
        for name in phase.servers:
            server = inventory.server(name)
            servers[name] = {"engine": server.engine, "model": server.model, "title": server.title}
            if name in launches:
                engine = plugins.get("engines", server.engine)
                servers[name]["argv"] = sealed_argv(engine.argv(launches[name])) or [server.url]
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
            try:
                tiny_model.write(Path(launch.model))
                tell("model_made", path=launch.model)
            except ImportError as error:
                raise BenchError(
                    f"{launch.model}: {error.name} is missing: pip install xllamacpp gguf numpy"
                ) from error
            except OSError as error:
                raise BenchError(f"{launch.model}: {error.strerror}") from error


def _missing_model(launch: Launch, survey: Mapping[str, Any]) -> Failure | None:
    for where, found in (("", survey), *((f" on {name}", survey["others"][name]) for name in launch.server.nodes[1:])):
        for path in (launch.model, launch.draft):
            error = found["models"].get(path or "", {}).get("error")
            if error:
                advice = "`gpuctl stage` brings a model to its place"
                return Failure("no_model", f"{launch.name}: {error}{where}", advice=advice)
    return None


def _not_bound(launch: Launch, survey: Mapping[str, Any]) -> Failure | None:
    """A server that was to be bound and is not would make numbers under a name that is not theirs."""
    bound = [key for key in ("numa", "cpus") if getattr(launch.server, key) is not None]
    if survey["machine"].get("systemd") or launch.server.url or not bound:
        return None
    what = f"{launch.name}: {bound[0]}: only units of systemd are bound, and there is no systemd here that we may use"
    return Failure("refused", what, advice=f"measure it as root of a machine with systemd, or take out {bound[0]}")
