"""A GPU is bound to vfio-pci, that is, set aside for a virtual machine.

Left over from passing the card to a VM: ids in /etc/modprobe.d or on the kernel's command line, or a VM that runs with
it. NVIDIA's driver does not see such a card, and containers cannot use it.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, cuda, kernel_log, nvidia, pci
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    gpus = box.get_kernel(pci.GPUS) or ()
    held = [gpu.address for gpu in gpus if gpu.driver in ("vfio-pci", "pci-stub")]
    lines = kernel_log.grep(box.get_kernel(kernel_log.LINES) or (), r"already bound to vfio-pci")
    if not held:
        held = [
            found.group(1) for line in lines for found in [re.search(r"GPU ([0-9a-f:.]+) is already", line)] if found
        ]
    if not held or (gpus and not any(gpu.driver in ("vfio-pci", "pci-stub") for gpu in gpus)):
        return
    view, nvml = box.guest.get(cuda.CUDA), box.guest.get(nvidia.NVML)
    none_left = len(held) == len(gpus) or (nvml is not None and nvml.works and nvml.count == 0)
    broken = access.works(box) is False and none_left
    short = box.wanted.gpus is not None and view is not None and (view.count or 0) < box.wanted.gpus
    host = box.node if box.node.present else box.guest
    evidence = [*access.symptom(box), *(f"{address}: kernel driver in use: vfio-pci" for address in held), *lines[-2:]]
    for path in ("/proc/cmdline", *host.files("/etc/modprobe.d/")):
        try:
            text = host.file(path)
        except Unknown:
            continue
        evidence += [f"{path}: {line.strip()}" for line in text.splitlines() if re.search(r"vfio[-_]pci.*ids=", line)]
    yield Finding(
        f"vfio-pci holds {', '.join(dict.fromkeys(held))} on {host.name}, for a virtual machine",
        LAYER,
        Severity.CRITICAL if broken or short else Severity.INFO,
        Certainty.PROVED,
        tuple(evidence),
        advice=f"if no VM is to have it, on {host.name}: remove its ids from /etc/modprobe.d and the command "
        "line, stop the VM "
        "with its hostpci entry, update-initramfs -u, reboot",
    )
