"""Comparing campaigns: intervals that are right, and verdicts that do not fool."""

from __future__ import annotations

import math

import pytest
import runfolders
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.records import CellId, Estimate, Failure, Record, State, estimate
from gpuctl.report import NotARun, compare_with, load_run, render
from gpuctl.results.comparison import Outcome, Verdict, compare, gate
from gpuctl.results.intervals import change_percent, difference, improvement, ratio
from gpuctl.results.provenance import words
from gpuctl.results.run import Run

FINGERPRINT = {"driver": "580.1", "model": {"name": "m"}, "workload": {"prompt": "fib"}, "load_agent": "1"}


def record(values, *, point="fib-256", server="s", state=State.OK, workload="decode", metric="decode_tok_s", **more):
    fingerprint = more.get("fingerprint", FINGERPRINT)
    metrics = {metric: estimate(values, more.get("unit", "tok/s"))} if values else {}
    return Record(CellId("p", server, workload, point), state, "2026", "2026", fingerprint, str(fingerprint),
                  metrics=metrics, failure=more.get("failure"))  # fmt: skip


def runs(new, old):
    return Run("new", (new,)), Run("old", (old,))


def compared(new, old, **options):
    return compare(*runs(new, old), **options)


# --- intervals ---


def test_welchs_interval_of_a_known_pair():
    # Means 10.5 and 20; variances 1.6667 / 4 and 4 / 3; Welch-Satterthwaite gives 3.2 degrees, rounded down to 3.
    a, b = estimate([9.0, 10.0, 11.0, 12.0], "x"), estimate([18.0, 20.0, 22.0], "x")
    got = difference(b, a)
    assert got.value == pytest.approx(9.5)
    assert got.high - got.value == pytest.approx(3.182 * math.sqrt(5 / 12 + 4 / 3), rel=1e-3)


def test_fiellers_interval_of_a_known_pair():
    # By hand from (m1 - r m2)^2 = t^2 (v1 + r^2 v2), at both ends.
    a, b = estimate([100.0, 102.0, 98.0], "x"), estimate([25.0, 26.0, 24.0], "x")
    got = ratio(a, b)
    v1, v2 = 4 / 3, 1 / 3
    t = 4.303  # Welch-Satterthwaite gives 2.94 degrees, rounded down to 2
    for end in (got.low, got.high):
        assert (100 - end * 25) ** 2 == pytest.approx(t * t * (v1 + end * end * v2))


def test_a_single_value_has_no_interval():
    assert not difference(estimate([1.0], "x"), estimate([2.0, 2.1], "x")).known
    assert not ratio(estimate([1.0], "x"), estimate([2.0, 2.1], "x")).known


def test_a_ratio_to_nothing_means_nothing():
    assert ratio(estimate([1.0, 2.0], "x"), estimate([0.0, 0.0], "x")) is None


def test_less_is_better_for_a_latency():
    assert improvement(estimate([50.0], "ms"), estimate([100.0], "ms"), -1).value == 2


estimates = st.builds(
    lambda mean, sd, n: Estimate(mean, sd if n > 1 else None, None, n, "x"),
    st.floats(-1e12, 1e12),
    st.floats(0, 1e12),
    st.integers(1, 40),
)


@given(estimates, estimates)
def test_intervals_hold_their_value_and_are_finite(a, b):
    for got in (difference(a, b), ratio(a, b), change_percent(a, b)):
        if got is not None and got.known:
            slack = 1e-6 * (1 + abs(got.value))
            assert got.low - slack <= got.value <= got.high + slack
            assert math.isfinite(got.low)
            assert math.isfinite(got.high)


@given(st.lists(st.floats(1, 1000), min_size=2, max_size=9), st.floats(0.01, 100))
def test_a_factor_is_found_again(values, factor):
    e = estimate(values, "x")
    assert ratio(estimate([v * factor for v in values], "x"), e).value == pytest.approx(factor)


# --- verdicts ---


def test_slower_by_more_than_the_noise_is_worse():
    c = compared(record([90.0, 90.5, 89.5]), record([100.0, 100.5, 99.5]))
    assert [d.verdict for d in c.differences] == [Verdict.WORSE]
    assert gate(c, 5).outcome is Outcome.REGRESSED
    assert gate(c, 15).outcome is Outcome.PASSED
    assert "-10.0 %" in gate(c, 5).reasons[0]


def test_a_longer_time_to_first_token_is_worse():
    options = {"workload": "context", "metric": "ttft_ms", "unit": "ms"}
    c = compared(record([110.0, 110.1, 109.9], **options), record([100.0, 100.1, 99.9], **options))
    assert [d.verdict for d in c.differences] == [Verdict.WORSE]
    assert gate(c, 5).outcome is Outcome.REGRESSED


def test_a_real_change_inside_the_noise_band_is_none():
    c = compared(record([99.0, 99.01, 98.99]), record([100.0, 100.01, 99.99]))
    assert [d.verdict for d in c.differences] == [Verdict.SAME]
    assert compared(record([99.0, 99.01, 98.99]), record([100.0, 100.01, 99.99]), noise_percent=0.5).differences[
        0
    ].verdict is Verdict.WORSE  # fmt: skip


def test_a_large_change_that_could_be_chance_is_unclear_and_does_not_pass():
    c = compared(record([70.0, 110.0, 90.0]), record([100.0, 130.0, 75.0]))
    assert [d.verdict for d in c.differences] == [Verdict.UNCLEAR]
    assert gate(c, 5).outcome is Outcome.UNDECIDED


