"""The identity of a start: which boot of the machine, which start of the container, and what happened between two.

A container gets a boot_id of its own at each start (LXC with autodev, best effort) or shows the machine's;
/proc/1/stat field 22 is the start of PID 1 in ticks since the machine's boot. Together they tell a reboot of the node
from a restart of the guest. Not used, since they lie in containers: btime and uptime (the machine's, or lxcfs's),
inodes of namespaces (used again at the next start).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpuctl.box import Fact, Snapshot, Unknown


@dataclass(frozen=True)
class Boot:
    boot_id: str
    pid1_start_ticks: int | None


def parse_start_ticks(stat: str) -> int | None:
    """Field 22 of /proc/PID/stat; the name in parentheses may hold blanks and parentheses."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else None


def _kernel_release(snapshot: Snapshot) -> str:
    try:
        return snapshot.file("/proc/sys/kernel/osrelease").strip()
    except Unknown:
        text = snapshot.output("uname -r", "uname -a").stdout.strip()
        found = re.search(r"\d+\.\d+\.\d\S*", text)
        if not found:
            raise
        return found.group(0)


KERNEL_RELEASE: Fact[str] = Fact((("file", "/proc/sys/kernel/osrelease"), ("command", "uname -r")), _kernel_release)


def _guest_start_ticks(snapshot: Snapshot) -> dict[int, int]:
    found = {}
    for vmid, guest in snapshot.mapping("guests").items():
        ticks = parse_start_ticks(str(guest.get("stat", ""))) if isinstance(guest, dict) else None
        if str(vmid).isdigit() and ticks is not None:
            found[int(vmid)] = ticks
    return found


# On a node: when PID 1 of each running guest started, vmid -> ticks since the node's boot.
GUEST_START_TICKS: Fact[dict[int, int]] = Fact((("section", "guests"),), _guest_start_ticks)


@dataclass(frozen=True)
class BoxBoot:
    """Which start of a box it is, as far as it was read: the boot of its node, the start of its guest.

    A machine that is none's guest has no node. `container`: the guest is one of LXC or nspawn, so that its boot_id may
    be its own (other kinds show the kernel's).
    """

    guest: Boot | None
    node: Boot | None = None
    container: bool = True

    def as_json(self) -> dict[str, Any]:
        """As it is stored with each event of a run."""
        return {
            "guest": self.guest.boot_id if self.guest else None,
            "pid1_start_ticks": self.guest.pid1_start_ticks if self.guest else None,
            "node": self.node.boot_id if self.node else None,
            "container": self.container,
        }


def from_json(value: Any) -> BoxBoot | None:
    """What `BoxBoot.as_json` gave; None for anything else."""
    if not isinstance(value, Mapping):
        return None
    guest, node, ticks = value.get("guest"), value.get("node"), value.get("pid1_start_ticks")
    return BoxBoot(
        Boot(guest, ticks if isinstance(ticks, int) else None) if isinstance(guest, str) else None,
        Boot(node, None) if isinstance(node, str) else None,
        value.get("container") is not False,
    )


# What a machine is asked for its identity, and `parse_identity` reads: boot_id, /proc/1/stat, which kind of container
# it is, and whether its systemd is on the way up or down.
IDENTITY = (
    "cat /proc/sys/kernel/random/boot_id; head -n1 /proc/1/stat; "
    "echo $(cat /run/systemd/container 2>/dev/null); "
    "[ ! -d /run/systemd/system ] || systemctl is-system-running 2>/dev/null; exit 0"
)


def parse_identity(text: str) -> tuple[Boot, bool, str]:
    """(boot, may its boot_id be its own, state of its systemd or "") of what IDENTITY says. Raises ValueError."""
    lines = [line.strip() for line in text.splitlines()]
    if len(lines) < 3 or not re.fullmatch(r"[0-9a-f-]{32,36}", lines[0]):
        raise ValueError(f"no boot_id: {text[:80]!r}")
    return (
        Boot(lines[0], parse_start_ticks(lines[1])),
        lines[2] in ("lxc", "systemd-nspawn"),
        lines[3] if len(lines) > 3 else "",
    )


class Happened(StrEnum):
    """What became of a box between two moments."""

    NODE_REBOOT = "node_reboot"
    GUEST_RESTART = "guest_restart"
    RESTART = "restart"  # one of these two: it cannot be told which
    SERVICE_DIED = "service_died"
    NETWORK = "network"  # everything ran on, it only could not be reached
    UNKNOWN = "unknown"


IN_WORDS = {
    Happened.NODE_REBOOT: "the node rebooted",
    Happened.GUEST_RESTART: "the guest restarted",
    Happened.RESTART: "the machine restarted",
    Happened.SERVICE_DIED: "the server ended, the machine ran on",
    Happened.NETWORK: "the network was away, everything ran on",
    Happened.UNKNOWN: "it cannot be told what happened",
}
RESTARTS = frozenset({Happened.NODE_REBOOT, Happened.GUEST_RESTART, Happened.RESTART})


def happened(before: BoxBoot, after: BoxBoot, *, serves: bool | None = None) -> Happened:
    """What happened between two looks at one box. `serves`: whether the same process of the server still runs.

    It says what is proved, and UNKNOWN otherwise.
    """
    kernel = same_kernel(before, after)
    start = _same_start(before, after, kernel)
    if kernel is False:
        return Happened.NODE_REBOOT
    if start is False:
        return Happened.GUEST_RESTART if kernel else Happened.RESTART
    if start is None or serves is None:
        return Happened.UNKNOWN
    return Happened.NETWORK if serves else Happened.SERVICE_DIED


def same_kernel(before: BoxBoot, after: BoxBoot) -> bool | None:
    """Is it the same boot of the machine that has the kernel? None where that is not proved."""
    if before.node and after.node:
        return before.node.boot_id == after.node.boot_id
    if not (before.guest and after.guest):
        return None
    if before.guest.boot_id == after.guest.boot_id:
        return True  # a kernel's own, or a container's that has not started anew
    if not before.container and not after.container:
        return False
    ticks = before.guest.pid1_start_ticks, after.guest.pid1_start_ticks
    if ticks[0] is not None and ticks[1] is not None and ticks[1] < ticks[0]:
        return False  # counted from the kernel's boot: of a later start of the same boot it is larger
    return None


def _same_start(before: BoxBoot, after: BoxBoot, kernel: bool | None) -> bool | None:
    """Is it the same start of the guest?"""
    if kernel is False:
        return False
    if not (before.guest and after.guest):
        return None
    ticks = before.guest.pid1_start_ticks, after.guest.pid1_start_ticks
    if ticks[0] is not None and ticks[1] is not None:
        if ticks[0] != ticks[1]:
            return False
        return True if kernel else None
    if before.guest.boot_id != after.guest.boot_id:
        return False
    if not before.container:
        return True  # a bare machine: one boot, one start. (A container of another kind gives its ticks.)
    own = {box.node.boot_id != box.guest.boot_id for box in (before, after) if box.node and box.guest}
    return True if own == {True} else None  # an id of its own changes with each start; the node's does not


def whole(boot: BoxBoot | None, older: BoxBoot | None) -> BoxBoot | None:
    """`boot`, with what could not be read of it from `older`, where that is proved to be the same start."""
    if boot is None or older is None:
        return boot or older
    if boot.guest is None or boot.node is not None or older.node is None:
        return boot
    return BoxBoot(boot.guest, older.node, boot.container) if same_kernel(older, boot) else boot
