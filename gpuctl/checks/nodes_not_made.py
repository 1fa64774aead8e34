"""The driver is told not to make device nodes (NVreg_ModifyDeviceFiles=0), and nobody else does.

nvidia-modprobe, NVML and libcuda respect the option. udev rules or a unit must then make every node.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, nodes, nvidia
from gpuctl.facts.nodes import CTL, UVM
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DEVICES


def check(box: Box) -> Iterator[Finding]:
    if box.kernel(nvidia.PARAMS).get("ModifyDeviceFiles", "1") != "0":
        return
    host = box.node if box.node.present else box.guest
    table = host.get(nodes.NODES)
    missing = [path for path in (CTL, UVM, "/dev/nvidia0") if table is not None and table.find(path) is not None
               and table[path].kind == "missing"]  # fmt: skip
    if not missing:
        return
    yield Finding(
        f"the driver may not make device nodes, and {access.listed(missing)} are missing on {host.name}",
        LAYER,
        Severity.WARNING if access.works(box) else Severity.CRITICAL,
        Certainty.PROVED,
        (
            *access.symptom(box),
            "/proc/driver/nvidia/params: ModifyDeviceFiles 0",
            *(str(table[p]) for p in missing if table),
        ),
        advice=f"on {host.name}: remove NVreg_ModifyDeviceFiles=0 from /etc/modprobe.d and reboot, or make the "
        "nodes by a udev rule",
    )
