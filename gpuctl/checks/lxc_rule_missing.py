"""The container's configuration has no device rule for a device CUDA needs.

A privileged container may open only what a rule allows. The usual omission is nvidia-uvm: `c 195:* rwm` is enough for
nvidia-smi and not for CUDA. Exact rules such as `c 195:0` leave out other GPUs and nvidiactl (195:255).
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, proxmox
from gpuctl.facts.nodes import UVM
from gpuctl.finding import Finding, Layer

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    for guest in proxmox.confs_of_interest(box):
        if guest.conf.unprivileged or not (proxmox.has_gpu(guest.conf) or box.wanted.vmid == guest.vmid):
            continue
        missing = access.missing_in_conf(box, guest)
        if any(access.old_key_rules(guest, number) for number in missing):
            continue  # the rules are there, under the old key
        stale = bool(access.stale_rules(box, guest))
        missing = [n for n in missing if not access.elsewhere(guest, n) and not (stale and n.path == UVM)]
        if not missing:
            continue
        outlook = access.outlook(box, missing)
        shown = [m for m in access.next_start(box, guest).char_majors() if m not in (1, 4, 5, 10, 136)]
        allows = ", ".join(str(major) for major in shown) or "none of a GPU"
        edit = remedies.for_good(box, guest, access.stale_rules(box, guest))
        restarts = remedies.what_restarts(box, outlook)
        names = access.named(missing)
        yield Finding(
            f"{guest.label} has no device rule for {names}"
            if outlook.now
            else f"{guest.label} may open {names} until its next start: no rule in its configuration allows it",
            LAYER,
            outlook.severity,
            outlook.certainty,
            (*outlook.evidence, f"{guest.path or 'pct config'} allows majors: {allows}"),
            (),
            access.to_prove(outlook, missing[0].path),
            remedies.container(edit, restarts=restarts),
            remedies.advice(box, edit, restarts=restarts),
        )
