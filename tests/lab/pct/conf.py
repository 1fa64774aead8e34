"""The grammar of /etc/pve/lxc/<vmid>.conf: read and written as pve-container does it. Pure.

Source of the rules: parse_pct_config, write_pct_config and check_type of proxmox/pve-container 6, and encode_text of
pve-common. What matters about it: sections begin with `[name]` and never end; comments belong to a section as its
description and are written back at its top; keys are sorted when written, the last of a key wins when read; raw `lxc.*`
lines keep their order and come last; what cannot be parsed is warned about and lost at the next rewrite.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

PENDING = "pve:pending"

_PENDING = re.compile(r"\[pve:pending\]\s*$", re.ASCII | re.IGNORECASE)
_SNAPSHOT = re.compile(r"\[([a-z][a-z0-9_\-]+)\]\s*$", re.ASCII | re.IGNORECASE)
_LXC = re.compile(r"(lxc\.[a-z0-9_\-.]+)(?::|\s*=)\s*(.*?)\s*$", re.ASCII)
_DESCRIPTION = re.compile(r"description:\s*(.*\S)\s*$", re.ASCII)
_SNAPSTATE = re.compile(r"snapstate:\s*(prepare|delete)\s*$", re.ASCII)
_DELETE = re.compile(r"delete:\s*(.*\S)\s*$", re.ASCII)
_KEY = re.compile(r"([a-z][a-z_]*\d*):\s*(.+?)\s*$", re.ASCII)

_SAFE = frozenset(range(0x20, 0x7F)) - {ord("%"), ord(":")}

# Raw keys that are accepted; besides them everything under lxc.cgroup2., lxc.prlimit. and lxc.net.
LXC_KEYS = frozenset(
    f"lxc.{key}"
    for key in re.findall(
        r"\S+",
        """
        apparmor.profile apparmor.allow_incomplete apparmor.allow_nesting apparmor.raw selinux.context include arch
        uts.name signal.halt signal.reboot signal.stop init.cmd init.cwd init.uid init.gid init.groups pty.max
        console.logfile console.path tty.max devtty.dir hook.autodev autodev kmsg mount.fstab mount.entry mount.auto
        rootfs.mount cap.drop cap.keep seccomp.profile seccomp.notify.proxy seccomp.notify.cookie idmap hook.pre-start
        hook.pre-mount hook.mount hook.start hook.stop hook.post-stop hook.clone hook.destroy hook.version log.level
        log.file start.auto start.delay start.order group environment environment.runtime environment.hooks
        sysctl.fs.mqueue sysctl.kernel.msgmax sysctl.kernel.msgmnb sysctl.kernel.msgmni sysctl.kernel.sem
        sysctl.kernel.shmall sysctl.kernel.shmmax sysctl.kernel.shmmni sysctl.kernel.shm_rmid_forced
        """,
    )
)
LXC_REFUSED = {
    "lxc.rootfs.path": "lxc.rootfs.path is auto generated from rootfs",
    "lxc.rootfs.options": 'lxc.rootfs.options is not supported, please use mount point options in the "rootfs" key',
}
LXC_RENAMED = {
    "lxc.aa_profile": "lxc.apparmor.profile",
    "lxc.aa_allow_incomplete": "lxc.apparmor.allow_incomplete",
    "lxc.console": "lxc.console.path",
    "lxc.devttydir": "lxc.tty.dir",
    "lxc.haltsignal": "lxc.signal.halt",
    "lxc.rebootsignal": "lxc.signal.reboot",
    "lxc.stopsignal": "lxc.signal.stop",
    "lxc.id_map": "lxc.idmap",
    "lxc.init_cmd": "lxc.init.cmd",
    "lxc.loglevel": "lxc.log.level",
    "lxc.logfile": "lxc.log.file",
    "lxc.mount": "lxc.mount.fstab",
    "lxc.network.type": "lxc.net.INDEX.type",
    "lxc.network.link": "lxc.net.INDEX.link",
    "lxc.network.name": "lxc.net.INDEX.name",
    "lxc.pts": "lxc.pty.max",
    "lxc.se_context": "lxc.selinux.context",
    "lxc.seccomp": "lxc.seccomp.profile",
    "lxc.tty": "lxc.tty.max",
    "lxc.utsname": "lxc.uts.name",
}

TYPES = {
    **dict.fromkeys(("onboot", "template", "console", "protection", "unprivileged", "debug"), "boolean"),
    **dict.fromkeys(("tty", "cores", "cpuunits", "memory", "swap", "snaptime"), "integer"),
    "cpulimit": "number",
    **dict.fromkeys(("lock", "startup", "arch", "ostype", "hostname", "searchdomain", "nameserver"), "string"),
    **dict.fromkeys(("timezone", "rootfs", "parent", "cmode", "entrypoint", "features", "hookscript"), "string"),
    **dict.fromkeys(("tags", "env"), "string"),
}
_INDEXED = {"net": 32, "mp": 256, "unused": 256, "dev": 256}


class ConfError(Exception):
    """A value or property that pct does not take; the text is pct's."""


