"""DKMS could not build the NVIDIA module for the running kernel.

A driver knows kernels up to those of its time; a new Proxmox kernel may have changed what it calls (550.163.01 and
555.58.02 do not build on 6.17). Then the module is missing after the reboot.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, boot, modules, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    if box.get_kernel(nvidia.MODULE_LOADED) or access.works(box):
        return
    host = box.node if box.node.present else box.guest
    release = box.get_kernel(boot.KERNEL_RELEASE)
    lines = modules.build_errors(box)
    try:
        status = host.output("dkms status").stdout
    except Unknown:
        status = ""
    broken = [
        line for line in status.splitlines() if "nvidia" in line and re.search(r"broken|Error|added$|: added", line)
    ]
    other = [line for line in status.splitlines() if "nvidia" in line and release and release not in line]
    here = [
        line for line in status.splitlines() if "nvidia" in line and release and release in line and "installed" in line
    ]
    if here or not (lines or broken):
        return
    evidence = [*access.symptom(box), *lines[:6], *(f"dkms status: {line.strip()}" for line in (broken or other)[:3])]
    yield Finding(
        f"the NVIDIA module could not be built for kernel {release or 'in use'} on {host.name}",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if lines else Certainty.LIKELY,
        tuple(evidence),
        separates="" if lines else "/var/lib/dkms/nvidia/*/build/make.log",
        advice="install a driver that knows this kernel, or keep the older kernel:\n"
        "  proxmox-boot-tool kernel list; proxmox-boot-tool kernel pin <the one before>; reboot",
    )
