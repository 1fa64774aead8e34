"""The PCI tree as regular files: what sysfs shows of each function, its configuration space included.

setpci and lspci of pciutils read and write it with `-O sysfs.path=FOLDER/bus/pci`; so does whatever looks below
/sys/bus/pci once a node or guest has it there. Layouts of registers: PCI Express Base Specification 5.0, as pciutils'
lib/header.h names them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.nvidia.hardware import Gpu, Hardware, Model

NVIDIA, AMD, BROADCOM = 0x10DE, 0x1022, 0x1000
ENDPOINT, ROOT_PORT, UPSTREAM, DOWNSTREAM = 0, 4, 5, 6
SPEEDS = {1: "2.5 GT/s PCIe", 2: "5.0 GT/s PCIe", 3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe"}
PM, EXPRESS = 0x60, 0x68  # where the capabilities stand
ERRORS, ACCESS_CONTROL, SECONDARY = 0x100, 0x148, 0x150  # and the extended ones


@dataclass
class Function:
    address: str
    path: tuple[str, ...]  # the bridges above, root port first
    vendor: int
    device: int
    pci_class: int
    port: int | None  # its PCI Express type; None: a conventional function
    numa: int
    subsystem: int = 0
    buses: tuple[int, int, int] | None = None  # of a bridge: primary, secondary, subordinate
    driver: str | None = None
    max_read_request: int = 512
    generation: int = 5
    max_generation: int = 5
    width: int = 16
    bars: list[tuple[int, int, int]] = field(default_factory=list)  # address, size, flags
    shared: bool = False  # one of several functions of a device
    dead: bool = False


def functions(hardware: Hardware, generations: dict[int, int], lost: frozenset[int] = frozenset()) -> list[Function]:
    """Every function of the GPUs' part of the machine. `generations`: minor -> PCIe generation of its link now."""
    found: dict[str, Function] = {}
    for gpu in hardware.gpus:
        for depth, address in enumerate(gpu.path):
            if address not in found:
                found[address] = _bridge(hardware, address, depth, gpu)
        for function in _gpu(hardware.model, gpu, generations.get(gpu.minor, hardware.model.idle_link_generation)):
            function.dead = gpu.minor in lost
            found[function.address] = function
    return list(found.values())


def _bus(address: str) -> int:
    return int(address.split(":")[1], 16)


def _bridge(hardware: Hardware, address: str, depth: int, below: Gpu) -> Function:
    secondary = {
        _bus(g.path[depth + 1]) if len(g.path) > depth + 1 else _bus(g.address) for g in _under(hardware, address)
    }
    subordinate = max(_bus(g.address) for g in _under(hardware, address))
    port = (ROOT_PORT, UPSTREAM, DOWNSTREAM)[depth]
    vendor, device = (AMD, 0x1483) if port == ROOT_PORT else (BROADCOM, 0xC030)
    return Function(
        address, below.path[:depth], vendor, device, 0x060400, port, below.numa,
        buses=(_bus(address), min(secondary), subordinate), driver="pcieport",
        max_read_request=512 if port == ROOT_PORT else 128,
    )  # fmt: skip


def _under(hardware: Hardware, bridge: str) -> list[Gpu]:
    return [gpu for gpu in hardware.gpus if bridge in gpu.path]


def _gpu(model: Model, gpu: Gpu, generation: int) -> Iterator[Function]:
    base = 0x20_0000_0000_00 + (gpu.minor << 40)
    yield Function(
        gpu.address, gpu.path, NVIDIA, model.device_id, model.pci_class, ENDPOINT, gpu.numa, subsystem=model.subsystem_id,
        driver="nvidia", generation=generation, max_generation=model.link_generation, width=model.link_width,
        shared=model.audio,
        bars=[(0xE000_0000 + (gpu.minor << 24), 64 << 20, 0x200), (base, model.bar1_mib << 20, 0x14220C),
              (base + (1 << 39), 32 << 20, 0x14220C)],
    )  # fmt: skip
    if model.audio:
        yield Function(
            gpu.address[:-1] + "1", gpu.path, NVIDIA, 0x22E8, 0x040300, ENDPOINT, gpu.numa, subsystem=model.subsystem_id,
            generation=generation, max_generation=model.link_generation, width=model.link_width, shared=True,
        )  # fmt: skip


