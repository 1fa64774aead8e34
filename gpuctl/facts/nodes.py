"""Device nodes: what stat(2) and open(2) say of /dev/nvidia*, from the probe or from a pasted `ls -l`."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpuctl.box import Fact, Snapshot, Unknown
from gpuctl.facts.errnos import errno_name

CTL, UVM, UVM_TOOLS, MODESET = "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"


@dataclass(frozen=True)
class Node:
    """One node. kind: char | block | file | dir | link | missing | unreadable."""

    path: str
    kind: str
    mode: int | None = None  # permission bits
    uid: str | None = None  # number or name, as it was told
    gid: str | None = None
    major: int | None = None
    minor: int | None = None
    size: int | None = None
    mtime: float | None = None
    error: str | None = None

    @property
    def exists(self) -> bool:
        return self.kind not in ("missing", "unreadable")

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"{self.path} is not there"
        if self.kind == "unreadable":
            return f"{self.path}: {self.error}"
        return f"{self.path} is {self.describe()}"

    def describe(self) -> str:
        """As ls shows it: `crw-rw-rw- 0 0 511:0`."""
        letter = {"char": "c", "block": "b", "dir": "d", "link": "l"}.get(self.kind, "-")
        mode = stat.filemode(self.mode)[1:] if self.mode is not None else "?????????"
        what = f"{self.major}:{self.minor}" if self.major is not None else f"size {self.size}"
        owner = "" if self.uid is None else f" {self.uid} {self.gid}"
        return f"{letter}{mode}{owner} {what}" + (" (an ordinary file)" if self.kind == "file" else "")


class NodeTable(Mapping[str, Node]):
    """Nodes by path. Where the listing was whole, a path that is not in it is missing; else asking raises Unknown."""

    def __init__(self, nodes: Mapping[str, Node], *, whole: bool) -> None:
        self._nodes = dict(nodes)
        self.whole = whole

    def __getitem__(self, path: str) -> Node:
        if path in self._nodes:
            return self._nodes[path]
        if self.whole and path.startswith("/dev/nvidia"):
            return Node(path, "missing", error="ENOENT")
        raise Unknown(f"{path}: not in the snapshot")

    def __contains__(self, path: object) -> bool:
        return path in self._nodes

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, path: str) -> Node | None:
        """The node, missing or not; None where the snapshot does not say."""
        try:
            return self[path]
        except Unknown:
            return None

    def gpus(self) -> dict[int, Node]:
        """/dev/nvidiaN that are there, by N."""
        found = {}
        for path, node in self._nodes.items():
            number = re.fullmatch(r"/dev/nvidia(\d+)", path)
            if number and node.exists:
                found[int(number.group(1))] = node
        return found


_TYPES = {"c": "char", "b": "block", "-": "file", "d": "dir", "l": "link", "p": "file", "s": "file"}
_LS = re.compile(
    r"^\s*(?P<mode>[-bcdlps][-rwxsStT?]{9})[.+@]?\s+(?:\d+\s+)?(?P<owner>[^\s,]+)\s+(?P<group>[^\s,]+)\s+"
    r"(?:(?P<major>\d+)\s*[,:]\s*(?P<minor>\d+)|(?P<size>\d+)[KMG]?)(?:\s+(?P<rest>.*))?$"
)
_DATE = re.compile(
    r"^(?:[A-Za-z]{3,9}\.?\s+\d{1,2}\.?\s+(?:\d{1,2}:\d{2}(?::\d{2})?|\d{4})"
    r"|\d{1,2}\.?\s+[^\W\d_]{3,9}\.?\s+(?:\d{1,2}:\d{2}|\d{4})"
    r"|\d{4}-\d{2}-\d{2}(?:\s+\d{2}:\d{2}(?::[\d.]+)?)?(?:\s+[+-]\d{4})?)\s+"
)
# of ls and stat, also busybox's, on a path or a name in the folder listed: prose and `status: running` have colons too
_CANNOT = re.compile(
    r"(?:\bcan(?:not|'t) (?:access|statx?|open)|(?:^|[\s:])l?stat|^\s*ls)[ :]+"
    r"[‘'\"]?(?P<path>/dev/[^'’\":\s]+|nvidia[\w*?-]*)[’'\"]?: (?P<why>.+)$"
)
_NO_MATCH = re.compile(r"no match(?:es found)?: /dev/nv", re.I)  # zsh, bash with failglob
_STAT_FILE = re.compile(r"^\s*File:\s*[‘'\"]?(?P<path>/[^'’\"\s]+)")


def _mode_bits(text: str) -> int | None:
    bits = 0
    for index, letter in enumerate(text[1:10]):
        if letter == "?":
            return None
        if letter not in "-ST":
            bits |= 1 << (8 - index)
        if letter in "sS":
            bits |= stat.S_ISUID if index == 2 else stat.S_ISGID
        if letter in "tT":
            bits |= stat.S_ISVTX
    return bits


def parse_ls(text: str, directory: str = "/dev") -> dict[str, Node]:
    """Nodes of `ls -l` output, of stat(1) blocks too. Names without a path belong to the directory last named."""
    nodes: dict[str, Node] = {}
    place = directory.rstrip("/")
    current: str | None = None
    for line in text.splitlines():
        heading = re.fullmatch(r"\s*(/\S+):\s*", line)
        if heading:
            place = heading.group(1).rstrip("/")
            continue
        refused = _CANNOT.search(line)
        if refused:
            path = refused.group("path").strip()
            path = path if path.startswith("/") else f"{place}/{path}"
            if why := errno_name(refused.group("why")):
                nodes[path] = Node(path, "missing" if why == "ENOENT" else "unreadable", error=why)
            continue
        stated = _STAT_FILE.match(line)
        if stated:
            current = stated.group("path")
            continue
        if current:
            nodes.update(_stat_line(line, current, nodes))
            continue
        found = _LS.match(line)
        if found:
            name = _name(found.group("rest") or "")
            if name in ("", ".", ".."):
                continue
            path = name if name.startswith("/") else f"{place}/{name}"
            nodes[path] = _from_match(path, found)
    return nodes


def _name(rest: str) -> str:
    rest = _DATE.sub("", rest.strip()).split(" -> ")[0].strip()
    for word in rest.split():
        if word.startswith(("/", "nvidia")):
            return word
    return rest.split()[-1] if rest.split() else ""


def _from_match(path: str, found: re.Match[str]) -> Node:
    major, minor, size = found.group("major"), found.group("minor"), found.group("size")
    return Node(
        path,
        _TYPES[found.group("mode")[0]],
        _mode_bits(found.group("mode")),
        found.group("owner"),
        found.group("group"),
        int(major) if major else None,
        int(minor) if minor else None,
        int(size) if size else None,
    )


def _stat_line(line: str, path: str, nodes: Mapping[str, Node]) -> dict[str, Node]:
    """One line of stat(1)'s block on `path`: `character special file`, `Device type: 1ff,0`, `Access: (0666/...`."""
    old = nodes.get(path, Node(path, "file"))
    values: dict[str, Any] = {}
    if "special file" in line:
        values["kind"] = "char" if "character" in line else "block"
    number = re.search(r"Device type: *([0-9a-f]+), *([0-9a-f]+)", line)
    if number:
        # coreutils up to 9.0 print it in hexadecimal: "1ff,0" for what ls and later versions write as 511, 0
        decimal = number.group(1).isdigit() and int(number.group(1)) in (195, *range(234, 255), *range(384, 512))
        values["major"] = int(number.group(1), 10 if decimal else 16)
        values["minor"] = int(number.group(2), 10 if decimal else 16)
        values["kind"] = "char" if old.kind == "file" else old.kind
    access = re.search(r"Access: \((\d+)/[-bcdlps]\S{9}\)\s+Uid: \(\s*(\d+)/[^)]*\)\s+Gid: \(\s*(\d+)/", line)
    if access:
        values.update(mode=int(access.group(1), 8), uid=access.group(2), gid=access.group(3))
    size = re.match(r"\s*Size: (\d+)", line)
    if size:
        values["size"] = int(size.group(1))
    if not values:
        return {}
    return {path: Node(**{**old.__dict__, **values})}


