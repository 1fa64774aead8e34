"""A device rule of the container is malformed, and LXC does not read it.

LXC reads the type, exactly one blank, `major:minor`, one blank, and the first three access letters: `c 511:*rwm`,
`c 511 rwm` and `c  511:* rwm` are refused, as is a remark after fewer than three letters (`rw # note`). Depending on
its version LXC then starts the container without its device rules, or not at all; only its own log says so.
"""

import re
from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, lxc, proxmox
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    for guest in proxmox.confs_of_interest(box):
        bad = lxc.malformed_rules(guest.conf)
        if not bad:
            continue
        evidence = [f"{guest.where(line)}  <- {problem}" for line, problem in bad]
        said = [line for line in proxmox.start_messages(box) if re.search(r"devices\.(allow|deny)|EINVAL", line)]
        evidence += said
        running = bool(access.works(box))
        conf = guest.conf
        for line, _ in bad:
            mended = mend(line.value)
            if mended is not None:
                conf = conf.replaced(line.number, f"{line.key}: {mended}")
        edit = remedies.Edit(guest, conf)
        restarts = "guest"
        yield Finding(
            f"{guest.label}: a malformed device rule, which LXC does not read",
            LAYER,
            Severity.WARNING if running else Severity.CRITICAL,
            Certainty.PROVED,
            tuple(evidence),
            remedy=remedies.container(edit, restarts=restarts) if edit.changes_file else None,
            advice=remedies.advice(box, edit, restarts=restarts),
        )


def mend(value: str) -> str | None:
    """The rule that was meant; None where that cannot be told."""
    found = re.match(r"\s*([abc])\s*(\d+|\*)\s*(?:[:,]\s*(\d+|\*))?\s*([rwm]{1,3})\b", value)
    if not found:
        return None
    kind, major, minor, access_letters = found.groups()
    return f"{kind} {major}:{minor or '*'} {access_letters}"
