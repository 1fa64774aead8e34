"""How much main memory a process here can still get: by the machine, and by the limit of its control group."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuctl.box import Fact, Snapshot, Unknown

_UNITS = {"": 1 << 10, "-k": 1 << 10, "-b": 1, "-m": 1 << 20, "-g": 1 << 30}


@dataclass(frozen=True)
class Left:
    """Bytes, and where they were read."""

    value: int
    source: str


def _left(snapshot: Snapshot) -> Left:
    found = []
    try:
        available = re.search(r"(?m)^MemAvailable:\s+(\d+) kB", snapshot.file("/proc/meminfo"))
        if available:
            found.append(Left(int(available.group(1)) << 10, "/proc/meminfo MemAvailable"))
    except Unknown:
        pass
    try:
        limit = snapshot.file("/sys/fs/cgroup/memory.max").strip()
        current = snapshot.file("/sys/fs/cgroup/memory.current").strip()
        if limit.isdigit() and current.isdigit():
            found.append(Left(max(0, int(limit) - int(current)), "/sys/fs/cgroup/memory.max less memory.current"))
    except Unknown:
        pass
    for command in snapshot.mapping("commands"):
        shown = re.fullmatch(r"free(?: (-[bkmg]))?", command)
        if shown:
            row = re.search(r"(?m)^\s*Mem:\s+(.*)$", snapshot.output(command).stdout)
            numbers = row.group(1).split() if row else []
            if len(numbers) == 6 and all(number.isdigit() for number in numbers):
                found.append(Left(int(numbers[5]) * _UNITS[shown.group(1) or ""], f"{command}: available"))
    if not found:
        raise Unknown("memory that is left: not in the snapshot")
    return min(found, key=lambda left: left.value)


LEFT: Fact[Left] = Fact((("file", "/proc/meminfo"), ("file", "/sys/fs/cgroup/memory.max")), _left)
