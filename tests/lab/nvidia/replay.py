"""Makes one fault after another and asks open(2), NVML and CUDA, in a process tree that has the driver of the double.

    python -m tests.lab.nvidia ROOT -- python -m tests.lab.nvidia.replay ROOT < cases.json > answers.jsonl

A case is a row of tests/ground_truth/nvidia, or a part of one: its name or its own words tell the fault, and the answer
has the row's keys. Each runs in a process, a mount namespace and a /dev of its own. The program is the one that asked
the real driver, but for the names of files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import secrets
import shutil
import socket
import stat
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
HERE = Path("/mnt/machine")  # where the file system with the libraries is seen, by everybody
LIBRARIES = HERE / f"usr/lib/{os.uname().machine}-linux-gnu"
TOOLKIT = HERE / "usr/local/cuda-13.2"
NOBODY = 65534
JOB = secrets.token_hex(4)  # of this process and the children it forks
BPF_NR = {"x86_64": 321, "aarch64": 280}[os.uname().machine]


def mount(*arguments: str) -> None:
    subprocess.run(["mount", "-n", *arguments], check=True, stdin=subprocess.DEVNULL)


def unshare_mounts() -> None:
    if LIBC.unshare(0x20000):
        raise OSError(ctypes.get_errno(), "unshare")
    mount("--make-rprivate", "/")


def major(name: str) -> int:
    found = re.search(rf"^\s*(\d+) {name}$", Path("/proc/devices").read_text(), re.M)
    return int(found[1]) if found else -1


def nodes(gpus: int) -> dict[str, tuple[int, int, int]]:
    """Below /dev: major, minor, mode."""
    uvm, caps = major("nvidia-uvm"), major("nvidia-caps")
    found = {f"nvidia{n}": (195, n, 0o666) for n in range(gpus)}
    found |= {"nvidiactl": (195, 255, 0o666), "nvidia-uvm": (uvm, 0, 0o666), "nvidia-uvm-tools": (uvm, 1, 0o666)}
    return found | {"nvidia-caps/nvidia-cap1": (caps, 1, 0o400), "nvidia-caps/nvidia-cap2": (caps, 2, 0o444)}


def make_dev(wanted: dict[str, tuple[int, int, int]]) -> None:
    """A /dev of these NVIDIA nodes and what every program needs."""
    mount("-t", "tmpfs", "-o", "mode=755", "dev", "/dev")
    usual = {"null": (1, 3, 0o666), "zero": (1, 5, 0o666), "random": (1, 8, 0o666), "urandom": (1, 9, 0o666)}
    for name, (high, low, mode) in {**usual, **wanted}.items():
        path = Path("/dev") / name
        path.parent.mkdir(exist_ok=True)
        os.mknod(path, stat.S_IFCHR | mode, os.makedev(high, low))
        path.chmod(mode)


# ---- faults ----


def deny(high: int, low: int | None) -> None:
    """Into a cgroup whose device program denies just this: a real eBPF program on a real cgroup v2."""

    def insn(code: int, to: int = 0, source: int = 0, jump: int = 0, value: int = 0) -> bytes:
        return struct.pack("<BBhi", code, source << 4 | to, jump, value)

    tests = insn(0x61, 2, 1, 4) + insn(0x61, 3, 1, 8)
    tests += insn(0x55, 2, 0, 3 if low is not None else 2, high)
    tests += insn(0x55, 3, 0, 2, low) if low is not None else b""
    program = tests + insn(0xB7) + insn(0x95) + insn(0xB7, value=1) + insn(0x95)
    group = new_group()
    code, licence = ctypes.create_string_buffer(program), ctypes.create_string_buffer(b"GPL")
    load = struct.pack(
        "<IIQQIIQII", 15, len(program) // 8, ctypes.addressof(code), ctypes.addressof(licence), 0, 0, 0, 0, 0
    )
    fd = LIBC.syscall(BPF_NR, 5, ctypes.create_string_buffer(load, 144), 144)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "loading a device program")
    folder = os.open(group, os.O_RDONLY)
    attach = struct.pack("<IIII", folder, fd, 6, 0)
    if LIBC.syscall(BPF_NR, 8, ctypes.create_string_buffer(attach, 32), 32):
        raise OSError(ctypes.get_errno(), "attaching a device program")
    os.close(folder)
    os.close(fd)
    (group / "cgroup.procs").write_text("0")


def new_group(controller: str = "") -> Path:
    """A new cgroup below this process's own: v2, or v1 when only there the controller is."""
    for kind, own in own_groups(controller):
        group = own / f"replay-{JOB}"
        group.mkdir()
        if not controller or kind == "cgroup" or f"{controller}.max" in os.listdir(group):
            return group
        group.rmdir()
    raise RuntimeError(f"no cgroup with {controller or 'devices'} on this machine")


