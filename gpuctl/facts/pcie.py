"""PCI Express of each function: kind of port, link, MaxPayload, MaxReadReq and access control, from its configuration.

Offsets: PCI Express Base Specification 7.5.3 (capability 0x10) and 7.7.11 (extended capability 0x000D), as pciutils
has them in lib/header.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from gpuctl.box import Fact, Snapshot, Unknown
from gpuctl.facts.pci import DEVICES, Device, normal_address

SPEEDS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}  # GT/s by the number in the link registers


class Port(IntEnum):
    """Device/Port Type of the PCI Express capabilities register."""

    ENDPOINT = 0
    LEGACY_ENDPOINT = 1
    ROOT_PORT = 4
    UPSTREAM = 5  # of a switch, towards the CPU
    DOWNSTREAM = 6  # of a switch, towards a device
    PCI_BRIDGE = 7
    INTEGRATED = 9


@dataclass(frozen=True)
class Acs:
    """Access control services of a port. Redirecting sends traffic between GPUs up through the root complex."""

    can_redirect: bool
    request_redirect: bool
    completion_redirect: bool

    @property
    def redirects(self) -> bool:
        return self.request_redirect or self.completion_redirect


@dataclass(frozen=True)
class Function:
    """One function of the PCIe tree. Speeds in GT/s; None where its configuration could not be read (not root)."""

    address: str
    parent: str | None  # the function above it
    root: str  # pci0000:20, the root complex it hangs under
    device: Device
    numa: int | None
    port: Port | None = None
    speed: float | None = None
    width: int | None = None
    speed_max: float | None = None
    width_max: int | None = None
    max_payload: int | None = None  # bytes
    max_read_request: int | None = None  # bytes
    acs: Acs | None = None

    @property
    def is_bridge(self) -> bool:
        return self.device.kind >> 8 == 0x0604


def _word(config: bytes, offset: int) -> int:
    return int.from_bytes(config[offset : offset + 2].ljust(2, b"\0"), "little")


def _dword(config: bytes, offset: int) -> int:
    return int.from_bytes(config[offset : offset + 4].ljust(4, b"\0"), "little")


def capability(config: bytes, wanted: int) -> int | None:
    """Offset of a capability; None where there is none. A chain that runs in a circle ends."""
    if len(config) < 0x40 or not _word(config, 0x06) & 0x10:  # Status: Capabilities List
        return None
    offset, seen = config[0x34] & ~3, set()
    while 0x40 <= offset < len(config) and offset not in seen:
        if config[offset] == wanted:
            return offset
        seen.add(offset)
        offset = config[offset + 1] & ~3 if offset + 1 < len(config) else 0
    return None


def extended_capability(config: bytes, wanted: int) -> int | None:
    """Offset of an extended capability; None where there is none."""
    offset, seen = 0x100, set()
    while 0x100 <= offset < len(config) and offset not in seen:
        header = _dword(config, offset)
        if header & 0xFFFF == wanted:
            return offset
        seen.add(offset)
        offset = header >> 20 & ~3
    return None


def _acs(config: bytes) -> Acs | None:
    offset = extended_capability(config, 0x000D)
    if offset is None:
        return None
    can, control = _word(config, offset + 4), _word(config, offset + 6)
    return Acs(bool(can & 0x0C), bool(control & 0x04), bool(control & 0x08))


def read_function(device: Device, attributes: Mapping[str, object]) -> Function:
    """The function, as far as its sysfs attributes and its configuration say."""
    path = [part for part in str(attributes.get("path", "")).split("/") if part]
    above = [normal_address(part) for part in path[:-1] if normal_address(part) != part or part.count(":") == 2]
    roots = [part for part in path if part.startswith("pci")]
    node = str(attributes.get("numa_node", ""))
    function = Function(
        device.address,
        above[-1] if above else None,
        roots[-1] if roots else f"pci{device.address[:7]}",
        device,
        int(node) if node.isdecimal() else None,
        speed=_speed(attributes.get("current_link_speed")),
        width=_number(attributes.get("current_link_width")),
        speed_max=_speed(attributes.get("max_link_speed")),
        width_max=_number(attributes.get("max_link_width")),
    )
    text = attributes.get("config")
    try:
        config = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        return function
    offset = capability(config, 0x10)
    if offset is None:
        return function
    kind, control = _word(config, offset + 2) >> 4 & 0xF, _word(config, offset + 8)
    capable, status = _dword(config, offset + 0x0C), _word(config, offset + 0x12)
    return Function(
        **{
            **function.__dict__,
            "port": Port(kind) if kind in set(Port) else None,
            "speed": SPEEDS.get(status & 0xF, function.speed),
            "width": status >> 4 & 0x3F or function.width,
            "speed_max": SPEEDS.get(capable & 0xF, function.speed_max),
            "width_max": capable >> 4 & 0x3F or function.width_max,
            "max_payload": 128 << (control >> 5 & 7),
            "max_read_request": 128 << (control >> 12 & 7),
            "acs": _acs(config),
        }
    )


def _speed(value: object) -> float | None:
    try:
        return float(str(value).split()[0])
    except (ValueError, IndexError):
        return None


def _number(value: object) -> int | None:
    return int(str(value)) if str(value).isdecimal() and int(str(value)) else None


def _tree(snapshot: Snapshot) -> Mapping[str, Function]:
    devices = snapshot[DEVICES]
    found = [read_function(device, device.attributes) for device in devices if device.attributes.get("path")]
    if not found:
        raise Unknown("PCIe tree: lspci alone does not tell it" if devices else "no NVIDIA GPU on the PCI bus")
    return {function.address: function for function in found}


TREE: Fact[Mapping[str, Function]] = Fact((("section", "pci"),), _tree)
