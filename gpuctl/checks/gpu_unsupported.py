"""This driver does not support the GPU.

NVIDIA's open modules need a GPU with a GSP (Turing and newer); each branch drops old cards and does not know new ones.
The kernel log names the card and the reason.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, kernel_log
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER
_PATTERN = (
    r"not supported by (open )?nvidia\.ko|not supported by the NVIDIA \S+ driver|does not include the required "
    r"GPU System Processor"
    r"|requires use of the NVIDIA open kernel modules|NVIDIA GPU .* installed in this system is"
)


def check(box: Box) -> Iterator[Finding]:
    lines = kernel_log.grep(box.kernel(kernel_log.LINES), _PATTERN)
    if not lines:
        return
    closed = any("requires use of the NVIDIA open kernel modules" in line for line in lines)
    opened = any("GPU System Processor" in line or "open nvidia.ko" in line for line in lines)
    advice = "install the driver branch that supports this GPU (NVIDIA's list of supported products), then reboot"
    if closed:
        advice = "install NVIDIA's open kernel modules (nvidia-open, or -m=kernel-open with the installer), then reboot"
    elif opened:
        advice = "install the proprietary kernel modules instead of the open ones (cards before Turing), then reboot"
    yield Finding(
        "the driver does not support a GPU of this machine",
        LAYER,
        Severity.WARNING if access.works(box) else Severity.CRITICAL,
        Certainty.PROVED,
        (*access.symptom(box), *lines[-4:]),
        advice=advice,
    )
