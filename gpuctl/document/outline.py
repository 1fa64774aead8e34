"""From a run to a document: which tables and figures a campaign ends in, and in what order. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpuctl.document import differences, measured
from gpuctl.document.blocks import (
    Axis,
    Block,
    Cell,
    Column,
    Document,
    Figure,
    Fold,
    Listing,
    Paragraph,
    Point,
    Section,
    Series,
    Table,
    with_unique_names,
)
from gpuctl.document.tables import best, failures, identifier, listed
from gpuctl.document.wording import (
    clock,
    group,
    label,
    mean,
    minutes,
    number,
    plain,
    remedy,
    server_line,
    span,
    state_word,
    times,
)
from gpuctl.records import MEASURED, Record, State
from gpuctl.results import provenance
from gpuctl.results.comparison import Comparison
from gpuctl.results.intervals import improvement
from gpuctl.results.run import Run, Server, headline, metric
from gpuctl.results.timeline import Interruption, described, interruptions, shown


@dataclass(frozen=True)
class Report:
    """A run with everything said about it: what every face renders."""

    run: Run
    comparisons: tuple[Comparison, ...] = ()

    @cached_property
    def interruptions(self) -> tuple[Interruption, ...]:
        return tuple(interruptions(self.run.events))

    @cached_property
    def document(self) -> Document:
        """All of it in blocks; made for the faces that show blocks: a terminal, CSV and JSON do without."""
        return _document(self.run, self.comparisons, self.interruptions)


def report(run: Run, comparisons: Sequence[Comparison] = ()) -> Report:
    """The whole report of a run, with what it is compared to."""
    return Report(run, tuple(comparisons))


def _document(run: Run, comparisons: Sequence[Comparison], stops: Sequence[Interruption]) -> Document:
    sections = [
        _section("glance", "At a glance", _glance(run)),
        _section("setup", "What was measured, on what", _setup(run)),
        *(
            _section(identifier("phase", phase), _phase_title(run, phase), measured.of_phase(run, phase))
            for phase in run.phases
        ),
        _section("across", "Across phases and budgets", measured.across_phases(run)),
        *(
            _section(f"compare-{i}", f"{plain(c.new)} against {plain(c.old)}", differences.blocks(c))
            for i, c in enumerate(comparisons, 1)
        ),
        _section("failures", "Failures", _failures(run)),
        _section("timeline", "What happened when", _timeline(run, stops)),
        _section("reproduce", "To reproduce", _reproduce(run)),
        _section("reading", "How to read the numbers", _reading()),
        _section("left-out", "Left out", _left_out(run)),
    ]
    return Document(
        title=plain(run.name),
        summary=tuple(_summary(run, stops)),
        sections=with_unique_names(section for section in sections if section.blocks),
    )


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
    if run.waiting:
        yield f"Not measured: {', '.join(plain(phase) for phase in run.waiting)}."
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
    """The best server at a point; how many cannot be told apart from it; and the baseline, if it is not among them."""
    figures = {record.cell.server: found for record in records if (found := headline(record)) is not None}
    name, sample = next(iter(figures.values()))
    better = metric(name, sample.unit).better or 1
    estimates = {server: e for server, (its, e) in figures.items() if its == name}
    first = max(estimates, key=lambda server: better * estimates[server].mean)
    alike = best(estimates, better) - {first}
    e, record = estimates[first], next(r for r in records if r.cell.server == first)
    base = run.by_cell.get(record.cell._replace(server=run.baseline_of(phase) or ""))
    base_e = base.metrics.get(name) if base is not None and base.state in MEASURED else None
    factor = improvement(e, base_e, better) if base_e is not None and base is not record else None
    where = group(record) if group(record) == label(record) else f"{group(record)}, {label(record)}"
    return (
        Cell(plain(phase)),
        Cell(where),
        Cell(plain(first), f"and {len(alike)} not told apart" if alike else ""),
        Cell(metric(name).title),
        Cell(mean(e) + ("" if e.unit == "bytes" else f" {e.unit}")),
        Cell("–" if base_e is None else "itself" if base is record else number(base_e.mean, base_e.unit)),
        Cell(
            "–" if factor is None else times(factor.value),
            f"[{factor.low:.2f}, {factor.high:.2f}]" if factor is not None and factor.known else "",
        ),
    )


# --- what was measured on what -------------------------------------------------------------------


def _setup(run: Run) -> Iterator[Block]:
    own = [record for record in run.records if record.cell.phase not in run.foreign]
    known = [record for record in own if record.state in MEASURED]  # of what failed nothing is said that has to hold
    facts = provenance.shared(known or own)
    cards = {name: found for name in facts if (found := _OF_CARD.match(name))}
    rows = tuple((Cell(plain(name)), Cell(plain(text))) for name, text in facts.items() if name not in cards)
    if rows:
        columns = (Column("Part", text=True, code=True), Column("Value", text=True))
        yield Table("machine", "The same for every cell", columns, rows)
    yield from _cards([(found[1], found[2], facts[name]) for name, found in cards.items()])
    servers = [server for phase in run.phases if phase not in run.foreign for server in run.servers[phase]]
    if servers:
        yield _servers(run, servers)
    order = {(server.phase, server.name): i for i, server in enumerate(servers)}
    yield from _capacities(sorted(known, key=lambda r: order[r.cell.phase, r.cell.server]))
    yield from _differing(known)
    yield from _generator(own)
    yield from _boots(own)


_OF_CARD = re.compile(r"machine\.gpus\.([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F])\.(.+)$")
_CARD_WORDS = {
    "model": "Model",
    "power.limit": "Power limit (W)",
    "clocks.max.sm": "SM clock, most (MHz)",
    "clocks.max.mem": "Memory clock, most (MHz)",
    "ecc.mode.current": "ECC",
    "compute_mode": "Compute mode",
    "mig.mode.current": "MIG",
}


def _cards(facts: Sequence[tuple[str, str, str]]) -> Iterator[Block]:
    """The GPUs (`facts`: place on the bus, what, text), those that are alike in one column."""
    cards: dict[str, dict[str, str]] = {}
    for place, what, text in facts:
        cards.setdefault(place, {})[what] = text.removesuffix(".00")
    if not cards:
        return
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for place, told in cards.items():
        alike.setdefault(tuple((what, text) for what, text in told.items() if what != "uuid"), []).append(place)
    whats = dict.fromkeys(what for kind in alike for what, _ in kind)
    rows = [
        (Cell(_CARD_WORDS.get(what, plain(what))), *(Cell(plain(dict(kind).get(what, "–"))) for kind in alike))
        for what in whats
    ]
    counts = [Column(f"{len(places)} {'GPU' if len(places) == 1 else 'GPUs'}", text=True) for places in alike.values()]
    yield Table("cards", "GPUs of the machine", (Column("Part", text=True), *counts), tuple(rows))
    group = {place: i for i, places in enumerate(alike.values(), 1) for place in places}
    each = tuple(
        (Cell(place), Cell(plain(told.get("uuid", "–"))), *([Cell(str(group[place]))] if len(alike) > 1 else []))
        for place, told in cards.items()
    )
    names = (Column("PCI address", text=True, code=True), Column("UUID", text=True, code=True))
    more = (Column("Column above"),) if len(alike) > 1 else ()
    yield Fold("Which GPUs they are", (Table("card-identities", "GPUs by address", (*names, *more), each),))


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


# What a server can hold: where a record's `server` says it, and how it is shown.
_CAPACITIES = (
    ("Context", "tokens", ("context", "capacity.context_tokens")),
    ("At once", "requests", ("requests_at_once", "capacity.max_running_requests")),
    ("KV cache", "tokens", ("kv_tokens", "capacity.kv_tokens")),
    ("KV memory", "bytes", ("capacity.kv_bytes",)),
    ("States", "bytes", ("capacity.state_bytes",)),
    ("Verifying", "bytes", ("capacity.verify_bytes",)),
    ("Weights", "bytes", ("capacity.weights_bytes",)),
    ("Drafter", "bytes", ("capacity.draft_weights_bytes",)),
    ("Ready after", "s", ("ready_s",)),
)


def _capacities(records: Sequence[Record]) -> Iterator[Block]:
    """What each server can hold, as it said itself when it was ready."""
    said: dict[tuple[str, str], list[str]] = {}
    for record in records:
        key = (record.cell.phase, record.cell.server)
        if key not in said:
            said[key] = [_capacity(record.server, unit, places) for _, unit, places in _CAPACITIES]
    keep = [i for i in range(len(_CAPACITIES)) if any(texts[i] for texts in said.values())]
    if not keep:
        return
    columns = (
        Column("Server", text=True, code=True),
        *(Column(title, "" if unit == "bytes" else unit) for title, unit, _ in (_CAPACITIES[i] for i in keep)),
    )
    rows = tuple((Cell(plain(server)), *(Cell(texts[i] or "–") for i in keep)) for (_, server), texts in said.items())
    note = "As each server said when it was ready; bytes are of one GPU."
    yield Table("capacities", "What each server can hold", columns, rows, (note,))


def _capacity(server: Mapping[str, object], unit: str, places: Sequence[str]) -> str:
    """The first of `places` (dotted) that is a number, as text; else empty."""
    for place in places:
        value: object = server
        for key in place.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 60:
            return number(float(value), unit) if unit == "bytes" else f"{value:.{int(unit == 's')}f}"
    return ""


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


def _generator(records: Sequence[Record]) -> Iterator[Block]:
    """How far the load generator itself can be trusted: its worst lag, and the least share of the load it kept up."""
    lags = [
        (value, record)
        for record in records
        if isinstance(lag := record.generator.get("lag_ms"), Mapping)
        and isinstance(value := lag.get("p99"), int | float)
    ]
    kept = [value for record in records if isinstance(value := record.generator.get("load_kept"), int | float)]
    said = []
    if lags:
        worst, record = max(lags, key=lambda pair: pair[0])
        said.append(
            f"stamped answers at most {worst:.2f} ms late (99th percentile of its worst cell, {plain(record.cell)})"
        )
    if kept:
        said.append(f"kept up at least {min(kept) * 100:.0f} % of the load it was asked for")
    if said:
        yield Paragraph(f"The load generator {' and '.join(said)}.")


def _boots(records: Sequence[Record]) -> Iterator[Block]:
    alike: dict[str, list[Record]] = {}  # as they are, before they are told in words: thousands of cells share a boot
    for record in records:
        if record.boot:
            alike.setdefault(repr(record.boot), []).append(record)
    boots: dict[str, list[Record]] = {}
    for there in alike.values():
        said = ", ".join(f"{name} {_head(text)}" for name, text in provenance.flat(there[0].boot).items())
        boots.setdefault(said, []).extend(there)
    if not boots:
        return
    rows = []
    for boot, there in boots.items():
        start, end = min(r.started for r in there), max(r.ended for r in there)
        rows.append((Cell(plain(boot)), Cell(str(len(there))), Cell(clock(start)), Cell(clock(end))))
    columns = (
        Column("Boot", text=True, code=True),
        Column("Cells"),
        Column("From", text=True),
        Column("To", text=True),
    )
    yield Table("boots", "Starts of the machine that cells were measured in", columns, tuple(rows))


def _head(text: str) -> str:
    """A boot id by its first eight digits, which tell one from another."""
    return text[:8] if len(text) == 36 and text.count("-") == 4 else text


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
        begin = _beginning(run, stops)
        rows = []
        for place, stop in enumerate(stops, 1):
            lasted = span(stop.start, stop.end) if stop.end else "–"
            rows.append(
                (
                    Cell(str(place)),
                    Cell(clock(stop.start), _after(begin, stop.start)),
                    Cell(plain(stop.what)),
                    Cell(clock(stop.end) if stop.end else "not yet", f"back {clock(stop.back)}" if stop.back else ""),
                    Cell(lasted or "–"),
                    Cell(plain("; ".join(stop.healed)) or "–"),
                )
            )
        columns = (
            Column("No."),
            Column("When", text=True),
            Column("What", text=True),
            Column("Over", text=True),
            Column("Lasted"),
            Column("Healed by", text=True),
        )
        yield Table("interruptions", "Interruptions and recoveries", columns, tuple(rows))
        stretches = _stretches(run, stops)
        figure = _drawn_timeline(begin, stretches, stops)
        if figure is not None:
            yield figure
        if stretches:
            yield Fold("When each server was measured", (_stretch_table(begin, stretches),))
    events = shown(run.events)
    if events:
        two = (Column("When", text=True), Column("Event", text=True))
        rows_ = tuple((Cell(clock(event.get("t", ""))), Cell(plain(described(event)))) for event in events)
        yield Fold("All events", (Table("events", "Events", two, rows_),))


def _beginning(run: Run, stops: Sequence[Interruption]) -> str:
    """The earliest moment that anything is known of."""
    times_ = [str(event.get("t", "")) for event in run.events] + [stop.start for stop in stops]
    times_ += [record.started for record in run.records if record.cell.phase not in run.foreign]
    return min((t for t in times_ if minutes(t, t) is not None), default="")


def _after(begin: str, t: str) -> str:
    passed = minutes(begin, t)
    return "" if passed is None else f"after {passed:.1f} min"


def _stretches(run: Run, stops: Sequence[Interruption]) -> list[list[Record]]:
    """Measured cells of one server that follow one another; what was interrupted in between is two stretches."""
    found: list[list[Record]] = []
    own = [r for r in run.records if r.state in MEASURED and r.cell.phase not in run.foreign]
    for record in sorted(own, key=lambda r: (r.started, r.cell)):
        last = found[-1][-1] if found else None
        same = last is not None and last.cell[:2] == record.cell[:2]
        if last is not None and same and not any(last.ended <= stop.start <= record.started for stop in stops):
            found[-1].append(record)
        else:
            found.append([record])
    return found


def _stretch_table(begin: str, stretches: Sequence[Sequence[Record]]) -> Table:
    columns = (
        Column("Phase", text=True),
        Column("Server", text=True, code=True),
        Column("From", text=True),
        Column("To", text=True),
        Column("Lasted"),
        Column("Cells"),
    )
    rows = tuple(
        (
            Cell(plain(first.cell.phase)),
            Cell(plain(first.cell.server)),
            Cell(clock(first.started), _after(begin, first.started)),
            Cell(clock(last.ended), _after(begin, last.ended)),
            Cell(span(first.started, last.ended) or "–"),
            Cell(str(len(records))),
        )
        for records in stretches
        for first, last in [(records[0], records[-1])]
    )
    return Table("stretches", "When each server was measured", columns, rows)


_MOST_ROWS = 8  # interruptions that have a row each; more share one


def _drawn_timeline(begin: str, stretches: Sequence[Sequence[Record]], stops: Sequence[Interruption]) -> Figure | None:
    """When each phase was measured, and below that each interruption by its number: away or stopped, then healed."""

    def stretch(row: str, start: str, end: str) -> Iterator[Point]:
        at, over = minutes(begin, start), minutes(begin, end)
        if at is not None and over is not None and over >= at:
            yield Point(at, over - at, label=plain(row))

    row_of = {i: f"no. {i}" if len(stops) <= _MOST_ROWS else "interrupted" for i in range(1, len(stops) + 1)}
    measured_ = [
        p for records in stretches for p in stretch(records[0].cell.phase, records[0].started, records[-1].ended)
    ]
    gone = [
        p
        for i, stop in enumerate(stops, 1)
        for p in stretch(row_of[i], stop.start, stop.back or stop.end or stop.start)
    ]
    healed = [p for i, stop in enumerate(stops, 1) if stop.back for p in stretch(row_of[i], stop.back, stop.end)]
    named = (("measured", measured_), ("stopped or away", gone), ("healed", healed))
    series = tuple(Series(name, tuple(points)) for name, points in named if points)
    if len(series) < 2:
        return None
    caption = "When each phase was measured, and what interrupted it, by its number in the table"
    axis = Axis("Time since the beginning", "min")
    return Figure("fig-timeline", caption, "timeline", axis, Axis("What happened"), series, "interruptions")


def _reproduce(run: Run) -> Iterator[Block]:
    if run.commands:
        said = [provenance.public(command) for command in run.commands]
        lines_ = tuple(plain(words[0] if len(words) == 1 else shlex.join(words)) for words in said)
        yield Listing(lines_, "The campaign; it measures only what is missing or no longer valid")
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
