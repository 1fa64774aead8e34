"""Settings: seen, wanted, set, read back, put back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = Path(__file__).parents[1] / "playbooks/library/settle.py"


@pytest.fixture
def settle(tmp_path):
    def run(*settings, check=False, **more):
        job = tmp_path / "job.json"
        job.write_text(json.dumps({"settings": list(settings), "state": str(tmp_path / "state.json"), **more}))
        words = [sys.executable, str(MODULE), str(job), *(["--check"] if check else [])]
        return json.loads(subprocess.run(words, capture_output=True, text=True, check=False).stdout)

    return run


@pytest.fixture
def knob(tmp_path):
    file = tmp_path / "numa_balancing"
    file.write_text("1\n")
    return {"name": "kernel.numa_balancing", "file": str(file), "want": "0"}


def test_shown_then_set_then_nothing_to_do_then_undone(settle, knob):
    file = Path(knob["file"])
    would = settle(knob, check=True)
    assert would["changed"]
    assert would["diff"]["after"] == "kernel.numa_balancing = 0\n"
    assert file.read_text() == "1\n"
    done = settle(knob)
    assert done["settings"] == would["settings"]
    assert file.read_text() == "0\n"
    again = settle(knob)
    assert (again["changed"], again["settings"][0]["state"]) == (False, "well")
    assert settle(undo=True, check=True)["changed"]
    assert file.read_text() == "0\n"
    assert settle(undo=True)["changed"]
    assert file.read_text() == "1\n"
    assert not settle(undo=True)["changed"]


def test_undo_leads_to_before_the_first_time_also_after_a_reboot(settle, knob):
    file = Path(knob["file"])
    settle(knob)
    settle({**knob, "want": "2"})
    file.write_text("7\n")
    settle(knob)
    settle(undo=True)
    assert file.read_text() == "1\n"


def test_what_does_not_take_has_failed_and_is_not_called_changed(settle, tmp_path):
    setting = {
        "name": "MaxReadReq",
        "read": ["echo", "2936"],
        "set": ["true", "{value}"],
        "mask": "7000",
        "want": "5000",
    }
    answer = settle(setting)
    assert answer["failed"]
    assert not answer["changed"]
    assert answer["msg"] == "MaxReadReq: set, and it reads back 2000"


def test_hardware_that_may_ignore_it_is_told_of_and_no_failure(settle):
    setting = {"name": "port", "read": ["echo", "2936"], "set": ["true"], "mask": "7000", "want": "5000"}
    answer = settle({**setting, "may_ignore": True})
    assert "failed" not in answer
    assert answer["settings"][0]["state"] == "ignored"
    assert not answer["changed"]


def test_the_chosen_word_of_a_list(settle, tmp_path):
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    setting = {"name": "thp", "file": str(tmp_path / "enabled"), "pick": r"\[(\w+)\]", "want": "madvise"}
    assert settle(setting)["settings"][0] == {
        "name": "thp", "seen": "madvise", "want": "madvise", "after": "madvise", "state": "well"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"file": "/nowhere/knob"}, "/nowhere/knob: No such file or directory"),
        ({"read": ["no-such-program"], "set": ["true"]}, "no-such-program is not installed"),
        ({"read": ["sh", "-c", "echo broken >&2; exit 1"], "set": ["true"]}, "broken"),
        ({"read": ["echo", "zz"], "mask": "7000", "set": ["true"]}, "not understood: zz"),
        ({"read": ["echo", "zz"], "pick": "x(y)", "set": ["true"]}, "not understood: zz"),
    ],
)
def test_what_cannot_be_read_has_failed_unless_it_is_optional(settle, knob, setting, why):
    answer = settle({"name": "a", "want": "1", **setting}, knob)
    assert why in answer["msg"]
    assert answer["settings"][1]["state"] == "changed"  # the others are set all the same, and told
    answer = settle({"name": "a", "want": "1", "optional": True, **setting})
    assert "failed" not in answer
    assert answer["settings"][0]["state"] == "absent"


def test_nothing_is_set_where_something_is_missing_that_has_to_be_there(settle, knob):
    said = settle(knob, needs={"/no/systemd": "there is no systemd on this machine"})
    assert (said["failed"], said["msg"]) == (True, "there is no systemd on this machine")
    assert Path(knob["file"]).read_text() == "1\n"


def test_what_ignored_it_once_is_not_promised_again(settle, tmp_path):
    port = {"name": "port", "read": ["echo", "2936"], "set": ["true"], "mask": "7000", "want": "5000"}
    port["may_ignore"] = True
    assert settle(port, check=True)["changed"]  # nobody knows yet
    assert not settle(port)["changed"]
    would = settle(port, check=True)
    assert (would["changed"], would["settings"][0]["state"]) == (False, "ignored")
    assert settle({**port, "want": "4000"}, check=True)["changed"]
    assert not settle(undo=True)["changed"]


def test_what_somebody_needs_is_not_set_and_put_back_all_the_same(settle, knob, tmp_path):
    file, group = Path(knob["file"]), tmp_path / "vfio/7"
    guarded = {**knob, "unless": {str(tmp_path / "vfio/[0-9]*"): "virtual machines use VFIO"}}
    assert settle(guarded)["changed"]
    group.parent.mkdir()
    group.touch()
    assert not settle(guarded)["changed"]  # it is as it is wanted: nothing is taken away
    file.write_text("1\n")
    for check in (True, False):
        refused = settle(guarded, check=check)
        assert refused["msg"] == f"kernel.numa_balancing: virtual machines use VFIO ({group})"
    assert file.read_text() == "1\n"
    file.write_text("0\n")
    assert settle(undo=True)["changed"]
    assert file.read_text() == "1\n"


def test_what_a_run_changed_is_told_so_that_it_can_be_put_back(settle, knob, tmp_path):
    other = {"name": "other", "file": str(tmp_path / "other"), "want": "0"}
    Path(other["file"]).write_text("0\n")
    (back,) = settle(knob, other)["back"]
    assert settle(back)["changed"]
    assert Path(knob["file"]).read_text() == "1\n"
