"""The container was given the GPU for something else than computing (NVIDIA_DRIVER_CAPABILITIES).

NVIDIA's container runtime brings in only the libraries of the capabilities asked for: with `utility` alone nvidia-smi
is there and libcuda is not.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import cuda, env
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA


def check(box: Box) -> Iterator[Finding]:
    value = box.guest[env.ENV].get("NVIDIA_DRIVER_CAPABILITIES")
    if value is None or {"compute", "all"} & set(value.replace(" ", "").split(",")):
        return
    view = box.guest.get(cuda.CUDA)
    if view is None or view.works or view.loaded:
        return
    yield Finding(
        f"NVIDIA_DRIVER_CAPABILITIES={value} leaves out compute, so libcuda is not in the container",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if view.dlopen not in (None, "OK") else Certainty.LIKELY,
        (str(view), f"NVIDIA_DRIVER_CAPABILITIES={value}"),
        separates="" if view.dlopen not in (None, "OK") else "does libcuda.so.1 load in the container?",
        advice="recreate the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility (or all)",
    )
