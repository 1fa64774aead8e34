"""nouveau holds the GPU, so NVIDIA's driver cannot.

The free driver of the kernel was loaded first, usually from the initramfs. NVIDIA's module then loads and finds no GPU
left: "The NVIDIA probe routine was not called for N device(s)".
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, kernel_log, pci
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    gpus = [gpu for gpu in box.get_kernel(pci.GPUS) or () if gpu.driver == "nouveau"]
    log = box.get_kernel(kernel_log.LINES) or ()
    lines = kernel_log.grep(log, r"nouveau .*(NVIDIA|bios:|DRM:)|probe routine was not called")
    known = box.get_kernel(pci.GPUS) is not None
    if not gpus and (known or not kernel_log.grep(log, r"nouveau \d{4}:.*")):
        return
    host = box.node if box.node.present else box.guest
    yield Finding(
        f"nouveau holds {', '.join(gpu.address for gpu in gpus) or 'the GPU'} on {host.name}",
        LAYER,
        Severity.WARNING if access.works(box) else Severity.CRITICAL,
        Certainty.PROVED if gpus else Certainty.LIKELY,
        (*access.symptom(box), *(f"{gpu.address}: kernel driver in use: nouveau" for gpu in gpus), *lines[-3:]),
        separates="" if gpus else "lspci -nnk -d 10de: shows the driver in use",
        advice=f"on {host.name}:\n  printf 'blacklist nouveau\\noptions nouveau modeset=0\\n' > "
        "/etc/modprobe.d/blacklist-nouveau.conf\n"
        "  update-initramfs -u -k all\n  reboot",
    )
