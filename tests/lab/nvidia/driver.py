"""The driver itself: modules, majors, GPUs, who holds them, and what it answers the libraries. No files, no kernel.

What a real driver keeps in the kernel's memory is kept here for one boot of a node; `Config` is what its disk knows.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.lab.nvidia.hardware import Gpu, Hardware

FIXED_MAJOR = 195
CONTROL, MODESET = 255, 254  # minors of the fixed major
MIB = 1 << 20

# module -> names of the character devices it registers with a major of the kernel's choice, in its order
DYNAMIC = {
    "nvidia": ("nvidia-caps-imex-channels", "nvidia-caps", "nvidia-nvlink", "nvidia-nvswitch"),
    "nvidia_uvm": ("nvidia-uvm",),
    "nvidia_modeset": (),
    "nvidia_drm": (),
}
NEEDS = {"nvidia": (), "nvidia_uvm": ("nvidia",), "nvidia_modeset": ("nvidia",), "nvidia_drm": ("nvidia_modeset",)}
# Majors as on the box this models. Another one that is taken in the running kernel is chosen as the kernel would.
USUAL_MAJORS = {
    "nvidia-caps-imex-channels": 237, "nvidia-caps": 236, "nvidia-nvlink": 235, "nvidia-nvswitch": 234,
    "nvidia-uvm": 509,
}  # fmt: skip

NVML_INVALID_ARGUMENT, NVML_NOT_SUPPORTED, NVML_NO_PERMISSION, NVML_GPU_IS_LOST = 2, 3, 4, 15
CUDA_OUT_OF_MEMORY, CUDA_DEVICE_UNAVAILABLE = 2, 46


class Refused(Exception):
    """What was asked of the driver cannot be done. The message is one line for a person."""


@dataclass
class Config:
    """What outlives a boot of the node: /var/lib/nvidia-double/config.json."""

    driver: str = "595.71.05"  # version of the modules on disk
    hardware: dict[str, Any] = field(default_factory=lambda: {"model": "rtx-pro-6000", "count": 8, "layout": "dual"})
    majors: dict[str, int] = field(default_factory=lambda: dict(USUAL_MAJORS))  # what the next load gets
    modules: list[str] = field(default_factory=lambda: ["nvidia"])  # loaded at boot because the hardware is there
    absent: list[int] = field(default_factory=list)  # minors of GPUs that are not on the bus
    numa_nodes: bool = True

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Config:
        """Raises ValueError."""
        known = set(cls.__dataclass_fields__)
        if wrong := sorted(set(document) - known):
            raise ValueError(f"unknown key {wrong[0]!r}: there are {', '.join(sorted(known))}")
        return cls(**document)

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Holder:
    """A process that holds a GPU."""

    pid: int  # as the driver sees it
    name: str
    allocated: int = 0  # bytes
    contexts: int = 0


@dataclass
class State:
    """One GPU since it was probed."""

    gpu: Gpu
    power_limit_mw: int
    persistence: bool = False
    compute_mode: int = 0  # 0 default, 2 prohibited, 3 exclusive process
    lost: bool = False
    locked_mhz: tuple[int, int] | None = None
    holders: dict[int, Holder] = field(default_factory=dict)
    energy_mj: float = 0.0  # drawn until `metered`
    metered: float = 0.0


@dataclass(frozen=True)
class Device:
    """What a device node leads to."""

    name: str  # nvidiactl, nvidia3, nvidia-uvm, nvidia-uvm-tools, nvidia-modeset, nvidia-cap1
    gpu: int | None = None


@dataclass(frozen=True)
class Caller:
    pid: int
    name: str
    administrator: bool
    sees: Callable[[int], int | None]  # pid as the driver sees it -> as the caller sees it, None if it does not


class Driver:
    """Not thread-safe: the kernel side calls it under one lock."""

    def __init__(self, config: Config, registered: Iterable[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.hardware = Hardware.of(config.hardware)
        self.registered = frozenset(registered)  # majors of the running kernel's own drivers
        self.loaded: dict[str, str] = {}  # module -> version, in the order of loading
        self.majors: dict[str, int] = {}
        self.states: dict[int, State] = {}
        self.cuda_init: int | None = None  # a code cuInit answers whatever else is well
        self.uvm_broken = False
        self.fabric = 0
        self.cpus: dict[int, str] = {}  # NUMA node -> its CPUs as a list
        self.log: list[tuple[float, str]] = []
        self._clock, self._boot = clock, clock()

    @property
    def reserved(self) -> int:
        """Bytes of a GPU's memory the driver keeps for itself; not a whole number of MiB, which is why nvidia-smi's
        sums seem one off."""
        return self.hardware.model.reserved_mib * MIB - 3 * MIB // 4

    # ---- modules ----

    def load(self, module: str) -> None:
        """As modprobe does, with what it needs. Raises Refused."""
        module = module.replace("-", "_")
        if module not in DYNAMIC:
            raise Refused(f"Module {module} not found")
        if module in self.loaded:
            return
        for needed in NEEDS[module]:
            self.load(needed)
        for name in DYNAMIC[module]:
            self.majors[name] = self._major(name)
        self.loaded[module] = self.loaded.get("nvidia", self.config.driver)
        version = self.loaded[module]
        if module == "nvidia":
            for gpu in self.hardware.gpus:
                if gpu.minor not in self.config.absent:
                    self.states[gpu.minor] = State(gpu, self.hardware.model.power_w[2] * 1000, metered=self._clock())
            self.say(
                f"nvidia-nvlink: Nvlink Core is being initialized, major device number {self.majors['nvidia-nvlink']}"
            )
            for state in self.states.values():
                self.say(f"nvidia {state.gpu.address}: enabling device (0000 -> 0002)")
            self.say(
                f"NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (builder@host)"
            )
        elif module == "nvidia_uvm":
            self.say(f"nvidia-uvm: Loaded the UVM driver, major device number {self.majors['nvidia-uvm']}.")

    def unload(self, module: str) -> None:
        """As rmmod does. Raises Refused."""
        module = module.replace("-", "_")
        if module not in self.loaded:
            raise Refused(f"Module {module} is not currently loaded")
        if users := [m for m in self.loaded if module in NEEDS[m]]:
            raise Refused(f"Module {module} is in use by: {' '.join(users)}")
        if any(state.holders for state in self.states.values()):
            raise Refused(f"Module {module} is in use")
        del self.loaded[module]
        for name in DYNAMIC[module]:
            del self.majors[name]
        if module == "nvidia":
            self.states.clear()
        if module == "nvidia_uvm":
            self.uvm_broken = False
            self.say("nvidia-uvm: Unloaded the UVM driver.")

    def _major(self, name: str) -> int:
        taken = self.registered | set(self.majors.values()) | {FIXED_MAJOR}
        wanted = self.config.majors.get(name)
        # find_dynamic_major() of the kernel: the highest free one of 254..234, then of 511..384
        free = (n for n in (*range(254, 233, -1), *range(511, 383, -1)) if n not in taken)
        return wanted if wanted is not None and wanted not in taken else next(free)

    def character_devices(self) -> list[tuple[int, str]]:
        """This driver's lines of /proc/devices."""
        lines = []
        if "nvidia" in self.loaded:
            lines += [(FIXED_MAJOR, "nvidia"), (FIXED_MAJOR, "nvidiactl")]
        if "nvidia_modeset" in self.loaded:
            lines.append((FIXED_MAJOR, "nvidia-modeset"))
        return lines + sorted((major, name) for name, major in self.majors.items())

    # ---- devices ----

    def device(self, major: int, minor: int) -> Device | None:
        """What a node of these numbers leads to; None: nobody registered the number."""
        if major == FIXED_MAJOR and "nvidia" in self.loaded:
            if minor == CONTROL:
                return Device("nvidiactl")
            if minor == MODESET:
                return Device("nvidia-modeset") if "nvidia_modeset" in self.loaded else None
            return Device(f"nvidia{minor}", minor)
        if major == self.majors.get("nvidia-uvm") and minor in (0, 1):
            return Device(("nvidia-uvm", "nvidia-uvm-tools")[minor])
        if major == self.majors.get("nvidia-caps") and minor in (1, 2):
            return Device(f"nvidia-cap{minor}")
        if major in (self.majors.get("nvidia-nvlink"), self.majors.get("nvidia-nvswitch")) and minor == 0:
            return Device("nvidia-nvlink")
        return None

    def opened(self, device: Device) -> int:
        """0, or the errno the driver's own open gives."""
        if device.gpu is not None:
            if device.gpu not in self.states:
                return errno.ENODEV
            return errno.EIO if self.states[device.gpu].lost else 0
        if device.name == "nvidia-uvm" and self.uvm_broken:
            return errno.EIO
        return 0

    # ---- what the libraries ask ----

    def answer(self, device: Device, caller: Caller, request: str) -> str:
        """Requests and answers are lines of words; src/client.h speaks the other end. Raises ValueError."""
        match request.split():
            case ["hello"]:
                return f"{device.name} {self.loaded.get('nvidia', '')}"
            case ["state"]:
                return self.describe(caller)
            case ["set", minor, key, value]:
                return self._change(int(minor), key, value, caller)
            case ["context"] if device.gpu is not None:
                return self._hold(self.states[device.gpu], caller)
            case ["drop"] if device.gpu is not None:
                return self._drop(self.states[device.gpu], caller)
            case ["allocate", size] if device.gpu is not None:
                return self._allocate(self.states[device.gpu], caller, int(size))
            case ["memory"] if device.gpu is not None:
                model = self.hardware.model
                return f"ok {self._free(self.states[device.gpu])} {model.memory_mib * MIB - self.reserved}"
            case ["mismatch", version]:
                self.mismatch(caller.name, version)
                return "ok"
        return "error 22"

    def describe(self, caller: Caller) -> str:
        """All that NVML and CUDA tell, one `key value` a line."""
        model = self.hardware.model
        lines = [f"version {self.loaded.get('nvidia', '')}", f"gpus {len(self.states)}", f"fabric {self.fabric}"]
        if self.cuda_init is not None:
            lines.append(f"cuinit {self.cuda_init}")
        states = list(self.states.values())
        for index, state in enumerate(states):
            gpu, busy = state.gpu, bool(state.holders)
            used = sum(h.allocated + h.contexts * model.context_mib * MIB for h in state.holders.values())
            ceiling = min(model.clocks_mhz[1], state.locked_mhz[1] if state.locked_mhz else 1 << 30)
            facts: dict[str, object] = {
                "minor": gpu.minor, "address": gpu.address, "bus": gpu.bus, "uuid": gpu.uuid, "serial": gpu.serial,
                "name": model.name, "device_id": f"0x{model.device_id:04X}10DE", "numa": gpu.numa,
                "subsystem_id": f"0x{model.subsystem_id:04X}10DE", "class": model.pci_class,
                "brand": model.brand, "brand_number": model.brand_number, "architecture": model.architecture,
                "nvml_architecture": model.nvml_architecture, "compute": f"{model.compute[0]}.{model.compute[1]}",
                "memory_mib": model.memory_mib, "reserved_bytes": self.reserved, "bar1_mib": model.bar1_mib,
                "used_bytes": used + (17 * MIB // 2 if busy else 0), "video_bios": model.video_bios,
                "board_part": model.board_part, "module_id": model.numa_hint, "ecc": int(model.ecc),
                "power_mw": self._power_mw(state), "energy_mj": int(self._metered(state)),
                "power_min_mw": model.power_w[1] * 1000, "power_default_mw": model.power_w[2] * 1000,
                "power_max_mw": model.power_w[3] * 1000, "power_limit_mw": state.power_limit_mw,
                "clock_gr": ceiling if busy else model.clocks_mhz[0], "clock_gr_max": model.clocks_mhz[1],
                "clock_mem": model.clocks_mhz[3 if busy else 2], "clock_mem_max": model.clocks_mhz[3],
                "pstate": 0 if busy else model.idle_state, "temperature": 33 + gpu.minor % 3 + 9 * busy,
                "persistence": int(state.persistence), "compute_mode": state.compute_mode, "lost": int(state.lost),
                "link_generation": model.link_generation if busy else model.idle_link_generation,
                "link_generation_max": model.link_generation, "link_width": model.link_width,
                "link_width_max": model.link_width,
                "cpus": self.cpus.get(gpu.numa, self.cpus.get(0, "0")), "processes_all": len(state.holders),
                "topology": ",".join(self.hardware.topology(gpu, other.gpu) for other in states),
            }  # fmt: skip
            lines += [f"gpu.{index}.{key} {value}" for key, value in facts.items()]
            seen = [(caller.sees(h.pid), h) for h in state.holders.values()]
            shown = [(pid, h) for pid, h in seen if pid is not None]
            lines.append(f"gpu.{index}.processes {len(shown)}")
            for n, (pid, holder) in enumerate(shown):
                size = holder.allocated + holder.contexts * model.context_mib * MIB
                lines.append(f"gpu.{index}.process.{n} {pid} {size}")
        return "\n".join(lines) + "\n"

    def _change(self, minor: int, key: str, value: str, caller: Caller) -> str:
        state = self.states.get(minor)
        if state is None or not re.fullmatch(r"-?\d+(,\d+)?", value):
            return f"error {NVML_INVALID_ARGUMENT}"
        if state.lost:
            return f"error {NVML_GPU_IS_LOST}"
        if not caller.administrator:
            return f"error {NVML_NO_PERMISSION}"
        model, number = self.hardware.model, int(value.split(",")[0])
        if key == "power_limit_mw" and model.power_w[1] * 1000 <= number <= model.power_w[3] * 1000:
            state.power_limit_mw = number
        elif key == "persistence" and number in (0, 1):
            state.persistence = bool(number)
        elif key == "compute_mode" and number in (0, 2, 3):
            state.compute_mode = number
        elif key == "locked_mhz":
            low, high = (int(part) for part in f"{value},{value}".split(",")[:2])
            state.locked_mhz = None if high == 0 else (low, high)
        else:
            return f"error {NVML_INVALID_ARGUMENT}"
        return "ok"

    def _power_mw(self, state: State) -> int:
        return (self.hardware.model.power_w[0] + 40 * bool(state.holders)) * 1000 + 390 + state.gpu.minor * 70

    def _metered(self, state: State) -> float:
        """Energy in mJ until now; to be called before anything that changes the power."""
        now = self._clock()
        state.energy_mj += self._power_mw(state) * (now - state.metered)
        state.metered = now
        return state.energy_mj

    # ---- who holds a GPU ----

    def _hold(self, state: State, caller: Caller) -> str:
        if state.lost:
            return "error 999"
        others = [h for h in state.holders.values() if h.pid != caller.pid and h.contexts]
        if state.compute_mode == 2 or (state.compute_mode == 3 and others):
            return f"error {CUDA_DEVICE_UNAVAILABLE}"
        if self._free(state) < self.hardware.model.context_mib * MIB:
            return f"error {CUDA_OUT_OF_MEMORY}"
        self._metered(state)
        state.holders.setdefault(caller.pid, Holder(caller.pid, caller.name)).contexts += 1
        return "ok"

    def _drop(self, state: State, caller: Caller) -> str:
        holder = state.holders.get(caller.pid)
        if holder is None:
            return "error 201"  # no context
        self._metered(state)
        holder.contexts -= 1
        if holder.contexts <= 0:
            del state.holders[caller.pid]
        return "ok"

    def _allocate(self, state: State, caller: Caller, size: int) -> str:
        """A negative size gives memory back."""
        holder = state.holders.get(caller.pid)
        if holder is None:
            return "error 201"
        if state.lost:
            return "error 999"
        if size > self._free(state):
            return f"error {CUDA_OUT_OF_MEMORY}"
        holder.allocated = max(0, holder.allocated + size)
        return "ok"

    def _free(self, state: State) -> int:
        model = self.hardware.model
        used = sum(h.allocated + h.contexts * model.context_mib * MIB for h in state.holders.values())
        return model.memory_mib * MIB - self.reserved - used

    def ended(self, pid: int) -> bool:
        """A process is gone and with it what it held. True if it held anything."""
        for state in self.states.values():
            self._metered(state)
        held = [state for state in self.states.values() if state.holders.pop(pid, None)]
        return bool(held)

    # ---- faults ----

    def lose(self, minor: int) -> None:
        """The GPU falls off the bus. Raises Refused."""
        if minor not in self.states:
            raise Refused(f"no GPU {minor}: there are {', '.join(map(str, self.states)) or 'none'}")
        state = self.states[minor]
        state.lost = True
        pci = state.gpu.address[:-2]
        self.say(
            f"NVRM: GPU at PCI:{pci}: {state.gpu.uuid}",
            f"NVRM: Xid (PCI:{pci}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            f"NVRM: GPU {state.gpu.address}: GPU has fallen off the bus.",
            f"NVRM: GPU {state.gpu.address}: GPU serial number is {state.gpu.serial}.",
            f"NVRM: Xid (PCI:{pci}): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
        )

    def mismatch(self, client: str, version: str) -> None:
        """A library of another version called: the driver says so in the log."""
        self.say(
            f"NVRM: API mismatch: the client '{client}' has the version {version}, but",
            f"NVRM: this kernel module has the version {self.loaded.get('nvidia')}.  Please make sure that this",
            "NVRM: kernel module and all NVIDIA driver components",
            "NVRM: have the same version.",
        )

    def say(self, *lines: str) -> None:
        """Into the kernel log."""
        now = self._clock() - self._boot
        self.log += [(now, line) for line in lines]

    def kernel_log(self) -> str:
        return "".join(f"<4>[{when:12.6f}] {line}\n" for when, line in self.log)
