"""What hangs where: GPUs, the PCIe tree above them, NUMA nodes and the ways between GPUs, as text and as SVG. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from xml.sax.saxutils import escape

from gpuctl.box import Snapshot, Unknown
from gpuctl.facts import pci, pcie
from gpuctl.facts.pcie import Function, Port
from gpuctl.tuning import numa_nodes

# NVML's nvmlGpuTopologyLevel_t, in nvidia-smi's letters.
LEVELS = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
MEANINGS = {
    "NV": "NVLink, and how many",
    "PIX": "one switch between them",
    "PXB": "several switches, no CPU",
    "PHB": "through the CPU, one PCIe root",
    "NODE": "through the CPU, one NUMA node",
    "SYS": "through the link between CPUs",
}


@dataclass(frozen=True)
class Gpu:
    index: int | None  # as NVML and nvidia-smi count
    address: str
    name: str
    resting: bool | None  # None: nobody said
    nvlinks: int = 0

    @property
    def label(self) -> str:
        return f"GPU {self.index}" if self.index is not None else "GPU"


@dataclass(frozen=True)
class Branch:
    """A function with what hangs below it. Of GPUs only the first function is drawn."""

    function: Function
    gpu: Gpu | None = None
    below: tuple[Branch, ...] = ()

    def gpus(self) -> Iterator[Gpu]:
        if self.gpu is not None:
            yield self.gpu
        for branch in self.below:
            yield from branch.gpus()

    def all(self) -> Iterator[Branch]:
        yield self
        for branch in self.below:
            yield from branch.all()


@dataclass(frozen=True)
class Numa:
    number: int | None  # None: the machine does not say
    cpus: str
    memory_bytes: int | None
    roots: tuple[tuple[str, tuple[Branch, ...]], ...]  # (root complex, its ports)


@dataclass(frozen=True)
class Topology:
    machine: str
    numa: tuple[Numa, ...]
    between: Mapping[tuple[str, str], str]  # addresses of two GPUs -> PIX, SYS, NV4 ...
    no_peer: tuple[tuple[str, str], ...] = ()  # pairs for which NVML says no peer-to-peer
    peer_known: bool = False
    iommu: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        found = [gpu for numa in self.numa for _, ports in numa.roots for port in ports for gpu in port.gpus()]
        return tuple(sorted(found, key=lambda gpu: (gpu.index is None, gpu.index, gpu.address)))


def topology(node: Snapshot) -> Topology:
    """What the snapshot of a machine says. Raises Unknown where it has no PCIe tree."""
    tree = node[pcie.TREE]
    answers = node.mapping("nvml").get("root")
    nvml: Mapping[str, Any] = answers if isinstance(answers, Mapping) else {}
    gpus = _gpus(tree, nvml)
    branches = [_branch(function, tree, gpus) for function in tree.values() if function.parent not in tree]
    branches = [branch for branch in branches if any(branch.gpus())]
    if not branches:
        raise Unknown("no NVIDIA GPU on the PCI bus")
    cpus = numa_nodes(node)
    if len(cpus) == 1:  # virtual machines say -1 of every device; where there is one node, all is near
        (only,) = cpus
        branches = [
            replace(b, function=replace(b.function, numa=only)) if b.function.numa is None else b for b in branches
        ]
    numbers = sorted({branch.function.numa for branch in branches} | set(cpus), key=lambda n: (n is None, n or 0))
    numa = []
    for number in numbers:
        mine = [branch for branch in branches if branch.function.numa == number]
        roots = {root: tuple(group) for root, group in itertools.groupby(mine, lambda branch: branch.function.root)}
        numa.append(
            Numa(
                number, cpus.get(number, "") if number is not None else "", _memory(node, number), tuple(roots.items())
            )
        )
    between, no_peer, known = _between(gpus, tree, nvml)
    found = Topology(
        node.name, tuple(numa), between, no_peer, known,
        any(function.device.attributes.get("iommu_group") for function in tree.values()),
    )  # fmt: skip
    return Topology(**{**found.__dict__, "notes": tuple(_notes(found))})


def _gpus(tree: Mapping[str, Function], nvml: Mapping[str, Any]) -> dict[str, Gpu]:
    said = {}
    for gpu in nvml.get("gpus") or ():
        if isinstance(gpu, Mapping) and gpu.get("bus"):
            said[pci.normal_address(str(gpu["bus"]))] = gpu
    found = {}
    for address, function in tree.items():
        if function.device.is_gpu:
            gpu = said.get(address, {})
            links, state, index = gpu.get("nvlinks"), gpu.get("pstate"), gpu.get("index")
            found[address] = Gpu(
                index if isinstance(index, int) else None,
                address,
                str(gpu.get("name") or function.device.name or "NVIDIA GPU"),
                state >= 5 if isinstance(state, int) else None,  # P0 to P4 are for work
                len(links) if isinstance(links, list) else 0,
            )
    return found


def _branch(function: Function, tree: Mapping[str, Function], gpus: Mapping[str, Gpu]) -> Branch:
    below = (_branch(each, tree, gpus) for each in tree.values() if each.parent == function.address)
    return Branch(function, gpus.get(function.address), tuple(branch for branch in below if any(branch.gpus())))


def _memory(node: Snapshot, number: int | None) -> int | None:
    text = node.files(f"/sys/devices/system/node/node{number}/meminfo")
    found = re.search(r"MemTotal:\s+(\d+) kB", next(iter(text.values()), ""))
    return int(found[1]) * 1024 if found else None


def _between(
    gpus: Mapping[str, Gpu], tree: Mapping[str, Function], nvml: Mapping[str, Any]
) -> tuple[dict[tuple[str, str], str], tuple[tuple[str, str], ...], bool]:
    """Ways between GPUs, by NVML where it answered; pairs without peer-to-peer; whether that is known."""
    index = {gpu.index: address for address, gpu in gpus.items() if gpu.index is not None}
    found: dict[tuple[str, str], str] = {}
    denied, known = [], False
    for a, b in itertools.combinations(sorted(gpus), 2):
        found[a, b] = found[b, a] = _way(tree[a], tree[b], tree)
    for pair in nvml.get("pairs") or ():
        if pair.get("a") not in index or pair.get("b") not in index:
            continue
        a, b = index[pair["a"]], index[pair["b"]]
        if pair.get("ancestor") in LEVELS:
            found[a, b] = found[b, a] = LEVELS[pair["ancestor"]]
        if pair.get("p2p_nvlink") == 0:
            found[a, b] = found[b, a] = f"NV{min(gpus[a].nvlinks, gpus[b].nvlinks) or ''}"
        if "p2p_read" in pair:
            known = True
            if pair["p2p_read"] != 0:
                denied.append((a, b))
    return found, tuple(denied), known


def _way(a: Function, b: Function, tree: Mapping[str, Function]) -> str:
    """The way between two functions as the tree has it, where NVML does not say."""

    def above(function: Function) -> list[Function]:
        chain: list[Function] = []
        at = tree.get(function.parent or "")
        while at is not None and at not in chain:
            chain.append(at)
            at = tree.get(at.parent or "")
        return chain

    mine, its = above(a), above(b)
    common = next((function for function in mine if function in its), None)
    if common is not None:
        return "PIX" if common.port is Port.UPSTREAM and mine.index(common) <= 1 and its.index(common) <= 1 else "PXB"
    if a.root == b.root:
        return "PHB"
    return "NODE" if a.numa == b.numa and a.numa is not None else "SYS"


def _link(branch: Branch) -> tuple[str, str]:
    """The link of a function in words, and what is not as it should be."""
    function = branch.function
    if function.width is None or function.speed is None:
        return "", ""
    narrow = function.width_max is not None and function.width < function.width_max
    slow = function.speed_max is not None and function.speed < function.speed_max
    width = f"x{function.width} of x{function.width_max}" if narrow else f"x{function.width}"
    speed = f"{function.speed:g} of {function.speed_max:g} GT/s" if slow else f"{function.speed:g} GT/s"
    # A GPU that rests lets its link fall back to 2.5 GT/s, on both ends; its width stays.
    resting = all(gpu.resting for gpu in branch.gpus())
    note = " (at rest)" if slow and resting else ""
    wrong = "narrow" if narrow else "slow" if slow and not resting and branch.gpu is not None else ""
    return f"{width} {speed}{note}", wrong


_KINDS = {Port.ROOT_PORT: "root port", Port.UPSTREAM: "switch", Port.DOWNSTREAM: "switch port"}


def _title(branch: Branch) -> str:
    if branch.gpu is not None:
        return branch.gpu.label
    port = branch.function.port
    return _KINDS.get(port, "bridge") if port is not None else "bridge"


def _sizes(function: Function) -> str:
    if function.max_read_request is None:
        return ""
    redirect = "  ACS redirects" if function.acs is not None and function.acs.redirects else ""
    return f"read {function.max_read_request}  payload {function.max_payload}{redirect}"


def _notes(found: Topology) -> Iterator[str]:
    branches = [b for numa in found.numa for _, ports in numa.roots for port in ports for b in port.all()]
    for branch in branches:
        if branch.gpu is None:
            continue
        link, wrong = _link(branch)
        if wrong == "narrow":
            yield f"{branch.gpu.label} ({branch.function.address}) runs {link}: seat the card anew, or mind its slot"
        elif wrong == "slow":
            yield f"{branch.gpu.label} ({branch.function.address}) works at {link}: a riser, or a limit in the BIOS"
    redirecting = [b.function.address for b in branches if b.function.acs is not None and b.function.acs.redirects]
    if redirecting:
        some = ", ".join(redirecting[:4]) + (" ..." if len(redirecting) > 4 else "")
        yield f"{len(redirecting)} ports send traffic between GPUs through the CPU (ACS redirection): {some}"
    unread = [b.function.address for b in branches if b.function.max_read_request is None]
    if unread:
        yield f"the configuration of {len(unread)} functions was not readable: ask as root for link, MaxReadReq and ACS"
    labels = {gpu.address: gpu.label for gpu in found.gpus}
    if found.no_peer:
        pairs = ", ".join(f"{labels[a]} and {labels[b]}" for a, b in found.no_peer[:4])
        yield f"no peer-to-peer between {pairs}{' ...' if len(found.no_peer) > 4 else ''}: the driver says so"
    if found.iommu:
        yield "the IOMMU is on; iommu=pt leaves it on for virtual machines and out of the way of the GPUs"


def as_text(found: Topology) -> str:
    """The picture for a terminal."""
    count, nodes = len(found.gpus), sum(numa.number is not None for numa in found.numa)
    names = {gpu.name for gpu in found.gpus}
    alike = f" ({names.pop()})" if len(names) == 1 and count > 1 else ""
    lines = [f"{found.machine}: {count} GPU{'s' * (count != 1)}{alike}, {nodes} NUMA node{'s' * (nodes != 1)}"]
    for numa in found.numa:
        name = f"NUMA {numa.number}" if numa.number is not None else "NUMA node not known"
        cpus = f"   CPUs {numa.cpus}" if numa.cpus else ""
        memory = f"   {numa.memory_bytes / 2**30:.0f} GiB" if numa.memory_bytes else ""
        lines += ["", f"{name}{cpus}{memory}"]
        rows: list[tuple[str, str, str]] = []
        for last, (root, ports) in _with_last(numa.roots):
            rows.append((f"{'└─' if last else '├─'} {root}", "", ""))
            for end, port in _with_last(ports):
                rows += _rows(port, "   " if last else "│  ", end, named=not alike)
        left = max((len(row[0]) for row in rows), default=0)
        middle = max((len(row[1]) for row in rows), default=0)
        lines += [f"{a:<{left}}   {b:<{middle}}   {c}".rstrip() for a, b, c in rows]
        if not numa.roots:
            lines.append("   no GPU")
    lines += _matrix(found)
    if found.notes:
        lines += ["", *(f"! {note}" for note in found.notes)]
    return "\n".join(lines) + "\n"


def _with_last(items: Sequence[Any]) -> Iterator[tuple[bool, Any]]:
    return ((position == len(items) - 1, item) for position, item in enumerate(items))


def _rows(branch: Branch, indent: str, last: bool, *, named: bool) -> Iterator[tuple[str, str, str]]:
    title = _title(branch) + (f"  {branch.gpu.name}" if branch.gpu is not None and named else "")
    yield (
        f"{indent}{'└─' if last else '├─'} {branch.function.address}  {title}",
        _link(branch)[0],
        _sizes(branch.function),
    )
    for end, each in _with_last(branch.below):
        yield from _rows(each, indent + ("   " if last else "│  "), end, named=named)


def _matrix(found: Topology) -> Iterator[str]:
    gpus = found.gpus
    if len(gpus) < 2:
        return
    names = [f"{gpu.index}" if gpu.index is not None else gpu.address for gpu in gpus]
    wide = max(4, *(len(name) for name in names), *(len(way) for way in found.between.values()))
    yield ""
    yield "between GPUs  " + " ".join(f"{name:>{wide}}" for name in names)
    for gpu, name in zip(gpus, names, strict=True):
        ways = (found.between.get((gpu.address, other.address), "-") for other in gpus)
        yield f"{name:>12}  " + " ".join(f"{way:>{wide}}" for way in ways)
    used = {re.sub(r"\d", "", way) for way in found.between.values()}
    yield "  ".join(["", *(f"{short}: {MEANINGS[short]};" for short in MEANINGS if short in used)]).rstrip(";")
    if found.peer_known:
        yield f"  peer-to-peer: {'every pair, the driver says' if not found.no_peer else 'not every pair, see below'}"


BOX, HIGH, GAP, STEP = 168, 46, 14, 84  # of the drawing, in pixels


def as_svg(found: Topology) -> str:
    """The picture for a page: a panel for each NUMA node, root complexes at its top, GPUs at its bottom."""
    parts: list[str] = []
    left: float = GAP
    deepest = 1
    for numa in found.numa:
        start, at = left, left + GAP
        for root, ports in numa.roots:
            begin = at
            for port in ports:
                at, depth = _draw(port, at, 96, parts)
                deepest = max(deepest, depth)
            parts.append(_label(begin, 84, root))
        at = max(at, start + BOX + 2 * GAP)
        memory = f", {numa.memory_bytes / 2**30:.0f} GiB" if numa.memory_bytes else ""
        title = f"NUMA {numa.number}" if numa.number is not None else "NUMA node not known"
        parts.insert(0, f'<rect x="{start}" y="34" width="{at - start}" height="@H@" class="numa"/>')
        parts.append(_label(start + GAP, 54, title, "title"))
        parts.append(_label(start + GAP, 68, f"CPUs {numa.cpus}{memory}" if numa.cpus else "no CPUs known"))
        left = at + GAP
    height = 96 + deepest * STEP
    body = "\n".join(parts).replace("@H@", str(height - 34))
    count = len(found.gpus)
    notes = [_label(GAP, height + 20 + 16 * n, f"! {note}") for n, note in enumerate(found.notes)]
    whole = height + 16 * (len(notes) + 1)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left}" height="{whole}" viewBox="0 0 {left} {whole}" '
            f'role="img" aria-label="{escape(found.machine)}: {count} GPUs">',
            "<style>text{font:11px sans-serif;fill:#1b1f24}.title{font-weight:bold;font-size:13px}"
            ".numa{fill:#f3f5f7;stroke:#c5ccd3}.gpu{fill:#dcefdc;stroke:#3b7d3b}.port{fill:#fff;stroke:#6b7680}"
            ".wrong{fill:#fde3d8;stroke:#b4441a}line{stroke:#6b7680;stroke-width:1.5}</style>",
            _label(GAP, 22, f"{found.machine}: {count} GPUs", "title"),
            body,
            *notes,
            "</svg>",
            "",
        ]
    )


def _label(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(text)}</text>'


def _draw(branch: Branch, x: float, y: float, parts: list[str]) -> tuple[float, int]:
    """Draws a branch from x on; returns where the next one begins and how many levels it has."""
    at, depth, middles = x, 1, []
    for each in branch.below:
        begin = at
        at, under = _draw(each, at, y + STEP, parts)
        depth = max(depth, under + 1)
        middles.append((begin + at - GAP) / 2)
    at = max(at, x + BOX + GAP)
    middle = (x + at - GAP) / 2
    parts += [f'<line x1="{middle:g}" y1="{y + HIGH:g}" x2="{below:g}" y2="{y + STEP:g}"/>' for below in middles]
    link, wrong = _link(branch)
    kind = "wrong" if wrong else "gpu" if branch.gpu is not None else "port"
    text = middle - BOX / 2 + 7
    parts.append(f'<rect x="{middle - BOX / 2:g}" y="{y:g}" width="{BOX}" height="{HIGH}" rx="4" class="{kind}"/>')
    parts.append(_label(text, y + 14, f"{_title(branch)}  {branch.function.address}"))
    parts.append(_label(text, y + 27, link or "link not known"))
    parts.append(_label(text, y + 40, branch.gpu.name[:30] if branch.gpu is not None else _sizes(branch.function)))
    return at, depth
