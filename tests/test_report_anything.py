"""Whatever stands in the files of a run folder: it is read or named, and every format can be made of the rest."""

from __future__ import annotations

import json

import pytest
import runfolders
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuctl import plots
from gpuctl.report import formats, load_run, render
from gpuctl.results.comparison import compare, compare_phases, compare_servers, gate

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return runfolders.small(tmp_path_factory.mktemp("anything") / "small")


@st.composite
def changed(draw, document):
    """The document with one part of it, at any depth, replaced by anything, or taken out."""
    document = json.loads(json.dumps(document))
    place = document
    for _ in range(6):
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = draw(st.sampled_from(keys))
        deeper = isinstance(place[key], dict | list) and place[key]
        if deeper and draw(st.integers(0, 3)):
            place = place[key]
            continue
        if draw(st.integers(0, 5)):
            place[key] = draw(anything)
        else:
            del place[key]
        break
    return document


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_part_of_any_file_may_be_anything(original, tmp_path_factory, monkeypatch, data):
    monkeypatch.setattr(plots, "svg", lambda figure: plots.Drawing("<svg></svg>", 1, 1))
    folder = tmp_path_factory.mktemp("anything") / "run"
    cells = sorted(path.relative_to(original) for path in original.glob("cells/*/*/*/*.json"))
    which = data.draw(st.sampled_from(["campaign.json", "events.jsonl", "cell"]))
    (folder / "cells").mkdir(parents=True)
    for name in [*cells, "campaign.json", "events.jsonl"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((original / name).read_bytes())
    if which == "events.jsonl":
        lines = (original / which).read_text().splitlines()
        place = data.draw(st.integers(0, len(lines) - 1))
        lines[place] = json.dumps(data.draw(changed(json.loads(lines[place]))))
        (folder / which).write_text("\n".join(lines))
    else:
        name = which if which == "campaign.json" else data.draw(st.sampled_from(cells))
        document = data.draw(changed(json.loads((original / name).read_bytes())))
        (folder / name).write_text(json.dumps(document))
    run, before = load_run(folder), load_run(original)
    comparisons = [compare(run, before), compare(before, run)]
    comparisons += [compare_phases(run, phase, "tp1") for phase in run.phases if "tp1" in run.phases]
    comparisons += [compare_servers(run, "tp1", "tp1-auto")]
    for comparison in comparisons:
        gate(comparison, 5)
    for format in formats():
        if format != "pdf":
            assert render(run, format, comparisons)
