"""The device nodes lie on a mount with the flag nodev, where no device can be opened.

For example a directory with the nodes bound into the container from a file system mounted nodev, or a mount made in a
user namespace. open(2) gives EACCES even to root and in spite of mode 0666.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, nodes
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    opens = box.guest[nodes.OPENS]
    refused = [path for path in opens.by_path if "EACCES" in opens.refused(path).values()]
    if not refused:
        return
    hit = [(path, line) for path in refused if (line := nodes.nodev_mount(box.guest, path)) is not None]
    if not hit:
        return
    evidence = [*access.symptom(box), *(line for path, _ in hit for line in access.opening(box, path))]
    evidence += [f"/proc/self/mountinfo: {line}" for line in dict.fromkeys(line for _, line in hit)]
    guest = access.conf(box) if box.guest is not box.node else None
    edit = remedies.for_good(box, guest) if guest is not None else None
    yield Finding(
        f"{access.listed(path for path, _ in hit)}: on a mount with nodev, where no device opens",
        LAYER, Severity.CRITICAL, Certainty.PROVED, tuple(evidence),
        remedy=remedies.container(edit, restarts="guest") if edit is not None else None,
        advice=remedies.advice(box, edit, restarts="guest") if edit is not None
        else "pass the nodes with devN entries, or mount the directory without nodev; then restart the container",
    )  # fmt: skip
