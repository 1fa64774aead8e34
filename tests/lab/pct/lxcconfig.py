"""What pct makes of a guest's configuration at every start: /var/lib/lxc/<vmid>/config. Pure, but for asking devices.

Source of the lines and their order: update_lxc_config of proxmox/pve-container 6. Left out is what needs Proxmox's
own kernel and packages: AppArmor profiles, the generated seccomp policy, lxcfs, choosing the CPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from . import conf as grammar
from .conf import ConfError, Section


@dataclass(frozen=True)
class Device:
    """A device node of the node: what stat(2) says of it."""

    type: str  # c or b
    major: int
    minor: int


Ask = Callable[[str], Device]  # path -> Device; raises ConfError in pct's words


def devices(section: Section) -> list[tuple[str, dict[str, str]]]:
    """(key, properties) of the devN lines, in the order of N."""
    keys = [key for key in section.keys if re.fullmatch(r"dev\d+", key)]
    return [(key, grammar.device(section.keys[key])) for key in sorted(keys, key=lambda key: int(key[3:]))]


def unprivileged(section: Section) -> bool:
    return section.keys.get("unprivileged") == "1" or has_idmap(section)


def has_idmap(section: Section) -> bool:
    return any(key == "lxc.idmap" for key, _ in section.lxc)


def id_map(section: Section) -> list[tuple[str, int, int, int]]:
    """(u or g, first id in the guest, first id on the node, how many)."""
    if not unprivileged(section):
        return []
    own = [value.split() for key, value in section.lxc if key == "lxc.idmap"]
    return [(kind, int(a), int(b), int(n)) for kind, a, b, n in own] or [
        ("u", 0, 100000, 65536),
        ("g", 0, 100000, 65536),
    ]


def on_node(kind: str, number: int, mapping: list[tuple[str, int, int, int]]) -> int:
    """An id of the guest as the node sees it."""
    for one, inside, outside, count in mapping:
        if one == kind and inside <= number < inside + count:
            return outside + number - inside
    return number


def generate(
    vmid: int,
    section: Section,
    ask: Ask,
    controllers: frozenset[str],
    exists: Callable[[str], bool],
    mtu: str,
    apparmor: bool = False,
) -> str:
    """The LXC configuration. `controllers`: of the node's cgroup v2. Raises ConfError, e.g. for a device not there."""
    keys = section.keys
    folder = f"/var/lib/lxc/{vmid}"
    lines = [
        "lxc.cgroup.relative = 0",
        f"lxc.cgroup.dir.monitor = lxc.monitor/{vmid}",
        f"lxc.cgroup.dir.container = lxc/{vmid}",
        "lxc.cgroup.dir.container.inner = ns",
    ]
    for needed in ("arch", "ostype"):
        if needed not in keys:
            raise ConfError(f"missing '{needed}' - internal error")
    lines.append(f"lxc.arch = {keys['arch']}")
    shared = "/usr/share/lxc/config"
    for kind in ("common", "userns") if unprivileged(section) else ("common",):
        own = f"{shared}/{keys['ostype']}.{kind}.conf"
        lines.append(f"lxc.include = {own if exists(own) else f'{shared}/{kind}.conf'}")
    features = grammar.properties(keys.get("features", ""), "", _FEATURES)
    if apparmor:  # the kernel has it, the node has no profiles
        lines.append("lxc.apparmor.profile = unconfined")
    if features.get("fuse") == "1":
        lines.append("lxc.mount.entry = /dev/fuse dev/fuse none bind,create=file 0 0")
    if unprivileged(section) and features.get("force_rw_sys") != "1":
        lines.append("lxc.mount.auto = sys:mixed")
    for key, device in devices(section):
        if "path" not in device:
            raise ConfError(f"Path is not defined for passthrough device {key}")
        found = ask(device["path"])
        number = f"{found.type} {found.major}:{found.minor}"
        denied = device.get("deny-write") == "1"
        lines.append(f"lxc.cgroup2.devices.allow = {number} {'r' if denied else 'rw'}")
        if denied:
            lines.append(f"lxc.cgroup2.devices.deny = {number} w")
    lines.append("lxc.monitor.unshare = 1")
    if unprivileged(section) and not has_idmap(section):
        lines += ["lxc.idmap = u 0 100000 65536", "lxc.idmap = g 0 100000 65536"]
    if keys.get("console") == "0":
        lines += ["lxc.console.path = none", "lxc.cgroup2.devices.deny = c 5:1 rwm"]
    lines += [
        f"lxc.tty.max = {keys.get('tty', '2')}",
        "lxc.environment = TERM=linux",
        f"lxc.uts.name = {keys.get('hostname') or f'CT{vmid}'}",
    ]
    lines += limits(keys, controllers)
    if "rootfs" not in keys:
        raise ConfError("missing 'rootfs' configuration")
    lines.append(f"lxc.rootfs.path = {folder}/rootfs")
    if "entrypoint" in keys:
        lines.append(f"lxc.init.cmd = {keys['entrypoint']}")
    for key in sorted(keys):
        if indexed := re.fullmatch(r"net(\d+)", key):
            lines += _net(vmid, indexed[1], grammar.net(keys[key]), mtu)
    lines += [f"lxc.environment.runtime = {value}" for value in section.environment]
    lines += [f"{key} = {value}" for key, value in section.lxc]
    return "".join(f"{line}\n" for line in lines)


_FEATURES = frozenset({"mount", "nesting", "keyctl", "fuse", "mknod", "force_rw_sys"})


def limits(keys: dict[str, str], controllers: frozenset[str]) -> list[str]:
    """Lines for what the guest may use, as far as the node's cgroups have the controllers."""
    lines = []
    if "memory" in controllers:
        memory = int(keys.get("memory", "512"))
        high = (memory - 128) * 1024**2 if memory >= 16 * 1024 else memory * 1024 * 1016
        lines += [
            f"lxc.cgroup2.memory.max = {memory * 1024**2}",
            f"lxc.cgroup2.memory.high = {high}",
            f"lxc.cgroup2.memory.swap.max = {int(keys.get('swap', '0')) * 1024**2}",
        ]
    if "cpu" in controllers:
        if float(keys.get("cpulimit", "0")):
            lines.append(f"lxc.cgroup2.cpu.max = {int(100000 * float(keys['cpulimit']))} 100000")
        if "cpuunits" in keys:
            lines.append(f"lxc.cgroup2.cpu.weight = {min(max(int(keys['cpuunits']), 1), 10000)}")
    return lines


def _net(vmid: int, index: str, net: dict[str, str], mtu: str) -> list[str]:
    start = f"lxc.net.{index}"
    lines = [f"{start}.type = veth", f"{start}.veth.pair = veth{vmid}i{index}"]
    if "hwaddr" in net:
        lines.append(f"{start}.hwaddr = {net['hwaddr']}")
    lines += [
        f"{start}.name = {net['name']}",
        f"{start}.mtu = {net.get('mtu', mtu)}",
        f"{start}.script.up = /usr/share/lxc/lxcnetaddbr",
    ]
    if net.get("host-managed") == "1" and net.get("link_down") != "1":
        if net.get("ip", "dhcp") not in ("dhcp", "manual"):
            lines.append(f"{start}.ipv4.address = {net['ip']}")
        if "gw" in net:
            lines.append(f"{start}.ipv4.gateway = {net['gw']}")
        lines.append(f"{start}.flags = up")
    return lines
