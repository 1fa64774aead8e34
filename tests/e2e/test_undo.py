"""Taking back on a machine where nothing was done, and nothing could be: no systemd runs there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(Path("/run/systemd/system").exists(), reason="systemd runs here")
@pytest.mark.parametrize(
    "words", ["doctor --undo --check", "doctor --undo --yes", "tune --undo --check", "tune --undo --yes"]
)
def test_there_is_nothing_to_take_back(tmp_path, words):
    (tmp_path / "hosts.yml").write_text("all: {hosts: {here: {ansible_connection: local}}}\n")
    done = subprocess.run(
        [sys.executable, "-m", "gpuctl", *words.split(), "-i", str(tmp_path)],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("here: nothing ")
