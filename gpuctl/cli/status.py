"""`gpuctl status`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuctl.cli import FINDINGS, UNKNOWN, WELL
from gpuctl.cli._console import document, out
from gpuctl.cli._options import (
    Finite,
    folder,
    inventory_option,
    json_option,
    load_inventory,
    options,
    runs_option,
    targets_option,
)

if TYPE_CHECKING:
    from gpuctl.config import Inventory
    from gpuctl.overview import Campaign, Glance


@click.command(
    "status", short_help="boxes side by side: up, units, models, GPU memory, campaigns, what needs attention"
)
@options(inventory_option, targets_option, runs_option)
@click.option("--watch", is_flag=True, help="Again and again, until Ctrl-C.")
@click.option(
    "--every",
    type=Finite(min=1, max=86400),
    default=10,
    show_default=True,
    metavar="S",
    help="With --watch: seconds between looks.",
)
@options(json_option)
def command(inventory: str, targets: tuple[str, ...], runs: Path, watch: bool, every: float, as_json: bool) -> int:
    """One light look at each box: no CUDA is started, a measurement beside it is not disturbed.

    Exit code 1: something needs attention; 3: a box cannot be reached.
    """
    from gpuctl import hosts, overview
    from gpuctl.asking import Glancing

    known = load_inventory(inventory)
    machines = hosts.load(folder(inventory))
    names = [machine.name for machine in machines.chosen(targets)]
    models = {model.path: (name, model.stage) for name, model in known.models.items()}
    wanted = {name: _wanted(known, name) for name in names}
    live = watch and sys.stdout.isatty() and not as_json
    with Glancing(machines, names, list(models)) as look:
        while True:
            answers = look()
            boxes = [
                overview.Glance(name, why=str(answer))
                if isinstance(answer, Exception)
                else overview.glance(name, answer, models, wanted[name])
                for name, answer in answers.items()
            ]
            campaigns = _campaigns(runs)
            attention = list(overview.attention_of(boxes))
            code = UNKNOWN if any(box.why for box in boxes) else FINDINGS if attention else WELL
            if as_json:
                document(_as_json(boxes, campaigns, attention, code))
            else:
                stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n" if watch else ""
                out(("\033[H\033[2J" if live else "") + stamp + overview.as_text(boxes, campaigns), newline=watch)
            if not watch:
                return code
            sys.stdout.flush()
            try:
                time.sleep(every)
            except KeyboardInterrupt:
                return code


def _wanted(known: Inventory, box: str) -> set[str]:
    """Models that servers of the phases on this box load; of phases that name no box, on every box."""
    found: set[str | None] = set()
    for phase in known.phases.values():
        for server in (known.servers[name] for name in phase.servers):
            if box in (server.nodes or [phase.target or box]):
                found |= {server.model, server.draft}
    # one that gpuctl makes itself is there when it is needed
    return {name for name in found if name is not None and known.models[name].make is None}


def _campaigns(runs: Path) -> list[Campaign]:
    from gpuctl.overview import Campaign, doing
    from gpuctl.store import Run

    found = []
    for place in sorted(runs.iterdir()) if runs.is_dir() else []:
        if not (place / "events.jsonl").is_file():
            continue
        run = Run(place)
        events, records, holder = run.events(), run.records(), run.holder()
        if not holder and (not events or events[-1].get("event") == "run_finished"):
            continue
        failed = sum(record.state.value == "failed" for record in records)
        quiet = time.time() - (place / "events.jsonl").stat().st_mtime
        found.append(Campaign(place.name, str(place), holder, doing(events), len(records), failed, quiet))
    return found


def _as_json(boxes: list[Glance], campaigns: list[Campaign], attention: list[str], code: int) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "schema": "gpuctl.status/1",
        "verdict": {WELL: "well", FINDINGS: "findings"}.get(code, "unknown"),
        "boxes": [{**asdict(box), "reachable": not box.why} for box in boxes],
        "campaigns": [asdict(campaign) for campaign in campaigns],
        "attention": attention,
    }
