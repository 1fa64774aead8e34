"""The GPU's compute mode lets only one process use it, or none.

Exclusive Process gives the GPU to the first process; every other one gets 46 ("busy or unavailable"). Prohibited keeps
all out.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.TUNING
_NAMES = {1: "Exclusive Thread", 2: "Prohibited", 3: "Exclusive Process"}


def check(box: Box) -> Iterator[Finding]:
    nvml = box.guest.get(nvidia.NVML) or box.node[nvidia.NVML]
    odd = [gpu for gpu in nvml.gpus if gpu.compute_mode in _NAMES]
    if not odd:
        return
    code = access.code(box)
    evidence = access.symptom(box)
    for gpu in odd:
        holders = ", ".join(f"pid {process.get('pid')}" for process in gpu.processes or ())
        held = f", held by {holders}" if holders else ""
        evidence.append(f"GPU {gpu.index}: compute mode {_NAMES[gpu.compute_mode or 0]}{held}")
    broken = code == 46 or (code in (100, 101) and any(gpu.compute_mode == 2 for gpu in odd))
    host = box.node if box.node.present else box.guest
    modes: dict[str, list[str]] = {}
    for gpu in odd:
        modes.setdefault(_NAMES[gpu.compute_mode or 0], []).append(str(gpu.index))
    yield Finding(
        "compute mode " + "; ".join(f"{mode} on GPU {', '.join(gpus)}" for mode, gpus in modes.items()),
        Layer.CUDA if broken else LAYER,
        Severity.CRITICAL if broken else Severity.WARNING,
        Certainty.PROVED,
        tuple(evidence),
        advice=f"on {host.name}: nvidia-smi -c DEFAULT",
    )
