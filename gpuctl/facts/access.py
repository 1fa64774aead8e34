"""May the guest open the devices CUDA needs? What was tried, which rules are in force, which the next start brings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuctl.box import Box, Unknown
from gpuctl.facts import boot, cuda, devices, lxc, nodes, nvidia, pci, place, proxmox
from gpuctl.facts.nodes import CTL, UVM, Node
from gpuctl.finding import Certainty, Severity

MEANING = {
    "EPERM": "the device cgroup refuses it",
    "EACCES": "mode, owner, a nodev mount or a security module refuses it",
    "ENXIO": "no driver answers at this number",
    "ENOENT": "the node is not there",
}


@dataclass(frozen=True)
class Number:
    """A device number CUDA needs, and the node it is behind."""

    path: str
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.path} ({self.major}:{self.minor})"


def uvm_major(box: Box) -> int | None:
    """nvidia-uvm's major of this boot; None where it is not registered or not known."""
    return box.get_kernel(devices.UVM_MAJOR)


def needed(box: Box) -> list[Number]:
    """What CUDA must open: nvidiactl, nvidia-uvm (where its number is known) and the GPUs the guest has nodes of."""
    found = [Number(CTL, devices.NVIDIA_MAJOR, 255)]
    major = uvm_major(box)
    if major is not None:
        found.append(Number(UVM, major, 0))
    table = guest_nodes(box)
    minors = sorted(table.gpus()) if table else []
    return found + [Number(f"/dev/nvidia{n}", devices.NVIDIA_MAJOR, n) for n in minors]


def guest_nodes(box: Box) -> nodes.NodeTable | None:
    try:
        return proxmox.nodes_in_guest(box)
    except Unknown:
        return None


def node_of(box: Box, path: str) -> Node | None:
    """The node in the guest, missing or not; None where nobody looked."""
    table = guest_nodes(box)
    return table.find(path) if table is not None else None


def opened(box: Box, path: str, who: str | None = None) -> str | None:
    """What open(2) gave in the guest: OK or an errno name; None where nobody tried."""
    opens = box.guest.get(nodes.OPENS)
    return opens.of(path, who) if opens is not None else None


def in_force(box: Box) -> proxmox.InForce | None:
    """The running guest's device rules; None where they could not be read."""
    try:
        rules = proxmox.rules_in_force(box)
        rules.allows("c", devices.NVIDIA_MAJOR, 255)
        return rules
    except Unknown:
        return None


def conf(box: Box) -> proxmox.GuestConf | None:
    try:
        return proxmox.conf_of(box)
    except Unknown:
        return None


def privileged(box: Box) -> bool | None:
    """Is the guest a privileged container? By its configuration, else by its uid_map; None where it is not known."""
    guest = conf(box)
    if guest is not None:
        return not guest.conf.unprivileged
    where = box.guest.get(place.PLACE)
    return where.privileged if where is not None else None


def inner(box: Box) -> bool:
    """Is the guest a container of Docker or its like?"""
    where = box.guest.get(place.PLACE)
    return where is not None and where.container in place.INNER


def rules_dropped(box: Box) -> str:
    """What tells that a container lost rules it had: a reload of systemd, or that it worked before; else empty."""
    told = " ".join(str(line) for s in box.snapshots for line in s.document.get("errors", ()))
    found = re.search(
        r"daemon-reload|after (?:some|a few) (?:time|hours|days)|worked (?:fine )?(?:for|before)", told, re.I
    )
    return found.group(0) if found else ""


def started_privileged(box: Box) -> bool:
    """Is the running guest privileged although its configuration says otherwise by now?"""
    guest, where = conf(box), box.guest.get(place.PLACE)
    return guest is not None and guest.conf.unprivileged and where is not None and where.privileged is True


def edited_after_start(box: Box, guest: proxmox.GuestConf) -> float | None:
    """Seconds from the running container's start to the last change of its configuration; negative where the change
    was before it. None where that is not known, or too close to tell."""
    ticks = (box.node.get(boot.GUEST_START_TICKS) or {}).get(guest.vmid)
    probe = box.node.mapping("probe")
    if ticks is None or guest.mtime is None or "clock" not in probe or "monotonic" not in probe:
        return None
    started = float(probe["clock"]) - float(probe["monotonic"]) + ticks / float(probe.get("ticks_per_s", 100))
    return None if abs(guest.mtime - started) <= 1 else guest.mtime - started


def in_container(box: Box) -> bool:
    """Is the guest a container, as far as anything says so?"""
    where = box.guest.get(place.PLACE)
    if where is not None and (where.container or where.pve_node):
        return where.container is not None
    return conf(box) is not None and box.guest is not box.node


