"""The service may open too few files: CUDA runs out of file descriptors while it starts and says 999, 304 or 100.

cuInit opens a few files per GPU besides what the program has open already. A limit of a few dozen
(LimitNOFILE=, ulimit -n) is not enough. Which code comes depends on which file is one too many: with two GPUs and
limits from 4 to 17 it is 304, 999, 100 and 304 again.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, limits
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA
ENOUGH = 64  # measured: 16 is too few for one GPU; programs have a few dozen of their own
TOO_FEW = 24  # for cuInit itself, whatever else the program has open


def check(box: Box) -> Iterator[Finding]:
    limit = box.guest[limits.LIMITS].get("nofile")
    code = access.code(box)
    if limit is None or limit.value is None or limit.value >= ENOUGH or code not in (None, 3, 100, 304, 999):
        return
    if code == 100 and limit.value >= TOO_FEW:
        return  # no device: other causes are the likelier ones
    nodes_open = access.opened(box, "/dev/nvidia-uvm") in ("OK", None)
    yield Finding(
        f"only {limit.value} open files are allowed; CUDA needs more to start",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if limit.value <= 16 and code == 999 and nodes_open else Certainty.LIKELY,
        (*access.symptom(box), f"{limit.source}: at most {limit.value} open files"),
        separates="cuInit with a higher limit (ulimit -n 65536)",
        advice="LimitNOFILE=1048576 in the unit (or ulimit -n in the shell), then restart the service",
    )
