"""The service's address space is limited (LimitAS=, ulimit -v), and CUDA reserves more than that.

CUDA reserves address space for all memory of all GPUs and of the machine, far more than it uses; with a limit of 8 GiB
cuInit answers 2, out of memory. Such limits do not save memory; a memory limit of the control group does.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, limits
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA
ENOUGH = 1 << 42  # bytes; 8 GiB was measured to be too little for one GPU of 141 GB


def check(box: Box) -> Iterator[Finding]:
    limit = box.guest[limits.LIMITS].get("as")
    code = access.code(box)
    if limit is None or limit.value is None or limit.value >= ENOUGH or code not in (None, 2, 3, 304, 999):
        return
    size = f"{limit.value / 2**30:.1f} GiB"
    yield Finding(
        f"the address space is limited to {size}; CUDA reserves more to start",
        LAYER,
        Severity.CRITICAL if code is not None else Severity.WARNING,
        Certainty.PROVED if code == 2 else Certainty.LIKELY,
        (*access.symptom(box), f"{limit.source}: address space limited to {size}"),
        separates="" if code == 2 else "cuInit without the limit (ulimit -v unlimited)",
        advice="remove LimitAS= from the unit (or ulimit -v from the shell), then restart the service",
    )