def config_space(function: Function) -> bytes:
    """4096 bytes, little endian. All ones when the device has fallen off the bus."""
    if function.dead:
        return b"\xff" * 4096
    space = bytearray(4096)

    def put(at: int, form: str, *values: int) -> None:
        struct.pack_into("<" + form, space, at, *values)

    put(0x00, "HHHH", function.vendor, function.device, 0x0407, 0x0010)  # memory, I/O and bus master on; capabilities
    put(0x08, "BBH", 0xA1, function.pci_class & 0xFF, function.pci_class >> 8)
    put(0x34, "B", PM)
    if function.buses is not None:
        put(0x0E, "B", 1)
        put(0x18, "BBB", *function.buses)
    else:
        put(0x0E, "B", 0x80 if function.shared else 0)
        at = 0x10
        for address, size, _ in function.bars:
            wide = size > 64 << 20 or address >> 32
            put(at, "I", (address & 0xFFFF_FFF0) | (0xC if wide else 0))
            if wide:
                put(at + 4, "I", address >> 32)
            at += 8 if wide else 4
        put(0x2C, "HH", NVIDIA, function.subsystem)
    put(PM, "BBHH", 0x01, EXPRESS, 0x4803, 0x0008)
    put(EXPRESS, "BBH", 0x10, 0x00, 0x0002 | (function.port or 0) << 4)
    put(EXPRESS + 0x04, "I", 0x1000_8DE1 if function.port == ENDPOINT else 0x0000_8001)  # 256-byte payloads, FLR
    read_request = {128 << n: n for n in range(6)}[function.max_read_request]
    put(EXPRESS + 0x08, "HH", 0x0930 & ~0x7000 | read_request << 12, 0x0000)
    speed, width = function.max_generation, function.width
    put(EXPRESS + 0x0C, "I", speed | width << 4 | 3 << 10 | 0x0040_0000)  # ASPM L0s and L1
    put(EXPRESS + 0x10, "HH", 0x0040, function.generation | width << 4 | (0x2000 if function.port != ENDPOINT else 0))
    put(EXPRESS + 0x24, "I", 0x7080_1F17)
    put(EXPRESS + 0x28, "HH", 0x0009, 0x0000)
    put(EXPRESS + 0x2C, "I", ((1 << speed) - 1) << 1)
    put(EXPRESS + 0x30, "HH", speed, 0x001E)
    bridge = function.port in (ROOT_PORT, DOWNSTREAM)
    put(ERRORS, "I", 0x0001 | 2 << 16 | (ACCESS_CONTROL if bridge else SECONDARY) << 20)
    put(ERRORS + 0x0C, "I", 0x0046_2030)
    if bridge:
        put(ACCESS_CONTROL, "I", 0x000D | 1 << 16 | SECONDARY << 20)
        put(ACCESS_CONTROL + 0x04, "HH", 0x005F, 0x001D)  # source validation and redirection on, as firmware leaves it
    put(SECONDARY, "I", 0x0019 | 1 << 16)
    return bytes(space)


def write(folder: Path, hardware: Hardware, cpus: dict[int, str], links: str, generations: dict[int, int],
          lost: frozenset[int] = frozenset(), bound: bool = True) -> None:  # fmt: skip
    """Writes bus/pci and devices/pci* below `folder`. `links`: where that folder will be seen, for symbolic links;
    `cpus`: NUMA node -> its CPUs as a list; `bound`: the nvidia driver is loaded."""
    devices, drivers = folder / "bus/pci/devices", folder / "bus/pci/drivers"
    for place in (devices, folder / "bus/pci/slots", drivers / "nvidia", drivers / "pcieport"):
        place.mkdir(parents=True, exist_ok=True)
    for function in functions(hardware, generations, lost):
        first = function.path[0] if function.path else function.address
        inside = "/".join((f"devices/pci{first[:7]}", *function.path, function.address))
        place = folder / inside
        place.mkdir(parents=True, exist_ok=True)
        write_registers(place, function)
        for name, text in _attributes(function, cpus).items():
            (place / name).write_text(text + "\n")
        _link(devices / function.address, f"{links}/{inside}")
        driver = function.driver if function.driver != "nvidia" or bound else None
        _link(place / "driver", f"{links}/bus/pci/drivers/{driver}" if driver else None)
        _link(place / "subsystem", f"{links}/bus/pci")
        if function.driver:
            _link(drivers / function.driver / function.address, f"{links}/{inside}" if driver else None)