def own_groups(controller: str = "") -> Iterator[tuple[str, Path]]:
    """(cgroup2 or cgroup, folder) of the groups this process is in: v2, and v1's of that controller."""
    own = Path("/proc/self/cgroup").read_text()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        fields_, kind_ = fields.split(), kind.split()
        if kind_[0] == "cgroup2":
            path = re.search(r"^0::(.*)$", own, re.M)
        elif kind_[0] == "cgroup" and controller and controller in kind_[2].split(","):
            path = re.search(rf"^\d+:(?:\S*,)?{controller}(?:,\S*)?:(.*)$", own, re.M)
        else:
            continue
        if path is not None:
            yield kind_[0], Path(fields_[4] + path[1])


def take_groups_away() -> None:
    """What the case before made. Only where it is made: other labs' groups come and go beside ours."""
    for controller in ("", "memory", "pids"):
        for _, own in own_groups(controller):
            with contextlib.suppress(FileNotFoundError):
                (own / f"replay-{JOB}").rmdir()


def limit(controller: str, value: str) -> None:
    group = new_group(controller)
    v2, v1 = group / f"{controller}.max", group / f"{controller}.limit_in_bytes"
    (v2 if v2.exists() else v1).write_text(value)
    (group / "cgroup.procs").write_text("0")


def hide(path: str) -> None:
    """An ordinary file over the node."""
    file = Path("/dev/.ordinary")
    file.touch()
    file.chmod(0o666)
    mount("--bind", str(file), path)
    file.unlink()


def drop_mknod() -> None:
    """As setpriv --bounding-set=-mknod leaves root."""
    LIBC.prctl(24, 27, 0, 0, 0)

    class Sets(ctypes.Structure):
        _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]

    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (Sets * 2)()
    LIBC.capget(header, sets)
    sets[0].effective &= ~(1 << 27)
    sets[0].permitted &= ~(1 << 27)
    if LIBC.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def enter_user_namespace() -> None:
    """As unshare -U -r."""
    uid, gid = os.getuid(), os.getgid()
    if LIBC.unshare(0x10000000):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def fault(case: str, gpus: int) -> dict[str, Path]:
    """Makes the fault that a row's name tells. Returns the libraries to be loaded instead of the usual ones."""
    every = nodes(gpus)
    few = {k: v for k, v in every.items() if k in ("nvidia0", "nvidiactl", "nvidia-uvm")}
    plain = {k: v for k, v in every.items() if "cap" not in k and "tools" not in k}
    match case:
        case "healthy" | "no CAP_MKNOD, healthy nodes" | "user namespace (unshare -U -r)" | "non-root user":
            make_dev(every)
        case "all nodes missing (empty /dev)" | "no CAP_MKNOD, all nodes missing":
            make_dev({})
        case "uvm node missing":
            make_dev({k: v for k, v in few.items() if k != "nvidia-uvm"})
        case "uvm node with a stale major (508)":
            make_dev({**few, "nvidia-uvm": (508, 0, 0o666)})
        case "no CAP_MKNOD, nvidia-uvm with a stale major":  # the recorded one led to somebody else's device
            make_dev({**plain, "nvidia-uvm": (1, 5, 0o666)})
        case "nodes 0600 root, non-root user":
            make_dev({k: (a, b, 0o600) for k, (a, b, _) in few.items()})
        case _ if missing := re.fullmatch(r"no CAP_MKNOD, (\S+) missing", case):
            make_dev({k: v for k, v in plain.items() if k != missing[1]})
        case _:
            make_dev(every)
    if found := re.search(r"cgroup (?:v2 )?denies (?:/dev/)?(\S+) \(\d+:\d+\)", case):
        deny(*every[found[1]][:2])
    elif case == "cgroup v2 denies all of major 195":
        deny(195, None)
    elif found := re.fullmatch(r"node hidden by a regular file: (\S+)", case):
        hide(found[1])
    elif case == "/proc/devices hidden":
        mount("--bind", "/dev/null", "/proc/devices")
    elif case == "/proc/driver/nvidia hidden":
        mount("-t", "tmpfs", "empty", "/proc/driver/nvidia")
    elif case == "/sys hidden":
        mount("-t", "tmpfs", "empty", "/sys")
    elif found := re.search(r"CUDA_VISIBLE_DEVICES=(\S+)", case):
        os.environ["CUDA_VISIBLE_DEVICES"] = found[1]
    elif case == "CUDA_VISIBLE_DEVICES empty":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif case == "cgroup v2 memory.max 64 MiB":
        limit("memory", str(64 << 20))
    elif case == "cgroup v2 pids.max 4":
        limit("pids", "4")
    elif case == "libcuda stub first on LD_LIBRARY_PATH":
        return {"libcuda.so.1": TOOLKIT / "lib64/stubs/libcuda.so.1"}
    elif case == "cuda-compat first on LD_LIBRARY_PATH":
        return {"libcuda.so.1": TOOLKIT / "compat/libcuda.so.1"}
    elif case == "empty libcuda.so.1 first on LD_LIBRARY_PATH":
        empty = Path("/dev/shm/libcuda.so.1")
        empty.parent.mkdir()
        empty.touch()
        return {"libcuda.so.1": empty}
    limits = {"RLIMIT_MEMLOCK 64": (resource.RLIMIT_MEMLOCK, 64 << 10), "RLIMIT_AS 8": (resource.RLIMIT_AS, 8 << 30)}
    limits["RLIMIT_NOFILE 16"] = (resource.RLIMIT_NOFILE, 16)
    for name, (which, value) in limits.items():
        if case.startswith(name):
            resource.setrlimit(which, (value, value))
    if case.startswith("no CAP_MKNOD"):
        drop_mknod()
    if "user 65534" in case or "non-root user" in case:
        become_nobody()
    if case.startswith("user namespace"):
        enter_user_namespace()
    return {}


