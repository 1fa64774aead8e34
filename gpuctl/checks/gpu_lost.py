"""A GPU has fallen off the PCI bus (Xid 79).

The card does not answer any more: power, heat, a riser or cable, the slot, or power saving of the link. NVML says "GPU
is lost" (15), counts fall short, and programs on it die. It comes back with a power cycle at the earliest. On external
and OCuLink cards it happens when CUDA first loads the link.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, kernel_log, nvidia, pci
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    xids = [xid for xid in box.get_kernel(kernel_log.XIDS) or () if xid.number == 79]
    lines = kernel_log.grep(box.get_kernel(kernel_log.LINES) or (), r"fallen off the bus")
    nvml = box.guest.get(nvidia.NVML)
    lost = nvml is not None and (nvml.rc == 15 or any(gpu.error == 15 for gpu in nvml.gpus))
    dead = [gpu.address for gpu in box.get_kernel(pci.GPUS) or () if gpu.attributes.get("rev_ff") or dead_config(gpu)]
    if not (xids or lines or lost or dead):
        return
    addresses = sorted({pci.normal_address(xid.address) for xid in xids} | set(dead))
    still = bool(lost or dead)
    evidence = [*access.symptom(box), *(xid.text for xid in xids[-3:])]
    evidence += [line for line in lines[-2:] if line not in evidence]
    evidence += [f"{address}: all ones on the bus, it does not answer" for address in dead]
    if nvml is not None and nvml.rc == 15 and nvml.text:
        evidence.append(nvml.text)
    short = nvml is not None and nvml.works and box.wanted.gpus is not None and (nvml.count or 0) < box.wanted.gpus
    sure = still or short or access.works(box) is False
    yield Finding(
        f"a GPU has fallen off the bus{': ' + ', '.join(addresses) if addresses else ''}",
        LAYER,
        Severity.CRITICAL if sure else Severity.WARNING,
        Certainty.PROVED if xids or lines or lost or dead else Certainty.LIKELY,
        tuple(evidence),
        advice="drain the machine and switch it off and on again (a reboot is often not enough). If it comes "
        "back: check power "
        "cables and supply, temperature, risers and slot; pcie_aspm=off; firmware of board and card",
    )


def dead_config(gpu: pci.Device) -> bool:
    config = gpu.attributes.get("config")
    return isinstance(config, str) and len(config) >= 32 and set(config[:32]) == {"f"}