def parse_node(path: str, value: object) -> Node | None:
    """One node as the probe gives it (stat as a mapping), or as people write it; None where it is not understood.

    >>> parse_node("/dev/nvidia-uvm", "crw-rw-rw- root root 511:0").major
    511
    """
    if isinstance(value, Mapping):
        return _from_stat(path, value)
    text = str(value).strip()
    low = text.lower()
    found = _LS.match(text)
    if found:
        return _from_match(path, found)
    if re.search(r"regular|ordinary|empty file|plain file", low):
        return Node(path, "file", size=0)
    if low in ("directory", "a directory"):
        return Node(path, "dir")
    number = re.fullmatch(
        r"(?:(?P<type>[cb]|char(?:acter)?(?: special)?(?: file)?|block)\s+)?(?P<major>\d+)\s*[:,]\s*(?P<minor>\d+)"
        r"(?:[ ,]+(?:mode\s+)?(?P<mode>0?[0-7]{3,4}))?(?:[ ,]+(?P<uid>\w+)[: ](?P<gid>\w+))?",
        low,
    )
    if number:
        mode = number.group("mode")
        return Node(
            path,
            "block" if (number.group("type") or "c").startswith("b") else "char",
            int(mode, 8) if mode else None,
            number.group("uid"),
            number.group("gid"),
            int(number.group("major")),
            int(number.group("minor")),
        )
    error = errno_name(text)
    if error is not None and error != "OK":
        return Node(path, "missing" if error == "ENOENT" else "unreadable", error=error)
    return None


