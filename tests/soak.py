"""Campaigns with faults at random moments, in the lab: `python -m tests.soak --runs 50`, or `make soak`.

Each run is a small campaign on guest 200 through everything that --seed draws: kill -9 of gpuctl, of the server, of an
agent; a restart of the guest, a reboot of the node with another number of nvidia-uvm; the network cut for 5 to 60 s; tmpfs
or disk full; a model cut short or with a flipped bit. gpuctl is given the same command again whenever it ends before
the campaign does, as a person or a service would. At the end of a run: every cell is there, valid, once, and was measured
within one boot. The seed of a run is printed; `--seed N --runs 1` replays its faults and their moments. Of a run that did
not end so, everything is kept in runs/soak/SEED: the run folder, the inventory, what each gpuctl said, the guest's journal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from tests.lab import hubclient
from tests.lab.engines.install import write_cache, write_model
from tests.lab.faults import boot, driver, machine, model, network
from tests.lab.hub import Hub
from tests.lab.lab import Lab
from tests.lab.layout import NoLab
from tests.test_restore_lab import CACHE, Campaign

KEPT = Path(__file__).parents[1] / "runs" / "soak"
REPOSITORY = "Qwen/Qwen3.6-27B"
SIZES = {"shards": 4, "size": 8 << 20}  # as the lab's guests have it
MEMORY = "/run/gpuctl/models/Qwen3.6-27B"
PHASES = """
campaign: lab
phases:
  tp1:
    target: ct200
    baseline: tp1-auto
    reps: 2
    servers: [tp1-auto, tp1-linear]
    workloads:
      - decode: {prompts: [fib, qsort], max_tokens: [32]}
