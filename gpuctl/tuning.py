"""Settings of a node that change what is measured: what a profile wants, why, and how each is read and set. Pure.

The settings are data for the module `settle` (playbooks/library), which reads, sets and reads back. All of them hold
for the whole node: a container cannot set them, and everything on the node lives with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuctl import remedies, render
from gpuctl.box import Box, Snapshot, Unknown
from gpuctl.facts import access, nvidia, pci, pcie, proxmox
from gpuctl.facts.pcie import Function, Port

PROFILES = ("none", "latency", "throughput")
READ_REQUESTS = (128, 256, 512, 1024, 2048, 4096)

MAX_READ_REQUEST = (
    "MaxReadReq bounds what a device asks for in one read. On boxes with PCIe switches it brings little: the switches' "
    "ports stay at 128 whatever is written, writes between GPUs are not reads, and 512, the default, was the best of "
    "128, 512 and 4096 where it was measured. Set it only to measure it."
)


class CannotTune(ValueError):
    """What is asked for cannot be set here. The message is one line."""


@dataclass(frozen=True)
class Setting:
    """One value of the machine. `how` is what `settle` takes beside name and want; `seen` None where it is not known.

    `words` are values as people write them; `note` what else to know.
    """

    name: str
    want: str
    reason: str
    source: str
    how: Mapping[str, Any]
    seen: str | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def well(self) -> bool:
        return self.seen == self.want

    def in_words(self, value: str | None) -> str:
        return "not known" if value is None else self.words.get(value, value)

    def as_job(self) -> dict[str, Any]:
        return {"name": self.name, "want": self.want, **self.how}

    @property
    def command(self) -> str:
        """What a person would type."""
        if "file" in self.how:
            return f"echo {self.want} > {self.how['file']}"
        return " ".join(word.replace("{value}", self.want) for word in self.how["set"])


@dataclass(frozen=True)
class Wishes:
    """What is set beyond the profile, each because somebody asked for it."""

    max_read_request: int | None = None  # bytes
    power_w: int | None = None
    no_acs_redirect: bool = False
    only: tuple[str, ...] = ()  # PCI functions that MaxReadReq and ACS are set on; none: the GPUs and all above them


def wanted(node: Snapshot, profile: str, wishes: Wishes | None = None) -> tuple[Setting, ...]:
    """The settings of a profile, with what the snapshot saw. Raises CannotTune."""
    wishes = wishes or Wishes()
    if profile not in PROFILES:
        raise CannotTune(f"profile: {profile!r} is not known; there are {', '.join(PROFILES)}")
    found: list[Setting] = []
    if profile != "none":
        found += [*_numa_balancing(node), *_governors(node), *_huge_pages(node, profile), *_persistence(node)]
    if wishes.power_w is not None:
        found += _power(node, wishes.power_w)
    if wishes.max_read_request is not None:
        found += _read_requests(node, wishes.max_read_request, wishes.only)
    if wishes.no_acs_redirect:
        found += _access_control(node, wishes.only)
    return tuple(found)


def kept(node: Snapshot) -> tuple[Mapping[str, Any], ...]:
    """What the machine sets again at each boot, as jobs of `settle`; nothing where its unit does not run at boot."""
    if _text(node, f"{render.UNITS}/multi-user.target.wants/gpuctl-tune.service") is None:
        return ()
    try:
        found = json.loads(node.file(f"{render.ETC}/tune.json"))["settings"]
    except (Unknown, ValueError, KeyError, TypeError):
        return ()
    return tuple(one for one in found if isinstance(one, Mapping)) if isinstance(found, list) else ()


def _text(node: Snapshot, path: str) -> str | None:
    try:
        return node.file(path).strip()
    except Unknown:
        return None


def numa_nodes(node: Snapshot) -> dict[int, str]:
    """NUMA node -> its CPUs ("0-63,128-191"), those that have CPUs."""
    found = {}
    for path, text in node.files("/sys/devices/system/node/node", "/cpulist").items():
        number = re.search(r"node(\d+)/cpulist$", path)
        if number and text.strip():
            found[int(number[1])] = text.strip()
    return dict(sorted(found.items()))


def _numa_balancing(node: Snapshot) -> Iterator[Setting]:
    path = "/proc/sys/kernel/numa_balancing"
    if len(numa_nodes(node)) < 2:
        return
    yield Setting(
        "kernel.numa_balancing",
        "0",
        "pages are unmapped all the time to see who uses them; a server bound to its node gains nothing by it",
        "kernel documentation, sysctl/kernel: off where the workload is bound to nodes; so in tuned's hpc-compute",
        {"file": path},
        _text(node, path),
    )


def _governors(node: Snapshot) -> Iterator[Setting]:
    for path, text in sorted(node.files("/sys/devices/system/cpu/cpufreq/policy", "/scaling_governor").items()):
        yield Setting(
            f"governor {path.split('/')[-2]}",
            "performance",
            "the threads that launch kernels sleep between steps: a slow clock at each waking is time per token",
            "tuned: latency-performance, throughput-performance and hpc-compute set it",
            {"file": path, "optional": True},
            text.strip(),
        )


def _huge_pages(node: Snapshot, profile: str) -> Iterator[Setting]:
    path, pick = "/sys/kernel/mm/transparent_hugepage/enabled", r"\[(\w+)\]"
    text = _text(node, path)
    seen = re.search(pick, text) if text is not None else None
    always = profile == "throughput"
    yield Setting(
        "transparent huge pages",
        "always" if always else "madvise",
        "fewer page table walks over large buffers"
        if always
        else "no compaction while answering; who gains asks for it",
        "tuned's throughput-performance and hpc-compute"
        if always
        else "kernel documentation, admin-guide/mm/transhuge",
        {"file": path, "pick": pick},
        seen[1] if seen else None,
    )


def _gpus(node: Snapshot) -> Sequence[Mapping[str, Any]]:
    gpus = nvidia.answers(node).get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, Mapping) and gpu.get("bus")] if isinstance(gpus, list) else []


def _smi(gpu: Mapping[str, Any], query: str) -> list[str]:
    # In capitals, as `-pm` takes it back.
    bus = full_address(pci.normal_address(str(gpu["bus"])))
    line = f"nvidia-smi -i {bus} --query-gpu={query} --format=csv,noheader,nounits | tr a-z A-Z"
    return ["sh", "-c", f"set -e; {line}"]


def _persistence(node: Snapshot) -> Iterator[Setting]:
    for gpu in _gpus(node):
        bus = pci.normal_address(str(gpu["bus"]))
        yield Setting(
            f"persistence mode {bus}",
            "ENABLED",
            "without it the driver lets the GPU go when nobody uses it, and power limit and clocks with it",
            "NVIDIA: driver persistence (nvidia-persistenced is the better way where it is installed)",
            {"read": _smi(gpu, "persistence_mode"), "set": ["nvidia-smi", "-i", bus, "-pm", "{value}"]},
            {0: "DISABLED", 1: "ENABLED"}.get(gpu.get("persistence", -1)),
        )


def _power(node: Snapshot, watts: int) -> Iterator[Setting]:
    gpus = _gpus(node)
    if not gpus:
        raise CannotTune("power: no GPU answered, so that its range is not known")
    for gpu in gpus:
        bus, limits = pci.normal_address(str(gpu["bus"])), gpu.get("power_limit_range_mw")
        if not isinstance(limits, list) or len(limits) != 2:
            raise CannotTune(f"power: GPU {bus} does not say its range")
        low, high = -(-int(limits[0]) // 1000), int(limits[1]) // 1000
        if not low <= watts <= high:
            raise CannotTune(
                f"power: {watts} W is outside of what GPU {bus} ({gpu.get('name')}) takes: {low} to {high} W"
            )
        now = gpu.get("power_limit_mw")
        seen = f"{now / 1000:.2f}" if isinstance(now, int) else None
        yield Setting(
            f"power limit {bus}",
            f"{watts}.00",
            "asked for; clocks under load follow it, and so do all figures",
            "the card's own range, by NVML",
            {"read": _smi(gpu, "power.limit"), "set": ["nvidia-smi", "-i", bus, "-pl", "{value}"]},
            seen,
            {text: f"{text.removesuffix('.00')} W" for text in (f"{watts}.00", seen) if text},
        )


def full_address(address: str) -> str:
    """The address, if it names one function: setpci writes to all that a shorter one matches. Raises CannotTune."""
    if not re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-1][0-9a-f]\.[0-7]", address):
        raise CannotTune(f"PCI address: {address!r} is not of the form 0000:41:00.0")
    return address


def read_request(address: str, size: int, *, seen: int | None = None, may_ignore: bool = False) -> Setting:
    """MaxReadReq of one function: bits 14:12 of Device Control (CAP_EXP+8), and those alone. Raises CannotTune.

    Bit 15 of that register resets an endpoint, and the lower bits hold MaxPayload and error reporting: only the masked
    form is ever written.
    """
    full_address(address)
    if size not in READ_REQUESTS:
        raise CannotTune(f"MaxReadReq: {size} bytes; there are {', '.join(map(str, READ_REQUESTS))}")
    words = {_bits(each): f"{each} B" for each in READ_REQUESTS}
    how: dict[str, Any] = {
        "read": ["setpci", "-s", address, "CAP_EXP+8.w"],
        "set": ["setpci", "-s", address, "CAP_EXP+8.w={value}:7000"],
        "mask": "7000",
    }
    return Setting(
        f"MaxReadReq {address}",
        _bits(size),
        "asked for; " + MAX_READ_REQUEST,
        "PCI Express Base Specification 7.5.3.4; local-inference-lab/rtx6kpro measured it",
        {**how, "may_ignore": True} if may_ignore else how,
        _bits(seen) if seen in READ_REQUESTS else None,
        words,
        "a switch's port: most ignore it" if may_ignore else "",
    )


def _bits(size: int) -> str:
    return f"{READ_REQUESTS.index(size)}000"


def _above_gpus(tree: Mapping[str, Function]) -> list[Function]:
    """The first function of each GPU and the ports above them, each once, in the order of the tree."""
    found: dict[str, Function] = {}
    for function in tree.values():
        if function.device.is_gpu and function.address.endswith(".0"):
            at: Function | None = function
            while at is not None and at.address not in found:
                found[at.address] = at
                at = tree.get(at.parent or "")
    return [function for address, function in tree.items() if address in found]


def _tree(node: Snapshot) -> Mapping[str, Function]:
    try:
        return node[pcie.TREE]
    except Unknown as unknown:
        raise CannotTune(f"PCIe: {unknown}") from None


def _meant(tree: Mapping[str, Function], only: Sequence[str]) -> list[Function]:
    """The functions whose registers are meant. Raises CannotTune for one that is no GPU and no port above one."""
    there = _above_gpus(tree)
    if not only:
        return there
    by_address = {function.address: function for function in there}
    found = []
    for address in map(str.lower, only):
        if full_address(address) not in by_address:
            what = "is no GPU and no port above one" if address in tree else "is not there"
            raise CannotTune(f"PCI address: {address} {what}; there are {', '.join(by_address)}")
        found.append(by_address[address])
    return found


def _read_requests(node: Snapshot, size: int, only: Sequence[str]) -> Iterator[Setting]:
    for function in _meant(_tree(node), only):
        switch = function.port in (Port.UPSTREAM, Port.DOWNSTREAM)
        yield read_request(function.address, size, seen=function.max_read_request, may_ignore=switch)


# A group, or a device of its own, that is VFIO's: at boot too nothing is taken away from them.
VFIO_IN_USE = ("/dev/vfio/[0-9]*", "/dev/vfio/devices/*")


def _access_control(node: Snapshot, only: Sequence[str]) -> Iterator[Setting]:
    tree = _tree(node)
    # vfio-pci, and what its vendors bring: nvgrace-gpu-vfio-pci, mlx5_vfio_pci
    vms = [function.address for function in tree.values() if "vfio" in (function.device.driver or "")]
    vms += sorted(path for path in node.mapping("nodes") if re.fullmatch(r"/dev/vfio/\d+", path))
    if vms:
        raise CannotTune(f"ACS: {', '.join(vms)} is for virtual machines (VFIO): redirection is what keeps them apart")
    for function in _meant(tree, only):
        if function.acs is None or not function.acs.can_redirect:
            continue
        now = (0x4 if function.acs.request_redirect else 0) | (0x8 if function.acs.completion_redirect else 0)
        address = full_address(function.address)
        yield Setting(
            f"ACS redirect {address}",
            "000",
            "traffic between GPUs of a switch goes up to the CPU and back: 16 instead of 55 GB/s, on AMD a hang",
            "PCI Express Base Specification 7.7.11; NVIDIA/nccl#2079; rtx6kpro",
            {
                "read": ["setpci", "-s", address, "ECAP_ACS+6.w"],
                "set": ["setpci", "-s", address, "ECAP_ACS+6.w={value}:00c"],
                "mask": "00c",
                "unless": dict.fromkeys(VFIO_IN_USE, "virtual machines use VFIO, and redirection keeps them apart"),
            },
            f"{now:03x}",
            {"000": "off", "004": "requests", "008": "completions", "00c": "requests and completions"},
            "takes the isolation between devices away: not with virtual machines",
        )


CPUSET = ("lxc.cgroup2.cpuset.cpus", "lxc.cgroup2.cpuset.mems")
GUEST_CPUS = (
    "Proxmox gives `cores: N` CPUs of all NUMA nodes at random, and moves them; with these lines the guest stays where "
    "its GPUs are, its memory too"
)
GUEST_CPUS_SOURCE = "pve-container, LXC.pm and pvestatd; kernel documentation, cgroup-v2"


def guest_cpus(node: Snapshot, gpus: Sequence[str]) -> tuple[str, ...]:
    """Lines for a guest's conf that keep it on the NUMA node of its GPUs (PCI addresses). Raises CannotTune."""
    tree = _tree(node)
    nodes = {tree[address].numa for address in gpus if address in tree}
    cpus = numa_nodes(node)
    if len(cpus) < 2:
        raise CannotTune("guest CPUs: there is one NUMA node: nothing to keep apart")
    if len(nodes) > 1:
        named = " and ".join(str(number) for number in sorted(nodes, key=str))
        raise CannotTune(f"guest CPUs: its GPUs are on NUMA nodes {named}: it belongs on all of them")
    number = next(iter(nodes), None)
    if number is None or number not in cpus:
        raise CannotTune("guest CPUs: the NUMA node of its GPUs is not known")
    return (f"{CPUSET[0]}: {cpus[number]}", f"{CPUSET[1]}: {number}")


