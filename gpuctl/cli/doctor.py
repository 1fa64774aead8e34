"""`gpuctl doctor`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuctl.cli import FINDINGS, UNKNOWN, WELL
from gpuctl.cli._console import colour, document, out, say
from gpuctl.cli._options import (
    check_option,
    folder,
    inventory_option,
    json_option,
    options,
    targets_option,
    yes_option,
)

if TYPE_CHECKING:
    from gpuctl.asking import Asked
    from gpuctl.box import Box
    from gpuctl.finding import Remedy
    from gpuctl.hosts import Machine


@click.command("doctor", short_help="why CUDA does not start, proved, with the exact fix")
@options(inventory_option, targets_option)
@click.option(
    "--from",
    "files",
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Saved or hand-written snapshots (docs/snapshot.md), nvidia-bug-report.log.gz, or - (stdin); asks no machine.",
)
@click.option("--save", metavar="FILE", type=click.Path(path_type=Path), help="Keep what was seen, names masked.")
@click.option("--unmasked", is_flag=True, help="With --save: as it is.")
@click.option("--unit", metavar="UNIT", help="Look with the eyes of this service as well: user, environment, limits.")
@click.option("--user", metavar="USER", help="Look with this user's rights as well.")
@click.option("--all", "everything", is_flag=True, help="Consequences and what could not be read, each.")
@click.option("--fix", is_flag=True, help="Mend it: shows each change, asks, makes it, looks again.")
@click.option("--undo", is_flag=True, help="Take back what --fix changed: the configuration, what makes nodes at boot.")
@click.option(
    "--explain",
    metavar="ID",
    shell_complete=lambda ctx, param, begun: [name for name in _ids() if name.startswith(begun)],
    help="What a check looks for, and why.",
)
@options(check_option, yes_option, json_option)
def command(
    inventory: str,
    targets: tuple[str, ...],
    files: tuple[Path, ...],
    save: Path | None,
    unmasked: bool,
    unit: str | None,
    user: str | None,
    everything: bool,
    fix: bool,
    undo: bool,
    explain: str | None,
    check: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Asks a box (its guest and its node, side by side) and says why CUDA does not start there, with evidence.

    Without --fix it changes nothing; --fix --check shows what would change.
    Exit code 1: something is wrong; 3: it could not tell.
    """
    from gpuctl import doctor

    if explain is not None:
        if explain not in doctor.ids():
            from gpuctl.spelling import hint

            raise click.BadParameter(f"no check {explain!r}; {hint(explain, doctor.ids())}")
        for line in doctor.explain(explain):
            out(line)
        return WELL
    if (fix or undo) and files:
        raise click.UsageError(f"--{'fix' if fix else 'undo'} needs the machine; --from has only what was seen of it")
    if fix and undo:
        raise click.UsageError("--fix and --undo are each other's opposite")
    if (fix or undo) and not (yes or check) and not sys.stdin.isatty():
        word = "fix" if fix else "undo"
        raise click.UsageError(f"--{word} asks before a change, and nobody is there to answer; --yes says yes")
    if undo:
        return _undo(inventory, targets, check=check, yes=yes, as_json=as_json)
    if save is not None and not save.parent.is_dir():
        from gpuctl.store import StoreError

        raise StoreError(f"{save}: there is no folder {save.parent}; --save names another file")
    boxes: list[Asked] = []
    asked = _from_files(files) if files else _from_machines(inventory, targets, unit, user)
    again = "" if files else _again(inventory, unit, user)
    code = _tell(_kept(asked, boxes), everything, as_json and not fix, again)
    if save is not None:
        _save(boxes, save, masked=not unmasked)
    return _fix(boxes, inventory, unit, user, check=check, yes=yes, as_json=as_json) if fix and code else code


def _ids() -> list[str]:
    from gpuctl import plugins

    return list(plugins.names("checks"))


def _kept(asked: Iterable[Asked], boxes: list[Asked]) -> Iterator[Asked]:
    for one in asked:
        boxes.append(one)
        yield one


def _again(inventory: str, unit: str | None, user: str | None) -> str:
    """The command that asks like this, but for the box."""
    words = ["gpuctl", "doctor"]
    if os.environ.get("GPUCTL_INVENTORY", "local") != inventory:
        words += ["-i", inventory]
    words += [word for name, value in (("--unit", unit), ("--user", user)) if value for word in (name, value)]
    return shlex.join(words)


def _fix(
    boxes: Sequence[Asked], inventory: str, unit: str | None, user: str | None, *, check: bool, yes: bool, as_json: bool
) -> int:
    """Mends one box after another. Exit code 1 when one of them is not well afterwards."""
    from gpuctl import doctor, hosts
    from gpuctl.asking import ask
    from gpuctl.deploy import mend
    from gpuctl.transport import TransportError

    machines = hosts.load(folder(inventory))
    code, documents = WELL, []
    for asked in boxes:
        if asked.box is None:
            code = max(code, UNKNOWN)
            continue
        machine = machines.machines[asked.name]

        def look(name: str = asked.name) -> Box:
            (again,) = ask(machines, [name], unit=unit, user=user)
            if again.box is None:
                raise TransportError("; ".join(again.missing.values()))
            return again.box

        def play(remedy: Remedy, machine: Machine = machine) -> doctor.Played:
            would = mend(remedy, machines, machine, check=True)
            where = machine.node if remedy.on == "node" else machine.name
            restarts = f", and then the {remedy.restarts} restarts" if remedy.restarts else ""
            say(f"\n{remedy.playbook}.yml on {where}{restarts}:")
            say(would.diff or ("nothing to change" if would.well else would.why))
            if check:
                return doctor.Played(False, False, "only shown, as --check wants")
            if not yes and not click.confirm("make this change?", err=True):
                return doctor.Played(False, False, "not wanted")
            done = mend(remedy, machines, machine, on_step=lambda step: say(f"  {step.state:10} {step.task}"))
            return doctor.Played(done.well, any(done.changed.values()), done.why)

        healing = doctor.heal(asked.box, look, play)
        lines = ["nothing was changed (--check)"] if check else doctor.render_healing(healing, colour(sys.stdout))
        for line in [] if as_json else lines:
            out(line)
        documents.append({"box": asked.name, "state": healing.state, "after": doctor.as_json(healing.after)})
        if healing.state not in ("well", "mended"):
            code = max(code, UNKNOWN if healing.state == "unknown" else FINDINGS)
    if as_json:
        verdict = {WELL: "well", UNKNOWN: "unknown"}.get(code, "findings")
        document({"schema": "gpuctl.doctor-fix/1", "verdict": verdict, "boxes": documents})
    return code


