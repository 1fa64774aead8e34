"""Nothing on the node makes the NVIDIA device nodes before its guests start.

After a boot the driver registers its numbers, and the nodes appear when somebody first uses a GPU. Guests start in
pve-guests.service, which waits for nothing of NVIDIA. What works today because somebody ran nvidia-smi fails after the
next reboot: mount entries bind nothing, and containers with devN entries do not start.
"""

import re
from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, systemd
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DEVICES

_MAKES = r"nvidia-modprobe|nvidia-smi|nvidia-ctk|mknod .*nvidia|gpuctl"


def check(box: Box) -> Iterator[Finding]:
    if not box.node.present or "probe" not in box.node.document or "pve-guests.service" not in box.node[systemd.UNITS]:
        return
    if box.node[systemd.UNITS]["pve-guests.service"].get("LoadState") != "loaded":
        return
    guests = list(access.gpu_hosts(box))
    if not guests:
        return
    texts = {**box.node.files("/etc/systemd/system/"), **box.node.files("/etc/udev/rules.d/")}
    for path, text in texts.items():
        early = path.endswith(".rules") or re.search(r"^Before=.*(pve-guests|lxc)", text, re.M)
        if early and re.search(_MAKES, text):
            return
    units = box.node[systemd.UNITS]
    for name, unit in units.items():
        before = re.search(r"\b(pve-guests|lxc)\.service", unit.get("Before", ""))
        if before and re.search(_MAKES, name + unit.get("ExecStart", "")) and unit.get("UnitFileState") == "enabled":
            return
    names = ", ".join(guest.label for guest in guests)
    yield Finding(
        f"nothing on {box.node.name} makes the NVIDIA device nodes before guests start",
        LAYER, Severity.WARNING, Certainty.LIKELY,
        (f"no unit ordered before pve-guests.service and no udev rule that makes them was found; {names} need them",),
        separates="the state of /dev/nvidia-uvm right after a boot of the node, before anybody uses a GPU",
        remedy=remedies.device_nodes(box), advice=remedies.nodes_advice(box),
    )  # fmt: skip
