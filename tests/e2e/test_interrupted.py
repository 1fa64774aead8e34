"""Ctrl-C while machines say nothing: gpuctl ends at once, says so, and exits as documented."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import ends_within

ROOT = Path(__file__).parents[2]
HOSTS = "all:\n  hosts:\n    one: {{ansible_host: 127.0.0.1, ansible_port: {0}}}\n    two: {{ansible_host: 127.0.0.1, ansible_port: {0}}}\n"


@pytest.fixture
def inventory(tmp_path):
    """Of two boxes that accept a connection and say nothing."""
    shutil.copytree(ROOT / "inventory" / "kpro6", tmp_path / "inv")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        (tmp_path / "inv/hosts.yml").write_text(HOSTS.format(listening.getsockname()[1]))
        (tmp_path / "inv/phases.yml").write_text("phases: {}\n")  # whose targets are machines of another hosts.yml
        yield tmp_path / "inv"


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ("restore -t one --check", 2),
        ("restore -t all --check", 7),  # several boxes are given five seconds to end what they are at
        ("restore -t all --yes --json", 7),
        ("doctor -t all", 2),
        ("status -t all", 2),
        ("stage -t one --check", 2),
        ("tune -t one --check", 2),
        ("topo -t one", 2),
    ],
)
def test_it_ends_at_once(inventory, words, seconds):
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuctl", *words.split(), "-i", str(inventory)],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    with ends_within(seconds):
        out, said = process.communicate(timeout=120)
    assert (process.returncode, out) == (4, "")
    assert said.splitlines()[-1] == "interrupted; give the same command again"
    assert "Traceback" not in said
