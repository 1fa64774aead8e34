"""The example campaign in the lab: inventory/kpro6 on a guest with the engine double, and its numbers beside the real ones.

    GPUCTL_LAB=mine python -m tests.lab.campaign run FOLDER [--guest ct202] [--phase tp1 --phase tp4] [--shorter] [--eventful] [--pct]
    python -m tests.lab.campaign compare FOLDER/runs/NAME

`--shorter` measures the long answers (1024 and 2048 tokens) with two of the five prompts; nothing else differs.
`--eventful` is the campaign as it went: a server that cannot start, more requests than a server runs at once, and a reboot of
the node under way, after which nvidia-uvm has another number.
`--pct` stops the guest's sshd and reaches the guest through its node, by `pct exec` alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from tests.lab.faults import boot, driver
from tests.lab.lab import Lab

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "inventory" / "kpro6"

Records = Mapping[str, Mapping[str, Any]]  # "phase/server/workload/point" -> record as JSON


@dataclass(frozen=True)
class Expected:
    """A number of the campaign: what it is, its range there, and how a run's records give it."""

    what: str
    low: float
    high: float
    of: Callable[[Records], float | None]
    unit: str = "tok/s"
    said: str = ""  # what was written down, where that is one number


def metric(cell: str, name: str = "decode_tok_s") -> Callable[[Records], float | None]:
    def value(records: Records) -> float | None:
        found = records.get(cell, {}).get("metrics", {}).get(name)
        return None if found is None else float(found["mean"])

    return value


def ratio(cell: str, base: str, name: str = "decode_tok_s") -> Callable[[Records], float | None]:
    def value(records: Records) -> float | None:
        a, b = metric(cell, name)(records), metric(base, name)(records)
        return None if a is None or not b else a / b

    return value


def around(what: str, true: float, of: Callable[[Records], float | None], share: float = 0.03) -> Expected:
    return Expected(what, true * (1 - share), true * (1 + share), of, said=f"{true:g} (within {share:.0%})")


# What a person wrote down of the real runs, to three per cent: the double's own noise and a busy machine's.
EXPECTED = (
    *(
        around(f"tp1-auto, {prompt}, 256 tokens", 26.45, metric(f"tp1/tp1-auto/decode/{prompt}-256"))
        for prompt in ("fib", "qsort", "arith", "json", "haiku")
    ),
    around("tp1-linear, fib", 140.6, metric("tp1/tp1-linear/decode/fib-256")),
    around("tp1-linear, qsort", 96.6, metric("tp1/tp1-linear/decode/qsort-256")),
    around("tp1-linear, arith", 108.4, metric("tp1/tp1-linear/decode/arith-256")),
    Expected("tp1-linear over tp1-auto, fib", 5.1, 5.5, ratio("tp1/tp1-linear/decode/fib-256",
             "tp1/tp1-auto/decode/fib-256"), "x"),
    Expected("tp1-linear over tp1-auto, qsort", 3.5, 3.9, ratio("tp1/tp1-linear/decode/qsort-256",
             "tp1/tp1-auto/decode/qsort-256"), "x"),
    around("tp1-ddtree-b15, fib: the best", 143.4, metric("tp1/tp1-ddtree-b15/decode/fib-256")),
    Expected("tp1-ddtree-b32 over b15, fib: loses", 0.6, 0.95, ratio("tp1/tp1-ddtree-b32/decode/fib-256",
             "tp1/tp1-ddtree-b15/decode/fib-256"), "x"),
    Expected("tp1-ddtree-b64 over b32, fib: loses more", 0.5, 0.95, ratio("tp1/tp1-ddtree-b64/decode/fib-256",
             "tp1/tp1-ddtree-b32/decode/fib-256"), "x"),
    around("tp4-ddtree-b15, 8 at once, all together", 1270.8,
           metric("tp4/tp4-ddtree-b15/concurrency/c8", "output_tok_s"), 0.05),
)  # fmt: skip


def records(run: Path) -> dict[str, dict[str, Any]]:
    """Every record of a run folder by the name of its cell."""
    found = (json.loads(path.read_text()) for path in sorted(run.glob("cells/*/*/*/*.json")))
    return {"/".join(record["cell"].values()): record for record in found}


def compared(of: Records) -> Iterator[tuple[Expected, float, bool]]:
    """Each number that the run has, and whether it is the campaign's."""
    for expected in EXPECTED:
        value = expected.of(of)
        if value is not None:
            yield expected, value, expected.low <= value <= expected.high


