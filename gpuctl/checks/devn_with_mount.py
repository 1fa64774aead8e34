"""A devN entry and a mount entry bring the same device node into the container, which then does not start.

LXC mounts first and makes an empty file for it (create=file); then Proxmox's hook cannot make its own ("Could not mknod
...: File exists", in LXC's log "Failed to run autodev hooks"). It happens where devN entries are added, also to a
running container, and the old lines stay.
"""

import re
from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, lxc, proxmox
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    pattern = r"Could not mknod .*nvidia.*File exists|Failed to run autodev hooks"
    said = [line for line in proxmox.start_messages(box) if re.search(pattern, line, re.I)]
    for guest in proxmox.confs_of_interest(box):
        passed = {device.path: device for device in guest.conf.devices().values()}
        twice = [m for m in lxc.nvidia_mounts(guest.conf) if m.target in passed and "create=file" in m.options]
        if not twice:
            continue
        running = bool(access.works(box)) or access.in_force(box) is not None
        told = [] if running else said
        edit = remedies.for_good(box, guest, access.stale_rules(box, guest))
        evidence = [*access.symptom(box), *told]
        for mount in twice:
            evidence += [guest.where(passed[mount.target].line), guest.where(mount.line)]
        restarts = None if running else "guest"
        yield Finding(
            f"{guest.label} {'will not start again' if running else 'does not start'}: a devN entry and a mount entry "
            f"both bring {access.listed(mount.target for mount in twice)}",
            LAYER,
            Severity.WARNING if running else Severity.CRITICAL,
            Certainty.PROVED if told else Certainty.LIKELY,
            tuple(evidence),
            separates="" if told else "LXC's log of a start: Failed to run autodev hooks",
            remedy=remedies.container(edit, restarts=restarts),
            advice=remedies.advice(box, edit, restarts=restarts),
        )
