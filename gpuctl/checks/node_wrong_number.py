"""A device node on the machine with the driver has a wrong number.

Left over from mknod by hand, a udev rule or an earlier boot. Everything that opens it gets ENXIO or another driver,
and guests inherit it when they start.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, cuda, devices, nodes, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DEVICES


def check(box: Box) -> Iterator[Finding]:
    host = box.node if box.node.present else box.guest
    if host is box.guest and access.in_container(box):
        return
    uvm = box.get_kernel(devices.UVM_MAJOR)
    wrong = []
    for path, node in (host.get(nodes.NODES) or {}).items():
        driver, minor = devices.driver_of(path), devices.minor_of(path)
        if node.kind != "char" or driver not in ("nvidia", "nvidia-uvm") or minor is None:
            continue
        major = uvm if driver == "nvidia-uvm" else devices.NVIDIA_MAJOR
        if major is not None and (node.major, node.minor) != (major, minor):
            wrong.append((node, f"{major}:{minor}"))
    if not wrong:
        return
    evidence = list(access.symptom(box))
    for node, right in wrong:
        shown = access.opening(box, node.path) if host is box.guest else []
        evidence += shown or [f"on {host.name} {node}"]
        evidence.append(f"{node.path} must be {right} in this boot (/proc/devices)")
    paths = [node.path for node, _ in wrong]
    needed = [path for path in paths if not path.endswith(("-tools", "-modeset"))]
    lost = any(path[-1].isdigit() for path in needed) and short(box)  # that GPU is not counted, and nothing fails
    harmless = not needed or (bool(access.works(box)) and not lost)
    names = ", ".join(f"{node.path} is {node.major}:{node.minor}, not {right}" for node, right in wrong)
    yield Finding(
        f"wrong device number on {host.name}: {names}",
        LAYER, Severity.WARNING if harmless else Severity.CRITICAL, Certainty.PROVED, tuple(evidence),
        remedy=remedies.device_nodes(box, remove=paths), advice=remedies.nodes_advice(box, remove=paths),
    )  # fmt: skip


def short(box: Box) -> bool:
    """Does CUDA count fewer GPUs than the driver has?"""
    view, gpus = box.guest.get(cuda.CUDA), box.get_kernel(nvidia.DRIVER_GPUS)
    return view is not None and view.count is not None and gpus is not None and view.count < len(gpus)
