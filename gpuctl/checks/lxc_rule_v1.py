"""The container's device rules are written for cgroup v1 and are ignored.

Since Proxmox VE 7 guests run under cgroup v2, where `lxc.cgroup.devices.allow` has no effect; the key is
`lxc.cgroup2.devices.allow`. pve8to9 warns of it. Then 195 is refused as well and nvidia-smi fails too.
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
        missing = access.missing_in_conf(box, guest)
        lines = [line for number in missing for line in access.old_key_rules(guest, number)]
        if not lines or v1(box):
            continue
        refusals = access.refused(box)
        evidence = access.seen(box, refusals)
        evidence += [guest.where(line) for line in dict.fromkeys(lines)]
        conf = guest.conf
        for line in guest.conf.lxc("lxc.cgroup.devices.allow", "lxc.cgroup.devices.deny"):
            conf = conf.replaced(line.number, line.text.replace("lxc.cgroup.", "lxc.cgroup2.", 1))
        edit = remedies.for_good(box, guest)
        if remedies.devn_possible(box) is False:
            edit = remedies.Edit(guest, conf, remedies.live_rules(box))
        restarts = remedies.what_restarts(box)
        proved = bool(refusals)
        yield Finding(
            f"{guest.label}: device rules under lxc.cgroup. are ignored; the key is lxc.cgroup2.",
            LAYER, Severity.CRITICAL, Certainty.PROVED if proved else Certainty.LIKELY, tuple(evidence),
            separates="" if proved else "open() of the nodes inside the guest as root: EPERM proves it",
            remedy=remedies.container(edit, restarts=restarts),
                advice=remedies.advice(box, edit, restarts=restarts),
        )  # fmt: skip


def v1(box: Box) -> bool:
    """Does the node still run guests under cgroup v1?"""
    return any(path.startswith("/sys/fs/cgroup/devices/") for path in box.node.mapping("files"))
