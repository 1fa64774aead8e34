"""A server runs and does not answer that it can generate.

While it loads its model that is how it should be, for as long as it may take to start; after that it hangs. A process
that runs is not a server that serves.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import serving
from gpuctl.finding import Certainty, Finding, Layer, Remedy

LAYER = Layer.SERVER


def check(box: Box) -> Iterator[Finding]:
    for unit in box.guest.get(serving.SERVERS, ()):
        if not unit.runs or unit.answers:
            continue
        waits = unit.starting
        time = f" for {unit.since_s:.0f} s" if unit.since_s is not None else ""
        yield Finding(
            f"{unit.name} is still starting" if waits else f"{unit.name} runs and does not answer",
            LAYER,
            certainty=Certainty.PROVED if waits else Certainty.LIKELY,
            evidence=(f"its health answers {unit.health}; it is {unit.active}{time}",),
            remedy=Remedy("server", {"unit": unit.name, "wait": True} if waits else {"unit": unit.name, "anew": True}),
            advice=f"in the guest: journalctl -u {unit.name}" + ("" if waits else f"; systemctl restart {unit.name}"),
        )
