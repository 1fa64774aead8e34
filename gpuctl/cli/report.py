"""`gpuctl report`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gpuctl.cli import WELL
from gpuctl.cli._options import options, runs_option


@click.command("report", short_help="results, speed-ups, intervals, failures with causes")
@click.argument("run", required=False)
@options(runs_option)
@click.option("--format", "form", metavar="FORMAT", help="terminal (default), markdown, ...: --format help lists them.")
@click.option("--baseline", metavar="SERVER", help="Speed-ups are against this server.")
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write there, not to stdout.")
def command(run: str | None, runs: Path, form: str | None, baseline: str | None, output: Path | None) -> int:
    """The report of RUN: a run folder, or its name under runs/. Without one, the run that was written to last."""
    from gpuctl import report
    from gpuctl.store import write

    loaded = report.load_run(_folder(run, runs), baseline=baseline)
    rendered = report.render(loaded, form or "terminal")
    if output is not None:
        write(output, rendered)
    else:
        sys.stdout.buffer.write(rendered)
        sys.stdout.buffer.flush()
    return WELL


def _folder(run: str | None, runs: Path) -> Path:
    if run is None:
        from gpuctl.report import NotARun

        found = sorted(runs.glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise NotARun(f"{runs}/: no run there yet; `gpuctl bench PHASE` makes one")
        return found[-1].parent
    return Path(run) if Path(run).is_dir() else runs / run
