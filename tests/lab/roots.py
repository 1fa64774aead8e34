"""The file systems the lab's machines start from: built once with debootstrap, kept in the cache, never written to.

`node` is a Debian with LXC, `guest` the same without it, `shifted` the guest with the ids of an unprivileged guest.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab.layout import SHIFT, NoLab
from tests.lab.requirements import os_release

PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "udev", "openssh-server", "python3", "iproute2", "iputils-ping", "kmod",
    "procps", "psmisc", "pciutils", "numactl", "strace", "libfaketime", "libpam-systemd", "ca-certificates", "rsync",
)  # fmt: skip
NODE_PACKAGES = ("lxc", "uidmap", "bpftool")
# What of these a guest has no use for (with what they pull in).
NOT_IN_GUESTS = ("lxc", "liblxc1", "liblxc-common", "uidmap", "bpftool")
# Part of the cache's key: raise it when the recipe below changes.
RECIPE = "2"


@dataclass(frozen=True)
class Source:
    """An apt source: where the machine itself gets its packages."""

    uri: str
    suite: str
    keyring: str | None


@dataclass(frozen=True)
class Roots:
    node: Path
    guest: Path
    shifted: Path


def cache() -> Path:
    """The folder outside the repository where the roots are kept."""
    if chosen := os.environ.get("GPUCTL_LAB_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuctl-lab"


def roots(say: Callable[[str], None]) -> Roots:
    """The three roots, built when the cache has none for this recipe. Raises NoLab."""
    source = own_source(os_release().get("VERSION_CODENAME", ""), apt_sources())
    recipe = "\n".join([RECIPE, source.suite, *PACKAGES, *NODE_PACKAGES])
    folder = cache() / f"{source.suite}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    found = Roots(folder / "node", folder / "guest", folder / "shifted")
    if folder.exists():
        return found
    cache().mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(cache() / "lock", say):
        if folder.exists():  # somebody else built it while this waited
            return found
        start = time.monotonic()
        say(f"building the machines' file systems from Debian {source.suite}, once; they are kept in {cache()}")
        partial = cache() / f"{folder.name}.partial"
        _remove(partial)
        try:
            _build(partial, source, say)
            partial.rename(folder)
        finally:
            _remove(partial)
        say(f"built in {time.monotonic() - start:.0f} s")
    return found


def apt_sources(etc: Path = Path("/etc/apt")) -> list[tuple[str, str]]:
    """(file name, text) of the machine's apt source files."""
    files = [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]
    files = [file for file in files if file.suffix in (".list", ".sources") and file.is_file()]
    return [(file.name, file.read_text(encoding="utf-8")) for file in files]


def own_source(suite: str, files: list[tuple[str, str]]) -> Source:
    """The source among apt's that has the main component of Debian `suite`. Raises NoLab."""
    for name, text in files:
        for source in _deb822(text) if name.endswith(".sources") else _one_line(text):
            if source.suite == suite:
                return source
    raise NoLab(f"no apt source of this machine has the main component of Debian {suite!r} (looked in /etc/apt)")


def _deb822(text: str) -> Iterator[Source]:
    for paragraph in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        key = ""
        for line in paragraph.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t"):
                fields[key] = f"{fields.get(key, '')}\n{line.strip()}"
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.lower()
                fields[key] = value.strip()
        enabled = fields.get("enabled", "yes").lower() not in ("no", "false", "off", "0")
        if enabled and "deb" in fields.get("types", "").split() and "main" in fields.get("components", "").split():
            keyring = fields.get("signed-by", "")
            for suite in fields.get("suites", "").split():
                for uri in fields.get("uris", "").split():
                    yield Source(uri, suite, keyring if keyring.startswith("/") else None)


def _one_line(text: str) -> Iterator[Source]:
    for line in text.splitlines():
        if said := re.match(r"\s*deb\s+(?:\[([^]]*)\]\s*)?(\S+)\s+(\S+)\s+([^#]*)", line):
            options, uri, suite, components = said.groups()
            keyring = re.search(r"signed-by=(/[^\s,]+)", options or "")
            if "main" in components.split():
                yield Source(uri, suite, keyring[1] if keyring else None)


def _build(folder: Path, source: Source, say: Callable[[str], None]) -> None:
    folder.mkdir(mode=0o700)
    node = folder / "node"
    command = ["debootstrap", "--variant=minbase", f"--include={','.join((*PACKAGES, *NODE_PACKAGES))}"]
    if source.keyring:
        command.append(f"--keyring={source.keyring}")
    # In namespaces of its own: whatever debootstrap mounts and starts is gone with it, and it ends with this process.
    alone = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    environment = {**os.environ, "DPKG_FORCE": "unsafe-io", "DEBIAN_FRONTEND": "noninteractive"}
    log = folder / "debootstrap.log"
    with log.open("wb") as out:
        done = subprocess.run(
            [*alone, *command, source.suite, str(node), source.uri],
            env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    if done.returncode != 0:
        shutil.copyfile(log, cache() / "debootstrap.log")
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise NoLab(f"debootstrap failed: {last} (all of it: {cache() / 'debootstrap.log'})")
    for file in (*node.glob("etc/ssh/ssh_host_*"), *node.glob("var/cache/apt/archives/*.deb"), node / "etc/machine-id"):
        file.unlink(missing_ok=True)
    for stale in node.glob("var/lib/apt/lists/*_*"):
        stale.unlink()
    say("making the guests' from it")
    subprocess.run(["cp", "--archive", str(node), str(folder / "guest")], check=True)
    subprocess.run(
        [*alone, "chroot", str(folder / "guest"), "dpkg", "--purge", "--force-depends", *NOT_IN_GUESTS],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True,
    )  # fmt: skip
    subprocess.run(["cp", "--archive", str(folder / "guest"), str(folder / "shifted")], check=True)
    shift(folder / "shifted")


def shift(root: Path, changed: Path | None = None) -> None:
    """Gives everything under `root` to the ids of an unprivileged guest; what has them already stays.

    With `changed`, the upper layer of an overlay whose merged view is `root`, only what that layer holds: the kernel
    must be told through the merged view, or it goes on showing the old owner.
    """
    walked = changed or root
    for folder, names, files in os.walk(walked):
        for name in (".", *names, *files):
            path = os.path.join(root, os.path.relpath(folder, walked), name)
            if not os.path.lexists(path):  # the layer says that it was deleted
                continue
            found = os.lstat(path)
            uid, gid = (i if i >= SHIFT else i + SHIFT for i in (found.st_uid, found.st_gid))
            if (uid, gid) != (found.st_uid, found.st_gid):
                os.lchown(path, uid, gid)
                if not stat.S_ISLNK(found.st_mode):  # chown takes the setuid bit away
                    os.chmod(path, stat.S_IMODE(found.st_mode))
                    for attribute in os.listxattr(path):
                        if attribute.startswith("system.posix_acl"):  # names groups that the guest does not have
                            os.removexattr(path, attribute)


@contextmanager
def _locked(file: Path, say: Callable[[str], None]) -> Iterator[None]:
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting: somebody else is building the file systems")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
