"""The NVLink fabric is still being trained, or its training never ends.

NVML shows the state of each GPU's fabric: "in progress" right after a boot is normal for a minute; later it means that
the fabric manager or a link has trouble. cuInit gives 802 meanwhile.
"""

from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    nvml = box.guest[nvidia.NVML]
    waiting = [gpu for gpu in nvml.gpus if gpu.fabric in ("in progress", "not started")]
    failed = [gpu for gpu in nvml.gpus if gpu.fabric == "completed" and gpu.fabric_status]
    if not (waiting or failed) or access.works(box):
        return
    if waiting and access.code(box) not in (802, None):
        return
    host = box.node if box.node.present else box.guest
    uptime = None
    try:
        uptime = float(host.file("/proc/uptime").split()[0])
    except (Unknown, ValueError, IndexError):
        pass
    young = uptime is not None and uptime < 300
    evidence = [
        *access.symptom(box),
        *(f"GPU {g.index}: fabric {g.fabric}, status {g.fabric_status}" for g in waiting + failed),
    ]
    if uptime is not None:
        evidence.append(f"{host.name} is up for {uptime / 60:.0f} min")
    yield Finding(
        "the NVLink fabric is not ready" + (" yet" if young else ""),
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if access.code(box) == 802 else Certainty.LIKELY,
        tuple(evidence),
        separates="" if access.code(box) == 802 else "cuInit: 802",
        advice="wait a minute and ask again; if it stays: journalctl -u nvidia-fabricmanager, nvidia-smi nvlink "
        "-s, then reboot",
    )
