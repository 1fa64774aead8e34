"""What counts as a sign of life while a server starts, and what is a hang however busy it looks."""

from __future__ import annotations

import json
import sys
import time

import pytest

from gpuctl.agent import supervise
from gpuctl.supervision import PROGRESS_BYTES, Processes, Start, Watch
from gpuctl.transport import Local

FIRST = {"cpu_ticks": 10, "read_bytes": 1000, "resident_bytes": 5 << 20, "pids": [7, 8]}


def beats(*changes):
    """Whether each further beat was progress."""
    watch, beat, found = Watch(), dict(FIRST), []
    for change in ({}, *changes):
        watch.progress_at = 0.0
        beat = {**beat, **change}
        watch.take(json.dumps({"beat": beat, "health": 503}).encode() + b"\n", lambda _: None)
        found.append(watch.progress_at > 0)
    return found[1:]


@pytest.mark.parametrize(
    ("change", "progress"),
    [
        ({}, False),
        ({"cpu_ticks": 100_000}, False),  # a collective that waits in vain computes at full speed
        ({"read_bytes": 1000 + PROGRESS_BYTES - 1}, False),
        ({"read_bytes": 1000 + PROGRESS_BYTES}, True),
        ({"resident_bytes": 6 << 20}, True),
        ({"resident_bytes": 1 << 20}, False),
        ({"pids": [7, 9]}, True),  # a compiler ended, the next one began
    ],
)
def test_a_sign_of_life(change, progress):
    assert beats(change) == [progress]


def test_small_steps_add_up():
    step = PROGRESS_BYTES // 4 + 1
    assert beats(*({"read_bytes": 1000 + n * step} for n in range(1, 5))) == [False, False, False, True]


def test_a_server_that_only_spins_is_quiet_and_one_that_reads_is_not(tmp_path):
    supervisor = Processes(Local(), str(tmp_path / "servers"), python=sys.executable)
    reads = "import time\nwhile True: open('/proc/self/exe', 'rb').read(1 << 22); time.sleep(0.05)"
    for unit, script in (("spins", "while True: pass"), ("reads", reads)):
        supervisor.start(Start(unit, [sys.executable, "-c", script], {}, "test"))
    try:
        watches = {
            unit: supervisor.watch(unit, ["http://127.0.0.1:9/health"], lambda _: None) for unit in ("spins", "reads")
        }
        end = time.monotonic() + 60
        while not all(watch._life for watch in watches.values()):
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(1.5)  # what it takes to start is over
        quiet_from = time.monotonic()
        while watches["reads"].progress_at < quiet_from + 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert watches["spins"].progress_at < quiet_from
        for watch in watches.values():
            watch.close()
    finally:
        for unit in ("spins", "reads"):
            supervisor.stop(unit, grace_s=0)


def test_a_line_that_journald_cut_is_one_line_again():
    entries = [
        {"MESSAGE": "a" * 10, "_LINE_BREAK": "line-max"},
        {"MESSAGE": "b"},
        {"MESSAGE": [255, 97]},
        {"MESSAGE": None},
    ]
    assert "".join(supervise.message(entry) for entry in entries) == "a" * 10 + "b\n\ufffda\n"
