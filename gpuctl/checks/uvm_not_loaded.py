"""nvidia is loaded and nvidia-uvm is not, so there is no device for CUDA to open.

CUDA needs the module nvidia_uvm. It loads when nvidia-modprobe, libcuda as root or nvidia-persistenced asks for it, so
after a boot it may be missing until somebody used the GPU on the machine. Guests cannot load it.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, devices, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DEVICES


def check(box: Box) -> Iterator[Finding]:
    if box.kernel(devices.UVM_MAJOR) is not None or access.works(box):
        return
    majors = box.kernel(devices.MAJORS)
    loaded = box.get_kernel(nvidia.MODULE_LOADED)
    if loaded is False or majors.of("nvidia") is None:
        return  # then the driver as a whole is missing
    helper = "" if access.in_container(box) else access.nodes_made_on_demand(box)
    on_demand = bool(helper) and (access.works(box) is None or access.guarded(box))
    evidence = [*access.symptom(box), "/proc/devices has nvidia (195) and no nvidia-uvm"]
    if on_demand:
        evidence.append(f"{helper} may load it when a program first uses the GPU; the probe may not")
    yield Finding(
        "the module nvidia_uvm is not loaded",
        LAYER,
        Severity.WARNING if on_demand else Severity.CRITICAL,
        Certainty.PROVED,
        tuple(evidence),
        remedy=remedies.device_nodes(box) if box.node.present or not access.in_container(box) else None,
        advice=remedies.nodes_advice(box),
    )
