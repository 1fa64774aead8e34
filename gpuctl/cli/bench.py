"""`gpuctl bench PHASE`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuctl.cli import FINDINGS, INTERRUPTED, WELL
from gpuctl.cli._console import document, out, say
from gpuctl.cli._mending import Mending, allow, seconds
from gpuctl.cli._options import (
    check_option,
    completing,
    inventory_option,
    json_option,
    load_inventory,
    options,
    run_option,
    runs_option,
    target_option,
    yes_option,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuctl.bench import Outcome
    from gpuctl.facts.boot import Happened
    from gpuctl.records import CellId, Record
    from gpuctl.store import Run


@click.command("bench", short_help="deploy each server of a phase and measure it; goes on by itself")
@click.argument("phase", shell_complete=completing("phases"))
@options(inventory_option, target_option, runs_option, check_option, yes_option, json_option)
@click.option("--fresh", is_flag=True, help="Measure every cell again.")
@click.option("--retry-failed", is_flag=True, help="Try cells again that failed before.")
@click.option("--force", is_flag=True, help="Start servers, too, of which `gpuctl plan` says that they cannot work.")
@click.option("--only", metavar="GLOB", multiple=True, help="Servers, or server/workload/point. May be repeated.")
@options(run_option)
def command(
    phase: str,
    inventory: str,
    target: str | None,
    runs: Path,
    check: bool,
    yes: bool,
    as_json: bool,
    fresh: bool,
    retry_failed: bool,
    force: bool,
    only: tuple[str, ...],
    run_name: str | None,
) -> int:
    """Deploys each server of PHASE as a unit and measures its cells: one server under one point of a workload.

    What is measured already is left out as long as nothing that could change it has changed. After Ctrl-C, a crash or a
    reboot the same command goes on where it stopped. A box that goes away is waited for, healed as `gpuctl restore`
    does, and the cell measured again; --yes asks no question before a change to it.
    """
    from gpuctl import bench as verb
    from gpuctl import surveying
    from gpuctl.guard import Stopped
    from gpuctl.store import Run

    known = load_inventory(inventory)
    words = ["bench", phase, "-i", inventory, *(["-t", target] if target else [])]
    words += [*(["--runs", str(runs)] if runs != Path("runs") else []), *(["--run", run_name] if run_name else [])]
    words += [*(["--fresh"] if fresh else []), *(["--force"] if force else [])]
    words += [word for glob in only for word in ("--only", glob)]
    chosen = verb.Options(
        fresh=fresh,
        retry_failed=retry_failed,
        only=only,
        check=check,
        force=force,
        command=("gpuctl", *words),
        allowed=None if yes else allow,
    )
    box = target or known.phase(phase).target or "local"
    machine = surveying.target(known, box)
    run = Run(runs / (run_name or known.campaign))
    console = _Console(run, known.phase(phase).baseline, quiet=as_json)
    if check:
        outcome = verb.bench(known, phase, machine, run, console.tell, chosen)
        _show_check(outcome, as_json)
        return FINDINGS if outcome.missing else WELL
    with run:
        try:
            outcome = verb.bench(known, phase, machine, run, console.tell, chosen)
        except KeyboardInterrupt:
            run.event("run_interrupted", phase=phase)
            say(f"\ninterrupted; the same command goes on: {_again()}")
            return INTERRUPTED
        except Stopped as error:
            run.event("run_stopped", phase=phase, why=str(error))
            say(f"gpuctl: {error}; then the same command goes on: {_again()}")
            return FINDINGS if error.stuck else INTERRUPTED
    _report(run)
    if as_json:
        document(_as_json(outcome, run))
    else:
        _conclude(outcome, run)
    return FINDINGS if outcome.failed else WELL


class _Console(Mending):
    """Prints what happens in the style of the campaign's tables."""

    def __init__(self, run: Run, baseline: str | None, *, quiet: bool) -> None:
        self.run, self.baseline, self.quiet = run, baseline, quiet
        self.group: tuple[Any, ...] | None = None
        super().__init__(say if quiet else out, live=sys.stderr.isatty() and not quiet)
        self.waited = 0.0  # when it was last said that something is waited for

    def on_phase(self, phase: str, title: str, servers: int, cells: int) -> None:
        from gpuctl.reports.terminal import banner

        self.print(banner(phase, title))

    def on_model_made(self, path: str) -> None:
        self.print(f"  wrote {path} (random weights)")

    def on_orphan_stopped(self, unit: str, pid: int) -> None:
        self.print(f"  stopped {unit} (pid {pid}), left running by an earlier run")

    def on_placing(self, machine: str, task: str) -> None:
        if self.live:
            click.echo(f"\r\033[K  {machine}: {task.lower()} ...", err=True, nl=False)

    def on_placed(self, machine: str, unit: str, exposure: str) -> None:
        self._clear()
        self.print(f"  placed {unit}.service on {machine}{exposure and f'; {exposure}'}")

    def on_trap(self, unit: str, trap: Any) -> None:
        self.print(f"  note: {trap.summary}; {trap.advice}")

    def on_boot_lost(self, machine: str, unit: str) -> None:
        serves = f"gpuctl_serves: {unit.removeprefix('gpuctl-')}"
        self.print(
            f"  note: {unit} is not started at boot of {machine} any more, since what is measured must not come up by "
            f"itself; afterwards `{serves}` in hosts.yml and `gpuctl restore -t {machine} --boot` bring that back"
        )

    def on_memory_held(self, server: str, machine: str, held: dict[int, int]) -> None:
        gpus = ", ".join(f"GPU {gpu}: {size / 2**30:.1f} GiB" for gpu, size in held.items())
        self.print(
            f"  {server} is stopped, and {machine} still has memory held: {gpus}; the next server may not find room"
        )

    def on_skip(self, cell: CellId, why: str, record: Record) -> None:
        from gpuctl.records import MEASURED
        from gpuctl.reports.terminal import skip

        name = f"{cell.server}/{cell.workload}/{cell.point}"
        self.print(
            skip(name, why) if record.state in MEASURED else f"  KEPT {name} ({why}; --retry-failed tries again)"
        )

    def on_pending(self, server: str, cells: int, why: str) -> None:
        if why != "not measured yet":
            self.print(f"  {server}: {cells} {'cell' if cells == 1 else 'cells'} again: {why}")

    def on_server(self, server: str, title: str, engine: str, cells: int) -> None:
        line = "=" * 64
        self.print(f"{line}\n  {server}  {engine}  {title}\n{line}")
        self.group = None

    def on_measuring(self, cell: CellId) -> None:
        if self.live:
            click.echo(f"\r\033[K  {cell.workload}/{cell.point} ...", err=True, nl=False)

    def on_asking(self, what: str) -> None:
        self.print(f"  {what}")

    def on_ready(self, server: str, ready_s: float, identity: Any) -> None:
        self._clear()
        self.print(f"  ready after {ready_s:.1f} s, identity and warm-up answer OK")

    def on_server_failed(self, server: str, failure: Any) -> None:
        self._clear()
        self.print(f"  FAILED {failure.summary}")
        for line in failure.evidence[-6:]:
            self.print(f"    | {line}")
        if failure.advice:
            self.print(f"    {failure.advice}")

    def on_broken_off(self, failure: Any) -> None:
        self._clear()
        self.print(f"  BROKEN OFF {failure.summary}")

    def on_away(self, box: str, why: str, waited_s: float, within_s: float) -> None:
        """Says each half minute, or on one line of a terminal, what is waited for."""
        if not waited_s:
            self._clear()
            self.print(f"  AWAY {why}; waiting up to {within_s / 60:g} minutes for it")
            self.waited = 0.0
        elif self.live:
            click.echo(f"\r\033[K  waiting for {box}: {waited_s:.0f} s; {why}"[:200], err=True, nl=False)
        elif waited_s - self.waited >= 30:
            self.print(f"  waiting for {box}: {waited_s:.0f} s; {why}")
            self.waited = waited_s

    def on_back(self, box: str, happened: Happened, away_s: float) -> None:
        from gpuctl.facts.boot import IN_WORDS

        self._clear()
        self.print(f"  BACK {box} after {away_s:.0f} s: {IN_WORDS[happened]}")

    def on_started_anew(self, box: str, happened: Happened) -> None:
        from gpuctl.facts.boot import IN_WORDS

        self.print(f"  {box} is not as the campaign left it: {IN_WORDS[happened]}")

    def on_healthy(self, box: str, state: str, took_s: float, spent: Mapping[str, float], looks: int) -> None:
        self._clear()
        words = {"well": "in order", "mended": "mended", "unknown": "not known to be in order"}.get(state, "not mended")
        self.print(f"  {box} is {words} ({seconds(spent, took_s, looks)})")

    def on_cell(self, cell: CellId, record: Record) -> None:
        from gpuctl.reports.terminal import group, line

        self._clear()
        mark = (cell.workload, record.parameters.get("max_tokens") if cell.workload == "decode" else None)
        if mark != self.group:
            self.group = mark
            self.print(group(record))
        against = None
        if self.baseline and self.baseline != cell.server:
            against = self.run.load(cell._replace(server=self.baseline))
        self.print(line(record, against))


