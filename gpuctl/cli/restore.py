"""`gpuctl restore`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

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
    from collections.abc import Callable

    from gpuctl.doctor import Healing
    from gpuctl.finding import Finding
    from gpuctl.hosts import Machine
    from gpuctl.restore import Restorer

CODES = {"well": WELL, "mended": WELL, "stuck": FINDINGS, "failed": FINDINGS, "wrong": FINDINGS, "unknown": UNKNOWN}


@click.command("restore", short_help="after a reboot: back to serving")
@options(inventory_option, targets_option)
@click.option("--boot", is_flag=True, help="Also place what brings a box back by itself at each boot (site.yml).")
@options(check_option, yes_option, json_option)
def command(inventory: str, targets: tuple[str, ...], boot: bool, check: bool, yes: bool, as_json: bool) -> int:
    """Brings a box back to serving: device nodes, container, settings, memory file system, models, servers.

    Each layer is looked at, mended where it has to be, and looked at again. What a box is to serve stands in hosts.yml
    (gpuctl_serves: SERVER, or a list); otherwise it is what is enabled there at boot. A box with nothing wrong is left
    as it is.

    Exit code 1: something is still wrong, or (--check) would be mended; 3: it could not tell.
    """
    from gpuctl import hosts
    from gpuctl.restore import Restorer, wants_of

    known = load_inventory(inventory)
    machines = hosts.load(known.folder)
    chosen = machines.chosen(targets)
    wants = {machine.name: wants_of(machine, known) for machine in chosen}
    code, documents = WELL, []
    for machine in chosen:
        mending = Mending(say if as_json else out, live=sys.stderr.isatty() and not as_json)
        restorer = Restorer(
            machines,
            machine.name,
            known,
            wants[machine.name] if wants[machine.name].servers else None,
            tell=mending.tell,
            allowed=None if yes else allow,
        )
        told = _restored(restorer, machine, check, say if as_json else out, boot=boot)
        code = max(code, CODES[told["state"]])
        documents.append(told)
    if as_json:
        worst = max((one["state"] for one in documents), key=lambda state: (CODES[state], state != "well"))
        verdict = worst if len(documents) == 1 else {WELL: "well", FINDINGS: "findings", UNKNOWN: "unknown"}[code]
        document({"schema": "gpuctl.restore/1", "verdict": verdict, "boxes": documents})
    return code


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
