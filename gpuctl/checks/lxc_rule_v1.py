"""The container's device rules are written for cgroup v1 and are ignored.

Since Proxmox VE 7 guests run under cgroup v2, where `lxc.cgroup.devices.allow` has no effect; the key is
`lxc.cgroup2.devices.allow`. pve8to9 warns of it. Then 195 is refused as well and nvidia-smi fails too.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, proxmox
from gpuctl.finding import Finding, Layer

LAYER = Layer.CONTAINER
OLD = ("lxc.cgroup.devices.allow", "lxc.cgroup.devices.deny")


def check(box: Box) -> Iterator[Finding]:
    for guest in proxmox.confs_of_interest(box):
        if guest.conf.unprivileged or v1(box):
            continue
        missing = access.missing_in_conf(box, guest)
        if not any(access.old_key_rules(guest, number) for number in missing):
            continue
        outlook = access.outlook(box, missing)
        edit = remedies.for_good(box, guest, access.stale_rules(box, guest))
        if remedies.devn_possible(box) is False:
            conf = guest.conf
            for line in conf.lxc(*OLD):
                conf = conf.replaced(line.number, line.text.replace("lxc.cgroup.", "lxc.cgroup2.", 1))
            edit = remedies.Edit(guest, conf, remedies.live_rules(box))
        restarts = remedies.what_restarts(box, outlook)
        yield Finding(
            f"{guest.label}: device rules under lxc.cgroup. are ignored; the key is lxc.cgroup2.",
            LAYER,
            outlook.severity,
            outlook.certainty,
            (*outlook.evidence, *(guest.where(line) for line in guest.conf.lxc(*OLD))),
            (),
            access.to_prove(outlook, missing[0].path),
            remedies.container(edit, restarts=restarts),
            remedies.advice(box, edit, restarts=restarts),
        )


def v1(box: Box) -> bool:
    """Does the node still run guests under cgroup v1?"""
    return any(path.startswith("/sys/fs/cgroup/devices/") for path in box.node.mapping("files"))
