"""A rollback, restore, clone or migration brought back a configuration with numbers of another boot or node.

Raw device rules travel with a container's configuration; the numbers they name belong to the node and boot they were
written for. devN entries do not have this fault.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, proxmox
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    pattern = r"vz(rollback|restore|clone|migrate)|qmrollback|pct (rollback|restore|clone|migrate)|rollback to snapshot"
    said = [line for line in proxmox.start_messages(box) if re.search(pattern, line)]
    ran = box.node.mapping("commands")
    said += [command for command in ran if re.match(r"pct (rollback|restore|clone|migrate)\b", command)]
    for guest in proxmox.confs_of_interest(box):
        stale = access.stale_rules(box, guest)
        if guest.conf.unprivileged or not stale:
            continue
        parent = guest.conf.get("parent")
        same = [
            line
            for line in guest.conf.lines
            if parent and line.section == parent and line.kind == "lxc" and line.text in {s.line.text for s in stale}
        ]
        if not said and not (same and len(guest.conf.sections()) > 1 and newer(guest, parent or "")):
            continue
        evidence = [*said, *(guest.where(each.line) for each in stale)]
        evidence += [f"{guest.where(line)}  <- the same line in snapshot [{line.section}]" for line in same]
        yield Finding(
            f"{guest.label}: the stale rules came with a rollback, restore or migration",
            LAYER, Severity.INFO, Certainty.LIKELY, tuple(evidence),
            advice="write devN entries into the live part and take a new snapshot: a rollback then brings no numbers",
        )  # fmt: skip


def newer(guest: proxmox.GuestConf, parent: str) -> bool:
    """Is there a snapshot younger than the one the live configuration descends from?"""
    times = {}
    for line in guest.conf.lines:
        if line.key == "snaptime" and line.value.isdigit():
            times[line.section] = int(line.value)
    return parent in times and any(time > times[parent] for name, time in times.items() if name != parent)
