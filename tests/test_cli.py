"""The command line: light to start, kind to mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl import plugins

ROOT = Path(__file__).parents[1]
HEAVY = (
    "fabric",
    "paramiko",
    "ansible_runner",
    "pydantic",
    "jinja2",
    "rich",
    "yaml",
    "tenacity",
    "matplotlib",
    "numpy",
)


def gpuctl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuctl", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("words", [[], ["--help"], ["bench", "--help"], ["load", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(words):
    code = f"import sys; sys.argv = ['gpuctl', *{words!r}]\nfrom gpuctl.cli import main\ntry: main()\nexcept SystemExit: pass\nprint(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    loaded = set(re.findall(r"'([a-z_0-9]+)'", done.stdout.splitlines()[-1]))
    assert not loaded & set(HEAVY)


def test_every_verb_has_help_that_fits_a_terminal():
    for verb in plugins.names("cli"):
        done = gpuctl(verb, "--help")
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 120
        assert done.stdout.startswith(f"Usage: gpuctl {verb}")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["bnch"], 2, "did you mean 'bench'?"),
        (["bench"], 2, "Missing argument 'PHASE'"),
        (["bench", "demo", "--frehs"], 2, "No such option"),
        (["bench", "demo", "-i", "nowhere"], 2, "no such inventory folder"),
        (["bench", "dmo"], 2, "no phase 'dmo'; did you mean 'demo'?"),
        (["bench", "demo", "-t", "ct200"], 2, "ct200"),
        (["render", "plan"], 2, "no server 'plan'; did you mean 'plain'?"),
        (["load", "http://127.0.0.1:9"], 3, "refused"),
        (["load", "ftp://x"], 2, "ftp://x"),
        (["diagnose", "/"], 2, "Is a directory"),
        (["diagnose", "--engine", "foo", "README.md"], 2, "there are llamacpp, sglang, vllm"),
        (["bench", "demo", "--runs", "/proc"], 2, "--runs names another folder"),
        (["doctor", "--from", sys.executable], 2, "binary"),
        (["doctor", "--fix"], 2, "nobody is there to answer"),
        (["doctor", "--undo"], 2, "nobody is there to answer"),
        (["doctor", "--fix", "--undo", "--yes"], 2, "each other's opposite"),
        (["doctor", "--undo", "--from", "README.md", "--yes"], 2, "needs the machine"),
        (["doctor", "--explain", "everything"], 2, "no check 'everything'"),
        (["report", "no-such-run"], 2, "no-such-run"),
        (["report", "--runs", "/nonexistent"], 2, "no run there yet"),
    ],
)
def test_a_mistake_is_a_line_and_an_exit_code(words, code, said):
    done = gpuctl(*words)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("gpuctl: ")
    assert done.stderr.count("\n") == 1


def test_the_inventory_may_stand_before_the_verb_or_behind_it():
    assert (
        gpuctl("-i", "kpro6", "render", "tp1-auto").stdout == gpuctl("render", "tp1-auto", "-i", "kpro6").stdout != ""
    )
    assert gpuctl("-i", "kpro6", "render", "plain").returncode == 2
    assert gpuctl("-i", "kpro6", "render", "plain", "-i", "local").returncode == 0


def test_render_shows_a_server_of_the_campaign(golden):
    done = gpuctl("render", "tp4-ddtree-b15", "-i", "kpro6")
    golden("render-tp4-ddtree-b15.txt", done.stdout)


def test_the_shipped_inventory_can_be_named_from_anywhere(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "gpuctl", "render", "k26-eagle3", "-i", "kpro6"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert "--speculative-eagle-topk 1" in done.stdout
