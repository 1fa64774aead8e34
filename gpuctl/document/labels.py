"""Where the labels of a figure's points stand, so that none lies on another or on a point. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpuctl.document.blocks import Figure, Point

# Each side of a point by where it is from there, in the order they are tried: curves rise, so the first two are free.
SIDES = {"above left": (-1, 1), "below right": (1, -1), "above right": (1, 1), "below left": (-1, -1)}

# In points, about as both the page and LaTeX draw: the axes, a character of a label, its height, half a mark.
_WIDE, _HIGH = 365.0, 145.0
_CHARACTER, _LINE, _MARK = 4.5, 6.5, 3.5

_Box = tuple[float, float, float, float]  # left, bottom, right, top


def sides(figure: Figure) -> list[tuple[Point, str]]:
    """Every point that has room for its label, with the side that it is on. The others do without."""
    points = [point for series in figure.series for point in series.points]
    first = min(float(p.x) for p in points)
    across = max(float(p.x) for p in points) - first or 1.0
    up = max(p.y if p.high is None else p.high for p in points) or 1.0
    at = [((float(p.x) - first) / across * _WIDE, p.y / up * _HIGH) for p in points]
    taken = [(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y in at]
    found = []
    for (x, y), point in zip(at, points, strict=True):
        for side, box in _boxes(x, y, point):
            if not any(_touch(box, other) for other in taken):
                taken.append(box)
                found.append((point, side))
                break
    return found


def _boxes(x: float, y: float, point: Point) -> Iterator[tuple[str, _Box]]:
    # At its capacity a server stays where it was: below right is where the one before has not its label.
    wide = _CHARACTER * len(point.label)
    for side in sorted(SIDES, key=lambda side: side != "below right") if point.hollow else SIDES:
        right, above = SIDES[side]
        left = x + _MARK if right > 0 else x - _MARK - wide
        bottom = y + _MARK if above > 0 else y - _MARK - _LINE
        yield side, (left, bottom, left + wide, bottom + _LINE)


def _touch(a: _Box, b: _Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
