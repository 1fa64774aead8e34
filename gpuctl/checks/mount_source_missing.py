"""A mount entry names a device the node does not have, and is not optional: the container does not start.

`lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,create=file` without `optional` makes LXC give up when there
is nothing to bind, for example because nobody has made /dev/nvidia-uvm since the node's boot.
"""

import re
from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, devices, nodes, proxmox
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    said = [line for line in proxmox.start_messages(box) if re.search(r"Failed to mount \S*/dev/", line)]
    table = box.node.get(nodes.NODES)
    for guest in proxmox.confs_of_interest(box):
        absent = []
        for line in guest.conf.mounts():
            fields = line.value.split()
            if len(fields) < 4 or not fields[0].startswith("/dev/") or "optional" in fields[3].split(","):
                continue
            node = table.find(fields[0]) if table is not None else None
            lines = [each for each in said if f'"{fields[0]}"' in each]
            if lines or (node is not None and node.kind == "missing"):
                absent.append((line, fields[0], lines))
        if not absent:
            continue
        running = bool(access.works(box)) or access.in_force(box) is not None
        paths = ", ".join(path for _, path, _ in absent)
        nvidia = [path for _, path, _ in absent if devices.driver_of(path) is not None]
        conf = guest.conf
        for line, _, _ in absent:
            fields = line.value.split()
            fields[3] += ",optional"
            conf = conf.replaced(line.number, f"{line.key}: {' '.join(fields)}")
        edit = remedies.Edit(guest, conf)
        yield Finding(
            f"{guest.label} {'will not start again' if running else 'does not start'}: there is no {paths} to mount",
            LAYER,
            Severity.WARNING if running else Severity.CRITICAL,
            Certainty.PROVED if any(lines for _, _, lines in absent) or table is not None else Certainty.LIKELY,
            (
                *(guest.where(line) for line, _, _ in absent),
                *dict.fromkeys(each for _, _, lines in absent for each in lines),
            ),
            remedy=remedies.container(edit, restarts=None if running else "guest"),
            advice=(remedies.nodes_advice(box) + "\n" if nvidia else "")
            + remedies.advice(box, edit, restarts=None if running else "guest"),
        )
