"""What is in a run folder comes out as a report; what is damaged there is named and left out."""

from __future__ import annotations

import json
import os
import re

import pytest
import runfolders

from gpuctl.records import CellId, Failure, Record, State, estimate
from gpuctl.report import NoSuchFormat, NotARun, formats, load_run, render
from gpuctl.reports import terminal
from gpuctl.results.run import Run, Server
from gpuctl.store import Run as Store
from gpuctl.store import StoreError

WITHOUT_LATEX = [format for format in formats() if format != "pdf"]


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    return runfolders.example(tmp_path_factory.mktemp("run") / "example")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return runfolders.small(tmp_path_factory.mktemp("run") / "small")


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    return runfolders.strange(tmp_path_factory.mktemp("run") / "strange")


def cell(point="fib-256", state=State.OK, values=(140.6, 141.6, 139.6), **more):
    metrics = {"decode_tok_s": estimate(values, "tok/s")} if values else {}
    parameters = {"prompt": point.partition("-")[0], "max_tokens": 256, "concurrency": 1}
    return Record(CellId("tp1", "tp1-linear", "decode", point), state, "2026-11-30T04:00:00Z", "2026-11-30T04:00:09Z",
                  {"driver": "595"}, "id", metrics=metrics, parameters=parameters, **more)  # fmt: skip


# --- faces ---


@pytest.mark.parametrize("format", ["terminal", "markdown", "html"])
@pytest.mark.parametrize("which", ["small", "strange"])
def test_report_reads_as_it_always_did(request, golden, which, format):
    run = load_run(request.getfixturevalue(which))
    text = render(run, format).decode()
    golden(f"report/{which}.{format}", re.sub(r"<svg.*?</svg>", "<svg></svg>", text, flags=re.DOTALL))


def test_the_example_campaign_on_a_terminal(example, golden):
    golden("report/example.terminal", render(load_run(example), "terminal").decode())


@pytest.mark.parametrize("format", WITHOUT_LATEX)
def test_the_same_folder_gives_the_same_bytes(small, format):
    assert render(load_run(small), format) == render(load_run(small), format)


def test_an_unknown_format_names_those_there_are():
    with pytest.raises(NoSuchFormat, match=r"no report format 'docx'; there are .*markdown"):
        render(Run("empty"), "docx")


@pytest.mark.parametrize("format", WITHOUT_LATEX)
def test_a_run_without_any_cell_still_reports(format):
    assert render(Run("empty"), format)


# --- the terminal's lines, as bench prints them ---


def test_a_cell_is_one_line_in_fixed_columns():
    assert terminal.line(cell()) == "       fib:   140.6 +/-   1.0 tok/s"


def test_a_cell_says_how_much_faster_it_is():
    base = cell(values=(26.4, 26.5, 26.3))
    assert terminal.line(cell(), base) == "       fib:   140.6 +/-   1.0 tok/s   5.33x"


def test_a_failed_cell_gives_its_cause_and_no_number():
    failure = Failure("server_died", "killed by SIGILL")
    assert terminal.line(cell(state=State.FAILED, values=(), failure=failure)) == (
        "       fib:  FAILED server_died: killed by SIGILL"
    )


def test_banner_heading_and_skip():
    assert terminal.banner("tp1", "TP1 — single GPU").splitlines()[1] == "#  PHASE: TP1 — single GPU"
    assert terminal.banner("k26", "Kimi K2.6").splitlines()[1] == "#  PHASE: K26 — Kimi K2.6"
    assert terminal.banner("tp4").splitlines()[1] == "#  PHASE: TP4"
    server = Server("tp1", "tp1-linear", method="dflash", tp=1)
    assert terminal.heading(server).splitlines()[1] == "  tp1-linear  tp=1  method=dflash"
    assert terminal.skip("tp1-auto", "results exist") == "  SKIP tp1-auto (results exist)"
    assert terminal.group(cell()) == "  [decode max_tokens=256]"


# --- reading ---


def test_a_complete_folder_is_read_whole(example):
    run = load_run(example)
    assert not run.left_out
    assert run.unfinished is None
    assert run.phases == ["tp1", "tp4", "tp8"]
    assert run.baseline_of("tp4") == "tp4-auto"


def test_a_folder_that_is_none_is_refused_in_one_line(tmp_path):
    with pytest.raises(NotARun, match="does not exist"):
        load_run(tmp_path / "no")
    with pytest.raises(NotARun, match="is no run folder"):
        load_run(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotARun, match="is a file"):
        load_run(tmp_path / "file")


def damaged(tmp_path, name, data):
    folder = runfolders.Folder(tmp_path / "run")
    folder.cell("tp1", "tp1-auto", "decode", "fib-256", {"prompt": "fib"}, {"decode_tok_s": 26.4})
    folder.close()
    file = folder.path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return load_run(folder.path)


def changed(**changes):
    document = {**cell("x").as_json(), **changes}
    return json.dumps(document).encode()


