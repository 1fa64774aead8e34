"""CUDA_DEVICE_ORDER has a value that CUDA does not know.

There are FASTEST_FIRST and PCI_BUS_ID, in capitals. Anything else is not ignored: cuInit fails with 101, invalid
device, which says nothing of the cause (measured, driver 580).
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, env
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA
KNOWN = ("FASTEST_FIRST", "PCI_BUS_ID")


def check(box: Box) -> Iterator[Finding]:
    value = box.guest[env.ENV].get("CUDA_DEVICE_ORDER")
    if value is None or value in KNOWN or access.code(box) not in (None, 101):
        return
    source = box.guest.get(env.ENV_SOURCE, "environment")
    proved = access.code(box) == 101
    yield Finding(
        f"CUDA_DEVICE_ORDER={value!r} is nothing that CUDA knows",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if proved else Certainty.LIKELY,
        (*access.symptom(box), f"{source}: CUDA_DEVICE_ORDER={value!r}"),
        separates="" if proved else "cuInit without CUDA_DEVICE_ORDER",
        advice="CUDA_DEVICE_ORDER=PCI_BUS_ID (the order of nvidia-smi), or leave it out; then restart the service",
    )
