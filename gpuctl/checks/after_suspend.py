"""The machine was suspended since its boot, and CUDA does not start since it woke.

The driver keeps what is on the GPUs over a suspend only when it is told to (NVreg_PreserveVideoMemoryAllocations=1 with
NVIDIA's sleep services). Servers are best not suspended at all.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, kernel_log, nvidia
from gpuctl.facts.nodes import UVM
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    slept = kernel_log.grep(box.kernel(kernel_log.LINES), r"PM: suspend (entry|exit)|PM: resume of devices complete")
    if not slept or access.code(box) not in (999, 3) or access.opened(box, UVM) not in (None, "OK"):
        return
    if access.refused(box):
        return
    params = box.get_kernel(nvidia.PARAMS) or {}
    kept = params.get("PreserveVideoMemoryAllocations")
    evidence = [*access.symptom(box), *slept[-2:]]
    if kept is not None:
        evidence.append(f"/proc/driver/nvidia/params: PreserveVideoMemoryAllocations {kept}")
    yield Finding(
        "CUDA does not start since the machine woke from a suspend",
        LAYER,
        Severity.CRITICAL,
        Certainty.LIKELY,
        tuple(evidence),
        separates="did CUDA start between the boot and the suspend?",
        advice="reload nvidia_uvm (stop all users, rmmod nvidia_uvm && nvidia-modprobe -u) and restart the "
        "containers, or reboot;\n"
        "  then systemctl mask suspend.target, or NVreg_PreserveVideoMemoryAllocations=1 with nvidia-suspend.service",
    )
