"""A GPU's firmware (GSP) did not start.

The driver loads gsp_*.bin of exactly its version from /lib/firmware/nvidia and boots the GPU's own processor with it.
Without the file, or with a card that does not answer, the adapter cannot be initialised: "No devices were found".
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, kernel_log, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    log = box.kernel(kernel_log.LINES)
    missing = kernel_log.grep(
        log, r"(gsp_\w*\.bin|nvidia/\S+/gsp).*(failed|error -2|not found)|Direct firmware load for nvidia/\S*gsp"
    )
    failed = kernel_log.grep(log, r"Cannot initialize GSP firmware RM|GFW_BOOT|RmInitAdapter failed! \(0x62:")
    wpr = kernel_log.grep(log, r"WPR2 already up")
    if wpr or not (missing or failed) or access.works(box):
        return
    module = box.get_kernel(nvidia.MODULE_VERSION) or "VERSION"
    codes = sorted(
        {found.group(1) for line in failed for found in [re.search(r"RmInitAdapter failed! (\(\S+\))", line)] if found}
    )
    if missing:
        advice = (
            f"install the firmware of driver {module} (/lib/firmware/nvidia/{module}/gsp_*.bin), then "
            "reload the module or reboot"
        )
    else:
        advice = (
            "switch the machine off and on again (a warm reboot does not reset the card); if it stays, "
            "reseat or replace the card"
        )
    yield Finding(
        "a GPU's firmware is missing" if missing else "a GPU's firmware (GSP) did not start",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED,
        (*access.symptom(box), *missing[-2:], *failed[-4:], *([f"codes: {', '.join(codes)}"] if codes else [])),
        advice=advice,
    )