# ---- questions ----


def ask(libraries: dict[str, Path]) -> dict[str, Any]:
    """Every node opened, then NVML, then CUDA: one row."""

    def load(name: str) -> ctypes.CDLL:
        return ctypes.CDLL(str(libraries.get(name, LIBRARIES / name)))

    answer: dict[str, Any] = {"opens": {}}
    for name in sorted([*os.listdir("/dev"), *(f"nvidia-caps/{n}" for n in _listed("/dev/nvidia-caps"))]):
        if name.startswith("nvidia") and name != "nvidia-caps":
            try:
                os.close(os.open(f"/dev/{name}", os.O_RDWR | os.O_CLOEXEC))
                answer["opens"][f"/dev/{name}"] = "ok"
            except OSError as error:
                answer["opens"][f"/dev/{name}"] = errno.errorcode[error.errno or 0]
    answer["nvml"] = load("libnvidia-ml.so.1").nvmlInit_v2()
    try:
        cuda = load("libcuda.so.1")
    except OSError as error:
        answer["dlopen"] = str(error).rpartition("/")[2]
        return answer
    number = ctypes.c_int(0)
    answer["cuDriverGetVersion"] = [cuda.cuDriverGetVersion(ctypes.byref(number)), number.value]
    answer["cuInit"] = cuda.cuInit(0)
    count = ctypes.c_int(-1)
    answer["cuDeviceGetCount"] = [cuda.cuDeviceGetCount(ctypes.byref(count)), count.value]
    text = ctypes.c_char_p()
    code = cuda.cuGetErrorName(answer["cuInit"], ctypes.byref(text))
    answer["name"] = text.value.decode() if code == 0 and text.value else ""
    if answer["cuInit"] == 0 and count.value > 0:
        answer["cuDeviceGet"] = cuda.cuDeviceGet(ctypes.byref(number), 0)
        context = ctypes.c_void_p()
        answer["cuDevicePrimaryCtxRetain"] = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    return answer


def ask_more() -> dict[str, Any]:
    """What NVML counts, what stays open, what became of the nodes."""
    nvml = ctypes.CDLL(str(LIBRARIES / "libnvidia-ml.so.1"))
    answer: dict[str, Any] = {"nvml": nvml.nvmlInit_v2(), "handles": []}
    count = ctypes.c_uint(99)
    code = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    answer["count"] = [code, count.value if code == 0 else None]
    for index in range(3):
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        code = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        answer["handles"].append([code, nvml.nvmlDeviceGetName(handle, name, 96) if code == 0 else "-"])
    before = len(_listed("/proc/self/fd")) - 1
    cuda = ctypes.CDLL(str(LIBRARIES / "libcuda.so.1"))
    answer["cuInit"] = cuda.cuInit(0)
    devices = ctypes.c_int(-1)
    cuda.cuDeviceGetCount(ctypes.byref(devices))
    answer["devices"] = devices.value
    answer["descriptors"] = [before, len(_listed("/proc/self/fd")) - 1]
    return answer


