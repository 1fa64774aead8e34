"""CSV and JSON: everything is in them, and nothing in them acts."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
import runfolders
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuctl.document.wording import plain
from gpuctl.report import compare_with, load_run, render
from gpuctl.reports.csv import COLUMNS, safe
from tests.test_report_html import run_named

DOCS = Path(__file__).parent.parent / "docs" / "report.md"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return load_run(runfolders.small(tmp_path_factory.mktemp("run") / "small"))


def rows(run):
    return list(csv.DictReader(io.StringIO(render(run, "csv").decode())))


# --- CSV ---


def test_a_row_for_every_cell_and_metric_and_one_for_every_failure(small):
    found = rows(small)
    assert tuple(found[0]) == COLUMNS
    numbers = {(r["phase"], r["server"], r["workload"], r["point"], r["metric"]) for r in found if r["metric"]}
    assert numbers == {(*record.cell, name) for record in small.records for name in record.metrics}
    failures = [r for r in found if not r["metric"]]
    assert len(failures) == small.count("failed") == 5
    assert all(r["failure"] and not r["mean"] for r in failures)


def test_numbers_come_back_as_they_were(small):
    found = {(r["server"], r["workload"], r["point"], r["metric"]): r for r in rows(small) if r["metric"]}
    for record in small.records:
        for name, e in record.metrics.items():
            row = found[(*record.cell[1:], name)]
            assert float(row["mean"]) == e.mean
            assert float(row["sd"]) == e.sd
            assert int(row["n"]) == e.n
            assert float(row["ci95_high"]) == e.mean + e.ci95


def test_speedups_stand_beside_the_baseline(small):
    row = next(
        r for r in rows(small) if (r["server"], r["point"], r["metric"]) == ("tp1-linear", "fib-256", "decode_tok_s")
    )
    assert row["baseline"] == "tp1-auto"
    assert float(row["speedup_low"]) < float(row["speedup"]) < float(row["speedup_high"])


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1) | st.sampled_from(runfolders.STRANGE))
def test_no_field_is_a_formula_and_every_row_is_whole(text):
    for row in csv.reader(io.StringIO(render(run_named(text), "csv").decode())):
        assert len(row) == len(COLUMNS)
        for field in row:
            number = re.fullmatch(r"-?[0-9.]+(e[+-]?[0-9]+)?", field)
            assert number or not field.lstrip(' "').startswith(("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r"))


@given(st.text())
def test_the_text_is_still_there(text):
    assert safe(text) in (plain(text), "'" + plain(text))


# --- JSON ---


def test_json_is_json_and_has_every_cell(small):
    document = json.loads(render(small, "json"), parse_constant=lambda name: pytest.fail(name))
    assert document["schema"] == "gpuctl.report/1"
    assert document["verdict"] == "failed"
    assert len(document["cells"]) == len(small.records)
    assert {c["fingerprint_id"] for c in document["cells"]} == set(document["fingerprints"])


def test_every_key_of_the_document_is_described(small, tmp_path):
    """docs/report.md names each key that the document can have."""
    runfolders.small(tmp_path / "old", faster=1.3, seed=5)
    document = json.loads(render(small, "json", compare_with(small, str(tmp_path / "old"))))
    known = DOCS.read_text()
    free = {"metrics", "parameters", "boot", "fingerprints", "finding", "counts"}  # their keys are names

    def keys(value):
        if isinstance(value, dict):
            for key, part in value.items():
                yield key
                if key not in free:
                    yield from keys(part)
        elif isinstance(value, list):
            for item in value:
                yield from keys(item)

    missing = {key for key in keys(document) if f"`{key}`" not in known}
    assert not missing


def test_every_column_is_described():
    known = DOCS.read_text()
    assert not [column for column in COLUMNS if f"`{column}`" not in known]


@settings(max_examples=40, deadline=None)
@given(st.text(min_size=1) | st.sampled_from(runfolders.STRANGE))
def test_names_come_back_from_json_as_they_were(text):
    document = json.loads(render(run_named(text), "json"))
    assert document["name"] == text
    assert document["cells"][0]["cell"]["server"] == text


def test_reads_as_it_always_did(golden, tmp_path):
    for which in ("small", "strange"):
        run = load_run(getattr(runfolders, which)(tmp_path / which))
        for format in ("csv", "json"):
            golden(f"report/{which}.{format}", render(run, format).decode())
