"""Result files of other load generators, as those tools wrote them (tests/foreign/README.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runfolders
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl import plugins
from gpuctl.records import State
from gpuctl.report import NotAResult, NotARun, compare_with, load_run, render, with_imported
from gpuctl.results.comparison import compare

FOREIGN = Path(__file__).parent / "foreign"
SGLANG, VLLM = FOREIGN / "sglang-0.5.16.jsonl", FOREIGN / "vllm-0.33.json"
GUIDELLM, AIPERF = FOREIGN / "guidellm-0.8.1.json", FOREIGN / "aiperf-0.13.0.json"


def metrics(file, point):
    (record,) = [r for r in with_imported(None, [file]).records if r.cell.point == point]
    return {name: e.mean for name, e in record.metrics.items()}


def test_sglang_bench_serving():
    got = metrics(SGLANG, "c8")
    assert got["output_tok_s"] == pytest.approx(330.31, abs=0.01)
    assert got["ttft_ms"] == pytest.approx(538.15, abs=0.01)
    assert got["e2e_ms"] == pytest.approx(1544.7, abs=0.1)
    assert got["prompt_tokens"] == 512
    run = with_imported(None, [SGLANG])
    assert {r.cell.server for r in run.records} == {"hybrid-27b 512/64"}
    assert "tokens asked for" in run.records[0].notes[0]


def test_vllm_bench_serve_with_several_runs_in_one_file():
    got = metrics(VLLM, "c8")
    assert got["output_tok_s"] == 381.02
    assert got["tpot_ms"] == 19.4
    assert got["acceptance_length"] == 2.84
    run = with_imported(None, [VLLM])
    assert [r.cell.point for r in run.records] == ["c1", "c8", "c32"]
    assert run.records[0].started == "2026-11-29T10:15:00"


def test_requests_that_failed_make_a_failed_cell_and_no_number():
    (record,) = [r for r in with_imported(None, [VLLM]).records if r.cell.point == "c32"]
    assert record.state is State.FAILED
    assert record.failure.summary == "3 of 64 requests failed"
    assert not record.metrics


def test_vllm_before_it_counted_failures(tmp_path):
    document = json.loads(VLLM.read_text().splitlines()[1])
    del document["failed"]
    document["completed"] = 60
    (tmp_path / "old.json").write_text(json.dumps(document))
    (record,) = with_imported(None, [tmp_path / "old.json"]).records
    assert record.failure.summary == "4 of 64 requests failed"


def test_guidellm():
    got = metrics(GUIDELLM, "c1")
    assert got["output_tok_s"] == pytest.approx(1530.0, abs=0.1)
    assert got["e2e_ms"] == pytest.approx(12.887, abs=0.001)  # the file has seconds
    assert got["itl_ms"] == pytest.approx(0.2751, abs=0.0001)
    assert "tpot_ms" not in got  # guidellm's counts the first token: another thing


def test_aiperf():
    got = metrics(AIPERF, "c2")
    assert got["output_tok_s"] == pytest.approx(578.18, abs=0.01)
    assert got["ttft_ms"] == pytest.approx(55.22, abs=0.01)
    assert got["completion_tokens"] == 24


def test_the_same_load_measured_again_is_a_repetition(tmp_path):
    lines = SGLANG.read_text().splitlines()
    again = json.loads(lines[0])
    again["output_throughput"] *= 1.02
    (tmp_path / "again.jsonl").write_text(json.dumps(again))
    (record,) = [r for r in with_imported(None, [SGLANG, tmp_path / "again.jsonl"]).records if r.cell.point == "c1"]
    assert record.metrics["output_tok_s"].n == 2
    assert record.metrics["output_tok_s"].ci95 > 0


def test_numbers_of_others_stand_beside_ours_and_are_never_compared(tmp_path):
    own = load_run(runfolders.small(tmp_path / "run"))
    run = with_imported(own, [SGLANG, AIPERF])
    text = render(run, "markdown").decode()
    assert "ours and other tools" in text
    assert "sglang.bench\\_serving: hybrid-27b 512/64" in text or "`sglang.bench_serving: hybrid-27b 512/64`" in text
    assert "measured by another tool" in text
    assert not compare(run, run).differences[len(compare(own, own).differences) :]
    assert {r.split(",")[-1] for r in render(run, "csv").decode().splitlines() if ",aiperf," in r} == {"yes"}
    with pytest.raises(NotARun, match="small has no other phase that gpuctl measured"):
        compare_with(run, "tp1")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b"[1, 2]", "line 1: no result of aiperf, guidellm, sglang.bench_serving, vllm bench serve"),
        (b'{"a": 1}\n{"backend": ', "line 1: no result"),
        (b'{"backend": ', "line 1: is not JSON"),
        (b"\xff", "is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path, data, why):
    file = tmp_path / "x.json"
    file.write_bytes(data)
    with pytest.raises(NotAResult, match=why):
        with_imported(None, [file])


def test_a_file_that_is_not_there_is_refused_in_one_line(tmp_path):
    with pytest.raises(NotAResult, match="No such file"):
        with_imported(None, [tmp_path / "no.json"])


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner), max_leaves=8
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([SGLANG, VLLM, GUIDELLM, AIPERF]), st.data())
def test_a_file_in_which_anything_was_changed_is_read_or_refused(tmp_path_factory, file, data):
    """Any part of a real file replaced by anything: records, or one line, never a traceback; and what is read renders."""
    document, _ = json.JSONDecoder().raw_decode(file.read_text())
    place = document
    for _ in range(data.draw(st.integers(1, 4))):
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(values)
        break
    changed = tmp_path_factory.mktemp("foreign") / "changed.json"
    changed.write_text(json.dumps(document))
    try:
        run = with_imported(None, [changed])
    except NotAResult:
        return
    for format in ("terminal", "markdown", "json", "csv", "latex"):
        render(run, format)


def test_each_tool_recognises_its_own_files_only():
    files = {"sglang": SGLANG, "vllm": VLLM, "guidellm": GUIDELLM, "aiperf": AIPERF}
    assert set(plugins.names("foreign")) == set(files)
    for name in files:
        for other, file in files.items():
            document, _ = json.JSONDecoder().raw_decode(file.read_text())
            assert plugins.get("foreign", name).recognise(document) is (name == other)


def test_a_comparison_with_numbers_of_others_alone_says_there_is_nothing(tmp_path):
    runfolders.small(tmp_path / "run")
    (comparison,) = compare_with(with_imported(None, [SGLANG]), str(tmp_path / "run"))
    assert not comparison.differences
