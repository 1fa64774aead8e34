"""The configuration allows the device, but the container was started before that and still refuses it.

Rules of /etc/pve/lxc/<vmid>.conf are read when the container starts. A reboot typed inside, or `pct reboot`, reads
them anew; restarting only the program does not. The rules in force are those of the running container's device program.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, boot
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    guest = access.conf(box)
    if guest is None or not access.in_container(box):
        return
    rules = access.next_start(box, guest)
    late = [r for r in access.refused(box) if rules.allows("c", r.number.major, r.number.minor)]
    converted = access.started_privileged(box)
    if not late or (guest.conf.unprivileged and not converted):
        return
    program = access.in_force(box)
    evidence = access.seen(box, late)
    for refusal in late:
        _, line = rules.decide("c", refusal.number.major, refusal.number.minor)
        if line is not None:
            evidence.append(f"{guest.where(line)}  <- allows {refusal.number}")
    since = edited_since_start(box, guest.vmid, guest.mtime)
    if since is not None:
        evidence.append(since)
    if converted:
        evidence.append(
            "/proc/self/uid_map inside is that of a privileged container, the configuration says unprivileged"
        )
    proved = program is not None or since is not None or converted
    suffices = remedies.live_suffices(box)
    edit = remedies.Edit(guest, guest.conf, remedies.live_rules(box))
    restarts = "service" if suffices else "guest"
    names = access.named([refusal.number for refusal in late])
    text = remedies.advice(box, edit, restarts=restarts)
    if suffices:
        text += f"\nor, on {box.node.name}: pct reboot {guest.vmid}"
    yield Finding(
        f"{guest.label} was started before its configuration allowed {names}",
        LAYER, Severity.CRITICAL, Certainty.PROVED if proved else Certainty.LIKELY, tuple(evidence),
        separates="" if proved else "the device program of the running container, read on the node",
        remedy=remedies.container(edit, restarts=restarts), advice=text,
    )  # fmt: skip


def edited_since_start(box: Box, vmid: int, mtime: float | None) -> str | None:
    """The configuration is younger than the container's start, as a line; None where that is not known or not so."""
    ticks = (box.node.get(boot.GUEST_START_TICKS) or {}).get(vmid)
    probe = box.node.mapping("probe")
    if ticks is None or mtime is None or "clock" not in probe or "monotonic" not in probe:
        return None
    started = float(probe["clock"]) - float(probe["monotonic"]) + ticks / float(probe.get("ticks_per_s", 100))
    if mtime <= started + 1:
        return None
    return f"the configuration was written {round(mtime - started)} s after the container's start"
