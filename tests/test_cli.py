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
        (["report", "--compare", "x", "--fail-on", "banana"], 2, "'--fail-on': 'banana' is not a valid number;"),
        (["load", "http://127.0.0.1:9", "--requests", "2.5"], 2, "'--requests': '2.5' is not a valid whole number;"),
        (["doctor", "--undo"], 2, "nobody is there to answer"),
        (["doctor", "--fix", "--undo", "--yes"], 2, "each other's opposite"),
        (["doctor", "--undo", "--from", "README.md", "--yes"], 2, "needs the machine"),
        (["doctor", "--explain", "everything"], 2, "no check 'everything'"),
        (["report", "no-such-run"], 2, "no-such-run"),
        (["report", "--runs", "/nonexistent"], 2, "no run there yet"),
        (["report", "README.md"], 2, "README.md is a file; a run is a folder"),
        (["report", "runs/nothing-of-this-name"], 2, "gpuctl: runs/nothing-of-this-name does not exist"),
        (["report", "--compare", "a", "--fail-on", "nan"], 2, "'nan' is no number"),
        (["status", "--watch", "--every", "inf"], 2, "inf"),
        (["load", "http://127.0.0.1:9", "--rate", "inf"], 2, "'inf' is no number"),
        (["load", "http://127.0.0.1:9", "--concurrency", "99999999"], 2, "1<=x<=65535"),
        (["load", "http://127.0.0.1:9", "--raw", "tests"], 2, "gpuctl: tests: Is a directory\n"),
        (["tunnel", "99999"], 2, "99999 is no port: 1 to 65535"),
        (["bench", "demo", "--check", "--run", "../../elsewhere"], 2, "'../../elsewhere' is no name"),
        (["plan", "tp1-auto", "-i", "kpro6", "--offline", "--engine-version", "newest"], 2, "begins with a digit"),
        (["completion", "tcsh"], 2, "'bash', 'zsh', 'fish'"),
        (["completion"], 2, "Choose from: bash, zsh, fish;"),
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


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "--from", "tests/boxes/h200/healthy.json", "--save"],
        ["topo", "--from", "tests/boxes/h200/healthy.json", "--svg"],
    ],
)
@pytest.mark.parametrize("place", ["", "file/below"])
def test_a_file_that_cannot_be_written_is_a_mistake_and_leaves_nothing(tmp_path, words, place):
    (tmp_path / "file").touch()
    done = gpuctl(*words, str(tmp_path / place))
    assert done.returncode == 2
    assert done.stderr.startswith(f"gpuctl: {tmp_path / place}: ")
    assert done.stderr.endswith(f"; {words[-1]} names another file\n")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


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


def test_what_another_machine_said_can_come_through_a_pipe():
    snapshot = (ROOT / "tests/boxes/h200/healthy.json").read_bytes()
    words = [sys.executable, "-m", "gpuctl", "doctor", "--from", "-"]
    done = subprocess.run(words, cwd=ROOT, input=snapshot, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"cuInit = 0, 1 device" in done.stdout
