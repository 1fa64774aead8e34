"""A GPU does not wake from its deepest sleep (D3cold).

"Unable to change power state from D3cold to D0, device inaccessible": power saving switched the card off and it does
not come back. The driver then cannot initialise it.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, kernel_log
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    lines = kernel_log.grep(box.kernel(kernel_log.LINES), r"Unable to change power state from D3cold to D0")
    lines = [line for line in lines if "nvidia" in line.lower() or "vfio" in line.lower() or "pci" in line.lower()]
    if not lines or access.works(box):
        return
    yield Finding(
        "a GPU does not wake from D3cold",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED,
        (*access.symptom(box), *lines[-3:]),
        advice="switch the machine off and on again; then keep the card awake: pcie_port_pm=off on the kernel's "
        "command line, "
        "or echo 0 > /sys/bus/pci/devices/<address>/d3cold_allowed",
    )
