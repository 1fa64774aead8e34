"""`gpuctl report`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuctl.cli import FINDINGS, UNKNOWN, WELL
from gpuctl.cli._console import say
from gpuctl.cli._options import Finite, options, runs_option

if TYPE_CHECKING:
    from gpuctl.results.comparison import Comparison
    from gpuctl.results.run import Run


@click.command("report", short_help="results, speed-ups, intervals, failures with causes")
@click.argument("run", required=False)
@options(runs_option)
@click.option("--format", "form", metavar="FORMAT", help="terminal (default), markdown, html, csv, json, latex, pdf.")
@click.option("--baseline", metavar="SERVER", help="Speed-ups are against this server.")
@click.option("--compare", "others", metavar="OTHER", multiple=True, help="Differences to another run, phase, server.")
@click.option("--noise", metavar="PERCENT", type=Finite(min=0), help="Smaller changes are noise (2).")
@click.option(
    "--fail-on", metavar="PERCENT", type=Finite(min=0), help="Exit code 1 when worse by more: docs/report.md."
)
@click.option("--import", "imports", metavar="FILE", multiple=True, help="Results of another load generator, too.")
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write there, not to stdout.")
def command(
    run: str | None,
    runs: Path,
    form: str | None,
    baseline: str | None,
    others: tuple[str, ...],
    noise: float | None,
    fail_on: float | None,
    imports: tuple[str, ...],
    output: Path | None,
) -> int:
    """The report of RUN: a run folder, or its name under runs/. Without one, the run that was written to last.

    OTHER is a run (a folder, or a name under runs/), another phase of RUN, or one of its servers. FILE is what
    sglang.bench_serving, vllm bench serve, guidellm or aiperf wrote; with --import alone no RUN is needed.
    """
    from gpuctl import report
    from gpuctl.results.comparison import NOISE_PERCENT

    if fail_on is not None and not others:
        raise click.UsageError("--fail-on needs --compare OTHER: worse than what?")
    alone = bool(imports) and run is None
    band = NOISE_PERCENT if noise is None else noise
    with report.undisturbed():
        loaded = None if alone else report.load_run(_folder(run, runs), baseline=baseline)
        if imports or loaded is None:
            loaded = report.with_imported(loaded, imports)
        _check_baseline(loaded, baseline)
        comparisons = [c for other in others for c in report.compare_with(loaded, other, runs=runs, noise_percent=band)]
        _write(loaded, form, output, comparisons)
    return WELL if fail_on is None else _gate(comparisons, fail_on)


def _check_baseline(run: Run, baseline: str | None) -> None:
    """A server that no phase of the run has is a mistake, and no reason to compare with another one."""
    if baseline is None or any(run.baseline_of(phase) in (baseline, f"{phase}-{baseline}") for phase in run.phases):
        return
    from gpuctl.spelling import hint

    names = sorted({server.name for servers in run.servers.values() for server in servers})
    raise click.UsageError(f"--baseline: no server {baseline!r} in {run.name}; {hint(baseline, names)}")


def _write(run: Run, form: str | None, output: Path | None, comparisons: list[Comparison]) -> None:
    from gpuctl import report
    from gpuctl.store import write

    if output is None:
        if form == "pdf" and sys.stdout.isatty():
            raise click.UsageError("a PDF is not for a terminal: -o FILE")
        _announce(form)
        sys.stdout.buffer.write(report.render(run, form or "terminal", comparisons))
        sys.stdout.buffer.flush()
        return
    form = form or report.format_of(output.name) or "terminal"
    _announce(form)
    files = report.files(run, form, output.name, comparisons)
    for name in sorted(files, key=lambda name: name != output.name):  # the report, then its figures' folder
        write(output.parent / name, files[name], instead="-o names another file", make_folder=name != output.name)


def _announce(form: str | None) -> None:
    """Says that it takes a while, where it does."""
    if form == "pdf":
        from gpuctl.reports import pdf

        pdf.check()
        say("LaTeX is at work: some ten seconds for twenty pages")


def _gate(comparisons: list[Comparison], limit: float) -> int:
    """0 when nothing is worse by more than the limit, 1 when something is, 3 when it cannot be told."""
    from gpuctl.results.comparison import Outcome, gate

    gates = [gate(comparison, limit) for comparison in comparisons]
    for outcome, status in ((Outcome.REGRESSED, FINDINGS), (Outcome.UNDECIDED, UNKNOWN)):
        reasons = [reason for found in gates if found.outcome is outcome for reason in found.reasons]
        if reasons:
            word = (
                "worse by more than"
                if status == FINDINGS
                else "it cannot be told whether anything is worse by more than"
            )
            say(f"gpuctl: {word} {limit:g} %:")
            for reason in reasons:
                say(f"  {reason}")
            return status
    return WELL


def _folder(run: str | None, runs: Path) -> Path:
    if run is None:
        from gpuctl.report import NotARun

        found = sorted(runs.glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise NotARun(f"{runs}/: no run there yet; `gpuctl bench PHASE` makes one")
        return found[-1].parent
    given = Path(run)
    if given.is_file():
        raise click.UsageError(f"{run} is a file; a run is a folder, as {runs}/NAME")
    return given if given.is_dir() or os.sep in run else runs / run
