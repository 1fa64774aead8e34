"""The kernel side of the double, from Python: start a process tree under the filter, hear and answer its calls.

src/gate.c explains the mechanism. Needs root, seccomp user notification (Linux 5.19) and gcc.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tests.lab.nvidia.build import built

# ---- what src/gate.c declares ----


class Event(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint64),
        ("pid", ctypes.c_uint32),
        ("nr", ctypes.c_int32),
        ("args", ctypes.c_uint64 * 6),
        ("flags", ctypes.c_uint64),
        ("dirfd", ctypes.c_int32),
        ("path", ctypes.c_char * 4096),
    ]


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(built().gate))
    library.gate_read.restype = library.gate_write.restype = ctypes.c_int64
    library.gate_read.argtypes = library.gate_write.argtypes = [
        ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64,
    ]  # fmt: skip
    library.gate_next.argtypes = [ctypes.c_int, ctypes.POINTER(Event)]
    library.gate_continue.argtypes = [ctypes.c_int, ctypes.c_uint64]
    library.gate_answer.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int]
    library.gate_give.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
    return library


# ---- processes ----


class Process:
    """Who calls, read from /proc while it waits for its answer."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
        )

    @property
    def tgid(self) -> int:
        return int(self.status["Tgid"])

    @property
    def in_first_user_namespace(self) -> bool:
        return os.readlink(f"/proc/{self.pid}/ns/user") == os.readlink("/proc/self/ns/user")

    @property
    def capabilities(self) -> int:
        """Those that count for the kernel and its drivers; root of a user namespace has none."""
        return int(self.status["CapEff"], 16) if self.in_first_user_namespace else 0

    @property
    def uids(self) -> list[int]:
        return [int(n) for n in self.status["Uid"].split()]

    @property
    def is_administrator(self) -> bool:
        return bool(self.capabilities & (1 << 21))  # CAP_SYS_ADMIN

    def cgroup(self) -> str:
        """cgroup.procs of its cgroup v2; empty where there is none."""
        found = re.search(r"^0::(.*)$", Path(f"/proc/{self.pid}/cgroup").read_text(), re.M)
        mount = _cgroup2()
        return f"{mount}{found[1]}/cgroup.procs" if found and mount and not found[1].startswith("/..") else ""


@cache
def _cgroup2() -> str | None:
    mounted = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] == "cgroup2" and before.split()[3] == "/":
            mounted = before.split()[4]
    return mounted


# ---- the gate ----


class Gate:
    """One process tree's calls."""

    def __init__(self, listener: int) -> None:
        self._listener = listener
        _library().gate_tune(listener)

    def serve(self, handle: Callable[[Gate, Event], None], trouble: Callable[[Exception], None]) -> None:
        """Hands every call of interest to `handle`, until the last process of the tree is gone."""
        event = Event()
        while _library().gate_next(self._listener, ctypes.byref(event)):
            try:
                handle(self, event)
            except (ProcessLookupError, FileNotFoundError):  # killed while it waited
                self.go_on(event)
            except Exception as error:  # the tree must not hang on a fault of ours
                self.go_on(event)
                trouble(error)
        os.close(self._listener)

    def go_on(self, event: Event) -> None:
        """The kernel does as if nobody had looked."""
        _library().gate_continue(self._listener, event.id)

    def succeed(self, event: Event, value: int = 0) -> None:
        _library().gate_answer(self._listener, event.id, value, 0)

    def fail(self, event: Event, error: int) -> None:
        _library().gate_answer(self._listener, event.id, 0, error)

    def give(self, event: Event, fd: int) -> None:
        """The open succeeds: the caller gets a copy of `fd`, unless it may not have another (EMFILE)."""
        given = _library().gate_give(self._listener, event.id, fd, int(bool(event.flags & os.O_CLOEXEC)))
        if given < 0 and given != -errno.ENOENT:
            self.fail(event, -given)

    @staticmethod
    def read(event: Event, at: int, size: int) -> bytes:
        """Memory of the caller. Raises OSError."""
        into = ctypes.create_string_buffer(size)
        got = _library().gate_read(event.pid, at, into, size)
        if got < 0:
            raise OSError(-got, os.strerror(-got))
        return into.raw[:got]

    @staticmethod
    def write(event: Event, at: int, data: bytes) -> None:
        put = _library().gate_write(event.pid, at, data, len(data))
        if put < 0:
            raise OSError(-put, os.strerror(-put))


class Attempts:
    """src/attempt.c: what the kernel itself would answer to an open. For one thread at a time."""

    _REQUEST = struct.Struct("=IIIiQQiI64I1024s4096s")

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = str(built()["attempt"])
        self._process = subprocess.Popen([program], stdin=theirs, stdout=theirs, start_new_session=True)
        theirs.close()
        self._socket = ours

    def __call__(self, event: Event, process: Process) -> int | None:
        """The errno, 0 for success, None when it cannot be told."""
        groups = [int(n) for n in process.status["Groups"].split()][:64]
        request = self._REQUEST.pack(
            event.pid, process.uids[3], int(process.status["Gid"].split()[3]), int(not process.in_first_user_namespace),
            int(process.status["CapEff"], 16), event.flags, event.dirfd, len(groups), *groups, *[0] * (64 - len(groups)),
            process.cgroup().encode(), event.path,
        )  # fmt: skip
        self._socket.sendall(request)
        (answer,) = struct.unpack("=i", self._socket.recv(4))
        return None if answer < 0 else answer


def start(argv: Sequence[str], before: Callable[[], None] = lambda: None) -> tuple[int, Gate]:
    """Starts argv, found through PATH, with the filter on it and all it will start. Returns its pid and its gate.

    Its calls wait until Gate.serve runs. `before` runs in the new process. Call it while there is one thread only.
    """
    library = _library()
    program = shutil.which(argv[0]) or argv[0]
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            before()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            listener = library.gate_filter()
            if listener < 0:
                theirs.send(b"%d" % -listener)
                os._exit(126)
            socket.send_fds(theirs, [b"ok"], [listener])
            os.close(listener)
            os.execv(program, list(argv))
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
            os._exit(127)
        except BaseException:
            os._exit(126)
    theirs.close()
    with ours:
        said, fds, _, _ = socket.recv_fds(ours, 16, 1)
    if not fds:
        os.waitpid(pid, 0)
        why = os.strerror(int(said)) if said else "the process ended first"
        raise RuntimeError(f"no seccomp listener: {why} (needs root and Linux 5.19 or newer)")
    return pid, Gate(fds[0])


def private_tmpfs() -> int:
    """A tmpfs mounted nowhere, as a directory fd: what lies on it has no path but the one inside. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    fsopen, fsconfig, fsmount = 430, 431, 432

    def call(*arguments: object) -> int:
        result = libc.syscall(*arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), f"system call {arguments[0]}: {os.strerror(ctypes.get_errno())}")
        return int(result)

    context = call(fsopen, b"tmpfs", 1)
    try:
        call(fsconfig, context, 1, b"source", b"nvidia-double", 0)
        call(fsconfig, context, 6, None, None, 0)  # FSCONFIG_CMD_CREATE
        return call(fsmount, context, 1, 0)
    finally:
        os.close(context)


def exit_code(status: int) -> int:
    """A wait status as a shell would give it."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
