"""libcuda.so.1 does not load: it is not installed where the program runs, or the file is broken.

The driver's libraries belong to user space: a container needs them itself, in exactly the version of the node's kernel
module. Debian calls the package libcuda1, Ubuntu libnvidia-compute-NNN; NVIDIA's installer has --no-kernel-modules.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, cuda, libraries, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA
_NO_NVML = r"libnvidia-ml(?:\.so(?:\.1)?)?\b.*(?:cannot open shared|not found)|couldn't find libnvidia-ml"


def check(box: Box) -> Iterator[Finding]:
    for said in told(box):
        if said is None or said == "OK":
            continue
        module = box.get_kernel(nvidia.MODULE_VERSION)
        if module is None and not driver_here(box):
            return  # no driver at all is another cause
        broken = re.search(r"too short|ELF|file format|undefined symbol|version .* not found", said)
        here = [
            library for library in box.guest.get(libraries.FOUND) or () if library.real and "libcuda" in library.path
        ]
        fits = [library for library in here if module is not None and library.version == module]
        if (
            fits
            and not broken
            and box.guest.command_error("ldconfig -p") is None
            and "ldconfig -p" in box.guest.mapping("commands")
        ):
            return  # the loader's cache is to blame, which has a check of its own
        evidence = [said]
        found = [library for library in box.guest.get(libraries.FOUND) or () if "libcuda" in library.path]
        evidence += [f"found: {library.path} -> {library.real or 'nowhere'}" for library in found[:6]]
        if box.guest.get(libraries.FOUND) is not None and not found:
            evidence.append("no libcuda in the usual folders")
        if module:
            evidence.append(f"the kernel module is {module}")
        if broken:
            text = "remove or replace the broken file (see which folder comes first in LD_LIBRARY_PATH); then ldconfig"
        else:
            text = (
                f"install the driver's libraries of exactly version {module or '(see /proc/driver/nvidia/version)'}: "
                f"NVIDIA-Linux-x86_64-{module or 'VERSION'}.run --no-kernel-modules, or the distribution's package "
                f"pinned to it (Debian libcuda1, Ubuntu libnvidia-compute-{(module or 'NNN').split('.')[0]}); then "
                "ldconfig, and restart the service"
            )
        yield Finding(
            "libcuda.so.1 is broken" if broken else "libcuda.so.1 is not installed here",
            LAYER,
            Severity.CRITICAL,
            Certainty.PROVED,
            tuple(evidence),
            advice=text,
        )
        return


def driver_here(box: Box) -> bool:
    """Is there any sign of an NVIDIA driver: a module, a node?"""
    if box.get_kernel(nvidia.MODULE_LOADED):
        return True
    table = access.guest_nodes(box)
    return any(node.exists and "nvidia" in path for path, node in (table or {}).items())


def ended(rc: object) -> str:
    """How a child ended, in words: SIGBUS, or its status."""
    if isinstance(rc, int) and rc < 0:
        names = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV"}
        return names.get(-rc, f"signal {-rc}")
    return f"exit status {rc}"


def told(box: Box) -> list[str | None]:
    """What loading libcuda gave everyone; else the words of a program, which asks NVML first. Raises Unknown."""
    views = list((box.guest.get(cuda.VIEWS) or {}).values())
    lines = [line.strip() for line in cuda.messages(box.guest) if re.search(_NO_NVML, line, re.I)]
    if not views and lines:
        return [lines[0]]
    return [
        f"whoever loads libcuda.so.1 dies ({ended(view.died.get('rc'))}): its ELF file is cut off or damaged"
        if view.dlopen is None and view.died is not None and not view.died.get("doing")
        else view.dlopen
        for view in box.guest[cuda.VIEWS].values()
    ]