def ask_visible() -> dict[str, Any]:
    cuda = ctypes.CDLL(str(LIBRARIES / "libcuda.so.1"))
    answer: dict[str, Any] = {"cuInit": cuda.cuInit(0), "devices": []}
    count = ctypes.c_int(-1)
    cuda.cuDeviceGetCount(ctypes.byref(count))
    answer["count"] = count.value
    for index in range(max(count.value, 0)):
        text = ctypes.create_string_buffer(16)
        cuda.cuDeviceGetPCIBusId(text, 16, index)
        answer["devices"].append(text.value.decode())
    return answer


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def smi(argv: list[str], who: str) -> dict[str, Any]:
    change = {"nobody": become_nobody, "root without CAP_MKNOD": drop_mknod}.get(who)
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(LIBRARIES), "TZ": "UTC"}
    done = subprocess.run(
        [str(HERE / "usr/bin/nvidia-smi"), *argv], capture_output=True, text=True,
        env=environment, preexec_fn=change,
    )  # fmt: skip
    return {"argv": argv, "rc": done.returncode, "out": done.stdout + done.stderr}


def in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """In a process of its own with descriptors 0, 1 and 2."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(theirs.fileno(), 1)
            os.closerange(3, 256)
            said = json.dumps(work())
        except BaseException:
            said = json.dumps({"trouble": traceback.format_exc()})
        left = memoryview(said.encode())
        while left:
            left = left[os.write(1, left) :]
        os._exit(0)
    theirs.close()
    text = b""
    with ours:
        while got := ours.recv(65536):
            text += got
    os.waitpid(pid, 0)
    return dict(json.loads(text or "{}"))


def replay(case: dict[str, Any], gpus: int) -> dict[str, Any]:
    if "prepare" in case:
        make_dev(nodes(gpus))
        Path("/dev").chmod(0o1777)  # as it was where this was recorded
        Path("/dev/char").mkdir()
        subprocess.run(["sh", "-c", case["prepare"].replace("/mnt", "/dev")], cwd="/dev", stderr=subprocess.DEVNULL)

        def as_told() -> dict[str, Any]:
            {"nobody": become_nobody, "root without CAP_MKNOD": drop_mknod}.get(case["as"], lambda: None)()
            return ask_more()

        answer = in_child(as_told)
        answer["after"] = sorted(n for n in os.listdir("/dev") if n.startswith("nvidia"))
        if "smi" in case:
            answer["smi -L"], answer["smi"] = smi(["-L"], case["as"]), smi([], case["as"])
        return answer
    if "argv" in case:
        make_dev(nodes(gpus))
        return smi(case["argv"], case["as"])
    if "CUDA_VISIBLE_DEVICES" in case or "limit" in case:
        make_dev(nodes(gpus))

        def limited() -> dict[str, Any]:
            if "limit" in case:
                which, value = case["limit"]
                resource.setrlimit(getattr(resource, which), (value, value))
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = case["CUDA_VISIBLE_DEVICES"]
            return ask_visible()

        return in_child(limited)
    return in_child(lambda: ask(fault(case["case"], gpus)))


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    job = json.load(sys.stdin)
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    unshare_mounts()
    mount("-t", "tmpfs", "-o", "mode=755", "mnt", "/mnt")
    HERE.mkdir()
    mount("--bind", str(root), str(HERE))
    kernel = root / "var/lib/nvidia-double/kernel"
    mount("--bind", str(kernel / "proc/driver"), "/proc/driver")
    mount("--bind", str(kernel / "sys/module"), "/sys/module")
    make_dev(nodes(job["gpus"]))
    smi(["-pm", "1"], "root")  # as on the recorded machines
    for case in job["cases"]:

        def alone(case: dict[str, Any] = case) -> dict[str, Any]:
            unshare_mounts()
            return replay(case, job["gpus"])

        answer = in_child(alone)
        take_groups_away()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if shutil.which("mount") is None:
        sys.exit("mount is missing")
    main()
