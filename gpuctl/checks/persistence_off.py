"""Persistence mode is off: the driver forgets the GPUs whenever nobody uses them.

Each first use then initialises the GPU anew, which takes seconds per card and can outlast a program's patience; clocks
and power limits that were set are lost in between.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, cuda, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.TUNING
SLOW_MS = 5000


def check(box: Box) -> Iterator[Finding]:
    nvml = box.guest.get(nvidia.NVML) or box.node[nvidia.NVML]
    off = [gpu for gpu in nvml.gpus if gpu.persistence is False]
    if not off:
        return
    views = list((box.guest.get(cuda.VIEWS) or {}).values())
    slow = max((view.init_ms or 0 for view in views), default=0)
    hangs = any(view.hang for view in views)
    evidence = [*access.symptom(box), f"persistence mode is off on GPU {', '.join(str(gpu.index) for gpu in off)}"]
    if slow:
        evidence.append(f"cuInit took {slow / 1000:.1f} s")
    host = box.node if box.node.present else box.guest
    yield Finding(
        "persistence mode is off" + (f"; cuInit took {slow / 1000:.0f} s" if slow > SLOW_MS else ""),
        LAYER,
        Severity.WARNING if slow > SLOW_MS or hangs else Severity.INFO,
        Certainty.PROVED,
        tuple(evidence),
        advice=f"on {host.name}: systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1, until the next boot)",
    )
