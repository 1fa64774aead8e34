"""MIG is on, and this guest has no instance it may use.

With MIG enabled a GPU is usable only through instances: they must be created, and a container needs the nodes
/dev/nvidia-caps/nvidia-capN of its instance and the right to open them. Without, CUDA finds no device (100) or says
busy (46).
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, devices, nodes, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    nvml = box.guest.get(nvidia.NVML) or box.node.get(nvidia.NVML)
    if nvml is None or not nvml.gpus or access.works(box) or access.code(box) not in (None, 46, 100, 101, 3):
        return
    enabled = [gpu for gpu in nvml.gpus if gpu.mig]
    if not enabled or len(enabled) < len(nvml.gpus):
        return
    listed = any(gpu.uuid for gpu in nvml.gpus)
    without = [gpu for gpu in enabled if not gpu.mig_devices]
    files = {path for s in box.snapshots for path in s.files("/proc/driver/nvidia/capabilities/gpu", "/access")}
    evidence = [
        *access.symptom(box),
        *(f"GPU {gpu.index}: MIG is enabled, {gpu.mig_devices} MIG devices listed" for gpu in enabled),
    ]
    opens = box.guest.get(nodes.OPENS)
    caps = [path for path in (opens.by_path if opens is not None else {}) if path.startswith("/dev/nvidia-caps/")]
    denied = [path for path in caps if opens is not None and "EPERM" in opens.refused(path).values()]
    major = (box.get_kernel(devices.MAJORS) or devices.Majors({}, {})).of("nvidia-caps")
    if denied:
        evidence += [line for path in denied for line in access.opening(box, path)]
        summary, proved = f"MIG is on, and the guest may not open {access.listed(denied)}", True
        advice = (
            "pass the instance's nodes: devN: /dev/nvidia-caps/nvidia-capN,mode=0666 in the container's configuration, "
            f"or a rule for nvidia-caps (c {major}:* rwm); restart the container"
        )
    elif without and not files and listed:
        summary, proved = "MIG is on, and no instance was created", access.code(box) is not None
        advice = "on the machine with the GPUs: nvidia-smi mig -cgi <profile> -C, or nvidia-smi -mig 0 and a GPU reset"
    else:
        summary, proved = "MIG is on, and the guest sees none of its instances", False
        advice = (
            "pass /dev/nvidia-caps/nvidia-capN of the instance (devN entries, their numbers are in "
            "/proc/driver/nvidia-caps/mig-minors), restart the container"
        )
    yield Finding(
        summary,
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if proved else Certainty.LIKELY,
        tuple(evidence),
        separates="" if proved else "nvidia-smi -L on the node and in the guest: which MIG devices each shows",
        advice=advice,
    )
