"""Settings that gpuctl keeps over reboots are not set since this one.

`gpuctl tune` leaves a unit that sets them before the guests start. Where it failed or never ran, clocks, power limits
and the kernel's settings are what the machine booted with: everything works, and numbers measured now are not those
from before.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import systemd
from gpuctl.finding import Finding, Layer, Remedy, Severity

LAYER = Layer.TUNING
UNIT = "gpuctl-tune.service"


def check(box: Box) -> Iterator[Finding]:
    machine, on = (box.node, "node") if box.node.present else (box.guest, "guest")
    unit = machine.get(systemd.UNITS, {}).get(UNIT)
    if unit is None or unit.get("UnitFileState") != "enabled" or unit.get("ActiveState") in ("active", "activating"):
        return
    state = f"{unit.get('ActiveState')}, result {unit.get('Result') or 'not known'}"
    yield Finding(
        f"the settings kept on {machine.name} are not set since its boot",
        LAYER,
        Severity.WARNING,
        evidence=(f"{UNIT} is enabled and {state}",),
        remedy=Remedy("tune", {"kept": True}, on=on),
        advice=f"on {machine.name}: journalctl -b -u gpuctl-tune; gpuctl tune sets and reads back",
    )
