"""What hangs where: GPUs, the PCIe tree above them, NUMA nodes and the ways between GPUs, as text and as SVG. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from xml.sax.saxutils import escape

from gpuctl.box import Snapshot, Unknown
from gpuctl.facts import nvidia, pci, pcie
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
    nvml = nvidia.answers(node)
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
    states = {gpu.resting for gpu in branch.gpus()}
    note = " (at rest)" if slow and states == {True} else ""
    works = branch.gpu is not None and states == {False}  # where nobody said, it may be at rest
    wrong = "narrow" if narrow else "slow" if slow and works else ""
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
    yield from (f"  {line}" for line in _legend(found))


def _legend(found: Topology) -> list[str]:
    """What the letters mean that are used, and what the driver says of peer-to-peer; a line each."""
    used = {re.sub(r"\d", "", way) for way in found.between.values()}
    lines = ["  ".join(f"{short}: {MEANINGS[short]};" for short in MEANINGS if short in used).rstrip(";")]
    if found.peer_known:
        lines.append(
            f"peer-to-peer: {'every pair, the driver says' if not found.no_peer else 'not every pair, see below'}"
        )
    return lines


BOX, HIGH, GAP, STEP, TOP = 224, 54, 14, 82, 100  # of the drawing, in pixels
CELL, LINE = 52, 22  # of the table of ways between GPUs

_STYLE = (
    "svg{--page:#fff;--text:#1b1f24;--soft:#59636e;--panel:#f3f5f7;--line:#c5ccd3;--box:#fff;--edge:#6b7680;"
    "--gpu:#dcefdc;--gpuedge:#3b7d3b;--wrong:#fde3d8;--wrongedge:#b4441a;--nv:#8fce8f;--near:#c9e7c9;--numa:#f6ecc4;"
    "--far:#f8d9c8}"
    "@media(prefers-color-scheme:dark){svg{--page:#14181d;--text:#e6eaee;--soft:#9aa5b0;--panel:#1d232a;--line:#39424c;"
    "--box:#262e37;--edge:#77828d;--gpu:#1f3b24;--gpuedge:#62b562;--wrong:#4b2416;--wrongedge:#e58a5f;--nv:#2f7d3a;"
    "--near:#27512d;--numa:#4d4519;--far:#552f1f}}"
    "text{font:11px system-ui,sans-serif;fill:var(--text)}.title{font-weight:600;font-size:14px}.name{font-weight:600}"
    ".soft{fill:var(--soft)}.warn{fill:var(--wrongedge)}.page{fill:var(--page)}"
    ".numa{fill:var(--panel);stroke:var(--line)}.gpu{fill:var(--gpu);stroke:var(--gpuedge)}"
    ".port{fill:var(--box);stroke:var(--edge)}.wrong{fill:var(--wrong);stroke:var(--wrongedge)}"
    ".nv{fill:var(--nv)}.near{fill:var(--near)}.node{fill:var(--numa)}.far{fill:var(--far)}"
    "path{stroke:var(--edge);stroke-width:1.5;fill:none}"
)
_NEARNESS = {"NV": "nv", "INT": "near", "PIX": "near", "PXB": "near", "PHB": "node", "NODE": "node", "SYS": "far"}


def as_svg(found: Topology) -> str:
    """The picture for a page, light or dark as the page is: a panel for each NUMA node, root complexes at its top, GPUs
    at its bottom; below, the ways between GPUs and what is to be minded."""
    parts: list[str] = []
    left: float = GAP
    deepest = 1
    alike = len({gpu.name for gpu in found.gpus}) == 1
    for numa in found.numa:
        start, at = left, left + GAP
        for root, ports in numa.roots:
            begin = at
            for port in ports:
                at, depth = _draw(port, at, TOP, parts, named=not alike)
                deepest = max(deepest, depth)
            parts.append(_label(begin, TOP - 8, root, "soft"))
        at = max(at, start + BOX + 2 * GAP)
        memory = f"   {numa.memory_bytes / 2**30:.0f} GiB" if numa.memory_bytes else ""
        title = f"NUMA {numa.number}" if numa.number is not None else "NUMA node not known"
        parts.insert(0, f'<rect x="{start:g}" y="36" width="{at - start:g}" height="@H@" rx="6" class="numa"/>')
        parts.append(_label(start + GAP, 57, title, "title"))
        parts.append(_label(start + GAP, 73, f"CPUs {numa.cpus}{memory}" if numa.cpus else "no CPUs known", "soft"))
        if not numa.roots:
            parts.append(_label(start + GAP, TOP + 14, "no GPU", "soft"))
        left = at + GAP
    height: float = TOP + (deepest - 1) * STEP + HIGH + GAP
    body = "\n".join(parts).replace("@H@", f"{height - 36:g}")
    table, height, wide = _table(found, height + 2 * GAP)
    notes = [_label(GAP, height + 17 * n, f"! {note}", "warn") for n, note in enumerate(found.notes)]
    height += 17 * len(notes)
    # A letter of this size is 6 pixels wide, most of the time.
    left = max(left, wide, *(GAP * 2 + 6 * len(note) for note in found.notes), 0)
    count = len(found.gpus)
    title = f"{found.machine}: {count} GPU{'s' * (count != 1)}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left:g}" height="{height:g}" viewBox="0 0 {left:g} '
            f'{height:g}" role="img" aria-label="{escape(title)}">',
            f"<style>{_STYLE}</style>",
            f'<rect x="0" y="0" width="{left:g}" height="{height:g}" class="page"/>',
            _label(GAP, 24, title + (f" ({found.gpus[0].name})" if alike else ""), "title"),
            body,
            *table,
            *notes,
            "</svg>",
            "",
        ]
    )


def _table(found: Topology, y: float) -> tuple[list[str], float, float]:
    """The ways between GPUs from y on: the drawing, where what follows begins, and how wide it is."""
    gpus = found.gpus
    if len(gpus) < 2:
        return [], y, 0
    names = [gpu.label if gpu.index is not None else gpu.address for gpu in gpus]
    first = GAP + 8 + 7 * max(map(len, names))
    cell = max(CELL, 8 + 7 * max(map(len, names)))
    parts = [_label(GAP, y, "Between GPUs", "title")]
    parts += [_label(first + cell * (n + 0.5), y + 20, name, "soft", "middle") for n, name in enumerate(names)]
    for row, (gpu, name) in enumerate(zip(gpus, names, strict=True)):
        top = y + 28 + LINE * row
        parts.append(_label(GAP, top + 15, name, "soft"))
        for column, other in enumerate(gpus):
            way = found.between.get((gpu.address, other.address))
            if way is None:
                continue
            kind = _NEARNESS.get(re.sub(r"\d", "", way), "far")
            x = first + cell * column
            parts.append(
                f'<rect x="{x + 1:g}" y="{top + 1:g}" width="{cell - 2:g}" height="{LINE - 2}" rx="3" class="{kind}"/>'
            )
            parts.append(_label(x + cell / 2, top + 15, way, at="middle"))
    y += 28 + LINE * len(gpus) + 18
    words = _legend(found)
    parts += [_label(GAP, y + 17 * n, line, "soft") for n, line in enumerate(words)]
    wide = max(first + cell * len(gpus), *(GAP + 6 * len(line) for line in words))
    return parts, y + 17 * len(words) + 6, wide + GAP


def _label(x: float, y: float, text: str, kind: str = "", at: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    anchor = f' text-anchor="{at}"' if at else ""
    return f'<text x="{x:g}" y="{y:g}"{kind}{anchor}>{escape(text)}</text>'


def _draw(branch: Branch, x: float, y: float, parts: list[str], *, named: bool) -> tuple[float, int]:
    """Draws a branch from x on; returns where the next one begins and how many levels it has."""
    at, depth, middles = x, 1, []
    for each in branch.below:
        begin = at
        at, under = _draw(each, at, y + STEP, parts, named=named)
        depth = max(depth, under + 1)
        middles.append((begin + at - GAP) / 2)
    at = max(at, x + BOX + GAP)
    middle = (x + at - GAP) / 2
    turn = y + (HIGH + STEP) / 2
    parts += [f'<path d="M{middle:g} {y + HIGH:g}V{turn:g}H{below:g}V{y + STEP:g}"/>' for below in middles]
    link, wrong = _link(branch)
    kind = "wrong" if wrong else "gpu" if branch.gpu is not None else "port"
    begin, end = middle - BOX / 2 + 8, middle + BOX / 2 - 8
    parts.append(f'<rect x="{begin - 8:g}" y="{y:g}" width="{BOX}" height="{HIGH}" rx="5" class="{kind}"/>')
    parts.append(_label(begin, y + 16, _title(branch), "name"))
    parts.append(_label(end, y + 16, branch.function.address, "soft", "end"))
    parts.append(_label(begin, y + 31, link or "link not known"))
    if named and branch.gpu is not None:
        name = branch.gpu.name.removeprefix("NVIDIA ")
        parts.append(_label(begin, y + 46, name if len(name) <= 32 else f"{name[:31]}…", "soft"))
    else:
        sizes, _, redirects = _sizes(branch.function).partition("  ACS ")
        parts.append(_label(begin, y + 46, sizes, "soft"))
        if redirects:
            parts.append(_label(end, y + 46, f"ACS {redirects}", "warn", "end"))
    return at, depth
