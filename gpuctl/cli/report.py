"""`gpuctl report`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuctl.cli import FINDINGS, UNKNOWN, WELL
from gpuctl.cli._console import say
from gpuctl.cli._options import options, runs_option

if TYPE_CHECKING:
    from gpuctl.results.comparison import Comparison


@click.command("report", short_help="results, speed-ups, intervals, failures with causes")
@click.argument("run", required=False)
@options(runs_option)
@click.option("--format", "form", metavar="FORMAT", default="terminal", show_default=True,
              help="csv, html, json, latex, markdown, pdf, terminal.")  # fmt: skip
@click.option("--baseline", metavar="SERVER", help="Speed-ups are against this server.")
@click.option("--compare", "others", metavar="OTHER", multiple=True, help="Another run folder, a phase, or a server.")
@click.option("--fail-on", metavar="PERCENT", type=click.FloatRange(min=0), help="Exit 1 when it got worse by more.")
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write there, not to stdout.")
def command(
    run: str | None,
    runs: Path,
    form: str,
    baseline: str | None,
    others: tuple[str, ...],
    fail_on: float | None,
    output: Path | None,
) -> int:
    """The report of RUN: a run folder, or its name under runs/. Without one, the run that was written to last."""
    from gpuctl import report
    from gpuctl.store import write

    if fail_on is not None and not others:
        raise click.UsageError("--fail-on needs --compare OTHER: worse than what?")
    loaded = report.load_run(_folder(run, runs), baseline=baseline)
    compared = [comparison for other in others for comparison in report.compare_with(loaded, other)]
    rendered = report.render(loaded, form, compared)
    if output is not None:
        write(output, rendered)
    elif form == "pdf" and sys.stdout.isatty():
        raise click.UsageError("a PDF is not for a terminal: -o FILE")
    else:
        sys.stdout.buffer.write(rendered)
        sys.stdout.buffer.flush()
    return WELL if fail_on is None else _gate(compared, fail_on)


def _gate(compared: Sequence[Comparison], limit: float) -> int:
    """Exit code of --fail-on, and why, on stderr."""
    from gpuctl.results.comparison import Outcome, gate

    codes = {Outcome.PASSED: WELL, Outcome.REGRESSED: FINDINGS}
    code = WELL
    for comparison in compared:
        judged = gate(comparison, limit)
        for line in judged.reasons:
            say(line)
        code = max(code, codes.get(judged.outcome, UNKNOWN))
    return code


def _folder(run: str | None, runs: Path) -> Path:
    if run is None:
        from gpuctl.report import NotARun

        found = sorted(runs.glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise NotARun(f"{runs}/: no run there yet; `gpuctl bench PHASE` makes one")
        return found[-1].parent
    return Path(run) if Path(run).is_dir() else runs / run