# The configuration that the campaign began with: eight requests on one GPU leave no state for any of them.
STARVED = """
  tp1-linear-r8:
    use: [sglang, qwen, dflash]
    title: DFlash, linear, eight requests at once
    flags: {tp-size: 1, context-length: 32768, max-running-requests: 8}
"""
REBOOT_AFTER = "tp1/tp1-linear/decode/qsort-256"


def prepare(
    lab: Lab,
    guest: str,
    folder: Path,
    *,
    phases: str | None = None,
    shorter: bool = False,
    eventful: bool = False,
    pct: bool = False,
) -> Path:
    """The example inventory for a guest of the lab, with the lab's addresses; its folder."""
    inventory = folder / "inventory"
    shutil.copytree(EXAMPLE, inventory, dirs_exist_ok=True)
    hosts = yaml.safe_load((lab.inventory / "hosts.yml").read_text())
    if pct:
        reached = hosts["all"]["children"]["guests"]["hosts"][guest]
        reached.pop("ansible_host", None)
        reached["ansible_connection"] = "pct"
        lab.run(guest, ["systemctl", "disable", "--now", "ssh.service", "ssh.socket"])
    (inventory / "hosts.yml").write_text(yaml.safe_dump(hosts, sort_keys=False))
    text = phases or (inventory / "phases.yml").read_text().replace("target: ct200", f"target: {guest}")
    if shorter:
        text = text.replace(
            "decode: {max_tokens: [1024, 2048],", "decode: {prompts: [fib, qsort], max_tokens: [1024, 2048],"
        )
    if eventful:
        text = text.replace("concurrency: [1, 2, 4, 8],", "concurrency: [1, 2, 4, 8, 16],")
        text = text.replace("tp1-ddtree-b64]", "tp1-ddtree-b64, tp1-linear-r8]")
        servers = inventory / "servers.yml"
        servers.write_text((EXAMPLE / "servers.yml").read_text() + STARVED)
    (inventory / "phases.yml").write_text(text)
    return inventory


def reboot_under_way(lab: Lab, runs: Path) -> None:
    """Waits until REBOOT_AFTER is measured, then reboots the guest's node; nvidia-uvm has another number after it."""
    while not list(runs.glob(f"*/cells/{REBOOT_AFTER}.json")):
        time.sleep(1)
    driver.renumber_uvm(lab, "kpro6", 511)
    boot.reboot(lab, "kpro6", wait=False)


@click.group()
def main() -> None:
    """The example campaign in a lab that is up (GPUCTL_LAB)."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--guest", default="ct200")
@click.option("--phase", "phases", multiple=True, default=("tp1", "tp4"))
@click.option("--shorter", is_flag=True, help="Long answers with two of the five prompts.")
@click.option("--eventful", is_flag=True, help="With a server that cannot start, an overload, a reboot of the node.")
@click.option("--pct", is_flag=True, help="By `pct exec` through the node alone; the guest's sshd is stopped.")
@click.option("--only", multiple=True)
def run(
    folder: Path, guest: str, phases: Iterable[str], shorter: bool, eventful: bool, pct: bool, only: Iterable[str]
) -> None:
    """Runs phases of it; the run folder is FOLDER/runs/..."""
    folder.mkdir(parents=True, exist_ok=True)
    lab = Lab(os.environ.get("GPUCTL_LAB", "lab"))
    prepare(lab, guest, folder, shorter=shorter, eventful=eventful, pct=pct)
    gpuctl = [sys.executable, "-m", "gpuctl", "bench", *(["--force"] if eventful else [])]
    if eventful and not list(folder.glob(f"runs/*/cells/{REBOOT_AFTER}.json")):
        threading.Thread(target=reboot_under_way, args=(lab, folder / "runs"), daemon=True).start()
    some = [word for pattern in only for word in ("--only", pattern)]
    worst = 0
    for phase in phases:
        # --yes: the model comes into the guest's memory by itself
        done = subprocess.run([*gpuctl, phase, "-i", "inventory", "--yes", *some], cwd=folder, check=False)
        worst = max(worst, done.returncode)
    sys.exit(worst)


@main.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
def compare(run: Path) -> None:
    """A table of what the campaign measured and what RUN has; exit status 1 where one is not the other."""
    rows = list(compared(records(run)))
    click.echo("| what | the campaign | this run | |\n|---|---:|---:|---|")
    for expected, value, same in rows:
        span = expected.said or f"{expected.low:g} to {expected.high:g}"
        figure = f"{value:.2f}" if expected.unit == "x" else f"{value:.1f}"
        click.echo(
            f"| {expected.what}, {expected.unit} | {span} | {figure} | {'as there' if same else '**differs**'} |"
        )
    sys.exit(0 if rows and all(same for _, _, same in rows) else 1)


if __name__ == "__main__":
    main()
