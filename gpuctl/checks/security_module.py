"""A security module keeps the device nodes shut: AppArmor, SELinux, or a sandbox that uses Landlock.

open(2) gives EACCES although the mode lets everybody in and the mount has no nodev: nothing else says so. The device
cgroup says EPERM. Landlock is set up by programs for themselves and their children, and logs nothing.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, kernel_log
from gpuctl.facts.nodes import CTL, UVM, parse_mounts
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    table = access.guest_nodes(box)
    if table is None:
        return
    shut = [
        path
        for path, node in table.items()
        if (path in (CTL, UVM) or re.fullmatch(r"/dev/nvidia\d+", path))
        and node.kind == "char"
        and (node.mode or 0) & 0o006 == 0o006
        and access.opened(box, path) == "EACCES"
        and not nodev(box, path)
    ]
    if not shut or told(box):
        return
    evidence = [*access.symptom(box), *(line for path in shut for line in access.opening(box, path))]
    try:
        evidence.append(f"/sys/kernel/security/lsm: {box.guest.file('/sys/kernel/security/lsm').strip()}")
    except Unknown:
        pass
    yield Finding(
        f"a security module keeps {access.listed(shut)} shut; their mode would let everybody in",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED,
        tuple(evidence),
        separates="which one: dmesg or the audit log names AppArmor and SELinux; Landlock is silent, look at what "
        "starts the program (a sandbox, a unit, a runtime)",
        advice="let the sandbox open /dev/nvidia* for reading and writing (its list of writable paths, the profile, "
        "the policy), and restart what runs in it",
    )


def nodev(box: Box, path: str) -> bool:
    try:
        mounts = parse_mounts(box.guest.file("/proc/self/mountinfo"))
    except Unknown:
        return False
    above = [m for m in mounts if path == m[0] or path.startswith(m[0].rstrip("/") + "/")]
    return bool(above) and "nodev" in max(above, key=lambda m: len(m[0]))[1]


def told(box: Box) -> bool:
    """AppArmor's own words have a check of their own."""
    return bool(kernel_log.grep(box.get_kernel(kernel_log.LINES) or (), r'apparmor="DENIED".*nvidia'))
