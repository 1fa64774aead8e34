"""`gpuctl stage`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from gpuctl.cli import FINDINGS, INTERRUPTED, UNKNOWN, USAGE, WELL
from gpuctl.cli._console import consent, document, out, say
from gpuctl.cli._options import (
    Whole,
    box_option,
    check_option,
    completing,
    folder,
    inventory_option,
    json_option,
    load_inventory,
    options,
    yes_option,
)

if TYPE_CHECKING:
    from gpuctl import staging
    from gpuctl.config import Inventory
    from gpuctl.hosts import Machine
    from gpuctl.playbook import Outcome

CODES = {"source": FINDINGS, "room": FINDINGS, "job": USAGE, "way": UNKNOWN, "stopped": INTERRUPTED}
_SHOWN = 6  # lines of what is missing of a model


@click.command("stage", short_help="models into memory: verified, parallel, resumable, there again at each boot")
@click.argument("models", nargs=-1, metavar="[MODEL...]", shell_complete=completing("models"))
@options(inventory_option, box_option)
@click.option("--verify", is_flag=True, help="Read every byte of what is there and compare its SHA-256.")
@click.option("--no-hash", is_flag=True, help="No SHA-256 while copying: faster from the page cache, and not proved.")
@click.option("--drop-old", is_flag=True, help="Give up the old copy first where old and new have no room together.")
@click.option("--no-boot", is_flag=True, help="Only now: place no unit that stages at each boot.")
@click.option(
    "--threads",
    type=Whole(1, 64),
    metavar="N",
    help="Ranges at a time, 2 MiB of memory each. [default: two a core, 8 to 32]",
)
@options(check_option, yes_option, json_option)
def command(
    models: tuple[str, ...],
    inventory: str,
    target: str | None,
    verify: bool,
    no_hash: bool,
    drop_old: bool,
    no_boot: bool,
    threads: int | None,
    check: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Shows what is there of each MODEL and what is missing, and brings it to its place. Without MODEL: all that are
    staged.

    What is missing is downloaded to the disk there first, by huggingface_hub. The memory file system is mounted, the
    model copied into it in parallel, SHA-256 of every file compared on the way; servers see all of it or what was there
    before. What was interrupted goes on. Exit code 1: not well, or with --check: something would change.
    """
    from gpuctl import hosts, staging

    known = load_inventory(inventory)
    machines = hosts.load(folder(inventory))
    machine = _machine(machines, target)
    names = _names(known, models)
    ways = hosts.transports(machines)
    way, told = ways[machine.name], _Told()
    try:
        seen = staging.plan(known, machine, way, names, verify=verify, on_progress=told)
        told.end()
        placed = seen.tmpfs or (seen.files and not no_boot)
        if not as_json:
            _show(seen, no_boot)
        if check:
            outcomes = staging.preview(seen, machines) if placed else []
            return _checked(seen, outcomes, as_json)
        if placed and not yes:
            consent(f"do this on {machine.name}?")
        limits = _node_limits(machines, machine, ways) if seen.changes else []
        ended = staging.carry_out(
            seen, known, machines, way,
            verify=verify, hash_=not no_hash, drop_old=drop_old, threads=threads, boot=not no_boot, limits=limits,
            on_step=_step, on_progress=told,
        )  # fmt: skip
        told.end()
    finally:
        for one in ways.values():
            one.close()
    code = max((_code(one) for one in ended.values()), default=WELL)
    if as_json:
        document(_as_json(machine, ended, seen))
    else:
        _tell(ended)
    return code


def _machine(machines: Any, target: str | None) -> Machine:
    found: tuple[Machine, ...] = machines.chosen([target] if target else [])
    if len(found) != 1:
        raise click.UsageError(f"name one box: -t {found[0].name}")
    if found[0].kind == "node":
        raise click.UsageError(f"{found[0].name} is a node: models are staged where servers run; name a guest")
    return found[0]


def _names(known: Inventory, models: Sequence[str]) -> list[str]:
    from gpuctl.spelling import hint

    for name in models:
        if name not in known.models:
            raise click.UsageError(f"{known.folder}/models.yml: no model {name!r}; {hint(name, known.models)}")
    names = list(dict.fromkeys(models)) or [name for name, one in known.models.items() if one.stage]
    if not names:
        raise click.UsageError(f"{known.folder}/models.yml: no model has `stage: true`; name the ones to look at")
    return names


