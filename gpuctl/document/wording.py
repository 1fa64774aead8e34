"""Numbers and names as people read them, the same in every face of a report. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from gpuctl.document.blocks import Figure
from gpuctl.records import Estimate, Failure, Record, State
from gpuctl.results.run import Server


def plain(text: object) -> str:
    """The text without what a reader cannot see or what would act on a terminal.

    Control characters, bidirectional overrides, lone surrogates and the like become visible escapes; every kind of
    space becomes a space. Line breaks and tabs are escaped too: the result is one line.
    """
    text = str(text)
    if text.isprintable():  # the common case, at C speed
        return text
    return "".join(
        c
        if c.isprintable()
        else " "
        if unicodedata.category(c) == "Zs"
        else c.encode("unicode_escape", "surrogatepass").decode("ascii")
        for c in text
    )


def decimals(unit: str, value: float) -> int:
    """How many decimals a figure of this unit is worth."""
    size = abs(value)
    if unit in ("tok/s", "ms", "W"):
        return 1 if size >= 1 or size == 0 else 3
    if unit in ("tokens", "bytes"):
        return 2 if size < 100 and not float(value).is_integer() else 0
    return 3 if size < 10 else 1


_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def _step(value: float) -> int:
    """The binary unit that a number of bytes is shown in."""
    step = 0
    while abs(value) >= 1024 and step < len(_BINARY) - 1:
        value, step = value / 1024, step + 1
    return step


def number(value: float, unit: str = "") -> str:
    """`140.6`, with the decimals its unit is worth. Bytes come with their own unit: `91.3 GiB`."""
    if unit == "bytes":
        step = _step(value)
        return f"{value / 1024**step:.{1 if step else 0}f} {_BINARY[step]}"
    text = f"{value:.{decimals(unit, value)}f}"
    return text if len(text) <= 12 else f"{value:.3g}"


def spread(e: Estimate) -> str:
    """The standard deviation with the decimals and the unit of the mean; `?` for a single value."""
    if e.sd is None:
        return "?"
    places, sd = decimals(e.unit, e.mean), e.sd
    if e.unit == "bytes":
        places, sd = 1, e.sd / 1024 ** _step(e.mean)
    text = f"{sd:.{places}f}"
    if sd > 0 and not text.strip("0."):
        return f"{sd:.2f}" if sd >= 0.005 else "<0.01"  # a small spread is not none
    return text if len(text) <= 12 else f"{sd:.3g}"


def mean(e: Estimate) -> str:
    """`140.6 ± 1.0`; the mean alone for a single value."""
    if e.sd is None:
        return number(e.mean, e.unit)
    figure, _, unit = number(e.mean, e.unit).partition(" ")
    return f"{figure} ± {spread(e)}{' ' + unit if unit else ''}"


def interval(e: Estimate) -> str:
    """`[138.1, 143.1]`, empty when the cell was measured once."""
    if e.ci95 is None:
        return ""
    ends = (e.mean - e.ci95, e.mean + e.ci95)
    if e.unit == "bytes" or abs(e.mean) + e.ci95 >= 1e9:
        return f"[{number(ends[0], e.unit)}, {number(ends[1], e.unit)}]"
    places = decimals(e.unit, e.mean)  # as the mean has them: an end near zero is not known better
    return f"[{ends[0]:.{places}f}, {ends[1]:.{places}f}]"


def times(factor: float) -> str:
    """`5.31×`"""
    return f"{factor:.2f}×" if factor < 100 else f"{factor:.0f}×"


def counted(count: int, word: str) -> str:
    """`1 cell`, `3 cells`"""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def percent(value: float) -> str:
    return f"{value:+.1f} %"


def label(record: Record) -> str:
    """What a cell is called inside the table of its workload: the prompt, `c=8`, `30000`, or its point."""
    parameters = record.parameters
    key = {"decode": "prompt", "concurrency": "concurrency", "context": "context"}.get(record.cell.workload, "")
    value = parameters.get(key)
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        return plain(record.cell.point)
    return f"c={value}" if key == "concurrency" else plain(value)


def group(record: Record) -> str:
    """What a cell's table is about: the workload, and the length of the answers where it varies."""
    max_tokens = record.parameters.get("max_tokens")
    if record.cell.workload == "decode" and isinstance(max_tokens, int):
        return f"decode, {max_tokens} tokens"
    return plain(record.cell.workload)


def server_line(server: Server) -> str:
    """`tp1-linear  tp=1  method=dflash`"""
    parts = [plain(server.name)]
    if server.tp is not None:
        parts.append(f"tp={server.tp}")
    if server.method:
        parts.append(f"method={plain(server.method)}")
    if server.engine:
        parts.append(f"engine={plain(server.engine)}")
    return "  ".join(parts)


def state_word(state: State) -> str:
    return {
        State.OK: "ok",
        State.FAILED: "failed",
        State.SKIPPED: "skipped",
        State.CAPACITY_LIMITED: "capacity-limited",
        State.UNSTABLE: "unstable",
    }[state]


def cause(record: Record) -> str:
    """Why a cell has no number, in one line."""
    failure = record.failure
    if failure is None:
        return "; ".join(plain(note) for note in record.notes) or "no cause was recorded"
    return f"{plain(failure.kind)}: {plain(failure.summary)}"


def remedy(failure: Failure | None) -> str:
    """What to do about a failure: its own advice, or that of the finding in the log. May have several lines."""
    if failure is None:
        return ""
    finding: Mapping[str, Any] = failure.finding if isinstance(failure.finding, Mapping) else {}
    advice = failure.advice or finding.get("advice") or ""
    return advice if isinstance(advice, str) else ""


def span(start: str, end: str) -> str:
    """`1 h 04 min` between two ISO 8601 times; empty when they are none."""
    try:
        seconds = (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
    except (ValueError, TypeError):
        return ""
    if seconds < 0:
        return ""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def minutes(start: str, t: str) -> float | None:
    """From one ISO 8601 time to another, in minutes; None where they are none."""
    try:
        return (datetime.fromisoformat(t) - datetime.fromisoformat(start)).total_seconds() / 60
    except (ValueError, TypeError):
        return None


def clock(t: object) -> str:
    """`2026-11-30 04:00:09` out of an ISO 8601 time; what is none stays as it is."""
    text = plain(t)
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return text


def reading(figure: Figure) -> str:
    """A figure's caption with what its marks mean."""
    points = [point for series in figure.series for point in series.points]
    said = [f"{figure.caption}."]
    if any(point.low is not None for point in points):
        said.append("Error bars: 95 % intervals.")
    if any(point.hollow for point in points) and figure.kind != "bars":
        said.append("Hollow: limited by capacity, or unstable.")
    if figure.kind == "path":
        said.append("Beside a point, where there is room: concurrent requests.")
    return " ".join(said)
