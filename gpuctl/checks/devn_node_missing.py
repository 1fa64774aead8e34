"""A devN entry names a device node that the node does not have: the container does not start.

Proxmox looks the node up when the container starts and gives up with "Device /dev/... does not exist". After a boot
/dev/nvidia-uvm is there only once somebody made it, so devN entries need a unit that makes it before guests start.
"""

import re
from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, devices, nodes, proxmox
from gpuctl.finding import Certainty, Finding, Layer, Remedy, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    table = box.node.get(nodes.NODES)
    said = [line for line in proxmox.start_messages(box) if re.search(r"[Dd]evice /dev/\S+ does not exist", line)]
    for guest in proxmox.confs_of_interest(box):
        absent = []
        for device in guest.conf.devices().values():
            node = table.find(device.path) if table is not None else None
            named = any(device.path in line for line in said)
            if "nvidia" in device.path and ((node is not None and node.kind == "missing") or (named and node is None)):
                absent.append(device)
        lines = [line for line in said if any(device.path in line for device in absent)]
        if not absent:
            continue
        evidence = [*access.symptom(box), *lines, *(f"{guest.where(device.line)}" for device in absent)]
        if table is not None:
            evidence += [f"{device.path} is not there on {box.node.name}" for device in absent]
        made = [device for device in absent if devices.driver_of(device.path) is not None]
        remedy: Remedy | None = remedies.device_nodes(box)
        advice = remedies.nodes_advice(box) + f"\nthen, on the node: pct start {guest.vmid or 'VMID'}"
        if not made:  # no driver has such a node: the entry is wrong
            edit = remedies.Edit(guest, guest.conf.without([device.line.number for device in absent]))
            remedy, advice = remedies.container(edit, restarts="guest"), remedies.advice(box, edit, restarts="guest")
        running = bool(access.works(box)) or access.in_force(box) is not None
        yield Finding(
            f"{guest.label} {'cannot start' if not running else 'will not start again'}: "
            f"{', '.join(device.path for device in absent)} is missing on the node",
            LAYER,
            Severity.WARNING if running else Severity.CRITICAL,
            Certainty.PROVED if lines or table is not None else Certainty.LIKELY,
            tuple(evidence),
            remedy=remedy,
            advice=advice,
        )
    if said and not proxmox.confs_of_interest(box):
        yield Finding(
            "the container cannot start: a device of its devN entries is missing on the node",
            LAYER, Severity.CRITICAL, Certainty.PROVED, tuple(said),
            remedy=remedies.device_nodes(box) if box.node.present else None, advice=remedies.nodes_advice(box),
        )  # fmt: skip