def registered(box: Box, number: Number) -> str:
    """`/proc/devices says 511 nvidia-uvm`, empty where it is not known."""
    majors = box.get_kernel(devices.MAJORS)
    names = majors.names(number.major) if majors is not None else ()
    return f"/proc/devices says {number.major} {names[0]}" if names else ""


def opening(box: Box, path: str) -> list[str]:
    """Evidence lines: each answer of open(2) on this node, with what the node is."""
    opens = box.guest.get(nodes.OPENS)
    if opens is None:
        return []
    node = node_of(box, path)
    user = user_name(box)
    lines = []
    for who, word in opens.by_path.get(path, {}).items():
        line = f'open("{path}") as {user if who == "user" else who}: {word}'
        if word in MEANING:
            line += f" ({MEANING[word]})"
        lines.append(line)
    if lines and node is not None:
        lines[0] += f"; the node is {node.describe()}" if node.exists else f"; {node}"
    return lines


def user_name(box: Box) -> str:
    service = box.guest.mapping("service")
    name = service.get("user") or box.wanted.user
    return f"user {name}" if name else "the service's user"


@dataclass(frozen=True)
class Refusal:
    """A device the guest may not open, by the device cgroup. `tried`: open(2) said so; else only the rules do."""

    number: Number
    tried: bool
    evidence: tuple[str, ...]


def refused(box: Box) -> list[Refusal]:
    """Devices CUDA needs that the device cgroup refuses: EPERM of open(2), or the rules in force where nobody tried.

    EPERM on a node whose number nothing has registered still means the cgroup: it is asked before the driver.
    """
    found = []
    rules = in_force(box)
    for number in needed(box):
        word = opened(box, number.path)
        node = node_of(box, number.path)
        actual = number
        if node is not None and node.kind == "char" and node.major is not None and node.minor is not None:
            actual = Number(number.path, node.major, node.minor)
        evidence = opening(box, number.path)
        said = registered(box, actual)
        if said:
            evidence.append(said)
        denied = rules is not None and not rules.allows("c", actual.major, actual.minor)
        if denied and rules is not None:
            evidence.append(f"the running container's rules allow {rules.majors_text()} ({rules.source})")
        if word == "EPERM":
            found.append(Refusal(actual, True, tuple(evidence)))
        elif word in (None, "ENOENT") and denied and in_container(box):
            found.append(Refusal(actual, False, tuple(evidence)))
    return found


def seen(box: Box, refusals: list[Refusal]) -> list[str]:
    """What CUDA says, and how each refusal was seen, as evidence lines."""
    return [*symptom(box), *dict.fromkeys(line for refusal in refusals for line in refusal.evidence)]


def together(lines: list[str]) -> list[str]:
    """Lines that differ only in the number of the GPU become one: /dev/nvidia0-7, 195:0-7."""
    found: dict[str, list[tuple[int, str]]] = {}
    for line in lines:
        number = re.search(r"/dev/nvidia(\d+)", line)
        shape = line
        if number:
            shape = re.sub(rf"(/dev/nvidia|\b{devices.NVIDIA_MAJOR}:){number.group(1)}\b", r"\1#", line)
        found.setdefault(shape, []).append((int(number.group(1)) if number else -1, line))
    merged = []
    for shape, each in found.items():
        numbers = sorted(number for number, _ in each)
        if len(each) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            merged.append(shape.replace("#", f"{numbers[0]}-{numbers[-1]}"))
        else:
            merged += [line for _, line in each]
    return merged


def listed(paths: Iterable[str]) -> str:
    """`/dev/nvidiactl, /dev/nvidia0-7`"""
    return ", ".join(together(sorted(paths)))


def named(numbers: list[Number]) -> str:
    """`/dev/nvidia-uvm (511:0), /dev/nvidia0-7 (195:0-7)`"""
    return ", ".join(together([str(number) for number in numbers]))


@dataclass(frozen=True)
class Outlook:
    """How bad it is that the next start will refuse some devices: now, or only then; seen, or inferred."""

    severity: Severity
    certainty: Certainty
    evidence: tuple[str, ...]
    now: bool  # the running guest may not open them


def outlook(box: Box, numbers: list[Number]) -> Outlook:
    paths = {number.path for number in numbers}
    hit = [refusal for refusal in refused(box) if refusal.number.path in paths]
    if hit:
        return Outlook(Severity.CRITICAL, Certainty.PROVED, tuple(seen(box, hit)), True)
    rules = in_force(box)
    if numbers and all(
        opened(box, n.path) == "OK" or (rules is not None and rules.allows("c", n.major, n.minor)) for n in numbers
    ):
        how = f"its rules in force allow {rules.majors_text()}" if rules is not None else "opening it succeeds"
        lines = (*symptom(box), f"the running container may open it until its next start: {how}")
        return Outlook(Severity.WARNING, Certainty.PROVED, lines, False)
    if works(box):
        return Outlook(Severity.WARNING, Certainty.LIKELY, tuple(symptom(box)), False)
    return Outlook(Severity.CRITICAL, Certainty.LIKELY, tuple(symptom(box)), True)


