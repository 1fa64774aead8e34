"""The report as tidy CSV: a row a cell and metric, a row for a cell that has no number. UTF-8, docs/report.md.

A text that a spreadsheet would take for a formula gets an apostrophe before it. Numbers are numbers.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from functools import lru_cache

from gpuctl.document.outline import Report
from gpuctl.document.wording import plain
from gpuctl.records import MEASURED, Record
from gpuctl.results.intervals import improvement
from gpuctl.results.run import Run, Server, metric, ordered

SUFFIX = "csv"

COLUMNS = (
    "run", "phase", "server", "method", "tp", "engine", "model", "workload", "point", "parameters", "state",
    "metric", "unit", "mean", "sd", "ci95_low", "ci95_high", "n",
    "baseline", "speedup", "speedup_low", "speedup_high",
    "failure_kind", "failure", "notes", "started", "ended", "fingerprint_id", "foreign",
)  # fmt: skip

# What spreadsheets take for the start of a formula, full-width forms included, also after an opening quote or space.
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


@lru_cache(1 << 12)  # the same few names in every row
def safe(text: str) -> str:
    """The text on one line, and no formula."""
    text = plain(text)
    return f"'{text}" if text.lstrip(" '\"").startswith(_FORMULA) else text


def render(report: Report) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_rows(report.run))
    return out.getvalue().encode()


def _rows(run: Run) -> Iterator[list[str | float | int]]:
    servers = {(server.phase, server.name): server for phase in run.phases for server in run.servers[phase]}
    for record in run.records:
        cell = record.cell
        server = servers[cell.phase, cell.server]
        head = _head(run, record, server)
        tail: list[str | float | int] = [
            safe("; ".join(record.notes)),
            safe(record.started),
            safe(record.ended),
            safe(record.fingerprint_id),
            "yes" if cell.phase in run.foreign else "no",
        ]
        if record.state not in MEASURED:
            failure = record.failure
            why = [safe(failure.kind), safe(failure.summary)] if failure is not None else ["", ""]
            yield [*head, *[""] * 11, *why, *tail]
            continue
        base = run.baseline_cell(cell)
        for name in ordered(record.metrics):
            yield [*head, *_figures(record, name, base), "", "", *tail]


def _head(run: Run, record: Record, server: Server) -> list[str | float | int]:
    cell = record.cell
    return [
        safe(run.name),
        safe(cell.phase),
        safe(cell.server),
        safe(server.method),
        "" if server.tp is None else server.tp,
        safe(server.engine),
        safe(server.model),
        safe(cell.workload),
        safe(cell.point),
        safe(json.dumps(record.parameters, sort_keys=True, default=str)),
        record.state.value,
    ]


def _figures(record: Record, name: str, base: Record | None) -> list[str | float | int]:
    e = record.metrics[name]
    row: list[str | float | int] = [safe(name), safe(e.unit), e.mean, "" if e.sd is None else e.sd]
    row += ["", ""] if e.ci95 is None else [e.mean - e.ci95, e.mean + e.ci95]
    row.append(e.n)
    better = metric(name, e.unit).better
    factor = (
        improvement(e, base.metrics[name], better) if base is not None and better and name in base.metrics else None
    )
    if base is None or factor is None:
        return [*row, "", "", "", ""]
    row += [safe(base.cell.server), factor.value]
    row += ["", ""] if factor.low is None or factor.high is None else [factor.low, factor.high]
    return row
