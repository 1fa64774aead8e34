"""The container's configuration names a GPU by a number no GPU has any more.

/dev/nvidiaN follows the order in which the driver finds the cards; a card that was moved or removed, or one that went
to a virtual machine, changes it. A mount entry or rule for /dev/nvidia3 then passes nothing.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, devices, lxc, nvidia, proxmox
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    known = {gpu.minor for gpu in box.kernel(nvidia.DRIVER_GPUS) if gpu.minor is not None}
    for guest in proxmox.confs_of_interest(box):
        gone = sorted(access.passed_gpus(guest) - known)
        lines = [line for minor in gone for line in access.in_conf(guest, f"/dev/nvidia{minor}")]
        for line in guest.conf.lxc(*lxc.ALLOW_KEYS):
            try:
                rule = lxc.parse_rule(line.value)
            except lxc.Malformed:
                continue
            minor = rule.minor if rule.major == devices.NVIDIA_MAJOR else None
            if minor is not None and minor < 248 and minor not in known:
                gone.append(minor)
                lines.append(line)
        if not gone:
            continue
        minors = sorted(set(gone))
        left = access.passed_gpus(guest) & known
        conf = guest.conf.without([line.number for line in lines])
        free = (n for n in range(256) if n not in conf.devices())
        added = [f"dev{next(free)}: /dev/nvidia{minor},mode=0666" for minor in sorted(known - left)]
        edit = remedies.Edit(guest, conf.added(added))
        evidence = [*access.symptom(box), *(guest.where(line) for line in lines)]
        evidence.append(f"the driver's GPUs have the minors {', '.join(str(minor) for minor in sorted(known))}")
        yield Finding(
            f"{guest.label} is given {', '.join(f'/dev/nvidia{minor}' for minor in minors)}, which no GPU is",
            LAYER,
            Severity.WARNING if left and access.works(box) is not False else Severity.CRITICAL,
            Certainty.PROVED,
            tuple(evidence),
            remedy=remedies.container(edit, restarts="guest"),
            advice=remedies.advice(box, edit, restarts="guest"),
        )
