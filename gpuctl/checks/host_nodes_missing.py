"""The driver is loaded and nobody has made its device nodes on the machine that has the GPUs.

Loading a module registers a number; the node in /dev is made by user space: nvidia-modprobe, libcuda as root,
nvidia-smi. modules-load.d alone loads nvidia_uvm and makes no node. Guests that are to get a node when they start find
nothing to bind, and containers with a devN entry for it do not start at all. A missing /dev/nvidiaN takes that GPU
away without any error.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, cuda, devices, nodes, nvidia
from gpuctl.facts.nodes import CTL, UVM
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DEVICES


def check(box: Box) -> Iterator[Finding]:
    host = box.node if box.node.present else box.guest
    if (host is box.guest and access.in_container(box)) or box.get_kernel(nvidia.MODULE_LOADED) is False:
        return
    table = host[nodes.NODES]
    gpus = box.get_kernel(nvidia.DRIVER_GPUS) or ()
    wanted = [CTL, *(f"/dev/nvidia{gpu.minor}" for gpu in gpus if gpu.minor is not None and not gpu.excluded)]
    majors = box.get_kernel(devices.MAJORS)
    if majors is None or majors.of("nvidia-uvm") is not None:  # else uvm_not_loaded says it
        wanted.append(UVM)
    found = {path: table.find(path) for path in wanted}
    missing = [path for path, node in found.items() if node is not None and node.kind == "missing"]
    if not missing:
        return
    evidence = [*access.symptom(box), *(f"{path} is not there on {host.name}" for path in missing)]
    major = box.get_kernel(devices.UVM_MAJOR)
    if UVM in missing and major is not None:
        evidence.append(f"/proc/devices says {major} nvidia-uvm")
    harmless = bool(access.works(box)) and not short(box)
    if host is box.guest:
        helper = access.nodes_made_on_demand(box)
        if helper and not access.gpu_hosts(box):  # guests need it before anybody uses a GPU
            evidence.append(f"{helper} makes it when a program first uses the GPU")
            harmless = harmless or access.guarded(box) or access.works(box) is None
    elif harmless:
        evidence.append("the guest has nodes of its own; its next start will find none to pass")
    yield Finding(
        f"nobody has made {access.listed(missing)} on {host.name}",
        LAYER,
        Severity.WARNING if harmless else Severity.CRITICAL,
        Certainty.PROVED,
        tuple(evidence),
        remedy=remedies.device_nodes(box),
        advice=remedies.nodes_advice(box),
    )


def short(box: Box) -> bool:
    """Does CUDA count fewer GPUs than the driver has?"""
    view, gpus = box.guest.get(cuda.CUDA), box.get_kernel(nvidia.DRIVER_GPUS)
    return view is not None and view.count is not None and gpus is not None and view.count < len(gpus)