@dataclass
class Section:
    description: str = ""
    keys: dict[str, str] = field(default_factory=dict)  # snapstate and pending's `delete` among them
    environment: list[str] = field(default_factory=list)  # lxc.environment.runtime
    lxc: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Conf:
    main: Section = field(default_factory=Section)
    pending: Section = field(default_factory=Section)
    snapshots: dict[str, Section] = field(default_factory=dict)
    digest: str = ""
    warnings: list[str] = field(default_factory=list)


def parse(text: str, vmid: int) -> Conf:
    """Reads a configuration; what it cannot take goes to `warnings`, in pct's words."""
    conf = Conf(digest=hashlib.sha1(text.encode("utf-8", "surrogateescape")).hexdigest())
    section, in_pending = conf.main, False
    for line in text.split("\n"):
        if not line.strip(" \t\r\f\v"):
            continue
        if _PENDING.match(line):
            section, in_pending = Section(), True
            conf.pending = section
        elif header := _SNAPSHOT.match(line):
            section, in_pending = Section(), False
            conf.snapshots[header[1]] = section
        elif line.startswith("#"):
            section.description += decode(line[1:]) + "\n"
        elif raw := _LXC.match(line):
            _lxc(section, raw[1], raw[2], line, vmid, conf.warnings)
        elif said := _DESCRIPTION.match(line):
            section.description += decode(said[1])
        elif said := _SNAPSTATE.search(line):
            section.keys["snapstate"] = said[1]
        elif said := _DELETE.match(line):
            if in_pending:
                section.keys["delete"] = said[1]
            else:
                conf.warnings.append(f"vm {vmid} - property 'delete' is only allowed in [pve:pending]")
        elif said := _KEY.match(line):
            key, value = said.groups()
            try:
                value = check(key, value)
            except ConfError as error:
                conf.warnings.append(f"vm {vmid} - unable to parse value of '{key}' - {error}")
            section.keys[key] = value
        else:
            conf.warnings.append(f"vm {vmid} - unable to parse config: {line}")
    conf.main.keys.pop("snapstate", None)
    return conf


def _lxc(section: Section, key: str, value: str, line: str, vmid: int, warnings: list[str]) -> None:
    if key == "lxc.environment.runtime":
        section.environment.append(value)
        return
    if key in LXC_REFUSED:
        warnings.append(f"vm {vmid} - {key}: {LXC_REFUSED[key]}")
        return
    if key.startswith("lxc.limit."):
        warnings.append(f"vm {vmid} - {key}: lxc.limit.* was renamed to lxc.prlimit.*")
    elif key in LXC_RENAMED:
        warnings.append(f"vm {vmid} - {key} is deprecated and was renamed to {LXC_RENAMED[key]}")
    elif key.startswith("lxc.cgroup.") and key not in LXC_KEYS:
        warnings.append(f"vm {vmid} - {key} is deprecated, this will be a hard error in the future!")
    elif key not in LXC_KEYS and not key.startswith(("lxc.cgroup2.", "lxc.prlimit.", "lxc.net.")):
        warnings.append(f"vm {vmid} - unable to parse config: {line}")
        return
    section.lxc.append((key, value))


def render(conf: Conf) -> str:
    """Writes a configuration the way every rewrite by pct, the API or the web page does."""
    text = _section(conf.main, snapstate=False)
    if conf.pending.keys or conf.pending.lxc:
        text += f"\n[{PENDING}]\n" + _section(conf.pending)
    for name in sorted(conf.snapshots):
        text += f"\n[{name}]\n" + _section(conf.snapshots[name])
    return text


def _section(section: Section, snapstate: bool = True) -> str:
    lines = [f"#{encode(line)}" for line in _lines(section.description)]
    lines += [f"{key}: {section.keys[key]}" for key in sorted(section.keys) if snapstate or key != "snapstate"]
    lines += [f"lxc.environment.runtime: {value}" for value in section.environment]
    lines += [f"{key}: {value}" for key, value in section.lxc]
    return "".join(f"{line}\n" for line in lines)


def _lines(description: str) -> list[str]:
    """As Perl's split: empty lines at the end are none."""
    lines = description.split("\n")
    while lines and not lines[-1]:
        lines.pop()
    return lines


def encode(text: str) -> str:
    """Everything but printable ASCII, and `:` and `%`, as %XX of its UTF-8 bytes."""
    return "".join(chr(b) if b in _SAFE else f"%{b:02X}" for b in text.encode("utf-8", "surrogatepass"))


def decode(text: str) -> str:
    return unquote_to_bytes(text.encode("utf-8", "surrogateescape")).decode("utf-8", "replace")


def known(key: str) -> bool:
    return kind(key) is not None


