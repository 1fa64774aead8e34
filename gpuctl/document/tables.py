"""Tables out of records: servers down, points of a workload across. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from gpuctl.document.blocks import Cell, Column, Table
from gpuctl.document.wording import cause, interval, label, mean, plain, times
from gpuctl.records import MEASURED, Estimate, Record, State
from gpuctl.results.intervals import difference, improvement
from gpuctl.results.run import Run, Server, metric, roofline_share

MARKS = {State.CAPACITY_LIMITED: "†", State.UNSTABLE: "‡"}
MARK_NOTES = {
    "†": "the server ran fewer requests at once than were sent: its capacity, not its speed",
    "‡": "unstable: the repetitions differ by more than they should",
}


def identifier(*words: str) -> str:
    """A name for a table or figure that every face can use as an anchor: lower-case letters, digits, dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-") or "x"


def estimate_cell(e: Estimate, *, mark: str = "", strong: bool = False) -> Cell:
    """`140.6 ± 1.0` above its interval."""
    return Cell(mean(e), interval(e), mark, strong)


def missing_cell(record: Record | None) -> Cell:
    """What stands where there is no number: a word, never a zero."""
    if record is None or record.state in MEASURED:  # measured, and this figure is not known
        return Cell("–")
    return Cell("skipped" if record.state is State.SKIPPED else "failed")


def best(candidates: Mapping[str, Estimate], better: int) -> set[str]:
    """Who has the best mean, and whoever cannot be told apart from it (Welch, 95 %)."""
    if not better or len(candidates) < 2:
        return set()
    first = max(candidates, key=lambda name: better * candidates[name].mean)
    lead = candidates[first]
    same = {first}
    for name, e in candidates.items():
        apart = difference(lead, e)
        if apart.known and not apart.excludes(0):
            same.add(name)
    return same


def matrix(
    id: str,
    caption: str,
    servers: Sequence[str],
    points: Sequence[tuple[str, str]],
    record_of: Callable[[str, str], Record | None],
    name: str,
    unit: str,
    *,
    down: str = "Server",
    across: bool = False,
) -> Table:
    """One metric: a row a server, a column a point (`points`: key and title). Every mean with its interval.

    The best of each column is marked, with `across` the best of each row.
    """
    better = metric(name, unit).better
    have: dict[str, dict[str, Estimate]] = {}
    for server in servers:
        for key, _ in points:
            record = record_of(server, key)
            if record is not None and record.state is State.OK and name in record.metrics:
                line, place = (server, key) if across else (key, server)
                have.setdefault(line, {})[place] = record.metrics[name]
    bold = {line: best(found, better) for line, found in have.items()}
    used: dict[str, None] = {}
    single = False
    rows = []
    for server in servers:
        row = [Cell(plain(server))]
        for key, _ in points:
            record = record_of(server, key)
            if record is None or record.state not in MEASURED or name not in record.metrics:
                row.append(missing_cell(record))
                continue
            mark = MARKS.get(record.state, "")
            if mark:
                used[mark] = None
            e = record.metrics[name]
            single = single or e.sd is None
            row.append(
                estimate_cell(
                    e, mark=mark, strong=(key in bold.get(server, ())) if across else (server in bold.get(key, ()))
                )
            )
        rows.append(tuple(row))
    notes = [_reading(unit, ("row" if across else "column") if any(bold.values()) else "", single)]
    notes += [f"{mark} {MARK_NOTES[mark]}" for mark in used]
    columns = (Column(down, text=True, code=True), *(Column(title) for _, title in points))
    return Table(id, caption, columns, tuple(rows), tuple(notes))


def speedups(
    id: str,
    caption: str,
    run: Run,
    phase: str,
    points: Sequence[tuple[str, str]],
    record_of: Callable[[str, str], Record | None],
    name: str,
) -> Table | None:
    """The factor of each server over the phase's baseline; None without a baseline or anything beside it."""
    baseline = run.baseline_of(phase)
    if baseline is None:
        return None
    rows = []
    for server in run.servers[phase]:
        if server.name == baseline:
            continue
        row = [Cell(plain(server.name))]
        for key, _ in points:
            record, base = record_of(server.name, key), record_of(baseline, key)
            factor = None
            if (
                record is not None
                and base is not None
                and record.state in MEASURED
                and base.state in MEASURED
                and name in record.metrics
                and name in base.metrics
            ):
                factor = improvement(record.metrics[name], base.metrics[name], metric(name).better)
            if record is None or factor is None:
                row.append(missing_cell(record))
                continue
            below = f"[{factor.low:.2f}, {factor.high:.2f}]" if factor.known else ""
            row.append(Cell(times(factor.value), below, MARKS.get(record.state, "")))
        if any(cell.text not in ("–", "failed", "skipped") for cell in row[1:]):
            rows.append(tuple(row))
    if not rows:
        return None
    used = dict.fromkeys(cell.mark for row in rows for cell in row if cell.mark)
    notes = [f"Times {plain(baseline)} at the same point, with the 95 % interval of the ratio (Fieller, Welch)."]
    if any(cell.text.endswith("×") and not cell.below for row in rows for cell in row[1:]):
        notes[0] += " Without one: measured once, or against a number that scatters as much as it is large."
    notes += [f"{mark} {MARK_NOTES[mark]}" for mark in used]
    columns = (Column("Server", text=True, code=True), *(Column(title) for _, title in points))
    return Table(id, caption, columns, tuple(rows), tuple(notes))


