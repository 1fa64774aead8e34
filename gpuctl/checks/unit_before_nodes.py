"""The service started before the device nodes were there, and gave up.

At boot it was earlier than what makes the nodes; started by hand later it works. It needs an order, or patience.
"""

from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, nodes, systemd
from gpuctl.facts.nodes import CTL, UVM
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.SERVER


def check(box: Box) -> Iterator[Finding]:
    name = box.wanted.unit or box.guest.mapping("service").get("unit")
    probe = box.guest.mapping("probe")
    if not name or "clock" not in probe or "monotonic" not in probe or not access.works(box):
        return
    try:
        unit = systemd.unit(box.guest, str(name))
    except Unknown:
        return
    if unit.get("ActiveState") not in ("failed", "inactive") or unit.get("Result") in ("success", None, ""):
        return
    stamp = unit.get("InactiveEnterTimestampMonotonic", "0")
    if not stamp.isdigit() or stamp == "0":
        return
    ended = float(probe["clock"]) - float(probe["monotonic"]) + int(stamp) / 1e6
    table = box.guest[nodes.NODES]
    made = [node.mtime for path in (CTL, UVM) if (node := table.find(path)) is not None and node.mtime is not None]
    if not made or max(made) <= ended:
        return
    after = f"{max(made) - ended:.0f} s after"
    yield Finding(
        f"{name} gave up before its device nodes were there",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED,
        (
            f"{name}: {unit.get('ActiveState')}, {unit.get('Result')}",
            f"the last of the nodes was made {after} that",
            *access.symptom(box),
        ),
        advice=f"systemctl restart {name}; so that it does not come back: Restart=on-failure with RestartSec= in "
        "the unit, and the "
        "nodes made before guests start (gpuctl doctor --fix)",
    )
