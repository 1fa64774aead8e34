"""There is no NVIDIA GPU and no driver for one on this machine.

Its PCI bus shows no device of NVIDIA, no module is loaded and there are no nodes. In a virtual machine a card has to be
passed to it first; on a node it has to be seated, and switched on in the firmware.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    if box.get_kernel(nvidia.MODULE_LOADED) is not False or access.works(box) is not False:
        return
    if not access.without_gpu(box):
        return  # a card without its driver has a check of its own
    host = box.node if box.node.present else box.guest
    of = host.mapping("pci").get("of", 0)
    yield Finding(
        f"there is no NVIDIA GPU on {host.name}",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if of else Certainty.LIKELY,
        (*access.symptom(box), f"{of} devices on the PCI bus, none of NVIDIA; its module is not loaded"),
        separates="" if of else "lspci -nn: the machine shows no PCI bus at all",
        advice="is it the machine that was meant (-t BOX)? In a VM: pass the card (hostpci0 on its node)",
    )
