"""Figures out of records. Each belongs to a table that holds its numbers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuctl.document.blocks import Axis, Figure, Point, Series
from gpuctl.document.tables import identifier
from gpuctl.document.wording import label, plain
from gpuctl.records import MEASURED, Record, State
from gpuctl.results.run import Run, metric

MOST_SERIES = 7  # as many as can be told apart in grey, by marker, dash and hatch


def point(x: float | str, record: Record, name: str, label: str = "") -> Point:
    """A metric of a record as a point, with its 95 % interval."""
    e = record.metrics[name]
    low, high = (None, None) if e.ci95 is None else (e.mean - e.ci95, e.mean + e.ci95)
    return Point(x, e.mean, low, high, label, record.state is not State.OK)


def bars(
    id: str, caption: str, table: str, run: Run, phase: str, records: Sequence[Record], name: str
) -> Figure | None:
    """A bar a server, in groups by point."""
    order = _order(run, phase)
    by_server = _by_server(records, name)
    series = [
        Series(plain(server), tuple(point(label(r), r, name) for r in by_server[server]))
        for server in sorted(by_server, key=lambda s: order[s])
    ]
    return _figure(id, caption, "bars", Axis(""), name, series, table, run, phase, by_server)


def curves(
    id: str,
    caption: str,
    table: str,
    run: Run,
    phase: str,
    records: Sequence[Record],
    name: str,
    size: str,
    axis: Axis,
) -> Figure | None:
    """A line a server over a size that was swept (`size`: the parameter). None with fewer than two sizes."""
    order = _order(run, phase)
    by_server = _by_server([r for r in records if _size(r, size) is not None], name)
    series = []
    for server in sorted(by_server, key=lambda s: order[s]):
        points = sorted((point(_size(r, size) or 0.0, r, name) for r in by_server[server]), key=_x)
        series.append(Series(plain(server), tuple(points)))
    if len({p.x for s in series for p in s.points}) < 2:
        return None
    return _figure(id, caption, "lines", axis, name, series, table, run, phase, by_server)


def trade(id: str, caption: str, table: str, run: Run, phase: str, records: Sequence[Record]) -> Figure | None:
    """Throughput of all requests against the latency that each sees: a point a concurrency, joined in order."""
    # Between tokens, as the clock has it, or as other tools work it out: TTFT leaps where a server is full.
    x_name = next((n for n in ("time_per_token_ms", "tpot_ms") if any(n in r.metrics for r in records)), "")
    y_name = "output_tok_s"
    order = _order(run, phase)
    by_server = _by_server([r for r in records if x_name in r.metrics], y_name)
    series = []
    for server in sorted(by_server, key=lambda s: order[s]):
        members = sorted(by_server[server], key=lambda r: _size(r, "concurrency") or 0.0)
        points = [point(r.metrics[x_name].mean, r, y_name, f"{_size(r, 'concurrency') or 0:g}") for r in members]
        series.append(Series(plain(server), tuple(points)))
    if not any(len(s.points) > 1 for s in series):
        return None
    axis = Axis(metric(x_name).title, "ms")
    return _figure(id, caption, "path", axis, y_name, series, table, run, phase, by_server)


def grouped(id: str, caption: str, kind: str, x: Axis, y: Axis, series: Sequence[Series], table: str) -> Figure | None:
    """A figure of series that were put together elsewhere; None when there is nothing to compare."""
    shown = [s for s in series if s.points][:MOST_SERIES]
    if not shown or sum(len(s.points) for s in shown) < 2:
        return None
    return Figure(id, caption, kind, x, y, tuple(shown), table)


def _figure(
    id: str,
    caption: str,
    kind: str,
    x: Axis,
    name: str,
    series: Sequence[Series],
    table: str,
    run: Run,
    phase: str,
    by_server: dict[str, list[Record]],
) -> Figure | None:
    series = [s for s in series if s.points]
    if not series:
        return None
    unit = next(iter(by_server.values()))[0].metrics[name].unit
    baseline = run.baseline_of(phase)
    shown = _chosen(series, baseline, metric(name, unit).better)
    if len(shown) < len(series):
        there = baseline is not None and plain(baseline) in {s.name for s in shown}
        caption += f": {'the baseline and ' if there else ''}the best of {len(series)} servers"
    return Figure(identifier(id), caption, kind, x, Axis(metric(name).title, unit), tuple(shown), table)


def _chosen(series: Sequence[Series], baseline: str | None, better: int) -> list[Series]:
    """No more series than can be told apart: the baseline and those with the best mean over their points."""
    if len(series) <= MOST_SERIES:
        return list(series)
    score: Callable[[Series], float] = lambda s: (better or 1) * sum(p.y for p in s.points) / len(s.points)  # noqa: E731
    keep = {s.name for s in series if baseline is not None and s.name == plain(baseline)}
    for s in sorted(series, key=score, reverse=True):
        if len(keep) < MOST_SERIES:
            keep.add(s.name)
    return [s for s in series if s.name in keep][:MOST_SERIES]


def _by_server(records: Sequence[Record], name: str) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.state in MEASURED and name in record.metrics:
            found.setdefault(record.cell.server, []).append(record)
    return found


def _order(run: Run, phase: str) -> dict[str, int]:
    return {server.name: i for i, server in enumerate(run.servers[phase])}


def _size(record: Record, name: str) -> float | None:
    value = record.parameters.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _x(point: Point) -> float:
    return point.x if isinstance(point.x, float) else 0.0
