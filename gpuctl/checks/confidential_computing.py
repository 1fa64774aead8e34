"""Confidential computing is on, and the GPUs are not ready for it.

In a confidential VM the GPUs start only after attestation, when their ready state is set; until then programs find no
device or 802. The driver waits for GSP meanwhile.
"""

from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, kernel_log
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    if access.works(box):
        return
    said: list[str] = []
    for command in ("nvidia-smi conf-compute -f", "nvidia-smi conf-compute -grs", "nvidia-smi conf-compute -q"):
        try:
            said += [
                f"{command}: {line.strip()}" for line in box.guest.output(command).text.splitlines() if ":" in line
            ]
        except Unknown:
            continue
    on = any("CC status: ON" in line or ("CC State" in line and "ON" in line) for line in said)
    not_ready = any("not ready" in line.lower() or "not-ready" in line.lower() for line in said)
    log = kernel_log.grep(box.get_kernel(kernel_log.LINES) or (), r"confidential comput|_kgspBootGspRm.*CC|SPDM")
    if not (on or not_ready):
        return
    yield Finding(
        "confidential computing is on and the GPUs are not " + ("set ready" if not_ready else "usable"),
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if not_ready else Certainty.LIKELY,
        (*access.symptom(box), *said[:4], *log[-2:]),
        separates="" if not_ready else "nvidia-smi conf-compute -grs",
        advice="after attestation: nvidia-smi conf-compute -srs 1; or switch confidential computing off for these GPUs",
    )
