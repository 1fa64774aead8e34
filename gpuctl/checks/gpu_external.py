"""A GPU sits behind a link that can be unplugged (Thunderbolt, USB4, an external case), and that link gave up.

Idle it looks well; when CUDA first loads the link the card falls off the bus (Xid 79), and the host may lock up. The
cause is the way to the card, not the container: cable, link speed, power saving of the port, power supply of the case.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, kernel_log, nvidia, pci
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    devices = {device.address: device for device in box.kernel(pci.DEVICES)}
    outside = {
        device.address: way
        for device in devices.values()
        if device.is_gpu and (way := [part for part in on_the_way(device) if removable(devices.get(part))])
    }
    if not outside:
        return
    xids = [xid for xid in box.get_kernel(kernel_log.XIDS) or () if xid.number == 79]
    fallen = [xid for xid in xids if pci.normal_address(xid.address) in outside]
    nvml = box.guest.get(nvidia.NVML)
    lost = nvml is not None and (nvml.rc == 15 or any(gpu.error == 15 for gpu in nvml.gpus))
    evidence = [*access.symptom(box), *(xid.text for xid in fallen[-2:])]
    evidence += [f"{address}: reached through {way[0]}, which is removable" for address, way in outside.items()]
    broken = bool(fallen) or lost
    yield Finding(
        f"the GPU {', '.join(outside)} sits behind a removable link" + (", and that link gave up" if broken else ""),
        LAYER,
        (Severity.CRITICAL if lost or access.works(box) is False else Severity.WARNING) if broken else Severity.INFO,
        Certainty.LIKELY if broken else Certainty.PROVED,
        tuple(evidence),
        separates="the same card in a slot of the board" if broken else "",
        advice="power the case and the machine off and on again; then on the kernel's command line "
        "pcie_aspm=off pcie_port_pm=off,\na lower link speed in the firmware's settings, another cable, a case with "
        "a stronger supply"
        if broken
        else "",
    )


def on_the_way(device: pci.Device) -> list[str]:
    """Addresses from the root port to the device itself."""
    path = str(device.attributes.get("path", ""))
    return [part for part in path.split("/") if part.count(":") == 2] or [device.address]


def removable(device: pci.Device | None) -> bool:
    return device is not None and device.attributes.get("removable") == "removable"
