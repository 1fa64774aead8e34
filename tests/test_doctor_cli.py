"""gpuctl doctor as somebody uses it who does not know it: typos, places that are not there, streams that are closed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gpuctl import doctor, plugins, snapshots

ROOT = Path(__file__).parents[1]
BOX = ROOT / "tests/boxes/h200/healthy.json"


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


def test_what_is_saved_is_told_with_what_was_masked(gpuctl, tmp_path):
    file = tmp_path / "box.json"
    done = gpuctl("doctor", "--from", BOX, "--save", file)
    assert f"wrote {file}" in done.stderr.splitlines()
    assert all(line.startswith(("masked: ", "wrote ")) for line in done.stderr.splitlines())
    assert json.loads(file.read_text())["schema"] == "gpuctl.snapshot/1"


def test_a_folder_that_is_not_there_is_a_mistake_before_anything_is_asked(gpuctl, tmp_path):
    done = gpuctl("doctor", "--from", BOX, "--save", tmp_path / "nowhere/box.json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"there is no folder {tmp_path / 'nowhere'}" in done.stderr
    assert not (tmp_path / "nowhere").exists()


OFFLINE = {
    "bench": ["bench", "demo", "--check"],
    "diagnose": ["diagnose", "README.md"],
    "doctor": ["doctor", "--from", str(BOX)],
    "init": ["init", "local", "--into", "NEW"],
    "plan": ["plan", "demo", "--offline"],
    "render": ["render", "plain"],
    "restore": ["restore", "--check"],
    "stage": ["stage", "tiny", "--check"],
    "status": ["status"],
    "topo": ["topo", "--from", str(BOX)],
    "tune": ["tune", "--check"],
}
ELSEWHERE = {
    "completion",
    "report",
    "tunnel",
    "load",
}  # no --json, but report's format; load needs a server (test_load.py)


def test_every_verb_is_looked_at():
    assert {*OFFLINE, *ELSEWHERE} == set(plugins.names("cli"))


@pytest.mark.parametrize("verb", sorted(OFFLINE))
def test_every_document_says_what_it_is_and_how_it_stands(verb, tmp_path):
    words = [str(tmp_path / "new") if word == "NEW" else word for word in OFFLINE[verb]]
    done = subprocess.run(
        [sys.executable, "-m", "gpuctl", *words, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    print(done.stdout[:2000], done.stderr)
    found = json.loads(done.stdout)
    assert re.fullmatch(r"gpuctl\.[a-z-]+/1", found["schema"])
    assert found["verdict"]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("line", "told"),
    [("Tried to allocate 2.00 GiB.", ": 2.00 GiB wanted"), ("", ""),
     ("Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 94.97 GiB of which 1.21 GiB is free.",
      ": 2.00 GiB wanted, 1.21 GiB free")],
)  # fmt: skip
def test_what_a_log_does_not_say_is_left_out(gpuctl, tmp_path, engine, line, told):
    log = tmp_path / "log"
    log.write_text(f"torch.OutOfMemoryError: CUDA out of memory. {line}\n")
    done = subprocess.run(
        [sys.executable, "-m", "gpuctl", "diagnose", "--engine", engine, str(log)], capture_output=True, text=True
    )
    said = [line for line in done.stdout.splitlines() if "Out of GPU memory" in line]
    assert all(re.search(r"memory[a-z ]*" + re.escape(told) + r" +\(", line) for line in said)
    assert "?" not in done.stdout
    assert ",  " not in done.stdout


def test_what_a_server_holds_is_said_in_words(tmp_path):
    from gpuctl.cli import diagnose
    from gpuctl.logs.rule import Capacity

    assert {*diagnose._HOLDS, *diagnose._MEMORY} == set(Capacity().as_json())


@pytest.mark.parametrize("verb", sorted(OFFLINE))
def test_closed_streams_are_no_fault_and_change_no_exit_code(verb, tmp_path):
    codes = set()
    for number, closed in enumerate(["", ">&-", ">&- 2>&- <&-"]):
        words = [str(tmp_path / str(number)) if word == "NEW" else word for word in OFFLINE[verb]]
        line = f"{shlex.join([sys.executable, '-m', 'gpuctl', *words])} {closed}"
        done = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert "fault" not in done.stderr
        codes.add(done.returncode)
    assert len(codes) == 1


def test_a_mistyped_check_is_named(gpuctl):
    done = gpuctl("doctor", "--explain", "lxc_rule_stal")
    assert done.returncode == 2
    assert "did you mean 'lxc_rule_stale'?" in done.stderr
    assert len(gpuctl("doctor", "--explain", "everything").stderr) < 500


def test_what_cannot_be_mended_is_told_once(gpuctl, tmp_path):
    done = gpuctl("doctor", "--fix", "--yes", "-t", "local")
    summaries = re.findall(r"\[(?:proved|likely)[^\]]*; (\w+)\]", done.stdout)
    assert len(summaries) == len(set(summaries))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("", "the driver's libraries on this machine and the kernel module are of different versions"),
        ("\nNVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed",
         "this machine has the driver's libraries in another version than the kernel module, which is 570.124.06"),
    ],
)  # fmt: skip
def test_versions_that_are_not_known_are_not_spoken_of(more, told):
    line = "Failed to initialize NVML: Driver/library version mismatch"
    found = doctor.diagnose(doctor.box_from(snapshots.read(line + more, "paste.txt")))
    assert [finding.summary for finding in found.findings] == [told]
