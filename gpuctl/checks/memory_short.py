"""Too little main memory is left for CUDA to start.

cuInit pins and maps memory of the machine for each GPU; with about a gigabyte a GPU or less left it answers 2 or 3, or
the kernel kills the process. In a container the limit is its `memory:`, on a machine what others left free.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, cuda, kernel_log, memory, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA
EACH_BYTES = 1 << 30  # measured by others: eight V100 do not start with 8 GB left (libnvidia-container#107)


def check(box: Box) -> Iterator[Finding]:
    views = box.guest[cuda.VIEWS]
    died = any(view.died for view in views.values())
    if access.works(box) or (access.code(box) not in (2, 3) and not died):
        return
    killed = kernel_log.grep(box.get_kernel(kernel_log.LINES) or (), r"out of memory: Killed process|oom-kill:")
    killed = killed[-2:] if died else []
    gpus = _gpus(box)
    try:
        left = box.guest[memory.LEFT]
    except Unknown:
        if not killed:
            raise
        left = None
    short = left is not None and left.value < EACH_BYTES * gpus
    if not short and not killed:
        return
    evidence = [*access.symptom(box), *killed]
    if left is not None:
        evidence.append(f"{left.value / 2**30:.1f} GiB are left ({left.source}), for {gpus} GPU{'s' * (gpus != 1)}")
    limited = left is not None and "memory.max" in left.source
    vmid = box.wanted.vmid or "VMID"
    yield Finding(
        "the kernel killed the process while CUDA started: out of memory"
        if killed
        else "too little memory is left for CUDA to start",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if killed else Certainty.LIKELY,
        tuple(evidence),
        separates="" if killed else "does cuInit succeed with more memory free?",
        advice=f"give the container more: pct set {vmid} -memory MIB on its node (takes effect at once)"
        if limited and access.in_container(box)
        else "free memory (ps -eo rss,pid,comm --sort=-rss | head; ls /dev/shm and other tmpfs), or add some",
    )


def _gpus(box: Box) -> int:
    nvml, known = box.guest.get(nvidia.NVML), box.get_kernel(nvidia.DRIVER_GPUS)
    listed = len(re.findall(r"(?m)^GPU \d+:", str(box.guest.mapping("commands").get("nvidia-smi -L", ""))))
    return max((nvml.count or 0) if nvml is not None else 0, len(known or ()), listed, 1)
