"""Several versions of libcuda are installed, or its name leads nowhere.

One from a package and one from NVIDIA's installer, or the remains of an update: which one a program gets depends on
folders and caches. A name that leads to a removed file loads nothing at all.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, libraries, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA


def check(box: Box) -> Iterator[Finding]:
    found = [library for library in box.guest[libraries.FOUND] if "/libcuda.so" in f"/{library.path}"]
    real = {library.real or "": library.version for library in found if library.version}
    real = {
        path: v for path, v in real.items() if path and not libraries.is_stub(path) and not libraries.is_compat(path)
    }
    versions = sorted({version for version in real.values() if version})
    nowhere = [library.path for library in found if library.real is None]
    if len(versions) < 2 and not nowhere:
        return
    module = box.get_kernel(nvidia.MODULE_VERSION)
    works = access.works(box)
    evidence = [*access.symptom(box), *(f"{path} ({version})" for path, version in sorted(real.items()))]
    evidence += [f"{path} leads nowhere" for path in nowhere]
    if module:
        evidence.append(f"the kernel module is {module}")
    yield Finding(
        f"libcuda is here in versions {', '.join(versions)}" if len(versions) > 1 else f"{nowhere[0]} leads nowhere",
        LAYER,
        Severity.INFO if works else Severity.WARNING,
        Certainty.PROVED,
        tuple(evidence),
        advice="remove the one that is not the kernel module's version (apt purge, or nvidia-uninstall for "
        "NVIDIA's installer), "
        "then ldconfig, and restart the service",
    )