"""
CELLS = {f"tp1/{server}/decode/{point}-32" for server in ("tp1-auto", "tp1-linear") for point in ("fib", "qsort")}
INVOCATIONS = 8  # of the same command, before a run is given up
LIMIT_S = 420.0  # of one invocation
SPAN_S = 25.0  # the first fault comes within so many seconds of the start, the next within as many of it


@dataclass
class Campaigning:
    """One run: the campaign, the process that works on it, and what was done to both."""

    campaign: Campaign
    draw: random.Random
    process: subprocess.Popen[str] | None = None
    undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def lab(self) -> Lab:
        return self.campaign.lab

    # -- what happens

    def kill_gpuctl(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)

    def kill_the_server(self) -> None:
        self.lab.run("ct200", ["systemctl", "kill", "--signal=SIGKILL", "gpuctl-tp1-*"])

    def kill_an_agent(self) -> None:
        name = self.draw.choice(["load.py", "supervise.py", "stage.py"])
        script = 'for p in /proc/[0-9]*; do tr "\\0" " " < $p/cmdline | grep -q -- "$1" && kill -9 ${p#/proc/}; done'
        self.lab.run("ct200", ["sh", "-c", script, "sh", f"argv.*{name}"])

    def restart_the_guest(self) -> None:
        boot.reboot(self.lab, "ct200", wait=False)

    def reboot_the_node(self) -> None:
        driver.renumber_uvm(self.lab, "kpro6", self.draw.randint(505, 511))
        boot.reboot(self.lab, "kpro6", wait=False)

    def cut_the_power(self) -> None:
        boot.power_cut(self.lab, "kpro6", wait=False)

    def cut_the_network(self) -> None:
        seconds = self.draw.uniform(5, 60)
        network.cut(self.lab, "ct200")
        time.sleep(seconds)
        network.cut(self.lab, "ct200", undo=True)

    def fill_the_memory(self) -> None:
        model.fill_tmpfs(self.lab, "ct200")
        self.undo.append(lambda: model.fill_tmpfs(self.lab, "ct200", undo=True))

    def fill_the_disk(self) -> None:
        machine.fill_disk(self.lab, "ct200")
        self.undo.append(lambda: machine.fill_disk(self.lab, "ct200", undo=True))

    def cut_the_model_short(self) -> None:
        model.truncate_model(self.lab, "ct200", self.draw.choice([MEMORY, CACHE]), bytes_=self.draw.randint(1, 5000))

    def flip_a_bit(self) -> None:
        model.flip_bit(self.lab, "ct200", self.draw.choice([MEMORY, CACHE]))

    FAULTS = (
        kill_gpuctl, kill_the_server, kill_an_agent, restart_the_guest, reboot_the_node, cut_the_power,
        cut_the_network, fill_the_memory, fill_the_disk, cut_the_model_short, flip_a_bit,
    )  # fmt: skip


@dataclass
class Report:
    """What became of a run. `wrong` is empty when it ended as it has to."""

    seed: int
    faults: list[str]
    codes: list[int]
    seconds: float
    wrong: list[str]
    said: list[str] = field(default_factory=list)  # what gpuctl said of failures, where it ended before the campaign
    kept: str = ""  # where the evidence of a run that went wrong lies

    def line(self) -> str:
        how = "ok  " if not self.wrong else "WRONG"
        told = f"{how} seed {self.seed}: {', '.join(self.faults)}; gpuctl ended with {self.codes}; {self.seconds:.0f} s"
        more = [*self.wrong, *(f"it said: {one}" for one in self.said), *([f"kept: {self.kept}"] if self.kept else [])]
        return told + "".join(f"\n     {one}" for one in more)


def run(lab: Lab, hub: Hub, seed: int) -> Report:
    """One campaign with the faults of a seed."""
    draw = random.Random(seed)
    faults = [draw.choice(Campaigning.FAULTS) for _ in range(draw.choice([1, 1, 2, 3]))]
    moments = [draw.uniform(0, SPAN_S) for _ in faults]
    _tidied(lab)
    _fresh_cache(lab)
    began, codes = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="gpuctl-soak-") as folder:
        campaign = Campaign(Path(folder), lab, hub.url)
        (campaign.inventory / "phases.yml").write_text(PHASES)
        going = Campaigning(campaign, draw)
        boots = Boots(lab)
        wrong: list[str] = []
        told, said, kept = [], [], ""
        todo = list(zip(faults, moments, strict=True))
        try:
            for _ in range(INVOCATIONS):
                going.process = campaign.start("bench", "tp1", "--yes")
                ends = time.monotonic() + LIMIT_S
                while todo and going.process.poll() is None:
                    fault, moment = todo[0]
                    if not _sleep(moment, going.process):
                        break
                    try:
                        fault(going)
                        told.append(f"{fault.__name__} after {moment:.1f} s")
                    except Exception as error:  # what is broken already cannot always be broken again
                        told.append(f"{fault.__name__} (not possible: {str(error).splitlines()[0][:80]})")
                    todo.pop(0)
                try:
                    out, err = going.process.communicate(timeout=max(1.0, ends - time.monotonic()))
                except subprocess.TimeoutExpired:
                    going.process.kill()
                    out, err = going.process.communicate()
                    wrong.append(f"gpuctl did not end within {LIMIT_S:.0f} s; its last words: {out.splitlines()[-3:]}")
                codes.append(going.process.returncode)
                (Path(folder) / f"gpuctl-{len(codes)}.txt").write_text(f"{out}\n--- stderr\n{err}")
                if "Traceback" in err:
                    wrong.append(f"a traceback: {err.splitlines()[-1]}")
                if codes[-1] == 0 or wrong:
                    break
                lines = [*out.splitlines(), *err.splitlines()]
                said += [line.strip() for line in lines if re.search(r"FAILED|STILL THERE|^gpuctl:", line)][-3:]
                _mended(going)  # somebody makes room, and gives the same command again
            wrong += judged(campaign, boots)
        finally:
            boots.end()
            if going.process is not None and going.process.poll() is None:
                going.process.kill()  # whatever ended the run here: gpuctl does not go on beside the next
                going.process.communicate()
            if wrong or sys.exc_info()[0] is not None:
                kept = _evidence(lab, Path(folder), seed)
            _mended(going)
            _tidied(lab)
        return Report(seed, told, codes, time.monotonic() - began, wrong, said, kept)


def _evidence(lab: Lab, folder: Path, seed: int) -> str:
    """Keeps what a run left; where."""
    kept = KEPT / str(seed)
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder, kept, symlinks=True)
    with suppress(Exception):  # a guest that is away has none
        journal = lab.run("ct200", ["journalctl", "--no-pager", "--since=-15min", "-o", "short-precise"])
        (kept / "journal.txt").write_text(journal.stdout)
    return str(kept)


def _sleep(seconds: float, process: subprocess.Popen[str]) -> bool:
    """Whether the process still ran after so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            return False
        time.sleep(0.05)
    return process.poll() is None


