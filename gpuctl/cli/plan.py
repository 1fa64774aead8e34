"""`gpuctl plan PHASE` and `gpuctl plan SERVER`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuctl.cli import FINDINGS, UNKNOWN, WELL
from gpuctl.cli._console import colour, document, out, say
from gpuctl.cli._options import (
    Whole,
    completing,
    inventory_option,
    json_option,
    load_inventory,
    options,
    run_option,
    runs_option,
    target_option,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpuctl.cells import Cell
    from gpuctl.config import Inventory
    from gpuctl.engines import Launch
    from gpuctl.planning.known import Known
    from gpuctl.planning.servers import History, ServerPlan
    from gpuctl.store import Run
    from gpuctl.surveying import Target


@click.command("plan", short_help="what fits in memory, what cannot work and why, how long a phase takes")
@click.argument("name", metavar="PHASE|SERVER", shell_complete=completing("phases", "servers"))
@options(inventory_option, target_option, runs_option, json_option)
@click.option("--offline", is_flag=True, help="Ask no machine: plan from what it told before, or the inventory states.")
@click.option("--as-is", is_flag=True, help="Beside what others hold of the GPUs now, not on empty ones.")
@click.option("--only", metavar="GLOB", multiple=True, help="Servers, or server/workload/point. May be repeated.")
@click.option("--requests", type=Whole(1, 1_000_000), metavar="N", help="How many at once are wanted.")
@click.option(
    "--context", "contexts", type=Whole(1, 100_000_000), multiple=True, metavar="TOKENS",
    help="Length of requests, prompt and answer together. May be repeated.",
)  # fmt: skip
@click.option("--engine-version", metavar="VERSION", help="Plan for this version of the engine, not what is installed.")
@options(run_option)
def command(
    name: str,
    inventory: str,
    target: str | None,
    runs: Path,
    as_json: bool,
    offline: bool,
    as_is: bool,
    only: tuple[str, ...],
    requests: int | None,
    contexts: tuple[int, ...],
    engine_version: str | None,
    run_name: str | None,
) -> int:
    """Says before anything is deployed what a phase or a server will hold, and what in it cannot work.

    The machine is asked where it can be reached; else the plan rests on what it told before, or on what the inventory
    states. Exit code 1 where something cannot work or is refused, 3 where it could not be told.
    """
    from gpuctl import surveying
    from gpuctl.memory import Verdict
    from gpuctl.planning import known as knowing
    from gpuctl.planning import servers as planning
    from gpuctl.store import Run

    if engine_version is not None and not re.match(r"v?\d", engine_version):
        raise click.BadParameter(f"--engine-version {engine_version}: a version begins with a digit, as 0.5.16")
    wanted = load_inventory(inventory)
    cells, title, box = _wanted(wanted, name, only, target)
    machine = surveying.target(wanted, box)
    launches = {server: surveying.launch_of(wanted, server, machine) for server in cells}
    known, why_not = _known(wanted, machine, list(launches.values()), offline)
    run = Run(runs / (run_name or wanted.campaign))
    history = _history(wanted, name, machine, run, launches, cells, known)
    engines = {launch.name: engine for launch, engine in knowing.engines_of(list(launches.values()))}
    if engine_version is not None:
        known = knowing.without_sources(known)
    plans = [
        planning.plan_server(
            launch, engines.get(server), cells[server], wanted, known, history, requests=requests, contexts=contexts,
            as_is=as_is, version=engine_version,
        )
        for server, launch in launches.items()
    ]  # fmt: skip
    spaces = planning.spaces(launches.values(), wanted, known)
    warnings = () if as_is else planning.held(known, max(plan.tp for plan in plans))
    verdicts = [plan.verdict for plan in plans]
    worst = next(
        (v for v in (Verdict.IMPOSSIBLE, Verdict.UNKNOWN, Verdict.LIMITED) if v in verdicts), Verdict.FITS
    )  # fmt: skip
    basis = _basis(known, why_not, offline)
    if as_json:
        document(
            {
                "schema": "gpuctl.plan/1",
                "verdict": worst.value,
                "name": name,
                "machine": box,
                "basis": basis,
                "asked": known.asked,
                "seconds": _sum(plans),
                "servers": [plan.as_json() for plan in plans],
                "space": [space.as_json() for space in spaces],
                "warnings": list(warnings),
            }
        )
    else:
        _print(name, title, box, basis, plans, spaces, warnings, history.sure, name in wanted.phases)
    refused = any(cell.outcome == "refused" for plan in plans for cell in plan.cells)
    if Verdict.IMPOSSIBLE in verdicts or refused:
        return FINDINGS
    if Verdict.UNKNOWN in verdicts:
        return UNKNOWN
    short = any(plan.plan.verdict is Verdict.LIMITED for plan in plans)
    return FINDINGS if short else WELL


def _wanted(
    inventory: Inventory, name: str, only: tuple[str, ...], target: str | None
) -> tuple[dict[str, list[Cell]], str, str]:
    """Cells by server, a title, and the machine. A server is planned with the cells of every phase that has it."""
    from gpuctl import cells as cells_
    from gpuctl import plugins
    from gpuctl.config import ConfigError
    from gpuctl.spelling import hint

    def workload(one: str) -> Any:
        return plugins.get("workloads", one)

    if name in inventory.phases:
        phase = inventory.phases[name]
        by_server = cells_.of_phase(phase, workload, only)
        if not by_server:
            raise ConfigError([f"{name}: no cell of it is named by {' '.join(only)}"])
        return by_server, phase.title, target or phase.target or "local"
    if name not in inventory.servers:
        names = [*inventory.phases, *inventory.servers]
        raise ConfigError([f"{inventory.folder}: no phase and no server {name!r}; {hint(name, names)}"])
    phases = [phase for phase in inventory.phases.values() if name in phase.servers]
    found: list[Cell] = []
    for phase in phases:
        found += cells_.of_phase(phase, workload, [name]).get(name, [])
    # Where no phase has it yet it is planned for the machine that the inventory's phases are measured on.
    targets = [phase.target for phase in (*phases, *inventory.phases.values()) if phase.target]
    box = target or next(iter(targets), "local")
    return {name: found}, inventory.servers[name].title or name, box


def _known(inventory: Inventory, machine: Target, launches: Sequence[Launch], offline: bool) -> tuple[Known, str]:
    """What is known of the machine, and why it was not asked."""
    from gpuctl import hosts
    from gpuctl.config import ConfigError
    from gpuctl.planning import known as knowing
    from gpuctl.transport import TransportError

    pairs = knowing.engines_of(launches)
    found, why = None, ""
    if not offline:
        try:
            python = machine.python if machine.base is not None else "python3"
            found = knowing.ask(machine.transport, pairs, machine.name, inventory.folder, python=python, tell=say)
        except TransportError as error:
            why = str(error)
        finally:
            machine.transport.close()
    if found is None:
        found = knowing.recall(machine.name, inventory.folder, pairs)
    variables = hosts.load(inventory.folder).machines[machine.name].vars
    try:
        return knowing.state(found, inventory, machine.name, variables), why
    except ValueError as error:
        raise ConfigError([str(error)]) from None


def _basis(known: Known, why_not: str, offline: bool) -> str:
    if known.asked:
        return f"asked {known.machine} now"
    reason = "" if offline else f" ({why_not})"
    return f"planned without {known.machine}{reason}: {known.basis}"


def _history(
    inventory: Inventory, name: str, machine: Target, run: Run, launches: Mapping[str, Launch],
    cells: Mapping[str, Sequence[Cell]], known: Known,
) -> History:  # fmt: skip
    """What was measured before, and what is pending. Without the machine as far as its part stays as it was."""
    from gpuctl import cells as cells_
    from gpuctl import plugins, surveying
    from gpuctl.planning.servers import History

    records = {}
    for several in cells.values():
        for cell in several:
            record = run.load(cell.id)
            if record is not None:
                records[cell.id] = record
    survey = None
    if known.asked and records:
        survey = surveying.ask_survey(machine, launches, inventory)
    decisions = {}
    for server, several in cells.items():
        launch = launches[server]
        engine = plugins.get("engines", launch.server.engine)
        for cell in several:
            record = records.get(cell.id)
            if record is None:
                decisions[cell.id] = cells_.decide(None, {})
            elif survey is not None:
                decisions[cell.id] = cells_.decide(record, surveying.fingerprint(cell, launch, engine, survey))
            else:
                parts = {**record.fingerprint, **surveying.intended(cell, launch, engine)}
                decisions[cell.id] = cells_.decide(record, parts)
    return History(records, decisions, sure=survey is not None or not records)


def _sum(plans: Sequence[ServerPlan]) -> float | None:
    known = [plan.seconds for plan in plans if plan.seconds is not None]
    return round(sum(known), 1) if len(known) == len(plans) else None


def _print(
    name: str, title: str, box: str, basis: str, plans: Sequence[ServerPlan], spaces: Sequence[Any],
    warnings: Sequence[str], sure: bool, phase: bool,
) -> None:  # fmt: skip
    import shutil

    from gpuctl.planning import telling

    def paint(text: str, tint: str) -> str:
        return click.style(text, fg=tint, bold=True) if tint else text

    chosen = paint if colour() else telling.plain
    columns = shutil.get_terminal_size((100, 24)).columns
    if not phase:
        for line in telling.of_server(plans[0], basis, spaces, chosen, max(30, min(columns - 6, 96))):
            out(line)
        for warning in warnings:
            out(f"  warning: {warning}")
        return
    told = telling.PhaseTold(name, title, box, basis, tuple(plans), tuple(spaces), tuple(warnings), sure)
    room = columns - max(len(plan.name) for plan in plans) - 46
    for line in telling.of_phase(told, chosen, max(24, min(room, 60))):
        out(line)
