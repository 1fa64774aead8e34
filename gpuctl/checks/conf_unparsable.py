"""The container's configuration has a line Proxmox cannot parse.

Proxmox then refuses or ignores the line, and lines of other tools' syntax (a device rule without its key, a mount
line copied from fstab) have no effect.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, lxc, proxmox
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    for guest in proxmox.confs_of_interest(box):
        bad = [line for line in guest.conf.lines if line.kind == "unparsable" and line.section == lxc.MAIN]
        bad += [device.line for device in guest.conf.devices().values() if device.unparsable]
        if not bad or not guest.path:
            continue
        related = any("nvidia" in line.text or "devices" in line.text or "/dev/" in line.text for line in bad)
        yield Finding(
            f"{guest.label}: Proxmox cannot parse {len(bad)} line{'s' * (len(bad) > 1)} of its configuration",
            LAYER,
            Severity.CRITICAL if related and access.works(box) is False else Severity.WARNING,
            Certainty.PROVED,
            tuple(guest.where(line) for line in bad),
            advice=f"correct or remove the line in {guest.path}; see pct.conf(5)",
        )