class Boots:
    """The guest's boot_id from second to second, as the lab itself sees it: what gpuctl says is held against it."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.seen, self._over = lab, [], threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            self.seen.append((time.time(), self.lab.boot_id("ct200")))

    def end(self) -> None:
        self._over.set()
        self._thread.join(30)

    def others(self, boot: str, started: float, ended: float) -> set[str]:
        """Boots other than this one that were seen between two moments."""
        return {seen for at, seen in self.seen if started + 1 < at < ended - 1} - {boot}


def judged(campaign: Campaign, boots: Boots) -> list[str]:
    """What is wrong with what the campaign left."""
    wrong = []
    folder = campaign.folder / "runs/lab"
    records = {}
    for path in folder.glob("cells/*/*/*/*.json"):
        record = json.loads(path.read_text())
        records["/".join(record["cell"].values())] = record
    wrong += [f"{name} is lost" for name in sorted(CELLS - set(records))]
    wrong += [f"{name} is none of the campaign's" for name in sorted(set(records) - CELLS)]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    restarts = [event["t"] for event in events if event["event"] in ("machine_back", "started_anew")
                and event.get("happened") in ("node_reboot", "guest_restart", "restart")]  # fmt: skip
    for name, record in records.items():
        if record["state"] not in ("ok", "unstable"):
            wrong.append(f"{name} is {record['state']}: {(record['failure'] or {}).get('summary')}")
        started, ended = (datetime.fromisoformat(record[key]).timestamp() for key in ("started", "ended"))
        if others := boots.others(record["boot"]["boot_id"], started, ended):
            wrong.append(f"{name} was measured across a boot: {others}")
        done = [event for event in events if event["event"] == "cell_done" and event["cell"] == name
                and event["state"] in ("ok", "unstable")]  # fmt: skip
        if len(done) != 1:
            wrong.append(f"{name} was measured {len(done)} times, with {len(restarts)} restarts between")
        raw = folder / "cells" / f"{name}.raw.jsonl"
        if not raw.exists():
            wrong.append(f"{name} has no raw stamps")
    return wrong


def _mended(going: Campaigning) -> None:
    """What a fault filled is made roomy again."""
    while going.undo:
        try:
            going.undo.pop()()
        except Exception as error:  # a restart has undone it already
            print(f"     {error}", file=sys.stderr)
    with suppress(NoLab):  # a guest that is just starting gets an interface that nobody has cut
        network.cut(going.lab, "ct200", undo=True)


def _tidied(lab: Lab) -> None:
    """The guest as a new campaign expects it: up, nothing of the last one running."""
    lab.wait("kpro6", "ct200", timeout=180)
    lab.run(
        "ct200",
        [
            "sh",
            "-c",
            "systemctl stop 'gpuctl-tp1-*'; find /etc/systemd/system -name 'gpuctl-tp1-*' -delete; systemctl daemon-reload",
        ],
    )


def _fresh_cache(lab: Lab) -> None:
    """The model's cache in the guest, whole: an earlier run may have left a flipped bit in it."""
    root = lab.root("ct200")
    shutil.rmtree(f"{root}{CACHE}", ignore_errors=True)
    write_cache(root, str(Path(CACHE).parent), REPOSITORY, "Qwen3.6-27B", **SIZES)


@contextmanager
def hub_of(lab: Lab) -> Iterator[Hub]:
    """The model's repository where the guest reaches it, and the client in the guest."""
    hubclient.install(lab.root("ct200"))
    with Hub(f"{lab.subnet}.1") as hub, tempfile.TemporaryDirectory() as folder:
        hub.commit(REPOSITORY, write_model(Path(folder), "m", "Qwen3.6-27B", **SIZES))
        yield hub


def _version() -> str:
    """The commit this is, and whether something in the working tree is not."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=KEPT.parents[1], capture_output=True, text=True)
    return done.stdout.strip() or "a copy without its history"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, help="of the first run; the following ones count on from it")
    arguments = parser.parse_args()
    first = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1_000_000)
    print(f"gpuctl at {_version()}", flush=True)
    name = os.environ.get("GPUCTL_LAB")
    lab = Lab(name or f"soak-{os.getpid()}")
    if not (name and lab.alive()):
        lab.up(lambda text: print(f"lab: {text}", file=sys.stderr), stay=bool(name))
    bad = 0
    try:
        with hub_of(lab) as hub:
            for number in range(arguments.runs):
                try:
                    report = run(lab, hub, first + number)
                except Exception as error:  # of the lab or of soak itself: one run, not the fifty
                    why = f"the run itself ended: {type(error).__name__}: {error}"
                    report = Report(first + number, [], [], 0.0, [why], kept=str(KEPT / str(first + number)))
                bad += bool(report.wrong)
                print(f"{number + 1}/{arguments.runs} {report.line()}", flush=True)
    finally:
        if not name:
            lab.down()
    print(f"{arguments.runs - bad} of {arguments.runs} runs ended with the whole campaign; seeds from {first}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
