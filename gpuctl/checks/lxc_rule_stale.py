"""The container's device rules name a number that nvidia-uvm had in an earlier boot.

nvidia-uvm gets its major number when its module loads, and it may be another one after each boot of the node, a new
kernel or another driver. A rule such as `lxc.cgroup2.devices.allow: c 509:* rwm` then allows a device that no longer
exists and refuses the one that does. nvidia-smi works all the same, for it only needs 195, which is fixed; cuInit
fails with 999. Only privileged containers are concerned: unprivileged ones may open every device.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, proxmox
from gpuctl.facts.nodes import UVM
from gpuctl.finding import Finding, Layer

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    major = access.uvm_major(box)
    if major is None:
        return
    for guest in proxmox.confs_of_interest(box):
        stale = access.stale_rules(box, guest)
        allowed, decider = access.next_start(box, guest).decide("c", major, 0)
        if guest.conf.unprivileged or not stale or allowed or decider is not None:
            continue
        outlook = access.outlook(box, [access.Number(UVM, major, 0)])
        evidence = [*outlook.evidence]
        if not any("/proc/devices says" in line for line in evidence):
            evidence.append(f"/proc/devices says {major} nvidia-uvm")
        for each in stale:
            owner = f"now {each.owner}'s" if each.owner else "nobody's in this boot"
            evidence.append(f"{guest.where(each.line)}  <- {each.major} is {owner}")
        against = []
        if outlook.now and access.opened(box, UVM) not in (None, "EPERM"):
            against.append(f"opening {UVM} gives {access.opened(box, UVM)}, not EPERM")
        numbers = ", ".join(str(number) for number in dict.fromkeys(each.major for each in stale))
        if outlook.now:
            summary = f"{guest.label} may not open {UVM}: its rules allow {numbers}, its number is now {major}"
        else:
            summary = f"{guest.label} may open {UVM} until its next start: its rules allow {numbers}, not {major}"
        edit = remedies.for_good(box, guest, stale)
        restarts = remedies.what_restarts(box, outlook)
        yield Finding(
            summary,
            LAYER,
            outlook.severity,
            outlook.certainty,
            tuple(evidence),
            tuple(against),
            access.to_prove(outlook, UVM),
            remedies.container(edit, restarts=restarts),
            remedies.advice(box, edit, restarts=restarts),
        )
