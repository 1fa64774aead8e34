"""The loader's cache names other driver libraries than there are on the disk.

Container runtimes put the driver's libraries in when a container starts and run ldconfig for it; with a wrong path to
ldconfig, or in a container kept over a driver update, the cache stays behind.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, libraries, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA


def check(box: Box) -> Iterator[Finding]:
    if access.works(box):
        return
    try:
        cache = box.guest.output("ldconfig -p").stdout
    except Unknown:
        return
    cached = set(re.findall(r"libcuda\.so\S* .*=> (\S+)", cache))
    on_disk = {path for path, answer in box.guest.mapping("libraries").items()
               if isinstance(answer, dict) and "/libcuda.so" in path and "error" not in answer}  # fmt: skip
    if not on_disk:
        return
    module = box.get_kernel(nvidia.MODULE_VERSION)
    gone = sorted(path for path in cached if path.rpartition("/")[0] in {p.rpartition("/")[0] for p in on_disk} - {""}
                  and path not in on_disk)  # fmt: skip
    fitting = sorted(p for p in on_disk if module and libraries.version_of(p) == module)
    unknown_to_it = [path for path in fitting if path.rpartition("/")[0] not in {p.rpartition("/")[0] for p in cached}]
    view_fails = access.code(box) is not None or box.guest.get(libraries.LIBCUDA) is None
    if not (gone or (unknown_to_it and not cached)) or not view_fails:
        return
    evidence = [*access.symptom(box), *(f"ldconfig -p names {path}, which is not there" for path in gone[:3])]
    evidence += [f"{path} is there, the cache does not know it" for path in unknown_to_it[:2]]
    yield Finding(
        "the loader's cache does not know the driver's libraries as they are",
        LAYER,
        Severity.CRITICAL,
        Certainty.LIKELY,
        tuple(evidence),
        separates="does ldconfig, run inside, cure it?",
        advice='run ldconfig inside; for NVIDIA\'s container runtime: ldconfig = "/sbin/ldconfig" in '
        "/etc/nvidia-container-runtime/config.toml where the @ in front is wrong for the image; recreate the container",
    )
