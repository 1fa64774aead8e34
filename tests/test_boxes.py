"""Boxes as they were seen in incidents and bug reports: each file in tests/boxes names the causes it must give.

expect  ids of all findings that are not mere remarks, the leading cause first; [] for a box that is well
may     ids that may be said besides
never   ids that must not be said, however the checks change: the trap this box is there for
certainty, severity   of the leading cause, where they matter
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import yaml

from gpuctl import doctor, plugins, snapshots
from gpuctl.finding import Severity

BOXES = Path(__file__).parent / "boxes"
FILES = sorted(path for path in BOXES.rglob("*") if path.suffix in (".yaml", ".yml", ".json"))


@cache
def document(path):
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


def box(path):
    return doctor.box_from(snapshots.read(path.read_text(), path.name))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(BOXES)))
def test_a_box_gives_its_causes(path):
    wanted = document(path)
    diagnosis = doctor.diagnose(box(path))
    said = [f.id for f in diagnosis.all if f.severity is not Severity.INFO]
    told = "\n".join(f"{f.id} {f.severity} {f.certainty}: {f.summary}" for f in diagnosis.all) or "nothing"
    told += f"\nunknown: {dict(diagnosis.unknowns)}"
    expected = wanted.get("expect")
    assert expected is not None, "say what is expected: expect: [...]"
    every = [f.id for f in diagnosis.all]
    assert not set(every) & set(wanted.get("never", [])), told
    assert set(expected) <= set(every), told
    assert set(said) <= {*expected, *wanted.get("may", [])}, told
    if expected:
        assert every[0] == expected[0], told
        for key in ("certainty", "severity"):
            assert getattr(diagnosis.findings[0], key).value == wanted.get(
                key, getattr(diagnosis.findings[0], key).value
            ), told
    assert not [why for why in diagnosis.unknowns.values() if "itself failed" in why or "not in the shape" in why], told
    for name in (*expected, *wanted.get("may", []), *wanted.get("never", [])):
        assert name in plugins.names("checks"), f"there is no check {name}"


@pytest.mark.parametrize("name", plugins.names("checks"))
def test_each_cause_has_a_box_that_shows_it_and_one_it_must_not_name(name):
    documents = [document(path) for path in FILES]
    assert any(name in d["expect"] or name in d.get("may", []) for d in documents), f"no box shows {name}"
    assert any(name in d.get("never", []) for d in documents), f"no near miss for {name}: a box with `never: [{name}]`"


@pytest.mark.parametrize("name", plugins.names("checks"))
def test_each_cause_explains_itself(name):
    title, *why = doctor.explain(name)[2:]
    assert title.endswith(".")
    assert len(title) < 120
    assert len(" ".join(why)) > 40


def test_a_service_that_could_not_be_seen_is_not_called_well():
    text = "cuInit: 0\nservice: {unit: sglang.service, error: 'systemctl show: hang'}\n"
    diagnosis = doctor.diagnose(doctor.box_from(snapshots.read(text, "box.yaml")))
    assert diagnosis.verdict == "unknown"
    assert "hang" in diagnosis.unknowns["service"]