def test_what_was_measured_once_is_unclear():
    c = compared(record([90.0]), record([100.0]))
    assert [d.verdict for d in c.differences] == [Verdict.UNCLEAR]
    assert gate(c, 5).outcome is Outcome.UNDECIDED
    assert gate(c, 12).outcome is Outcome.PASSED


def test_a_cell_that_no_longer_has_a_number_is_a_regression():
    failed = record([], state=State.FAILED, failure=Failure("server_died", "killed"))
    got = gate(compared(failed, record([100.0, 101.0])), 5)
    assert got.outcome is Outcome.REGRESSED
    assert got.reasons == ("p/s/decode/fib-256 has no number now: killed",)
    assert gate(compared(record([100.0, 101.0]), failed), 5).outcome is Outcome.UNDECIDED  # nothing to compare


def test_nothing_in_common_does_not_pass():
    c = compared(record([1.0, 1.1]), record([1.0, 1.1], point="other"))
    assert gate(c, 5).outcome is Outcome.UNDECIDED
    assert c.only_new
    assert c.only_old


@pytest.mark.parametrize(
    ("part", "value"),
    [("workload", {"prompt": "other"}), ("load_agent", "2"), ("model", {"name": "another"})],
)
def test_cells_measured_in_another_way_are_not_compared_and_it_is_said_why(part, value):
    c = compared(record([90.0, 91.0], fingerprint={**FINGERPRINT, part: value}), record([100.0, 101.0]))
    assert not c.differences
    assert part in c.not_comparable[0][1]


def test_numbers_of_another_tool_are_not_compared():
    c = compared(record([90.0, 91.0], fingerprint={}), record([100.0, 101.0]))
    assert "no fingerprint" in c.not_comparable[0][1]


def test_capacity_is_not_compared_with_speed():
    c = compared(record([90.0, 91.0], state=State.CAPACITY_LIMITED), record([100.0, 101.0]))
    assert "limited by its capacity" in c.not_comparable[0][1]


# --- what differs, in words ---


def test_differences_are_said_in_words():
    old = {"driver": "580.1", "gpus": {"power_limit_w": 600}, "argv": ["serve", "--tp", "1", "--x"], "env": {"A": "1"}}
    new = {"driver": "595.7", "gpus": {"power_limit_w": 450}, "argv": ["serve", "--tp=4", "--y", "2"], "env": {}}
    assert words(old, new) == [
        "driver 580.1 -> 595.7",
        "gpus.power_limit_w 600 -> 450",
        "argv: --tp 1 -> 4",
        "argv: without --x",
        "argv: with --y 2",
        "env.A 1 (no longer there)",
    ]
    assert words(old, old) == []


def test_a_secret_that_changed_is_not_said():
    old = {"argv": ["--api-key", "sk-1"], "env": {"HF_TOKEN": "hf-1"}}
    new = {"argv": ["--api-key", "sk-2"], "env": {"HF_TOKEN": "hf-2"}}
    assert words(old, new) == ["argv: --api-key differs (hidden)", "env.HF_TOKEN differs (hidden)"]


def test_long_values_are_shown_where_they_differ():
    (said,) = words({"m": "a" * 200 + "1"}, {"m": "a" * 200 + "2"})
    assert len(said) < 100
    assert said.endswith("1 -> …" + "a" * 12 + "2")


# --- whole runs ---


def test_the_driver_of_two_campaigns_is_named_and_the_gate_decides(tmp_path):
    old = load_run(runfolders.small(tmp_path / "old"))
    new = load_run(runfolders.small(tmp_path / "new", faster=0.9, seed=2, driver="610.1"))
    (comparison,) = compare_with(new, str(tmp_path / "old"))
    assert comparison == compare(new, old)
    assert "machine.driver 595.71.05 -> 610.1" in comparison.conditions[0].words
    assert gate(comparison, 5).outcome is Outcome.REGRESSED
    assert b"driver 595.71.05 -&gt; 610.1" in render(new, "html", [comparison])
    assert b"machine.driver 595.71.05 -> 610.1" in render(new, "terminal", [comparison])


def test_the_same_campaign_twice_has_no_difference(tmp_path):
    run = load_run(runfolders.small(tmp_path / "run"))
    (comparison,) = compare_with(run, str(tmp_path / "run"))
    assert {d.verdict for d in comparison.differences} == {Verdict.SAME}
    assert gate(comparison, 1).outcome is Outcome.PASSED


def test_phases_and_servers_of_one_run(tmp_path):
    run = load_run(runfolders.example(tmp_path / "run"))
    phases = compare_with(run, "tp1")
    assert [(c.new, c.old) for c in phases] == [("tp4", "tp1"), ("tp8", "tp1")]
    assert phases[0].differences[0].change.value > 100
    for name in ("tp1-auto", "tp1/tp1-auto"):
        (servers,) = compare_with(run, name)
        assert {d.old.cell.server for d in servers.differences} == {"tp1-auto"}


def test_nothing_of_that_name_is_one_line(tmp_path):
    run = load_run(runfolders.small(tmp_path / "run"))
    with pytest.raises(NotARun, match=r"small has no phase or server of that name \(it has tp1, tp1-auto"):
        compare_with(run, "tp9")


def test_a_comparison_in_every_format_reads_as_it_always_did(tmp_path, golden):
    runfolders.small(tmp_path / "old")
    new = load_run(runfolders.small(tmp_path / "new", faster=0.9, seed=2, driver="610.1"))
    comparisons = compare_with(new, str(tmp_path / "old"))
    for format in ("terminal", "markdown"):
        golden(f"report/compared.{format}", render(new, format, comparisons).decode())
