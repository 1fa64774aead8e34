"""Inside a MIG instance NVML refuses questions about the whole GPU, and a program gives up over it.

A guest that owns one instance may not ask for the parent GPU's memory, clocks or processes (4, insufficient
permissions). CUDA works; a framework that insists on these answers aborts all the same. Nothing is wrong with the box.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, cuda, env, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.SERVER


def check(box: Box) -> Iterator[Finding]:
    if not access.works(box):
        return
    nvml = box.guest.get(nvidia.NVML)
    values = box.guest.get(env.ENV) or {}
    mig = (nvml is not None and any(gpu.mig for gpu in nvml.gpus)) or "MIG-" in values.get("CUDA_VISIBLE_DEVICES", "")
    told = [
        line.strip()
        for line in cuda.messages(box.guest)
        if re.search(r"nvml|nvidia-smi|pynvml", line, re.I)
        and re.search(r"insufficient permissions|not permitted|no permission", line, re.I)
    ]
    refused = nvml is not None and any(gpu.error == 4 for gpu in nvml.gpus)
    if not mig or not (told or refused):
        return
    evidence = [*access.symptom(box), *told[:2]]
    if refused:
        evidence.append("NVML refuses questions about the whole GPU here (4, insufficient permissions)")
    yield Finding(
        "a program asks NVML for the whole GPU and owns only an instance of it (MIG)",
        LAYER,
        Severity.WARNING if told else Severity.INFO,
        Certainty.LIKELY,
        tuple(evidence),
        separates="does a program that asks CUDA alone run here?",
        advice="it is the program's matter: name the instance (CUDA_VISIBLE_DEVICES=MIG-...) and switch its NVML "
        "queries off, or give the guest a whole GPU",
    )
