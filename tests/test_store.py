"""The run folder survives crashes, full disks and two of us."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gpuctl.records import CellId, Record, State
from gpuctl.store import Busy, Run, StoreError, write

CELL = CellId("p", "s", "w", "x")


def record():
    return Record(CELL, State.OK, "t0", "t1", {"a": 1}, "id")


def test_a_record_comes_back_with_its_raw_lines(tmp_path):
    with Run(tmp_path / "run") as run:
        run.save(record(), [{"id": "r0"}])
        assert run.load(CELL) == record()
        assert run.records() == [record()]
    assert json.loads((tmp_path / "run/cells/p/s/w/x.raw.jsonl").read_text()) == {"id": "r0"}


@pytest.mark.parametrize("moment", ["open", "unlink", "replace"])
@pytest.mark.parametrize("nth", [0, 1])
def test_a_record_never_stands_beside_stamps_of_another_measurement(tmp_path, monkeypatch, moment, nth):
    """A measurement takes an earlier one's place, and is killed (or the disk is full) at the nth such call."""
    old, new = record(), replace(record(), ended="t2")
    with Run(tmp_path) as run:
        run.save(old, [{"id": "old"}])
        real, calls = getattr(Path, moment), []

        def killed(path, *words, **options):
            calls.append(path)
            if len(calls) == nth + 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(path, *words, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Path, moment, killed)
            with contextlib.suppress(StoreError):
                run.save(new, [{"id": "new"}])
        stamps = (tmp_path / "cells/p/s/w/x.raw.jsonl").read_text()
        assert run.load(CELL) in {"old": (old, None), "new": (new, None)}[json.loads(stamps)["id"]]
        assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"schema": "gpuctl.cell/1"}', b"\xff\xfe"])
def test_a_damaged_record_is_measured_again(tmp_path, damage):
    with Run(tmp_path) as run:
        run.save(record())
        (tmp_path / "cells/p/s/w/x.json").write_bytes(damage)
        assert run.load(CELL) is None
        assert run.records() == []


def test_two_at_once_are_told_who_holds_it(tmp_path):
    with Run(tmp_path), pytest.raises(Busy, match=f"pid {os.getpid()}"):
        Run(tmp_path).__enter__()


def test_the_lock_of_a_killed_holder_is_free(tmp_path):
    code = f"from gpuctl.store import Run; import pathlib, time; Run(pathlib.Path({str(tmp_path)!r})).__enter__(); print(1, flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert holder.stdout.readline()
    with pytest.raises(Busy, match=f"pid {holder.pid}"):
        Run(tmp_path).__enter__()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with Run(tmp_path):
        pass


def test_what_a_killed_run_left_half_written_is_taken_away(tmp_path):
    (tmp_path / "cells/p/s/w").mkdir(parents=True)
    (tmp_path / "cells/p/s/w/.x.json.123.tmp").write_text("half")
    (tmp_path / "events.jsonl").write_text('{"event": "a"}\n{"event": "b')
    with Run(tmp_path) as run:
        run.event("c")
        assert [event["event"] for event in run.events()] == ["a", "c"]
    assert not list(tmp_path.glob("**/*.tmp"))


def test_a_full_disk_is_one_line_and_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "file"
    write(target, b"old")

    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="the disk is full") as error:
        write(target, b"new")
    assert error.value.full
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    target = tmp_path / "file"
    write(target, b"0" * 100_000)
    code = (
        f"import pathlib, sys; from gpuctl.store import write\n"
        f"for n in range(200): write(pathlib.Path({str(target)!r}), str(n % 10).encode() * 100_000)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 20
    while writer.poll() is None and time.monotonic() < end:
        data = target.read_bytes()
        assert len(data) == 100_000
        assert len(set(data)) == 1
    assert writer.wait() == 0


def test_an_event_that_found_room_for_its_half_takes_none_of_the_next_one(tmp_path):
    with Run(tmp_path) as run:
        run.event("a")
        size = (tmp_path / "events.jsonl").stat().st_size
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))  # as a disk with 20 bytes left
        try:
            with pytest.raises(StoreError):
                run.event("b")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        run.event("c")
        assert [event["event"] for event in run.events()] == ["a", "c"]


def test_each_start_of_a_server_has_a_log_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "20261130T090000Z")  # within one second, or after a clock set back
    run = Run(tmp_path)
    first, second = run.log_path("s"), run.log_path("s")
    first.write_text("why it died")
    assert second.name == "20261130T090000Z-2.log"
    assert run.log_path("s").name == "20261130T090000Z-3.log"
    assert first.read_text() == "why it died"


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_written_into_and_stays(tmp_path, kind):
    """As root, a file in the place of /dev/null is a machine to mend."""
    path = tmp_path / kind
    if kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 7))  # /dev/full
        except PermissionError:
            pytest.skip("not root")
        with pytest.raises(StoreError, match="the disk is full"):
            write(path, b"data")
        assert path.is_char_device()
    else:
        os.mkfifo(path)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(path.read_bytes)
            write(path, b"data")
            assert reading.result(60) == b"data"
        assert path.is_fifo()
    assert [one.name for one in tmp_path.iterdir()] == [kind]


def test_a_link_stays_and_leads_to_what_was_written(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "report.html"
    link.symlink_to("there/new.html")  # leads nowhere yet
    for text in (b"one", b"two"):
        write(link, text)
        assert (link.is_symlink(), link.read_bytes()) == (True, text)
    assert [one.name for one in (tmp_path / "there").iterdir()] == ["new.html"]


@pytest.mark.parametrize("behind", ["a pipe", "a file"])
def test_dev_stdout_is_what_it_is_connected_to(tmp_path, behind):
    program = "from pathlib import Path; from gpuctl.store import write; write(Path('/dev/stdout'), b'data')"
    with open(tmp_path / "out", "wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=file if behind == "a file" else subprocess.PIPE,
            cwd=Path(__file__).parents[1],
            timeout=60,
            check=True,
        )
        there = os.fstat(file.fileno()).st_ino
    assert ((tmp_path / "out").read_bytes() if behind == "a file" else done.stdout) == b"data"
    assert (tmp_path / "out").stat().st_ino == there, "it is the file that the shell has open"
    assert Path("/dev/stdout").is_symlink()


@pytest.mark.parametrize(
    ("name", "said"),
    [(".", "Is a directory"), ("", "Is a directory"), ("/", "Is a directory"), ("not/there.json", "No such file or")],
)
def test_a_folder_and_a_folder_that_is_not_there_are_one_line(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=f"{said}.*; -o names another file"):
        write(Path(name), b"data", instead="-o names another file")
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_in_which_nothing_happened_is_taken_away_and_one_with_anything_stays(tmp_path):
    def broken(name, *events):
        with contextlib.suppress(ConnectionError), Run(tmp_path / name) as run:
            run.put("campaign.json", {})
            for event in events:
                run.event(event)
            raise ConnectionError("no route")
        return (tmp_path / name).exists()

    assert not broken("a")
    assert not broken("a", "run_started")
    assert broken("a", "run_started", "server_started")
    assert broken("a"), "it was there before"
    with Run(tmp_path / "b"):
        pass
    assert (tmp_path / "b").exists()
