"""A Proxmox VE node: configurations of its guests, the device rules in force, what guests were started with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuctl.box import Box, Fact, Snapshot, Unknown
from gpuctl.facts import bpf, lxc, nodes

# -- configurations --


@dataclass(frozen=True)
class GuestConf:
    """A guest's configuration file, or what `pct config` printed of it (then `path` is empty)."""

    vmid: int  # 0 where the text does not say
    path: str
    conf: lxc.Conf
    mtime: float | None = None

    def where(self, line: lxc.Line) -> str:
        """`/etc/pve/lxc/200.conf line 12: lxc.cgroup2.devices.allow: c 509:* rwm`"""
        return f"{self.path or 'pct config'} line {line.number}: {line.text.strip()}"

    @property
    def label(self) -> str:
        return f"container {self.vmid}" if self.vmid else "the container"


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _confs(snapshot: Snapshot) -> Mapping[int, GuestConf]:
    found: dict[int, GuestConf] = {}
    for path, answer in snapshot.mapping("files").items():
        name = re.fullmatch(r"/etc/pve/(?:nodes/[^/]+/)?lxc/(\d+)\.conf", path)
        if name and isinstance(answer, str):
            stats = snapshot.mapping("stat").get(path)
            mtime = _number(stats.get("mtime")) if isinstance(stats, Mapping) else None
            vmid = int(name.group(1))
            found[vmid] = GuestConf(vmid, path, lxc.parse(answer), mtime)
    for command in snapshot.mapping("commands"):
        name = re.match(r"pct config (\d+)", command)
        if name and int(name.group(1)) not in found:
            vmid = int(name.group(1))
            found[vmid] = GuestConf(vmid, "", lxc.parse(snapshot.output(command).stdout))
    if not found:
        raise Unknown("configuration of the container: not in the snapshot")
    return found


CONFS: Fact[Mapping[int, GuestConf]] = Fact((("file", "/etc/pve/lxc/*.conf"),), _confs)


def has_gpu(conf: lxc.Conf) -> bool:
    """Is this guest meant to have NVIDIA devices?"""
    for line in conf.main():
        if line.kind in ("lxc", "key") and ("nvidia" in line.value or re.search(r"\b195:", line.value)):
            return True
    return False


def vmid_of(box: Box) -> int:
    """Which container of the node the box's guest is. Raises Unknown where that cannot be told."""
    if box.wanted.vmid is not None:
        return box.wanted.vmid
    for snapshot in box.snapshots:
        vmid = snapshot.document.get("vmid")
        if vmid is not None and str(vmid).isdigit():
            return int(vmid)
    confs = box.node[CONFS]
    if len(confs) == 1:
        return next(iter(confs))
    with_gpu = [vmid for vmid, guest in confs.items() if has_gpu(guest.conf)]
    if len(with_gpu) == 1:
        return with_gpu[0]
    raise Unknown("which container of the node this is")


def conf_of(box: Box) -> GuestConf:
    """The configuration of the box's guest; raises Unknown."""
    vmid = vmid_of(box)
    confs = box.node[CONFS]
    if vmid not in confs:
        raise Unknown(f"configuration of container {vmid}: not in the snapshot")
    return confs[vmid]


def confs_of_interest(box: Box) -> list[GuestConf]:
    """The guest's configuration; on a node looked at by itself, those of all guests that are meant to have GPUs."""
    try:
        return [conf_of(box)]
    except Unknown:
        if not box.node.present or (box.guest.present and box.guest is not box.node):
            return []
        return [guest for guest in (box.node.get(CONFS) or {}).values() if has_gpu(guest.conf)]


# -- device rules in force --


def _programs(answers: Any) -> bpf.Programs:
    if isinstance(answers, Mapping):
        raise Unknown(f"device rules in force: {answers.get('error')}")
    programs = []
    for answer in answers:
        if "xlated" not in answer:
            raise Unknown(f"device rules in force: {answer.get('error', 'instructions not in the snapshot')}")
        try:
            programs.append(bpf.decode(bytes.fromhex(str(answer["xlated"]))))
        except ValueError:
            raise Unknown("device rules in force: instructions are not hexadecimal") from None
    return bpf.Programs(tuple(programs))


