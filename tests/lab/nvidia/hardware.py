"""The GPUs of a node and where they sit: PCI addresses, NUMA nodes, what each model can do. Pure data.

The models' figures are those that nvidia-smi and lspci show for such boards; `H200` is the machine of
tests/ground_truth/nvidia, field by field.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Model:
    name: str
    device_id: int
    subsystem_id: int  # both with vendor 10de
    pci_class: int
    architecture: str
    nvml_architecture: int
    compute: tuple[int, int]
    memory_mib: int
    reserved_mib: int
    bar1_mib: int
    context_mib: int  # what one CUDA context costs
    power_w: tuple[int, int, int, int]  # idle, least limit, default limit, greatest limit
    clocks_mhz: tuple[int, int, int, int]  # graphics idle, graphics max, memory idle, memory max
    idle_state: int  # the P of an idle GPU
    idle_link_generation: int
    video_bios: str
    board_part: str
    numa_hint: int  # what nvidia-smi calls Board ID is the bus; this is the module id
    brand: str = "NVIDIA"
    brand_number: int = 14  # NVML_BRAND_NVIDIA
    link_generation: int = 5
    link_width: int = 16
    ecc: bool = True
    audio: bool = False  # function 1, as boards with video outputs have


RTX_PRO_6000 = Model(
    name="NVIDIA RTX PRO 6000 Blackwell Server Edition", device_id=0x2BB5, subsystem_id=0x204E, pci_class=0x030200,
    architecture="Blackwell", nvml_architecture=10, compute=(12, 0), memory_mib=97887, reserved_mib=638,
    bar1_mib=131072, context_mib=490, power_w=(31, 300, 600, 600), clocks_mhz=(180, 2430, 405, 12481), idle_state=8,
    idle_link_generation=1, video_bios="98.02.6F.00.02", board_part="900-2G153-0000-000", numa_hint=1,
    brand="NVIDIA RTX", brand_number=13, audio=True,
)  # fmt: skip
H200 = Model(
    name="NVIDIA H200", device_id=0x2335, subsystem_id=0x18BF, pci_class=0x030200, architecture="Hopper",
    nvml_architecture=9, compute=(9, 0), memory_mib=143771, reserved_mib=616, bar1_mib=262144, context_mib=518,
    power_w=(77, 200, 700, 700), clocks_mhz=(345, 1980, 3201, 3201), idle_state=0, idle_link_generation=5,
    video_bios="96.00.A5.00.1A", board_part="692-2G520-0282-001", numa_hint=2,
)  # fmt: skip
MODELS = {"rtx-pro-6000": RTX_PRO_6000, "h200": H200}


@dataclass(frozen=True)
class Gpu:
    minor: int
    address: str  # 0000:23:00.0
    numa: int  # -1: the firmware did not say
    path: tuple[str, ...]  # the bridges above it, root port first
    uuid: str
    serial: str

    @property
    def bus(self) -> str:
        """The address as NVML and nvidia-smi write it: eight digits of domain."""
        return f"0000{self.address.upper()}"

    @property
    def host_bridge(self) -> str:
        """The PCI root it hangs on: pci0000:20."""
        first = self.path[0] if self.path else self.address
        return f"pci{first[:7]}"


@dataclass(frozen=True)
class Hardware:
    model: Model
    gpus: tuple[Gpu, ...]
    numa_nodes: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Hardware:
        """`config` is the "hardware" of a node's config.json: model, count, layout. Raises ValueError."""
        name, count, layout = config.get("model", "rtx-pro-6000"), config.get("count", 8), config.get("layout", "dual")
        if name not in MODELS:
            raise ValueError(f"no GPU model {name!r}: there are {', '.join(MODELS)}")
        if layout == "flat":  # as a virtual machine sees passed-through GPUs
            places = [(f"0000:00:{6 + n:02x}.0", -1, ()) for n in range(count)]
            return cls(MODELS[name], tuple(_gpu(n, *place) for n, place in enumerate(places)), 1)
        if layout != "dual" or not 0 <= count <= 8:
            raise ValueError(f"layout {layout!r} with {count!r} GPUs: there are dual (up to 8) and flat")
        # Two sockets with two host bridges each; on each bridge a switch, on each switch two GPUs.
        places = []
        for root, numa in ((0x20, 0), (0x40, 0), (0xA0, 1), (0xC0, 1)):
            for slot in range(2):
                bridges = (f"0000:{root:02x}:01.1", f"0000:{root + 1:02x}:00.0", f"0000:{root + 2:02x}:{slot:02x}.0")
                places.append((f"0000:{root + 3 + slot:02x}:00.0", numa, bridges))
        return cls(MODELS[name], tuple(_gpu(n, *place) for n, place in enumerate(places[:count])), 2)

    def topology(self, one: Gpu, other: Gpu) -> str:
        """How two GPUs reach each other, in the words of `nvidia-smi topo -m`."""
        if one == other:
            return "X"
        if one.numa != other.numa:
            return "SYS"
        if not one.path or one.path[0] != other.path[0]:
            return "PHB" if one.host_bridge == other.host_bridge else "NODE"
        return "PIX" if one.path[:-1] == other.path[:-1] else "PXB"


def _gpu(minor: int, address: str, numa: int, path: tuple[str, ...]) -> Gpu:
    seed = uuid.uuid5(uuid.NAMESPACE_URL, f"nvidia-double/{address}")
    return Gpu(minor, address, numa, path, f"GPU-{seed}", f"16537240{50000 + minor * 37}")
