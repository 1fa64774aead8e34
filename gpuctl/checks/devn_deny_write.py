"""A devN entry has deny-write=1, and CUDA opens the device for writing.

Proxmox then allows reading alone. CUDA opens every device for reading and writing and gets EPERM.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, proxmox
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    for guest in proxmox.confs_of_interest(box):
        closed = [d for d in guest.conf.devices().values() if d.deny_write and "nvidia" in d.path]
        if not closed:
            continue
        words = {device.path: access.opened(box, device.path) for device in closed}
        refused = [path for path, word in words.items() if word == "EPERM"]
        conf = guest.conf
        for device in closed:
            options = [part for part in device.line.value.split(",") if not part.strip().startswith("deny-write")]
            conf = conf.replaced(device.line.number, f"{device.line.key}: {','.join(options)}")
        edit = remedies.Edit(guest, conf)
        evidence = [*access.symptom(box), *(line for path in words for line in access.opening(box, path))]
        evidence += [guest.where(device.line) for device in closed]
        against = tuple(f"opening {path} succeeds" for path, word in words.items() if word == "OK")
        yield Finding(
            f"{guest.label}: deny-write=1 on {access.listed(words)}, which CUDA opens for writing",
            LAYER, Severity.CRITICAL, Certainty.PROVED if refused else Certainty.LIKELY, tuple(evidence), against,
            "" if refused else "open() of the node for reading and writing inside the guest: EPERM proves it",
            remedies.container(edit, restarts="guest"), remedies.advice(box, edit, restarts="guest"),
        )  # fmt: skip
