"""What a report says: speed-ups, what cannot be told apart, budgets, rooflines, energy, interruptions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import runfolders

from gpuctl.document.blocks import Figure, Listing, Table
from gpuctl.document.outline import report
from gpuctl.document.wording import interval
from gpuctl.records import Estimate, State, estimate
from gpuctl.report import load_run
from gpuctl.results.run import Run, Server, derived, flag, metric, roofline_share
from gpuctl.results.timeline import interruptions


def folder(tmp_path, servers, baseline=None):
    f = runfolders.Folder(tmp_path / "run")
    f.phase("tp1", "TP1", {name: runfolders.argv(1) for name in servers}, baseline)
    return f


def decode(f, server, speed, *, phase="tp1", prompt="fib", length=256, noise=0.001, **more):
    parameters = {"prompt": prompt, "max_tokens": length}
    return f.cell(
        phase, server, "decode", f"{prompt}-{length}", parameters, {"decode_tok_s": speed}, noise=noise, **more
    )


def tables(run):
    return {block.id: block for block in report(run).document.walk() if isinstance(block, Table)}


def row(table, name):
    return next(row for row in table.rows if row[0].text == name)


def test_the_best_is_bold_with_what_cannot_be_told_apart_from_it(tmp_path):
    f = folder(tmp_path, ["tp1-a", "tp1-b", "tp1-c"])
    decode(f, "tp1-a", 100.0, noise=0.02)
    decode(f, "tp1-b", 100.5, noise=0.02)
    decode(f, "tp1-c", 50.0)
    table = tables(load_run(f.close()))["tp1-decode-256-tokens"]
    assert [row(table, name)[1].strong for name in ("tp1-a", "tp1-b", "tp1-c")] == [True, True, False]


def test_a_server_measured_with_another_length_is_in_another_table(tmp_path):
    f = folder(tmp_path, ["tp1-a", "tp1-b"])
    f.cell("tp1", "tp1-a", "decode", "fib", {"prompt": "fib", "max_tokens": 256}, {"decode_tok_s": 10.0})
    f.cell("tp1", "tp1-b", "decode", "fib", {"prompt": "fib", "max_tokens": 512}, {"decode_tok_s": 20.0})
    found = tables(load_run(f.close()))
    assert [r[0].text for r in found["tp1-decode-256-tokens"].rows] == ["tp1-a"]
    assert [r[0].text for r in found["tp1-decode-512-tokens"].rows] == ["tp1-b"]


@pytest.mark.parametrize(
    ("baseline", "named", "expected"),
    [(None, None, "tp1-auto"), ("tp1-b", None, "tp1-b"), ("tp1-b", "tp1-c", "tp1-c"), ("tp1-b", "c", "tp1-c")],
)
def test_speedups_are_against_the_baseline_that_was_asked_for(tmp_path, baseline, named, expected):
    f = folder(tmp_path, ["tp1-auto", "tp1-b", "tp1-c"], baseline)
    for server, speed in (("tp1-auto", 10.0), ("tp1-b", 20.0), ("tp1-c", 40.0)):
        decode(f, server, speed)
    run = load_run(f.close(), baseline=named)
    assert run.baseline_of("tp1") == expected
    table = tables(run)["tp1-decode-256-tokens-speedup"]
    assert expected in table.notes[0]
    assert expected not in {r[0].text for r in table.rows}


def test_no_baseline_no_speedups(tmp_path):
    f = folder(tmp_path, ["tp1-a", "tp1-b"])
    decode(f, "tp1-a", 10.0)
    decode(f, "tp1-b", 20.0)
    assert "tp1-decode-256-tokens-speedup" not in tables(load_run(f.close()))


def test_two_kinds_of_budgets_are_two_curves(tmp_path):
    names = [f"tp1-{kind}-b{n}" for kind in ("ddtree", "other") for n in (16, 8)]
    f = folder(tmp_path, names)
    for i, name in enumerate(names):
        decode(f, name, 100.0 + i)
    found = tables(load_run(f.close()))
    for kind in ("ddtree", "other"):
        assert [r[0].text for r in found[f"tp1-{kind}-budget"].rows] == ["8", "16"]


def test_every_number_of_a_figure_is_in_its_table(tmp_path):
    document = report(load_run(runfolders.example(tmp_path / "run"))).document
    blocks = list(document.walk())
    by_id = {block.id: block for block in blocks if isinstance(block, Table)}
    figures = [block for block in blocks if isinstance(block, Figure)]
    assert len(figures) > 15
    anywhere = {cell.text.partition(" ")[0] for table in by_id.values() for cells in table.rows for cell in cells}
    for figure in figures:
        if figure.kind == "timeline":  # its numbers are moments: the next test
            continue
        texts = {cell.text.partition(" ")[0] for cells in by_id[figure.table].rows for cell in cells}
        for series in figure.series:
            for point in series.points:
                assert f"{point.y:.1f}" in texts, (figure.id, series.name, point)
                if figure.kind == "path":  # what was measured is across as well
                    assert f"{point.x:.1f}" in anywhere, (figure.id, series.name, point)


def test_the_timeline_draws_what_its_tables_say(tmp_path):
    blocks = list(report(load_run(runfolders.example(tmp_path / "run"))).document.walk())
    (figure,) = (b for b in blocks if isinstance(b, Figure) and b.kind == "timeline")
    said = {b.id: [c.below for row in b.rows for c in row] for b in blocks if isinstance(b, Table)}
    drawn = {series.name: series.points for series in figure.series}
    assert [p.label for p in drawn["stopped or away"]] == ["no. 1", "no. 2"]
    assert [p.label for p in drawn["healed"]] == ["no. 2"]
    for point in drawn["measured"]:
        assert {f"after {point.x:.1f} min", f"after {point.x + point.y:.1f} min"} <= set(said["stretches"])
    for point in drawn["stopped or away"]:
        assert f"after {point.x:.1f} min" in said[figure.table]
    # a stretch ends where the run was interrupted
    for stop in drawn["stopped or away"]:
        assert not [p for p in drawn["measured"] if p.x < stop.x < p.x + p.y]


def test_without_an_interruption_there_is_no_timeline(tmp_path):
    f = folder(tmp_path, ["tp1-a"])
    f.event("run_started")
    decode(f, "tp1-a", 100.0)
    f.event("run_finished")
    assert not {"interruptions", "stretches"} & set(tables(load_run(f.close())))


def test_a_roofline_that_is_exceeded_or_far_away_is_marked(tmp_path):
    f = folder(tmp_path, ["tp1-a", "tp1-b", "tp1-c"])
    for name in ("tp1-a", "tp1-b", "tp1-c"):
        f.campaign["servers"][name]["roofline_tok_s"] = 32.2
    for name, speed in (("tp1-a", 26.4), ("tp1-b", 40.0), ("tp1-c", 5.0)):
        decode(f, name, speed)
    table = tables(load_run(f.close()))["tp1-decode-256-tokens-roofline"]
    assert [(r[1].text, r[1].mark) for r in table.rows] == [("82 %", ""), ("124 %", "▲"), ("16 %", "▼")]


def test_speculation_may_go_beyond_the_roofline_by_its_acceptance_length(tmp_path):
    f = folder(tmp_path, ["tp1-a"])
    record = f.record("tp1", "tp1-a", "decode", "x", {}, {"decode_tok_s": 96.6, "acceptance_length": 3.0}, noise=0)
    assert roofline_share(record, Server("tp1", "tp1-a", roofline_tok_s=32.2)) == pytest.approx(1.0)
    assert roofline_share(record, Server("tp1", "tp1-a")) is None


def test_energy_per_token_is_power_by_throughput_repetition_by_repetition(tmp_path):
    f = folder(tmp_path, ["tp1-a"])
    record = f.record("tp1", "tp1-a", "decode", "x", {}, {"gpu_power_w": 400.0, "output_tok_s": 100.0}, noise=0.05)
    got = derived(record).metrics["energy_per_token_j"]
    each = [rep["metrics"]["gpu_power_w"] / rep["metrics"]["output_tok_s"] for rep in record.reps]
    assert got == estimate(each, "J")


def test_an_unstable_cell_is_marked_and_never_the_best(tmp_path):
    f = folder(tmp_path, ["tp1-a", "tp1-b"])
    decode(f, "tp1-a", 200.0, state=State.UNSTABLE)
    decode(f, "tp1-b", 100.0)
    run = load_run(f.close())
    table = tables(run)["tp1-decode-256-tokens"]
    assert row(table, "tp1-a")[1].mark == "‡"
    assert not row(table, "tp1-a")[1].strong
    assert tables(run)["best"].rows[0][2].text == "tp1-b"


def test_a_server_that_changed_under_way_is_said(tmp_path):
    f = folder(tmp_path, ["tp1-a"])
    decode(f, "tp1-a", 100.0)
    f.fingerprint["machine"] = {**f.fingerprint["machine"], "driver": "610.1"}
    decode(f, "tp1-a", 100.0, prompt="qsort")
    warnings = [b.text for b in report(load_run(f.close())).document.walk() if getattr(b, "warning", False)]
    assert len(warnings) == 1
    assert "tp1/tp1-a was not the same for all its cells: machine.driver 595.71.05 -> 610.1" in warnings[0]


# --- events ---


def events(*names):
    return [{"t": f"2026-11-30T04:00:{i:02d}Z", "event": name, "server": "s"} for i, name in enumerate(names)]


@pytest.mark.parametrize(
    ("names", "unfinished"),
    [
        ((), False),
        (("run_started",), True),
        (("run_started", "cell_done", "run_finished"), False),
        (("server_started", "server_ready", "cell_done"), True),
        (("run_finished", "server_started", "cell_done"), True),
        (("run_finished", "orphan_stopped"), False),
        (("run_started", "cell_done", "run_started", "cell_done", "run_finished"), False),
    ],
)
def test_a_run_is_unfinished_when_its_last_work_was_not_ended(names, unfinished):
    assert (Run("x", events=tuple(events(*names))).unfinished is not None) is unfinished


def test_a_machine_that_went_away_is_back_when_it_was_healed():
    (stop,) = interruptions(events("run_started", "machine_away", "machine_back", "healed", "healed", "cell_done"))
    assert (stop.start[-3:], stop.end[-3:]) == ("01Z", "04Z")
    assert len(stop.healed) == 2


def test_a_machine_that_did_not_come_back_is_not_over():
    (stop,) = interruptions(events("run_started", "machine_away"))
    assert stop.end == ""


def test_a_killed_gpuctl_is_an_interruption():
    (stop,) = interruptions(events("run_started", "cell_done", "run_started", "cell_done", "run_finished"))
    assert stop.what == "gpuctl was interrupted"
    assert (stop.start[-3:], stop.end[-3:]) == ("01Z", "02Z")


# --- small parts ---


def test_the_value_of_a_flag():
    assert flag(["--tp", "4", "--tp=8"], "--tp") == "8"
    assert flag(["--x"], "--tp") is None
    assert flag(["--tp"], "--tp") == ""


def test_a_metric_that_nobody_described_is_judged_by_its_unit():
    assert metric("new_tok_s", "tok/s").better == 1
    assert metric("new_ms", "ms").better == -1
    assert metric("new_count", "tokens").better == 0


def test_a_figure_that_is_not_known_of_a_measured_cell_is_no_failure(tmp_path):
    """A short repetition has no power reading; the baseline does not speculate."""
    f = folder(tmp_path, ["tp1-auto", "tp1-b"], "tp1-auto")
    f.cell("tp1", "tp1-auto", "decode", "fib-256", {"prompt": "fib", "max_tokens": 256},
           {"decode_tok_s": 26.0, "energy_per_token_j": 2.0})  # fmt: skip
    f.cell("tp1", "tp1-auto", "decode", "qsort-256", {"prompt": "qsort", "max_tokens": 256}, {"decode_tok_s": 26.0})
    f.cell("tp1", "tp1-b", "decode", "fib-256", {"prompt": "fib", "max_tokens": 256}, {"decode_tok_s": 50.0})
    table = tables(load_run(f.close()))["tp1-decode-256-tokens-energy-per-token-j"]
    known, unknown = row(table, "tp1-auto")[1:]
    assert (known.text[:2], unknown.text) == ("2.", "–")
    assert "failed" not in str(table)


def test_flags_that_count_tokens_are_no_secrets(tmp_path):
    f = runfolders.Folder(tmp_path / "run")
    argv = ["serve", "--speculative-num-draft-tokens", "16", "--tokenizer-path", "/models/t", "--hf-token", "hf_1"]
    f.phase("tp1", "TP1", {"tp1-a": argv})
    decode(f, "tp1-a", 26.0)
    lines = [line for block in report(load_run(f.close())).document.walk() for line in getattr(block, "lines", ())]
    assert "serve --speculative-num-draft-tokens 16 --tokenizer-path /models/t --hf-token '(hidden)'" in lines


def test_gpus_that_are_alike_are_one_column(tmp_path):
    f = folder(tmp_path, ["tp1-a"])
    card = {"model": "NVIDIA RTX PRO 6000", "power.limit": "600.00"}
    places = [f"0000:{n:02x}:00.0" for n in range(8)]
    gpus = {place: {**card, "uuid": f"GPU-{place}"} for place in places}
    gpus[places[5]]["power.limit"] = "450.00"
    decode(f, "tp1-a", 26.0, foreign_fingerprint={"machine": {"driver": "595", "gpus": gpus}})
    found = tables(load_run(f.close()))
    assert [column.title for column in found["cards"].columns] == ["Part", "7 GPUs", "1 GPU"]
    assert [cell.text for cell in row(found["cards"], "Power limit (W)")] == ["Power limit (W)", "600", "450"]
    assert [r[2].text for r in found["card-identities"].rows] == ["1"] * 5 + ["2"] + ["1"] * 2
    assert [r[0].text for r in found["machine"].rows if "gpus" in r[0].text] == []


def test_phases_that_nobody_ran_are_named_and_nothing_else_is_said_of_them(tmp_path):
    f = folder(tmp_path, ["tp1-a"])
    f.phase("tp8", "TP8", {"tp8-a": runfolders.argv(8)})
    decode(f, "tp1-a", 26.0)
    made = report(load_run(f.close())).document
    assert "Not measured: tp8." in made.summary
    assert "tp8-a" not in str(made.sections)


def test_each_phase_has_the_command_that_repeats_it(tmp_path):
    f = folder(tmp_path, ["tp1-a"])
    f.campaign["phases"]["tp1"]["command"] = ["gpuctl", "bench", "tp1", "-i", "my inventory"]
    decode(f, "tp1-a", 26.0)
    lines = [line for block in report(load_run(f.close())).document.walk() for line in getattr(block, "lines", ())]
    assert "gpuctl bench tp1 -i 'my inventory'" in lines


def test_the_commands_to_repeat_a_run_are_those_that_were_given(tmp_path):
    """With what they left out: the report of a part does not say that the whole phase repeats it."""
    f = folder(tmp_path, ["tp1-a"])
    f.phase("tp4", "TP4", {"tp4-a": runfolders.argv(4)})
    f.campaign["phases"]["tp1"]["command"] = ["gpuctl", "bench", "tp1", "--fresh"]
    f.campaign["phases"]["tp4"]["command"] = ["gpuctl", "bench", "tp4"]  # its starts do not say how: an older gpuctl's
    part = ["gpuctl", "bench", "tp1", "-t", "ct200", "--only", "tp1-a/decode/*"]
    f.event("run_started", phase="tp4")
    f.event("run_started", phase="tp1", command=part)
    f.event("run_started", phase="tp1", command=part)  # it went on
    f.event("run_started", phase="tp1", command=["gpuctl", "bench", "tp1", "--api-key", "s3cr3t"])
    f.event("run_started", phase="tp1", command="not a list")
    f.event("run_started", phase=["nor"], command={"this": "one"})
    decode(f, "tp1-a", 26.0)
    decode(f, "tp4-a", 71.0, phase="tp4")
    run = load_run(f.close())
    assert run.commands[:2] == [["gpuctl", "bench", "tp4"], part]
    document = report(run).document
    (lines,) = [b.lines for b in document.walk() if isinstance(b, Listing) and b.caption.startswith("The campaign")]
    assert lines == (
        "gpuctl bench tp4",
        "gpuctl bench tp1 -t ct200 --only 'tp1-a/decode/*'",
        "gpuctl bench tp1 --api-key '(hidden)'",
        "not a list",
    )
    assert "s3cr3t" not in str(document)
    assert "run started: tp1 (command gpuctl bench tp1 -t ct200 --only 'tp1-a/decode/*')" in str(document)


@pytest.mark.parametrize(("baseline", "said"), [("tp1-0", "the baseline and the best"), (None, "the best")])
def test_a_figure_of_many_servers_says_which_it_shows(tmp_path, baseline, said):
    names = [f"tp1-{i}" for i in range(9)]
    f = folder(tmp_path, names, baseline)
    for i, name in enumerate(names):
        decode(f, name, 20.0 + i)
    (figure,) = (b for b in report(load_run(f.close())).document.walk() if isinstance(b, Figure))
    assert figure.caption == f"Decode speed per request, 256 tokens: {said} of 9 servers"
    assert ("tp1-0" in {series.name for series in figure.series}) == (baseline is not None)


def test_a_factor_without_an_interval_says_why(tmp_path):
    f = folder(tmp_path, ["tp1-auto", "tp1-a"])
    decode(f, "tp1-auto", 26.0)
    decode(f, "tp1-a", 52.0)
    decode(f, "tp1-a", 52.0, prompt="qsort")
    f.save(
        replace(decode(f, "tp1-auto", 26.0, prompt="qsort"), metrics={"decode_tok_s": estimate([1, 2, 99], "tok/s")})
    )
    table = tables(load_run(f.close()))["tp1-decode-256-tokens-speedup"]
    (cells,) = table.rows
    assert [cell.text.endswith("×") for cell in cells[1:]] == [True, True]
    assert [bool(cell.below) for cell in cells[1:]] == [True, False]
    assert "Without one: measured once, or against a number that scatters" in table.notes[0]


def test_the_ends_of_an_interval_have_the_decimals_of_its_mean():
    assert interval(Estimate(15.7, 6.4, 15.921, 3, "ms")) == "[-0.2, 31.6]"
    assert interval(Estimate(0.594, 0.002, 0.00531, 3, "J")) == "[0.589, 0.599]"
    assert interval(Estimate(2048.0**3, 0.0, 1024.0, 3, "bytes")) == "[8.0 GiB, 8.0 GiB]"
    assert interval(Estimate(3e12, 1.0, 3e12, 3, "ms")) == "[0.0, 6e+12]"


def test_what_a_server_can_hold_is_as_it_said_itself(tmp_path):
    f = folder(tmp_path, ["tp1-a"])
    record = decode(f, "tp1-a", 26.0)
    said = {"context": 32768, "requests_at_once": 4, "ready_s": 62.04,
            "capacity": {"kv_tokens": 69343, "kv_bytes": 4552665334, "state_bytes": "much"}}  # fmt: skip
    f.save(replace(record, server=said))
    table = tables(load_run(f.close()))["capacities"]
    assert [column.title for column in table.columns] == ["Server", "Context", "At once", "KV cache", "KV memory",
                                                          "Ready after"]  # fmt: skip
    assert [cell.text for cell in row(table, "tp1-a")[1:]] == ["32768", "4", "69343", "4.2 GiB", "62.0"]