@dataclass(frozen=True)
class InForce:
    """Device rules of a running container as the kernel holds them. `source` says how they were read."""

    rules: bpf.Programs | lxc.Rules
    source: str

    def allows(self, kind: str, major: int, minor: int, access: str = "rw") -> bool:
        return self.rules.allows(kind, major, minor, access)

    def majors_text(self) -> str:
        """`195, 226, 509`, or `every device`, or `every device but 509`."""
        if self.rules.allows_everything:
            denied = [str(major) for major in self.rules.denied_majors() if major > 10]
            return "every device" + (f" but {', '.join(denied)}" if denied else "")
        shown = [major for major in self.rules.char_majors() if major not in (1, 4, 5, 10, 136)]
        return ", ".join(str(major) for major in shown) or "no device of a GPU"


def parse_rule_list(lines: list[str]) -> lxc.Rules:
    """Rules as cgroup v1's devices.list shows them, or as people type the effective ones."""
    rules = []
    everything = False
    for line in lines:
        words = " ".join(line.split())
        allow = not re.match(r"(deny|-)\s", words)
        words = re.sub(r"^(allow|deny|\+|-)\s+", "", words)
        if words in ("a", "a *:* rwm", "all"):
            everything = allow
            continue
        if words:
            try:
                rules.append((lxc.parse_rule(words, allow=allow), None))
            except lxc.Malformed as problem:
                raise Unknown(f"device rules: {line.strip()!r}: {problem}") from None
    return lxc.Rules(tuple(rules), default=everything)


def _in_force(snapshot: Snapshot) -> Mapping[int, InForce | str]:
    found: dict[int, InForce | str] = {}
    for vmid, guest in snapshot.mapping("guests").items():
        if not str(vmid).isdigit() or not isinstance(guest, Mapping) or guest.get("device_programs") is None:
            continue
        try:
            programs = _programs(guest["device_programs"])
            count = len(programs.programs)
            found[int(vmid)] = InForce(programs, f"device program{'s' if count != 1 else ''} of {guest.get('cgroup')}")
        except Unknown as unknown:
            found[int(vmid)] = str(unknown)
    for path, text in snapshot.files("/sys/fs/cgroup/devices/", "devices.list").items():
        name = re.search(r"/lxc(?:/|\.payload\.)(\d+)(/|$)", path)
        if name:
            found[int(name.group(1))] = InForce(parse_rule_list(text.splitlines()), path)
    own = snapshot.document.get("vmid")
    owner = int(own) if own is not None and str(own).isdigit() else 0
    typed = snapshot.document.get("device_rules")
    if typed is not None:
        found.setdefault(
            owner, InForce(parse_rule_list([str(line) for line in typed]), "device rules of the running container")
        )
    dumps = [c for c in snapshot.mapping("commands") if re.match(r"bpftool\b.*prog dump xlated", c)]
    if dumps:
        programs = bpf.Programs(tuple(bpf.parse_dump(snapshot.output(c).stdout) for c in dumps))
        found.setdefault(owner, InForce(programs, dumps[0]))
    if not found:
        raise Unknown("device rules in force: not in the snapshot")
    return found


IN_FORCE: Fact[Mapping[int, InForce | str]] = Fact((("section", "guests"), ("section", "device_rules")), _in_force)


def _own_rules(snapshot: Snapshot) -> InForce:
    answers = snapshot.mapping("bpf").get("self")
    if answers is None:
        raise Unknown("device rules of the probe's own control group: not in the snapshot")
    return InForce(_programs(answers), "device programs over the probe's own control group")


# The rules a process inside passes, asked from inside (allowed to root of a privileged guest).
OWN_RULES: Fact[InForce] = Fact((("section", "bpf"),), _own_rules)


def rules_in_force(box: Box) -> InForce:
    """Device rules that the box's running guest is under, from the node, or else from inside; raises Unknown."""
    reasons = []
    try:
        found = box.node[IN_FORCE]
        try:
            vmid = vmid_of(box)
        except Unknown:
            vmid = 0
        answer = found.get(vmid, found.get(0))
        if isinstance(answer, InForce):
            return answer
        reasons.append(answer or f"device rules in force of container {vmid}: not in the snapshot")
    except Unknown as unknown:
        reasons.append(str(unknown))
    for fact in (IN_FORCE,):
        found_inside = box.guest.get(fact) if box.guest is not box.node else None
        for answer in (found_inside or {}).values():
            if isinstance(answer, InForce):
                return answer
    try:
        return box.guest[OWN_RULES]
    except Unknown as unknown:
        reasons.append(str(unknown))
    raise Unknown("; ".join(dict.fromkeys(reasons)))


