"""The report as plain text for a terminal: fixed columns, no colour, nothing that a pipe would spoil.

`banner`, `heading`, `skip`, `group` and `line` are also what `gpuctl bench` prints while it measures.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpuctl.document.differences import changes, summary
from gpuctl.document.tables import failures, listed
from gpuctl.document.wording import (
    cause,
    clock,
    counted,
    label,
    number,
    plain,
    remedy,
    server_line,
    span,
    spread,
    state_word,
    times,
)
from gpuctl.records import MEASURED, Estimate, Record, State
from gpuctl.results.comparison import Comparison
from gpuctl.results.intervals import improvement
from gpuctl.results.run import Run, Server, headlines, metric

if TYPE_CHECKING:
    from gpuctl.document.outline import Report

SUFFIX = "txt"
_WIDE = 64
_MOST_CHANGES = 20  # of a comparison: the worst come first
_SHORT = {
    "ttft_ms": "TTFT",
    "prefill_tok_s": "prefill",
    "decode_tok_s": "each",
    "time_per_token_ms": "per token",
    "e2e_ms": "end to end",
}


def banner(phase: str, title: str = "") -> str:
    """The three lines that open a phase."""
    words = phase.upper() if not title or title.lower().startswith(phase.lower()) else f"{phase.upper()} — {title}"
    words = title if title.lower().startswith(phase.lower()) and title else words
    return f"{'#' * _WIDE}\n#  PHASE: {plain(words)}\n{'#' * _WIDE}"


def heading(server: Server) -> str:
    """The three lines that open a server."""
    return f"{'=' * _WIDE}\n  {server_line(server)}\n{'=' * _WIDE}"


def skip(name: str, why: str) -> str:
    return f"  SKIP {plain(name)} ({plain(why)})"


def group(record: Record) -> str:
    """`  [decode max_tokens=256]`"""
    max_tokens = record.parameters.get("max_tokens")
    words = plain(record.cell.workload)
    if record.cell.workload == "decode" and isinstance(max_tokens, int):
        words += f" max_tokens={max_tokens}"
    return f"  [{words}]"


def line(record: Record, baseline: Record | None = None) -> str:
    """One cell: `       fib:   140.6 +/-   1.0 tok/s    5.31x`, or why there is no number."""
    start = f"{_right(label(record), 10)}: "
    if record.state not in MEASURED:
        word = "SKIPPED" if record.state is State.SKIPPED else "FAILED"
        return f"{start} {word} {cause(record)}"
    parts: list[str] = []
    for name in headlines(record.cell.workload, record.metrics):
        text = _figure(record.metrics[name])
        if parts or name not in ("output_tok_s", "decode_tok_s"):
            text = f"{_SHORT.get(name) or metric(name).title.lower()} {text}"
        if not parts and baseline is not None and name in baseline.metrics:
            better = metric(name, record.metrics[name].unit).better
            faster = improvement(record.metrics[name], baseline.metrics[name], better)
            text += "" if faster is None else f"  {_right(times(faster.value).replace('×', 'x'), 6)}"
        parts.append(text)
    marks = "" if record.state is State.OK else f"   ({state_word(record.state)}{_why(record)})"
    return f"{start}{'   '.join(parts)}{marks}"


def render(report: Report) -> bytes:
    return ("\n".join(_lines(report)) + "\n").encode()


def _figure(e: Estimate) -> str:
    unit = "" if e.unit == "bytes" else f" {e.unit}"
    if e.sd is None:
        return f"{_right(number(e.mean, e.unit), 7)}{unit}"
    return f"{_right(number(e.mean, e.unit), 7)} +/- {_right(spread(e), 5)}{unit}"


def _why(record: Record) -> str:
    return f": {plain(record.notes[0])}" if record.notes else ""


def _right(text: str, columns: int) -> str:
    """Pads on the left to a number of terminal columns; wide characters take two."""
    if text.isascii():  # as nearly all of it
        return text.rjust(columns)
    taken = sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in text)
    return " " * max(0, columns - taken) + text


def _lines(report: Report) -> Iterator[str]:
    run = report.run
    for phase in run.phases:
        yield from _phase(run, phase)
    yield from _failures(run)
    yield from _interruptions(report)
    yield from _comparisons(report.comparisons)
    yield ""
    yield _count(run)
    if run.unfinished is not None:
        yield f"Not finished: the run was last seen at {clock(run.unfinished)}. The same command continues it."
    for left in run.left_out:
        yield f"Left out: {plain(left.path)}: {plain(left.why)}"


def _phase(run: Run, phase: str) -> Iterator[str]:
    yield banner(phase, f"{phase}, measured by that tool" if phase in run.foreign else run.title(phase))
    for server in run.servers[phase]:
        cells = [
            (workload, record)
            for workload in run.workloads
            for point in run.points(phase, workload)
            for record in [run.by_cell.get((phase, server.name, workload, point))]  # type: ignore[call-overload]
            if record is not None
        ]
        if not cells:
            yield skip(server.name, "nothing measured yet")
            continue
        yield heading(server)
        if all(record.state is State.SKIPPED for _, record in cells):
            yield skip(server.name, cause(cells[0][1]))
            continue
        before = ""
        for _, record in cells:
            if (title := group(record)) != before:
                yield title
                before = title
            yield line(record, run.baseline_cell(record.cell))
    baseline = run.baseline_of(phase)
    if baseline is not None and len(run.servers[phase]) > 1:
        yield f"  (x: times better than {plain(baseline)} at the same point)"


def _failures(run: Run) -> Iterator[str]:
    found = failures(run.records)
    if not found:
        return
    yield ""
    yield f"{run.count(State.FAILED)} FAILED"
    for (phase, why), records in found.items():
        servers = listed([record.cell.server for record in records])
        yield f"  {plain(phase)}: {servers}: {listed([f'{r.cell.workload}/{r.cell.point}' for r in records])}"
        yield f"      {why}"
        for advice in remedy(records[0].failure).splitlines():
            yield f"      -> {plain(advice)}"


def _interruptions(report: Report) -> Iterator[str]:
    if report.interruptions:
        yield ""
        yield "INTERRUPTIONS"
        for stop in report.interruptions:
            lasted = span(stop.start, stop.end) if stop.end else ""
            how = f"went on after {lasted}" if lasted else "went on" if stop.end else "not over"
            yield f"  {clock(stop.start)}  {plain(stop.what)}; {how}"


def _comparisons(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for comparison in comparisons:
        yield ""
        yield f"COMPARED: {summary(comparison)}"
        for condition in comparison.conditions:
            where = f"{counted(condition.cells, 'cell')}, {plain(condition.where)}"
            yield f"  differs ({where}): {plain('; '.join(condition.words))}"
        changed = changes(comparison)
        for d in changed[:_MOST_CHANGES]:
            known = f" [{d.change.low:+.1f}, {d.change.high:+.1f}]" if d.change.known else ""
            yield f"  {d.verdict.value.upper():>8} {d.change.value:+7.1f} %{known}  {plain(d.new.cell)} {d.metric}"
        if len(changed) > _MOST_CHANGES:
            yield f"  and {len(changed) - _MOST_CHANGES} more, which the other formats list"
        for new, _ in comparison.broken:
            yield f"  NO LONGER MEASURED  {plain(new.cell)}: {cause(new)}"


def _count(run: Run) -> str:
    counts = [(run.count(state), state_word(state)) for state in State]
    words = ", ".join(f"{count} {word}" for count, word in counts if count)
    return f"{plain(run.name)}: {words or 'no cells yet'}"
