"""Mistyped names: what was meant is asked, and what there is is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.spelling import hint, nearest

NAMES = ["tp1-auto", "tp1-linear", "tp4-auto"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("tp1-atuo", "did you mean 'tp1-auto'?"),
        ("nothing-like-it", "there are: tp1-auto, tp1-linear, tp4-auto"),
        ("", "there are: tp1-auto, tp1-linear, tp4-auto"),
    ],
)
def test_a_mistyped_name(typed, said):
    assert hint(typed, NAMES) == said


def test_a_long_list_is_cut():
    assert hint("x", [f"server-{n}" for n in range(40)], most=2) == "there are: server-0, server-1 ..."


def test_where_there_is_nothing_it_says_so():
    assert hint("x", []) == "there are none"


@given(st.text(), st.lists(st.text(), max_size=5))
def test_only_what_there_is_is_proposed(typed, known):
    found = nearest(typed, known)
    assert found is None or found in known
