"""Servers killed on purpose in the middle of a campaign under a real SGLang, then gpuctl itself.

    python -m tests.gpu.killed OUT [--first]          needs SGLang and its models (inventory/)

The phase `killed` runs. SGLang's scheduler, a child of the server that we started, is killed (SIGKILL) while the first
cell is measured; it is killed again in its second try and, that time the server itself, in its third. Then gpuctl is
killed in the middle of the second server, goes on, and tries what failed again. OUT gets the run folder, what gpuctl said,
and killed.json. `--first`: only the first one is killed. Exit status 1 when something was not as it has to be.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.doctor import INVENTORY, REPOSITORY

CAMPAIGN = "gpu-killed"
NOTICED_WITHIN_S = 2.0
SGLANG_GOES_ON_S = 6.0  # it looks for a dead child each second, and then sleeps for five before it ends
INTO_S = 1.5  # of the measuring
PATIENCE_S = 240


class Campaign:
    def __init__(self, out: Path) -> None:
        self.out, self.run = out, out / "runs" / CAMPAIGN
        self.wrong: list[str] = []
        self.noticed: list[dict[str, Any]] = []

    def start(self, *options: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "gpuctl", "bench", "killed", "-i", str(INVENTORY), "--runs", str(self.out / "runs"),
                "--run", CAMPAIGN, "--yes", *options]  # fmt: skip
        with (self.out / "said.txt").open("a") as said:
            said.write(f"$ gpuctl {' '.join(argv[3:])}\n")
            said.flush()
            return subprocess.Popen(argv, cwd=REPOSITORY, stdout=said, stderr=subprocess.STDOUT, text=True)

    def events(self) -> list[dict[str, Any]]:
        try:
            lines = (self.run / "events.jsonl").read_text().splitlines(keepends=True)
        except OSError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def count(self, name: str) -> int:
        return [event["event"] for event in self.events()].count(name)

    def said(self) -> int:
        """How often gpuctl said that a server goes down, or has ended."""
        text = (self.out / "said.txt").read_text()
        return text.count(" is going down") + text.count("  BROKEN OFF")

    def wait(self, what: str, is_so: Any, process: subprocess.Popen[str], within_s: float = PATIENCE_S) -> float:
        """Seconds it took. Raises RuntimeError."""
        began = time.monotonic()
        while not is_so():
            if process.poll() is not None:
                raise RuntimeError(f"gpuctl ended ({process.returncode}) and {what} was waited for")
            if time.monotonic() - began > within_s:
                raise RuntimeError(f"{what}: not within {within_s:g} s")
            time.sleep(0.02)
        return time.monotonic() - began

    def must(self, what: str, is_so: bool, **more: Any) -> None:
        print(f"{'ok   ' if is_so else 'WRONG'} {what} {more or ''}", flush=True)
        if not is_so:
            self.wrong.append(what)

    def kill(self, ready: int, whom: str, process: subprocess.Popen[str]) -> None:
        """Kills the scheduler, or the server, once it is ready for the n-th time and measured; times the noticing."""
        self.wait(f"server ready {ready}", lambda: self.count("server_ready") >= ready, process)
        time.sleep(INTO_S)
        server = running()
        pid = server if whom == "server" else scheduler_of(server)
        said, died = self.said(), self.count("server_died")
        os.kill(pid, signal.SIGKILL)
        told = self.wait("telling", lambda: self.said() > said, process, 60)
        over = told + self.wait("server_died", lambda: self.count("server_died") > died, process, 60)
        event = [event for event in self.events() if event["event"] == "server_died"][-1]
        row = {"killed": whom, "pid": pid, "told_s": round(told, 2), "over_s": round(over, 2), "why": event["why"]}
        self.noticed.append(row)
        within = NOTICED_WITHIN_S + (SGLANG_GOES_ON_S if whom == "scheduler" else 0)
        self.must(f"{whom} killed: told within {NOTICED_WITHIN_S:g} s", told <= NOTICED_WITHIN_S, s=row["told_s"])
        self.must(f"{whom} killed: the server was over within {within:g} s", over <= within, s=row["over_s"])


def running() -> int:
    """The process that gpuctl started as its server."""
    folder = Path("~/.local/state/gpuctl/servers").expanduser()
    for path in folder.glob("gpuctl-killed-*/state.json"):
        state = json.loads(path.read_text())
        if Path(f"/proc/{state['pid']}").exists():
            return int(state["pid"])
    raise RuntimeError("no server of the phase runs")


def scheduler_of(server: int) -> int:
    """SGLang's scheduler: what descends from the server and has that title."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(text[text.rindex(")") + 2 :].split()[1])
    below, new = set(), {server}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        below |= new
    found = [pid for pid in below if b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    if len(found) != 1:
        raise RuntimeError(f"schedulers of {server}: {found}")
    return found[0]


def left(before: Iterable[int] = ()) -> list[str]:
    """Processes of SGLang that are there, and were not before."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            if ("sglang::" in words or "sglang.launch_server" in words) and int(path.parent.name) not in before:
                found.append(f"{path.parent.name} {words[:60]}")
    return found


def states(records: Mapping[str, Any]) -> dict[str, str]:
    return {name: record.get("state", "none") for name, record in records.items()}


GOOD = ("ok", "unstable", "capacity_limited")


def all_records(campaign: Campaign, server: str) -> dict[str, Any]:
    folder = campaign.run / "cells" / "killed" / server
    return {
        str(path.relative_to(folder).with_suffix("")): json.loads(path.read_text())
        for path in sorted(folder.glob("*/*.json"))
    }


def play(campaign: Campaign, first_only: bool) -> None:
    others = [int(line.split()[0]) for line in left()]
    process = campaign.start()
    campaign.kill(1, "scheduler", process)
    if first_only:
        process.terminate()
        campaign.must("interrupted, it exits with 4", process.wait(60) == 4)
        campaign.must("nothing is left running", not left(others), left=left(others))
        return
    campaign.kill(2, "scheduler", process)
    campaign.kill(3, "server", process)
    campaign.wait("the next server", lambda: campaign.count("server_ready") >= 5, process)
    first = all_records(campaign, "killed-auto")
    failed = {name: record for name, record in first.items() if record["state"] == "failed"}
    campaign.must(
        "one cell failed, the others were measured", len(failed) == 1 and len(first) == 3, states=states(first)
    )
    for name, record in failed.items():
        failure = record["failure"]
        campaign.must(
            f"{name}: signal, exit status, last words, no number",
            failure.get("signal") == "SIGKILL" and bool(failure.get("evidence")) and not record["metrics"],
            summary=failure.get("summary"), status=failure.get("exit_status"), lines=len(failure.get("evidence") or ()),
        )  # fmt: skip
    campaign.must("broken off three times", campaign.count("server_died") == 3)
    # gpuctl itself, with a cell of the second server done
    campaign.wait("a cell of the second server", lambda: len(all_records(campaign, "killed-ngram")) >= 1, process)
    process.kill()
    process.wait()
    campaign.must("its server was left running", bool(left(others)))
    before = all_records(campaign, "killed-ngram")
    process = campaign.start()
    code = process.wait(PATIENCE_S)
    campaign.must("the same command ends with 1: a cell is failed, and kept", code == 1, code=code)
    campaign.must("it stopped the server that was left", campaign.count("orphan_stopped") == 1)
    second = all_records(campaign, "killed-ngram")
    campaign.must(
        "all of the second server",
        len(second) == 3 and set(states(second).values()) <= set(GOOD),
        states=states(second),
    )
    campaign.must("what was measured was kept", all(second[name]["started"] == one["started"] for name, one in before.items()),
                  kept=len(before))  # fmt: skip
    code = campaign.start("--retry-failed").wait(PATIENCE_S)
    first = all_records(campaign, "killed-auto")
    campaign.must(
        "--retry-failed measures it", code == 0 and set(states(first).values()) <= set(GOOD), states=states(first)
    )
    began = time.monotonic()
    code = campaign.start().wait(PATIENCE_S)
    campaign.must("and once more measures none", code == 0, s=round(time.monotonic() - began, 1))
    campaign.must("nothing is left running", not left(others), left=left(others))


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    out = Path(words[0]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    campaign, began = Campaign(out), time.monotonic()
    try:
        play(campaign, "--first" in words)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        campaign.must(str(error), False)
    document = {"noticed": campaign.noticed, "wrong": campaign.wrong, "s": round(time.monotonic() - began, 1)}
    (out / "killed.json").write_text(json.dumps(document, indent=1))
    print(json.dumps(document))
    return int(bool(campaign.wrong))


if __name__ == "__main__":
    sys.exit(main())