FAR_BELOW = 0.4  # of the roofline: a configuration error is likelier than a slow kernel


def roofline(
    id: str,
    caption: str,
    servers: Sequence[Server],
    points: Sequence[tuple[str, str]],
    record_of: Callable[[str, str], Record | None],
) -> Table | None:
    """Shares of the bandwidth roofline; None where it is known of no cell."""
    rows = []
    used: dict[str, None] = {}
    for server in servers:
        row = [Cell(plain(server.name))]
        for key, _ in points:
            record = record_of(server.name, key)
            share = roofline_share(record, server) if record is not None else None
            mark = "" if share is None else "▲" if share > 1 else "▼" if share < FAR_BELOW else ""
            if mark:
                used[mark] = None
            row.append(missing_cell(record) if share is None else Cell(f"{share * 100:.0f} %", mark=mark))
        if any("%" in cell.text for cell in row[1:]):
            rows.append(tuple(row))
    if not rows:
        return None
    notes = ["Decode speed by what the memory bandwidth allows, times the acceptance length under speculation."]
    said = {
        "▲": "more than the memory can deliver: suspect the measurement",
        "▼": f"less than {FAR_BELOW * 100:.0f} % of it: suspect the configuration",
    }
    notes += [f"{mark} {said[mark]}" for mark in used]
    columns = (Column("Server", text=True, code=True), *(Column(title) for _, title in points))
    return Table(id, caption, columns, tuple(rows), tuple(notes))


def by_metric(
    id: str,
    caption: str,
    records: Sequence[Record],
    names: Sequence[str],
    first: Sequence[Callable[[Record], str]],
    titles: Sequence[str],
) -> Table:
    """A row a cell, a column a metric; the leading columns say which cell."""
    used: dict[str, None] = {}
    units = {name: e.unit for record in records for name, e in record.metrics.items()}
    rows = []
    for record in records:
        mark = MARKS.get(record.state, "")
        if mark:
            used[mark] = None
        row = [Cell(of(record), mark=mark if i == len(first) - 1 else "") for i, of in enumerate(first)]
        if not names:
            row.append(missing_cell(record))
        for name in names:
            e = record.metrics.get(name) if record.state in MEASURED else None
            row.append(missing_cell(record) if e is None else estimate_cell(e))
        rows.append(tuple(row))
    notes = [*([_reading("", "", False)] if names else []), *(f"{mark} {MARK_NOTES[mark]}" for mark in used)]
    columns = (
        *(Column(title, text=True, code=not i) for i, title in enumerate(titles)),
        *([] if names else [Column("State", text=True)]),
        *(Column(metric(name).title, "" if units.get(name) == "bytes" else units.get(name, "")) for name in names),
    )
    return Table(id, caption, columns, tuple(rows), tuple(notes))


def point_titles(run: Run, phase: str, workload: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    """The points of these records in reading order, each with the title of its column."""
    titles = {record.cell.point: label(record) for record in records}
    return [(point, titles[point]) for point in run.points(phase, workload) if point in titles]


def failures(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Failed records by phase and cause: one entry for a server that died before all its cells."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.state is State.FAILED:
            found.setdefault((record.cell.phase, cause(record)), []).append(record)
    return found


def listed(names: Sequence[str], most: int = 6) -> str:
    """`a, b and 3 more`, each name once."""
    unique = [plain(name) for name in dict.fromkeys(names)]
    text = ", ".join(unique[:most])
    return text if len(unique) <= most else f"{text} and {len(unique) - most} more"


def _reading(unit: str, bold: str, single: bool) -> str:
    text = f"{'In ' + unit + ': mean' if unit and unit != 'bytes' else 'Mean'} ± standard deviation, [95 % interval]."
    if single:
        text += " Without ±: measured once."
    if bold:
        text += f" Bold: the best of a {bold}, and what cannot be told apart from it."
    return text
