"""Placing whole files: all or none, guarded, shown before, put back afterwards."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = Path(__file__).parents[1] / "playbooks/library/place.py"


@pytest.fixture
def place(tmp_path):
    """`place(files, ...)` runs the module and gives its answer."""

    def run(*files, check=False, **more):
        job = tmp_path / "job.json"
        job.write_text(json.dumps({"files": list(files), "state": str(tmp_path / "state"), **more}))
        words = [sys.executable, str(MODULE), str(job), *(["--check"] if check else [])]
        return json.loads(subprocess.run(words, capture_output=True, text=True, check=False).stdout)

    return run


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_shown_then_placed_then_nothing_to_do(place, tmp_path):
    file = tmp_path / "etc/unit"
    entry = {"path": str(file), "text": "a\n", "mode": "0640"}
    would = place(entry, check=True)
    assert would["changed"]
    assert not file.exists()
    done = place(entry)
    assert done == would | {"backups": {str(file): None}}
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("a\n", 0o640)
    assert not place(entry)["changed"]
    assert [path.name for path in file.parent.iterdir()] == ["unit"]


def test_mode_of_a_file_that_is_there_is_kept_and_a_wrong_one_is_mended(place, tmp_path):
    file = tmp_path / "f"
    file.write_text("old")
    file.chmod(0o600)
    place({"path": str(file), "text": "new"})
    assert file.stat().st_mode & 0o777 == 0o600
    answer = place({"path": str(file), "text": "new", "mode": "0644"})
    assert answer["changed"]
    assert "mode 644" in answer["diff"][0]["after"]
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_file_that_somebody_changed_meanwhile_stops_all(place, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    two.write_text("edited in the GUI")
    answer = place(
        {"path": str(one), "text": "1", "was": "absent"}, {"path": str(two), "text": "2", "was": sha("as it was read")}
    )
    assert answer["failed"]
    assert "two was changed by somebody meanwhile; nothing is placed" in answer["msg"]
    assert not one.exists()
    assert two.read_text() == "edited in the GUI"


def test_the_guard_lets_the_second_run_pass(place, tmp_path):
    file = tmp_path / "f"
    file.write_text("old")
    entry = {"path": str(file), "text": "new", "was": sha("old")}
    assert place(entry)["changed"]
    assert not place(entry)["changed"]


def test_a_file_that_is_not_ours_is_left_alone(place, tmp_path):
    file = tmp_path / "gpuctl-x.service"
    file.write_text("[Unit]\n# somebody else's\n")
    answer = place({"path": str(file), "text": "# gpuctl\n[Unit]\n", "ours": "# gpuctl"})
    assert "is there already and not ours" in answer["msg"]
    file.write_text("# gpuctl, older\n")
    assert place({"path": str(file), "text": "# gpuctl\n[Unit]\n", "ours": "# gpuctl"})["changed"]


@pytest.mark.parametrize("kind", ["a folder in the way", "a link"])
def test_one_that_cannot_be_written_puts_back_those_before_it(place, tmp_path, kind):
    one, bad, new = tmp_path / "one", tmp_path / "bad", tmp_path / "new"
    one.write_text("before")
    if kind == "a link":
        bad.symlink_to(one)
    else:
        (tmp_path / "file").write_text("")
        bad = tmp_path / "file/inside"
    answer = place(*({"path": str(path), "text": "after"} for path in (one, new, bad)))
    assert answer["failed"], answer
    assert one.read_text() == "before"
    assert not new.exists()


def test_undo_leads_to_what_was_there_before_us(place, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("theirs")
    old.chmod(0o600)
    entries = [{"path": str(old)}, {"path": str(new)}]
    for text in ("first", "second"):
        place(*({**entry, "text": text} for entry in entries))
    would = place(*entries, undo=True, check=True)
    assert sorted(would["placed"]) == [str(new), str(old)]
    assert place(*entries, undo=True)["changed"]
    assert (old.read_text(), old.stat().st_mode & 0o777) == ("theirs", 0o600)
    assert not new.exists()
    assert not place(*entries, undo=True)["changed"]


def test_undo_leads_there_also_after_a_later_version_that_could_not_be_placed(place, tmp_path):
    file = tmp_path / "f"
    file.write_text("theirs")
    place({"path": str(file), "text": "first"})
    # nothing can be written below /proc, and that is found out when the first file is written already
    bad = place({"path": str(file), "text": "second"}, {"path": "/proc/no/g", "text": ""})
    assert bad["msg"] == "/proc/no/g: No such file or directory; nothing is placed"
    assert file.read_text() == "first"
    assert place({"path": str(file), "text": ""}, undo=True)["changed"]
    assert file.read_text() == "theirs"
    place({"path": str(file), "text": "first"})
    place({"path": str(file), "text": "second"}, {"path": "/proc/no/g", "text": ""})
    place({"path": str(file), "text": "second"})
    place({"path": str(file), "text": ""}, undo=True)
    assert file.read_text() == "theirs"


def test_undo_leaves_alone_what_somebody_changed_since(place, tmp_path):
    file = tmp_path / "f"
    file.write_text("theirs")
    place({"path": str(file), "text": "ours"})
    file.write_text("theirs again")
    answer = place({"path": str(file)}, undo=True)
    assert "was changed by somebody since; it is left alone" in answer["msg"]
    assert file.read_text() == "theirs again"
    # Placed once more, undo leads to their last version.
    place({"path": str(file), "text": "ours"})
    place({"path": str(file)}, undo=True)
    assert file.read_text() == "theirs again"


def test_removing_and_undoing_it(place, tmp_path):
    file = tmp_path / "f"
    file.write_text("text")
    assert place({"path": str(file), "absent": True})["changed"]
    assert not file.exists()
    assert not place({"path": str(file), "absent": True})["changed"]
    place({"path": str(file)}, undo=True)
    assert file.read_text() == "text"


def test_a_secret_is_not_shown(place, tmp_path):
    answer = place({"path": str(tmp_path / "f"), "text": "hf_abc", "secret": True, "mode": "0600"}, check=True)
    assert "hf_abc" not in json.dumps(answer)


def test_bytes_that_are_no_text_are_replaced_all_the_same(place, tmp_path):
    file = tmp_path / "f"
    file.write_bytes(b"\xff\xfe")
    assert place({"path": str(file), "text": "ü\n"})["changed"]
    place({"path": str(file)}, undo=True)
    assert file.read_bytes() == b"\xff\xfe"


def test_a_damaged_list_of_what_was_placed_is_told(place, tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state/journal.json").write_text("{")
    assert "journal.json cannot be read" in place({"path": str(tmp_path / "f"), "text": "x"})["msg"]
    assert not (tmp_path / "f").exists()


def test_a_unit_that_lost_its_install_section_is_taken_out_of_the_boot(place, tmp_path):
    units = tmp_path / "system"
    (units / "multi-user.target.wants").mkdir(parents=True)
    link = units / "multi-user.target.wants/x.service"
    link.symlink_to(units / "x.service")
    entry = {"path": str(units / "x.service"), "text": "[Service]\nExecStart=/bin/true\n"}
    would = place(entry, check=True, units=True)
    assert any("x.service goes: it is not for the boot" in diff.get("prepared", "") for diff in would["diff"])
    assert link.is_symlink()
    place(entry, units=True)  # here without systemd, where that is said
    assert not link.is_symlink()


def told(answer):
    return [diff["prepared"] for diff in answer["diff"] if "prepared" in diff]


def test_a_unit_is_started_at_boot_where_its_install_section_says_and_nowhere_else(place, tmp_path):
    units = tmp_path / "system"
    text = "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target a.service\n"
    entry = {"path": str(units / "x.service"), "text": text}
    would = place(entry, check=True, units=True)
    assert told(would) == ["x.service is started at boot\n"]
    assert would["changed"]
    for folder in ("multi-user.target.wants", "a.service.wants", "b.service.wants"):
        (units / folder).mkdir(parents=True)
        (units / folder / "x.service").symlink_to(units / "x.service")
    place(entry, units=True)
    assert told(place(entry, check=True, units=True)) == []
    assert [(units / f"{name}.service.wants/x.service").is_symlink() for name in "ab"] == [True, False]
    # undone, it goes out of the boot; somebody else's of that name stays as it is
    other = {"path": str(units / "y.service"), "text": ""}
    (units / "y.service").write_text(text)
    (units / "a.service.wants/y.service").symlink_to(units / "y.service")
    assert len(told(place(entry, other, check=True, units=True, undo=True))) == 2
    place(entry, other, units=True, undo=True)
    assert not (units / "multi-user.target.wants/x.service").is_symlink()
    assert (units / "a.service.wants/y.service").is_symlink()


def test_the_note_of_an_earlier_failure_goes_with_it(place, tmp_path):
    note = tmp_path / "failed/x.service"
    note.parent.mkdir()
    note.write_text("2026-11-30T09:00:00Z exit-code\n")
    entry = {"path": str(tmp_path / "system/x.service"), "text": "[Service]\nExecStart=/bin/true\n"}
    place(entry)
    assert not place(entry)["changed"]
    assert told(place(entry, check=True, forget=True)) == [f"{note} goes: the note of an earlier failure\n"]
    assert note.exists()
    place(entry, undo=True, forget=True)
    assert not note.exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_the_exposure_of_a_unit_is_told(place, tmp_path):
    entry = {"path": str(tmp_path / "gpuctl-x.service"), "text": "[Service]\nExecStart=/bin/true\n"}
    told = [diff.get("prepared", "") for diff in place(entry, check=True, verify=True)["diff"]]
    assert any("gpuctl-x.service: systemd calls its exposure 9." in words for words in told), told