def _from_stat(path: str, value: Mapping[str, Any]) -> Node | None:
    if "error" in value:
        error = str(value["error"])
        return Node(path, "missing" if error == "ENOENT" else "unreadable", error=error)
    major = minor = None
    rdev = value.get("rdev")
    if rdev is None and "major" in value:
        rdev = f"{value['major']}:{value.get('minor', 0)}"
    if isinstance(rdev, (list, tuple)):
        rdev = ":".join(str(part) for part in rdev)
    if rdev is not None:
        numbers = re.fullmatch(r"\s*(\d+)\s*[:,]\s*(\d+)\s*", str(rdev))
        if not numbers:
            return None
        major, minor = int(numbers.group(1)), int(numbers.group(2))
    mode, kind = value.get("mode"), value.get("type")
    bits: int | None = None
    if isinstance(mode, int):
        bits = stat.S_IMODE(mode)
        if stat.S_IFMT(mode):
            kind = _TYPES.get(stat.filemode(mode)[0], "file")
    elif mode is not None:
        symbolic = re.fullmatch(r"([-bcdlps])?([-rwxsStT]{9})", str(mode))
        octal = re.fullmatch(r"0?o?([0-7]{3,6})", str(mode))
        if symbolic:
            bits = _mode_bits("-" + symbolic.group(2))
            kind = kind or _TYPES.get(symbolic.group(1) or "")
        elif octal:
            bits = stat.S_IMODE(int(octal.group(1), 8))
        else:
            return None
    if kind is None:
        kind = "char" if major is not None else "file"
    kind = {"c": "char", "b": "block", "f": "file", "regular": "file", "character": "char"}.get(str(kind), str(kind))
    known = {key: None if value.get(key) is None else str(value[key]) for key in ("uid", "gid")}
    for key, other in (("uid", "owner"), ("gid", "group")):
        if known[key] is None and value.get(other) is not None:
            known[key] = str(value[other])
    size, mtime = value.get("size"), value.get("mtime")
    return Node(
        path,
        kind,
        bits,
        known["uid"],
        known["gid"],
        major,
        minor,
        int(size) if size is not None else None,
        float(mtime) if mtime is not None else None,
    )


_LSTAT = re.compile(r"\bl?stat (/dev/nvidia[\w/-]*): no such file or directory", re.I)


def _is_listing(command: str) -> bool:
    return bool(re.match(r"(?:/bin/|/usr/bin/)?(ls|stat|find)\b", command)) and "/dev" in command


def _nodes(snapshot: Snapshot) -> NodeTable:
    nodes: dict[str, Node] = {}
    whole = False
    for command in snapshot.mapping("commands"):
        if not _is_listing(command):
            continue
        try:
            output = snapshot.output(command)
        except Unknown:
            continue
        directory = re.search(r"(/dev/[\w-]+)/?(?:\s|$)", command)
        listed = parse_ls(
            output.text, "/dev" if directory is None or "nvidia-caps" not in command else directory.group(1)
        )
        nodes.update(listed)
        # A glob or the whole folder was listed, and the output shows that it was: what is not in it is not there.
        if re.search(r"/dev/?(\s|$)|/dev/nvidia\*|/dev/nv\*|/dev/\*", command) and (
            any(path.startswith("/dev/") for path in listed) or _NO_MATCH.search(output.text)
        ):
            whole = True
    for line in snapshot.document.get("errors", ()):  # of programs in Go: docker, nvidia-container-cli
        for path in _LSTAT.findall(str(line)):
            nodes.setdefault(path, Node(path, "missing", error="ENOENT"))
    given = snapshot.mapping("nodes")
    for path, value in given.items():
        node = parse_node(path, value)
        if node is None:
            raise Unknown(f"nodes: {path}: not understood: {value!r}")
        nodes[path] = node
    if not nodes and not whole:
        raise Unknown("device nodes: not in the snapshot")
    return NodeTable(nodes, whole=whole or snapshot.has("probe"))


