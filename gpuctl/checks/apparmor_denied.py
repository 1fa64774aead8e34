"""AppArmor refuses access to NVIDIA's device nodes or files.

open(2) gives EACCES in spite of the mode; the node's kernel log names the profile and the path.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, kernel_log
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    lines = kernel_log.grep(
        box.kernel(kernel_log.LINES), r'apparmor="DENIED".*(name="[^"]*nvidia|comm="nvidia|libcuda)'
    )
    if not lines:
        return
    works = access.works(box)
    yield Finding(
        "AppArmor refuses access to NVIDIA's files",
        LAYER,
        Severity.INFO if works else Severity.CRITICAL,
        Certainty.PROVED if any('name="/dev/nvidia' in line for line in lines) else Certainty.LIKELY,
        (*access.symptom(box), *lines[-3:]),
        separates="open() of the nodes inside: EACCES",
        advice="extend the profile that the line names; for a container on Proxmox VE, as a last resort: "
        "lxc.apparmor.profile: unconfined in its configuration, and a restart of it",
    )
