"""Faults for a machine with a real driver: a child is put into one, and nothing of the machine itself changes.

    python -m tests.gpu.faults "NAME" -- COMMAND...        runs COMMAND in that fault (root)
    python -m tests.gpu.faults                             lists the names, and what `gpuctl doctor` must say in each

A fault is a cgroup v2 with an eBPF device program, a mount or user namespace with another /dev, /proc or /sys, limits,
filters on system calls, other libraries, environment variables, another user. `FAULTS` has all of them. The first are
those of the tables measured before (tests/ground_truth/nvidia, made here by the same code as for the driver's double);
the rest need a real driver to know what it says.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import secrets
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.nvidia import replay
from tests.lab.nvidia.replay import LIBC, NOBODY, make_dev, mount, nodes
from tests.test_ground_truth import EXPECTED

TRUTH = Path(__file__).parents[1] / "ground_truth/nvidia"
USUAL = [(1, None), (5, None), (136, None), (10, 229)]  # what containers may open: null, tty, pts, fuse


@dataclass(frozen=True)
class Fault:
    """`causes`: ids that `gpuctl doctor` must find, the leading one first; none: the box is well.

    `may`: ids it may find besides. `options`: of doctor. `gpus`: how many there must be at least.
    """

    name: str
    make: Callable[[], None]
    causes: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    gpus: int = 1
    at_most: int = 99  # GPUs: the recorded one has nodes of the first alone

    @property
    def file(self) -> str:
        """The name as a file's."""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-").lower()[:80]


def gpus_here() -> int:
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


# ---- what a fault is made of ----


def usual_dev(
    change: Callable[[dict[str, tuple[int, int, int]]], None] = lambda _: None,
) -> dict[str, tuple[int, int, int]]:
    """A /dev as on the healthy machine, but for `change`."""
    wanted = nodes(gpus_here())
    change(wanted)
    make_dev(wanted)
    for name in ("shm", "pts"):
        (Path("/dev") / name).mkdir(mode=0o1777)
    Path("/dev/fd").symlink_to("/proc/self/fd")
    return wanted


def other(**change: tuple[int, int, int] | None) -> Callable[[], None]:
    """A /dev in which these nodes have other numbers and modes, or (None) are not there."""

    def apply(wanted: dict[str, tuple[int, int, int]]) -> None:
        for name, node in change.items():
            name = name.replace("_", "-")
            if node is None:
                wanted.pop(name, None)
            else:
                wanted[name] = node

    return lambda: (usual_dev(apply), None)[1]


def uvm() -> int:
    return replay.major("nvidia-uvm")


def device_program(body: bytes) -> None:
    """Into a new cgroup v2 with this eBPF device program; r2 is the type, r3 the access, r4 the major, r5 the minor."""
    start = (insn(0x61, 2, 1, 0) + insn(0x54, 2, 0, 0, 0xFFFF) + insn(0x61, 3, 1, 0) + insn(0x74, 3, 0, 0, 16)
             + insn(0x61, 4, 1, 4) + insn(0x61, 5, 1, 8))  # fmt: skip
    program = start + body
    group = replay.new_group()
    code, licence = ctypes.create_string_buffer(program), ctypes.create_string_buffer(b"GPL")
    load = struct.pack(
        "<IIQQIIQII", 15, len(program) // 8, ctypes.addressof(code), ctypes.addressof(licence), 0, 0, 0, 0, 0
    )
    fd = LIBC.syscall(replay.BPF_NR, 5, ctypes.create_string_buffer(load, 144), 144)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "loading a device program")
    folder = os.open(group, os.O_RDONLY)
    attach = struct.pack("<IIII", folder, fd, 6, 2)  # BPF_F_ALLOW_MULTI, as liblxc and systemd attach theirs
    if LIBC.syscall(replay.BPF_NR, 8, ctypes.create_string_buffer(attach, 32), 32):
        raise OSError(ctypes.get_errno(), "attaching a device program")
    os.close(folder)
    os.close(fd)
    (group / "cgroup.procs").write_text("0")