def to_prove(outlook_: Outlook, path: str) -> str:
    """The observation that would settle it; empty where it is settled."""
    return "" if outlook_.certainty is Certainty.PROVED else f'open("{path}") inside the guest as root: EPERM proves it'


def symptom(box: Box) -> list[str]:
    """What CUDA and NVML say, as evidence lines."""
    lines = []
    views = box.guest.get(cuda.VIEWS)
    for who, view in (views or {}).items():
        name = user_name(box) if who == "user" else who
        if view.hang:
            lines.append(f"as {name}: {view.hang.get('doing') or 'cuInit'} did not return")
        elif view.cu_init is not None or view.dlopen:
            lines.append(str(view) + (f" as {name}" if len(views or {}) > 1 else ""))
    nvml = box.guest.get(nvidia.NVML)
    if nvml is not None:
        lines.append(str(nvml))
    return lines


def works(box: Box) -> bool | None:
    """Does CUDA start, for everyone who was asked? None where nobody was."""
    views = box.guest.get(cuda.VIEWS)
    known = [view.works for view in (views or {}).values() if view.cu_init is not None or view.hang or view.dlopen]
    return all(known) if known else None


def code(box: Box) -> int | None:
    """cuInit's code, the first that is an error; 0 where all is well; None where nobody asked."""
    views = box.guest.get(cuda.VIEWS)
    codes = [view.cu_init for view in (views or {}).values() if view.cu_init is not None]
    return next((number for number in codes if number), codes[0] if codes else None)


DYNAMIC = (*range(234, 255), *range(384, 512))  # majors the kernel hands out (fs/char_dev.c)


@dataclass(frozen=True)
class Stale:
    """A rule of the configuration for a number that no NVIDIA driver has in this boot."""

    line: lxc.Line
    major: int
    owner: str  # who has the number now, empty for nobody


def stale_rules(box: Box, guest: proxmox.GuestConf) -> list[Stale]:
    """Rules of the live part that name a dynamic major which is not NVIDIA's today. By name, never by number: a number
    that another driver has is told with its owner."""
    majors = box.get_kernel(devices.MAJORS)
    if majors is None:
        return []
    found = []
    for line in guest.conf.lxc(*lxc.ALLOW_KEYS):
        try:
            rule = lxc.parse_rule(line.value)
        except lxc.Malformed:
            continue
        if rule.major is None or rule.kind == "b" or rule.major not in DYNAMIC:
            continue
        names = majors.names(rule.major)
        if not any(name.startswith("nvidia") for name in names):
            found.append(Stale(line, rule.major, names[0] if names else ""))
    return found


def next_start(box: Box, guest: proxmox.GuestConf) -> lxc.Rules:
    """Rules the guest will have at its next start; devN entries count with the numbers their nodes must have today."""
    majors = box.get_kernel(devices.MAJORS)
    table = box.node.get(nodes.NODES)
    passed: dict[str, tuple[str, int, int]] = {}
    for device in guest.conf.devices().values():
        node = table.find(device.path) if table is not None else None
        if node is not None and node.kind in ("char", "block") and node.major is not None and node.minor is not None:
            passed[device.path] = (node.kind[0], node.major, node.minor)
            continue
        driver, minor = devices.driver_of(device.path), devices.minor_of(device.path)
        major = majors.of(driver) if majors is not None and driver else None
        if driver == "nvidia":
            major = devices.NVIDIA_MAJOR
        if major is not None and minor is not None:
            passed[device.path] = ("c", major, minor)
    return lxc.rules_of(guest.conf, passed)


def in_conf(guest: proxmox.GuestConf, path: str) -> list[lxc.Line]:
    """Lines of the live part that pass this node: devN and lxc.mount.entry."""
    lines = [device.line for device in guest.conf.devices().values() if device.path == path]
    lines += [mount.line for mount in lxc.nvidia_mounts(guest.conf) if path in (mount.source, mount.target)]
    return lines


def passed_gpus(guest: proxmox.GuestConf) -> set[int]:
    """Minors of the GPUs that the configuration passes by node (devN, mount entries)."""
    paths = [device.path for device in guest.conf.devices().values()]
    paths += [mount.source for mount in lxc.nvidia_mounts(guest.conf)]
    numbers = (re.fullmatch(r"/dev/nvidia(\d+)", path) for path in paths)
    return {int(number.group(1)) for number in numbers if number}


