"""The device nodes lie on a mount with the flag nodev, where no device can be opened.

For example a directory with the nodes bound into the container from a file system mounted nodev, or a mount made in a
user namespace. open(2) gives EACCES even to root and in spite of mode 0666.
"""

from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, nodes
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    opens = box.guest[nodes.OPENS]
    refused = [path for path in opens.by_path if "EACCES" in opens.refused(path).values()]
    if not refused:
        return
    try:
        mounts = nodes.parse_mounts(box.guest.file("/proc/self/mountinfo"))
    except Unknown:
        mounts = []
    hit = []
    for path in refused:
        mount = max((m for m in mounts if path == m[0] or path.startswith(m[0].rstrip("/") + "/")),
                    key=lambda m: len(m[0]), default=None)  # fmt: skip
        if mount is not None and "nodev" in mount[1]:
            hit.append((path, mount))
    if not hit:
        return
    evidence = [*access.symptom(box), *(line for path, _ in hit for line in access.opening(box, path))]
    evidence += [f"/proc/self/mountinfo: {line}" for line in dict.fromkeys(mount[2] for _, mount in hit)]
    yield Finding(
        f"{', '.join(path for path, _ in hit)}: on a mount with nodev, where no device opens",
        LAYER, Severity.CRITICAL, Certainty.PROVED, tuple(evidence),
        advice="pass the nodes with devN entries, or mount the directory without nodev; then restart the container",
    )  # fmt: skip
