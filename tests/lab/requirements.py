"""What the machine must have for a lab, and the installing of what is missing."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.lab.layout import NoLab

# program -> the Debian package it comes in
PROGRAMS = {
    "systemd-nspawn": "systemd-container",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "gcc": "gcc",  # the NVIDIA libraries of the lab are small C sources
}
INOTIFY = 28  # what the systemds of a lab take of root's instances, and a few
# The programs need these beside them to build C.
COMPANIONS = {"gcc": ("libc6-dev",)}


def os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """The fields of an os-release file; empty if there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return {key: value.strip().strip("\"'") for key, _, value in pairs}


def check() -> None:
    """Raises NoLab when this machine cannot hold a lab, whatever is installed."""
    if platform.system() != "Linux":
        raise NoLab("the lab needs Linux: it is made of namespaces, cgroups and containers")
    if os.geteuid() != 0:
        raise NoLab("the lab needs root: run the same command with sudo")
    if os_release().get("ID") != "debian":
        raise NoLab("the lab needs Debian: it builds its machines with debootstrap from this machine's own apt sources")
    if not Path("/proc/filesystems").read_text().split().count("overlay") and not _modprobe("overlay"):
        raise NoLab("the lab needs overlayfs, which this kernel does not have")


def check_inotify(wanted: int = INOTIFY) -> None:
    """Raises NoLab when root cannot have so many inotify instances more: a systemd without them starts nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    made: list[int] = []
    try:
        while len(made) < wanted:
            descriptor = libc.inotify_init1(os.O_CLOEXEC)
            if descriptor < 0:
                limit = Path("/proc/sys/fs/inotify/max_user_instances")
                raise NoLab(
                    f"this machine has too few inotify instances left for another lab: take one down, or raise"
                    f" fs.inotify.max_user_instances, which is {limit.read_text().strip()}"
                )
            made.append(descriptor)
    finally:
        for descriptor in made:
            os.close(descriptor)


def wait_for_inotify(say: Callable[[str], None], timeout: float = 60) -> None:
    """Waits for other labs to go, if there is no room for one more. Raises NoLab."""
    deadline = time.monotonic() + timeout
    waiting = False
    while True:
        try:
            check_inotify()
            return
        except NoLab:
            if time.monotonic() > deadline:
                raise
        if not waiting:
            say("waiting: other labs leave no inotify instances for this one")
            waiting = True
        time.sleep(1)


def missing() -> list[str]:
    """Packages of which a program is not on this machine."""
    packages: dict[str, None] = {}
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            packages[package] = None
            packages.update(dict.fromkeys(COMPANIONS.get(program, ())))
    return list(packages)


def install_missing(say: Callable[[str], None]) -> None:
    """Installs what is missing with apt-get, saying so. Raises NoLab."""
    packages = missing()
    if not packages:
        return
    say(f"installing on this machine, which the lab needs: {' '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *packages]
    done = subprocess.run(install, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:  # the lists of a fresh machine are empty or old
        subprocess.run(["apt-get", "update", "--quiet"], env=environment, stdin=subprocess.DEVNULL, capture_output=True)
        done = subprocess.run(install, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise NoLab(f"apt-get could not install {' '.join(packages)}: {why}")


def _modprobe(module: str) -> bool:
    try:
        return subprocess.run(["modprobe", module], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
