"""The device rule stands in a snapshot's section or among pending changes, not in the live configuration.

In /etc/pve/lxc/<vmid>.conf everything after the first `[name]` belongs to that snapshot, and after `[pve:pending]` to
changes not applied yet. A line appended to the end of a file that has snapshots lands in the last of them.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, proxmox
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    for guest in proxmox.confs_of_interest(box):
        if guest.conf.unprivileged:
            continue
        missing = [n for n in access.missing_in_conf(box, guest) if not access.old_key_rules(guest, n)]
        misplaced = {line for number in missing for line in access.elsewhere(guest, number)}
        if not misplaced:
            continue
        names = ", ".join(str(number) for number in missing if access.elsewhere(guest, number))
        refusals = access.refused(box)
        evidence = access.seen(box, refusals)
        ordered = sorted(misplaced, key=lambda line: line.number)
        evidence += [f"{guest.where(line)}  <- in section [{line.section}]" for line in ordered]
        edit = remedies.for_good(box, guest, access.stale_rules(box, guest))
        restarts = remedies.what_restarts(box)
        proved = bool(refusals)
        yield Finding(
            f"{guest.label}: the rule for {names} is not in the live part of its configuration",
            LAYER, Severity.CRITICAL, Certainty.PROVED if proved else Certainty.LIKELY, tuple(evidence),
            separates="" if proved else "open() of the nodes inside the guest as root: EPERM proves it",
            remedy=remedies.container(edit, restarts=restarts),
                advice=remedies.advice(box, edit, restarts=restarts),
        )  # fmt: skip
