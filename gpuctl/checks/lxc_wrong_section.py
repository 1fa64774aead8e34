"""The device rule stands in a snapshot's section or among pending changes, not in the live configuration.

In /etc/pve/lxc/<vmid>.conf everything after the first `[name]` belongs to that snapshot, and after `[pve:pending]` to
changes not applied yet. A line appended to the end of a file that has snapshots lands in the last of them.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, proxmox
from gpuctl.finding import Finding, Layer

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    for guest in proxmox.confs_of_interest(box):
        if guest.conf.unprivileged:
            continue
        missing = access.missing_in_conf(box, guest)
        if any(access.old_key_rules(guest, number) for number in missing):
            continue
        there = {number: access.elsewhere(guest, number) for number in missing}
        misplaced = {line for lines in there.values() for line in lines}
        if not misplaced:
            continue
        numbers = [number for number, lines in there.items() if lines]
        outlook = access.outlook(box, numbers)
        edit = remedies.for_good(box, guest, access.stale_rules(box, guest))
        restarts = remedies.what_restarts(box, outlook)
        ordered = sorted(misplaced, key=lambda line: line.number)
        yield Finding(
            f"{guest.label}: the rule for {access.named(numbers)} is not in the live part of its configuration",
            LAYER,
            outlook.severity,
            outlook.certainty,
            (*outlook.evidence, *(f"{guest.where(line)}  <- in section [{line.section}]" for line in ordered)),
            (),
            access.to_prove(outlook, numbers[0].path),
            remedies.container(edit, restarts=restarts),
            remedies.advice(box, edit, restarts=restarts),
        )
