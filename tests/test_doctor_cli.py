"""gpuctl doctor as somebody uses it who does not know it: typos, places that are not there, streams that are closed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture
def gpuctl(tmp_path):
    """`gpuctl(words)` with an inventory of this machine alone, which its author calls a guest."""
    (tmp_path / "hosts.yml").write_text("guests: {hosts: {local: {ansible_connection: local}}}\n")

    def run(*words, **more):
        line = [sys.executable, "-m", "gpuctl", words[0], "-i", str(tmp_path), *map(str, words[1:])]
        return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, **more)

    return run


@pytest.mark.parametrize("words", [("--user", "nosuchuser"), ("--unit", "nosuchunit")], ids=lambda words: words[0])
def test_who_is_not_there_cannot_be_looked_at(gpuctl, words):
    done = gpuctl("doctor", *words)
    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if words[1] in line]
    assert line.startswith("gpuctl: ")
