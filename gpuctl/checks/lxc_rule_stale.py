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
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    major = access.uvm_major(box)
    if major is None:
        return
    for guest in proxmox.confs_of_interest(box):
        stale = access.stale_rules(box, guest)
        if guest.conf.unprivileged or not stale or access.next_start(box, guest).allows("c", major, 0):
            continue
        yield finding(box, guest, major, stale)


def finding(box: Box, guest: proxmox.GuestConf, major: int, stale: list[access.Stale]) -> Finding:
    word = access.opened(box, UVM)
    refusals = [r for r in access.refused(box) if r.number.path == UVM and r.number.major == major]
    rules = access.in_force(box)
    allowed_now = word == "OK" or (rules is not None and rules.allows("c", major, 0))
    evidence = access.seen(box, refusals)
    if not refusals:
        evidence.append(f"/proc/devices says {major} nvidia-uvm")
    for each in stale:
        owner = f"now {each.owner}'s" if each.owner else "nobody's in this boot"
        evidence.append(f"{guest.where(each.line)}  <- {each.major} is {owner}")
    edit = remedies.for_good(box, guest, stale)
    against = []
    if allowed_now:
        severity, certainty = Severity.WARNING, Certainty.PROVED
        summary = f"{guest.label} may open {UVM} until its next start: its rules allow {numbers(stale)}, not {major}"
        evidence.append("the running container may open it: a rule was added since its start")
        restarts = None
    else:
        severity = Severity.CRITICAL
        certainty = Certainty.PROVED if refusals else Certainty.LIKELY
        summary = f"{guest.label} may not open {UVM}: its rules allow {numbers(stale)}, its number is now {major}"
        restarts = remedies.what_restarts(box)
        if access.works(box):
            against.append("CUDA starts nevertheless")
        if word is not None and word != "EPERM":
            against.append(f"opening {UVM} gives {word}, not EPERM")
    return Finding(
        summary,
        LAYER,
        severity,
        certainty,
        tuple(evidence),
        tuple(against),
        separates="" if certainty is Certainty.PROVED else f'open("{UVM}") inside the guest as root: EPERM proves it',
        remedy=remedies.container(edit, restarts=restarts),
        advice=remedies.advice(box, edit, restarts=restarts),
    )


def numbers(stale: list[access.Stale]) -> str:
    return ", ".join(str(number) for number in dict.fromkeys(each.major for each in stale))