def each_wanted_gpu(box: Box) -> Iterator[int]:
    """Minors of the GPUs the guest is meant to have: those its configuration passes; on a machine all."""
    guest = conf(box)
    if guest is not None and box.guest is not box.node:
        passed = passed_gpus(guest)
        if passed:
            yield from sorted(passed)
            return
    if not in_container(box):
        known = box.get_kernel(nvidia.DRIVER_GPUS)
        yield from sorted(gpu.minor for gpu in known or () if gpu.minor is not None and not gpu.excluded)


def old_key_rules(guest: proxmox.GuestConf, number: Number) -> list[lxc.Line]:
    """`lxc.cgroup.devices.allow` lines that would allow it, were they not for cgroup v1."""
    return _allowing(guest.conf.lxc("lxc.cgroup.devices.allow"), number)


def elsewhere(guest: proxmox.GuestConf, number: Number) -> list[lxc.Line]:
    """Lines of pending changes and snapshots, not of the live part, that would allow or pass it."""
    lines = [line for line in guest.conf.lines if line.section != lxc.MAIN]
    found = _allowing([line for line in lines if line.kind == "lxc" and line.key in lxc.ALLOW_KEYS], number)
    for line in lines:
        if line.kind == "key" and re.fullmatch(r"dev\d+", line.key) and lxc.parse_passthrough(line).path == number.path:
            found.append(line)
    return found


def _allowing(lines: list[lxc.Line], number: Number) -> list[lxc.Line]:
    found = []
    for line in lines:
        try:
            rule = lxc.parse_rule(line.value)
        except lxc.Malformed:
            continue
        if rule.whole or rule.matches("c", number.major, number.minor, "rw"):
            found.append(line)
    return found


def missing_in_conf(box: Box, guest: proxmox.GuestConf) -> list[Number]:
    """What CUDA needs and the guest's next start will refuse because no rule allows it."""
    rules = next_start(box, guest)
    passed = {device.path for device in guest.conf.devices().values()}
    numbers = [n for n in needed(box) if n.path not in passed]
    numbers += [
        Number(f"/dev/nvidia{n}", devices.NVIDIA_MAJOR, n)
        for n in sorted(passed_gpus(guest))
        if all(each.path != f"/dev/nvidia{n}" for each in numbers) and f"/dev/nvidia{n}" not in passed
    ]
    decided = [(n, *rules.decide("c", n.major, n.minor)) for n in numbers]
    return [n for n, allowed, line in decided if not allowed and (line is None or line.key not in lxc.DENY_KEYS)]


def nodes_made_on_demand(box: Box) -> str:
    """Who makes missing nodes when a program first uses the GPU: root's libcuda, or the setuid nvidia-modprobe; empty
    where nobody can: an unprivileged guest may not make nodes, a user without nvidia-modprobe neither."""
    if in_container(box) and privileged(box) is not True:
        return ""
    service = box.guest.mapping("service")
    user = box.wanted.user or service.get("user")
    program = box.guest.mapping("stat").get("/usr/bin/nvidia-modprobe")
    if isinstance(program, dict) and int(program.get("mode", 0)) & 0o4000 and program.get("uid") == 0:
        return "the setuid program nvidia-modprobe"
    if not user or user == "root":
        return "root's libcuda"
    return ""


def without_gpu(box: Box) -> bool:
    """Does the machine have no NVIDIA card, as its PCI bus shows (guests see the machine's), and no node of one either?

    Raises Unknown where nobody looked at the bus.
    """
    host, table = box.node if box.node.present else box.guest, box.guest.get(nodes.NODES)
    if any(device.vendor == pci.NVIDIA for device in host[pci.DEVICES]):
        return False
    return table is None or not any(node.exists and "nvidia" in path for path, node in table.items())


def waits_for_nodes(box: Box) -> bool:
    """Was CUDA asked without the right to make nodes that are missing, and would a program get them made?"""
    if not guarded(box) or not nodes_made_on_demand(box):
        return False
    table = guest_nodes(box)
    missing = [path for path in (CTL, UVM) if table is not None and table.find(path) is not None]
    return any(table is not None and table[path].kind == "missing" for path in missing)


def guarded(box: Box) -> bool:
    """Was CUDA asked by the probe, whose children may not make nodes or load modules?"""
    views = box.guest.get(cuda.VIEWS)
    return any(view.guard for view in (views or {}).values())


def gpu_hosts(box: Box) -> list[proxmox.GuestConf]:
    """Guests of the node whose configuration is known and that are meant to have GPUs."""
    return [guest for guest in proxmox.confs_of_interest(box) if proxmox.has_gpu(guest.conf)]