def insn(code: int, to: int = 0, source: int = 0, jump: int = 0, value: int = 0) -> bytes:
    return struct.pack("<BBhi", code, source << 4 | to, jump, value)


ALLOW, DENY = insn(0xB7, value=1) + insn(0x95), insn(0xB7, value=0) + insn(0x95)


def allow_only(numbers: Iterable[tuple[int, int | None]]) -> None:
    """Everything but these is denied, as in a container."""
    body = b""
    for high, low in numbers:
        body += insn(0x55, 4, 0, 3 if low is not None else 2, high)
        body += insn(0x55, 5, 0, 2, low) if low is not None else b""
        body += ALLOW
    device_program(body + DENY)


def deny_access(high: int, low: int, access: int) -> None:
    """1 mknod, 2 read, 4 write: refused on this device alone when one of these is asked for."""
    body = insn(0x55, 4, 0, 5, high) + insn(0x55, 5, 0, 4, low) + insn(0x54, 3, 0, 0, access) + insn(0x15, 3, 0, 2, 0)
    device_program(body + DENY + ALLOW)


def nested(high: int, low: int) -> None:
    """The cgroup above denies it; the one the process is in has a program that allows everything."""
    deny_access(high, low, 7)
    above, replay.JOB = replay.JOB, replay.JOB + "x"
    device_program(ALLOW)
    assert above in Path("/proc/self/cgroup").read_text()


def refuse_calls(*numbers: int, errno: int = 1) -> Callable[[], None]:
    """A seccomp filter: these system calls (x86-64) fail with `errno`; all else is allowed."""

    def make() -> None:
        program = [(0x20, 0, 0, 4), (0x15, 0, len(numbers) + 1, 0xC000003E), (0x20, 0, 0, 0)]
        program += [(0x15, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
        program += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | errno)]
        install(program)

    return make


def refuse_driver(errno: int = 1) -> None:
    """A seccomp filter: ioctl(2) with NVIDIA's magic (F) and with nvidia-uvm's plain numbers fails; others do not."""
    program = [
        (0x20, 0, 0, 4), (0x15, 0, 6, 0xC000003E), (0x20, 0, 0, 0), (0x15, 0, 4, 16),
        (0x20, 0, 0, 24), (0x54, 0, 0, 0xFF00), (0x15, 0, 1, 0x4600), (0x06, 0, 0, 0x00050000 | errno), (0x06, 0, 0, 0x7FFF0000),
    ]  # fmt: skip
    install(program)


def install(program: Sequence[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in program))
    whole = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code)))
    LIBC.prctl(38, 1, 0, 0, 0)
    if LIBC.prctl(22, ctypes.c_ulong(2), whole, ctypes.c_ulong(0), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), "seccomp")


def read_only_by_landlock(*paths: str) -> None:
    """Landlock forbids opening these for writing: EACCES, also for root, whatever the mode says."""
    write = 1 << 1  # LANDLOCK_ACCESS_FS_WRITE_FILE
    ruleset = LIBC.syscall(444, ctypes.byref(ctypes.c_uint64(write)), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock")

    def allow(path: str) -> None:
        fd = os.open(path, os.O_PATH)
        rule = ctypes.create_string_buffer(struct.pack("<Qi", write, fd))
        LIBC.syscall(445, ruleset, 1, rule, 0)
        os.close(fd)

    for place in os.listdir("/"):
        if place != "dev" and not Path("/", place).is_symlink():
            allow(f"/{place}")
    for name in os.listdir("/dev"):
        path = f"/dev/{name}"
        if path not in paths and not Path(path).is_symlink():
            allow(path)
    LIBC.prctl(38, 1, 0, 0, 0)
    if LIBC.syscall(446, ruleset, 0):
        raise OSError(ctypes.get_errno(), "landlock")


def limited(name: str, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(getattr(resource, name), (value, value))


def in_environment(**values: str | None) -> Callable[[], None]:
    def make() -> None:
        for name, value in values.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)

    return make


def both(*parts: Callable[[], None]) -> Callable[[], None]:
    def make() -> None:
        for part in parts:
            part()

    return make


def namespaces(flags: int) -> Callable[[], None]:
    def make() -> None:
        if LIBC.unshare(flags):
            raise OSError(ctypes.get_errno(), "unshare")

    return make


def mapped_as(uid: int) -> Callable[[], None]:
    """A user namespace in which we are `uid`, and everybody else is nobody."""

    def make() -> None:
        was = os.getuid(), os.getgid()
        if LIBC.unshare(0x10000000):
            raise OSError(ctypes.get_errno(), "unshare")
        Path("/proc/self/uid_map").write_text(f"{uid} {was[0]} 1")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"{uid} {was[1]} 1")

    return make


