"""The numbers of a request and of a run, checked by hand where they can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.metrics import (
    METRICS,
    acceptance,
    itl_ms,
    of_gpus,
    percentile,
    repetition,
    request_metrics,
    steady_window,
    tokens,
    tokens_between,
)


def row(sent=10.0, chunks=(10.5, 10.6, 10.7, 10.8), running=(1, 2, 3, 4), total=4, **more):
    return {
        "t_request": sent,
        "t_chunks": list(chunks),
        "tokens": None if running is None else list(running),
        "usage": None if total is None else {"prompt_tokens": 100, "completion_tokens": total},
        "finish_reason": "length",
        "max_tokens": None,
        "error": None,
        **more,
    }


FAILED = row(chunks=(), running=None, total=None, error={"kind": "http_error", "message": "HTTP 500"})
SUMMARY = {"load_kept": 0.98, "rate": None}


def close(value):
    return pytest.approx(value, rel=1e-6)


def test_one_token_a_chunk():
    got = request_metrics(row())
    assert got["ttft_ms"] == close(500)
    assert got["e2e_ms"] == close(800)
    assert got["time_per_token_ms"] == close(100)
    assert got["tpot_ms"] == close(100)
    assert got["decode_tok_s"] == close(10)
    assert got["request_tok_s"] == close(5)
    assert (got["prompt_tokens"], got["completion_tokens"]) == (100, 4)
    assert got["prefill_tok_s"] == close(200)
    assert "acceptance_length" not in got


def test_several_tokens_in_the_first_chunk_do_not_flatter_the_time_per_token():
    # 4 tokens come at once, then 4 in 0.3 s: a token takes 75 ms. The customary TPOT divides by 7 and says 43.
    got = request_metrics(row(chunks=(10.5, 10.8), running=(4, 8), total=8))
    assert got["time_per_token_ms"] == close(75)
    assert got["tpot_ms"] == close(300 / 7)


def test_tokens_that_made_no_text_at_the_end_do_not_count_as_decoded_in_time():
    # The end-of-text token is in the final usage, and no chunk carried it.
    assert request_metrics(row(total=5))["time_per_token_ms"] == close(100)
    assert request_metrics(row(total=5))["completion_tokens"] == 5


def test_without_running_counts_the_first_chunk_is_one_token():
    got = request_metrics(row(running=None, total=31))
    assert got["time_per_token_ms"] == close(300 / 30)
    assert tokens(row(running=None, total=31)).source == "final_usage"


def test_a_failed_request_has_no_numbers():
    assert request_metrics(FAILED) == {}


def test_one_token_has_no_time_per_token():
    got = request_metrics(row(chunks=(10.5,), running=(1,), total=1))
    assert "time_per_token_ms" not in got
    assert "tpot_ms" not in got
    assert got["ttft_ms"] == close(500)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (None, "the server sent no usage"),
        (-5, "usage says -5 tokens"),
        (0, "usage says 0 tokens"),
        (10**30, "usage says 1000000"),
        ("12", "usage says '12' tokens"),
        (3.5, "usage says 3.5 tokens"),
        (True, "usage says True tokens"),
        (65, "usage says 65 tokens, at most 64 were asked for"),
    ],
)
def test_a_usage_nobody_can_believe_is_no_number(sent, words):
    bad = row(running=None, total=0, max_tokens=64)
    bad["usage"] = {"completion_tokens": sent, "prompt_tokens": sent}
    why = tokens(bad)
    assert isinstance(why, str)
    assert why.startswith(words)
    got = request_metrics(bad)
    assert "completion_tokens" not in got
    assert "decode_tok_s" not in got
    run = repetition([bad], SUMMARY)
    assert "output_tok_s" not in run.metrics
    assert any(words in note for note in run.notes)


def test_running_counts_that_contradict_themselves_are_not_used():
    for running in ((1, 3, 2, 4), (0, 1, 2, 3), (1, 2, 3, 9), (1, 2, None, 4)):
        assert tokens(row(running=running)).source == "final_usage"


def test_tokens_of_llama_cpp_come_from_its_timings():
    got = tokens(row(running=None, total=None, timings={"predicted_n": 16}))
    assert got.total == 16


def test_inter_token_latency_is_shared_by_the_tokens_of_a_chunk():
    assert itl_ms(row(chunks=(10.5, 10.6, 10.9), running=(1, 2, 5), total=5)) == close([100, 100, 100, 100])
    assert itl_ms(row(running=None)) is None


def test_a_chunk_that_adds_no_token_lends_its_gap_to_the_next():
    assert itl_ms(row(chunks=(10.5, 10.6, 10.7), running=(1, 1, 2), total=2)) == close([200])


def test_cached_tokens_are_not_prefilled():
    one = row()
    one["usage"]["prompt_tokens_details"] = {"cached_tokens": 60}
    assert request_metrics(one)["cached_tokens"] == 60
    assert request_metrics(one)["prefill_tok_s"] == close(80)
    one["usage"]["prompt_tokens_details"] = {"cached_tokens": 101}  # of a prompt of 100
    assert "cached_tokens" not in request_metrics(one)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, None),
        ({"spec": {"spec_accept_length": 3.2, "spec_verify_ct": 9}}, (3.2, "spec")),
        ({"spec": {"spec_verify_ct": 2}}, (2.0, "spec")),
        ({"spec": {"spec_accept_length": "many"}}, None),
        ({"timings": {"predicted_n": 64, "draft_n": 60, "draft_n_accepted": 32}}, (2.0, "timings")),
        ({"timings": {"predicted_n": 64, "draft_n": 60, "draft_n_accepted": 0}}, (1.0, "timings")),
        ({"timings": {"predicted_n": 4, "draft_n_accepted": 9}}, None),
    ],
)
def test_acceptance_length_and_where_it_is_from(more, expected):
    assert acceptance(row(**more)) == expected


def test_requests_in_which_nothing_was_accepted_count_in_the_mean_acceptance_length():
    good = row(chunks=(10.5, 10.6, 10.7), running=(1, 9, 17), total=17)
    assert repetition([good, row()], SUMMARY).metrics["acceptance_length"] == close((8 + 1) / 2)
    assert "acceptance_length" not in repetition([row(), row()], SUMMARY).metrics


def test_acceptance_length_from_chunks_only_when_they_hold_several_tokens():
    assert acceptance(row(chunks=(10.5, 10.6, 10.7), running=(1, 9, 17), total=17)) == (8.0, "chunks")
    assert acceptance(row()) is None


def test_a_run_of_two_streams():
    rows = [
        row(10.0, (10.5, 10.6, 10.7, 10.8), (1, 2, 3, 4), 4),
        row(10.0, (10.6, 10.8, 11.0), (1, 2, 3), 3),
        FAILED,
    ]
    run = repetition(rows, SUMMARY)
    assert (run.requests, run.failed, run.errors) == (3, 1, {"http_error": 1})
    assert run.wall_s == close(1.0)
    assert run.metrics["output_tok_s"] == close(7)
    assert run.metrics["requests_s"] == close(2)
    assert run.metrics["ttft_ms"] == close(550)
    assert run.metrics["ttft_p50_ms"] == close(550)
    assert run.metrics["load_kept"] == 0.98
    assert run.finish_reasons == {"length": 2}
    assert run.sources == {"tokens": "continuous_usage", "prefill_tok_s": "ttft"}
    # Both run from 10.6 (the later first chunk) to 10.8 (the earlier end): 2 tokens of the one, 1 of the other.
    assert steady_window(rows) == close((10.6, 10.8))
    assert run.metrics["steady_output_tok_s"] == close(3 / 0.2)


def test_the_tail_of_a_closed_loop_is_not_in_the_steady_window():
    # Two at a time: a and b, then c after a; b ends last, alone for most of its time.
    rows = [
        row(0.0, (0.1, 0.9, 1.0)),
        row(0.0, (0.2, 2.0, 5.0)),
        row(1.0, (1.1, 1.5, 2.0)),
    ]
    assert steady_window(rows) == (0.2, 2.0)


def test_a_steady_window_of_an_open_loop_ends_with_the_arrivals():
    rows = [row(0.0, (0.5, 1.0)), row(1.0, (1.5, 2.0)), row(2.0, (2.5, 9.0))]
    assert steady_window(rows, open_loop=True) == (0.5, 2.0)


def test_a_generator_that_reads_later_than_chunks_come_says_so():
    calm, late = (
        {"lag_ms": {"p50": 0.1, "p99": 3.0, "max": 900.0}},
        {"lag_ms": {"p50": 0.1, "p99": 150.0, "max": 900.0}},
    )
    assert repetition([row()], calm).notes == ()
    assert "chunks came every 100.00 ms and were read up to 150.00 ms late (p99)" in repetition([row()], late).notes[0]
    assert repetition([row()], {"lag_ms": None}).notes == ()


def test_one_stream_that_was_held_back_for_a_while_does_not_rule_the_mean_speed():
    """Three streams of 10 tokens a second, and one whose last chunks came together: it seems to have made 1000."""
    rows = [row(), row(), row(), row(chunks=(10.797, 10.798, 10.799, 10.8))]
    assert repetition(rows, SUMMARY).metrics["decode_tok_s"] == close(1000 / (3 * 100 + 1) * 4)


def test_an_answer_that_was_read_in_one_go_has_no_speed():
    at_once = row(chunks=(10.8, 10.800001, 10.800002, 10.800003))
    assert not {"time_per_token_ms", "decode_tok_s", "tpot_ms"} & set(request_metrics(at_once))
    assert request_metrics(at_once)["e2e_ms"] == close(800.003)
    run = repetition([row(), at_once], SUMMARY)
    assert run.metrics["decode_tok_s"] == close(10)
    assert "itl_ms" not in run.metrics
    assert run.notes == ("1 of 2 answers were held back on the way and read at once: their speed is lost",)


def test_when_everything_failed_there_are_no_numbers():
    run = repetition([FAILED, FAILED], {"load_kept": 1.0})
    assert (run.requests, run.failed, run.wall_s) == (2, 2, 0.0)
    assert set(run.metrics) == {"load_kept"}


def test_every_metric_is_in_the_table_with_its_unit():
    one = row(spec={"spec_accept_length": 2})
    one["usage"]["prompt_tokens_details"] = {"cached_tokens": 3}
    run = repetition([one, row(11.0, (11.4, 11.5, 11.6, 12.7))], SUMMARY)
    gpus = of_gpus({"gpu_power_w": 500.0, "gpu_memory_bytes": 80e9}, run.metrics)
    assert set(run.metrics) | set(gpus) == set(METRICS)
    for name, metric in METRICS.items():
        assert name.endswith("_ms") == (metric.unit == "ms")
        assert name.endswith("tok_s") == (metric.unit == "tok/s")


def test_percentiles_are_those_of_numpy():
    # numpy.percentile([1, 2, 3, 4, 10], [50, 90, 99]) = 3, 7.6, 9.76
    assert [percentile([10, 1, 3, 2, 4], share) for share in (0.5, 0.9, 0.99)] == close([3, 7.6, 9.76])
    assert percentile([5], 0.99) == 5


anything = st.none() | st.integers(-5, 10**20) | st.floats() | st.text("1a", max_size=3) | st.booleans()
stamps = st.lists(st.floats(0.001, 100), min_size=0, max_size=6)


@st.composite
def rows(draw):
    gaps = draw(stamps)
    sent = draw(st.floats(0, 1000))
    chunks, at = [], sent
    for gap in gaps:
        at += gap
        chunks.append(at)
    usage = draw(st.none() | st.dictionaries(st.sampled_from(["completion_tokens", "prompt_tokens"]), anything))
    details = draw(st.none() | st.dictionaries(st.just("cached_tokens"), anything))
    if usage is not None:
        usage["prompt_tokens_details"] = details
    names = ["predicted_n", "prompt_n", "prompt_ms", "draft_n_accepted", "cache_n"]
    return {
        "t_request": sent,
        "t_chunks": chunks,
        "tokens": draw(st.none() | st.lists(anything, max_size=6) | st.just(list(range(1, len(chunks) + 1)))),
        "usage": usage,
        "timings": draw(st.none() | st.dictionaries(st.sampled_from(names), anything)),
        "spec": draw(st.none() | st.dictionaries(st.sampled_from(["spec_accept_length", "spec_verify_ct"]), anything)),
        "finish_reason": draw(anything),
        "max_tokens": draw(anything),
        "error": draw(st.none() | st.just({"kind": "cut", "message": ""})),
    }


@given(st.lists(rows(), max_size=6), st.booleans())
def test_whatever_a_server_sent_gives_numbers_or_none(some, open_loop):
    run = repetition(some, {"load_kept": 1.0, "rate": 3.0 if open_loop else None})
    assert run.requests == len(some)
    assert 0 <= run.failed <= run.requests
    assert sum(run.errors.values()) == run.failed
    assert set(run.metrics) <= set(METRICS)
    for name, value in run.metrics.items():
        assert value >= 0, name
        assert value == value, name


@given(rows(), st.floats(0, 2000))
def test_tokens_of_two_parts_are_the_tokens_of_the_whole(one, cut):
    made = tokens(one)
    if isinstance(made, str) or not one["t_chunks"]:
        return
    parts = tokens_between(one, -1, cut) + tokens_between(one, cut, 1e9)
    assert parts == pytest.approx(tokens_between(one, -1, 1e9))
