"""LXC's nvidia hook in a privileged container: the hook refuses and the container does not start.

The hook says that it works in unprivileged mode only ("Failed to run mount hooks" in LXC's log). It does nothing where
NVIDIA_VISIBLE_DEVICES is not set (lxc.environment).
"""

import re
from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, lxc, proxmox
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    pattern = r"hook currently only works in unprivileged|Failed to run mount hooks"
    said = [line for line in proxmox.start_messages(box) if re.search(pattern, line)]
    for guest in proxmox.confs_of_interest(box):
        hooks = lxc.nvidia_hooks(guest.conf, acts=bool(said))
        if not hooks or guest.conf.unprivileged:
            continue
        edit = remedies.for_good(box, guest, access.stale_rules(box, guest))
        running = bool(access.works(box)) or access.in_force(box) is not None
        yield Finding(
            f"{guest.label} is privileged, and LXC's nvidia hook works in unprivileged containers only",
            LAYER,
            Severity.WARNING if running and not said else Severity.CRITICAL,
            Certainty.PROVED if said else Certainty.LIKELY,
            (*said, *(guest.where(line) for line in hooks)),
            ("the container runs",) if running and not said else (),
            "" if said else "LXC's log of a start: the hook's own words",
            remedies.container(edit, restarts="guest"),
            remedies.advice(box, edit, restarts="guest"),
        )
