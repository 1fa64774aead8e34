"""The device nodes belong to an id that the container's user map does not know, and their mode is not for everybody.

In an unprivileged container such nodes show as nobody:nogroup (65534). With mode 0660 nobody inside can open them, not
even its root.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box, Unknown
from gpuctl.facts import access, nodes
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    opens = box.guest[nodes.OPENS]
    table = access.guest_nodes(box)
    found = []
    for path in opens.by_path:
        node = table.find(path) if table is not None else None
        if node is None or "EACCES" not in opens.refused(path).values() or path.startswith("/dev/nvidia-caps"):
            continue
        if node.uid in ("65534", "nobody") and (node.mode or 0) & 0o006 != 0o006:
            found.append(node)
    if not found:
        return
    evidence = [*access.symptom(box), *(line for node in found for line in access.opening(box, node.path))]
    try:
        evidence.append(f"/proc/self/uid_map: {' '.join(box.guest.file('/proc/self/uid_map').split())}")
    except Unknown:
        pass
    names = access.listed(node.path for node in found)
    guest = access.conf(box) if box.guest is not box.node else None
    edit = remedies.for_good(box, guest) if guest is not None else None
    yield Finding(
        f"{names}: owned by an id the container does not map (nobody), and closed to others",
        LAYER, Severity.CRITICAL, Certainty.PROVED, tuple(evidence),
        remedy=remedies.container(edit, restarts="guest") if edit is not None else None,
        advice=remedies.advice(box, edit, restarts="guest") if edit is not None
        else "on the node: chmod 0666 of the nodes, or devN entries with mode=0666; then restart the container",
    )  # fmt: skip
