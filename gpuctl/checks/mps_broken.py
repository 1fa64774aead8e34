"""The program is to use NVIDIA's multi-process service (MPS), and its daemon is not there or does not match.

With CUDA_MPS_PIPE_DIRECTORY set, or a daemon's pipe in /tmp/nvidia-mps, CUDA connects to the MPS control daemon; 805 to
809 are its refusals: not reachable, another version, not ready, full.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, cuda, env
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA


def check(box: Box) -> Iterator[Finding]:
    code = access.code(box)
    if code is None or not 805 <= code <= 809:
        return
    values = box.guest.get(env.ENV) or {}
    pipes = values.get("CUDA_MPS_PIPE_DIRECTORY")
    told = [view.told for view in (box.guest.get(cuda.VIEWS) or {}).values() if view.told]
    evidence = [*access.symptom(box), *told]
    if pipes:
        evidence.append(f"CUDA_MPS_PIPE_DIRECTORY={pipes}")
    full = code in (808, 809)
    yield Finding(
        "MPS has no room for another client" if full else "MPS is asked for and does not answer as it should",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED,
        tuple(evidence),
        advice="start fewer clients, or raise the limit of MPS"
        if full
        else "restart the daemon (echo quit | nvidia-cuda-mps-control; nvidia-cuda-mps-control -d) with the "
        "driver's own version "
        "and as the same user, or unset CUDA_MPS_PIPE_DIRECTORY and remove /tmp/nvidia-mps; then restart the service",
    )
