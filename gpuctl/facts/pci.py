"""PCI devices: which GPUs the bus has, and which driver holds each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuctl.box import Fact, Snapshot, Unknown

NVIDIA = 0x10DE


@dataclass(frozen=True)
class Device:
    """One PCI function. `driver` None: none bound; `attributes` as sysfs gives them."""

    address: str  # 0000:01:00.0
    vendor: int
    device: int | None
    kind: int  # class code, 0x030200 for a 3D controller
    driver: str | None
    name: str = ""
    driver_known: bool = True
    attributes: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return self.vendor == NVIDIA and self.kind >> 16 == 0x03

    @property
    def is_nvswitch(self) -> bool:
        return self.vendor == NVIDIA and self.kind >> 8 == 0x0680


def normal_address(text: str) -> str:
    """01:00.0, 00000000:01:00.0, 0000:01:00 -> 0000:01:00.0, as sysfs writes it."""
    found = re.fullmatch(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})(?:\.([0-7]))?", text.strip())
    if not found:
        return text.strip()
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function or 0}"


_KINDS = {"VGA compatible controller": 0x030000, "3D controller": 0x030200, "Display controller": 0x038000,
          "Bridge": 0x068000, "Audio device": 0x040300}  # fmt: skip


def parse_lspci(text: str) -> tuple[Device, ...]:
    """`lspci`, `lspci -nn`, `lspci -k`, `lspci -nnk`: NVIDIA's devices."""
    found: list[Device] = []
    driver_seen = "Kernel driver in use" in text or "Kernel modules:" in text
    for line in text.splitlines():
        head = re.match(
            r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\s+(.+?)(?: \[([0-9a-f]{4})\])?: (.*)$", line, re.I
        )
        if head:
            address, kind, code, rest = head.groups()
            if "nvidia" not in rest.lower() and "[10de:" not in rest:
                found.append(Device("", 0, None, 0, None))
                continue
            ids = re.search(r"\[10de:([0-9a-f]{4})\]", rest, re.I)
            name = re.sub(r"\s*\[10de:[0-9a-f]{4}\]|\s*\(rev \w+\)|\s*\(prog-if[^)]*\)", "", rest)
            found.append(
                Device(
                    normal_address(address), NVIDIA, int(ids.group(1), 16) if ids else None,
                    int(code, 16) << 8 if code else _KINDS.get(kind, 0), None, name, driver_seen,
                    {"rev_ff": "(rev ff)" in rest},
                )
            )  # fmt: skip
            continue
        used = re.match(r"\s+Kernel driver in use: (\S+)", line)
        if used and found:
            found[-1] = Device(**{**found[-1].__dict__, "driver": used.group(1)})
    return tuple(device for device in found if device.address)


def _hex(value: object) -> int:
    try:
        return int(str(value), 16)
    except ValueError:
        return 0


def _devices(snapshot: Snapshot) -> tuple[Device, ...]:
    pci = snapshot.mapping("pci")
    if isinstance(pci.get("devices"), Mapping):
        found = []
        for address, attributes in pci["devices"].items():
            driver = attributes.get("driver")
            found.append(
                Device(
                    normal_address(str(address)),
                    _hex(attributes.get("vendor", "0x10de")),
                    _hex(attributes["device"]) if attributes.get("device") else None,
                    _hex(attributes.get("class", "0x030000")),
                    str(driver) if driver else None,
                    str(attributes.get("name", "")),
                    "driver" in attributes,
                    attributes,
                )
            )
        return tuple(found)
    for command in snapshot.mapping("commands"):
        if re.match(r"(?:/usr/bin/|/sbin/)?lspci\b", command):
            try:
                return parse_lspci(snapshot.output(command).stdout)
            except Unknown:
                continue
    raise Unknown("PCI devices: not in the snapshot")


DEVICES: Fact[tuple[Device, ...]] = Fact((("section", "pci"), ("command", "lspci -nnk")), _devices)


def _gpus(snapshot: Snapshot) -> tuple[Device, ...]:
    return tuple(device for device in snapshot[DEVICES] if device.is_gpu)


# In a container sysfs shows all GPUs of the machine, also those the guest is not given.
GPUS: Fact[tuple[Device, ...]] = Fact((("section", "pci"),), _gpus)
