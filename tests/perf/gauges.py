"""What agent/gauges.py costs and how true it is, on a machine with an NVIDIA GPU: `python tests/perf/gauges.py`.

A process of its own keeps the GPU's memory busy (cuMemsetD8 through ctypes, no CUDA toolkit needed) for a while. Said are
the agent's processor time, how evenly it reads, and its power beside nvidia-smi's over the same seconds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from gpuctl.gauges import EVERY_S, Reading, between
from gpuctl.transport import agent

BURN = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
def ok(code): assert code == 0, code
ok(cuda.cuInit(0)); ok(cuda.cuDeviceGet(ctypes.byref(device), 0))
ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)); ok(cuda.cuCtxSetCurrent(context))
size = 8 << 30
ok(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(size)))
print(time.monotonic(), flush=True)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    for n in range(8):
        ok(cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(n), ctypes.c_size_t(size)))
    ok(cuda.cuCtxSynchronize())
print(time.monotonic(), flush=True)
"""


def main(seconds: float = 20.0) -> None:
    command, stdin = agent("gauges", {"every_s": EVERY_S}, python=sys.executable)
    gauges = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=False)
    assert gauges.stdin is not None
    assert gauges.stdout is not None
    gauges.stdin.write(stdin)
    gauges.stdin.close()
    time.sleep(3)
    smi = subprocess.Popen(
        ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", "-lms", "200"], stdout=subprocess.PIPE
    )
    burn = subprocess.run([sys.executable, "-c", BURN, str(seconds)], capture_output=True, check=True, text=True)
    start, end = (float(line) for line in burn.stdout.split())
    smi.terminate()
    time.sleep(1)
    ticks = Path(f"/proc/{gauges.pid}/stat").read_text().rpartition(")")[2].split()
    gauges.terminate()
    told = [json.loads(line) for line in gauges.stdout.read().splitlines() if line.endswith(b"}")]
    readings = [Reading(t["t"], tuple(t["mw"]), tuple(t["mj"]), tuple(t["used"])) for t in told if "t" in t]
    watts = [float(line.split()[0]) for line in smi.stdout.read().splitlines()] if smi.stdout else []
    gaps = [b.t - a.t for a, b in pairwise(readings)]
    processor = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
    print(f"GPUs: {told[0]}")
    print(f"{len(readings)} readings, {statistics.mean(gaps) * 1e3:.1f} ms apart (at most {max(gaps) * 1e3:.1f})")
    print(f"processor time {processor:.2f} s, {processor / len(readings) * 1e3:.2f} ms a reading, the start included")
    inner = between(readings, start + 2, end - 0.5)
    counted = between(
        [r.__class__(r.t, r.mw, tuple(None for _ in r.mj), r.used) for r in readings], start + 2, end - 0.5
    )
    print(f"by the energy counter {inner}")
    print(f"by power readings     {counted}")
    print(f"nvidia-smi            {statistics.mean(watts[15:-5]):.1f} W, mean of {len(watts)} readings")
    steps = {b - a for a, b in pairwise([r.mj[0] for r in readings])}  # type: ignore[operator]
    print(f"energy between readings: {len(steps)} different values, zero among them: {0 in steps}")


if __name__ == "__main__":
    main()