def no_capabilities() -> None:
    for capability in range(41):
        LIBC.prctl(24, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if LIBC.capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capset")


# ---- libraries ----


def library(name: str) -> Path:
    """Where the driver's library is loaded from here: the file, not a link to it."""
    wanted = re.compile(rf"{re.escape(name)}\.so\.\d+\.\d+(\.\d+)?$")
    places = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    places += ["/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"]
    for place in filter(None, places):
        for file in sorted(Path(place).glob(f"{name}.so.*")):
            if wanted.search(file.name):
                return file.resolve()
    raise FileNotFoundError(name)


def first_on_the_path(files: Callable[[Path], None]) -> Callable[[], None]:
    """A folder that `files` fills comes first on LD_LIBRARY_PATH."""

    def make() -> None:
        folder = Path(tempfile.mkdtemp(prefix="gpuctl-fault-"))
        folder.chmod(0o755)
        files(folder)
        old = os.environ.get("LD_LIBRARY_PATH", "")
        os.environ["LD_LIBRARY_PATH"] = f"{folder}:{old}" if old else str(folder)

    return make


def of_another_version(*names: str) -> Callable[[Path], None]:
    """The driver's own libraries with another version written into them: the last digit differs."""

    def files(folder: Path) -> None:
        for name in names:
            file = library(name)
            version = file.name.split(".so.")[1]
            new = version[:-1] + ("3" if version[-1] != "3" else "2")
            copy = folder / f"{name}.so.{new}"
            copy.write_bytes(file.read_bytes().replace(version.encode(), new.encode()))
            (folder / f"{name}.so.1").symlink_to(copy.name)

    return files


def stub(folder: Path) -> None:
    found = sorted(Path("/usr/local").glob("cuda*/targets/*/lib/stubs/libcuda.so")) or sorted(
        Path("/usr/local").glob("cuda*/lib64/stubs/libcuda.so*")
    )
    (folder / "libcuda.so.1").symlink_to(found[0])


def compat(folder: Path) -> None:
    found = sorted(Path("/usr/local").glob("cuda*/compat/libcuda.so.1"))
    (folder / "libcuda.so.1").symlink_to(found[0].resolve())


def content(name: str, data: Callable[[], bytes]) -> Callable[[Path], None]:
    def files(folder: Path) -> None:
        (folder / name).write_bytes(data())

    return files


def half() -> bytes:
    whole = library("libcuda").read_bytes()
    return whole[: len(whole) // 2]


def of_32_bits() -> bytes:
    whole = bytearray(library("libcuda").read_bytes()[: 1 << 16])
    whole[4], whole[18:20] = 1, b"\x03\x00"  # ELFCLASS32, EM_386
    return bytes(whole)


# ---- faults ----


def measured() -> list[Fault]:
    """The tables' faults, with the causes that tests/test_ground_truth.py wants of their raw answers."""
    found: dict[str, Fault] = {}
    for table, gpus in (("one-gpu", 1), ("two-gpus", 2)):
        for line in (TRUTH / f"{table}.jsonl").read_text().splitlines():
            row = json.loads(line)
            case = row.get("case")
            if case is None or (case in found and gpus == 1):
                continue
            machine = "h200" if gpus == 1 else "h200-x2"
            name = case
            if re.search(r"nvidia1\b|two GPUs|nvidia0\b", case) and gpus == 2:
                name = case if "nvidia1" in case or case.startswith("two GPUs") else f"{case}, of two"
            elif case in found:
                continue
            causes = next(
                (tuple(ids) for pattern, ids in EXPECTED.items() if re.search(pattern, f"{machine}: {case}")), ()
            )
            # with two GPUs the one that is left works, and what one has not is missed
            may = ("gpu_count_short", "host_nodes_missing") if causes else ()
            at_most = 1 if case.startswith("nodes 0600 root") else 99
            found[name] = Fault(name, _as_measured(case), causes, may, gpus=gpus, at_most=at_most, options=_eyes(case))
    return list(found.values())


def _eyes(case: str) -> tuple[str, ...]:
    return ("--user", "nobody") if "non-root user" in case or "user 65534" in case else ()


def _as_measured(case: str) -> Callable[[], None]:
    def make() -> None:
        libraries = {"libcuda stub": stub, "cuda-compat": compat, "empty libcuda": content("libcuda.so.1", lambda: b"")}
        for words, files in libraries.items():
            if case.startswith(words):
                usual_dev()
                first_on_the_path(files)()
                return
        # doctor looks with that user's eyes; and a controller may be on at the top of the tree only
        kept = replay.become_nobody, replay.new_group
        replay.become_nobody, replay.new_group = lambda: None, lambda controller="": group_with(controller, kept[1])
        try:
            replay.fault(case, gpus_here())
        finally:
            replay.become_nobody, replay.new_group = kept

    return make


def group_with(controller: str, usual: Callable[[str], Path]) -> Path:
    """A new cgroup that has this controller: below our own, or at the top of the tree where it is on."""
    try:
        return usual(controller)
    except RuntimeError:
        top = Path("/sys/fs/cgroup")
        if controller not in (top / "cgroup.subtree_control").read_text().split():
            raise
        group = top / f"replay-{replay.JOB}"
        group.mkdir()
        return group


def numbers() -> list[tuple[int, int | None]]:
    return [*USUAL, (195, None)]


def own() -> list[Fault]:
    user = ("--user", "nobody")
    refused, wrong, missing = ("device_refused",), ("node_wrong_number",), ("host_nodes_missing",)
    files, space, visible = ("limit_open_files",), ("limit_address_space",), ("cuda_visible_devices",)
    lib = ("libcuda_missing",)
    dev = usual_dev

    def dev_and(*parts: Callable[[], None]) -> Callable[[], None]:
        return both(lambda: (dev(), None)[1], *parts)

    def nodev() -> None:
        for name in dev():
            mount("--bind", f"/dev/{name}", f"/dev/{name}")
            mount("-o", "remount,bind,nodev", f"/dev/{name}")

    def directory() -> None:
        other(nvidia_uvm=None)()
        Path("/dev/nvidia-uvm").mkdir()

    def link(target: str) -> Callable[[], None]:
        def make() -> None:
            other(nvidia_uvm=None)()
            Path("/dev/nvidia-uvm").symlink_to(target)

        return make

    def block() -> None:
        other(nvidia0=None)()
        os.mknod("/dev/nvidia0", 0o60666, os.makedev(195, 0))

    def owned(uid: int, gid: int, mode: int) -> Callable[[], None]:
        def make() -> None:
            for name in dev():
                if "caps" not in name:
                    os.chown(f"/dev/{name}", uid, gid)
                    os.chmod(f"/dev/{name}", mode)

        return make

    def pipes() -> None:
        folder = tempfile.mkdtemp(prefix="gpuctl-mps-")
        for name in ("control", "control_lock", "log"):
            os.mkfifo(f"{folder}/{name}") if name == "control" else Path(folder, name).touch()
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = folder

    def hidden(*paths: str) -> Callable[[], None]:
        return lambda: [mount("-t", "tmpfs", "empty", path) for path in paths] and None

    def homes() -> None:
        needed = [os.getcwd(), sys.executable, *sys.path, os.environ.get("OUT", "")]
        for place in ("/root", "/home", "/var/tmp"):
            if Path(place).is_dir() and not any(path.startswith(f"{place}/") for path in needed):
                mount("-t", "tmpfs", "-o", "ro", "empty", place)

    def without(name: str) -> Callable[[], None]:
        def make() -> None:
            empty = Path(tempfile.mkdtemp(prefix="gpuctl-fault-"), "empty")
            empty.touch()
            for file in {library(name), *library(name).parent.glob(f"{name}.so*")}:
                if not file.is_symlink():
                    mount("--bind", str(empty), str(file))

        return make

    calls = {
        "mbind and get_mempolicy": ((237, 238, 239), 1),
        "memfd_create": ((319,), 1), "socket": ((41,), 1), "mlock": ((149, 151, 325), 1), "sched_setaffinity": ((203,), 1),
        "mknod, unlink, chmod, chown": ((133, 259, 90, 91, 268, 92, 94, 260), 1), "eventfd": ((284, 290), 1),
        "poll, ppoll": ((271,), 1), "sysinfo": ((99,), 1), "madvise": ((28,), 1), "userfaultfd, bpf": ((323, 321), 1),
    }  # fmt: skip
    return [
        # the incident, and its relatives
        Fault("container's rules with yesterday's number of nvidia-uvm", dev_and(lambda: allow_only([*numbers(), (511, None)])), refused),
        Fault("container's rules without NVIDIA", dev_and(lambda: allow_only(USUAL)), refused),
        Fault("container's rules that allow what CUDA needs", dev_and(lambda: allow_only([*numbers(), (uvm(), None)]))),
        Fault("cgroup denies writing to nvidia-uvm", dev_and(lambda: deny_access(uvm(), 0, 4)), refused),
        Fault("cgroup denies reading nvidia0", dev_and(lambda: deny_access(195, 0, 2)), refused, ("gpu_count_short",)),
        Fault("cgroup denies making nvidia-uvm only", dev_and(lambda: deny_access(uvm(), 0, 1))),
        Fault("the cgroup above denies nvidia-uvm", dev_and(lambda: nested(uvm(), 0)), refused),
        Fault("cgroup denies all of nvidia-uvm's major", dev_and(lambda: replay.deny(uvm(), None)), refused),
        # nodes
        Fault("nodes on a mount with nodev", nodev, ("node_nodev",)),
        Fault("nvidia-uvm has uvm-tools' number", lambda: other(nvidia_uvm=(uvm(), 1, 0o666))(), wrong),
        Fault("nvidia-uvm has the number of nvidia-caps", lambda: other(nvidia_uvm=(replay.major("nvidia-caps"), 1, 0o666))(), wrong),
        Fault("nvidiactl has nvidia0's number", other(nvidiactl=(195, 0, 0o666)), wrong),
        Fault("nvidia0 has the number of a GPU that is not there", other(nvidia0=(195, 9, 0o666)), wrong, ("gpu_count_short",)),
        Fault("nvidia-uvm is /dev/zero", other(nvidia_uvm=(1, 5, 0o666)), wrong),
        Fault("nvidia-uvm is a link to /dev/null", link("/dev/null"), wrong),
        Fault("nvidia-uvm is a link that leads nowhere", link("/nowhere"), missing),
        Fault("nvidia-uvm is a folder", directory, ("node_is_file",)),
        Fault("nvidia0 is a block device", block, ("node_is_file",), ("gpu_count_short", "node_wrong_number")),
        Fault("nvidia-uvm-tools and the caps are missing", lambda: usual_dev(
            lambda d: [d.pop(k) for k in list(d) if "tools" in k or "caps" in k]) and None),
        Fault("nvidia-uvm 0600, for a user", lambda: other(nvidia_uvm=(uvm(), 0, 0o600))(), ("node_mode",), options=user),
        Fault("nodes 0660 root:video, for a user", owned(0, 44, 0o660), ("node_mode",), options=user),
        Fault("nodes 0660, the user's own group", owned(0, NOBODY, 0o660), options=user),
        Fault("nodes 0660 nobody:nogroup as mapped root", both(owned(NOBODY, NOBODY, 0o660), mapped_as(0)),
              ("node_unmapped_owner",), ("node_mode",)),
        Fault("nodes 0000, root without capabilities", both(owned(0, 0, 0), no_capabilities), ("node_mode",)),
        Fault("/dev is read-only", both(lambda: (dev(), None)[1], lambda: mount("-o", "remount,ro", "/dev"))),
        # security modules and filters
        Fault("landlock forbids writing to nvidia-uvm", dev_and(lambda: read_only_by_landlock("/dev/nvidia-uvm")), ("security_module",)),
        Fault("landlock forbids writing to nvidiactl", dev_and(lambda: read_only_by_landlock("/dev/nvidiactl")), ("security_module",)),
        *[Fault(f"seccomp refuses {name}", dev_and(refuse_calls(*those, errno=code)), (), ("sandboxed",))
          for name, (those, code) in calls.items()],
        Fault("seccomp refuses the driver's ioctl", dev_and(refuse_driver), ("sandboxed",)),
        Fault("seccomp does not know the driver's ioctl", dev_and(lambda: refuse_driver(38)), ("sandboxed",)),
        # limits
        *[Fault(f"RLIMIT_NOFILE {n}", dev_and(limited("RLIMIT_NOFILE", n)), files if n < 16 else (), files if n >= 16 else ())
          for n in (12, 14, 17, 20, 24, 32)],
        *[Fault(f"RLIMIT_AS {n} GiB", dev_and(limited("RLIMIT_AS", n << 30)), space if n < 16 else ()) for n in (2, 4, 16, 64)],
        Fault("RLIMIT_DATA 64 MiB", dev_and(limited("RLIMIT_DATA", 64 << 20))),
        Fault("RLIMIT_DATA 1 GiB", dev_and(limited("RLIMIT_DATA", 1 << 30))),
        Fault("RLIMIT_STACK 256 KiB", dev_and(limited("RLIMIT_STACK", 256 << 10))),
        Fault("RLIMIT_MEMLOCK 0", dev_and(limited("RLIMIT_MEMLOCK", 0))),
        Fault("RLIMIT_NPROC 200, for a user", dev_and(limited("RLIMIT_NPROC", 200)), options=user),
        Fault("one CPU", dev_and(lambda: os.sched_setaffinity(0, {0}))),
        # environment
        *[Fault(f"CUDA_VISIBLE_DEVICES={value!r}", dev_and(in_environment(CUDA_VISIBLE_DEVICES=value)), causes)
          for value, causes in (("0,0", visible), ("9,0", visible), ("0,9", ()), ("none", visible), ("all", visible), ("void", visible),
                                ("NoDevFiles", visible), (" ", visible), (",", visible), ("0,", ()), (" 0", ()),
                                ("MIG-GPU-1", visible), ("gpu-0", visible), ("4294967296", ()), ("2147483648", visible))],
        Fault("CUDA_DEVICE_ORDER=nonsense", dev_and(in_environment(CUDA_DEVICE_ORDER="nonsense")), ("cuda_device_order",)),
        Fault("CUDA_MPS_PIPE_DIRECTORY without a daemon", dev_and(in_environment(CUDA_MPS_PIPE_DIRECTORY="/nowhere"))),
        Fault("CUDA_MPS_PIPE_DIRECTORY with a pipe nobody reads", dev_and(pipes), (), ("mps_broken",)),
        Fault("NVIDIA_VISIBLE_DEVICES=void", dev_and(in_environment(NVIDIA_VISIBLE_DEVICES="void"))),
        Fault("LD_PRELOAD of a file that is not there", dev_and(in_environment(LD_PRELOAD="/nowhere.so"))),
        Fault("no LD_LIBRARY_PATH", dev_and(in_environment(LD_LIBRARY_PATH=None)), (), lib),
        # libraries
        Fault("libcuda and NVML of another version", dev_and(first_on_the_path(of_another_version("libcuda", "libnvidia-ml"))), ("library_version",)),
        Fault("libcuda of another version", dev_and(first_on_the_path(of_another_version("libcuda")))),
        Fault("NVML of another version", dev_and(first_on_the_path(of_another_version("libnvidia-ml"))), ("library_version",)),
        Fault("half of libcuda", dev_and(first_on_the_path(content("libcuda.so.1", half))), lib),
        Fault("libcuda is a text", dev_and(first_on_the_path(content("libcuda.so.1", lambda: b"version https://git-lfs\n" * 9))), lib),
        Fault("libcuda of 32 bits", dev_and(first_on_the_path(content("libcuda.so.1", of_32_bits))), (), lib),
        Fault("libcuda emptied", dev_and(without("libcuda")), lib),
        Fault("NVML emptied", dev_and(without("libnvidia-ml"))),
        # what CUDA can do without
        Fault("own namespaces of network, IPC and host name", dev_and(namespaces(0x40000000 | 0x08000000 | 0x04000000))),
        Fault("user namespace, as user 1000", dev_and(mapped_as(1000))),
        Fault("root without capabilities", dev_and(no_capabilities)),
        Fault("/proc of processes only", dev_and(lambda: mount("-t", "proc", "-o", "subset=pid", "proc", "/proc"))),
        Fault("/proc/driver, /proc/devices and /sys hidden", dev_and(
            hidden("/proc/driver", "/sys"), lambda: mount("--bind", "/dev/null", "/proc/devices"))),
        Fault("/tmp and home read-only and empty", dev_and(
            homes)),
        # two GPUs
        Fault("cgroup denies nvidia1's writing", dev_and(lambda: deny_access(195, 1, 4)), ("device_refused", "gpu_count_short"), gpus=2),
        Fault("nvidia1 missing", other(nvidia1=None), ("host_nodes_missing", "gpu_count_short"), gpus=2),
        Fault("nvidia0 and nvidia1 exchanged", other(nvidia0=(195, 1, 0o666), nvidia1=(195, 0, 0o666)), wrong, gpus=2),
        Fault("nvidia1 0600, for a user", other(nvidia1=(195, 1, 0o600)), ("node_mode",), ("gpu_count_short",), options=user, gpus=2),
        *[Fault(f"CUDA_VISIBLE_DEVICES={value!r}, of two", dev_and(in_environment(CUDA_VISIBLE_DEVICES=value)), causes, gpus=2)
          for value, causes in (("1,0", ()), ("0,1,0", visible), ("0,-1,1", ()), ("1x", ()), ("0,9,1", ()))],
    ]  # fmt: skip


def every() -> list[Fault]:
    return [*measured(), *own()]


# ---- in a child ----


def run(fault: Fault, argv: Sequence[str]) -> int:
    """Runs argv in the fault; its exit status. What the fault made outside the child is taken away again."""
    replay.JOB = secrets.token_hex(4)
    replay.unshare_mounts()
    if "cgroup2" not in Path("/proc/self/mountinfo").read_text():
        mount("-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")
    pid = os.fork()
    if pid == 0:
        try:
            replay.unshare_mounts()
            fault.make()
            os.execvp(argv[0], list(argv))
        except BaseException as error:
            os.write(2, f"faults: {fault.name}: {type(error).__name__}: {error}\n".encode())
            os._exit(125)
    _, status = os.waitpid(pid, 0)
    for _ in range(50):  # killed descendants leave a moment later
        if take_groups_away():
            break
        time.sleep(0.1)
    return os.waitstatus_to_exitcode(status)


def take_groups_away() -> bool:
    """The cgroups of this fault, inner ones first; whether all are gone."""
    places = [*(own for _, own in replay.own_groups()), Path("/sys/fs/cgroup")]
    mine = [group for place in places for group in place.glob(f"replay-{replay.JOB}*")]
    for group in sorted((g for top in mine for g in [top, *top.glob("replay-*")]), key=lambda g: -len(g.parts)):
        with contextlib.suppress(OSError):
            group.rmdir()
    return not any(group.exists() for group in mine)


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        for fault in every():
            print(f"{fault.name:<75} {', '.join(fault.causes) or 'well'}")
        return 0
    if len(arguments) < 3 or arguments[1] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    known = {fault.name: fault for fault in every()}
    if arguments[0] not in known:
        print(f"faults: no fault {arguments[0]!r}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return run(known[arguments[0]], arguments[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
