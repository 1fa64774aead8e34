"""`gpuctl doctor`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuctl.cli import FINDINGS, UNKNOWN, WELL
from gpuctl.cli._console import colour, document, out, say
from gpuctl.cli._options import folder, inventory_option, json_option, options

if TYPE_CHECKING:
    from gpuctl.asking import Asked


@click.command("doctor", short_help="why CUDA does not start, proved, with the exact fix")
@options(inventory_option)
@click.option(
    "-t", "--target", "targets", metavar="BOX", multiple=True, help="Boxes, groups, or all. [default: guests]"
)
@click.option(
    "--from",
    "files",
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Saved or hand-written snapshots (docs/snapshot.md), or nvidia-bug-report.log.gz; no machine is asked.",
)
@click.option("--save", metavar="FILE", type=click.Path(path_type=Path), help="Keep what was seen, names masked.")
@click.option("--unmasked", is_flag=True, help="With --save: as it is.")
@click.option("--unit", metavar="UNIT", help="Look with the eyes of this service as well: user, environment, limits.")
@click.option("--user", metavar="USER", help="Look with this user's rights as well.")
@click.option("--all", "everything", is_flag=True, help="Consequences and what could not be read, each.")
@click.option("--explain", metavar="ID", help="What a check looks for, and why.")
@options(json_option)
def command(
    inventory: str,
    targets: tuple[str, ...],
    files: tuple[Path, ...],
    save: Path | None,
    unmasked: bool,
    unit: str | None,
    user: str | None,
    everything: bool,
    explain: str | None,
    as_json: bool,
) -> int:
    """Asks a box (its guest and its node, side by side) and says why CUDA does not start there, with evidence.

    It changes nothing. Exit code 1: something is wrong; 3: it could not tell.
    """
    from gpuctl import doctor

    if explain is not None:
        if explain not in doctor.ids():
            raise click.BadParameter(f"no check {explain!r}; there are: {', '.join(doctor.ids())}")
        for line in doctor.explain(explain):
            out(line)
        return WELL
    boxes = _from_files(files) if files else _from_machines(inventory, targets, unit, user)
    if save is not None:
        _save(boxes, save, masked=not unmasked)
    return _tell(boxes, everything, as_json)


def _from_files(files: Sequence[Path]) -> list[Asked]:
    from gpuctl import doctor
    from gpuctl.asking import Asked

    snapshots = [snapshot for file in files for snapshot in doctor.read_snapshots(file)]
    return [Asked(snapshots[0].name, doctor.box_from(snapshots), tuple(snapshots))]


def _from_machines(inventory: str, targets: Sequence[str], unit: str | None, user: str | None) -> list[Asked]:
    from gpuctl import hosts
    from gpuctl.asking import ask

    return ask(hosts.load(folder(inventory)), targets, unit=unit, user=user)


def _save(boxes: Sequence[Asked], file: Path, *, masked: bool) -> None:
    from gpuctl import doctor
    from gpuctl.store import write

    text, told = doctor.saved([snapshot for box in boxes for snapshot in box.snapshots], masked=masked)
    write(file, text.encode())
    for line in told:
        say(line)


def _tell(boxes: Sequence[Asked], everything: bool, as_json: bool) -> int:
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
        documents.append({**doctor.as_json(found), "not_asked": asked.missing})
        if not as_json:
            if number:
                out()
            for line in doctor.render_text(found, colour(sys.stdout), everything=everything):
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
