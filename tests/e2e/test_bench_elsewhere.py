"""`gpuctl bench` on a machine over SSH that reboots, from one controller and then from another, with a real llama.cpp.

The machine is this one in a mount namespace of its own: its boot_id, one of its settings and what it knows of servers are
files here, and a reboot ends all of its processes.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from gpuctl import tiny_model
from tests.e2e.conftest import Desk
from tests.sshd import Sshd

SERVERS = """
defaults:
  tiny:
    engine: llamacpp
    model: tiny
    program: [{python}, -m, gpuctl.agent.llama_server]
    port: {port}
    flags: {{ctx-size: 4096, parallel: 1, threads: 1, gpu-layers: 0}}
servers:
  plain: {{use: tiny}}
  ngram: {{use: tiny, flags: {{spec-type: ngram-map-k}}}}
"""
PHASES = """
campaign: small
phases:
  p:
    target: box
    servers: [plain, ngram]
    baseline: plain
    reps: 2
    unstable_above: 100
    workloads:
      - decode: {prompts: [fib, qsort], max_tokens: [24]}
"""
CELLS = {f"p/{server}/decode/{prompt}-24" for server in ("plain", "ngram") for prompt in ("fib", "qsort")}
OWN = """
mount --make-rprivate / && mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id &&
mount --bind "$1/swappiness" /proc/sys/vm/swappiness && mkdir -p "$2" && mount --bind "$1/state" "$2" &&
shift 2 && exec "$@"
"""


class Machine(Sshd):
    """A machine that can be rebooted, and come back as another."""

    def __init__(self, folder: Path) -> None:
        (folder / "state").mkdir(parents=True)
        self.own, self.boots = folder, 0
        self._boots_as("60")
        state = f"{pwd.getpwnam(getpass.getuser()).pw_dir}/.local/state"
        super().__init__(folder / "sshd", around=("unshare", "-m", "sh", "-c", OWN, "sh", str(folder), state))

    def _boots_as(self, swappiness: str) -> None:
        (self.own / "boot_id").write_text(f"{uuid.uuid4()}\n")
        (self.own / "swappiness").write_text(f"{swappiness}\n")

    def processes(self) -> list[int]:
        """All of the machine: whatever is in its namespace."""
        ours, found = os.readlink(f"/proc/{self.process.pid}/ns/mnt"), []
        for path in Path("/proc").glob("[0-9]*/ns/mnt"):
            with contextlib.suppress(OSError):
                if os.readlink(path) == ours:
                    found.append(int(path.parts[2]))
        return found

    def off(self) -> None:
        pids = self.processes() if self.process.poll() is None else []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def reboot(self, swappiness: str = "60") -> None:
        self.off()
        self._boots_as(swappiness)
        time.sleep(1)
        self.start()


class Controller(Desk):
    """Somebody's laptop: its own home, its own folder, the login to the machine."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        folder.mkdir()
        super().__init__(folder)
        self.machine = machine
        known = {
            "ansible_host": "127.0.0.1", "ansible_port": machine.port, "ansible_user": machine.user,
            "ansible_ssh_private_key_file": str(machine.key),
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={machine.known_hosts}",
        }  # fmt: skip
        self.write("hosts", json.dumps({"all": {"hosts": {"box": known}}}))
        self.write("models", f"tiny: {{path: {machine.own}/tiny.gguf, context: 32768}}\n")
        self.write("servers", SERVERS.format(python=sys.executable, port=machine.port + 1))
        self.write("phases", PHASES)

    def events(self) -> list[dict]:
        path = self.run / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def count(self, event: str) -> int:
        return sum(one["event"] == event for one in self.events())


@pytest.fixture
def machine(tmp_path):
    if subprocess.run(["unshare", "-m", "mount", "--make-rprivate", "/"], capture_output=True).returncode != 0:
        pytest.skip("a machine with a boot_id of its own needs the right to mount (root)")
    machine = Machine(tmp_path / "box")
    tiny_model.write(machine.own / "tiny.gguf")
    yield machine
    machine.off()


@pytest.fixture
def laptop(tmp_path, machine):
    return Controller(tmp_path / "laptop", machine)


def another_day(run: Path) -> None:
    """Everything of the run folder happened three days earlier."""
    for path in [*run.rglob("*.json"), *run.rglob("*.jsonl")]:
        text = path.read_text()
        days = {day: f"{int(day[:4]) - 1}{day[4:]}" for day in re.findall(r'"(20\d\d-\d\d-\d\d)T', text)}
        for day, earlier in days.items():
            text = text.replace(f'"{day}T', f'"{earlier}T')
        path.write_text(text)
        os.utime(path, (time.time() - 3 * 86400,) * 2)


def test_it_goes_on_on_another_day_from_another_machine_with_the_run_folder_copied(laptop, machine, tmp_path):
    process = laptop.start("bench", "p", "--yes")
    laptop.wait_for(lambda: laptop.count("cell_done") >= 1 or process.poll() is not None, seconds=90)
    assert process.poll() is None, process.communicate()
    process.kill()
    process.communicate()
    before = laptop.records()
    assert 0 < len(before) < len(CELLS)
    assert {record["state"] for record in before.values()} == {"ok"}

    other = Controller(tmp_path / "other", machine)
    shutil.copytree(laptop.run, other.run)
    other.write("servers", (laptop.inventory / "servers.yml").read_text())
    shutil.rmtree(laptop.folder)  # it is lost
    another_day(other.run)
    before = other.records()

    code, out, err = other.gpuctl("bench", "p", "--yes")
    assert code == 0, out + err
    assert "left running by an earlier run" in out  # the server of the killed one
    assert out.count("SKIP") == len(before)
    after = other.records()
    assert set(after) == CELLS
    assert {record["state"] for record in after.values()} == {"ok"}
    assert {name: after[name] for name in before} == before
    assert (other.run / "report" / "report.md").exists()

    # one with a foreign lock file, a half-written record and a torn last line of events, as a copy made meanwhile has
    shutil.copytree(other.run, tmp_path / "copy")
    name = sorted(CELLS)[0]
    (other.run / f"cells/{name}.json").write_text('{"schema": "gpuc')
    with open(other.run / "events.jsonl", "a") as file:
        file.write('{"t": "2026-')
    code, out, err = other.gpuctl("bench", "p", "--yes")
    assert code == 0, out + err
    assert out.count("SKIP") == len(CELLS) - 1
    assert {record["state"] for record in other.records().values()} == {"ok"}


def test_after_a_restart_that_changed_the_machine_finished_cells_are_measured_again_and_it_says_so(laptop, machine):
    process = laptop.start("bench", "p", "--yes")
    laptop.wait_for(lambda: laptop.count("cell_done") >= 3 or process.poll() is not None, seconds=120)
    assert process.poll() is None, process.communicate()
    before = laptop.records()
    machine.reboot(swappiness="10")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    assert "Traceback" not in err
    assert "the restart changed" in out
    assert "swappiness 60 -> 10" in out
    after = laptop.records()
    assert set(after) == CELLS
    assert {record["fingerprint"]["machine"]["tuning"]["swappiness"] for record in after.values()} == {"10"}
    assert all(after[name]["started"] > before[name]["started"] for name in before)
    assert len({record["boot"]["boot_id"] for record in after.values()}) == 1
