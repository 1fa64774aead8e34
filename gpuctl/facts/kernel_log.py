"""Kernel messages: what the NVIDIA driver and the kernel said of GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuctl.box import Fact, Snapshot, Unknown


def _lines(snapshot: Snapshot) -> tuple[str, ...]:
    found: list[str] = []
    known = False
    if snapshot.has("kernel_log"):
        log = snapshot.document["kernel_log"]
        if isinstance(log, dict) and "lines" in log:
            found += [str(line) for line in log["lines"]]
            known = True
    for command in snapshot.mapping("commands"):
        if re.match(r"(?:/bin/|/usr/bin/)?(dmesg|journalctl)\b", command):
            try:
                found += snapshot.output(command).stdout.splitlines()
                known = True
            except Unknown:
                continue
    # People paste kernel lines among the errors they saw.
    told = [str(line) for line in snapshot.document.get("errors", ())]
    found += [
        line for line in told if re.search(r"NVRM|nvidia-nvlink|nvidia-uvm:|nvidia-modeset:|apparmor=|vfio-pci", line)
    ]
    if not known and not found:
        why = snapshot.document.get("kernel_log", {})
        reason = why.get("error") if isinstance(why, dict) else None
        raise Unknown(f"kernel log: {reason or 'not in the snapshot'}")
    return tuple(dict.fromkeys(found))


LINES: Fact[tuple[str, ...]] = Fact((("section", "kernel_log"), ("command", "dmesg")), _lines)


def grep(lines: tuple[str, ...], pattern: str) -> list[str]:
    """Lines that match, newest last, without their time stamps' noise."""
    return [line.strip() for line in lines if re.search(pattern, line, re.I)]


@dataclass(frozen=True)
class Xid:
    """One Xid report: the GPU's PCI address, the number, the line."""

    address: str
    number: int
    text: str


def parse_xids(lines: tuple[str, ...]) -> tuple[Xid, ...]:
    found = []
    for line in lines:
        match = re.search(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): (\d+)(.*)", line)
        if match:
            found.append(Xid(match.group(1), int(match.group(2)), line.strip()))
    return tuple(found)


def _xids(snapshot: Snapshot) -> tuple[Xid, ...]:
    return parse_xids(snapshot[LINES])


XIDS: Fact[tuple[Xid, ...]] = Fact((("section", "kernel_log"),), _xids)
