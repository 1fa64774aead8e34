"""Device nodes of a machine: gone, stale, or an ordinary file in their place. PATH is like /dev/nvidia-uvm."""

from __future__ import annotations

import shlex

from tests.lab.lab import Lab

# A node in a guest is often a mount over a file: what is wrong with it is wrong without the mount.
_BARE = 'while umount "$1" 2>/dev/null; do :; done; rm -f "$1"'


def hide_node(lab: Lab, machine_: str, path: str) -> None:
    """Take a device node away."""
    _sh(lab, machine_, _BARE, path)


def stale_node(lab: Lab, machine_: str, path: str, *, major: int = 508, minor: int = 0) -> None:
    """Put a device node with another major there, as one that was made before the module was reloaded."""
    _sh(lab, machine_, f'{_BARE}; mkdir -p "$(dirname "$1")" && mknod -m 666 "$1" c {major} {minor}', path)


def file_for_node(lab: Lab, machine_: str, path: str) -> None:
    """Put an empty ordinary file where a device node belongs."""
    _sh(lab, machine_, f'{_BARE}; mkdir -p "$(dirname "$1")" && touch "$1" && chmod 000 "$1"', path)


def forbid_node(lab: Lab, machine_: str, path: str, *, mode: str = "0600") -> None:
    """Change the access mode of a device node."""
    _sh(lab, machine_, f'chmod {shlex.quote(mode)} "$1"', path)


def _sh(lab: Lab, machine_: str, script: str, path: str) -> None:
    lab.check(machine_, ["sh", "-c", script, "sh", path])
