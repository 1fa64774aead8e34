"""A server that this box is to run does not run.

After a reboot a unit may be inactive without having failed: a condition was not met, what it requires failed, or it was
never enabled. One that failed three times in half an hour is not tried again by systemd and leaves a note of it.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import serving
from gpuctl.finding import Finding, Layer, Remedy

LAYER = Layer.SERVER


def check(box: Box) -> Iterator[Finding]:
    for unit in box.guest.get(serving.SERVERS, ()):
        if unit.runs:
            continue
        again = " (it failed, and systemd will try again)" if unit.sub == "auto-restart" else ""
        evidence = [f"{unit.name}: {unit.active}{f', result {unit.result}' if unit.result else ''}{again}"]
        evidence += [f"it left a note at boot: {unit.note}"] if unit.note else []
        yield Finding(
            f"{unit.name} does not run",
            LAYER,
            evidence=tuple(evidence),
            remedy=Remedy("server", {"unit": unit.name, "anew": True} if again else {"unit": unit.name}),
            advice=f"in the guest: systemctl start {unit.name}; journalctl -u {unit.name} says why it ended",
        )
