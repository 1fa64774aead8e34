"""Why a kernel module is not there: refused for its signature, or never built."""

from __future__ import annotations

import re

from gpuctl.box import Box, Unknown
from gpuctl.facts import boot, kernel_log

_REJECTED = r"[Kk]ey was rejected by service|Loading of unsigned module is rejected|Lockdown: .*unsigned module"
# As dkms prints it: a sentence about DKMS has its words too.
_NOT_BUILT = (
    r"[Bb]ad return status for module build|(?:^|\s)dkms(?:\[\d+\])?: .*(?:fail|error)"
    r"|\bdkms autoinstall on .* failed|ERROR \(dkms"
)


def rejected(box: Box) -> list[str]:
    """Lines that say that a module's signature was refused."""
    lines = kernel_log.grep(box.get_kernel(kernel_log.LINES) or (), _REJECTED)
    for snapshot in box.snapshots:
        lines += [str(line).strip() for line in snapshot.document.get("errors", ()) if re.search(_REJECTED, str(line))]
        for command in snapshot.mapping("commands"):
            if command.startswith(("modprobe", "insmod")):
                try:
                    text = snapshot.output(command).text
                except Unknown:
                    continue
                lines += [line.strip() for line in text.splitlines() if re.search(_REJECTED, line)]
    return list(dict.fromkeys(lines))


def build_errors(box: Box) -> list[str]:
    """Lines that say that DKMS could not build NVIDIA's module for the running kernel."""
    host = box.node if box.node.present else box.guest
    release = box.get_kernel(boot.KERNEL_RELEASE)
    lines: list[str] = []
    for path, text in host.files("/var/lib/dkms/nvidia", "make.log").items():
        other = re.search(r"for kernel (\S+)", text)
        if release is not None and other is not None and release not in other.group(1):
            continue
        wrong = [line.strip() for line in text.splitlines() if re.search(r"\berror\b:|\*\*\*|Error \d", line)]
        lines += [f"{path}: {line}" for line in wrong[:3]]
    for snapshot in box.snapshots:
        told = [str(line) for line in snapshot.document.get("errors", ())]
        lines += [line for line in told if re.search(_NOT_BUILT, line)]
    return lines[:6]
