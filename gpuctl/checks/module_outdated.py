"""The driver was updated and the old kernel module is still in memory.

The package put new libraries and a new module on the disk; what runs is the module loaded at boot. On that machine
nvidia-smi says "Driver/library version mismatch"; containers go on until their own libraries are updated. An
unattended upgrade does this at night.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box, Snapshot, Unknown
from gpuctl.facts import access, libraries, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    host = box.node if box.node.present else box.guest
    if host is box.guest and access.in_container(box):
        return
    loaded = host[nvidia.MODULE_VERSION]
    disk = on_disk(host)
    if disk is None or disk == loaded:
        return
    nvml = host.get(nvidia.NVML)
    own = host.get(libraries.USERLAND) or ()
    evidence = [f"loaded: {loaded} (/proc/driver/nvidia/version)", f"on the disk: {disk} (modinfo nvidia)"]
    evidence += [f"libraries: {version.number}, {version.source}" for version in own[:2] if version.number != loaded]
    if nvml is not None and nvml.rc == 18:
        evidence.append(str(nvml))
    broken = access.works(box) is False
    yield Finding(
        f"{host.name} runs the NVIDIA module {loaded}, the one installed is {disk}",
        LAYER,
        Severity.CRITICAL if broken and host is box.guest else Severity.WARNING,
        Certainty.PROVED,
        tuple(evidence),
        advice=f"reboot {host.name}; or stop everything that uses the GPUs, then\n"
        "  rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; modprobe -a nvidia nvidia_uvm\n"
        "nvidia-uvm may get another number then: restart the containers, and update their libraries to the new version",
    )


def on_disk(host: Snapshot) -> str | None:
    """Version of the module that modprobe would load; None where it is not known."""
    try:
        found = re.search(nvidia.VERSION, host.output("modinfo -F version nvidia", "modinfo nvidia").stdout)
    except Unknown:
        return None
    return found.group(0) if found else None