NODES: Fact[NodeTable] = Fact((("section", "nodes"), ("command", "ls -l /dev/nvidia*")), _nodes)


@dataclass(frozen=True)
class Opens:
    """Answers of open(2), read and write: path -> who -> OK or an errno name. who: root | user."""

    by_path: Mapping[str, Mapping[str, str]]

    def of(self, path: str, who: str | None = None) -> str | None:
        """What opening gave; without `who` root's answer, else the user's. None where nobody tried."""
        answers = self.by_path.get(path, {})
        if who is not None:
            return answers.get(who)
        return answers.get("root", answers.get("user"))

    def refused(self, path: str) -> dict[str, str]:
        """who -> errno name, of those who could not open it."""
        return {who: word for who, word in self.by_path.get(path, {}).items() if word not in ("OK", "not a device")}


_STRACE = re.compile(r"open(?:at)?\((?:AT_FDCWD, )?\"(/dev/nvidia[^\"]*)\",[^)]*\)\s*=\s*(-?\d+)\s*(E[A-Z]+)?")
_SHELL = re.compile(
    r"(/dev/nvidia[\w/-]*)['’\"]?:? (Operation not permitted|Permission denied|No such device or address"
    r"|No such file or directory|Input/output error|No such device)",
    re.I,
)


def parse_opens_in(lines: Iterator[str]) -> dict[str, dict[str, str]]:
    """Answers of open(2) that lines tell: strace's, and shells' and programs' messages on a node."""
    found: dict[str, dict[str, str]] = {}
    for line in lines:
        for path, number, name in _STRACE.findall(line):
            found.setdefault(path, {})["root"] = name or ("OK" if int(number) >= 0 else "error")
        if (
            "open" in line.lower()
            or "cannot create" in line
            or line.lstrip().startswith(("cat:", "bash:", "sh:", "dd:"))
        ):
            for path, words in _SHELL.findall(line):
                name = errno_name(words)
                if name:
                    found.setdefault(path, {}).setdefault("root", name)
    return found


def _opens(snapshot: Snapshot) -> Opens:
    lines = [str(line) for line in snapshot.document.get("errors", ())]
    for command in snapshot.mapping("commands"):
        if re.search(r"strace|open|cat |dd |access|python", command):
            answer = snapshot.mapping("commands")[command]
            text = answer if isinstance(answer, str) else f"{answer.get('stdout', '')}\n{answer.get('stderr', '')}"
            lines += text.splitlines()
    found = parse_opens_in(iter(lines))
    for path, answers in snapshot.mapping("open").items():
        if isinstance(answers, Mapping):
            found[path] = {str(who): str(word) for who, word in answers.items()}
        else:
            found[path] = {"root": str(answers)}
    if not found:
        raise Unknown("open: nobody tried to open the device nodes")
    return Opens(found)


OPENS: Fact[Opens] = Fact((("section", "open"),), _opens)


def parse_mounts(text: str) -> list[tuple[str, tuple[str, ...], str]]:
    """(mount point, options of the mount, line) of each line of mountinfo."""
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) > 5:
            found.append((fields[4], tuple(fields[5].split(",")), line.strip()))
    return found


def nodev_mount(snapshot: Snapshot, path: str) -> str | None:
    """The line of mountinfo of the mount that `path` lies on, where it has the flag nodev; None where it has not, or
    where that is not known."""
    try:
        mounts = parse_mounts(snapshot.file("/proc/self/mountinfo"))[::-1]  # the uppermost of several comes first
    except Unknown:
        return None
    over = [mount for mount in mounts if path == mount[0] or path.startswith(mount[0].rstrip("/") + "/")]
    mount = max(over, key=lambda mount: len(mount[0]), default=None)
    return mount[2] if mount is not None and "nodev" in mount[1] else None
