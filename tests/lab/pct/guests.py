"""The guests of this node: their configuration files, whether they run, starting and stopping them.

Every path is absolute: this is the node. The texts are those of pve-container 6.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from . import conf as grammar
from . import lxcconfig
from .conf import Conf, ConfError

CONFS = Path("/etc/pve/lxc")
# Not the host name: some hooks run in the guest's own UTS namespace.
NODENAME = Path(os.readlink(CONFS)).parts[1] if CONFS.is_symlink() else ""
RUN = Path("/run/pve")


class Failure(Exception):
    """What pct prints before it gives up. `code` is its exit code: Perl's die leaves the errno of the last call."""

    def __init__(self, text: str, code: int = 255) -> None:
        super().__init__(text)
        self.code = code


def vmids() -> list[int]:
    with contextlib.suppress(OSError):
        return sorted(int(file.stem) for file in CONFS.glob("*.conf") if file.stem.isdecimal())
    return []


def load(vmid: int) -> Conf:
    """The configuration of a guest of this node; what it cannot take is warned about. Raises Failure."""
    name = f"nodes/{NODENAME}/lxc/{vmid}.conf"
    try:
        text = (Path("/etc/pve") / name).read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        raise Failure(f"Configuration file '{name}' does not exist", 2) from None
    conf = grammar.parse(text, vmid)
    for warning in conf.warnings:
        print(warning, file=sys.stderr)
    return conf


def save(vmid: int, conf: Conf) -> None:
    """Written whole and renamed, as the cluster file system wants it."""
    file = CONFS / f"{vmid}.conf"
    new = file.with_name(f"{file.name}.tmp.{os.getpid()}")
    new.write_bytes(grammar.render(conf).encode("utf-8", "surrogateescape"))
    new.rename(file)


@contextlib.contextmanager
def locked(vmid: int, timeout: float = 10) -> Iterator[None]:
    """The lock every change of a guest takes. Raises Failure."""
    file = Path(f"/run/lock/lxc/pve-config-{vmid}.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lock:
        deadline = time.monotonic() + timeout
        waited = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waited:
                    print("trying to acquire lock...", file=sys.stderr)
                    waited = True
                if time.monotonic() > deadline:
                    raise Failure(f"can't lock file '{file}' - got timeout") from None
                time.sleep(0.05)
        if waited:
            print(" OK", file=sys.stderr)
        yield


def check_lock(conf: Conf) -> None:
    if lock := conf.main.keys.get("lock"):
        raise Failure(f"CT is locked ({lock})")


def running(vmid: int) -> bool:
    """Whether the guest's monitor listens, which is how pct tells it too."""
    wanted = f"@/var/lib/lxc/{vmid}/command"
    return any(line.split()[-1] == wanted for line in Path("/proc/net/unix").read_text().splitlines())


def init_pid(vmid: int) -> int:
    said = subprocess.run(["lxc-info", "-n", str(vmid), "-p", "-H"], capture_output=True, text=True).stdout.strip()
    if not said.isdecimal():
        raise Failure(f"unable to get PID for CT {vmid} (not running?)")
    return int(said)


def ask_device(path: str) -> lxcconfig.Device:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise ConfError(f"Device {path} does not exist") from None
    except OSError:
        raise ConfError(f"Error accessing device {path}") from None
    if not (stat.S_ISBLK(found.st_mode) or stat.S_ISCHR(found.st_mode)):
        raise ConfError(f"{path} is not a device")
    kind = "b" if stat.S_ISBLK(found.st_mode) else "c"
    return lxcconfig.Device(kind, os.major(found.st_rdev), os.minor(found.st_rdev))


def write_lxc_config(vmid: int, conf: Conf) -> None:
    """Generates /var/lib/lxc/<vmid>/config. Raises Failure."""
    folder = Path(f"/var/lib/lxc/{vmid}")
    if conf.main.keys.get("template") == "1":
        (folder / "config").unlink(missing_ok=True)
        return
    bridge = Path("/sys/class/net/vmbr0/mtu")
    mtu = bridge.read_text().strip() if bridge.exists() else "1500"
    enabled = Path("/sys/module/apparmor/parameters/enabled")
    apparmor = enabled.exists() and enabled.read_text().startswith("Y")
    try:
        text = lxcconfig.generate(vmid, conf.main, ask_device, controllers(), os.path.exists, mtu, apparmor)
    except ConfError as error:
        raise Failure(str(error)) from None
    (folder / "rootfs").mkdir(parents=True, exist_ok=True)
    new = folder / "config.tmp"
    new.write_text(text, encoding="utf-8", errors="surrogateescape")
    new.rename(folder / "config")


def start(vmid: int, conf: Conf, *, debug: bool = False) -> None:
    """Pending changes, the LXC configuration, then the unit; waits until the guest runs. Raises Failure."""
    if conf.pending.keys:
        grammar.apply_pending(conf)
        save(vmid, conf)
        conf = load(vmid)
    write_lxc_config(vmid, conf)
    RUN.mkdir(exist_ok=True)
    stderr = RUN / f"ct-{vmid}.stderr"
    stderr.unlink(missing_ok=True)
    unit = f"pve-container@{vmid}"
    done = subprocess.run(["systemctl", "start", unit], stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise Failure(f"command 'systemctl start {unit}' failed: exit code {done.returncode}")
    if not _came_up(vmid, unit):
        print_stderr(vmid)
        raise Failure(f"startup for container '{vmid}' failed")
    if debug:
        print_stderr(vmid)
    warnings = RUN / f"ct-{vmid}.warnings"
    with contextlib.suppress(OSError):
        for line in warnings.read_text().splitlines():
            print(f"WARN: {line.strip()}", file=sys.stderr)
        warnings.unlink()


def _came_up(vmid: int, unit: str) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        said = subprocess.run(["lxc-info", "-n", str(vmid), "-s", "-H"], capture_output=True, text=True).stdout.strip()
        if said == "RUNNING":
            return True
        active = subprocess.run(["systemctl", "is-active", unit], capture_output=True, text=True).stdout.strip()
        if active in ("failed", "inactive"):
            return False
        time.sleep(0.2)
    print("problem with monitor socket, but continuing anyway: got timeout", file=sys.stderr)
    return True


def limit(vmid: int, keys: dict[str, str]) -> None:
    """Gives a running guest its limits, as far as the node's cgroups have the controllers."""
    for line in lxcconfig.limits(keys, controllers()):
        name, _, value = line.removeprefix("lxc.cgroup2.").partition(" = ")
        (Path("/sys/fs/cgroup/lxc") / str(vmid) / name).write_text(value)


def controllers() -> frozenset[str]:
    return frozenset(Path("/sys/fs/cgroup/cgroup.controllers").read_text().split())


def print_stderr(vmid: int) -> None:
    """What lxc-start complained of, without its prefixes."""
    with contextlib.suppress(OSError):
        for line in (RUN / f"ct-{vmid}.stderr").read_text(errors="replace").splitlines():
            said = re.fullmatch(rf"[ \t]*(?:lxc-start:?\s+{vmid}:?\s*\S+\s*)?(.*?)[ \t]*", line)
            print(said[1] if said else line, file=sys.stderr)


def stop(vmid: int, *, kill: bool, timeout: int | None = None, kill_after: bool = False) -> None:
    """Returns when the guest is gone. Raises Failure."""
    # The monitor closes this when it ends: nothing to poll for.
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"\0/var/lib/lxc/{vmid}/command")
    except ConnectionRefusedError:
        return
    command = ["lxc-stop", "-n", str(vmid)]
    if kill:
        command.append("--kill")
    else:
        if not kill_after:
            command.append("--nokill")
        if timeout is not None:
            command += ["--timeout", str(timeout)]
    with connection:
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=None if timeout is None else timeout + 5)
            if done.returncode != 0:
                print(f"command '{' '.join(command)}' failed: exit code {done.returncode}", file=sys.stderr)
        except subprocess.TimeoutExpired:
            print(f"command '{' '.join(command)}' failed: got timeout", file=sys.stderr)
        connection.settimeout(5 if timeout is None else max(timeout, 5) if kill_after else 1)
        with contextlib.suppress(OSError):
            if not connection.recv(1):
                _settle(vmid)
                return
    raise Failure("container did not stop")


