"""What keeps a lab alive: one process outside, which cleans up, and PID 1 of the lab's own namespaces.

    python -m tests.lab.keeper STATE FD

The outer process holds STATE/alive locked, starts the inner one in new mount, PID and network namespaces, and when
that ends, however it ends, takes away what is left outside: the cgroup and STATE. Everything else (processes, mounts,
interfaces, device nodes) lives in the inner one's namespaces, so killing it ends all of it at once.

FD is the reading end of a pipe. When it closes before the line `stay` came through, the lab ends: it does not outlive
the command or the test session that started it.

The inner process mounts the machines' file systems, then waits at the socket STATE/keeper for commands, one line each:
`boot NODE`, `cut NODE` (as if somebody pulled the plug), `nodes` (which are on). It answers with one line of JSON.
A node that reboots is started again; one that powers off stays off.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REBOOTED = 133  # what systemd-nspawn --keep-unit exits with when its machine wants to be started again
CGROUPS = Path("/sys/fs/cgroup")
# What a node must not do to the machine it runs on: load modules, set the clock, touch hardware.
NOT_FOR_NODES = "CAP_SYS_MODULE,CAP_SYS_TIME,CAP_SYS_RAWIO,CAP_WAKE_ALARM"


def outer(state: Path, leash: int) -> int:
    with (state / "alive").open("w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        unshare = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"]
        inner = [sys.executable, "-m", "tests.lab.keeper", str(state), str(leash), "inner"]
        process = subprocess.Popen([*unshare, *inner], stdin=subprocess.DEVNULL, pass_fds=(leash,))
        os.close(leash)
        code = process.wait()
        clean(state)
        return code


def clean(state: Path) -> None:
    """Takes away what a dead lab leaves outside its namespaces. Harmless when nothing is left."""
    mountpoint = state / "cgroup2"
    mountpoint.mkdir(parents=True, exist_ok=True)
    # The hierarchy may be mounted elsewhere here, or not at all: look at it in a mount namespace of this command's own.
    subprocess.run(
        ["unshare", "--mount", "sh", "-c", _REMOVE_CGROUP, "sh", str(mountpoint / cgroup(state)), str(mountpoint)],
        stdin=subprocess.DEVNULL, capture_output=True,
    )  # fmt: skip
    shutil.rmtree(state, ignore_errors=True)


_REMOVE_CGROUP = """
mount -n -t cgroup2 cgroup2 "$2" && test -d "$1" || exit 0
test ! -e "$1/cgroup.kill" || echo 1 > "$1/cgroup.kill"
for n in $(seq 100); do
    find "$1" -depth -type d -exec rmdir {} + 2>/dev/null
    test -d "$1" || exit 0
    sleep 0.1
