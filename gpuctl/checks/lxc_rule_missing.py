"""The container's configuration has no device rule for a device CUDA needs.

A privileged container may open only what a rule allows. The usual omission is nvidia-uvm: `c 195:* rwm` is enough for
nvidia-smi and not for CUDA. Exact rules such as `c 195:0` leave out other GPUs and nvidiactl (195:255).
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, proxmox
from gpuctl.facts.nodes import UVM
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    for guest in proxmox.confs_of_interest(box):
        if guest.conf.unprivileged or not (proxmox.has_gpu(guest.conf) or box.wanted.vmid == guest.vmid):
            continue
        missing = [
            number
            for number in access.missing_in_conf(box, guest)
            if not access.old_key_rules(guest, number) and not access.elsewhere(guest, number)
        ]
        if access.stale_rules(box, guest):
            missing = [number for number in missing if number.path != UVM]
        if missing:
            yield finding(box, guest, missing)


def finding(box: Box, guest: proxmox.GuestConf, missing: list[access.Number]) -> Finding:
    refusals = {refusal.number.path: refusal for refusal in access.refused(box)}
    hit = [refusals[number.path] for number in missing if number.path in refusals]
    rules = access.in_force(box)
    open_now = [
        n for n in missing if access.opened(box, n.path) == "OK" or (rules and rules.allows("c", n.major, n.minor))
    ]
    names = ", ".join(str(number) for number in missing)
    evidence = access.seen(box, hit)
    majors = access.next_start(box, guest).char_majors()
    shown = ", ".join(str(m) for m in majors if m not in (1, 4, 5, 10, 136)) or "none of a GPU"
    evidence.append(f"{guest.path or 'pct config'} allows majors: {shown}")
    against: list[str] = []
    edit = remedies.for_good(box, guest)
    if len(open_now) == len(missing):
        return Finding(
            f"{guest.label} may open {names} only until its next start: no rule in its configuration allows it",
            LAYER, Severity.WARNING, Certainty.PROVED, tuple(evidence),
            remedy=remedies.container(edit, restarts=None), advice=remedies.advice(box, edit, restarts=None),
        )  # fmt: skip
    restarts = remedies.what_restarts(box)
    if access.works(box) and not hit:
        against.append("CUDA starts nevertheless")
    proved = bool(hit)
    return Finding(
        f"{guest.label} has no device rule for {names}",
        LAYER, Severity.CRITICAL, Certainty.PROVED if proved else Certainty.LIKELY, tuple(evidence), tuple(against),
        "" if proved else f'open("{missing[0].path}") inside the guest as root: EPERM proves it',
        remedies.container(edit, restarts=restarts), remedies.advice(box, edit, restarts=restarts),
    )  # fmt: skip