def _settle(vmid: int) -> None:
    """Until the unit has noticed, as the next start would otherwise meet a unit that is still stopping."""
    for _ in range(200):
        said = subprocess.run(
            ["systemctl", "is-active", f"pve-container@{vmid}"], capture_output=True, text=True
        ).stdout.strip()
        if said in ("inactive", "failed", "unknown"):
            return
        time.sleep(0.2)


def reboot(vmid: int, timeout: int | None) -> None:
    """Stop and start: the configuration is read anew. Does nothing to a guest that is off. Raises Failure."""
    with locked(vmid):
        if not running(vmid):
            return
        stop(vmid, kill=False, timeout=timeout, kill_after=True)
        start(vmid, load(vmid))


def start_order(conf: Conf) -> dict[str, int]:
    """order, up, down of a `startup` line."""
    found: dict[str, int] = {}
    for part in conf.main.keys.get("startup", "").split(","):
        said = re.fullmatch(r"\s*(?:(order|up|down)=)?(\d+)\s*", part)
        if said:
            found[said[1] or "order"] = int(said[2])
    return found


def start_all() -> int:
    """What pve-guests.service does at boot: guests with onboot, by their order; one failure does not stop the rest."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    groups: dict[int, list[tuple[int, int]]] = {}
    for vmid in vmids():
        conf = load(vmid)
        if conf.main.keys.get("onboot") == "1" and conf.main.keys.get("template") != "1":
            order = start_order(conf)
            groups.setdefault(order.get("order", sys.maxsize), []).append((vmid, order.get("up", 0)))
    for order in sorted(groups):
        workers: dict[int, subprocess.Popen[bytes]] = {}
        for vmid, delay in groups[order]:
            if running(vmid):
                continue
            print(f"Starting CT {vmid}", file=sys.stderr)
            workers[vmid] = subprocess.Popen(["pct", "start", str(vmid)], stdin=subprocess.DEVNULL)
            if delay:
                print(f"Waiting for {delay} seconds (startup delay)", file=sys.stderr)
                time.sleep(delay)
        for vmid, worker in workers.items():
            if worker.wait() != 0:
                print(f"Starting CT {vmid} failed", file=sys.stderr)
    return 0


def stop_all() -> int:
    """The reverse at shutdown."""
    workers = []
    for vmid in reversed(vmids()):
        if running(vmid):
            timeout = start_order(load(vmid)).get("down", 60)
            print(f"Stopping CT {vmid} (timeout = {timeout} seconds)", file=sys.stderr)
            command = ["pct", "shutdown", str(vmid), "--timeout", str(timeout), "--forceStop", "1"]
            workers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    for worker in workers:
        worker.wait()
    return 0
