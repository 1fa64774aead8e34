"""A cuda-compat libcuda is loaded before the driver's.

cuda-compat lets programs for a newer CUDA run on an older driver, on data-centre GPUs only. On others cuInit gives 804;
where the driver is as new as the compat library or newer, 803. Images bring it through LD_LIBRARY_PATH or ld.so.conf.d.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, env, libraries, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA


def check(box: Box) -> Iterator[Finding]:
    path = box.guest.get(libraries.LIBCUDA)
    code = access.code(box)
    values = box.guest.get(env.ENV) or {}
    folders = [folder for folder in values.get("LD_LIBRARY_PATH", "").split(":") if libraries.is_compat(folder + "/")]
    compat = path is not None and libraries.is_compat(path)
    if code not in (803, 804) or (path is not None and not compat) or not (compat or folders or code == 804):
        return
    evidence = access.symptom(box)
    if path is not None:
        evidence.append(f"loaded: {path}")
    if folders:
        evidence.append(f"LD_LIBRARY_PATH has {', '.join(folders)}")
    module = box.get_kernel(nvidia.MODULE_VERSION)
    version = libraries.version_of(path or "")
    if module:
        evidence.append(f"the kernel module is {module}" + (f", the compat library {version}" if version else ""))
    nvml = box.guest.get(nvidia.NVML)
    names = sorted({gpu.name for gpu in nvml.gpus if gpu.name}) if nvml is not None else []
    if names:
        evidence.append(f"GPUs: {', '.join(names)}")
    # 804 is said by a compat library alone; 803 also by a driver whose parts do not match
    sure = compat or code == 804
    why = "this GPU does not support it" if code == 804 else "the driver does not go with it"
    yield Finding(
        f"a cuda-compat libcuda is loaded, and {why}",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if sure else Certainty.LIKELY,
        tuple(evidence),
        separates="" if sure else "the libcuda that is mapped (/proc/PID/maps)",
        advice="remove the compat folder from LD_LIBRARY_PATH and /etc/ld.so.conf.d (then ldconfig), or put the "
        "driver's folder first (LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu); on GPUs that are not for data centres a "
        "newer CUDA needs a newer driver. Then restart the service",
    )
