"""The container does not run, so nothing inside it can be asked.

It was stopped, or its start failed: a devN entry whose node is missing, a malformed rule, a hook. What Proxmox kept of
the last start is in /run/pve/ct-<vmid>.stderr, the task log and journalctl -u pve-container@<vmid>.
"""

from collections.abc import Iterator, Mapping

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, proxmox
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    asked = box.guest.present and box.guest is not box.node
    if asked or not box.node.present or box.wanted.vmid is None:
        return
    guests = box.node.section("guests")
    state = guests.get(str(box.wanted.vmid))
    if not isinstance(state, Mapping) or "cgroup" not in state or state.get("pid") or state.get("cgroup"):
        return
    guest = access.conf(box)
    vmid = box.wanted.vmid
    evidence = [f"{box.node.name} has no control group of container {vmid}", *proxmox.start_messages(box)[:8]]
    edit = remedies.Edit(guest, guest.conf) if guest is not None else None
    lock = guest.conf.get("lock") if guest is not None else None
    if lock is not None and guest is not None:
        evidence.insert(1, f"{guest.path or 'pct config'}: lock: {lock}")
        yield Finding(
            f"container {vmid} does not run, and is locked ({lock})",
            LAYER,
            Severity.CRITICAL,
            Certainty.PROVED,
            tuple(evidence),
            advice=f"on {box.node.name}, once no {lock} is running (pvesh get /cluster/tasks):\n"
            f"  pct unlock {vmid}\n  pct start {vmid}",
        )
        return
    yield Finding(
        f"container {vmid} does not run",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED,
        tuple(evidence),
        remedy=remedies.container(edit, restarts="guest") if edit is not None else None,
        advice=f"on {box.node.name}: pct start {vmid}; if it fails, journalctl -b -u pve-container@{vmid}",
    )