def _node_limits(machines: Any, machine: Machine, ways: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the node knows of memory. A node that does not answer leaves it to what the guest sees."""
    from gpuctl import staging
    from gpuctl.transport import TransportError

    if machine.node is None or machine.node not in machines.machines:
        return []
    try:
        return staging.node_limits(ways[machine.node], machine.vmid)
    except TransportError as error:
        say(f"gpuctl: {error}; only the guest's own view of memory is known")
        return []


def _code(one: staging.Found | staging.StagingError) -> int:
    kind = getattr(one, "kind", None)
    if kind is not None:
        return CODES.get(kind, UNKNOWN)
    return WELL if getattr(one, "well", False) else FINDINGS


# -- what is said


def _show(seen: staging.Plan, no_boot: bool) -> None:
    from gpuctl.agent.stage import size_of

    wide = max((len(name) for name in [*seen.found, *seen.troubles]), default=0)
    out(f"{seen.machine.name}:")
    for name, found in seen.found.items():
        size = f"  {size_of(found.source_bytes)}" if found.source_bytes else ""
        out(f"  {name:<{wide}}  {found.state:<14}{size}  {found.path}")
        lines = list(found.missing)
        if found.raw.get("stale"):
            lines.insert(0, f"its source is another by now: {found.raw['stale']}")
        if found.raw.get("begun_bytes"):
            lines.append(f"{size_of(found.raw['begun_bytes'])} of a copy that was interrupted are there; it goes on")
        for line in lines[:_SHOWN]:
            out(f"      {line}")
        if len(lines) > _SHOWN:
            out(f"      and {len(lines) - _SHOWN} more (--json has all)")
    for line in seen.changes:
        if not (no_boot and line.startswith("place ")):
            out(f"  -> {line}")
    for name, why in seen.lacks.items():
        out(f"  {name}: there is no room: {why}")
    _show_caches(seen)


def _show_caches(seen: staging.Plan) -> None:
    from gpuctl.agent.stage import size_of

    for one in _caches(seen):
        if one["lost"]:
            out(
                f"  {one['cache']} cache {one['path']}: lost at each boot ({one['lost']}), and compiling again "
                f"costs more than loading weights; set {one['variable']} in the server's env to a folder on a disk"
            )
    kept = [one for one in _caches(seen) if not one["lost"] and one["bytes"]]
    if kept:
        out("  compiled kernels on disk: " + ", ".join(f"{one['cache']} {size_of(one['bytes'])}" for one in kept))


def _caches(seen: staging.Plan) -> list[Mapping[str, Any]]:
    found = {one["path"]: one for model in seen.found.values() for one in model.raw.get("caches") or ()}
    return list(found.values())


def _checked(seen: staging.Plan, outcomes: Sequence[Outcome], as_json: bool) -> int:
    failed = [done.why for done in outcomes if not done.well]
    codes = [CODES.get(error.kind, UNKNOWN) for error in seen.troubles.values()]
    code = max([FINDINGS if seen.changes or failed else WELL, *codes])
    if as_json:
        ended = {**seen.found, **seen.troubles}
        document(
            _as_json(seen.machine, ended, seen, diff="".join(done.diff for done in outcomes), why="; ".join(failed))
        )
        return code
    for done in outcomes:
        out(done.diff, newline=False)
    for why in [*failed, *map(str, seen.troubles.values())]:
        say(f"gpuctl: {why}")
    return code


def _tell(ended: Mapping[str, staging.Found | staging.StagingError]) -> None:
    from gpuctl.agent.stage import size_of

    for name, one in ended.items():
        kind = getattr(one, "kind", None)
        if kind is not None:
            say(f"gpuctl: {one}")
            continue
        raw: Mapping[str, Any] = getattr(one, "raw", {})
        took = raw.get("took")
        if took:
            how = (
                "every SHA-256 as it has to be" if raw["copy"]["manifest"]["hashed"] else "sizes compared, not SHA-256"
            )
            rate = f"{size_of(took['bytes'])} in {took['seconds']:.1f} s, {size_of(took['bytes_per_s'])}/s"
            out(f"{name}: staged: {rate}; {how}")
        elif raw.get("did") == "downloaded":
            out(f"{name}: downloaded")


def _as_json(
    machine: Machine, ended: Mapping[str, Any], seen: staging.Plan, *, diff: str = "", why: str = ""
) -> dict[str, Any]:
    rows = []
    for name, one in ended.items():
        found = one if hasattr(one, "raw") else (getattr(one, "found", None) or seen.found.get(name))
        raw = found.raw if found is not None else {}
        rows.append(
            {
                "model": name,
                "state": found.state if found is not None else "unknown",
                "well": hasattr(one, "raw") and one.well,
                "path": found.path if found is not None else None,
                "bytes": found.source_bytes if found is not None else None,
                "missing": list(found.missing) if found is not None else [],
                "error": None if hasattr(one, "raw") else {"kind": one.kind, "message": str(one)},
                **{key: raw.get(key) for key in ("copy", "source", "stale", "room", "mount", "did", "took")},
            }
        )
    code = max((_code(one) for one in ended.values()), default=WELL)
    words = {WELL: "well", FINDINGS: "findings", INTERRUPTED: "interrupted"}
    return {
        "schema": "gpuctl.stage/1",
        "verdict": "findings" if why else words.get(code, "unknown"),
        "machine": machine.name,
        "why": why,
        "changes": list(seen.changes),
        "diff": diff,
        "lacks": dict(seen.lacks),
        "models": rows,
        "caches": _caches(seen),
    }


def _step(step: Any) -> None:
    if step.state in ("changed", "failed", "unreachable"):
        say(f"  {step.machine}: {step.task}: {step.state}")


class _Told:
    """Progress: one line that changes on a terminal, elsewhere a line every five seconds."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.shown = 0.0
        self.open = False

    def __call__(self, row: Mapping[str, Any]) -> None:
        from gpuctl.agent.stage import size_of

        if row["type"] == "note":
            self.end()
            say(f"  {row['text']}")
            return
        now = time.monotonic()
        if not self.live and now - self.shown < 5:
            return
        self.shown = now
        left = "" if row["eta_s"] is None else f", {row['eta_s']:.0f} s left"
        share = f" of {size_of(row['of'])}" if row["of"] else ""
        line = f"  {row['what']}: {size_of(row['bytes'])}{share}, {size_of(row['rate'])}/s{left}"
        if self.live:
            click.echo(f"\r\033[K{line}", err=True, nl=False)
            self.open = True
        else:
            say(line)

    def end(self) -> None:
        if self.open:
            click.echo("\r\033[K", err=True, nl=False)
            self.open = False