def refresh(folder: Path, hardware: Hardware, generations: dict[int, int], lost: frozenset[int]) -> None:
    """Link speeds and dead devices as they are now. What setpci wrote elsewhere stays."""
    for function in functions(hardware, generations, lost):
        first = function.path[0] if function.path else function.address
        place = folder / "/".join((f"devices/pci{first[:7]}", *function.path, function.address))
        if function.vendor != NVIDIA or not place.is_dir():
            continue
        (place / "current_link_speed").write_text(SPEEDS[function.generation] + "\n")
        with (place / "config").open("r+b") as config:
            alive = config.read(2) == struct.pack("<H", NVIDIA)
            if function.dead or not alive:
                config.seek(0)
                config.write(config_space(function))
            else:
                config.seek(EXPRESS + 0x12)
                config.write(struct.pack("<H", function.generation | function.width << 4))


def write_registers(place: Path, function: Function) -> None:
    config = place / "config"
    config.write_bytes(config_space(function))
    config.chmod(0o644)


def _link(at: Path, target: str | None) -> None:
    at.unlink(missing_ok=True)
    if target is not None:
        at.symlink_to(target)


def _attributes(function: Function, cpus: dict[int, str]) -> dict[str, str]:
    where = cpus.get(function.numa, cpus.get(0, "0"))
    mask = sum(1 << n for low, high in ranges(where) for n in range(low, high + 1))
    subsystem_vendor = NVIDIA if function.buses is None else 0
    resources = [(a, a + size - 1, flags) for a, size, flags in function.bars]
    resources += [(0, 0, 0)] * (13 - len(resources))
    slot = f"{function.vendor:04X}:{function.device:04X}"
    text = {
        "vendor": f"0x{function.vendor:04x}", "device": f"0x{function.device:04x}", "class": f"0x{function.pci_class:06x}",
        "subsystem_vendor": f"0x{subsystem_vendor:04x}", "subsystem_device": f"0x{function.subsystem:04x}",
        "revision": "0xa1", "numa_node": str(function.numa), "local_cpulist": where, "local_cpus": f"{mask:x}",
        "irq": "0" if function.driver is None else str(40 + _bus(function.address) % 32), "enable": "1",
        "power_state": "D0", "d3cold_allowed": "1", "reset_method": "flr bus" if function.buses is None else "pm",
        "resource": "\n".join(f"0x{a:016x} 0x{b:016x} 0x{f:016x}" for a, b, f in resources),
        "uevent": f"{'DRIVER=' + function.driver + chr(10) if function.driver else ''}PCI_CLASS={function.pci_class:X}\n"
        f"PCI_ID={slot}\nPCI_SUBSYS_ID={subsystem_vendor:04X}:{function.subsystem:04X}\n"
        f"PCI_SLOT_NAME={function.address}",
        "modalias": f"pci:v{function.vendor:08X}d{function.device:08X}sv{subsystem_vendor:08X}sd{function.subsystem:08X}"
        f"bc{function.pci_class >> 16:02X}sc{function.pci_class >> 8 & 0xFF:02X}i{function.pci_class & 0xFF:02X}",
        "current_link_speed": SPEEDS[function.generation], "max_link_speed": SPEEDS[function.max_generation],
        "current_link_width": str(function.width), "max_link_width": str(function.width),
    }  # fmt: skip
    if function.buses is not None:
        text["secondary_bus_number"], text["subordinate_bus_number"] = str(function.buses[1]), str(function.buses[2])
    return text


def ranges(cpus: str) -> list[tuple[int, int]]:
    pairs = (part.split("-") for part in cpus.split(",") if part)
    return [(int(p[0]), int(p[-1])) for p in pairs]
