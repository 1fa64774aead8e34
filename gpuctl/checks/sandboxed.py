"""A sandbox refuses system calls that CUDA needs (seccomp).

cuInit then gives 304 or 999 although every node opens; or 100, with NVML at 18 or 999, when it is the driver's own
ioctl(2) that is refused. Container runtimes install such filters; a unit can have one
too (SystemCallFilter=).
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, nvidia
from gpuctl.facts.nodes import CTL, UVM
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA


def check(box: Box) -> Iterator[Finding]:
    if access.code(box) == 100 and not mute(box):
        return
    if access.code(box) not in (100, 304, 999) or access.opened(box, UVM) not in (None, "OK") or access.refused(box):
        return
    status = box.guest.mapping("service").get("status")
    source = "the service's process"
    if not isinstance(status, str):
        try:
            status, source = box.guest.file("/proc/self/status"), "/proc/self/status"
        except Unknown:
            status = ""
    found = re.search(r"^Seccomp:\s+(\d)", status, re.M)
    if found is None or found.group(1) != "2":
        return
    table = access.guest_nodes(box)
    if table is not None and any(node.kind in ("missing", "file") for path, node in table.items() if path == UVM):
        return
    proved = access.code(box) in (100, 304)  # 999 has likelier causes
    yield Finding(
        "a seccomp filter is in force and the system calls of CUDA fail",
        LAYER,
        Severity.CRITICAL,
        Certainty.LIKELY if proved else Certainty.POSSIBLE,
        (*access.symptom(box), f"{source}: Seccomp: 2"),
        separates="does it work without the filter (docker: --security-opt seccomp=unconfined)?",
        advice="try without the filter; then allow what it lacks: the profile of the runtime, or "
        "SystemCallFilter= of the unit",
    )


def mute(box: Box) -> bool:
    """Does the driver not answer NVML either, though its nodes open?"""
    nvml = box.guest.get(nvidia.NVML)
    return nvml is not None and nvml.rc in (18, 999) and access.opened(box, CTL) == "OK"
