"""What deploying a server costs beyond the engine's own start, and how much of it is Ansible's. Needs the lab (root).

    deploy.py [--rounds 5] [--write]

The engine double is brought up on a guest as `bench` does it (unit rendered and placed, started, followed to readiness,
identity and a first answer), and stopped again; over SSH and by the node's pct exec. Taken off is what the same command
line needs on the guest itself, from its start to the first good /health, and from SIGTERM to its end. `--write` puts
the result into docs/deploying.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpuctl import config, deploy, hosts, plugins
from gpuctl.engines import Launch, environment
from gpuctl.serving import bring_up, take_down, unit_name
from gpuctl.store import Run
from gpuctl.supervision import Start, Units
from tests.lab.lab import Lab

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "deploying.md"
AIM_S = 5.0
PORT = 30999
ALONE = """
import json, os, signal, subprocess, sys, time, urllib.request
job = json.loads(sys.argv[1])
began = time.monotonic()
engine = subprocess.Popen(job["argv"], env={**os.environ, **job["env"]}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
while True:
    try:
        if urllib.request.urlopen(job["url"], timeout=5).status == 200: break
    except OSError: pass
    time.sleep(0.02)
ready = time.monotonic()
engine.terminate(); engine.wait()
print(json.dumps([ready - began, time.monotonic() - ready]))
"""


class Guest:
    def __init__(self, machines: hosts.Inventory, name: str, model: str) -> None:
        self.way = hosts.transports(machines)[name]
        flags = {"tp-size": 1, "context-length": 4096, "max-running-requests": 4, "mem-fraction-static": 0.75}
        program = ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]
        self.server = config.Server(
            engine="sglang", model="m", program=program, flags=flags, port=PORT, env={"LAB_SGLANG_STARTUP_SCALE": "0"}
        )
        self.engine = plugins.get("engines", "sglang")
        self.launch = Launch("perf", self.server, model)
        self.unit = unit_name("perf")
        self.placing = 0.0
        place = deploy.placer(machines, machines.machines[name], self.way, {self.unit: self.server})
        self.supervisor = Units(self.way, lambda start: self.place(place, start))

    def place(self, place, start: Start) -> None:
        began = time.perf_counter()
        place(start)
        self.placing = time.perf_counter() - began

    def alone(self) -> float:
        """Seconds the engine itself takes to come and to go."""
        url = f"{self.launch.base_url}{self.engine.HEALTH[0]}"
        job = {"argv": self.engine.argv(self.launch), "env": environment(self.engine, self.launch), "url": url}
        done = self.way.run(["python3", "-c", ALONE, json.dumps(job)], timeout=120)
        assert done.rc == 0, done.stderr.decode()
        return sum(json.loads(done.stdout))

    def deployed(self, run: Run) -> tuple[float, float]:
        """(seconds to bring it up and take it down, those of placing its unit)."""
        began = time.perf_counter()
        up = bring_up(
            self.engine, self.launch, self.supervisor, run=run, owner="perf", tell=lambda *_, **__: None
        )  # fmt: skip
        take_down(up, self.supervisor)
        return time.perf_counter() - began, self.placing

    def forget(self) -> None:
        path = f"/etc/systemd/system/{self.unit}.service"
        self.way.run(["sh", "-c", f"rm -f {path}; systemctl daemon-reload"])


def rows(guest: Guest, rounds: int, folder: Path) -> list[tuple[str, float, float, float]]:
    """(what, engine alone, beyond, placing) in seconds, medians."""
    found = []
    for what in ("new", "in place"):
        beyond, alone, placing = [], [], []
        for _ in range(rounds):
            if what == "new":
                guest.forget()
            alone.append(guest.alone())
            whole, place = guest.deployed(Run(folder))
            beyond.append(whole - alone[-1])
            placing.append(place)
        found.append((what, *(statistics.median(values) for values in (alone, beyond, placing))))
    guest.forget()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    name = os.environ.get("GPUCTL_LAB")
    lab = Lab(name or f"perf-{os.getpid()}")
    lines, worst = [], 0.0
    if not (name and lab.alive()):
        lab.up(stay=False)
    try:
        machines = hosts.load(lab.inventory)
        with tempfile.TemporaryDirectory() as folder:
            for machine, way in (("ct200", "SSH"), ("ct202", "pct exec")):
                guest = Guest(machines, machine, "/root/models/Qwen3.6-27B-DFlash")
                guest.deployed(Run(Path(folder)))  # connections and caches
                for what, alone, beyond, placing in rows(guest, options.rounds, Path(folder)):
                    worst = max(worst, beyond)
                    share = f"{placing:.2f} ({100 * placing / beyond:.0f} %)"
                    lines.append(f"| {way} | {what} | {alone:.2f} | {beyond:.2f} | {share} |")
                guest.way.close()
    finally:
        if not name:
            lab.down()
    text = "\n".join(
        [
            "# What deploying costs",
            "",
            f"Made by `make perf` on {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC: {os.cpu_count()} cores, Linux "
            f"{platform.release()}, Python {platform.python_version()}, in the lab (docs/lab.md), load average "
            f"{os.getloadavg()[1]:.1f}.",
            "",
            "One server of the engine double brought up as `gpuctl bench` does it, until it has answered, and stopped. Beyond",
            "is what is left when the engine's own start and stop are taken off (the same command line on the guest itself).",
            "Placing is Ansible's share: checked for being there already, else one playbook. Seconds, medians of "
            f"{options.rounds} rounds.",
            "",
            "| way | unit | engine alone | beyond | of it placing |",
            "|---|---|---:|---:|---:|",
            *lines,
            "",
            f"Aim: under {AIM_S:.0f} s beyond, a server. Where the load average is above the number of cores, these are upper bounds.",
        ]
    )
    print(text)
    if options.write:
        DOCUMENT.write_text(text + "\n", encoding="utf-8")
    return 0 if worst < AIM_S else 1


if __name__ == "__main__":
    sys.exit(main())
