"""The program forked after it had started CUDA.

A forked child cannot use its parent's CUDA: 3, or PyTorch's "Cannot re-initialize CUDA in forked subprocess". A fresh
process starts CUDA without trouble. Servers must start their workers with spawn.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import cuda
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.SERVER


def check(box: Box) -> Iterator[Finding]:
    told = [
        line.strip()
        for line in cuda.messages(box.guest)
        if re.search(r"re-initialize CUDA in (a )?forked|forked subprocess", line)
    ]
    if not told:
        return
    yield Finding(
        "the program forks after it has started CUDA; the machine is not to blame",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED,
        tuple(told[:3]),
        advice="start workers with spawn: VLLM_WORKER_MULTIPROCESSING_METHOD=spawn, or "
        "multiprocessing.set_start_method('spawn') "
        "before anything touches CUDA",
    )
