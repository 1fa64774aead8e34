"""A container within the guest got no GPU: NVIDIA_VISIBLE_DEVICES is void or none, or the runtime was not asked.

Docker and its like bring in the device nodes only with --gpus, --runtime nvidia or CDI, and for the GPUs that
NVIDIA_VISIBLE_DEVICES names.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, env, place
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    where = box.guest.get(place.PLACE)
    values = box.guest.get(env.ENV) or {}
    value = values.get("NVIDIA_VISIBLE_DEVICES")
    inner = access.inner(box)
    table = access.guest_nodes(box)
    empty = table is not None and (table.whole or bool(len(table))) and not any(node.exists for node in table.values())
    off = value is not None and value.strip().lower() in ("", "void", "none")
    if access.works(box) or not ((off and (inner or empty)) or (inner and empty and value is None)):
        return
    evidence = access.symptom(box)
    if value is not None:
        evidence.append(f"NVIDIA_VISIBLE_DEVICES={value!r}")
    if empty:
        evidence.append("no NVIDIA device node in the container")
    if inner and where is not None:
        evidence += list(where.evidence)[:1]
    yield Finding(
        "the container was started without GPUs",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if empty else Certainty.LIKELY,
        tuple(evidence),
        separates="" if empty else "ls -l /dev/nvidia* inside",
        advice="recreate it with --gpus all (docker), --device nvidia.com/gpu=all (CDI, podman), or "
        "NVIDIA_VISIBLE_DEVICES=all "
        "and the nvidia runtime",
    )