# -- what a guest was started with --

_PASSED = re.compile(r"^([cb]):(\d+):(\d+):(/dev/\S+)")


def _passed(snapshot: Snapshot) -> Mapping[int, Mapping[str, tuple[str, int, int]]]:
    found: dict[int, dict[str, tuple[str, int, int]]] = {}
    for path, text in snapshot.files("/var/lib/lxc/", "/passthrough/devices").items():
        vmid = path.split("/")[4]
        if vmid.isdigit():
            for line in text.splitlines():
                entry = _PASSED.match(line.strip())
                if entry:
                    kind, major, minor, node = entry.groups()
                    found.setdefault(int(vmid), {})[node] = (kind, int(major), int(minor))
    return found


# The node's record of devN entries at the last start: vmid -> path -> (c or b, major, minor).
PASSED: Fact[Mapping[int, Mapping[str, tuple[str, int, int]]]] = Fact(
    (("file", "/var/lib/lxc/*/passthrough/devices"),), _passed
)


def _guest_nodes(snapshot: Snapshot) -> Mapping[int, nodes.NodeTable]:
    found = {}
    for vmid, guest in snapshot.mapping("guests").items():
        if str(vmid).isdigit() and isinstance(guest, Mapping) and isinstance(guest.get("nodes"), Mapping):
            parsed = {path: nodes.parse_node(path, value) for path, value in guest["nodes"].items()}
            found[int(vmid)] = nodes.NodeTable({p: n for p, n in parsed.items() if n is not None}, whole=True)
    return found


# Device nodes inside each running guest, as the node sees them through /proc/PID/root.
GUEST_NODES: Fact[Mapping[int, nodes.NodeTable]] = Fact((("section", "guests"),), _guest_nodes)


def nodes_in_guest(box: Box) -> nodes.NodeTable:
    """Device nodes of the guest, asked inside or seen from the node; raises Unknown."""
    try:
        return box.guest[nodes.NODES]
    except Unknown as unknown:
        table = (box.node.get(GUEST_NODES) or {}).get(vmid_of(box))
        if table is None:
            raise Unknown(str(unknown)) from None
        return table


def _start_errors(snapshot: Snapshot) -> Mapping[int, str]:
    found: dict[int, str] = {}
    for path in snapshot.mapping("files"):
        name = re.fullmatch(r"/run/pve/ct-(\d+)\.(stderr|warnings)", path)
        if name:
            try:
                text = snapshot.file(path)
            except Unknown:
                continue
            if text.strip():
                found[int(name.group(1))] = (found.get(int(name.group(1)), "") + "\n" + text).strip()
    return found


# What Proxmox kept of the last start of each container that complained.
START_ERRORS: Fact[Mapping[int, str]] = Fact((("file", "/run/pve/ct-*.stderr"),), _start_errors)


def start_messages(box: Box) -> list[str]:
    """Lines about a failing start of the guest: Proxmox's record and what people saw."""
    lines: list[str] = []
    try:
        vmid: int | None = vmid_of(box)
    except Unknown:
        vmid = None
    for snapshot in box.snapshots:
        errors = snapshot.get(START_ERRORS) or {}
        for number, text in errors.items():
            if vmid is None or number == vmid:
                lines += text.splitlines()
        lines += [str(line) for line in snapshot.document.get("errors", ())]
        for command, answer in snapshot.mapping("commands").items():
            if re.match(r"(pct start|lxc-start|journalctl -u pve-container)", command):
                text = answer if isinstance(answer, str) else f"{answer.get('stdout', '')}\n{answer.get('stderr', '')}"
                lines += text.splitlines()
    return list(dict.fromkeys(lines))


def _pve_version(snapshot: Snapshot) -> tuple[int, ...]:
    for line in [*snapshot.mapping("packages").get("lines", ()), *_version_lines(snapshot)]:
        found = re.search(r"\bpve-manager[:/ ]+\s*(\d+)\.(\d+)(?:[.-](\d+))?", str(line))
        if found:
            return tuple(int(part) for part in found.groups() if part is not None)
    raise Unknown("version of Proxmox VE: not in the snapshot")


def _version_lines(snapshot: Snapshot) -> list[str]:
    try:
        return snapshot.output("pveversion -v", "pveversion").stdout.splitlines()
    except Unknown:
        return []


PVE_VERSION: Fact[tuple[int, ...]] = Fact((("section", "packages"), ("command", "pveversion -v")), _pve_version)
