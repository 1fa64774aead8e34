"""The lab as others see it: brought up, asked, taken down."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.lab import furnish, keeper, requirements
from tests.lab.layout import (
    CONTROLLER,
    DISK,
    GUESTS,
    MACHINES,
    NODES,
    STATES,
    SUBNETS,
    Guest,
    Machine,
    Node,
    NoLab,
    check_name,
    interface,
    inventory,
    machine,
    ssh_config,
)
from tests.lab.roots import Roots, roots

REPOSITORY = Path(__file__).parents[2]
CGROUPS = Path("/sys/fs/cgroup")

Completed = subprocess.CompletedProcess[str]


class Lab:
    """A lab by its name. Nothing happens before `up`."""

    def __init__(self, name: str = "lab") -> None:
        self.name = check_name(name)
        self.state = STATES / name
        self._outer: subprocess.Popen[bytes] | None = None  # the keeper, if this process started it
        self._leash: int | None = None  # while this is open, the lab ends with this process

    # --- coming and going

    def up(self, say: Callable[[str], None] = lambda _: None, *, stay: bool = True, keep: bool = False) -> None:
        """Brings the lab up and waits until every machine serves. Raises NoLab, and then nothing is left of it.

        With `stay` it outlives this process; without, it ends with this process, however that ends. With `keep` a lab
        of which a machine does not come up is left as it is, to be looked at.
        """
        requirements.check()
        requirements.install_missing(say)
        trees = roots(say)
        STATES.mkdir(exist_ok=True, mode=0o755)
        with self._alone():
            if self.alive():
                raise NoLab(f"a lab {self.name!r} is up already: `python -m tests.lab status`, or `down` first")
            keeper.clean(self.state)
            try:
                self._start(trees, say, stay, keep)
            except BaseException:
                if not keep:
                    self._end()
                raise

    def down(self) -> bool:
        """Takes everything of the lab away. False if there was nothing."""
        if os.geteuid() != 0:
            raise NoLab("the lab needs root: run the same command with sudo")
        STATES.mkdir(exist_ok=True, mode=0o755)
        with self._alone():
            there = self.state.exists()
            self._end()
        return there

    def alive(self) -> bool:
        """Whether its keeper runs."""
        try:
            with (self.state / "alive").open() as alive:
                fcntl.flock(alive, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @property
    def subnet(self) -> str:
        return str(self._facts()["subnet"])

    def address(self, name: str) -> str:
        return f"{self.subnet}.{machine(name).byte}"

    @property
    def inventory(self) -> Path:
        """The folder for `gpuctl -i`: hosts.yml of this lab, and whatever else inventory/lab holds."""
        return Path(str(self._facts()["inventory"]))

    @property
    def ssh_config(self) -> Path:
        return self.state / "ssh" / "config"

    # --- asking

    def run(self, name: str, argv: Sequence[str], *, stdin: str = "", timeout: float = 60) -> Completed:
        """Runs a command on a machine without SSH: as a unit of its node, in the guest through the node's LXC.

        It is a child of the node's systemd, so it sees what services see, the doubles of the node's kernel included.
        Shells and quoting are the caller's business. Never raises for an exit code.
        """
        return subprocess.run(
            self.way_in(name, argv, timeout=timeout), input=stdin, capture_output=True, text=True,
            timeout=timeout + 5, env=_plain(),
        )  # fmt: skip

    def way_in(self, name: str, argv: Sequence[str], *, timeout: float = 0, terminal: bool = False) -> list[str]:
        """The command here that runs `argv` on the machine. Raises NoLab when its node is off."""
        unit = ["systemd-run", "--quiet", "--wait", "--collect", "--service-type=exec", "--setenv=LANG=C.UTF-8"]
        unit += [*(["--pty"] if terminal else ["--pipe"]), *([f"-pRuntimeMaxSec={timeout}"] if timeout else [])]
        command = [word.replace("$", "$$") for word in (*_attach(name), *argv)]  # a unit's $X is systemd's own
        return [*self._enter(_node_of(name)), *unit, "--", *command]

    def peek(self, name: str, argv: Sequence[str], *, timeout: float = 10) -> Completed:
        """Like run, but straight into the machine's namespaces: also while its systemd does not answer yet."""
        command = [*self._enter(_node_of(name)), *_attach(name), *argv]
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, env=_plain()
        )

    def check(self, name: str, argv: Sequence[str], *, stdin: str = "", timeout: float = 60) -> str:
        """Like run, and returns stdout; raises NoLab when the command failed."""
        done = self.run(name, argv, stdin=stdin, timeout=timeout)
        if done.returncode != 0:
            raise NoLab(f"{name}: `{shlex.join(argv)}` exited {done.returncode}: {done.stderr.strip() or 'silently'}")
        return done.stdout

    def ssh(self, name: str, *argv: str, timeout: float = 60) -> Completed:
        """Runs a command through the real sshd, as a person at the controller would."""
        return subprocess.run(
            ["ssh", "-F", str(self.ssh_config), machine(name).name, "--", shlex.join(argv)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip

    def root(self, name: str) -> Path:
        """The machine's file system as its disk holds it, seen from here, whether it is on or not.

        Follow no absolute link in it: it would lead into this machine's own file system.
        """
        return Path(f"/proc/{self._keeper()}/root{self.state}/disks/{machine(name).name}/root")

    def conf(self, vmid: int) -> Path:
        """The guest's /etc/pve/lxc/<vmid>.conf, to be read and edited by hand."""
        node = next(guest.node for guest in GUESTS if guest.vmid == vmid)
        return Path(f"/proc/{self._keeper()}/root{self.state}/disks/pve/nodes/{node}/lxc/{vmid}.conf")

    def keeper(self, *words: str) -> dict[str, object]:
        """Tells the keeper: `boot NODE`, `cut NODE`, `nodes`."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            try:
                connection.connect(str(self.state / "keeper"))
                connection.sendall(" ".join(words).encode() + b"\n")
                said = json.loads(connection.makefile().readline() or "{}")
            except OSError as error:
                raise NoLab(f"the lab {self.name!r} does not answer: {error}") from None
        if "error" in said:
            raise NoLab(f"the lab's keeper: {said['error']}")
        return dict(said)

    def behind(self, argv: Sequence[str], *, timeout: float = 60) -> Completed:
        """Runs a command in the keeper's mount and network namespaces: where the machines' disks and wires are."""
        nsenter = ["nsenter", "--target", str(self._keeper()), "--mount", "--net", "--"]
        return subprocess.run([*nsenter, *argv], capture_output=True, text=True, timeout=timeout, env=_plain())

    # --- waiting

    def boot_id(self, name: str) -> str:
        """The machine's boot_id now; empty when it cannot be read."""
        with contextlib.suppress(NoLab, subprocess.TimeoutExpired):
            return self.peek(name, ["cat", "/proc/sys/kernel/random/boot_id"]).stdout.strip()
        return ""

    def wait(self, *names: str, timeout: float = 120, since: Mapping[str, str] | None = None) -> None:
        """Waits until these machines (all, if none is named) serve; with `since`, until their boot_id is another.

        To serve is: systemd has finished starting, and where there is an sshd, it lets the controller in.
        """
        deadline = time.monotonic() + timeout
        for name in names or tuple(one.name for one in MACHINES):
            while reason := self._not_ready(machine(name), (since or {}).get(name, "")):
                if time.monotonic() > deadline:
                    raise NoLab(f"{name} did not come up within {timeout:.0f} s: {reason}")
                time.sleep(0.5)  # to ask takes processors from those who boot

    def _not_ready(self, one: Machine, old_boot: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if old_boot and self.boot_id(one.name) in ("", old_boot):
                return "it has not restarted"
            try:
                said = self.peek(one.name, ["systemctl", "is-system-running"])
            except NoLab as error:
                return str(error)
            if said.stdout.strip() not in ("running", "degraded"):
                return said.stdout.strip() or said.stderr.strip()
            if isinstance(one, Guest) and not one.sshd:
                return ""
            done = self.ssh(one.name, "true", timeout=10)
            return done.stderr.strip() if done.returncode != 0 else ""
        return "it does not answer"

    # --- how

    def _start(self, trees: Roots, say: Callable[[str], None], stay: bool, keep: bool) -> None:
        self.state.mkdir(mode=0o755)
        lowers = {one.name: str(trees.node) for one in NODES}
        lowers |= {one.name: str(trees.guest if one.privileged else trees.shifted) for one in GUESTS}
        disks = self.state / "disks"
        binds = {
            one.name: [
                f"{disks}/pve/nodes:/etc/pve/nodes",
                *(f"{disks}/{g.name}/root:{g.volume}" for g in GUESTS if g.node == one.name),
            ]
            for one in NODES
        }
        around = {one.name: furnish.around_node(one.name, self.state) for one in NODES}
        spec = {"roots": lowers, "nodes": binds, "around": around, "disk": DISK}
        (self.state / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        self._start_keeper()
        with _turn(say):
            requirements.wait_for_inotify(say)
            self._furnish_and_boot(say, keep)
        if stay:
            self._release()

    def _furnish_and_boot(self, say: Callable[[str], None], keep: bool) -> None:
        subnet = self._wire()
        folder = self._write_inventory(subnet)
        facts = {"subnet": subnet, "inventory": str(folder)}
        (self.state / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        furnish.keys(self.state, subnet)
        (self.state / "ssh" / "config").write_text(ssh_config(self.state, subnet), encoding="utf-8")
        furnish.pve(self.root(NODES[0].name).parents[1] / "pve", subnet)
        for one in MACHINES:
            furnish.machine(one, self.root(one.name), self.state, subnet)
        say("booting")
        for node in NODES:
            self.keeper("boot", node.name)
        if keep:
            self._release()
        try:
            self.wait()
        except NoLab:
            requirements.check_inotify(1)  # says what the machine itself only hangs for
            raise

    def _start_keeper(self) -> None:
        """The keeper ends when this process does, until it is released."""
        reading, self._leash = os.pipe()
        with (self.state / "keeper.log").open("w+b") as out:
            command = [sys.executable, "-m", "tests.lab.keeper", str(self.state), str(reading)]
            self._outer = subprocess.Popen(
                command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=(reading,),
                start_new_session=True,
            )  # fmt: skip
            os.close(reading)
            deadline = time.monotonic() + 20
            while not (self.state / "keeper").exists():
                if self._outer.poll() is not None or time.monotonic() > deadline:
                    out.seek(0)
                    said = out.read().decode(errors="replace").strip().splitlines()
                    raise NoLab(f"the lab's keeper did not start: {said[-1] if said else 'it said nothing'}")
                time.sleep(0.02)
        (self.state / "pid").write_text(str(_child(self._outer.pid)))

    def _release(self) -> None:
        """From now on the lab outlives this process."""
        if self._leash is not None:
            os.write(self._leash, b"stay\n")
            os.close(self._leash)
            self._leash = None
            if self._outer is not None:
                self._outer.returncode = 0  # nobody's child any more: Python would warn that it still runs

    def _wire(self) -> str:
        """Joins this machine to the lab's network; returns the subnet taken."""
        taken = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
        taken += subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
        first = int(interface(self.name)[2:8], 16) % len(SUBNETS)
        free = (s for s in (*SUBNETS[first:], *SUBNETS[:first]) if f"{s}." not in taken)
        subnet = next(free, "")
        if not subnet:
            raise NoLab("no subnet of 198.18.0.0/15 is free on this machine")
        name, pid = interface(self.name), str(self._keeper())
        for command in (
            ["ip", "link", "add", name, "type", "veth", "peer", "name", "controller", "netns", pid],
            ["ip", "addr", "add", f"{subnet}.{CONTROLLER}/24", "dev", name],
            ["ip", "link", "set", name, "up"],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise NoLab(f"`{' '.join(command)}`: {done.stderr.strip()}")
        done = self.behind(["ip", "link", "set", "controller", "master", "lab", "up"])
        if done.returncode != 0:
            raise NoLab(f"joining the lab's network: {done.stderr.strip()}")
        return subnet

    def _write_inventory(self, subnet: str) -> Path:
        """inventory/lab for the lab of that name, inventory/lab-NAME for others."""
        shared = REPOSITORY / "inventory" / "lab"
        folder = shared if self.name == "lab" else self.state / "inventory"
        folder.mkdir(parents=True, exist_ok=True)
        if folder != shared and shared.is_dir():
            for file in shared.iterdir():
                if file.name != "hosts.yml":
                    (folder / file.name).symlink_to(file)
        (folder / "hosts.yml").write_text(inventory(self.state, subnet, self.name), encoding="utf-8")
        return folder

    def _end(self) -> None:
        hosts = REPOSITORY / "inventory" / "lab" / "hosts.yml"
        if self.name == "lab" and hosts.exists():
            hosts.unlink()
            with contextlib.suppress(OSError):  # not empty: the rest belongs to the repository
                hosts.parent.rmdir()
        subprocess.run(["ip", "link", "del", interface(self.name)], capture_output=True)
        if self.alive():
            with contextlib.suppress(NoLab, ProcessLookupError):
                os.kill(self._keeper(), signal.SIGKILL)
            deadline = time.monotonic() + 20
            while self.alive():  # the outer process cleans up, then goes
                if time.monotonic() > deadline:
                    raise NoLab(f"the lab {self.name!r} does not end; its keeper is process {self._keeper()}")
                time.sleep(0.05)
        if self._leash is not None:
            os.close(self._leash)
            self._leash = None
        if self._outer is not None:
            self._outer.wait(20)
            self._outer = None
        keeper.clean(self.state)

    def _enter(self, node: str) -> list[str]:
        """A command that goes into the namespaces of a node."""
        procs = Path(f"/proc/{self._keeper()}/root{CGROUPS}/{keeper.cgroup(self.state)}/{node}/payload/init.scope")
        try:
            pids = (procs / "cgroup.procs").read_text().split()
        except OSError:
            pids = []
        if not pids:
            raise NoLab(f"{node} is off")
        return ["nsenter", "--target", pids[0], "--all", "--root", "--wd", "--"]

    def _keeper(self) -> int:
        """The inner process's id here."""
        try:
            return int((self.state / "pid").read_text())
        except (OSError, ValueError):
            raise NoLab(f"the lab {self.name!r} is not up: `python -m tests.lab up`") from None

    def _facts(self) -> dict[str, object]:
        try:
            return dict(json.loads((self.state / "facts.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            raise NoLab(f"the lab {self.name!r} is not up: `python -m tests.lab up`") from None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One command at a time brings a lab up or down."""
        file = STATES / f".{self.name}.lock"
        with file.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = os.path.samestat(os.fstat(lock.fileno()), file.stat())  # not one that is being removed
            except (BlockingIOError, FileNotFoundError):
                held = False
            if not held:
                raise NoLab(f"another command is bringing the lab {self.name!r} up or down")
            try:
                yield
            finally:
                file.unlink()


@contextmanager
def _turn(say: Callable[[str], None]) -> Iterator[None]:
    """One lab at a time takes a subnet, sees whether there is room for it, and boots."""
    folder = os.open(STATES, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting: another lab is booting")
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _node_of(name: str) -> str:
    one = machine(name)
    return one.name if isinstance(one, Node) else one.node


def _attach(name: str) -> list[str]:
    """What on the node leads into the machine. Not pct: a test of pct should not depend on it."""
    one = machine(name)
    return [] if isinstance(one, Node) else ["lxc-attach", "-n", str(one.vmid), "--clear-env", "--"]


def _child(pid: int) -> int:
    """The process that `unshare --fork`, a child of `pid`, started."""
    (unshare,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (inner,) = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()[:1]
    return int(inner)


def _plain() -> dict[str, str]:
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "TERM": "dumb"}
