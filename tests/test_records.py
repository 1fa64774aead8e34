"""Records survive being written and read, and their intervals are Student's."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.records import CellId, Estimate, Failure, NotARecord, Record, State, estimate, from_json


def record(**changes):
    return Record(
        **{
            "cell": CellId("tp1", "tp1-auto", "decode", "fib-256-c1"),
            "state": State.OK,
            "started": "2026-11-30T04:00:00Z",
            "ended": "2026-11-30T04:00:09Z",
            "fingerprint": {"driver": "595.71.05"},
            "fingerprint_id": "abc",
            "metrics": {"decode_tok_s": Estimate(26.4, 0.1, 0.2, 3, "tok/s")},
            **changes,
        }
    )


def test_a_record_comes_back_as_it_was():
    failure = Failure("server_died", "killed", ("last line",), "raise it", -9, "SIGKILL")
    for one in (record(), record(state=State.FAILED, metrics={}, failure=failure)):
        assert from_json(json.loads(json.dumps(one.as_json()))) == one


@pytest.mark.parametrize(
    "document", [None, [], {}, {"schema": "gpuctl.cell/1"}, {"schema": "gpuctl.cell/1", "failure": 3}]
)
def test_something_else_is_refused_with_one_kind_of_error(document):
    with pytest.raises(NotARecord):
        from_json(document)


def test_interval_of_a_known_sample():
    # 26.4, 26.5, 26.3: sd 0.1, t(2) = 4.303, 4.303 * 0.1 / sqrt(3)
    got = estimate([26.4, 26.5, 26.3], "tok/s")
    assert got.mean == pytest.approx(26.4)
    assert got.sd == pytest.approx(0.1)
    assert got.ci95 == pytest.approx(0.2484, abs=1e-4)


def test_one_value_has_no_spread():
    assert estimate([5.0], "ms") == Estimate(5.0, None, None, 1, "ms")


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_mean_and_deviation_agree_with_the_standard_library(values):
    got = estimate(values, "x")
    assert got.mean == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert got.sd == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-6)
