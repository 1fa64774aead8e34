"""What the driver shows in /proc and /sys, as regular files below one folder that nodes and guests mount there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.lab.nvidia import pci
from tests.lab.nvidia.driver import NEEDS, Driver

AT = "/var/lib/nvidia-double/kernel"  # where nodes and guests have the folder
REAL = "/var/lib/nvidia-double/real"  # and where they have what of the true /sys it hides

# Of /proc/driver/nvidia/params of 580.159.04 (tests/ground_truth/nvidia/facts.txt); 595 has the same.
PARAMS = """\
ResmanDebugLevel: 4294967295
RmLogonRC: 1
ModifyDeviceFiles: 1
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
InitializeSystemMemoryAllocations: 1
UsePageAttributeTable: 4294967295
EnableMSI: 1
EnablePCIeGen3: 0
MemoryPoolSize: 0
KMallocHeapMaxSize: 0
VMallocHeapMaxSize: 0
IgnoreMMIOCheck: 0
EnableStreamMemOPs: 0
EnableUserNUMAManagement: 1
NvLinkDisable: 0
RmProfilingAdminOnly: 1
PreserveVideoMemoryAllocations: 0
EnableS0ixPowerManagement: 0
S0ixPowerManagementVideoMemoryThreshold: 256
DynamicPowerManagement: 3
DynamicPowerManagementVideoMemoryThreshold: 200
RegisterPCIDriver: 1
EnablePCIERelaxedOrderingMode: 0
EnableResizableBar: 0
EnableGpuFirmware: 18
EnableGpuFirmwareLogs: 2
RmNvlinkBandwidthLinkCount: 0
EnableDbgBreakpoint: 0
OpenRmEnableUnsupportedGpus: 1
DmaRemapPeerMmio: 1
ImexChannelCount: 2048
CreateImexChannel0: 0
GrdmaPciTopoCheckOverride: 0
CoherentGPUMemoryMode: ""
RegistryDwords: ""
RegistryDwordsPerDevice: ""
RmMsg: ""
GpuBlacklist: ""
TemporaryFilePath: ""
ExcludedGpus: ""
"""


def numa_cpus(driver: Driver) -> dict[int, str]:
    """NUMA node -> list of its CPUs: this machine's, dealt out in order."""
    online = sorted(os.sched_getaffinity(0))
    nodes = driver.hardware.numa_nodes if driver.config.numa_nodes else 1
    share = max(1, len(online) // nodes)
    return {
        n: _list(online[n * share : (n + 1) * share if n < nodes - 1 else None] or online[-1:]) for n in range(nodes)
    }


def write(folder: Path, driver: Driver) -> None:
    """All of it, anew. The folders themselves stay, since they are what is mounted."""
    proc, module = folder / "proc/driver", folder / "sys/module"
    for place in (proc, module, folder / "sys/devices/system/node", folder / "sys/bus/pci"):
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o755)
    _clear(proc)
    for old in module.iterdir():
        if not old.is_symlink():
            shutil.rmtree(old)
    if "nvidia" in driver.loaded:
        _proc(proc, driver)
    for name, version in driver.loaded.items():
        _module(module / name, name, version, driver)
    # The other modules of this kernel, where the mount script puts the real folder.
    for name in os.listdir("/sys/module") if Path("/sys/module").is_dir() else ():
        if not name.startswith("nvidia") and not (module / name).is_symlink():
            (module / name).symlink_to(f"{REAL}/module/{name}")
    _numa(folder / "sys/devices/system/node", driver)
    pci.write(
        folder / "sys", driver.hardware, numa_cpus(driver), f"{AT}/sys", _generations(driver), _lost(driver),
        bound="nvidia" in driver.loaded,
    )  # fmt: skip


def refresh(folder: Path, driver: Driver) -> None:
    """What changes while GPUs are used and lost."""
    pci.refresh(folder / "sys", driver.hardware, _generations(driver), _lost(driver))


def devices(driver: Driver, real: str) -> str:
    """/proc/devices: the kernel's own text with the driver's lines in their places."""
    character, _, block = real.partition("Block devices:")
    rows = [(int(line.split()[0]), line.split()[1]) for line in character.splitlines()[1:] if line.strip()]
    rows = sorted([*rows, *driver.character_devices()], key=lambda row: row[0])
    lines = "".join(f"{major:3d} {name}\n" for major, name in rows)
    return f"Character devices:\n{lines}\nBlock devices:{block}"


def modules(driver: Driver, real: str) -> str:
    """/proc/modules, newest first."""
    text = ""
    for name in reversed(driver.loaded):
        users = [m for m in driver.loaded if name in NEEDS[m]]
        text += f"{name} {4 << 20} {len(users)} {''.join(u + ',' for u in users) or '-'} Live 0x0000000000000000 (OE)\n"
    return text + real


