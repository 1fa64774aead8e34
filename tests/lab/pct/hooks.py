"""What LXC calls on the way: the hooks that pve-container installs, and the script that wires a guest to its bridge.

Mounts made by pre-start live in the monitor's own mount namespace (lxc.monitor.unshare) and go with it.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

from . import conf as grammar
from . import guests, lxcconfig
from .conf import Conf, ConfError
from .guests import Failure

_LIBC = ctypes.CDLL(None, use_errno=True)
MS_BIND = 4096


def hook() -> int:
    """Called as `<hook> <vmid> lxc <type>`."""
    name, section, kind = (*sys.argv[1:4], "", "", "")[:3]
    if not name.isdecimal() or section != "lxc":
        return 0
    vmid = int(name)
    if not (guests.CONFS / f"{vmid}.conf").is_file():
        return 0
    try:
        return {"pre-start": pre_start, "autodev": autodev, "post-stop": post_stop}[kind](vmid)
    except (Failure, ConfError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def pre_start(vmid: int) -> int:
    conf = guests.load(vmid)
    guests.check_lock(conf)
    folder = Path(f"/var/lib/lxc/{vmid}")
    (folder / "reboot").unlink(missing_ok=True)
    mount(volume(conf.main.keys["rootfs"]), os.environ["LXC_ROOTFS_PATH"], "", MS_BIND)
    passthrough = folder / "passthrough"
    passthrough.mkdir(exist_ok=True)
    mount("none", str(passthrough), "tmpfs", 0, "size=8k")
    listed = ""
    for _, device in lxcconfig.devices(conf.main):
        path = device["path"]
        found = guests.ask_device(path)
        make_node(passthrough, device, found, conf)
        listed += f"{found.type}:{found.major}:{found.minor}:{path}\n"
    if listed:
        (passthrough / "devices").write_text(listed)
    return 0


def autodev(vmid: int) -> int:
    """Binds the nodes that pre-start made over empty files in the guest's /dev."""
    root = os.environ["LXC_ROOTFS_MOUNT"]
    listed = Path(f"/var/lib/lxc/{vmid}/passthrough/devices")
    for line in listed.read_text().splitlines() if listed.exists() else ():
        said = re.fullmatch(r"[bc]:\d+:\d+:/dev/(\S+)\s*", line)
        if not said or ".." in said[1]:
            continue
        target = f"{root}/dev/{said[1]}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        try:
            os.mknod(target, stat.S_IFREG)
        except OSError as error:
            raise Failure(f"Could not mknod {target}: {error.strerror}") from None
        mount(f"/var/lib/lxc/{vmid}/passthrough/dev/{said[1]}", target, "", MS_BIND)
    return 0


def post_stop(vmid: int) -> int:
    """Applies pending changes; a guest that reboots itself is stopped and started anew by its unit."""
    conf = guests.load(vmid)
    subprocess.run(["umount", "--recursive", "--", os.environ["LXC_ROOTFS_PATH"]], capture_output=True)
    for key in conf.main.keys:
        if indexed := re.fullmatch(r"net(\d+)", key):
            subprocess.run(["ip", "link", "del", f"veth{vmid}i{indexed[1]}"], capture_output=True)
    generated = False
    if conf.pending.keys:
        grammar.apply_pending(conf)
        guests.save(vmid, conf)
        guests.write_lxc_config(vmid, conf)
        generated = True
    if os.environ.get("LXC_TARGET") == "reboot":
        if not generated:
            guests.write_lxc_config(vmid, conf)
        Path(f"/var/lib/lxc/{vmid}/reboot").touch()
        return 1  # makes lxc-start end instead of starting the guest with what it has in memory
    return 0


def net_up() -> int:
    """lxcnetaddbr: called as `<script> <vmid> net up veth <interface>`."""
    vmid, interface = sys.argv[1], sys.argv[5]
    said = re.fullmatch(rf"veth{vmid}i(\d+)", interface)
    conf = guests.load(int(vmid))
    if not said or f"net{said[1]}" not in conf.main.keys:
        print(f"unable to find network definition for interface '{interface}'", file=sys.stderr)
        return 255
    bridge = grammar.net(conf.main.keys[f"net{said[1]}"]).get("bridge")
    if not bridge or not Path(f"/sys/class/net/{bridge}").exists():
        print(f"bridge '{bridge}' does not exist", file=sys.stderr)
        return 255
    return subprocess.run(["ip", "link", "set", "dev", interface, "up", "master", bridge]).returncode


def volume(rootfs: str) -> str:
    """Where a directory storage keeps `local:200/subvol-200-disk-0.subvol,size=4G`."""
    return f"/var/lib/vz/images/{rootfs.partition(',')[0].partition(':')[2]}"


def make_node(folder: Path, device: dict[str, str], found: lxcconfig.Device, conf: Conf) -> Path:
    """A copy of the node's device node with the guest's mode and owner."""
    target = folder / device["path"].lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(target, stat.S_IFBLK if found.type == "b" else stat.S_IFCHR, os.makedev(found.major, found.minor))
    target.chmod(int(device.get("mode", "0660"), 8))
    mapping = lxcconfig.id_map(conf.main)
    uid, gid = (lxcconfig.on_node(kind, int(device.get(f"{kind}id", "0")), mapping) for kind in "ug")
    os.chown(target, uid, gid)
    return target


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2): the program would look into tables that are not there yet."""
    if _LIBC.mount(source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"could not mount {source} at {target}: {os.strerror(number)}")