def _undo(inventory: str, targets: Sequence[str], *, check: bool, yes: bool, as_json: bool) -> int:
    """Shows what would be taken back on each box, asks, takes it back. Exit code 1 when something could not be."""
    from gpuctl import deploy, hosts

    machines = hosts.load(folder(inventory))
    code, documents = WELL, []
    for machine in machines.chosen(targets):
        would = deploy.unmend(machines, machine, check=True)
        if not as_json:
            out("".join(part.diff for part in would) or f"{machine.name}: nothing here was changed by gpuctl")
        parts = would
        if all(part.well for part in would) and any(part.changed for part in would) and not check:
            if not (yes or click.confirm(f"take this back for {machine.name}?", err=True)):
                documents.append({"box": machine.name, "state": "left"})
                continue
            parts = deploy.unmend(machines, machine, on_step=lambda step: say(f"  {step.state:10} {step.task}"))
            if not as_json and machine.kind == "guest":
                out(f"{machine.name}: taken back; the running guest keeps its rules until `pct reboot {machine.vmid}`")
        why = "; ".join(part.why for part in parts if part.why)
        if why:
            code = FINDINGS
            say(f"gpuctl: {why}")
        changed = any(part.changed for part in parts)
        state = "failed" if why else "nothing" if not changed else "would be undone" if check else "undone"
        documents.append({"box": machine.name, "state": state, "why": why, "diff": "".join(p.diff for p in would)})
    if as_json:
        verdict = "well" if code == WELL else "findings"
        document({"schema": "gpuctl.doctor-undo/1", "verdict": verdict, "boxes": documents})
    return code


def _from_files(files: Sequence[Path]) -> list[Asked]:
    from gpuctl import doctor
    from gpuctl.asking import Asked

    snapshots = [snapshot for file in files for snapshot in doctor.read_snapshots(file)]
    return [Asked(snapshots[0].name, doctor.box_from(snapshots), tuple(snapshots))]


def _from_machines(inventory: str, targets: Sequence[str], unit: str | None, user: str | None) -> Iterator[Asked]:
    from gpuctl import hosts
    from gpuctl.asking import asking

    def waiting(names: list[str]) -> None:
        say(f"waiting for {', '.join(names)}")

    return asking(hosts.load(folder(inventory)), targets, unit=unit, user=user, on_wait=waiting)


def _save(boxes: Sequence[Asked], file: Path, *, masked: bool) -> None:
    from gpuctl import doctor
    from gpuctl.store import write

    snapshots = [snapshot for box in boxes for snapshot in box.snapshots]
    if not snapshots:
        say(f"gpuctl: {file}: not written, for nothing was seen")
        return
    text, told = doctor.saved(snapshots, masked=masked)
    write(file, text.encode(), instead="--save names another file")
    if told:
        say(f"masked: {'; '.join(told)}")
    say(f"wrote {file}")


def _tell(boxes: Iterable[Asked], everything: bool, as_json: bool, again: str) -> int:
    from gpuctl import doctor

    code, documents = WELL, []
    for number, asked in enumerate(boxes):
        for name, why in asked.missing.items():
            say(f"gpuctl: {why}" if why.startswith(name) else f"gpuctl: {name}: {why}")
        if asked.box is None:
            code = max(code, UNKNOWN)
            documents.append(_could_not_tell(asked))
            continue
        found = doctor.diagnose(asked.box)
        code = max(code, {"well": WELL, "findings": FINDINGS, "unknown": UNKNOWN}[found.verdict])
        if asked.missing and found.verdict == "well":
            code = max(code, UNKNOWN)
        if (unseen := asked.box.guest.mapping("service").get("error")) is not None:
            # who was asked for with --user or --unit is not there: nothing that was found is about them
            why = " ".join(str(unseen).split()).replace("on this machine", f"on {asked.name}")
            say(f"gpuctl: {why}")
            code = max(code, UNKNOWN)
        documents.append({**doctor.as_json(found), "not_asked": asked.missing})
        if not as_json:
            if number:
                out()
            fix = f"{again} -t {asked.name} --fix" if again else ""
            for line in doctor.render_text(found, colour(sys.stdout), everything=everything, fix=fix):
                out(line)
    if as_json:
        verdicts = [found["verdict"] for found in documents]
        whole = "findings" if "findings" in verdicts else "unknown" if "unknown" in verdicts else "well"
        document(
            documents[0] if len(documents) == 1 else {"schema": "gpuctl.doctor/1", "verdict": whole, "boxes": documents}
        )
    return code


def _could_not_tell(asked: Asked) -> dict[str, Any]:
    return {
        "schema": "gpuctl.doctor/1",
        "verdict": "unknown",
        "box": asked.name,
        "findings": [],
        "not_asked": asked.missing,
    }
