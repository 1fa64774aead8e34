"""Device numbers: /proc/devices, which containers see as the host does.

nvidia is always 195; nvidia-uvm, nvidia-caps and the others are given a number when their module loads, and it may be
another one after each boot (Linux fs/char_dev.c: from 254 down to 234, then from 511 down to 384).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuctl.box import Fact, Snapshot, Unknown

NVIDIA_MAJOR = 195
NVIDIA_NAMES = ("nvidia", "nvidiactl", "nvidia-frontend", "nvidia-modeset")  # the name changed with driver 550.40


@dataclass(frozen=True)
class Majors:
    """Registered character and block devices, name -> majors."""

    char: dict[str, tuple[int, ...]]
    block: dict[str, tuple[int, ...]]

    def of(self, name: str) -> int | None:
        """The major of a character device by its driver's name, None where nothing has registered it."""
        if name == "nvidia":
            return NVIDIA_MAJOR if any(self.char.get(n) for n in NVIDIA_NAMES) else None
        numbers = self.char.get(name)
        return numbers[0] if numbers else None

    def names(self, major: int) -> tuple[str, ...]:
        return tuple(name for name, numbers in self.char.items() if major in numbers)


def parse_devices(text: str) -> Majors:
    """Reads /proc/devices. Lines before any heading count as character devices (people paste only what matters)."""
    char: dict[str, tuple[int, ...]] = {}
    block: dict[str, tuple[int, ...]] = {}
    section = char
    for line in text.splitlines():
        word = line.strip().lower()
        if word.startswith("character dev"):
            section = char
        elif word.startswith("block dev"):
            section = block
        else:
            found = re.match(r"\s*(\d+)\s+(\S.*?)\s*$", line) or re.match(r"\s*(\d+)\s*:\s*(\S+)\s*$", line)
            if found:
                name = found.group(2)
                section[name] = (*section.get(name, ()), int(found.group(1)))
    return Majors(char, block)


def _majors(snapshot: Snapshot) -> Majors:
    majors = parse_devices(snapshot.file("/proc/devices"))
    if not majors.char and not majors.block:
        raise Unknown("/proc/devices: no device in it")
    return majors


MAJORS: Fact[Majors] = Fact((("file", "/proc/devices"),), _majors)


def _uvm_major(snapshot: Snapshot) -> int | None:
    try:
        return snapshot[MAJORS].of("nvidia-uvm")
    except Unknown as unknown:
        lines = snapshot.document.get("kernel_log", {})
        texts = lines.get("lines", []) if isinstance(lines, dict) else []
        for line in reversed(texts):  # the last load counts
            found = re.search(r"Loaded the UVM driver, major device number (\d+)", line)
            if found:
                return int(found.group(1))
        raise Unknown(str(unknown)) from None


# None: known not to be registered (the module is not loaded).
UVM_MAJOR: Fact[int | None] = Fact((("file", "/proc/devices"), ("section", "kernel_log")), _uvm_major)


def driver_of(path: str) -> str | None:
    """The name under which the driver of this node registers in /proc/devices."""
    name = path.removeprefix("/dev/")
    if re.fullmatch(r"nvidia(\d+|ctl|-modeset)", name):
        return "nvidia"
    if name in ("nvidia-uvm", "nvidia-uvm-tools"):
        return "nvidia-uvm"
    if name.startswith("nvidia-caps/"):
        return "nvidia-caps"
    if name.startswith("nvidia-caps-imex-channels/"):
        return "nvidia-caps-imex-channels"
    if name.startswith("nvidia-nvswitch"):
        return "nvidia-nvswitch"
    return None


def minor_of(path: str) -> int | None:
    """The minor a node must have, where it is fixed (nv-chardev-numbers.h)."""
    name = path.removeprefix("/dev/")
    fixed = {"nvidiactl": 255, "nvidia-modeset": 254, "nvidia-uvm": 0, "nvidia-uvm-tools": 1}
    if name in fixed:
        return fixed[name]
    found = re.fullmatch(r"nvidia(?:-caps/nvidia-cap)?(\d+)", name)
    return int(found.group(1)) if found else None
