"""Passing a device to a guest that runs, as pve-container 6 does it for a new devN."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from . import guests, hooks, lxcconfig
from .conf import Conf
from .guests import Failure

_LIBC = ctypes.CDLL(None, use_errno=True)
# Numbers of these system calls are the same on every architecture.
_OPEN_TREE, _MOVE_MOUNT = 428, 429
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC, _AT_FDCWD = 1, os.O_CLOEXEC, -100
_MOVE_MOUNT_BOTH_EMPTY = 0x04 | 0x40
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000


def add(vmid: int, conf: Conf, device: dict[str, str]) -> None:
    """Makes the node, binds it into the guest, allows it in the device program. Raises Failure, ConfError."""
    found = guests.ask_device(device["path"])
    pid = guests.init_pid(vmid)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _bind(vmid, conf, device, found, pid)
            code = 0
        except Exception as error:
            os.write(2, f"{error}\n".encode())
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        raise Failure(f"could not pass {device['path']} to the running container")
    number = f"{found.type} {found.major}:{found.minor}"
    denied = device.get("deny-write") == "1"
    rules = [
        *([("devices.deny", f"{number} w")] if denied else []),
        ("devices.allow", f"{number} {'r' if denied else 'rw'}"),
    ]
    for key, rule in rules:
        command = ["lxc-cgroup", "-n", str(vmid), key, rule]
        if subprocess.run(command).returncode != 0:
            raise Failure(f"command '{' '.join(command)}' failed: exit code 1")


def _bind(vmid: int, conf: Conf, device: dict[str, str], found: lxcconfig.Device, pid: int) -> None:
    monitor = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    spaces = {
        "monitor": os.open(f"/proc/{monitor}/ns/mnt", os.O_RDONLY),
        "mnt": os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY),
        "user": os.open(f"/proc/{pid}/ns/user", os.O_RDONLY),
    }
    root = os.open(f"/proc/{pid}/root", os.O_RDONLY | os.O_DIRECTORY)
    _setns(spaces["monitor"], _CLONE_NEWNS)
    node = hooks.make_node(Path(f"/var/lib/lxc/{vmid}/passthrough"), device, found, conf)
    tree = _call(_OPEN_TREE, _AT_FDCWD, str(node).encode(), _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC)
    if lxcconfig.unprivileged(conf.main):
        _setns(spaces["user"], _CLONE_NEWUSER)
        os.setgid(0)
        os.setuid(0)
    relative = device["path"].lstrip("/")
    parent = os.path.dirname(relative)
    if parent != "dev":
        os.makedirs(f"/proc/self/fd/{root}/{parent}", exist_ok=True)
    target = os.open(relative, os.O_RDONLY | os.O_CREAT, 0o644, dir_fd=root)
    _setns(spaces["mnt"], _CLONE_NEWNS)
    _call(_MOVE_MOUNT, tree, b"", target, b"", _MOVE_MOUNT_BOTH_EMPTY)


def _setns(descriptor: int, kind: int) -> None:
    if _LIBC.setns(descriptor, kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"failed to enter a namespace of the container: {os.strerror(number)}")


def _call(number: int, *arguments: object) -> int:
    result = int(_LIBC.syscall(number, *arguments))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"system call {number}: {os.strerror(error)}")
    return result
