"""`gpuctl report` as a person calls it: formats by file name, exit codes of the gate, one line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runfolders

from gpuctl.cli import main
from gpuctl.reports import pdf

FOREIGN = Path(__file__).parent / "foreign"


@pytest.fixture
def call(capsysbinary):
    """Calls gpuctl; returns its exit status, stdout and stderr."""

    def run(*words):
        with pytest.raises(SystemExit) as done:
            main([str(word) for word in words])
        printed = capsysbinary.readouterr()
        return done.value.code or 0, printed.out.decode(), printed.err.decode()

    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runfolders.small(folder / "old")
    runfolders.small(folder / "new", faster=0.9, seed=2, driver="610.1")
    runfolders.small(folder / "again", seed=3)
    return folder


def test_the_file_name_says_the_format(call, runs, tmp_path):
    for name, head in (
        ("r.html", "<!DOCTYPE html>"),
        ("r.csv", "run,phase"),
        ("r.tex", "% Written"),
        ("r.md", "# small"),
    ):
        assert call("report", runs / "new", "-o", tmp_path / name) == (0, "", "")
        assert (tmp_path / name).read_text().startswith(head)
    assert list((tmp_path / "r-figures").glob("*.svg"))


def test_a_pdf_says_that_it_takes_a_while_and_that_there_is_no_latex_before_it_begins(
    call, runs, tmp_path, monkeypatch
):
    monkeypatch.setattr(pdf, "compile", lambda source, epoch=0: b"%PDF-")
    monkeypatch.setattr(pdf.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert call("report", runs / "new", "-o", tmp_path / "r.pdf") == (
        0, "", "LaTeX is at work: some ten seconds for twenty pages\n")  # fmt: skip
    monkeypatch.setattr(pdf.shutil, "which", lambda name: None)
    status, _, err = call("report", runs / "new", "-o", tmp_path / "r.pdf")
    assert status == 2
    assert err.startswith("gpuctl: a PDF needs LaTeX")
    assert err.count("\n") == 1


def test_one_json_document_on_stdout(call, runs):
    status, out, _ = call("report", "new", "--runs", runs, "--format", "json")
    assert status == 0
    assert json.loads(out)["name"] == "small"


def test_a_regression_is_exit_status_1_and_names_what_got_worse(call, runs):
    status, out, err = call("report", "new", "--runs", runs, "--compare", "old", "--fail-on", "5")
    assert status == 1
    assert "COMPARED" in out
    assert "worse by more than 5 %" in err
    assert "tp1/tp1-linear/decode/fib-256 decode_tok_s -9.9 %" in err


def test_no_regression_is_exit_status_0(call, runs):
    assert call("report", "again", "--runs", runs, "--compare", "old", "--fail-on", "5")[0] == 0
    assert call("report", "new", "--runs", runs, "--compare", "old", "--fail-on", "25")[0] == 0


def test_nothing_to_compare_is_exit_status_3(call, runs):
    status, _, err = call(
        "report", "--import", FOREIGN / "aiperf-0.13.0.json", "--compare", runs / "old", "--fail-on", "5"
    )
    assert status == 3
    assert "have no cell that can be compared" in err


def test_numbers_of_other_tools_need_no_run(call):
    status, out, _ = call("report", "--import", FOREIGN / "vllm-0.33.json")
    assert status == 0
    assert "381.0 tok/s" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("report", "no-such-run"), "does not exist"),
        (("report", "{new}", "--format", "docx"), "no report format 'docx'; there are csv, html, json"),
        (("report", "{new}", "--fail-on", "5"), "--fail-on needs --compare OTHER: worse than what?"),
        (("report", "{new}", "--compare", "nothing"), "no run folder, and small has no phase or server of that name"),
        (("report", "{new}", "--compare", "tp1", "--fail-on", "5"), "small has no other phase that gpuctl measured"),
        (("report", "{new}", "--import", "{new}/campaign.json"), "no result of aiperf"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(call, runs, words, line):
    status, out, err = call(*(word.format(new=runs / "new") for word in words))
    assert (status, out) == (2, "")
    assert line in err
    assert "Traceback" not in err


def test_a_baseline_that_no_phase_has_is_a_mistake_and_not_another_one(call, runs):
    status, out, err = call("report", "new", "--runs", runs, "--baseline", "tp1-atuo")
    assert (status, out) == (2, "")
    assert "--baseline: no server 'tp1-atuo' in small; did you mean 'tp1-auto'?" in err
    assert call("report", "new", "--runs", runs, "--baseline", "auto", "--format", "json")[0] == 0
