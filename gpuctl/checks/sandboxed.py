"""A sandbox refuses system calls that CUDA needs (seccomp).

cuInit then gives 304 or 999 although every node opens. Container runtimes install such filters; a unit can have one
too (SystemCallFilter=).
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access
from gpuctl.facts.nodes import UVM
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA


def check(box: Box) -> Iterator[Finding]:
    if access.code(box) not in (304, 999) or access.opened(box, UVM) not in (None, "OK") or access.refused(box):
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
    proved = access.code(box) == 304
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
