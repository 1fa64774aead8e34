"""What GPUs drew and held during a repetition, out of readings; and the agent that takes them, where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.gauges import Gauges, Reading, between
from gpuctl.metrics import METRICS, of_gpus
from gpuctl.transport import Completed, Local, agent

GIB = 1 << 30
IDLE_W, BUSY_W = 30.0, 400.0


def told(start=0.0, end=20.0, every=0.2, *, busy=(5.0, 15.0), counter=True, gpus=2, ours=(0,), held=50 * GIB):
    """Readings of a machine where a server starts at 2 s on the GPUs `ours`, which draw 400 W while they are busy."""
    readings, energy, t, last = [], [0.0] * gpus, start, start
    while t <= end:
        watts = [BUSY_W if gpu in ours and busy[0] <= t < busy[1] else IDLE_W for gpu in range(gpus)]
        energy = [e + w * (t - last) for e, w in zip(energy, watts, strict=True)]
        readings.append(
            Reading(
                t,
                tuple(int(w * 1e3) for w in watts),
                tuple(int(e * 1e3) if counter else None for e in energy),
                tuple(held if gpu in ours and t > 2 else GIB // 4 for gpu in range(gpus)),
            )
        )
        last, t = t, t + every
    return readings


@pytest.mark.parametrize("counter", [True, False])
def test_power_and_memory_are_those_of_the_servers_gpus(counter):
    found = between(told(counter=counter), 6.0, 14.0)
    assert found["gpu_power_w"] == pytest.approx(BUSY_W, rel=0.001)
    assert found["gpu_memory_bytes"] == 50 * GIB


def test_gpus_of_a_server_are_added_up():
    found = between(told(gpus=8, ours=(0, 1, 2, 3)), 6.0, 14.0)
    assert found["gpu_power_w"] == pytest.approx(4 * BUSY_W, rel=0.001)
    assert found["gpu_memory_bytes"] == 4 * 50 * GIB


@given(st.floats(3, 16), st.floats(1.2, 3), st.floats(0.05, 0.3))
def test_the_energy_counter_tells_the_mean_wherever_the_readings_fall(start, long, every):
    """Against the true energy of the span, whatever part of it was busy: half a reading at either end is the error."""
    end = start + long
    busy = max(0.0, min(end, 15.0) - max(start, 5.0))
    true = (BUSY_W * busy + IDLE_W * (long - busy)) / long
    found = between(told(every=every), start, end)
    assert found["gpu_power_w"] == pytest.approx(true, abs=BUSY_W * 2 * every / long)


@pytest.mark.parametrize(
    "readings",
    [
        [],
        told(end=7.0),  # the last readings are still missing
        told(start=8.0),  # began too late
        told(held=GIB // 4 + (100 << 20)),  # nobody's memory grew: the server was there before, or is on no GPU
        [Reading(r.t, r.mw, r.mj, (None, None)) for r in told()],
    ],
)
def test_what_cannot_be_known_is_left_out(readings):
    assert between(readings, 6.0, 14.0) == {}
    assert between(told(), 6.0, 6.4) == {}  # too short


def test_a_gpu_that_tells_no_power_leaves_memory_only():
    silent = [Reading(r.t, (None, None), (None, None), r.used) for r in told()]
    assert between(silent, 6.0, 14.0) == {"gpu_memory_bytes": 50 * GIB}


def test_a_counter_that_starts_again_is_not_believed():
    reset = [Reading(r.t, r.mw, tuple(0 if r.t > 10 else e for e in r.mj), r.used) for r in told()]
    assert between(reset, 6.0, 14.0)["gpu_power_w"] == pytest.approx(BUSY_W, rel=0.001)


def test_energy_of_a_token_is_power_by_throughput():
    assert of_gpus({"gpu_power_w": 300.0}, {"output_tok_s": 150.0}) == {"gpu_power_w": 300.0, "energy_per_token_j": 2.0}
    assert of_gpus({}, {"output_tok_s": 150.0}) == {}
    assert {"gpu_power_w", "gpu_memory_bytes", "energy_per_token_j"} <= set(METRICS)


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a GPU")
def test_a_machine_without_a_gpu_says_so_once_and_ends():
    command, stdin = agent("gauges", {"every_s": 0.2}, python=sys.executable)
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert [*json.loads(done.stdout)] == ["none"]
    with Gauges(Local(), sys.executable) as gauges:
        assert gauges.during([{"t_request": 1.0, "t_chunks": [2.0, 9.0]}]) == {}


class Machine:
    """Hands out readings as a channel does: in pieces, some of them in the middle of a line."""

    name = "box"

    def __init__(self, readings):
        lines = [{"gpus": [{}, {}]}, *({"t": r.t, "mw": r.mw, "mj": r.mj, "used": r.used} for r in readings)]
        self.said = "".join(json.dumps(line) + "\n" for line in lines).encode()

    def run(self, argv, *, stdin=b"", timeout=None, on_stdout=None):
        for start in range(0, len(self.said), 1000):
            on_stdout(self.said[start : start + 1000])
        return Completed(0, b"", b"")

    def close(self):
        pass


def test_readings_come_over_the_channel_and_belong_to_the_time_of_the_requests():
    with Gauges(Machine(told())) as gauges:
        rows = [{"t_request": 6.0, "t_chunks": [6.5, 13.0]}, {"t_request": 6.2, "t_chunks": [7.0, 14.0]}]
        assert gauges.during(rows)["gpu_power_w"] == pytest.approx(BUSY_W, rel=0.001)
        assert gauges.during([{"t_request": 6.0, "t_chunks": None, "error": {"kind": "timeout"}}]) == {}


def test_of_a_server_over_several_machines_the_head_alone_tells_nothing():
    with Gauges(Machine(told()), whole=False) as gauges:
        assert gauges.during([{"t_request": 6.0, "t_chunks": [6.5, 14.0]}]) == {}


@pytest.mark.parametrize(("after", "held"), [(GIB // 4, {}), (50 * GIB, {0: 50 * GIB - GIB // 4})])
def test_the_memory_of_a_stopped_server_is_waited_for_and_what_stays_is_told(after, held):
    readings = told()
    gauges = Gauges(Machine([]), readings=list(readings))

    def later():
        for number in range(20):
            used = (50 * GIB if number < 5 else after, GIB // 4)
            gauges.readings.append(Reading(21 + number / 5, (0, 0), (0, 0), used))
            time.sleep(0.02)

    threading.Thread(target=later).start()
    assert gauges.wait_until_free(within_s=2.0 if held else 30.0) == held