def metric_x(**changes):
    return {"x": {"mean": 7, "sd": None, "ci95": None, "n": 1, "unit": "ms", **changes}}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b'{"schema": "gpuctl.cell/1", "ce', "is not JSON"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"[]", "no gpuctl.cell/1 record"),
        (b'{"schema": "gpuctl.cell/2"}', "no gpuctl.cell/1 record"),
        (b'{"schema": "gpuctl.cell/1"}', "has no 'failure'"),
        (b"[" * 100_000, "is nested too deeply"),
        (changed(state="failed", failure=None), "says failed and has numbers"),
        (changed(metrics={}), "says ok and has no numbers"),
        (changed(metrics=metric_x(mean=float("nan"))), "is not a number"),
        (changed(metrics=metric_x(mean="7")), "is not a number"),
        (changed(metrics=metric_x(sd=-1)), "negative spread"),
        (changed(parameters=[]), "parameters is no object"),
    ],
)  # fmt: skip
def test_a_damaged_cell_is_named_and_left_out(tmp_path, data, why):
    run = damaged(tmp_path, "cells/tp1/tp1-auto/decode/x.json", data)
    assert [left.path for left in run.left_out] == ["cells/tp1/tp1-auto/decode/x.json"]
    assert why in run.left_out[0].why
    assert len(run.records) == 1
    assert b"x.json" in render(run, "terminal")
    assert b"x.json" in render(run, "markdown")


def test_foreign_and_half_written_files_are_named(tmp_path):
    run = damaged(tmp_path, "cells/tp1/tp1-auto/decode/.x.json.tmp", b"{")
    assert run.left_out[0].why == "is half-written"
    run = damaged(tmp_path / "2", "cells/notes.txt", b"mine")
    assert run.left_out[0].why == "is no cell"


def test_raw_stamps_beside_a_cell_are_no_surprise(tmp_path):
    assert not damaged(tmp_path, "cells/tp1/tp1-auto/decode/fib-256.raw.jsonl", b"{}\n").left_out


def test_of_two_records_of_one_cell_the_later_counts(tmp_path):
    older = changed(cell={"phase": "tp1", "server": "tp1-auto", "workload": "decode", "point": "fib-256"}, ended="2020")
    run = damaged(tmp_path, "cells/tp1/tp1-auto/decode/copy.json", older)
    assert [left.path for left in run.left_out] == ["cells/tp1/tp1-auto/decode/copy.json"]
    assert run.records[0].ended > "2021"


def test_damaged_events_and_campaign_are_named_and_the_rest_is_kept(tmp_path):
    run = damaged(
        tmp_path, "events.jsonl", b'{"t": "2026-11-30T04:00:00Z", "event": "run_started"}\nnonsense\n{"t": "20'
    )
    assert [(left.path, left.why) for left in run.left_out] == [
        ("events.jsonl, line 2", "is not JSON: Expecting value (line 1, column 1)"),
        ("events.jsonl, line 3", "ends in the middle of a line"),
    ]
    assert run.unfinished == "2026-11-30T04:00:00Z"
    assert damaged(tmp_path / "2", "campaign.json", b"{").left_out[0].path == "campaign.json"


@pytest.mark.parametrize("name", ["campaign.json", "events.jsonl", "cells/tp1/tp1-auto/decode/fib-256.json"])
def test_a_pipe_among_its_files_is_named_and_not_waited_for(tmp_path, name):
    folder = runfolders.small(tmp_path / "run")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    (left,) = load_run(folder).left_out
    assert (left.path, "is no regular file" in left.why) == (name, True)
    with Store(folder) as run:  # bench, too, is told
        assert len(run.records()) >= 2
        if name == "events.jsonl":
            with pytest.raises(StoreError, match=r"events\.jsonl: .*; --runs names another folder"):
                run.event("begun")


def test_a_run_still_going_says_so(tmp_path):
    run = load_run(runfolders.example(tmp_path / "run", finished=False))
    assert b"Not finished" in render(run, "terminal")
    assert b"Not finished" in render(run, "markdown")


def test_secrets_in_argv_and_environment_are_not_published(tmp_path):
    folder = runfolders.Folder(tmp_path / "run")
    folder.phase("tp1", "", {"tp1-auto": ["serve", "--api-key", "sk-1", "--hf-token=hf-2"]})
    folder.cell("tp1", "tp1-auto", "decode", "fib-256", {"prompt": "fib"}, {"decode_tok_s": 26.4})
    run = load_run(folder.close())
    for format in WITHOUT_LATEX:
        text = render(run, format)
        for secret in (b"sk-1", b"hf-2", b"hf_secret"):
            assert secret not in text, format


def test_a_folder_that_cannot_be_looked_into_is_named(tmp_path, monkeypatch):
    scan = os.scandir

    def refused(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)  # root may look into every folder
    run = damaged(tmp_path, "cells/locked/x.json", b"{}")
    assert [(left.path, left.why) for left in run.left_out] == [("cells/locked", "cannot be read: Permission denied")]
    assert len(run.records) == 1
