"""Where a snapshot was taken: on a machine, in a Proxmox guest, in a container within one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuctl.box import Fact, Snapshot, Unknown

# Containers that a runtime starts with the devices it is told to, inside a machine or a guest.
INNER = ("docker", "podman", "libpod", "kubepods", "containerd")


@dataclass(frozen=True)
class Place:
    """container: lxc, docker, podman ... or None on a machine. privileged: None where it is not known."""

    container: str | None
    privileged: bool | None
    pve_node: bool
    evidence: tuple[str, ...] = ()


def parse_uid_map(text: str) -> bool | None:
    """Does uid 0 here stand for uid 0 of the machine? None for a text that is no map."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    if not rows or any(len(row) != 3 or not all(word.isdigit() for word in row) for row in rows):
        return None
    return any(inside == "0" and outside == "0" for inside, outside, _ in rows)


# Inode numbers of the first namespaces (linux/proc_ns.h, PROC_PID_INIT_INO and PROC_CGROUP_INIT_INO).
_INITIAL = {"pid": "pid:[4026531836]", "cgroup": "cgroup:[4026531835]"}


def initial_namespaces(snapshot: Snapshot) -> bool:
    """Is this the machine itself? Containers have namespaces of their own."""
    own = snapshot.mapping("namespaces").get("self")
    return isinstance(own, dict) and all(own.get(name) == link for name, link in _INITIAL.items())


def _place(snapshot: Snapshot) -> Place:
    evidence = []
    container: str | None = None
    known = False
    virt = ""
    try:
        virt = snapshot.output("systemd-detect-virt").stdout.strip()
    except Unknown:
        pass
    for path, pattern in (
        ("/run/systemd/container", r"^([\w-]+)$"),
        ("/proc/1/environ", r"^container=(\S+)$"),
        ("/proc/1/cgroup", r"/(lxc|docker|kubepods|libpod)\b"),
        ("/proc/self/cgroup", r"/(docker|kubepods|libpod)\b"),
    ):
        try:
            text = snapshot.file(path)
        except Unknown:
            known = known or snapshot.file_error(path) == "ENOENT"
            continue
        known = True
        found = re.search(pattern, text, re.M)
        if found:
            container = container or found.group(1)
            evidence.append(f"{path}: {found.group(0).strip()}")
    if virt in ("lxc", "lxc-libvirt", "docker", "podman", "systemd-nspawn"):
        container = container or virt
        evidence.append(f"systemd-detect-virt: {virt}")
    role = snapshot.role
    initial = initial_namespaces(snapshot)
    if (container is not None or role == "guest") and initial:
        # an image may carry /run/systemd/container of the one who made it; an inventory may call anything a guest
        container, evidence = None, ["the initial PID and control group namespaces: no container, whatever says so"]
    elif container is None and role == "guest":
        container = "lxc"
        evidence.append("the snapshot says guest")
    privileged: bool | None = None
    try:
        text = snapshot.file("/proc/self/uid_map")
        privileged = parse_uid_map(text)
        if privileged is not None:
            evidence.append(f"/proc/self/uid_map: {' '.join(text.split())}")
    except Unknown:
        pass
    if snapshot.document.get("unprivileged") is not None:
        privileged = str(snapshot.document["unprivileged"]).lower() not in ("1", "yes", "true")
        evidence.append("the snapshot says " + ("privileged" if privileged else "unprivileged"))
    pve_node = role == "node" or (bool(snapshot.files("/etc/pve/lxc/")) and container is None)
    if container is None and not known and role is None and not pve_node:
        raise Unknown("container or machine: not in the snapshot")
    return Place(container, privileged, pve_node, tuple(evidence))


PLACE: Fact[Place] = Fact(
    (("file", "/run/systemd/container"), ("file", "/proc/1/environ"), ("file", "/proc/self/uid_map")), _place
)
