"""devN entries and LXC's nvidia hook together: both make the same nodes and the container does not start.

The hook (lxc.hook.mount: /usr/share/lxc/hooks/nvidia) then fails with "Could not mknod ...: File exists".
"""

import re
from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, proxmox
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    said = [line for line in proxmox.start_messages(box) if re.search(r"mknod .*nvidia.*File exists", line, re.I)]
    for guest in proxmox.confs_of_interest(box):
        hooks = [line for line in guest.conf.lxc("lxc.hook.mount") if re.search(r"hooks/nvidia\s*$", line.value)]
        passed = [device for device in guest.conf.devices().values() if "nvidia" in device.path]
        if not hooks or not passed:
            continue
        conf = guest.conf.without([line.number for line in hooks])
        edit = remedies.Edit(guest, conf)
        running = bool(access.works(box)) or access.in_force(box) is not None
        evidence = [*said, *(guest.where(line) for line in hooks), *(guest.where(device.line) for device in passed)]
        yield Finding(
            f"{guest.label}: devN entries and the nvidia hook both make the device nodes, so it does not start",
            LAYER,
            Severity.WARNING if running and not said else Severity.CRITICAL,
            Certainty.PROVED if said else Certainty.LIKELY,
            tuple(evidence),
            ("the container runs",) if running and not said else (),
            "" if said else "the messages of pct start: Could not mknod ...: File exists",
            remedies.container(edit, restarts="guest"),
            remedies.advice(box, edit, restarts="guest"),
        )
