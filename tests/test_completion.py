"""What a shell is told when somebody presses Tab."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def gpuctl(*words, **env):
    return subprocess.run(
        [sys.executable, "-m", "gpuctl", *words], capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, **env},
    )  # fmt: skip


def completed(line):
    words = line.split(" ")
    done = gpuctl(COMP_WORDS=line, COMP_CWORD=str(len(words) - 1), _GPUCTL_COMPLETE="bash_complete")
    assert done.stderr == ""
    return [one.partition(",")[2] for one in done.stdout.split()]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gpuctl bench -i kpro6 tp", ["tp1", "tp4", "tp8"]),
        ("gpuctl render -i kpro6 k26", ["k26-auto", "k26-eagle3"]),
        ("gpuctl bench tp1 -i kpro6 -t ct", ["ct200"]),
        ("gpuctl bench -i nowhere x", []),
        ("gpuctl restore -i kpro6 -t ct", ["ct200"]),
        ("gpuctl plan -i kpro6 k26", ["k26", "k26-auto", "k26-eagle3"]),
        ("gpuctl stage -i kpro6 kimi-k2.6-", ["kimi-k2.6-eagle3"]),
        ("gpuctl doctor --explain lxc_rule_s", ["lxc_rule_stale"]),
        ("gpuctl status -i kp", ["kpro6"]),
        ("gpuctl completion f", ["fish"]),
    ],
)
def test_names_of_the_inventory_are_completed(line, words):
    assert completed(line) == words


def test_verbs_and_options_are_completed():
    assert {"render", "report"} <= set(completed("gpuctl re"))
    assert "--fresh" in completed("gpuctl bench demo --fr")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell):
    done = gpuctl("completion", shell)
    assert done.returncode == 0
    assert f"_GPUCTL_COMPLETE={shell}_complete" in done.stdout


def test_a_real_bash_takes_it(tmp_path):
    (tmp_path / "gpuctl").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m gpuctl "$@"\n')
    (tmp_path / "gpuctl").chmod(0o755)
    script = 'eval "$(gpuctl completion bash)"; COMP_WORDS=(gpuctl bench dem); COMP_CWORD=2; _gpuctl_completion gpuctl; echo "${COMPREPLY[@]}"'
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT, env={**os.environ, "PATH": path}
    )
    assert done.stdout == "demo\n", done.stderr
