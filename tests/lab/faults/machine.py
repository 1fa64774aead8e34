"""What a machine needs to be of use to anybody: an interpreter, room on its disk, the right time."""

from __future__ import annotations

import os

from tests.lab.lab import Lab
from tests.lab.layout import DISK, NoLab, machine

_ASIDE = "/root/.python3-is-here"


def remove_python3(lab: Lab, machine_: str, *, undo: bool = False) -> None:
    """Take python3 away from a machine."""
    if undo:
        script = f"test ! -d {_ASIDE} || {{ mv {_ASIDE}/* /usr/bin/ && rmdir {_ASIDE}; }}"
    else:
        script = f"mkdir -p {_ASIDE} && mv /usr/bin/python3* {_ASIDE}/"
    lab.check(machine_, ["sh", "-c", script])


def fill_disk(lab: Lab, machine_: str, *, undo: bool = False) -> None:
    """Make the disk of a machine full: not a block is left on its root file system."""
    disk = lab.root(machine_).parent
    found = os.statvfs(disk)
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    inside = str(disk)[str(disk).index("/root/") + len("/root") :]
    done = lab.behind(["mount", "-n", "-o", f"remount,size={DISK if undo else used}", inside])
    if done.returncode != 0:
        raise NoLab(f"resizing the disk of {machine_}: {done.stderr.strip()}")


def shift_clock(lab: Lab, machine_: str, seconds: int, *, undo: bool = False) -> None:
    """Make the clock of a machine differ by some seconds, for every process started from now on."""
    one = machine(machine_)
    if undo:
        lab.check(one.name, ["rm", "-f", "/etc/ld.so.preload", "/etc/faketimerc"])
    else:
        library = lab.check(one.name, ["sh", "-c", "echo /usr/lib/*/faketime/libfaketime.so.1"]).strip()
        lab.check(one.name, ["sh", "-c", "cat > /etc/faketimerc"], stdin=f"{seconds:+d}\n")
        lab.check(one.name, ["sh", "-c", "cat > /etc/ld.so.preload"], stdin=f"{library}\n")
    lab.run(one.name, ["systemctl", "try-restart", "ssh"])
