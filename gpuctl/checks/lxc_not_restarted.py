"""The configuration allows the device, but the container was started before that and still refuses it.

Rules of /etc/pve/lxc/<vmid>.conf are read when the container starts. A reboot typed inside, or `pct reboot`, reads
them anew; restarting only the program does not. The rules in force are those of the running container's device program.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access
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
    since = access.edited_after_start(box, guest)
    older = since is not None and since < 0
    if older and guest.conf.lxc("lxc.include") and not converted:
        return  # it was read as it is: what takes the device away stands in the included file
    if since is not None and not older:
        evidence.append(f"the configuration was written {round(since)} s after the container's start")
    if converted:
        evidence.append(
            "/proc/self/uid_map inside is that of a privileged container, the configuration says unprivileged"
        )
    included = bool(guest.conf.lxc("lxc.include"))
    proved = converted or (since is not None and not older) or (program is not None and not older and not included)
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
        (f"the configuration was written {round(-since)} s before the container's start",) if since and older else (),
        "" if proved else "the device program of the running container, read on the node, and when each was written"
        if program is None else "it comes back after `pct reboot`: then an included file or a hook denies the device",
        remedy=remedies.container(edit, restarts=restarts), advice=text,
    )  # fmt: skip
