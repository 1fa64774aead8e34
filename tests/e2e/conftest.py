"""A desk: a folder with an inventory of its own, where the real gpuctl runs with a home of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


SERVERS = """
defaults:
  tiny:
    engine: llamacpp
    model: tiny
    program: ["{python}", -m, gpuctl.agent.llama_server]
    port: %(port)d
    flags: {ctx-size: 8192, parallel: 2, threads: 1}
servers:
  plain: {use: tiny}
  ngram: {use: tiny, flags: {spec-type: ngram-map-k}}
"""

PHASES = """
campaign: small
phases:
  p:
    servers: [plain, ngram]
    baseline: plain
    reps: 2
    unstable_above: 100
    workloads:
      - decode: {prompts: [fib, qsort], max_tokens: [24]}
      - concurrency: {concurrency: [2], max_tokens: 16}
      - context: {tokens: [300], max_tokens: 8}
      - agentic: {turns: 2, words_per_turn: 10, max_tokens: 8}
"""


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.inventory = folder / "inventory" / "local"
        self.run = folder / "runs" / "small"
        self.environment = {**os.environ, "HOME": str(folder / "home"), "NO_COLOR": "1"}
        (folder / "home").mkdir()
        shutil.copytree(ROOT / "inventory" / "local", self.inventory)
        self.write("servers", SERVERS % {"port": self.port})
        self.write("phases", PHASES)

    def write(self, name: str, text: str) -> None:
        (self.inventory / f"{name}.yml").write_text(text)

    def start(self, *words: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "gpuctl", *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def gpuctl(self, *words: str, prefix: tuple[str, ...] = ()) -> tuple[int, str, str]:
        process = self.start(*words, prefix=prefix)
        out, err = process.communicate(timeout=100)
        assert "Traceback" not in err, err
        return process.returncode, out, err

    def records(self) -> dict[str, dict]:
        found = {}
        for path in self.run.glob("cells/*/*/*/*.json"):
            record = json.loads(path.read_text())
            found["/".join(record["cell"].values())] = record
        return found

    def servers_running(self) -> list[int]:
        """Processes of any server that was started from this desk."""
        mark = f"GPUCTL_UNIT={self.folder}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def wait_for(self, condition, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.01)


@pytest.fixture
def desk(tmp_path):
    desk = Desk(tmp_path)
    yield desk
    for pid in desk.servers_running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
