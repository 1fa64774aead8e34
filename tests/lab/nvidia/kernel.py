"""The driver at work: answers what the gate brings, keeps the files, takes orders at the control socket.

One process for one boot of one node, started with the node and ended with it, so what it keeps in memory is lost at a
reboot as a kernel's memory is. `run` is its whole life.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import select
import signal
import socket
import stat
import struct
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.lab.nvidia import files
from tests.lab.nvidia.driver import Caller, Config, Device, Driver, Refused
from tests.lab.nvidia.gate import Attempts, Event, Gate, Process, exit_code, private_tmpfs, start

HOME = "var/lib/nvidia-double"  # below a node's root
PROC_MAGIC = 0x9FA0
IOCTL_NR, SYSLOG_NR = {"x86_64": (16, 103), "aarch64": (29, 116)}[os.uname().machine]
CALL = struct.Struct("<QQQQQ")  # struct nv_call of src/client.h
NV_CALL = (3 << 30) | (CALL.size << 16) | (ord("F") << 8) | 0xDD
NS_GET_PARENT = 0xB702
DEFINITIONS = ("/etc/modules", "/etc/modules-load.d", "/usr/lib/modules-load.d")


class Kernel:
    """What stands between the driver and the processes of a node whose root is `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / HOME
        self.home.mkdir(parents=True, exist_ok=True)
        self.lock = threading.RLock()
        real = Path("/proc/devices").read_text()
        registered = {int(line.split()[0]) for line in real.partition("Block")[0].splitlines()[1:] if line.strip()}
        self.driver = Driver(self.config(), registered)
        self.driver.cpus = files.numa_cpus(self.driver)
        self._attempt = Attempts()
        self._tmpfs = private_tmpfs()
        self._tmpfs_device = os.fstat(self._tmpfs).st_dev
        self._watched: set[int] = set()
        with contextlib.suppress(Refused):
            for module in self.modules_at_boot():
                self.driver.load(module)
        self.write()

    # ---- what the node's disk says ----

    def config(self) -> Config:
        """Raises ValueError with the file's name."""
        path = self.home / "config.json"
        if not path.exists():
            path.write_text(json.dumps(Config().document(), indent=1) + "\n")
        try:
            return Config.of(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error

    def save(self) -> None:
        path = self.home / "config.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.driver.config.document(), indent=1) + "\n")
        partial.replace(path)

    def modules_at_boot(self) -> list[str]:
        """Those the hardware brings, those of modules-load.d, without those modprobe.d forbids."""
        wanted = list(self.driver.config.modules)
        for place in DEFINITIONS:
            path = self.root / place[1:]
            for file in [path] if path.is_file() else sorted(path.glob("*.conf")):
                for line in file.read_text().splitlines():
                    name = line.strip().replace("-", "_")
                    if name.startswith("nvidia") and name not in wanted:
                        wanted.append(name)
        forbidden: set[str] = set()
        for file in sorted((self.root / "etc/modprobe.d").glob("*.conf")):
            forbidden |= set(re.findall(r"^\s*blacklist\s+(nvidia\S*)", file.read_text(), re.M))
        return [name for name in wanted if name not in {f.replace("-", "_") for f in forbidden}]

    def write(self) -> None:
        files.write(self.home / "kernel", self.driver)

    # ---- calls ----

    def handle(self, gate: Gate, event: Event) -> None:
        with self.lock:
            if event.nr == IOCTL_NR:
                self._ioctl(gate, event)
            elif event.nr == SYSLOG_NR:
                self._syslog(gate, event)
            else:
                self._open(gate, event)

    def _open(self, gate: Gate, event: Event) -> None:
        path = event.path.decode(errors="surrogateescape")
        if path in ("/proc/devices", "/proc/modules"):
            self._open_text(gate, event, path)
            return
        found = _seen(event.pid, path, event.dirfd)
        if found is None or not stat.S_ISCHR(found.st_mode) or event.flags & os.O_PATH:
            gate.go_on(event)
            return
        device = self.driver.device(os.major(found.st_rdev), os.minor(found.st_rdev))
        if device is None:
            gate.go_on(event)
            return
        # The kernel's own word first: rights, mount flags and the device cgroup are its business. Only where it would
        # say "allowed, but nobody is there" does the driver answer.
        if self._attempt(event, Process(event.pid)) != errno.ENXIO:
            gate.go_on(event)
            return
        refused = self.driver.opened(device)
        if refused:
            gate.fail(event, refused)
            return
        fd = self._file(device, event.flags)
        try:
            gate.give(event, fd)
        finally:
            os.close(fd)

    def _file(self, device: Device, flags: int) -> int:
        """An open file that stands for the device: null by its nature, the node by its name."""
        name = f"nvidia-caps/{device.name}" if device.name.startswith("nvidia-cap") else device.name
        path = f"dev/{name}"
        for folder in ("dev", "dev/nvidia-caps"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, dir_fd=self._tmpfs)
        with contextlib.suppress(FileExistsError):
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3), dir_fd=self._tmpfs)
        mode = flags & (os.O_ACCMODE | os.O_NONBLOCK)
        return os.open(path, mode | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=self._tmpfs)

    def _open_text(self, gate: Gate, event: Event, path: str) -> None:
        root = f"/proc/{event.pid}/root"
        try:
            # Whatever a process finds there that is not procfs's own (a mount over it, a chroot without) stays.
            where = _filesystem(f"{root}/proc" if path == "/proc/modules" else root + path)
        except OSError:
            where = 0
        if where != PROC_MAGIC or event.flags & (os.O_ACCMODE | os.O_PATH):
            gate.go_on(event)
            return
        try:
            real = Path(path).read_text()
        except FileNotFoundError:
            real = ""
        text = (files.devices if path == "/proc/devices" else files.modules)(self.driver, real)
        with contextlib.suppress(FileExistsError):
            os.mkdir("proc", dir_fd=self._tmpfs)
        os_path = path[1:]
        fd = os.open(os_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444, dir_fd=self._tmpfs)
        try:
            os.write(fd, text.encode())
            gift = os.open(os_path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._tmpfs)
        finally:
            os.close(fd)
            os.unlink(os_path, dir_fd=self._tmpfs)
        try:
            gate.give(event, gift)
        finally:
            os.close(gift)

    def _ioctl(self, gate: Gate, event: Event) -> None:
        fd, command, at = event.args[0], event.args[1] & 0xFFFFFFFF, event.args[2]
        try:
            place = f"/proc/{event.pid}/fd/{fd & 0xFFFFFFFF}"
            ours = os.stat(place).st_dev == self._tmpfs_device
            name = os.path.basename(os.readlink(place)) if ours else ""
        except OSError:
            ours = False
        if not ours:
            gate.go_on(event)
            return
        minor = re.fullmatch(r"nvidia(\d+)", name)
        device = Device(name, int(minor[1]) if minor else None)
        if command != NV_CALL:
            gate.fail(event, errno.ENOSYS if name == "nvidia-uvm" else errno.EINVAL)
            return
        if not self._still(device):
            gate.fail(event, errno.EIO)
            return
        try:
            request_at, request_size, answer_at, room, _ = CALL.unpack(gate.read(event, at, CALL.size))
            request = gate.read(event, request_at, min(request_size, 4096)).decode()
            process = Process(event.pid)
            answer = self.driver.answer(device, self._caller(process), request).encode()[:room]
            if request.split()[0] in ("context", "drop"):
                self._watch(process.tgid)
                files.refresh(self.home / "kernel", self.driver)
            gate.write(event, answer_at, answer)
            gate.write(event, at, CALL.pack(request_at, request_size, answer_at, room, len(answer)))
        except (OSError, ValueError, struct.error):
            gate.fail(event, errno.EFAULT)
            return
        gate.succeed(event)

    def _still(self, device: Device) -> bool:
        """An fd of a module that was unloaded, or of a GPU that is gone, is good for nothing any more."""
        module = "nvidia_uvm" if device.name.startswith("nvidia-uvm") else "nvidia"
        return module in self.driver.loaded and (device.gpu is None or device.gpu in self.driver.states)

    def _syslog(self, gate: Gate, event: Event) -> None:
        kind, at, room = event.args[0] & 0xFFFFFFFF, event.args[1], event.args[2] & 0xFFFFFFFF
        if kind not in (3, 4, 10):  # read all, read and clear, size of the buffer
            gate.go_on(event)
            return
        process = Process(event.pid)
        restricted = Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() != "0"
        if restricted and not process.capabilities & (1 << 34 | 1 << 21):  # CAP_SYSLOG, CAP_SYS_ADMIN
            gate.fail(event, errno.EPERM)
            return
        text = self.driver.kernel_log().encode()
        if kind == 10:
            gate.succeed(event, max(1 << 16, len(text)))
            return
        text = text[-room:]
        try:
            gate.write(event, at, text)
        except OSError:
            gate.fail(event, errno.EFAULT)
            return
        gate.succeed(event, len(text))

    # ---- processes that hold GPUs ----

    def _caller(self, process: Process) -> Caller:
        names = process.status["Name"]
        return Caller(process.tgid, names, process.is_administrator, lambda pid: _pid_seen_from(process.pid, pid))

    def _watch(self, pid: int) -> None:
        """Notices when a process that held a GPU is gone."""
        if pid in self._watched:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            self.driver.ended(pid)
            return
        self._watched.add(pid)

        def wait() -> None:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll()
            os.close(pidfd)
            with self.lock:
                self._watched.discard(pid)
                if self.driver.ended(pid):
                    files.refresh(self.home / "kernel", self.driver)

        threading.Thread(target=wait, daemon=True).start()

    # ---- orders ----

    def control(self) -> socket.socket:
        """The socket, listening. In a folder that may lie too deep for a socket's name, hence by a descriptor."""
        listener = socket.socket(socket.AF_UNIX)
        (self.home / "control").unlink(missing_ok=True)
        folder = os.open(self.home, os.O_PATH | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{folder}/control")
        finally:
            os.close(folder)
        (self.home / "control").chmod(0o600)
        listener.listen()
        return listener

    def obey_all(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(10)
                line = b""
                while not line.endswith(b"\n") and (got := connection.recv(4096)):
                    line += got
                try:
                    with self.lock:
                        said = "0" + self.obey(line.decode().split())
                except (Refused, ValueError) as error:
                    said = f"1{error}\n"
                except Exception as error:
                    said = f"1{type(error).__name__}: {error}\n"
                connection.sendall(said.encode())

    def obey(self, words: Sequence[str]) -> str:
        """One order. Its output, for people. Raises Refused, ValueError."""
        from tests.lab.nvidia.orders import obey

        return obey(self, words)


# ---- what a process sees ----


def _seen(pid: int, path: str, dirfd: int) -> os.stat_result | None:
    """stat(2) of a path as the process means it; symbolic links that lead up to its root are not followed rightly, but
    none of those that name devices do."""
    if path.startswith("/"):
        place = f"/proc/{pid}/root{path}"
    elif dirfd == -100:
        place = f"/proc/{pid}/cwd/{path}"
    else:
        place = f"/proc/{pid}/fd/{dirfd}/{path}"
    try:
        return os.stat(place)
    except OSError:
        return None


def _filesystem(path: str) -> int:
    """f_type of statfs(2)."""
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return int(struct.unpack_from("<q", buffer.raw)[0])


def _pid_seen_from(viewer: int, pid: int) -> int | None:
    """`pid` as the process `viewer` sees it; None when it cannot."""
    try:
        view = os.stat(f"/proc/{viewer}/ns/pid").st_ino
        status = Path(f"/proc/{pid}/status").read_text()
        numbers = re.search(r"^NSpid:\s*(.*)$", status, re.M)
        here = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    chain = [int(n) for n in numbers[1].split()] if numbers else [pid]
    try:
        while chain:
            if os.fstat(here).st_ino == view:
                return chain[-1]
            chain.pop()
            if not chain:
                return None
            parent = fcntl.ioctl(here, NS_GET_PARENT)
            os.close(here)
            here = parent
    except OSError:
        return None
    finally:
        os.close(here)
    return None


# ---- the whole ----


def run(root: Path, argv: Sequence[str]) -> int:
    """Runs argv as a machine that has the driver: its process tree, whatever namespaces it makes, finds the driver
    behind device nodes. `root` is that machine's file system as seen here. Returns argv's exit code, as a shell would.

    Everything ends with argv's own process; SIGTERM and SIGINT are passed on to it.
    """
    kernel = Kernel(root)
    listener = kernel.control()
    pid, gate = start(argv, before=listener.close)

    def pass_on(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)

    def trouble(error: Exception) -> None:
        print(f"nvidia double: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    for target in (lambda: gate.serve(kernel.handle, trouble), lambda: kernel.obey_all(listener)):
        threading.Thread(target=target, daemon=True).start()
    while True:
        try:
            _, status = os.waitpid(pid, 0)
            break
        except InterruptedError:
            continue
    with contextlib.suppress(OSError):
        (kernel.home / "control").unlink()
    return exit_code(status)
