"""devN entries and LXC's nvidia hook together: both make the same nodes and the container does not start.

The hook (lxc.hook.mount: /usr/share/lxc/hooks/nvidia) makes them first, then Proxmox's own fails ("Could not mknod
...: File exists", in LXC's log "Failed to run autodev hooks"). Without NVIDIA_VISIBLE_DEVICES (lxc.environment) the
nvidia hook does nothing, and both get on.
"""

import re
from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, lxc, proxmox
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    pattern = r"mknod .*nvidia.*File exists|Failed to run autodev hooks"
    said = [line for line in proxmox.start_messages(box) if re.search(pattern, line, re.I)]
    for guest in proxmox.confs_of_interest(box):
        hooks = lxc.nvidia_hooks(guest.conf, acts=any("exists" in line for line in said))
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
            "" if said else "LXC's log of a start: Failed to run autodev hooks",
            remedies.container(edit, restarts="guest"),
            remedies.advice(box, edit, restarts="guest"),
        )
