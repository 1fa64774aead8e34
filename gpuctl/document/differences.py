"""A comparison as a section of a report. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuctl.document.blocks import Block, Cell, Column, Fold, Paragraph, Table
from gpuctl.document.wording import cause, counted, mean, percent, plain
from gpuctl.records import Estimate, Record
from gpuctl.results.comparison import Comparison, Difference, Verdict
from gpuctl.results.run import metric


def summary(comparison: Comparison) -> str:
    """`tp4 against tp1: 3 worse, 5 better, 1 unclear, 40 no difference (noise band 2 %).`"""
    counts = [(comparison.count(verdict), verdict.value) for verdict in Verdict]
    said = ", ".join(f"{count} {word}" for count, word in counts if count) or "nothing to compare"
    more = ""
    if comparison.broken:
        more += f" {counted(len(comparison.broken), 'cell')} with a number before and none now."
    if comparison.not_comparable:
        more += f" Not comparable: {counted(len(comparison.not_comparable), 'cell')}."
    return f"{plain(comparison.new)} against {plain(comparison.old)}: {said}.{more}"


def changes(comparison: Comparison) -> list[Difference]:
    """Every difference that is one: the worse first, then the better, then the unclear, each by size."""
    order = {verdict: i for i, verdict in enumerate(Verdict)}
    changed = [d for d in comparison.differences if d.verdict is not Verdict.SAME]
    return sorted(changed, key=lambda d: (order[d.verdict], -abs(d.change.value)))


def blocks(comparison: Comparison) -> Iterator[Block]:
    """What the two sides are, what differs between them, and every figure that changed."""
    yield Paragraph(summary(comparison))
    total = len(comparison.differences)
    if total:
        chance = round(total * 0.05)
        yield Paragraph(
            f"A change counts when its 95 % interval (Welch) excludes zero and it is larger than the noise band of "
            f"{comparison.noise_percent:g} %. Among {total} intervals about {chance} exclude zero by chance alone; the "
            f"noise band is what keeps most of those out."
        )
    yield from _conditions(comparison)
    changed = changes(comparison)
    if changed:
        yield _table("changes", "What changed", changed)
    same = [d for d in comparison.differences if d.verdict is Verdict.SAME]
    if same:
        yield Fold(f"No difference: {counted(len(same), 'figure')}", (_table("unchanged", "No difference", same),))
    yield from _lost(comparison)


def _conditions(comparison: Comparison) -> Iterator[Block]:
    if comparison.conditions:
        rows = tuple(
            (Cell(plain(c.where)), Cell(plain("; ".join(c.words))), Cell(str(c.cells))) for c in comparison.conditions
        )
        columns = (Column("Where", text=True, code=True), Column("What differs", text=True), Column("Cells"))
        yield Table("conditions", "What differs besides the numbers (old -> new)", columns, rows)
    elif comparison.differences:
        yield Paragraph("The fingerprints of the two sides are the same.")


def _table(id: str, caption: str, differences: Sequence[Difference]) -> Table:
    rows = []
    for d in differences:
        below = ""
        if d.change.low is not None and d.change.high is not None:
            below = f"[{d.change.low:+.1f}, {d.change.high:+.1f}]"
        new, old = d.new.metrics[d.metric], d.old.metrics[d.metric]
        rows.append(
            (
                Cell(plain(d.new.cell)),
                Cell(f"{metric(d.metric).title}{_unit(new)}"),
                Cell(mean(old)),
                Cell(mean(new)),
                Cell(percent(d.change.value), below),
                Cell(d.verdict.value, strong=d.verdict is Verdict.WORSE),
            )
        )
    columns = (
        Column("Cell", text=True, code=True),
        Column("Figure", text=True),
        Column("Before"),
        Column("Now"),
        Column("Change"),
        Column("Verdict", text=True),
    )
    return Table(id, caption, columns, tuple(rows), ("Mean ± standard deviation; change with its 95 % interval.",))


def _unit(e: Estimate) -> str:
    return f" ({e.unit})" if e.unit and e.unit != "bytes" else ""


def _lost(comparison: Comparison) -> Iterator[Block]:
    columns = (Column("Cell", text=True, code=True), Column("Why", text=True))
    for id, caption, pairs in (
        ("broken", "Had a number, has none now", comparison.broken),
        ("mended", "Has a number now", comparison.mended),
    ):
        if pairs:
            rows = tuple((Cell(plain(new.cell)), Cell(_words(new, old))) for new, old in pairs)
            yield Table(id, caption, columns, rows)
    refused = tuple((Cell(plain(cell)), Cell(plain(why))) for cell, why in comparison.not_comparable)
    if refused:
        yield Fold(
            f"Not comparable: {counted(len(refused), 'cell')}", (Table("refused", "Not comparable", columns, refused),)
        )
    only = [("only here", cell) for cell in comparison.only_new] + [
        ("only there", cell) for cell in comparison.only_old
    ]
    if only:
        rows = tuple((Cell(plain(cell)), Cell(where)) for where, cell in only)
        yield Fold(
            f"On one side only: {counted(len(only), 'cell')}", (Table("one-side", "On one side only", columns, rows),)
        )


def _words(new: Record, old: Record) -> str:
    return cause(new) if new.failure is not None or new.notes else f"before: {cause(old)}"