def gpus_of(node: Snapshot, minors: Collection[int]) -> tuple[str, ...]:
    """PCI addresses of the GPUs with these minors (/dev/nvidia<minor>); of all GPUs for none."""
    found = [gpu for gpu in _gpus(node) if not minors or gpu.get("minor") in minors]
    return tuple(pci.normal_address(str(gpu["bus"])) for gpu in found)


def guest_edit(box: Box, *, undo: bool = False) -> remedies.Edit:
    """The guest's configuration with those lines, or (`undo`) without any of their kind.

    Raises CannotTune, also where it has others of their kind: nothing could bring back what somebody wrote there.
    """
    try:
        guest = proxmox.conf_of(box)
    except Unknown as unknown:
        raise CannotTune(f"guest CPUs: {unknown}") from None
    wished = () if undo else guest_cpus(box.node, gpus_of(box.node, access.passed_gpus(guest)))
    there = guest.conf.lxc(*CPUSET)
    if [line.text.strip() for line in there] == list(wished):
        return remedies.Edit(guest, guest.conf)
    if there and not undo:
        raise CannotTune(
            f"guest CPUs: {guest.path} line {there[0].number} says {there[0].text.strip()}; if it may go, "
            "`gpuctl tune --guest-cpus --undo` takes it out, and then again"
        )
    bare = guest.conf.without([line.number for line in there])
    return remedies.Edit(guest, bare.added(wished))
