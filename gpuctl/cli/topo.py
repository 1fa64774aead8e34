"""`gpuctl topo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuctl.cli import UNKNOWN, WELL
from gpuctl.cli._console import document, out, say
from gpuctl.cli._options import folder, inventory_option, json_option, options, targets_option

if TYPE_CHECKING:
    from gpuctl.box import Box
    from gpuctl.topology import Topology


@click.command("topo", short_help="GPUs, PCIe tree, NUMA nodes and the ways between GPUs, as a picture")
@options(inventory_option, targets_option)
@click.option(
    "--from", "file", metavar="FILE", type=click.Path(path_type=Path), help="A saved snapshot; no machine is asked."
)
@click.option("--svg", metavar="FILE", type=click.Path(path_type=Path), help="Also draw it, for a page.")
@options(json_option)
def command(inventory: str, targets: tuple[str, ...], file: Path | None, svg: Path | None, as_json: bool) -> int:
    """Draws what hangs where: links as they are and could be, MaxReadReq, MaxPayload, ACS, NUMA nodes and CPUs.

    Of a guest its node is drawn, where the node may be asked. It changes nothing.
    """
    from gpuctl.box import Unknown
    from gpuctl.store import write
    from gpuctl.topology import as_svg, as_text, topology

    code, seen = WELL, set[str]()
    documents: list[dict[str, Any]] = []
    for name, box, missing in _boxes(inventory, targets, file):
        for why in missing:
            say(f"gpuctl: {why}")
        source = None if box is None else box.node if box.node.present else box.guest
        if source is None and missing:
            code = UNKNOWN
            continue
        try:
            if source is None:
                raise Unknown("it did not answer")
            found = topology(source)
        except Unknown as unknown:
            say(f"gpuctl: {name}: {unknown}")
            code = UNKNOWN
            continue
        if found.machine in seen:
            continue
        if not as_json:
            out(("\n" if seen else "") + as_text(found), newline=False)
        seen.add(found.machine)
        documents.append(_as_json(found))
        if svg is not None:
            path = svg if len(seen) == 1 else svg.with_stem(f"{svg.stem}-{found.machine}")
            write(path, as_svg(found).encode(), instead="--svg names another file")
            say(f"wrote {path}")
    if as_json:
        verdict = "well" if code == WELL else "unknown"
        document({"schema": "gpuctl.topology/1", "verdict": verdict, "machines": documents})
    return code


def _boxes(inventory: str, targets: tuple[str, ...], file: Path | None) -> list[tuple[str, Box | None, list[str]]]:
    from gpuctl import doctor, hosts
    from gpuctl.asking import ask

    if file is not None:
        snapshots = doctor.read_snapshots(file)
        return [(str(file), doctor.box_from(snapshots), [])]
    asked = ask(hosts.load(folder(inventory)), targets)
    return [(each.name, each.box, list(each.missing.values())) for each in asked]


def _as_json(found: Topology) -> dict[str, Any]:
    def function(branch: Any) -> dict[str, Any]:
        f = branch.function
        return {
            "address": f.address,
            "kind": f.port.name.lower() if f.port is not None else None,
            "gpu": None if branch.gpu is None else {"index": branch.gpu.index, "name": branch.gpu.name},
            "link": {"width": f.width, "width_max": f.width_max, "gt_s": f.speed, "gt_s_max": f.speed_max},
            "max_read_request_bytes": f.max_read_request,
            "max_payload_bytes": f.max_payload,
            "acs_redirects": None if f.acs is None else f.acs.redirects,
            "below": [function(each) for each in branch.below],
        }

    return {
        "machine": found.machine,
        "numa": [
            {
                "number": numa.number,
                "cpus": numa.cpus,
                "memory_bytes": numa.memory_bytes,
                "roots": [{"name": root, "ports": [function(port) for port in ports]} for root, ports in numa.roots],
            }
            for numa in found.numa
        ],
        "between": [{"a": a, "b": b, "way": way} for (a, b), way in found.between.items() if a < b],
        "no_peer_to_peer": [list(pair) for pair in found.no_peer] if found.peer_known else None,
        "iommu": found.iommu,
        "notes": list(found.notes),
    }