done
"""


def cgroup(state: Path) -> str:
    return f"gpuctl-lab-{state.name}"


@dataclass
class Node:
    name: str
    root: Path
    binds: list[str]
    around: list[str]  # words before the command that starts it
    process: subprocess.Popen[bytes] | None = None


class Inner:
    """PID 1 of the lab."""

    def __init__(self, state: Path, leash: int) -> None:
        self.state = state
        self.leash = leash
        self.spec = json.loads((state / "spec.json").read_text(encoding="utf-8"))
        self.nodes: dict[str, Node] = {}
        self.own_cgroup = CGROUPS / cgroup(state)

    def prepare(self) -> None:
        """Mounts, cgroup and network. Nothing of it is seen outside, but for the cgroup."""
        run = self.state / "run"
        run.mkdir()
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(run))
        kept = run / self.state.relative_to("/run")
        kept.mkdir(parents=True)
        mount("--bind", str(self.state), str(kept))
        mount("--move", str(run), "/run")
        # A sysfs of this network namespace, and the one cgroup hierarchy, whatever the machine has there.
        mount("-t", "sysfs", "sysfs", "/sys")
        mount("-t", "cgroup2", "cgroup2", str(CGROUPS))
        self.own_cgroup.mkdir(exist_ok=True)
        enter(self.own_cgroup / "keeper")
        delegate(self.own_cgroup)
        for command in ("link set lo up", "link add lab type bridge forward_delay 0", "link set lab up"):
            subprocess.run(["ip", *command.split()], check=True)
        disks = self.state / "disks"
        disks.mkdir()
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(disks))
        (disks / "pve" / "nodes").mkdir(parents=True)
        for name, lower in self.spec["roots"].items():
            disk(disks / name, lower, self.spec["disk"])
        for name, binds in self.spec["nodes"].items():
            self.nodes[name] = Node(name, disks / name / "root", binds, self.spec["around"][name])

    def serve(self) -> None:
        """Never returns while the lab is wanted."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as ready, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.state / "keeper"))
            listener.listen()
            ready.register(woken, selectors.EVENT_READ)
            ready.register(listener, selectors.EVENT_READ)
            ready.register(self.leash, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is listener:
                        self.answer(listener)
                    elif key.fileobj == woken:
                        os.read(woken, 4096)
                        self.reap()
                    elif os.read(self.leash, 64).startswith(b"stay"):
                        ready.unregister(self.leash)
                    else:
                        return

    def answer(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5)
            try:
                said = self.obey(connection.makefile().readline().split())
            except Exception as error:  # PID 1 lives on
                said = {"error": f"{type(error).__name__}: {error}"}
            connection.sendall(json.dumps(said).encode() + b"\n")

    def obey(self, words: list[str]) -> object:
        match words:
            case ["nodes"]:
                return {node.name: node.process is not None for node in self.nodes.values()}
            case ["boot", name] if name in self.nodes:
                if self.nodes[name].process is None:
                    self.boot(self.nodes[name])
                return {}
            case ["cut", name] if name in self.nodes:
                node = self.nodes[name]
                process, node.process = node.process, None
                if process is not None:
                    (self.own_cgroup / name / "cgroup.kill").write_text("1")
                    process.wait()
                return {}
        return {"error": f"not a command: {' '.join(words)}"}

    def reap(self) -> None:
        for node in self.nodes.values():
            if node.process is not None and (code := node.process.poll()) is not None:
                print(f"{node.name} ended with {code}", flush=True)
                node.process = None
                if code == REBOOTED:
                    self.boot(node)
        with contextlib.suppress(ChildProcessError):  # orphans that PID 1 inherits; the nodes' own were polled above
            ours = {node.process.pid for node in self.nodes.values() if node.process is not None}
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid in ours:
                    break
                os.waitpid(found.si_pid, 0)

    def boot(self, node: Node) -> None:
        own = self.own_cgroup / node.name
        sweep(own)
        environment = {**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1", "SYSTEMD_LOG_LEVEL": "warning"}
        command = [
            *node.around, "systemd-nspawn", "--quiet", "--boot", f"--machine={node.name}", f"--directory={node.root}",
            "--register=no", "--keep-unit", "--capability=all", f"--drop-capability={NOT_FOR_NODES}",
            "--system-call-filter=bpf keyctl add_key", "--network-bridge=lab", "--console=pipe",
            "--resolv-conf=off", "--timezone=off", "--link-journal=no", *(f"--bind={bind}" for bind in node.binds),
        ]  # fmt: skip
        with (self.state / f"{node.name}.log").open("ab") as log:
            node.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                preexec_fn=lambda: enter(own),
            )  # fmt: skip


def mount(*arguments: str) -> None:
    # Without -n the mount table of util-linux in /run would be wanted, which is about to be another /run.
    subprocess.run(["mount", "-n", *arguments], check=True)


def disk(folder: Path, lower: str, size: str) -> None:
    """A machine's disk: a limited file system of its own over a root of the cache, which stays untouched."""
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"mode=755,size={size}", "tmpfs", str(folder))
    for name in ("upper", "work", "root"):
        (folder / name).mkdir()
    shutil.copystat(lower, folder / "upper")
    found = os.stat(lower)
    os.chown(folder / "upper", found.st_uid, found.st_gid)
    mount(
        "-t", "overlay", "-o", f"lowerdir={lower},upperdir={folder}/upper,workdir={folder}/work", "overlay",
        str(folder / "root"),
    )  # fmt: skip


def enter(group: Path) -> None:
    group.mkdir(exist_ok=True)
    (group / "cgroup.procs").write_text("0")


def delegate(group: Path) -> None:
    """Lets the groups below use whatever controllers there are; on a machine with cgroup v1 there are none."""
    for controller in (group / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):
            (group / "cgroup.subtree_control").write_text(f"+{controller}")


def sweep(group: Path) -> None:
    """Removes the groups a node left behind."""
    for _ in range(50):
        left = [Path(folder) for folder, _, _ in os.walk(group, topdown=False)]
        for one in left:
            with contextlib.suppress(OSError):
                one.rmdir()
        if not group.exists():
            return
        time.sleep(0.1)


def inner(state: Path, leash: int) -> None:
    keeper = Inner(state, leash)
    keeper.prepare()
    keeper.serve()


if __name__ == "__main__":
    folder, descriptor = Path(sys.argv[1]), int(sys.argv[2])
    if sys.argv[3:] == ["inner"]:
        inner(folder, descriptor)
    else:
        sys.exit(outer(folder, descriptor))
