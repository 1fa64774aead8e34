"""A GPU that should be there is not even on the PCI bus.

Fewer cards than expected, though every one that the bus shows works: a card that is not seated, has no power, sits in
a slot that is switched off, or has failed.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, nvidia, pci
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    expected = box.wanted.gpus
    if expected is None:
        return
    gpus = box.kernel(pci.GPUS)
    if len(gpus) >= expected:
        return
    known = box.get_kernel(nvidia.DRIVER_GPUS)
    if known is not None and len(known) > len(gpus):
        return  # the bus is not shown in full here
    host = box.node if box.node.present else box.guest
    yield Finding(
        f"the PCI bus of {host.name} has {len(gpus)} of {expected} GPUs",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED,
        (*access.symptom(box), *(f"{gpu.address}: driver {gpu.driver or 'none'}" for gpu in gpus)),
        advice="look at the hardware: seat, power cables, slot settings in the firmware; dmesg | grep -i pci; a "
        "cold start",
    )