def _generations(driver: Driver) -> dict[int, int]:
    model = driver.hardware.model
    return {
        minor: model.link_generation if state.holders else model.idle_link_generation
        for minor, state in driver.states.items()
    }


def _lost(driver: Driver) -> frozenset[int]:
    return frozenset(minor for minor, state in driver.states.items() if state.lost)


def _proc(proc: Path, driver: Driver) -> None:
    version = driver.loaded["nvidia"]
    nvidia, caps, nvlink = proc / "nvidia", proc / "nvidia-caps", proc / "nvidia-nvlink"
    _file(
        nvidia / "version",
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (builder@host)  \n"
        "GCC version:  gcc version 14.2.0 (Debian 14.2.0-19) \n",
    )
    _file(nvidia / "params", PARAMS)
    _file(nvidia / "registry", 'Binary: ""\n')
    _file(nvidia / "suspend", "")
    _file(nvidia / "suspend_depth", "default modeset uvm\n")
    for note in ("patches", "warnings"):
        _file(nvidia / note / "README", "The files in this directory are notes of the driver.\n")
    for minor, name, mode in ((1, "config", 256), (2, "monitor", 292)):
        text = f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"
        _file(nvidia / f"capabilities/mig/{name}", text)
    _file(nvidia / "capabilities/fabric-imex-mgmt", "DeviceFileMinor: 3\nDeviceFileMode: 256\nDeviceFileModify: 1\n")
    _file(caps / "mig-minors", "config 1\nmonitor 2\n")
    _file(caps / "sys-minors", "fabric-imex-mgmt 3\n")
    _file(caps / "nvlink-minors", "fabric-mgmt 0\n")
    _file(nvlink / "capabilities/fabric-mgmt", "DeviceFileMinor: 0\nDeviceFileMode: 256\nDeviceFileModify: 1\n")
    _file(nvlink / "permissions", "DeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\nDeviceFileModify: 1\n")
    bios = driver.hardware.model.video_bios.lower()
    for minor, state in driver.states.items():
        gpu = state.gpu
        place = nvidia / "gpus" / gpu.address
        _file(
            place / "information",
            f"Model: \t\t {driver.hardware.model.name}\nIRQ:   \t\t {40 + minor}\nGPU UUID: \t {gpu.uuid}\n"
            f"Video BIOS: \t {bios}\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n"
            f"Bus Location: \t {gpu.address}\nDevice Minor: \t {minor}\nGPU Firmware: \t {version}\n"
            "GPU Excluded:\t No\n",
        )
        _file(place / "registry", 'Binary: ""\n')
        _file(place / "power", "Runtime D3 status:          Disabled by default\nVideo Memory:               Active\n")


def _module(place: Path, name: str, version: str, driver: Driver) -> None:
    users = [m for m in driver.loaded if name in NEEDS[m]]
    for key, text in {
        "version": version, "initstate": "live", "refcnt": str(len(users)), "coresize": str(4 << 20), "taint": "OE",
        "srcversion": "0" * 24,
    }.items():  # fmt: skip
        _file(place / key, text + "\n")
    for user in users:
        (place / "holders").mkdir(parents=True, exist_ok=True)
        (place / "holders" / user).symlink_to(f"../../{user}")
    if name == "nvidia_uvm":
        _file(place / "parameters/uvm_disable_hmm", "N\n")


def _numa(place: Path, driver: Driver) -> None:
    cpus = numa_cpus(driver)
    last = len(cpus) - 1
    whole = f"0-{last}" if last else "0"
    kib = (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 10) // len(cpus)
    _clear(place)
    for name in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory"):
        _file(place / name, whole + "\n")
    for node, listed in cpus.items():
        mask = sum(1 << n for low, high in pci.ranges(listed) for n in range(low, high + 1))
        one = place / f"node{node}"
        _file(one / "cpulist", listed + "\n")
        _file(one / "cpumap", f"{mask:08x}\n")
        _file(one / "distance", " ".join("10" if other == node else "32" for other in cpus) + "\n")
        lines = {
            "MemTotal": kib,
            "MemFree": kib * 3 // 4,
            "MemUsed": kib // 4,
            "FilePages": kib // 8,
            "HugePages_Total": 0,
        }
        unit = {"HugePages_Total": ""}
        _file(
            one / "meminfo",
            "".join(f"Node {node} {k + ':':15} {v:8d}{unit.get(k, ' kB')}\n" for k, v in lines.items()),
        )
        _file(
            one / "numastat", "numa_hit 0\nnuma_miss 0\nnuma_foreign 0\ninterleave_hit 0\nlocal_node 0\nother_node 0\n"
        )


def _list(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _clear(folder: Path) -> None:
    for one in folder.iterdir():
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one)
        else:
            one.unlink()