def kind(key: str) -> str | None:
    """boolean, integer, number or string; None for a key pct does not know."""
    if key in TYPES:
        return TYPES[key]
    if (indexed := re.fullmatch(r"([a-z]+?)(0|[1-9]\d*)", key)) and indexed[1] in _INDEXED:
        return "string" if int(indexed[2]) < _INDEXED[indexed[1]] else None
    return None


def check(key: str, value: str) -> str:
    """The value as pct keeps it. Raises ConfError in pct's words."""
    type_ = kind(key)
    if type_ is None:
        raise ConfError(f"unknown setting '{key}'")
    if type_ == "boolean":
        if re.fullmatch("1|on|yes|true", value, re.IGNORECASE):
            return "1"
        if re.fullmatch("0|off|no|false", value, re.IGNORECASE):
            return "0"
        raise ConfError(f"type check ('boolean') failed - got '{value}'")
    if type_ == "integer":
        if not re.fullmatch(r"[0-9]+", value):
            raise ConfError(f"type check ('integer') failed - got '{value}'")
        return str(int(value))
    if type_ == "number" and not re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
        raise ConfError(f"type check ('number') failed - got '{value}'")
    if key.startswith("dev") and type_ == "string":
        device(value)
    elif key.startswith("net") and type_ == "string":
        net(value)
    return value


def properties(text: str, default: str, allowed: frozenset[str]) -> dict[str, str]:
    """A comma-separated property string, e.g. `/dev/nvidia0,mode=0666`. Raises ConfError."""
    found: dict[str, str] = {}
    bare = False
    for part in text.split(","):
        if not part.strip():
            continue
        key, equals, value = part.partition("=")
        if not equals:
            if not default:
                raise ConfError("value without key, but schema does not define a default key")
            if bare or default in found:
                raise ConfError(f"duplicate key in comma-separated list property: {default}")
            found[default], bare = part, True
        elif not key or not value:
            raise ConfError("missing key in comma-separated list property")
        elif key in found:
            raise ConfError(f"duplicate key in comma-separated list property: {key}")
        elif key not in allowed:
            raise ConfError(f"invalid key in comma-separated list property: {key}")
        else:
            found[key] = value
    return found


_DEVICE = frozenset({"path", "mode", "uid", "gid", "deny-write"})
_NET = frozenset({"type", "name", "bridge", "hwaddr", "mtu", "ip", "gw", "ip6", "gw6", "firewall", "tag"})
_NET |= {"trunks", "rate", "link_down", "host-managed"}


def device(value: str) -> dict[str, str]:
    """A devN line. Raises ConfError."""
    found = properties(value, "path", _DEVICE)
    path = found.get("path", "")
    wrong = {}
    if path and (not path.startswith("/dev/") or re.search(r"/\.\.?(/|$)", path)):
        wrong["path"] = f"invalid format - {path} is not a valid device path"
    if "mode" in found and not re.fullmatch(r"0[0-7]{3}", found["mode"]):
        wrong["mode"] = "value does not match the regex pattern"
    for key in ("uid", "gid"):
        if key in found and not re.fullmatch(r"[0-9]+", found[key]):
            wrong[key] = f"type check ('integer') failed - got '{found[key]}'"
    if "deny-write" in found:
        try:
            found["deny-write"] = check("onboot", found["deny-write"])
        except ConfError as error:
            wrong["deny-write"] = str(error)
    if wrong:
        raise ConfError("format error\n" + "\n".join(f"{key}: {text}" for key, text in wrong.items()))
    return found


def net(value: str) -> dict[str, str]:
    """A netN line. Raises ConfError."""
    found = properties(value, "", _NET)
    if "name" not in found:
        raise ConfError("format error\nname: property is missing and it is not optional")
    return found


def delete_list(text: str) -> list[str]:
    """Keys of pending's `delete`, without the `!` of a forced one."""
    return [entry.removeprefix("!") for entry in re.split(r"[,;\s]+", text) if entry]


def with_pending(conf: Conf) -> Section:
    """The main section as it will be when pending changes are applied, as `pct config` shows it."""
    section = Section(conf.main.description, dict(conf.main.keys), list(conf.main.environment), list(conf.main.lxc))
    for key, value in conf.pending.keys.items():
        if key not in ("delete", "snapstate"):
            section.keys[key] = value
    for key in delete_list(conf.pending.keys.get("delete", "")):
        section.keys.pop(key, None)
    return section


def apply_pending(conf: Conf, only: frozenset[str] | None = None) -> None:
    """Pending changes become current; with `only`, just these keys."""
    left = [key for key in delete_list(conf.pending.keys.pop("delete", "")) if key in conf.main.keys]
    for key in list(left):
        if only is None or key in only:
            conf.main.keys.pop(key)
            left.remove(key)
    if left:
        conf.pending.keys["delete"] = ",".join(sorted(left))
    for key in list(conf.pending.keys):
        if key != "delete" and (only is None or key in only):
            conf.main.keys[key] = conf.pending.keys.pop(key)
