"""The driver is older than the CUDA the program was built for.

A program built with CUDA 13 needs a driver that knows CUDA 13 (580 and newer); 35 and PyTorch's "driver on your system
is too old" say so. Containers cannot bring a newer kernel module; only the node can.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, cuda, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA
_PATTERN = (
    r"driver version is insufficient|driver on your system is too old|unsatisfied condition: cuda>="
    r"|unsupported CUDA version"
)


def check(box: Box) -> Iterator[Finding]:
    told = [line.strip() for line in cuda.messages(box.guest) if re.search(_PATTERN, line)]
    codes = {view.cu_init for view in (box.guest.get(cuda.VIEWS) or {}).values()}
    if not told and 35 not in codes:
        return
    module = box.get_kernel(nvidia.MODULE_VERSION)
    nvml = box.guest.get(nvidia.NVML)
    view = box.guest.get(cuda.CUDA)
    evidence = [*access.symptom(box), *told[:3]]
    if module:
        evidence.append(f"the kernel module is {module}")
    if nvml is not None and nvml.cuda_version:
        evidence.append(f"the driver knows CUDA up to {nvml.cuda_version}")
    elif view is not None and view.driver_version:
        evidence.append(f"the driver knows CUDA up to {view.driver_version // 1000}.{view.driver_version % 1000 // 10}")
    host = box.node if box.node.present else box.guest
    yield Finding(
        "the driver is older than the CUDA this program was built for",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED,
        tuple(evidence),
        advice=f"update the driver of {host.name} (and the libraries in its containers to the same version), or "
        "take the program "
        "in a build for an older CUDA; on data-centre GPUs the package cuda-compat bridges one or two major versions",
    )
