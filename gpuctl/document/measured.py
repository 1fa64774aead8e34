"""The sections of a report that hold what was measured: phase by phase, and across them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from gpuctl.document import figures
from gpuctl.document.blocks import Axis, Block, Cell, Column, Fold, Section, Series, Table
from gpuctl.document.tables import by_metric, estimate_cell, identifier, matrix, point_titles, roofline, speedups
from gpuctl.document.wording import group, label, plain
from gpuctl.records import CellId, Estimate, Record, State
from gpuctl.results.run import Run, headlines, metric


def of_phase(run: Run, phase: str) -> Iterator[Block]:
    """What was measured in one phase, a section a workload."""
    for workload in run.workloads:
        records = run.cells(phase, workload)
        if not records:
            continue
        if workload == "decode":
            blocks = _decode(run, phase, records)
        elif workload in _SWEEPS:
            blocks = _sweep(run, phase, records, workload)
        else:
            blocks = _other(run, phase, workload, records)
        yield Section(identifier(phase, workload, "results"), plain(workload).capitalize(), tuple(blocks))
    yield from _gpus(run, phase)


def _record_of(run: Run, phase: str, workload: str) -> Callable[[str, str], Record | None]:
    return lambda server, point: run.by_cell.get(CellId(phase, server, workload, point))


def _decode(run: Run, phase: str, records: Sequence[Record]) -> Iterator[Block]:
    """A length of answer after the other: servers down, prompts across; then what was accepted, and what it cost.

    The shortest answers are drawn and told in full; of the longer ones the details are folded away.
    """
    groups: dict[str, list[Record]] = {}
    order = {point: i for i, point in enumerate(run.points(phase, "decode"))}
    for record in sorted(records, key=lambda r: order[r.cell.point]):
        groups.setdefault(group(record), []).append(record)
    for place, (title, members) in enumerate(groups.items()):
        # Of this length only: the same point may have been measured with another one on another server.
        of = _lookup({(record.cell.server, record.cell.point): record for record in members})
        points = point_titles(run, phase, "decode", members)
        units = {name: e.unit for record in members for name, e in record.metrics.items()}
        name = next(iter(headlines("decode", units)), "decode_tok_s")
        length = title.removeprefix("decode")
        names = [s.name for s in run.servers[phase] if any(of(s.name, key) is not None for key, _ in points)]
        id = identifier(phase, title)
        caption = f"{metric(name).title}{length}"
        yield matrix(id, caption, names, points, of, name, units.get(name, "tok/s"))
        figure = figures.bars(f"fig-{id}", caption, id, run, phase, members, name) if place == 0 else None
        if figure is not None:
            yield figure
        faster = speedups(f"{id}-speedup", f"Speed-up of decoding{length}", run, phase, points, of, name)
        if faster is not None:
            yield faster
        details = tuple(_details(run, phase, id, length, names, points, of, units))
        if place == 0:
            yield from details
        elif details:
            yield Fold(f"More about decoding{length}", details)


def _details(
    run: Run,
    phase: str,
    id: str,
    length: str,
    names: Sequence[str],
    points: Sequence[tuple[str, str]],
    of: Callable[[str, str], Record | None],
    units: Mapping[str, str],
) -> Iterator[Block]:
    """Acceptance lengths, energy and the share of the roofline, where they are known."""
    for extra in ("acceptance_length", "energy_per_token_j"):
        have = [n for n in names if any((r := of(n, key)) and extra in r.metrics for key, _ in points)]
        if have:
            yield matrix(
                f"{id}-{identifier(extra)}", f"{metric(extra).title}{length}", have, points, of, extra, units[extra]
            )
    servers = [s for s in run.servers[phase] if s.name in names]
    share = roofline(f"{id}-roofline", f"Share of the bandwidth roofline{length}", servers, points, of)
    if share is not None:
        yield share


_SWEEPS = {
    "concurrency": (Axis("Concurrent requests", doubling=True), ("output_tok_s", "decode_tok_s", "ttft_ms")),
    "context": (Axis("Prompt length", "tokens"), ("ttft_ms", "prefill_tok_s", "decode_tok_s")),
}
_MORE = ("ttft_p99_ms", "time_per_token_ms", "tpot_ms", "itl_ms", "acceptance_length")
_DRAWN = {"concurrency": ("output_tok_s", "decode_tok_s"), "context": ("ttft_ms", "decode_tok_s")}


def _sweep(run: Run, phase: str, records: Sequence[Record], workload: str) -> Iterator[Block]:
    axis, names = _SWEEPS[workload]
    points = point_titles(run, phase, workload, records)
    of = _record_of(run, phase, workload)
    servers = [s.name for s in run.servers[phase] if any(of(s.name, point) is not None for point, _ in points)]
    units = {name: e.unit for record in records for name, e in record.metrics.items()}
    over = f"over {str(axis).lower()}"
    for name in [n for n in (*names, "energy_per_token_j") if n in units] or ["output_tok_s"]:
        id = identifier(phase, workload, name)
        caption = f"{metric(name).title} {over}"
        yield matrix(id, caption, servers, points, of, name, units.get(name, "tok/s"))
        if name in _DRAWN[workload]:
            figure = figures.curves(f"fig-{id}", caption, id, run, phase, records, name, workload, axis)
            if figure is not None:
                yield figure
        if name == "output_tok_s":
            faster = speedups(f"{id}-speedup", f"Speed-up of {caption.lower()}", run, phase, points, of, name)
            if faster is not None:
                yield faster
    more = [name for name in _MORE if name in units and workload == "concurrency"]
    if more:
        tables = tuple(
            matrix(
                identifier(phase, workload, name),
                f"{metric(name).title} {over}",
                servers,
                points,
                of,
                name,
                units[name],
            )
            for name in more
        )
        yield Fold("More about concurrency", tables)
    if workload == "concurrency":
        id = identifier(phase, "trade")
        table = identifier(phase, workload, "output_tok_s")
        figure = figures.trade(f"fig-{id}", "Throughput against latency", table, run, phase, records)
        if figure is not None:
            yield figure


def _gpus(run: Run, phase: str) -> Iterator[Block]:
    """The most GPU memory that any cell of a server was seen to take, and the most power."""
    names = [name for name in ("gpu_memory_bytes", "gpu_power_w") if any(name in r.metrics for r in run.records)]
    most: dict[tuple[str, str], Estimate] = {}
    for record in run.records if names else ():
        if record.cell.phase != phase:
            continue
        for name in names:
            e = record.metrics.get(name)
            key = (record.cell.server, name)
            if e is not None and (key not in most or e.mean > most[key].mean):
                most[key] = e
    rows = tuple(
        (Cell(plain(s.name)), *(estimate_cell(most[s.name, n]) if (s.name, n) in most else Cell("–") for n in names))
        for s in run.servers[phase]
        if any((s.name, name) in most for name in names)
    )
    if rows:
        units = {name: next(e.unit for (_, n), e in most.items() if n == name) for _, name in most}
        columns = (
            Column("Server", text=True, code=True),
            *(Column(metric(n).title, "" if units.get(n) == "bytes" else units.get(n, "")) for n in names),
        )
        note = "All its GPUs together: the most memory and the highest mean power of any cell."
        yield Table(identifier(phase, "gpus"), "GPU memory and power", columns, rows, (note,))


def _other(run: Run, phase: str, workload: str, records: Sequence[Record]) -> Iterator[Block]:
    """A workload that nobody drew a table for: all its headline figures, a row a cell."""
    order = {point: i for i, point in enumerate(run.points(phase, workload))}
    place = {server.name: i for i, server in enumerate(run.servers[phase])}
    rows = sorted(records, key=lambda r: (place[r.cell.server], order[r.cell.point]))
    names = headlines(workload, {name for record in records for name in record.metrics})
    yield by_metric(
        identifier(phase, workload),
        f"{plain(workload).capitalize()}, all points",
        rows,
        names,
        (lambda r: plain(r.cell.server), label),
        ("Server", "Point"),
    )


# --- across phases -------------------------------------------------------------------------------


def across_phases(run: Run) -> Iterator[Block]:
    """The same method in several phases, and decode speed over the budget of tree verification."""
    yield from _beside_others(run)
    yield from _tensor_parallel(run)
    for phase in run.phases:
        yield from _budgets(run, phase)


def _beside_others(run: Run) -> Iterator[Block]:
    """What other tools measured, in one table with ours; what they call the same is close, not equal."""
    if not run.foreign or run.foreign.issuperset(run.phases):
        return
    found: dict[tuple[str, str], Record] = {}
    rows: dict[str, None] = {}
    loads: dict[str, float] = {}
    for phase in run.phases:
        for record in run.cells(phase, "concurrency"):
            row, load = f"{phase}: {record.cell.server}", label(record)
            rows[row] = None
            found[row, load] = record
            size = record.parameters.get("concurrency")
            loads[load] = float(size) if isinstance(size, int | float) else float("inf")
    points = [(load, load) for load in sorted(loads, key=lambda load: loads[load])]
    for name in ("output_tok_s", "ttft_ms", "tpot_ms"):
        have = [row for row in rows if any(name in found[key].metrics for key in found if key[0] == row)]
        if len(have) > 1:
            unit = next(r.metrics[name].unit for r in found.values() if name in r.metrics)
            caption = f"{metric(name).title} over concurrent requests, ours and other tools'"
            table = matrix(identifier("others", name), caption, have, points, _lookup(found), name, unit)
            # Nothing is the best of numbers that were not measured alike.
            plain_rows = tuple(tuple(replace(cell, strong=False) for cell in row) for row in table.rows)
            notes = ("In " + unit + ". Each tool as it counts; without a fingerprint, not compared.",)
            yield replace(table, rows=plain_rows, notes=notes)


def _tensor_parallel(run: Run) -> Iterator[Block]:
    """The same method in several phases: what more GPUs bring. One point of each kind is enough to see it."""
    phases = [phase for phase in run.phases if phase not in run.foreign]
    server = {(phase, s.kin): s for phase in phases for s in run.servers[phase]}
    methods = list(dict.fromkeys(method for _, method in server))
    methods = [m for m in methods if sum((phase, m) in server for phase in phases) > 1]
    if len(phases) < 2 or not methods:
        return
    for workload, name in (("decode", "decode_tok_s"), ("concurrency", "output_tok_s")):
        point = _common_point(run, phases, workload)
        if point is None:
            continue
        found = {
            (method, phase): record
            for (phase, method), s in server.items()
            if (record := run.by_cell.get(CellId(phase, s.name, workload, point))) is not None
        }
        sample = next(iter(found.values()))
        unit = next((r.metrics[name].unit for r in found.values() if name in r.metrics), "tok/s")
        id = identifier("across", workload)
        caption = f"{metric(name).title} by phase: {group(sample)}, {label(sample)}"
        columns = [(phase, plain(phase)) for phase in phases]
        yield matrix(id, caption, methods, columns, _lookup(found), name, unit, across=True, down="Method")
        series = [
            Series(
                plain(phase),
                tuple(
                    figures.point(plain(m), found[m, phase], name)
                    for m in methods
                    if (m, phase) in found and name in found[m, phase].metrics
                ),
            )
            for phase in phases
        ]
        axis = Axis(metric(name).title, unit)
        figure = figures.grouped(f"fig-{id}", caption, "bars", Axis("Method"), axis, series, id)
        if figure is not None:
            yield figure


def _lookup(found: Mapping[tuple[str, str], Record]) -> Callable[[str, str], Record | None]:
    return lambda down, right: found.get((down, right))


def _common_point(run: Run, phases: Sequence[str], workload: str) -> str | None:
    """The point that most phases have: of decode the first, of a sweep the largest that was not limited."""
    counts: dict[str, int] = {}
    for phase in phases:
        for point in run.points(phase, workload):
            if any(r.state is State.OK and r.cell.point == point for r in run.cells(phase, workload)):
                counts[point] = counts.get(point, 0) + 1
    most = [point for point, count in counts.items() if count > 1 and count == max(counts.values())]
    return (most[0] if workload == "decode" else most[-1]) if most else None


def _budgets(run: Run, phase: str) -> Iterator[Block]:
    """Decode speed over the budget of tree verification, a line a prompt; each kind of server that has budgets."""
    kinds: dict[str, dict[int, str]] = {}
    for server in run.servers[phase]:
        if server.budget is not None:
            kinds.setdefault(server.kin.removesuffix(f"-b{server.budget}"), {})[server.budget] = server.name
    order = {point: i for i, point in enumerate(run.points(phase, "decode"))}
    for kind, server_of in kinds.items():
        records = [r for r in run.cells(phase, "decode") if r.cell.server in server_of.values()]
        if len(server_of) > 1 and records:
            shortest = group(min(records, key=lambda r: order[r.cell.point]))
            members = [r for r in records if group(r) == shortest]
            yield from _budget(run, phase, kind, dict(sorted(server_of.items())), members)


def _budget(
    run: Run, phase: str, kind: str, server_of: Mapping[int, str], records: Sequence[Record]
) -> Iterator[Block]:
    name = "decode_tok_s"
    unit = next((r.metrics[name].unit for r in records if name in r.metrics), "tok/s")
    budget_of = {server: budget for budget, server in server_of.items()}
    found = {(str(budget_of[r.cell.server]), r.cell.point): r for r in records}
    points = point_titles(run, phase, "decode", records)
    id = identifier(phase, kind, "budget")
    length = group(records[0]).removeprefix("decode")
    caption = f"{plain(phase)}, {plain(kind)}: {metric(name).title.lower()} over the verification budget{length}"
    yield matrix(id, caption, [str(b) for b in server_of], points, _lookup(found), name, unit, down="Budget")
    series = [
        Series(
            title,
            tuple(
                figures.point(float(budget), record, name)
                for budget in server_of
                if (record := found.get((str(budget), key))) is not None and name in record.metrics
            ),
        )
        for key, title in points
    ]
    axis = Axis(metric(name).title, unit)
    x = Axis("Budget", "tokens verified at once, less one", doubling=True)
    figure = figures.grouped(f"fig-{id}", caption, "lines", x, axis, series, id)
    if figure is not None:
        yield figure
