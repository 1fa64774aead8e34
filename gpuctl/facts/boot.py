"""The identity of a start: which boot of the machine, which start of the container.

A container gets a boot_id of its own at each start (LXC with autodev) or shows the machine's; /proc/1/stat field 22
is the start of PID 1 in ticks since the machine's boot. Together they tell a reboot of the node from a restart of the
guest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuctl.box import Fact, Snapshot, Unknown


@dataclass(frozen=True)
class Boot:
    boot_id: str
    pid1_start_ticks: int | None
    btime: int | None = None  # epoch seconds, of the machine also in a container

    def as_json(self) -> dict[str, object]:
        return {"boot_id": self.boot_id, "pid1_start_ticks": self.pid1_start_ticks, "btime": self.btime}


def parse_start_ticks(stat: str) -> int | None:
    """Field 22 of /proc/PID/stat; the name in parentheses may hold blanks and parentheses."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else None


def _boot(snapshot: Snapshot) -> Boot:
    boot_id = snapshot.file("/proc/sys/kernel/random/boot_id").strip()
    try:
        ticks = parse_start_ticks(snapshot.file("/proc/1/stat"))
    except Unknown:
        ticks = None
    try:
        found = re.search(r"^btime (\d+)", snapshot.file("/proc/stat"), re.M)
    except Unknown:
        found = None
    return Boot(boot_id, ticks, int(found.group(1)) if found else None)


BOOT: Fact[Boot] = Fact((("file", "/proc/sys/kernel/random/boot_id"), ("file", "/proc/1/stat")), _boot)


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
