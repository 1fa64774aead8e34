"""From a run to a document: which tables and figures a campaign ends in, and in what order. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuctl.document.blocks import Block, Cell, Column, Document, Fold, Listing, Paragraph, Section, Table
from gpuctl.document.tables import by_metric, failures, identifier, listed, matrix, point_titles, speedups
from gpuctl.document.wording import (
    clock,
    group,
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
from gpuctl.records import MEASURED, Record, State
from gpuctl.results import provenance
from gpuctl.results.intervals import improvement
from gpuctl.results.run import Run, Server, headline, headlines, metric
from gpuctl.results.timeline import Interruption, described, interruptions, shown


@dataclass(frozen=True)
class Report:
    """A run with everything said about it: what every face renders."""

    run: Run
    document: Document
    interruptions: tuple[Interruption, ...] = field(default_factory=tuple)


def report(run: Run) -> Report:
    """The whole report of a run."""
    stops = tuple(interruptions(run.events))
    sections = [
        _section("glance", "At a glance", _glance(run)),
        _section("setup", "What was measured, on what", _setup(run)),
        *(_section(identifier("phase", phase), _phase_title(run, phase), _phase(run, phase)) for phase in run.phases),
        _section("failures", "Failures", _failures(run)),
        _section("timeline", "What happened when", _timeline(run, stops)),
        _section("reproduce", "To reproduce", _reproduce(run)),
        _section("reading", "How to read the numbers", _reading()),
        _section("left-out", "Left out", _left_out(run)),
    ]
    document = Document(
        title=plain(run.name),
        summary=tuple(_summary(run, stops)),
        sections=tuple(section for section in sections if section.blocks),
    )
    return Report(run, document, stops)


def _section(id: str, title: str, blocks: Iterator[Block]) -> Section:
    return Section(id, title, tuple(blocks))


def _phase_title(run: Run, phase: str) -> str:
    title = run.title(phase)
    if phase in run.foreign:
        return f"{plain(phase)}: measured by another tool"
    return plain(title if title.lower().startswith(phase.lower()) else f"{phase}: {title}" if title else phase)


# --- the head ------------------------------------------------------------------------------------


def _summary(run: Run, stops: Sequence[Interruption]) -> Iterator[str]:
    counts = [(run.count(state), state_word(state)) for state in State]
    said = ", ".join(f"{count} {word}" for count, word in counts if count)
    yield f"{len(run.records)} cells: {said}." if run.records else "Nothing has been measured yet."
    times_ = sorted(t for record in run.records for t in (record.started, record.ended) if t)
    if times_:
        lasted = span(times_[0], times_[-1])
        yield f"Measured from {clock(times_[0])} to {clock(times_[-1])}" + (f" ({lasted})." if lasted else ".")
    if stops:
        over = sum(bool(stop.end) for stop in stops)
        yield f"Interrupted {len(stops)} {'time' if len(stops) == 1 else 'times'}, continued {over}."
    if run.unfinished is not None:
        yield f"Not finished: the run was last seen at {clock(run.unfinished)}; what follows is what there is so far."
    if run.left_out:
        count = len(run.left_out)
        yield f"{count} {'file was' if count == 1 else 'files were'} left out; the end of this report names them."


def _glance(run: Run) -> Iterator[Block]:
    """The best server of each phase and point, beside the baseline."""
    rows = []
    for phase in run.phases:
        for workload in run.workloads:
            cells: dict[str, list[Record]] = {}
            for record in run.cells(phase, workload):
                if record.state is State.OK and headline(record) is not None:
                    cells.setdefault(record.cell.point, []).append(record)
            rows += [_best_row(run, phase, cells[point]) for point in _outstanding(run, phase, workload, cells)]
    if rows:
        columns = (
            Column("Phase", text=True),
            Column("Point", text=True),
            Column("Best server", text=True, code=True),
            Column("Figure", text=True),
            Column("Value"),
            Column("Baseline"),
            Column("Factor"),
        )
        yield Table("best", "The best of each phase", columns, tuple(rows), ())


def _outstanding(run: Run, phase: str, workload: str, cells: dict[str, list[Record]]) -> list[str]:
    """The points worth a line at a glance: of the short prompts the first, of a sweep its ends."""
    points = [point for point in run.points(phase, workload) if point in cells]
    if workload in ("concurrency", "context"):
        return list(dict.fromkeys([*points[:1], *points[-1:]]))
    return points[:1]


def _best_row(run: Run, phase: str, records: Sequence[Record]) -> tuple[Cell, ...]:
    figures = [(record, found) for record in records if (found := headline(record)) is not None]
    name = figures[0][1][0]
    better = metric(name, figures[0][1][1].unit).better or 1
    record, (name, e) = max(figures, key=lambda f: better * f[1][1].mean)
    base = run.by_cell.get(record.cell._replace(server=run.baseline_of(phase) or ""))
    base_e = base.metrics.get(name) if base is not None and base.state in MEASURED else None
    factor = improvement(e, base_e, better) if base_e is not None and base is not record else None
    spread_ = "" if e.sd is None else f" ± {spread(e)}"
    return (
        Cell(plain(phase)),
        Cell(f"{group(record)}, {label(record)}" if group(record) != label(record) else label(record)),
        Cell(plain(record.cell.server)),
        Cell(metric(name).title),
        Cell(f"{number(e.mean, e.unit)}{spread_}" + ("" if e.unit == "bytes" else f" {e.unit}")),
        Cell("–" if base_e is None else "itself" if base is record else number(base_e.mean, base_e.unit)),
        Cell(
            "–" if factor is None else times(factor.value),
            f"[{factor.low:.2f}, {factor.high:.2f}]" if factor is not None and factor.known else "",
        ),
    )


# --- what was measured on what -------------------------------------------------------------------


def _setup(run: Run) -> Iterator[Block]:
    own = [record for record in run.records if record.cell.phase not in run.foreign]
    facts = provenance.shared(own)
    if facts:
        rows = tuple((Cell(plain(name)), Cell(plain(text))) for name, text in facts.items())
        columns = (Column("Part", text=True, code=True), Column("Value", text=True))
        yield Table("machine", "The same for every cell", columns, rows)
    servers = [server for phase in run.phases if phase not in run.foreign for server in run.servers[phase]]
    if servers:
        yield _servers(run, servers)
    yield from _differing(own)
    yield from _boots(own)


def _servers(run: Run, servers: Sequence[Server]) -> Table:
    rows = []
    for server in servers:
        baseline = run.baseline_of(server.phase) == server.name
        rows.append(
            (
                Cell(plain(server.phase)),
                Cell(plain(server.name)),
                Cell(plain(server.method) + (" (baseline)" if baseline else "")),
                Cell(plain(server.engine)),
                Cell(plain(server.model)),
                Cell("" if server.tp is None else str(server.tp)),
            )
        )
    columns = (
        Column("Phase", text=True),
        Column("Server", text=True, code=True),
        Column("Method", text=True),
        Column("Engine", text=True),
        Column("Model", text=True),
        Column("TP"),
    )
    keep = [i for i in range(len(columns)) if any(row[i].text for row in rows)]
    return Table(
        "servers",
        "Servers",
        tuple(columns[i] for i in keep),
        tuple(tuple(row[i] for i in keep) for row in rows),
        ("Their command lines are under “To reproduce”.",),
    )


def _differing(records: Sequence[Record]) -> Iterator[Block]:
    """What of a server's fingerprint changed while the campaign ran, and what sets it apart."""
    first: dict[tuple[str, str], Record] = {}
    changed: dict[str, dict[str, None]] = {}
    seen: set[tuple[str, str, str]] = set()
    for record in records:
        key = (record.cell.phase, record.cell.server)
        if not record.fingerprint or (*key, record.fingerprint_id) in seen:
            continue
        seen.add((*key, record.fingerprint_id))
        base = first.setdefault(key, record)
        for said in provenance.words(base.fingerprint, record.fingerprint, ignore=provenance.MEASUREMENT):
            changed.setdefault(f"{key[0]}/{key[1]}", {})[said] = None
    for server, words in changed.items():
        yield Paragraph(
            f"{plain(server)} was not the same for all its cells: {'; '.join(plain(w) for w in words)}. "
            "Its cells were measured under different conditions.",
            warning=True,
        )


