"""Resource limits of the service: of its running process, of its unit, or as people type them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpuctl.box import Fact, Snapshot, Unknown

_ROWS = {"Max open files": "nofile", "Max address space": "as", "Max locked memory": "memlock"}
_NAMES = {"nofile": "nofile", "open_files": "nofile", "n": "nofile", "as": "as", "virtual_memory": "as", "v": "as",
          "address_space": "as", "memlock": "memlock", "l": "memlock", "max_locked_memory": "memlock",
          "nproc": "nproc", "u": "nproc"}  # fmt: skip
_UNITS = {"": 1, "k": 1 << 10, "kb": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "mib": 1 << 20,
          "g": 1 << 30, "gb": 1 << 30, "gib": 1 << 30, "t": 1 << 40, "tib": 1 << 40}  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """A soft limit; value None is unlimited."""

    value: int | None
    source: str


def parse_proc(text: str, source: str) -> dict[str, Limit]:
    """/proc/PID/limits."""
    found = {}
    for line in text.splitlines():
        for row, name in _ROWS.items():
            match = re.match(rf"{row}\s+(\S+)\s+(\S+)", line)
            if match:
                word = match.group(1)
                found[name] = Limit(int(word) if word.isdigit() else None, source)
    return found


def parse_value(text: str) -> int | None:
    """16, 8 GiB, unlimited. Raises ValueError."""
    word = text.strip().lower()
    if word in ("unlimited", "infinity", "-1", "max"):
        return None
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", word)
    if not found or found.group(2) not in _UNITS:
        raise ValueError(text)
    return int(found.group(1)) * _UNITS[found.group(2)]


def _limits(snapshot: Snapshot) -> Mapping[str, Limit]:
    found: dict[str, Limit] = {}
    service = snapshot.mapping("service")
    unit = snapshot.mapping("units").get(str(service.get("unit")))
    if isinstance(service.get("limits"), str):
        found.update(parse_proc(service["limits"], f"limits of {service.get('unit') or 'the service'}"))
    elif isinstance(unit, Mapping):
        for key, name in (("LimitNOFILESoft", "nofile"), ("LimitASSoft", "as"), ("LimitMEMLOCK", "memlock")):
            word = str(unit.get(key, ""))
            if word:
                value = int(word) if word.isdigit() and int(word) < 1 << 63 else None
                found[name] = Limit(value, f"{key.removesuffix('Soft')} of {service.get('unit')}")
    for name, text in snapshot.mapping("limits").items():
        if name in _NAMES:
            try:
                found[_NAMES[name]] = Limit(parse_value(str(text)), "limits")
            except ValueError:
                raise Unknown(f"limits: {name}: {text!r} is no limit") from None
    kilobytes = 1024
    for command, unit_bytes, name in (("ulimit -n", 1, "nofile"), ("ulimit -v", kilobytes, "as")):
        try:
            word = snapshot.output(command).stdout.strip()
        except Unknown:
            continue
        found[name] = Limit(int(word) * unit_bytes if word.isdigit() else None, command)
    if not found:
        try:
            found.update(parse_proc(snapshot.file("/proc/self/limits"), "/proc/self/limits"))
        except Unknown:
            raise Unknown("limits of the service: not in the snapshot") from None
    return found


# nofile, as, memlock, nproc -> limit; bytes for as and memlock.
LIMITS: Fact[Mapping[str, Limit]] = Fact((("section", "service"), ("section", "limits")), _limits)
