"""An ordinary file or a folder stands where a device node should be.

`lxc.mount.entry: ... optional,create=file` makes an empty file when the node has nothing to bind, for example because
the guest was started before nvidia-uvm had its node. Opening the file succeeds and the first ioctl fails, so ls and
open look fine while cuInit gives 999 (nvidia-uvm) or 100, or a GPU is silently missing. Docker's `-v /dev/nvidia0:...`
makes a folder where there was no node; a block device of the right number is as useless.
"""

import re
from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, nodes
from gpuctl.facts.nodes import CTL, UVM
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER
KINDS = {"file": "an ordinary file", "dir": "a folder", "block": "a block device"}


def check(box: Box) -> Iterator[Finding]:
    table = access.guest_nodes(box)
    if table is None:
        return
    files = [
        node
        for path, node in table.items()
        if node.kind in KINDS and (path in (CTL, UVM) or re.fullmatch(r"/dev/nvidia\d+", path))
    ]
    if not files:
        return
    paths = [node.path for node in files]
    what = " and ".join(dict.fromkeys(KINDS[node.kind] for node in files))
    evidence = [*access.symptom(box), *(str(node) for node in files)]
    container = access.in_container(box)
    host = box.node.get(nodes.NODES) if box.node is not box.guest else None
    for path in paths:
        on_node = host.find(path) if host is not None else None
        if on_node is not None:
            evidence.append(f"on the node {on_node}")
    guest = access.conf(box) if container and box.guest is not box.node else None
    if guest is None:
        where = "VMID" if not box.wanted.vmid else str(box.wanted.vmid)
        if container:
            text = f"on the node: nvidia-modprobe -c 0 -u; then restart the container (pct reboot {where})"
        else:
            text = remedies.nodes_advice(box, remove=paths)
        yield Finding(
            f"{access.listed(paths)}: {what}, not a device",
            Layer.CONTAINER if container else Layer.DEVICES, Severity.CRITICAL, Certainty.PROVED, tuple(evidence),
            remedy=None if container else remedies.device_nodes(box, remove=paths), advice=text,
        )  # fmt: skip
        return
    for path in paths:
        lines = access.in_conf(guest, path)
        evidence += [f"{guest.where(line)}  <- makes a file where nothing is to bind" for line in lines]
    edit = remedies.for_good(box, guest, access.stale_rules(box, guest))
    yield Finding(
        f"{guest.label}: {access.listed(paths)} is {what}, for the node had none when the container started",
        LAYER, Severity.CRITICAL, Certainty.PROVED, tuple(evidence),
        remedy=remedies.container(edit, restarts="guest"), advice=remedies.advice(box, edit, restarts="guest"),
    )  # fmt: skip
