"""A virtual GPU (GRID) without a licence, or without what CUDA needs.

vGPU types for graphics have no CUDA, and an unlicensed vGPU is throttled and refuses CUDA after a while: 46 or 801.
"""

from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA


def check(box: Box) -> Iterator[Finding]:
    nvml = box.guest[nvidia.NVML]
    virtual = [gpu for gpu in nvml.gpus if gpu.name.startswith(("GRID ", "NVIDIA GRID")) or "vGPU" in gpu.name]
    if not virtual or access.code(box) not in (46, 801, 100):
        return
    evidence = [*access.symptom(box), *(f"GPU {gpu.index}: {gpu.name}" for gpu in virtual)]
    try:
        text = box.guest.output("nvidia-smi -q").stdout
    except Unknown:
        text = ""
    licence = [line.strip() for line in text.splitlines() if "License Status" in line]
    evidence += licence[:2]
    unlicensed = any("Unlicensed" in line for line in licence)
    yield Finding(
        f"the virtual GPU {virtual[0].name} refuses CUDA" + (": it is not licensed" if unlicensed else ""),
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if unlicensed else Certainty.LIKELY,
        tuple(evidence),
        separates="" if unlicensed else "nvidia-smi -q | grep -i licen",
        advice="give it a licence (ClientConfigToken, nvidia-gridd), or a vGPU type for compute (C series, Q series)",
    )
