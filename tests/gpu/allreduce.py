"""An all-reduce over every GPU of the machine, that ends: by its answer, or by the time limit.

    python -m tests.gpu.allreduce [--within SECONDS] [--profiles none latency]     needs torch

`nvidia-smi topo -p2p` saying OK proves nothing: a pair of GPUs can say OK and hang. Here each GPU has a process, which
adds up numbers with NCCL; one that does not come back in time is killed and said. Each of gpuctl's NCCL profiles is
tried; latency and bus bandwidth are what this one run had.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpuctl import nccl

RANK = """
import json, os, sys, time
import torch, torch.distributed as dist
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
began = time.monotonic()
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
found = {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "torch": torch.__version__, "sizes": []}
for count in (1 << 10, 1 << 15, 1 << 19, 1 << 25):
    x = torch.full((count,), float(rank + 1), dtype=torch.bfloat16, device="cuda")
    dist.all_reduce(x)
    right = bool((x == world * (world + 1) / 2).all())
    x.fill_(0)
    for _ in range(5):
        dist.all_reduce(x)
    many = 200 if count < 1 << 20 else 20
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(); start.record()
    for _ in range(many):
        dist.all_reduce(x)
    end.record(); torch.cuda.synchronize()
    us = start.elapsed_time(end) * 1000 / many
    found["sizes"].append({"bytes": 2 * count, "right": right, "us": round(us, 2),
                           "bus_gb_s": round(2 * count * 2 * (world - 1) / world / us / 1000, 2)})
found["s"] = round(time.monotonic() - began, 2)
if rank == 0:
    print(json.dumps(found), flush=True)
dist.destroy_process_group()
"""


def all_reduce(profile: str, gpus: int, within_s: float) -> dict[str, Any]:
    """What an all-reduce over `gpus` gave; `error` where it gave nothing within `within_s` seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        **nccl.environment(profile),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(gpus),
    }
    env |= {
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH",
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(gpus)]  # a full pipe would look like a hang
        ranks = [_rank(rank, env, log) for rank, log in enumerate(logs)]
        try:
            for rank in ranks:
                rank.wait(max(0.1, within_s - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            return {"profile": profile, "error": f"no answer within {within_s:g} s: it hangs"}
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    os.killpg(rank.pid, signal.SIGKILL)
                    rank.wait()
        words = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    told = [
        line.split("NCCL INFO ")[-1]
        for line in words
        if any(w in line for w in ("set by environment", "via P2P", "Using network", "NVLS", "Channel 00"))
    ]
    answer = next((json.loads(line) for line in words if line.startswith('{"nccl"')), None)
    if answer is None:
        return {"profile": profile, "error": (words or ["no word"])[-1], "nccl_said": told[:20]}
    return {"profile": profile, **answer, "nccl_said": list(dict.fromkeys(told))[:20]}


def _rank(number: int, env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        argv = [sys.executable, "-c", RANK]
        return subprocess.Popen(
            argv, env={**env, "RANK": str(number)}, start_new_session=True, stdout=file, stderr=file
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--within", type=float, default=60)
    parser.add_argument("--profiles", nargs="*", default=["none", "latency"])
    parser.add_argument("--gpus", type=int, default=len(os.listdir("/proc/driver/nvidia/gpus")))
    job = parser.parse_args()
    wrong = 0
    for profile in job.profiles:
        found = all_reduce(profile, job.gpus, job.within)
        wrong += "error" in found or not all(size["right"] for size in found["sizes"])
        print(json.dumps(found), flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