def _boots(records: Sequence[Record]) -> Iterator[Block]:
    boots: dict[str, list[Record]] = {}
    for record in records:
        if record.boot:
            key = ", ".join(f"{name} {text}" for name, text in provenance.flat(record.boot).items())
            boots.setdefault(key, []).append(record)
    if not boots:
        return
    rows = []
    for boot, measured in boots.items():
        start, end = min(r.started for r in measured), max(r.ended for r in measured)
        rows.append((Cell(plain(boot)), Cell(str(len(measured))), Cell(clock(start)), Cell(clock(end))))
    columns = (
        Column("Boot", text=True, code=True),
        Column("Cells"),
        Column("From", text=True),
        Column("To", text=True),
    )
    yield Table("boots", "Starts of the machine that cells were measured in", columns, tuple(rows))


# --- results -------------------------------------------------------------------------------------


def _phase(run: Run, phase: str) -> Iterator[Block]:
    for workload in run.workloads:
        records = run.cells(phase, workload)
        if not records:
            continue
        if workload == "decode":
            yield from _decode(run, phase, records)
        elif workload == "concurrency":
            yield from _sweep(run, phase, records, "Concurrency", ("output_tok_s", "decode_tok_s", "ttft_ms"))
        elif workload == "context":
            yield from _sweep(run, phase, records, "Context", ("ttft_ms", "prefill_tok_s", "decode_tok_s"))
        else:
            yield from _other(run, phase, workload, records)