def _report(run: Run) -> None:
    """The report files of the run, rewritten after every bench."""
    from gpuctl import report
    from gpuctl.store import write

    with report.undisturbed():
        rendered = report.render(report.load_run(run.folder), "markdown")
    write(run.folder / "report" / "report.md", rendered, make_folder=True)


def _conclude(outcome: Outcome, run: Run) -> None:
    measured, kept, failed = len(outcome.done), len(outcome.kept), len(outcome.failed)
    out()
    out(f"{measured} measured, {kept} kept from before, {failed} failed; all of it lies in {run.folder}/")
    out(f"report: {run.folder / 'report' / 'report.md'}, or: gpuctl report {run.folder}")
    if failed:
        out(f"the failed ones again: {_again('--retry-failed')}")


def _show_check(outcome: Outcome, as_json: bool) -> None:
    if as_json:
        document(
            {
                "schema": "gpuctl.bench-check/1",
                "verdict": "impossible" if outcome.missing else "pending" if outcome.pending else "complete",
                "missing": outcome.missing,
                "pending": [{"cell": str(cell.id), "why": why} for cell, why in outcome.pending],
                "kept": [str(record.cell) for record in outcome.kept],
                "failed": [str(record.cell) for record in outcome.failed],
            }
        )
        return
    for cell, why in outcome.pending:
        out(f"  would measure {cell.id.server}/{cell.id.workload}/{cell.id.point} ({why})")
    for server, why in outcome.missing.items():
        out(f"  {server} cannot be started there: {why}")
    out(f"{len(outcome.pending)} to measure, {len(outcome.kept)} kept, {len(outcome.failed)} failed before")


def _as_json(outcome: Outcome, run: Run) -> dict[str, Any]:
    return {
        "schema": "gpuctl.bench/1",
        "verdict": "failed" if outcome.failed else "ok",
        "run": str(run.folder),
        "measured": [record.as_json() for record in outcome.done],
        "kept": [record.as_json() for record in outcome.kept],
        "failed": [record.as_json() for record in outcome.failed],
    }


def _again(*more: str) -> str:
    """The command as it was given; with more words it is to keep what is measured."""
    import shlex

    given = [word for word in sys.argv[1:] if not (more and word == "--fresh")]
    return shlex.join(["gpuctl", *given, *(word for word in more if word not in given)])
