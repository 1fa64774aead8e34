"""A GPU was left in a state from which its firmware cannot be booted again.

"unexpected WPR2 already up, cannot proceed with booting GSP": after a warm reboot, a crash, or use by a virtual
machine. The card has to be reset.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, kernel_log
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    lines = kernel_log.grep(
        box.kernel(kernel_log.LINES), r"WPR2 already up|is likely in a bad state and may need to be reset"
    )
    if not lines or access.works(box):
        return
    yield Finding(
        "a GPU is in a bad state and has to be reset",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED,
        (*access.symptom(box), *lines[-3:]),
        advice="stop what uses it, then nvidia-smi --gpu-reset -i N; if that fails, switch the machine off and "
        "on again",
    )
