"""Proxmox VE's container configuration, /etc/pve/lxc/<vmid>.conf: its grammar, its device rules, and edits.

Grammar as in pve-container's parser (src/PVE/LXC/Config.pm): the live part comes first; from the first section header
on, lines belong to pending changes or to a snapshot and there is no way back. Edits keep every other byte.
Device rules as in LXC (src/lxc/cgroups/cgfsng.c, cgroup2_devices.c).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

MAIN, PENDING = "", "pve:pending"

_PENDING = re.compile(r"^\[pve:pending\]\s*$", re.I)
_SECTION = re.compile(r"^\[([a-z][a-z0-9_\-]+)\]\s*$", re.I)
_LXC = re.compile(r"^(lxc\.[a-z0-9_\-.]+)(:|\s*=)\s*(.*?)\s*$")
_KEY = re.compile(r"^([a-z][a-z_]*\d*):\s*(.+?)\s*$")
_OTHER = re.compile(r"^(description|snapstate|delete|parent|snaptime):\s*(.*?)\s*$")


@dataclass(frozen=True)
class Line:
    """One line. kind: blank | comment | header | lxc | key | unparsable. `raw` has the line end."""

    number: int
    raw: str
    kind: str
    section: str
    key: str = ""
    value: str = ""

    @property
    def text(self) -> str:
        return self.raw.rstrip("\r\n")


@dataclass(frozen=True)
class Conf:
    """A parsed configuration; `str(conf)` is the text it came from, byte for byte."""

    lines: tuple[Line, ...]

    def __str__(self) -> str:
        return "".join(line.raw for line in self.lines)

    # -- reading --

    def main(self) -> Iterator[Line]:
        """Lines of the live part."""
        return (line for line in self.lines if line.section == MAIN and line.kind != "header")

    def get(self, key: str) -> str | None:
        """A normal key of the live part; the last one counts, as in Proxmox."""
        found = None
        for line in self.main():
            if line.kind == "key" and line.key == key:
                found = line.value
        return found

    def lxc(self, *keys: str) -> list[Line]:
        """Raw LXC lines of the live part with one of these keys, in order."""
        return [line for line in self.main() if line.kind == "lxc" and line.key in keys]

    def sections(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.section for line in self.lines if line.section != MAIN))

    @property
    def unprivileged(self) -> bool:
        """Unprivileged, which Proxmox also takes any lxc.idmap to mean; such guests may open every device."""
        return (self.get("unprivileged") or "0") == "1" or bool(self.lxc("lxc.idmap", "lxc.id_map"))

    def devices(self) -> dict[int, Passthrough]:
        """devN entries of the live part by N."""
        found = {}
        for line in self.main():
            number = re.fullmatch(r"dev(\d+)", line.key) if line.kind == "key" else None
            if number:
                found[int(number.group(1))] = parse_passthrough(line)
        return dict(sorted(found.items()))

    def mounts(self) -> list[Line]:
        return self.lxc("lxc.mount.entry")

    # -- editing: each returns a new Conf, every other byte kept --

    def replaced(self, number: int, text: str) -> Conf:
        """Line `number` gets another text; its line end stays."""
        return Conf(
            parse(
                "".join(text + line.raw[len(line.text) :] if line.number == number else line.raw for line in self.lines)
            ).lines
        )

    def without(self, numbers: Sequence[int]) -> Conf:
        return parse("".join(line.raw for line in self.lines if line.number not in numbers))

    def added(self, texts: Sequence[str]) -> Conf:
        """New lines at the end of the live part: after its last line that is not blank, before any section."""
        if not texts:
            return self
        end = "\r\n" if any(line.raw.endswith("\r\n") for line in self.lines) else "\n"
        main = [line for line in self.lines if line.section == MAIN and line.kind != "header"]
        at = 0
        for index, line in enumerate(main, start=1):
            if line.kind != "blank":
                at = index
        raws = [line.raw for line in self.lines]
        if at and not raws[at - 1].endswith("\n"):
            raws[at - 1] += end
        new = [text + end for text in texts]
        return parse("".join(raws[:at] + new + raws[at:]))


@dataclass(frozen=True)
class Passthrough:
    """devN: [path=]/dev/x[,mode=0660][,uid=0][,gid=0][,deny-write=1]; mode 0660 and root are what is not said."""

    line: Line
    path: str
    mode: int = 0o660
    uid: int = 0
    gid: int = 0
    deny_write: bool = False
    unparsable: str = ""


def parse_passthrough(line: Line) -> Passthrough:
    path, options, bad = "", {}, []
    for part in line.value.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            path = name
        elif name == "path":
            path = value
        else:
            options[name] = value
    numbers = {}
    for name, base in (("mode", 8), ("uid", 10), ("gid", 10)):
        if name in options:
            try:
                numbers[name] = int(options[name], base)
            except ValueError:
                bad.append(f"{name}={options[name]}")
    if not path.startswith("/dev/"):
        bad.append(f"path {path or 'missing'}")
    return Passthrough(
        line,
        path,
        **numbers,
        deny_write=options.get("deny-write") in ("1", "true", "on", "yes"),
        unparsable=", ".join(bad),
    )


def parse(text: str) -> Conf:
    """Reads a configuration; never fails: what Proxmox could not parse is a line of kind `unparsable`."""
    lines, section = [], MAIN
    for number, raw in enumerate(re.findall(r"[^\n]*\n|[^\n]+", text), start=1):
        bare = raw.rstrip("\r\n")
        line = Line(number, raw, "unparsable", section)
        header = _SECTION.match(bare)
        if not bare.strip():
            line = replace(line, kind="blank")
        elif _PENDING.match(bare):
            section = PENDING
            line = replace(line, kind="header", section=section)
        elif header:
            section = header.group(1)
            line = replace(line, kind="header", section=section)
        elif bare.startswith("#"):
            line = replace(line, kind="comment", value=bare[1:])
        else:
            for pattern, kind in ((_LXC, "lxc"), (_OTHER, "key"), (_KEY, "key")):
                found = pattern.match(bare)
                if found:
                    line = replace(line, kind=kind, key=found.group(1), value=found.groups()[-1])
                    break
        lines.append(line)
    return Conf(tuple(lines))


# -- device rules --


@dataclass(frozen=True)
class Rule:
    """One device rule; None is `*`. `whole` is the bare `a`, which empties the list and turns its default."""

    allow: bool
    kind: str  # a | b | c
    major: int | None
    minor: int | None
    access: str
    whole: bool = False

    def matches(self, kind: str, major: int, minor: int, access: str) -> bool:
        return (
            self.kind in ("a", kind)
            and self.major in (None, major)
            and self.minor in (None, minor)
            and set(access) <= set(self.access)
        )


class Malformed(ValueError):
    """LXC refuses the rule; the message says at what."""


def parse_rule(value: str, *, allow: bool = True) -> Rule:
    """Reads the value of lxc.cgroup2.devices.allow or .deny as LXC does. Raises Malformed.

    Exactly one blank after the type and after the numbers; only the first three letters of the access are read,
    so `rwm # note` is fine and `rw # note` is refused.
    """
    if value == "a":
        return Rule(allow, "a", None, None, "rwm", whole=True)
    if value[:1] not in ("a", "b", "c"):
        raise Malformed(f"the type must be a, b or c, not {value[:1]!r}")
    if not value[1:2].isspace():
        raise Malformed("a blank must follow the type")
    found = re.match(r"(\*|\d+)", value[2:])
    if not found:
        raise Malformed("a major number or * must follow after exactly one blank")
    at = 2 + found.end()
    if value[at : at + 1] != ":":
        raise Malformed("a colon must stand between major and minor")
    minor = re.match(r"(\*|\d+)", value[at + 1 :])
    if not minor:
        raise Malformed("a minor number or * must follow the colon")
    at += 1 + minor.end()
    if not value[at : at + 1].isspace():
        raise Malformed("a blank must stand before the access letters")
    access = value[at + 1 : at + 4]
    letters = access.split("\n")[0]
    for letter in letters:
        if letter not in "rwm":
            raise Malformed(f"the first three access letters must be r, w or m, not {letter!r}")
    numbers = [None if word == "*" else int(word) for word in (found.group(1), minor.group(1))]
    return Rule(allow, value[0], numbers[0], numbers[1], letters)


@dataclass(frozen=True)
class Rules:
    """A list of rules in the order LXC reads them, on top of a default. `base` names where the default comes from."""

    rules: tuple[tuple[Rule, Line | None], ...]
    default: bool  # what the container starts from: deny in privileged, allow in unprivileged guests

    def decide(self, kind: str, major: int, minor: int, access: str = "rw") -> tuple[bool, Line | None]:
        """Allowed? And the line that decides, None for the default.

        A bare `a` empties the list and sets the default. In a list that denies by default only allow rules count,
        in one that allows by default only deny rules do; the newest is asked first, an equal rule replaces the older.
        An empty list allows everything, whatever its default.
        """
        default, source = self.default, None
        kept: list[tuple[Rule, Line | None]] = []
        for rule, line in self.rules:
            if rule.whole:
                kept, default, source = [], rule.allow, line
                continue
            same = [i for i, (old, _) in enumerate(kept) if replace(old, allow=rule.allow) == rule]
            if same:
                kept[same[0]] = (rule, line)
            else:
                kept.append((rule, line))
        if not kept:  # LXC attaches no program for an empty list, not even after `deny a`
            return True, source
        for rule, line in reversed(kept):
            if rule.allow != default and rule.matches(kind, major, minor, access):
                return rule.allow, line
        return default, source

    def allows(self, kind: str, major: int, minor: int, access: str = "rw") -> bool:
        return self.decide(kind, major, minor, access)[0]

    @property
    def allows_everything(self) -> bool:
        return all(self.allows("c", major, minor) for major, minor in ((195, 77), (243, 3), (507, 9), (511, 200)))

    def char_majors(self) -> tuple[int, ...]:
        """Majors of character devices of which some minor may be opened read-write."""
        minors = sorted({0, 1, 255} | {rule.minor for rule, _ in self.rules if rule.minor is not None})
        numbers = {rule.major for rule, _ in self.rules if rule.major is not None and rule.kind != "b"}
        candidates = range(512) if self.allows_everything else sorted(numbers)
        return tuple(m for m in candidates if any(self.allows("c", m, minor) for minor in minors))

    def denied_majors(self) -> tuple[int, ...]:
        """Majors that a rule names and of which no minor may be opened read-write."""
        numbers = {rule.major for rule, _ in self.rules if rule.major is not None and rule.kind != "b"}
        return tuple(sorted(numbers - set(self.char_majors())))


ALLOW_KEYS = ("lxc.cgroup2.devices.allow",)
DENY_KEYS = ("lxc.cgroup2.devices.deny",)
OLD_KEYS = ("lxc.cgroup.devices.allow", "lxc.cgroup.devices.deny")

# What lxc's common.conf gives every privileged container besides `deny a` (lxc/lxc config/templates/common.conf.in).
_COMMON = ("c *:* m", "b *:* m", "c 1:3 rwm", "c 1:5 rwm", "c 1:7 rwm", "c 5:0 rwm", "c 5:1 rwm", "c 5:2 rwm",
           "c 1:8 rwm", "c 1:9 rwm", "c 136:* rwm", "c 10:229 rwm")  # fmt: skip


def rules_of(conf: Conf, passed: dict[str, tuple[str, int, int]] | None = None) -> Rules:
    """The rules the next start of this container will have.

    `passed` says what the node's device nodes are, path -> (c or b, major, minor), for devN entries: Proxmox writes an
    exact rule for each before the raw lxc lines. Malformed rules are left out (the container would not start).
    """
    rules: list[tuple[Rule, Line | None]] = []
    if not conf.unprivileged:
        rules += [(parse_rule(value), None) for value in _COMMON]
    for device in conf.devices().values():
        if passed and device.path in passed:
            kind, major, minor = passed[device.path]
            access = "r" if device.deny_write else "rw"
            rules.append((Rule(True, kind, major, minor, access), device.line))
    for line in conf.lxc(*ALLOW_KEYS, *DENY_KEYS):
        try:
            rules.append((parse_rule(line.value, allow=line.key in ALLOW_KEYS), line))
        except Malformed:
            continue
    return Rules(tuple(rules), default=conf.unprivileged)


def malformed_rules(conf: Conf) -> list[tuple[Line, str]]:
    """Rule lines of the live part that LXC refuses, each with the reason."""
    found = []
    for line in conf.lxc(*ALLOW_KEYS, *DENY_KEYS, *OLD_KEYS):
        try:
            parse_rule(line.value)
        except Malformed as problem:
            found.append((line, str(problem)))
    return found


@dataclass(frozen=True)
class Mount:
    """lxc.mount.entry of a device: what on the node, where in the guest, with which options."""

    line: Line
    source: str
    target: str
    options: tuple[str, ...]


def nvidia_mounts(conf: Conf) -> list[Mount]:
    found = []
    for line in conf.mounts():
        fields = line.value.split()
        if len(fields) >= 4 and "nvidia" in fields[0] and fields[0].startswith("/dev/"):
            target = "/" + fields[1].lstrip("/")
            found.append(Mount(line, fields[0], target, tuple(fields[3].split(","))))
    return found


def nvidia_hooks(conf: Conf, *, acts: bool = False) -> list[Line]:
    """Lines that call LXC's nvidia hook at the guest's start; none where it does nothing (`acts`: it is known to).

    It ends at once unless NVIDIA_VISIBLE_DEVICES is set (LXC's hooks/nvidia): by lxc.environment, or in a file that
    is included.
    """
    lines = [
        line
        for line in conf.lxc("lxc.hook.mount", "lxc.hook.autodev")
        if re.search(r"hooks/nvidia(\s|$)", line.value.strip())
    ]
    for line in conf.lxc("lxc.environment"):
        name, _, value = line.value.strip().strip("\"'").partition("=")
        if name in ("NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION") and value not in ("", "void"):
            return lines
    return lines if acts or conf.lxc("lxc.include") else []
