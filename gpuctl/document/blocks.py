"""What a report is made of, whatever face it is shown by: sections of paragraphs, tables, figures, listings. Pure.

Texts in here are raw: whoever shows them escapes them. A figure never says what no table says: `Figure.table`
names the table that holds its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Cell:
    """One field of a table. `below` is of second rank (an interval under its mean); `mark` refers to a note."""

    text: str = ""
    below: str = ""
    mark: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Column:
    title: str
    unit: str = ""
    text: bool = False  # words, to the left; figures go to the right
    code: bool = False  # names of files, commands, identifiers


@dataclass(frozen=True)
class Table:
    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Point:
    """`x` is a number, or the name of a category. `low` and `high`: the 95 % interval, where there is one.

    In a timeline `x` is when, `y` how long, and `label` the row.
    """

    x: float | str
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""
    hollow: bool = False  # not an ordinary result: limited by capacity, or unstable


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Axis:
    title: str
    unit: str = ""
    doubling: bool = False  # logarithmic to the base of 2, with a tick at each value that was measured

    def __str__(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title


@dataclass(frozen=True)
class Figure:
    id: str
    caption: str
    kind: (
        str  # bars (x are categories) | lines | path (points in the order they were measured, each labelled) | timeline
    )
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    table: str


@dataclass(frozen=True)
class Paragraph:
    text: str
    warning: bool = False


@dataclass(frozen=True)
class Listing:
    """Lines to be copied as they are."""

    lines: tuple[str, ...]
    caption: str = ""


@dataclass(frozen=True)
class Fold:
    """Detail that most readers skip: closed at first where the face can do that."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: tuple[Block, ...]


Block = Paragraph | Table | Figure | Listing | Fold | Section


@dataclass(frozen=True)
class Document:
    title: str
    summary: tuple[str, ...]
    sections: tuple[Section, ...] = field(default_factory=tuple)

    def walk(self) -> Iterator[Block]:
        """Every block, in reading order."""
        waiting: list[Block] = list(reversed(self.sections))
        while waiting:
            block = waiting.pop()
            yield block
            if isinstance(block, Section | Fold):
                waiting.extend(reversed(block.blocks))


def with_unique_names(sections: Iterable[Section]) -> tuple[Section, ...]:
    """The sections with every id used once: names that differ only in what an id cannot hold are told apart."""
    latest: dict[str, str] = {}
    taken: set[str] = set()

    def fresh(id: str) -> str:
        name, count = id, 1
        while name in taken:
            count += 1
            name = f"{id}-{count}"
        taken.add(name)
        latest[id] = name
        return name

    def renamed(block: Block) -> Block:
        if isinstance(block, Section):
            return replace(block, id=fresh(block.id), blocks=tuple(renamed(inner) for inner in block.blocks))
        if isinstance(block, Fold):
            return replace(block, blocks=tuple(renamed(inner) for inner in block.blocks))
        if isinstance(block, Table):
            return replace(block, id=fresh(block.id))
        if isinstance(block, Figure):  # comes after the table that holds its numbers
            return replace(block, id=fresh(block.id), table=latest.get(block.table, block.table))
        return block

    return tuple(section for s in sections if isinstance(section := renamed(s), Section))
