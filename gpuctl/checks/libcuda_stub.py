"""The program loads CUDA's stub library instead of the driver's libcuda.

lib/stubs/libcuda.so of the CUDA toolkit is for linking on machines without a driver; every call in it answers 34. It
gets loaded when a stubs folder is in LD_LIBRARY_PATH, in an rpath or in ld.so.conf.d.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, env, libraries
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA


def check(box: Box) -> Iterator[Finding]:
    path = box.guest.get(libraries.LIBCUDA)
    code = access.code(box)
    stub = path is not None and libraries.is_stub(path)
    if code not in (34, None) or not (stub or code == 34):
        return
    values = box.guest.get(env.ENV) or {}
    folders = [folder for folder in values.get("LD_LIBRARY_PATH", "").split(":") if libraries.is_stub(folder + "/")]
    evidence = access.symptom(box)
    if path is not None:
        evidence.append(f"loaded: {path}")
    if folders:
        evidence.append(f"LD_LIBRARY_PATH has {', '.join(folders)}")
    yield Finding(
        "the stub libcuda is loaded, not the driver's",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if code == 34 else Certainty.LIKELY,
        tuple(evidence),
        ("the loaded file is not in a stubs folder",) if path is not None and not stub else (),
        "" if code == 34 else "cuInit: 34 proves it",
        advice="remove the stubs folder from LD_LIBRARY_PATH (or from /etc/ld.so.conf.d, then ldconfig), and restart",
    )
