"""The device cgroup refuses the guest a device CUDA needs; this is proved from inside, its configuration is not known.

EPERM of open(2) on a device node whose mode allows it comes from the device cgroup and from nothing else: a mode,
an owner or a mount give EACCES, a missing driver ENXIO. /proc/devices is the machine's also inside a container, so
the number that is refused is known to be the right one. Which line on the node is to blame only the node can tell.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, devices
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    refusals = [refusal for refusal in access.refused(box) if not old_number(box, refusal)]
    if not refusals:
        return
    if access.inner(box) and access.rules_dropped(box):
        return  # that has a check of its own
    guest = access.conf(box)
    if guest is not None and box.guest is not box.node:
        rules = access.next_start(box, guest)
        if not guest.conf.unprivileged or guest.conf.lxc("lxc.include") or access.started_privileged(box):
            return  # the checks of the configuration say it
        refusals = [r for r in refusals if rules.allows("c", r.number.major, r.number.minor)]
        if not refusals:
            return
    names = access.named([refusal.number for refusal in refusals])
    evidence = access.seen(box, refusals)
    tried = all(refusal.tried for refusal in refusals)
    yield Finding(
        f"{who(box)} may not open {names}: the device cgroup refuses it",
        LAYER, Severity.CRITICAL, Certainty.PROVED if tried else Certainty.LIKELY, tuple(evidence),
        separates="" if tried else "open() of the nodes as root: EPERM proves it", advice=advice(box, refusals),
    )  # fmt: skip


def old_number(box: Box, refusal: access.Refusal) -> bool:
    """Is it the node that is wrong? Allowing the number it has would bring nothing; another check says so."""
    right = {number.path: number.major for number in access.needed(box)}
    return right.get(refusal.number.path, refusal.number.major) != refusal.number.major


def who(box: Box) -> str:
    guest = access.conf(box)
    return guest.label if guest is not None else box.guest.name


def advice(box: Box, refusals: list[access.Refusal]) -> str:
    majors = sorted({refusal.number.major for refusal in refusals})
    if access.inner(box):
        paths = " ".join(f"--device {refusal.number.path}" for refusal in refusals)
        return f"recreate the container with --gpus all, or with {paths}"
    vmid = box.wanted.vmid or box.guest.document.get("vmid") or "VMID"
    lines = ["now, on the node; nothing restarts but the GPU program:"]
    if vmid == "VMID":
        lines.insert(0, "for whoever owns the node (VMID: the number of this container there)")
    lines += [f'  lxc-cgroup -n {vmid} devices.allow "c {major}:* rwm"' for major in majors]
    lines.append(f"for good (Proxmox VE 8.2), in /etc/pve/lxc/{vmid}.conf above the first line that starts with [:")
    nodes = sorted((number.path for number in access.needed(box)), key=lambda path: (not path[-1].isdigit(), path))
    lines += [f"  dev{number}: {path},mode=0666" for number, path in enumerate(nodes)]
    if any(major != devices.NVIDIA_MAJOR for major in majors):
        lines.append("  and remove lxc.cgroup2.devices.allow lines with numbers of earlier boots")
    lines.append(f"  then: pct reboot {vmid}")
    return "\n".join(lines)
