"""`gpuctl restore`."""

from __future__ import annotations

import functools
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import click

from gpuctl import background
from gpuctl.cli import FINDINGS, UNKNOWN, WELL
from gpuctl.cli._console import document, out, say
from gpuctl.cli._mending import Mending, allow, does, seconds
from gpuctl.cli._options import (
    check_option,
    inventory_option,
    json_option,
    load_inventory,
    options,
    targets_option,
    yes_option,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from gpuctl.doctor import Healing
    from gpuctl.finding import Finding
    from gpuctl.hosts import Machine
    from gpuctl.restore import Restorer

ENDING_S = 5.0  # after Ctrl-C, for several boxes to end what they are at
CODES = {"well": WELL, "mended": WELL, "stuck": FINDINGS, "failed": FINDINGS, "wrong": FINDINGS, "unknown": UNKNOWN}


@click.command("restore", short_help="after a reboot: back to serving")
@options(inventory_option, targets_option)
@click.option("--boot", is_flag=True, help="Also place what brings a box back by itself at each boot (site.yml).")
@options(check_option, yes_option, json_option)
def command(inventory: str, targets: tuple[str, ...], boot: bool, check: bool, yes: bool, as_json: bool) -> int:
    """Brings a box back to serving: device nodes, container, settings, memory file system, models, servers.

    Each layer is looked at, mended where it has to be, and looked at again. What a box is to serve stands in hosts.yml
    (gpuctl_serves: SERVER, or a list); otherwise it is what is enabled there at boot. A box with nothing wrong is left
    as it is. With --yes or --check, boxes of several nodes go side by side.

    Exit code 1: something is still wrong, or (--check) would be mended; 3: it could not tell.
    """
    from gpuctl import hosts
    from gpuctl.restore import Restorer, wants_of

    known = load_inventory(inventory)
    machines = hosts.load(known.folder)
    chosen = machines.chosen(targets)
    wants = {machine.name: wants_of(machine, known) for machine in chosen}
    line = say if as_json else out

    def one(machine: Machine, line: Callable[[str], Any], heard: Callable[[], None], *, live: bool) -> dict[str, Any]:
        mending = Mending(line, live=live)

        def tell(event: str, **facts: Any) -> None:
            heard()
            mending.tell(event, **facts)

        served = wants[machine.name] if wants[machine.name].servers else None
        restorer = Restorer(machines, machine.name, known, served, tell=tell, allowed=None if yes else allow)
        return _restored(restorer, machine, check, line, boot=boot)

    nodes: dict[str, list[Machine]] = {}
    for machine in chosen:
        nodes.setdefault(machine.node or machine.name, []).append(machine)
    if len(nodes) > 1 and (yes or check):
        told = _side_by_side(list(nodes.values()), functools.partial(one, live=False), line)
    else:
        live = sys.stderr.isatty() and not as_json
        told = {machine.name: one(machine, line, lambda: None, live=live) for machine in chosen}
    documents = [told[machine.name] for machine in chosen]
    code = max((CODES[each["state"]] for each in documents), default=WELL)
    if as_json:
        worst = max((one["state"] for one in documents), key=lambda state: (CODES[state], state != "well"))
        verdict = worst if len(documents) == 1 else {WELL: "well", FINDINGS: "findings", UNKNOWN: "unknown"}[code]
        document({"schema": "gpuctl.restore/1", "verdict": verdict, "boxes": documents})
    return code


def _side_by_side(
    nodes: Sequence[Sequence[Machine]],
    one: Callable[[Machine, Callable[[str], Any], Callable[[], None]], dict[str, Any]],
    line: Callable[[str], Any],
) -> dict[str, dict[str, Any]]:
    """one(machine, line, heard) for all, by name: nodes side by side; the boxes of one node, whose settings and memory
    they share, one after the other. Lines begin with the box. `heard` is to be called whenever something happens there:
    after Ctrl-C it ends that. What goes on without a sound ends with us. An error is raised when all have ended.
    """
    wide = max(len(machine.name) for machines in nodes for machine in machines)
    told: dict[str, dict[str, Any]] = {}
    over, printing = threading.Event(), threading.Lock()

    def heard() -> None:
        if over.is_set():
            raise KeyboardInterrupt

    def print_of(machine: Machine, text: str) -> None:
        with printing:
            line(f"{machine.name:<{wide}}{text}" if text.startswith(" ") else text)

    def work(machines: Sequence[Machine]) -> None:
        for machine in machines:
            heard()
            told[machine.name] = one(machine, functools.partial(print_of, machine), heard)

    works: list[Future[None]] = []
    try:
        for machines in nodes:
            background.begin(functools.partial(work, machines), among=works)
        background.ended(works)
    except BaseException:
        over.set()
        background.ended(works, timeout=ENDING_S)
        raise
    for ended in works:
        ended.result()
    return told


def _restored(
    restorer: Restorer, machine: Machine, check: bool, line: Callable[[str], Any], *, boot: bool = False
) -> dict[str, Any]:
    """Restores one box and says so; what there is to tell about it, as JSON."""
    from gpuctl.restore import NotAllowed, overhead
    from gpuctl.transport import TransportError

    began = time.monotonic()
    try:
        if check:
            diagnosis, shown = restorer.check()
            state = "wrong" if shown else "unknown" if diagnosis.verdict == "unknown" else "well"
            for finding, text in shown:
                line(f"  SAW  {finding.layer.name}: {finding.summary}")
                on = (machine.node if finding.remedy and finding.remedy.on == "node" else None) or machine.name
                line(f"  {does(finding.remedy, on)} would change:" if finding.remedy else "  it would do:")
                for one in text.splitlines() or ["nothing in files"]:
                    line(f"    {one}")
            line(f"{diagnosis.box}: {'nothing was changed (--check)' if shown else _words(state)}")
            return {"box": machine.name, "state": state, "would": [finding.as_json() for finding, _ in shown]}
        healing = restorer.heal()
        placed = restorer.install() if boot and healing.state in ("well", "mended") else None
    except NotAllowed as error:
        say(f"gpuctl: {machine.name} {error}")
        return {"box": machine.name, "state": "failed", "why": str(error)}
    except TransportError as error:
        say(f"gpuctl: {error}")
        return {"box": machine.name, "state": "unknown", "why": str(error)}
    finally:
        restorer.close()
    took = time.monotonic() - began
    beyond = overhead(restorer.spent, took)
    for finding in healing.left:
        for one in [f"  LEFT {finding.layer.name}: {finding.summary}", *_indented(finding)]:
            line(one)
    words = _words(healing.state)
    line(f"{healing.after.box}: {words} ({seconds(restorer.spent, took, restorer.looks)})")
    told = _as_json(machine, healing, restorer, took, beyond)
    if placed is not None:
        kept = "it comes back by itself at each boot" + ("" if placed.changed else ", as before")
        line(
            f"{healing.after.box}: {kept if placed.ok else f'not all of it comes back at the next boot: {placed.text}'}"
        )
        told["boot"] = {"placed": placed.ok, "changed": placed.changed, "why": placed.text}
        told["state"] = told["state"] if placed.ok else "failed"
    return told


def _words(state: str) -> str:
    return {
        "well": "in order, nothing changed",
        "mended": "mended, as another look shows",
        "stuck": "not mended: what is left has no remedy, or its remedy did not help",
        "failed": "stopped: a change could not be made",
        "unknown": "cannot tell: CUDA's answer is missing (gpuctl doctor says what else is not known)",
    }[state]


def _indented(finding: Finding) -> list[str]:
    return [f"       {line}" for line in (*finding.evidence, *finding.advice.splitlines())]


def _as_json(machine: Machine, healing: Healing, restorer: Restorer, took: float, beyond: float) -> dict[str, Any]:
    return {
        "box": machine.name,
        "state": healing.state,
        "looks": restorer.looks,
        "steps": [
            {
                "finding": step.finding.id,
                "layer": step.finding.layer.name,
                "saw": step.finding.summary,
                "did": step.remedy.playbook,
                "on": (machine.node if step.remedy.on == "node" else None) or machine.name,
                "restarts": step.remedy.restarts,
                "changed": step.played.changed,
                "gone": step.gone,
                "why": step.played.text,
            }
            for step in healing.steps
        ],
        "left": [finding.as_json() for finding in healing.left],
        "seconds": {
            "all": round(took, 2),
            **{key.replace(" ", "_"): round(value, 2) for key, value in restorer.spent.items()},
            "beyond_staging_and_start": round(beyond, 2),
        },
    }