def _record_of(run: Run, phase: str, workload: str) -> Any:
    return lambda server, point: run.by_cell.get((phase, server, workload, point))  # type: ignore[call-overload]


def _decode(run: Run, phase: str, records: Sequence[Record]) -> Iterator[Block]:
    """One table a length of answer: servers down, prompts across; then the speed-ups, and the accepted lengths."""
    groups: dict[str, list[Record]] = {}
    order = {point: i for i, point in enumerate(run.points(phase, "decode"))}
    for record in sorted(records, key=lambda r: order[r.cell.point]):
        groups.setdefault(group(record), []).append(record)
    of = _record_of(run, phase, "decode")
    servers = [server.name for server in run.servers[phase]]
    for title, members in groups.items():
        points = point_titles(run, phase, "decode", members)
        present = {name for record in members for name in record.metrics}
        name = next(iter(headlines("decode", present)), "decode_tok_s")
        unit = next((r.metrics[name].unit for r in members if name in r.metrics), "tok/s")
        caption = f"{metric(name).title}{title.removeprefix('decode')}"
        here = [s for s in servers if any(of(s, point) is not None for point, _ in points)]
        yield matrix(identifier(phase, title), caption, here, points, of, name, unit)
        faster = speedups(
            identifier(phase, title, "speedup"),
            f"Speed-up of decoding{title.removeprefix('decode')}",
            run,
            phase,
            points,
            of,
            name,
        )
        if faster is not None:
            yield faster
        speculative = [
            s
            for s in here
            if any((r := of(s, point)) is not None and "acceptance_length" in r.metrics for point, _ in points)
        ]
        if speculative:
            yield matrix(
                identifier(phase, title, "acceptance"),
                f"Acceptance length{title.removeprefix('decode')}",
                speculative,
                points,
                of,
                "acceptance_length",
                "tokens",
            )


def _sweep(run: Run, phase: str, records: Sequence[Record], title: str, names: Sequence[str]) -> Iterator[Block]:
    workload = records[0].cell.workload
    points = point_titles(run, phase, workload, records)
    of = _record_of(run, phase, workload)
    servers = [s.name for s in run.servers[phase] if any(of(s.name, point) is not None for point, _ in points)]
    present = {name: e.unit for record in records for name, e in record.metrics.items()}
    for name in [n for n in names if n in present] or headlines(workload, present)[:1] or ["output_tok_s"]:
        id = identifier(phase, workload, name)
        yield matrix(
            id, f"{title}: {metric(name).title.lower()}", servers, points, of, name, present.get(name, "tok/s")
        )
        if name == names[0] and metric(name).better > 0:
            faster = speedups(f"{id}-speedup", f"{title}: speed-up", run, phase, points, of, name)
            if faster is not None:
                yield faster


