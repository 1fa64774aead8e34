"""A model is not where its server reads it, or not whole.

What lies in memory is gone after every restart; a copy that was broken off, was cut or has other bytes looks like a
model to everything but its manifest. A server given such a folder fails late, or serves nonsense.
"""

from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import serving
from gpuctl.finding import Finding, Layer, Remedy

LAYER = Layer.MODEL

SAID = {
    "absent": "is neither in its place nor at its source",
    "complete": "is not in memory",
    "metadata only": "is not in memory, and its source has no weights",
    "partial": "is not in memory, and its source is not whole",
    "stale": "is not the one of its source",
}


def check(box: Box) -> Iterator[Finding]:
    for model in box.guest.get(serving.MODELS, ()):
        if model.well or model.why:
            continue
        yield Finding(
            f"model {model.name} {SAID.get(model.state, f'is {model.state}')}: {model.path}",
            LAYER,
            evidence=model.missing[:8],
            remedy=Remedy("stage", {"model": model.name}) if model.in_memory else None,
            advice=f"gpuctl stage {model.name}" if model.in_memory else "bring its files there, or download it again",
        )
    for model in box.guest.get(serving.MODELS, ()):
        if model.why:
            raise Unknown(f"model {model.name}: {model.why}")
