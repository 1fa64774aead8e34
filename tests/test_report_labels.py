"""The labels beside the points of a figure: none on another, none on a point, and those without room left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuctl.document import labels
from gpuctl.document.blocks import Axis, Figure, Point, Series


def drawn(*points):
    return Figure("f", "f", "path", Axis("x"), Axis("y"), (Series("s", tuple(points)),), "t")


def test_a_label_is_above_left_and_at_capacity_below_right():
    points = Point(10.0, 50.0, label="1"), Point(60.0, 20.0, label="8"), Point(60.0, 80.0, label="16", hollow=True)
    assert labels.sides(drawn(*points)) == [
        (points[0], "above left"),
        (points[1], "above left"),
        (points[2], "below right"),
    ]


def test_points_on_one_spot_share_its_sides_and_the_fifth_does_without():
    points = [Point(0.0, 0.0, label="0"), *(Point(50.0, 50.0, label=str(i)) for i in range(5)), Point(99.0, 99.0)]
    found = labels.sides(drawn(*points))
    assert [side for point, side in found if point.y == 50.0] == list(labels.SIDES)
    assert [point.label for point, _ in found if point.y == 50.0] == ["0", "1", "2", "3"]


POINTS = st.lists(
    st.builds(
        Point,
        st.floats(0, 1e6),
        st.floats(0, 1e6),
        label=st.sampled_from(["1", "16", "128"]),
        hollow=st.booleans(),
    ),
    min_size=1,
    max_size=40,
)


@given(POINTS)
def test_no_label_lies_on_another_or_on_a_point(points):
    """In the drawing: across from the first to the last point, up from nothing to the highest."""
    first, last = min(p.x for p in points), max(p.x for p in points)
    highest = max(p.y for p in points)
    found = labels.sides(drawn(*points))
    assert len({id(point) for point, _ in found}) == len(found)
    places = [
        ((p.x - first) / (last - first or 1.0) * labels._WIDE, p.y / (highest or 1.0) * labels._HIGH) for p in points
    ]
    where = {id(p): place for p, place in zip(points, places, strict=True)}
    boxes = [dict(labels._boxes(*where[id(point)], point))[side] for point, side in found]
    for i, (left, bottom, right, top) in enumerate(boxes):
        assert not any(left < x < right and bottom < y < top for x, y in places)
        assert not any(a < right and left < c and b < top and bottom < d for a, b, c, d in boxes[:i])