def _other(run: Run, phase: str, workload: str, records: Sequence[Record]) -> Iterator[Block]:
    """A workload that nobody drew a table for: all its headline figures, a row a cell."""
    order = {point: i for i, point in enumerate(run.points(phase, workload))}
    place = {server.name: i for i, server in enumerate(run.servers[phase])}
    rows = sorted(records, key=lambda r: (place[r.cell.server], order[r.cell.point]))
    names = headlines(workload, {name for record in records for name in record.metrics})
    yield by_metric(
        identifier(phase, workload),
        f"{plain(workload)}",
        rows,
        names,
        (lambda r: plain(r.cell.server), label),
        ("Server", "Point"),
    )


# --- what went wrong, and how it went on ----------------------------------------------------------


def _failures(run: Run) -> Iterator[Block]:
    found = failures(run.records)
    if not found:
        return
    rows = []
    details: list[Block] = []
    for (phase, why), records in found.items():
        failure = records[0].failure
        rows.append(
            (
                Cell(plain(phase)),
                Cell(listed([r.cell.server for r in records])),
                Cell(listed([f"{r.cell.workload}/{r.cell.point}" for r in records])),
                Cell(why),
                Cell(plain(remedy(failure).replace("\n", "; ")) or "–"),
            )
        )
        evidence = tuple(plain(line) for line in failure.evidence) if failure is not None else ()
        if evidence:
            details.append(Listing(evidence, f"{plain(records[0].cell)}: {why}"))
    columns = (
        Column("Phase", text=True),
        Column("Servers", text=True),
        Column("Cells", text=True),
        Column("Cause", text=True),
        Column("Remedy", text=True),
    )
    yield Table("failed", "Cells without a number, and why", columns, tuple(rows))
    if details:
        yield Fold("Evidence", tuple(details))


def _timeline(run: Run, stops: Sequence[Interruption]) -> Iterator[Block]:
    if stops:
        rows = []
        for stop in stops:
            lasted = span(stop.start, stop.end) if stop.end else "–"
            rows.append(
                (
                    Cell(clock(stop.start)),
                    Cell(plain(stop.what)),
                    Cell(clock(stop.end) if stop.end else "not yet"),
                    Cell(lasted or "–"),
                    Cell(plain("; ".join(stop.healed)) or "–"),
                )
            )
        columns = (
            Column("When", text=True),
            Column("What", text=True),
            Column("Over", text=True),
            Column("Lasted"),
            Column("Healed by", text=True),
        )
        yield Table("interruptions", "Interruptions and recoveries", columns, tuple(rows))
    events = shown(run.events)
    if events:
        two = (Column("When", text=True), Column("Event", text=True))
        rows_ = tuple((Cell(clock(event.get("t", ""))), Cell(plain(described(event)))) for event in events)
        yield Fold("All events", (Table("events", "Events", two, rows_),))


def _reproduce(run: Run) -> Iterator[Block]:
    command = run.campaign.get("command")
    if isinstance(command, list | tuple) and command:
        shown_ = provenance.public([str(word) for word in command])
        yield Listing((plain(shlex.join(shown_)),), "The campaign; it measures only what is missing or no longer valid")
    elif isinstance(command, str) and command:
        yield Listing((plain(command),), "The campaign; it measures only what is missing or no longer valid")
    lines = []
    for phase in run.phases:
        for server in run.servers[phase]:
            if server.argv:
                lines += [f"# {server_line(server)}", plain(shlex.join(provenance.public(server.argv)))]
    if lines:
        yield Listing(tuple(lines), "The servers")


def _reading() -> Iterator[Block]:
    yield Paragraph(
        "A cell is one server under one workload point, measured several times. Means are over its repetitions; ± is "
        "their standard deviation; [a, b] is the 95 % interval of the mean (Student's t). A factor is a ratio of means "
        "with Fieller's 95 % interval."
    )
    yield Paragraph(
        "Time to first token is until the first chunk with content. Decode speed is of one request, from its first "
        "chunk to its last, in tokens as the server counted them. Output throughput is the tokens of all requests by "
        "the time they took together."
    )


def _left_out(run: Run) -> Iterator[Block]:
    if run.left_out:
        rows = tuple((Cell(plain(left.path)), Cell(plain(left.why))) for left in run.left_out)
        columns = (Column("File", text=True, code=True), Column("Why", text=True))
        yield Table("files-left-out", "Files in the run folder that are not in this report", columns, rows)
