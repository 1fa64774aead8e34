"""The driver's libraries here and the kernel module have different versions.

libcuda and libnvidia-ml talk to exactly one version of the kernel module: 570.124.04 and 570.124.06 do not go
together. A container has libraries of its own, so each update of the node's driver asks for one inside. NVML then says
"Driver/library version mismatch" (18), cuInit gives 803, or 999 and 100 with old versions. With the last digits of
libcuda alone different cuInit may succeed (measured, driver 580) while nvidia-smi and all that watches fail.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, kernel_log, libraries, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA


def check(box: Box) -> Iterator[Finding]:
    works = bool(access.works(box))
    module = box.get_kernel(nvidia.MODULE_VERSION)
    nvml = box.guest.get(nvidia.NVML)
    told = nvml is not None and nvml.rc == 18
    if works and not told:
        return
    lines = kernel_log.grep(box.get_kernel(kernel_log.LINES) or (), r"API mismatch|has the version|kernel module has")
    versions = box.guest.get(libraries.USERLAND) or ()
    if module is not None:
        loaded = versions[0] if versions else None
        if loaded is not None and loaded.number == module and not told:
            return  # what is really loaded goes with the module
        others = [version for version in versions if version.number != module]
        if not others and (not told or versions):
            return  # NVML says 18 also when it cannot ask the module at all (a sandbox), and what was seen agrees
    elif not told:
        return
    else:
        others = list(versions)
    evidence = access.symptom(box)
    if nvml is not None and nvml.text:
        evidence.append(nvml.text)
    if module is not None:
        evidence.append(f"the kernel module is {module}")
    evidence += [f"{version.number}: {version.source}" for version in others[:4]]
    evidence += lines[-3:]
    inside = access.in_container(box)
    here = "the container" if inside else box.guest.name
    there = f"{'in' if inside else 'on'} {here}"
    if others:
        summary = f"{here} has the driver's libraries in version {others[0].number}, the kernel module is "
        summary += module or "of another"
    elif module is not None:
        summary = f"{here} has the driver's libraries in another version than the kernel module, which is {module}"
    else:
        summary = f"the driver's libraries {there} and the kernel module are of different versions"
    proved = told or (access.code(box) == 803 and bool(others)) or bool(lines and others)
    version = module or "the version that /proc/driver/nvidia/version tells"
    yield Finding(
        summary,
        LAYER,
        Severity.WARNING if works else Severity.CRITICAL,
        Certainty.PROVED if proved else Certainty.LIKELY,
        tuple(evidence),
        separates="" if proved else "nvidia-smi: 'Driver/library version mismatch' proves it",
        advice=f"{there}: install the driver's libraries of exactly {version}\n"
        f"  NVIDIA-Linux-x86_64-{module or 'VERSION'}.run --no-kernel-modules   (or the distribution's package, "
        "pinned)\n"
        "then restart the service. Where the libraries are the newer ones on purpose: reboot into, or load, "
        "their module",
    )
