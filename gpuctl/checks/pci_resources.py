"""The firmware gave a GPU no room on the PCI bus for its memory.

"This PCI I/O region assigned to your NVIDIA device is invalid: BAR1 is 0M": the card's memory window did not fit below
4 GiB, or resizable BAR asked for more than the board hands out. The driver then leaves the card alone.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, kernel_log
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    pattern = r"PCI I/O region assigned to your NVIDIA device is invalid|BAR\d is 0M @ 0x0"
    lines = kernel_log.grep(box.kernel(kernel_log.LINES), pattern)
    room = kernel_log.grep(box.kernel(kernel_log.LINES), r"BAR \d+.*(no space for|failed to assign)")
    if not lines:
        return
    yield Finding(
        "a GPU got no memory window on the PCI bus",
        LAYER,
        Severity.WARNING if access.works(box) else Severity.CRITICAL,
        Certainty.PROVED,
        (*access.symptom(box), *lines[-3:], *room[-2:]),
        advice="in the firmware: Above 4G Decoding on (and Resizable BAR, or off where the board cannot); "
        "or add pci=realloc to the kernel's command line; then reboot",
    )
