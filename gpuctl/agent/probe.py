"""Asks one machine everything that decides whether CUDA can start there, in one go.

Reads a job (JSON) on stdin, writes a snapshot (JSON, docs/snapshot.md) on stdout. Raw answers only: text, errnos,
return codes. What could not be asked is an answer too ({"error": ...}). It changes nothing: whatever could make
libcuda mend the machine (device nodes, modules) is taken away from the children that load it, see `guard`.

Job, every key optional:
  name, role ("guest" | "node" | "machine"), vmids [200]    what this machine is; guests to look at on a node
  service {unit, user}       whose eyes to see with besides root's: user, groups, environment and limits of that unit
  units, files, nodes, commands ([argv, ...])                further things to read
  limits {cuda_s, command_s, deadline_s}                     seconds; a child that takes longer is a hang
  context (bool)             also create and drop a CUDA context on each GPU (uses some memory for a moment)
  skip ["cuda", ...]         sections not wanted

Standard library only, Python 3.9, root or not.
"""

import ctypes
import errno
import glob
import json
import os
import platform
import re
import signal
import stat
import struct
import subprocess
import sys
import threading
import time

SCHEMA = "gpuctl.snapshot/1"
VERSION = 1

MAX_TEXT = 200_000  # bytes of one file or output; the log has its own limit
MAX_LOG_LINES = 4000

FILES = """
/proc/devices /proc/modules /proc/cmdline /proc/version /proc/uptime /proc/meminfo /proc/mounts
/proc/1/stat /proc/1/cgroup /proc/self/status /proc/self/cgroup /proc/self/mountinfo /proc/self/limits
/proc/self/uid_map /proc/self/gid_map
/proc/sys/kernel/random/boot_id /proc/sys/kernel/osrelease /proc/sys/kernel/hostname /proc/sys/kernel/dmesg_restrict
/proc/sys/kernel/numa_balancing /proc/sys/kernel/unprivileged_userns_clone
/proc/driver/nvidia/version /proc/driver/nvidia/params /proc/driver/nvidia/registry
/proc/driver/nvidia/capabilities/mig/config /proc/driver/nvidia/capabilities/mig/monitor
/proc/driver/nvidia-caps/mig-minors /proc/driver/nvidia-caps/sys-minors
/sys/module/nvidia/version /sys/module/nvidia/initstate /sys/module/nvidia/refcnt
/sys/module/nvidia_uvm/version /sys/module/nvidia_uvm/initstate /sys/module/nvidia_uvm/refcnt
/sys/module/nvidia_uvm/parameters/uvm_disable_hmm
/sys/module/nvidia_modeset/version /sys/module/nvidia_drm/version /sys/module/nouveau/initstate
/sys/kernel/mm/transparent_hugepage/enabled /sys/kernel/mm/transparent_hugepage/shmem_enabled
/sys/fs/cgroup/memory.max /sys/fs/cgroup/memory.current /sys/fs/cgroup/pids.max
/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c
/sys/kernel/security/lockdown /sys/kernel/security/lsm
/sys/class/dmi/id/product_name /sys/class/dmi/id/sys_vendor
/run/systemd/container /etc/os-release /etc/hostname /etc/modules /etc/ld.so.conf
/etc/nvidia-container-runtime/config.toml /run/gpuctl/instance.json
/etc/gpuctl/tune.json /etc/systemd/system/multi-user.target.wants/gpuctl-tune.service
""".split()

GLOBS = """
/proc/driver/nvidia/gpus/*/information /proc/driver/nvidia/gpus/*/power
/proc/driver/nvidia/capabilities/gpu*/mig/gi*/access /proc/driver/nvidia/capabilities/gpu*/mig/gi*/ci*/access
/etc/modprobe.d/*.conf /etc/modules-load.d/*.conf /etc/ld.so.conf.d/*.conf
/etc/apt/preferences.d/*nvidia* /etc/systemd/system/*nvidia* /etc/udev/rules.d/*nvidia*
/sys/devices/system/node/node*/cpulist /sys/devices/system/node/node*/meminfo
/sys/devices/system/cpu/cpufreq/policy*/scaling_governor
""".split()

NODE_GLOBS = ["/dev/nvidia*", "/dev/nvidia-caps/*", "/dev/dri/*", "/dev/vfio/*", "/dev/kfd"]
EXPECTED_NODES = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"]
CUDA_NODE = re.compile(r"/dev/nvidia(\d+|ctl|-uvm|-uvm-tools|-modeset)$")  # a folder of such a name is a fault
STAT_ONLY = [
    "/usr/bin/nvidia-modprobe",
    "/usr/bin/nvidia-smi",
    "/usr/bin/nvidia-persistenced",
    "/sys/module/nvidia",
    "/sys/module/nvidia_uvm",
    "/etc/modprobe.d",
]

COMMANDS = [
    ["nvidia-smi", "-L"],
    ["dkms", "status"],
    ["mokutil", "--sb-state"],
    ["modinfo", "-F", "version", "nvidia"],
    ["modinfo", "-F", "license", "nvidia"],
    ["ldconfig", "-p"],
    ["id"],
    ["systemd-detect-virt"],
]
NODE_COMMANDS = [["pct", "list"], ["pveversion", "-v"]]
UNITS = [
    "nvidia-persistenced.service",
    "nvidia-fabricmanager.service",
    "nvidia-imex.service",
    "pve-guests.service",
    "pve-ha-lrm.service",
    "systemd-modules-load.service",
]
UNIT_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,Result,MainPID,ExecMainStatus,ExecMainCode,NRestarts,User,Group,Environment,"
    "EnvironmentFiles,FragmentPath,DropInPaths,UnitFileState,ActiveEnterTimestamp,ActiveEnterTimestampMonotonic,"
    "InactiveEnterTimestampMonotonic,ConditionResult,AssertResult,StatusText,ControlGroup,InvocationID,"
    "PrivateDevices,DevicePolicy,DeviceAllow,NoNewPrivileges,ProtectKernelModules,PrivateUsers,RootDirectory,"
    "LimitNOFILE,LimitNOFILESoft,LimitMEMLOCK,LimitAS,LimitASSoft,MemoryMax,TasksMax,After,Before,WantedBy,ExecStart"
)

LIBRARY_GLOBS = [
    d + "/" + name
    for d in (
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/lib64",
        "/usr/local/lib",
        "/usr/lib/x86_64-linux-gnu/nvidia/current",
        "/usr/local/nvidia/lib64",
        "/usr/local/nvidia/lib",
        "/usr/local/cuda*/compat",
        "/usr/local/cuda*/compat/lib.real",
        "/usr/local/cuda*/lib64/stubs",
        "/usr/local/cuda*/targets/*/lib/stubs",
    )
    for name in ("libcuda.so*", "libnvidia-ml.so*", "libnvidia-ptxjitcompiler.so*")
]

# Environment of a service may hold tokens: only what bears on CUDA and serving leaves the machine with its value.
ENV_SHOWN = re.compile(
    r"^(CUDA|NVIDIA|NCCL|LD_|PATH$|PYTORCH|TORCH|TRITON|OMP_|SGL|SGLANG|VLLM|GGML|LLAMA|FLASHINFER|HF_HOME|HF_HUB_|"
    r"HF_XET|HF_TOKEN|HUGGINGFACE_HUB_CACHE|TRANSFORMERS|XDG_|HOME$|USER$|LANG$|TMPDIR$|CUBLAS|DISABLE_|GLOO|UCX|NVSHMEM|container$)"
)
ENV_SECRET = re.compile(r"(TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE)", re.I)
LOG_WANTED = re.compile(
    r"nvrm|nvidia|nvlink|nvswitch|xid|nouveau|vfio|apparmor=|iommu|dmar|amd-vi|aer:|pcie ?bus error|d3cold|bar \d|"
    r"out of memory|oom|key was rejected|module verification|lockdown|secure ?boot|command line|linux version|"
    r"hung task|blocked for more than|segfault|mce:|hardware error|suspend|resume|numa|hugepage|no space for",
    re.I,
)


def name_of(number):
    return errno.errorcode.get(number, "errno %s" % number)


def failed(exception):
    """An exception as an answer."""
    if isinstance(exception, OSError) and exception.errno:
        return {"error": name_of(exception.errno)}
    return {"error": "%s: %s" % (type(exception).__name__, exception)}


def as_text(data):
    """Bytes as JSON can carry them: text, or hex where they are no text (an EFI variable, PCI registers)."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "hex:" + data.hex() if b"\n" not in data else data.decode("utf-8", "replace")
    return "hex:" + data.hex() if "\0" in text else text


def read(path, limit=MAX_TEXT):
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except Exception as exception:
        return failed(exception)
    if len(data) > limit:
        return as_text(data[:limit]) + "\n[cut]"
    return as_text(data)


def own_limits():
    """The lines of /proc/self/limits that matter, asked of the kernel without opening a file."""
    import resource

    text = ""
    for title, name in (
        ("Max open files", "RLIMIT_NOFILE"),
        ("Max address space", "RLIMIT_AS"),
        ("Max locked memory", "RLIMIT_MEMLOCK"),
    ):
        limits = resource.getrlimit(getattr(resource, name))
        words = ["unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in limits]
        text += "%-25s %-20s %-20s\n" % (title, words[0], words[1])
    return text


def link(path):
    try:
        return os.readlink(path)
    except OSError as exception:
        return failed(exception)


def look(path):
    """lstat(2), and the target's stat(2) where it is a link."""
    try:
        info = os.lstat(path)
        answer = {}
        if stat.S_ISLNK(info.st_mode):
            answer["link"] = os.readlink(path)
            info = os.stat(path)
    except OSError as exception:
        return failed(exception)
    answer.update(mode=info.st_mode, uid=info.st_uid, gid=info.st_gid, size=info.st_size, mtime=round(info.st_mtime, 3))
    if stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
        answer["rdev"] = "%d:%d" % (os.major(info.st_rdev), os.minor(info.st_rdev))
    return answer


def shown(env):
    """What of an environment may leave this machine: names that matter here, values that are no secret."""
    return {
        name: "(not shown)" if ENV_SECRET.search(name) else value
        for name, value in sorted(env.items())
        if ENV_SHOWN.match(name)
    }


def environment(data):
    """NUL-separated environment, real values."""
    pairs = (item.partition(b"=") for item in data.split(b"\0") if b"=" in item)
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, _, value in pairs}


def command(argv, seconds, env=None):
    """Runs argv; a missing program, a failure and a hang are answers."""
    if env is None:
        env = dict(os.environ)
        env["PATH"] = env.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
        env["LC_ALL"] = "C"
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
    except Exception as exception:
        return failed(exception)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        out, err = give_up(process)
        return {
            "error": "hang",
            "seconds": seconds,
            "stdout": as_text(out[:MAX_TEXT]),
            "stderr": as_text(err[:MAX_TEXT]),
            "state": state_of(process.pid),
        }
    return {"rc": process.returncode, "stdout": as_text(out[:MAX_TEXT]), "stderr": as_text(err[:MAX_TEXT])}


def give_up(process):
    """Kills a child that hangs. One that sleeps in the driver (state D) does not die; it is left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        pass
    try:
        return process.communicate(timeout=0.5)
    except subprocess.TimeoutExpired:
        out = b""
        try:
            os.set_blocking(process.stdout.fileno(), False)
            out = process.stdout.read() or b""
        except (OSError, ValueError):
            pass
        return out, b""


def state_of(pid):
    found = re.search(r"^State:\s+(\S)", str(read("/proc/%d/status" % pid)), re.M)
    return {"state": found.group(1) if found else "gone", "wchan": read("/proc/%d/wchan" % pid)}


# ---------------------------------------------------------------------------------------------------------------
# What runs in a child: it may hang, crash, or be killed, and it must not be able to mend the machine.
# ---------------------------------------------------------------------------------------------------------------

CHILD = r'''
import ctypes, json, os, platform, resource, stat, sys, time
job = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)

def say(**answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()

def prctl(option, a=0, b=0, c=0, d=0):
    u = ctypes.c_ulong
    return libc.prctl(ctypes.c_int(option), u(a), u(b), u(c), u(d)) == 0

def read_only_dev():
    """Own mount namespace, /dev and the mounts on its NVIDIA nodes read-only: opening a device for writing still
    works there, making, removing or changing a node does not. Flags that are set (nodev!) stay set."""
    if libc.unshare(0x20000) != 0:                      # CLONE_NEWNS
        return False
    private, bind, rec, remount, ro = 1 << 18, 4096, 16384, 32, 1
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(private | rec), None) != 0:
        return False
    if not os.path.ismount("/dev") and libc.mount(b"/dev", b"/dev", None, ctypes.c_ulong(bind | rec), None) != 0:
        return False
    kept = {"nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
    done = False
    with open("/proc/self/mountinfo") as lines:
        mounts = [line.split() for line in lines]
    for fields in mounts:
        point = fields[4]
        if point == "/dev" or point.startswith("/dev/nvidia") or point == "/dev/char":
            flags = remount | bind | ro
            for word in fields[5].split(","):
                flags |= kept.get(word, 0)
            if libc.mount(b"none", point.encode(), None, ctypes.c_ulong(flags), None) != 0:
                return False
            done = done or point == "/dev"
    return done

def no_new_nodes():
    """Where mounting is not allowed: Landlock forbids making nodes and removing files except where programs keep
    temporary files, and seccomp makes chmod, chown and mknod fail."""
    make_char, make_block, remove_file = 1 << 6, 1 << 11, 1 << 5
    handled = ctypes.c_uint64(make_char | make_block | remove_file)
    ruleset = libc.syscall(444, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("access", ctypes.c_uint64), ("fd", ctypes.c_int32)]
    for place in ("/tmp", "/var/tmp", "/dev/shm", "/home", "/root", "/run"):
        try:
            fd = os.open(place, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rule = Beneath(remove_file, fd)
        libc.syscall(445, ruleset, 1, ctypes.byref(rule), 0)
        os.close(fd)
    if libc.syscall(446, ruleset, 0) != 0:
        return False
    os.close(ruleset)
    numbers = {"x86_64": (0xC000003E, (133, 259, 90, 91, 268, 92, 93, 94, 260, 452)),
               "aarch64": (0xC00000B7, (33, 52, 53, 54, 55, 452))}.get(platform.machine())
    if numbers is None:
        return False
    arch, calls = numbers
    class Insn(ctypes.Structure):
        _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]
    program = [(0x20, 0, 0, 4), (0x15, 0, len(calls) + 1, arch), (0x20, 0, 0, 0)]
    program += [(0x15, len(calls) - i, 0, number) for i, number in enumerate(calls)]
    program += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]      # allow; else errno EPERM
    class Program(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Insn))]
    insns = (Insn * len(program))(*[Insn(*each) for each in program])
    whole = Program(len(program), insns)
    return libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(whole), ctypes.c_ulong(0), ctypes.c_ulong(0)) == 0

def guard():
    """Takes away what libcuda, NVML and the setuid nvidia-modprobe they call would change the machine with.
    Returns the names of the guards that hold."""
    held = []
    if os.geteuid() == 0 and read_only_dev():
        held.append("read-only /dev")
    mknod, sys_module = 27, 16
    dropped = all([prctl(24, cap) for cap in (mknod, sys_module)])       # PR_CAPBSET_DROP
    if prctl(38, 1):                                                      # PR_SET_NO_NEW_PRIVS
        held.append("no new privileges")
    if not held or held[0] != "read-only /dev":
        if no_new_nodes():
            held.insert(0, "landlock and seccomp")
    if os.geteuid() == 0:
        class Header(ctypes.Structure):
            _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
        class Data(ctypes.Structure):
            _fields_ = [(part, ctypes.c_uint32) for part in ("effective", "permitted", "inheritable")]
        header, data = Header(0x20080522, 0), (Data * 2)()
        if libc.capget(ctypes.byref(header), data) == 0:
            mask = ~((1 << mknod) | (1 << sys_module)) & 0xFFFFFFFF
            for part in ("effective", "permitted", "inheritable"):
                setattr(data[0], part, getattr(data[0], part) & mask)
            if libc.capset(ctypes.byref(header), data) == 0 and dropped:
                held.append("no CAP_MKNOD, CAP_SYS_MODULE")
    return held

def become():
    for name, value in job.get("rlimits", {}).items():
        try:
            kind = getattr(resource, name)
            soft, hard = resource.getrlimit(kind)
            if hard == resource.RLIM_INFINITY or value <= hard:
                resource.setrlimit(kind, (value, hard))
        except (AttributeError, OSError, ValueError):
            pass
    if "uid" in job and os.geteuid() == 0 and job["uid"] != 0:
        os.setgroups(job.get("groups", []))
        os.setgid(job["gid"])
        os.setuid(job["uid"])

def opens():
    for path in job["nodes"]:
        say(opening=path)
        try:
            info = os.stat(path)
            if not (stat.S_ISCHR(info.st_mode) or stat.S_ISREG(info.st_mode)):
                say(path=path, open="not a device")
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            import errno
            say(path=path, open=errno.errorcode.get(error.errno, str(error.errno)))
            continue
        os.close(fd)
        say(path=path, open="OK")

def mapped():
    with open("/proc/self/maps") as lines:
        paths = {line.split(None, 5)[5].strip() for line in lines if line.count(" ") >= 5 and "/" in line}
    return sorted(p for p in paths if "cuda" in p or "nvidia" in p or "/libcuda" in p)

def cuda():
    for name in ("libcuda.so.1",):
        try:
            lib = ctypes.CDLL(name)
        except OSError as error:
            say(dlopen=str(error))
            return
    say(dlopen="OK", mapped=mapped())
    number = ctypes.c_int(-1)
    rc = lib.cuDriverGetVersion(ctypes.byref(number))
    say(cuDriverGetVersion=number.value if rc == 0 else {"rc": rc})
    say(calling="cuInit")
    started = time.monotonic()
    rc = lib.cuInit(0)
    say(cuInit=rc, cuInit_ms=round((time.monotonic() - started) * 1000, 1))
    say(mapped=mapped())
    number.value = -1
    counted = lib.cuDeviceGetCount(ctypes.byref(number))
    say(cuDeviceGetCount=number.value if counted == 0 else {"rc": counted})
    if rc != 0 or counted != 0:
        return
    gpus = []
    for index in range(number.value):
        device, gpu = ctypes.c_int(-1), {"index": index}
        gpu["cuDeviceGet"] = lib.cuDeviceGet(ctypes.byref(device), index)
        text = ctypes.create_string_buffer(256)
        if lib.cuDeviceGetName(text, 256, device) == 0:
            gpu["name"] = text.value.decode("utf-8", "replace")
        if lib.cuDeviceGetPCIBusId(text, 256, device) == 0:
            gpu["bus"] = text.value.decode("utf-8", "replace")
        uuid = (ctypes.c_ubyte * 16)()
        get_uuid = getattr(lib, "cuDeviceGetUuid_v2", None) or getattr(lib, "cuDeviceGetUuid", None)
        if get_uuid is not None and get_uuid(ctypes.byref(uuid), device) == 0:
            h = bytes(uuid).hex()
            gpu["uuid"] = "-".join((h[:8], h[8:12], h[12:16], h[16:20], h[20:]))
        for key, attribute in (("cc_major", 75), ("cc_minor", 76), ("sms", 16), ("compute_mode", 20)):
            value = ctypes.c_int(-1)
            if lib.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) == 0:
                gpu[key] = value.value
        if job.get("context"):
            context = ctypes.c_void_p()
            gpu["cuDevicePrimaryCtxRetain"] = lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            if gpu["cuDevicePrimaryCtxRetain"] == 0:
                lib.cuDevicePrimaryCtxRelease(device)
        gpus.append(gpu)
    say(gpus=gpus)

class PciInfo(ctypes.Structure):
    _fields_ = [("legacy", ctypes.c_char * 16), ("domain", ctypes.c_uint), ("bus", ctypes.c_uint),
                ("device", ctypes.c_uint), ("device_id", ctypes.c_uint), ("subsystem_id", ctypes.c_uint),
                ("bus_id", ctypes.c_char * 32)]

class Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gi", ctypes.c_uint), ("ci", ctypes.c_uint)]

class Fabric(ctypes.Structure):
    _fields_ = [("cluster", ctypes.c_ubyte * 16), ("status", ctypes.c_int), ("clique", ctypes.c_uint),
                ("state", ctypes.c_ubyte)]

def nvml():
    try:
        lib = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        say(dlopen=str(error))
        return
    say(dlopen="OK", mapped=mapped())
    say(calling="nvmlInit_v2")
    rc = lib.nvmlInit_v2()
    say(nvmlInit=rc)
    u, ref = ctypes.c_uint, ctypes.byref

    def call(name, *args):
        function = getattr(lib, name, None)
        return 13 if function is None else function(*args)               # NVML_ERROR_FUNCTION_NOT_FOUND

    def text(name, *before):
        buffer = ctypes.create_string_buffer(96)
        rc = call(name, *before, buffer, u(96))
        return buffer.value.decode("utf-8", "replace") if rc == 0 else {"rc": rc}

    def ints(name, *before, count=1, kind=u, after=()):
        values = [kind(0) for _ in range(count)]
        rc = call(name, *before, *after, *[ref(value) for value in values])
        if rc != 0:
            return {"rc": rc}
        return values[0].value if count == 1 else [value.value for value in values]

    say(nvml_version=text("nvmlSystemGetNVMLVersion"))
    if rc != 0:
        return
    say(driver_version=text("nvmlSystemGetDriverVersion"), cuda_version=ints("nvmlSystemGetCudaDriverVersion_v2"))
    count = ints("nvmlDeviceGetCount_v2")
    say(count=count)
    handles, gpus = [], []
    for index in range(count if isinstance(count, int) else 0):
        gpu, h = {"index": index}, ctypes.c_void_p()
        rc = call("nvmlDeviceGetHandleByIndex_v2", u(index), ref(h))
        handles.append(h)
        gpus.append(gpu)
        if rc != 0:
            gpu["rc"] = rc
            continue
        gpu["name"] = text("nvmlDeviceGetName", h)
        gpu["uuid"] = text("nvmlDeviceGetUUID", h)
        gpu["serial"] = text("nvmlDeviceGetSerial", h)
        gpu["vbios"] = text("nvmlDeviceGetVbiosVersion", h)
        gpu["gsp_firmware"] = text_of_gsp(lib, h)
        info = PciInfo()
        if call("nvmlDeviceGetPciInfo_v3", h, ref(info)) == 0:
            gpu["bus"] = info.bus_id.decode()
            gpu["pci_device_id"] = "0x%08x" % info.device_id
        for key, name, kind in (
            ("minor", "nvmlDeviceGetMinorNumber", u),
            ("persistence", "nvmlDeviceGetPersistenceMode", u), ("compute_mode", "nvmlDeviceGetComputeMode", u),
            ("power_limit_mw", "nvmlDeviceGetPowerManagementLimit", u),
            ("power_limit_enforced_mw", "nvmlDeviceGetEnforcedPowerLimit", u),
            ("power_limit_default_mw", "nvmlDeviceGetPowerManagementDefaultLimit", u),
            ("power_mw", "nvmlDeviceGetPowerUsage", u), ("pstate", "nvmlDeviceGetPerformanceState", u),
            ("pcie_gen", "nvmlDeviceGetCurrPcieLinkGeneration", u), ("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", u),
            ("pcie_gen_max", "nvmlDeviceGetMaxPcieLinkGeneration", u),
            ("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth", u),
            ("clock_reasons", "nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong),
            ("virtualization", "nvmlDeviceGetVirtualizationMode", u),
            ("retired_pending", "nvmlDeviceGetRetiredPagesPendingStatus", u),
        ):
            gpu[key] = ints(name, h, kind=kind)
        for key, name in (("power_limit_range_mw", "nvmlDeviceGetPowerManagementLimitConstraints"),
                          ("mig_mode", "nvmlDeviceGetMigMode"), ("ecc_mode", "nvmlDeviceGetEccMode")):
            gpu[key] = ints(name, h, count=2)
        gpu["remapped_rows"] = ints("nvmlDeviceGetRemappedRows", h, count=4)
        gpu["ecc_uncorrected"] = ints("nvmlDeviceGetTotalEccErrors", h, u(1), u(0), kind=ctypes.c_ulonglong)
        gpu["temperature_c"] = ints("nvmlDeviceGetTemperature", h, u(0))
        kinds = (("sm", 1), ("memory", 2))
        gpu["clocks_mhz"] = {key: ints("nvmlDeviceGetClockInfo", h, u(kind)) for key, kind in kinds}
        gpu["clocks_max_mhz"] = {key: ints("nvmlDeviceGetMaxClockInfo", h, u(kind)) for key, kind in kinds}
        memory = (ctypes.c_ulonglong * 3)()
        rc = call("nvmlDeviceGetMemoryInfo", h, ref(memory))
        gpu["memory_bytes"] = {"total": memory[0], "free": memory[1], "used": memory[2]} if rc == 0 else {"rc": rc}
        held = u(64)
        processes = (Process * 64)()
        rc = call("nvmlDeviceGetComputeRunningProcesses_v3", h, ref(held), processes)
        if rc == 0:
            gpu["processes"] = [
                {"pid": p.pid, "used_bytes": None if p.used == 2**64 - 1 else p.used} for p in processes[:held.value]]
        else:
            gpu["processes"] = {"rc": rc}
        fabric = Fabric()
        rc = call("nvmlDeviceGetGpuFabricInfo", h, ref(fabric))
        gpu["fabric"] = {"state": fabric.state, "status": fabric.status} if rc == 0 else {"rc": rc}
        links = [ints("nvmlDeviceGetNvLinkState", h, u(link)) for link in range(18)]
        gpu["nvlinks"] = links if any(isinstance(link, int) for link in links) else []
    pairs = []
    for a in range(len(handles)):
        for b in range(a + 1, len(handles)):
            if handles[a] and handles[b]:
                pairs.append({
                    "a": a, "b": b,
                    "ancestor": ints("nvmlDeviceGetTopologyCommonAncestor", handles[a], handles[b]),
                    "p2p_read": ints("nvmlDeviceGetP2PStatus", handles[a], handles[b], u(0)),
                    "p2p_nvlink": ints("nvmlDeviceGetP2PStatus", handles[a], handles[b], u(2)),
                })
    say(gpus=gpus, pairs=pairs)
    call("nvmlShutdown")

def text_of_gsp(lib, h):
    buffer = ctypes.create_string_buffer(96)
    function = getattr(lib, "nvmlDeviceGetGspFirmwareVersion", None)
    rc = 13 if function is None else function(h, buffer)
    return buffer.value.decode("utf-8", "replace") if rc == 0 else {"rc": rc}

held = guard() if job["what"] != "open" else []
if job["what"] != "open" and os.geteuid() == 0 and not any("/dev" in g or "landlock" in g for g in held):
    refusal = "not asked: nothing here can keep root's driver libraries from making or changing device nodes"
    if job["what"] == "exec":
        sys.exit(refusal)
    say(error=refusal)
    sys.exit(0)
become()
if job["what"] == "exec":
    os.execvp(job["argv"][0], job["argv"])
say(guard=held)
{"open": opens, "cuda": cuda, "nvml": nvml}[job["what"]]()
'''


def child(what, who, seconds, **more):
    """Runs CHILD as `who`; its answers so far, with what it hung or died in."""
    job = {"what": what}
    job.update(more)
    if who is not None:
        job.update({key: who[key] for key in ("uid", "gid", "groups", "rlimits") if key in who})
    env = dict(who["env"]) if who and who.get("env") else dict(os.environ)
    argv = [sys.executable or "/usr/bin/python3", "-I", "-S", "-c", CHILD, json.dumps(job)]
    started = time.monotonic()
    result = command(argv, seconds, env)
    answers, doing = {}, None
    opened = {}
    for line in result.get("stdout", "").splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if "open" in answer:
            opened[answer["path"]] = answer["open"]
            doing = None
        elif "opening" in answer or "calling" in answer:
            doing = answer.get("opening") or answer.get("calling")
        else:
            doing = None
            answers.update(answer)
    if what == "open":
        answers["open"] = opened
    if result.get("error") == "hang":
        answers["hang"] = dict(result["state"], seconds=seconds, doing=doing)
        if what == "open" and doing:
            opened[doing] = "hang"
    elif "error" in result:
        answers["error"] = result["error"]
    elif result["rc"] != 0:
        answers["died"] = {"rc": result["rc"], "doing": doing, "stderr": result["stderr"][-2000:]}
    if result.get("stderr"):
        answers.setdefault("stderr", result["stderr"][-2000:])
    answers["ms"] = round((time.monotonic() - started) * 1000)
    return answers


# ---------------------------------------------------------------------------------------------------------------
# bpf(2): the device rules that are really in force
# ---------------------------------------------------------------------------------------------------------------

BPF = {"x86_64": 321, "aarch64": 280, "ppc64le": 361, "s390x": 351, "riscv64": 280}.get(platform.machine())


def bpf(operation, attributes):
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(attributes, max(len(attributes), 128))
    result = libc.syscall(ctypes.c_long(BPF), ctypes.c_int(operation), buffer, ctypes.c_uint(len(buffer)))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result, buffer.raw


def device_programs(cgroup):
    """Every device program a process in this cgroup passes (its own and its ancestors'), as translated instructions."""
    if BPF is None:
        return {"error": "bpf(2): number unknown on " + platform.machine()}
    try:
        directory = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exception:
        return failed(exception)
    try:
        ids = (ctypes.c_uint32 * 64)()
        query, attach_device, effective = 16, 6, 1
        attributes = struct.pack("=IIIIQI", directory, attach_device, effective, 0, ctypes.addressof(ids), 64)
        _, answer = bpf(query, attributes)
        count = struct.unpack_from("=I", answer, 24)[0]
        return [program(ids[i]) for i in range(min(count, 64))]
    except OSError as exception:
        return failed(exception)
    finally:
        os.close(directory)


def program(number):
    """One program by id: {"id", "name", "xlated": hex of its struct bpf_insn array}."""
    answer = {"id": number}
    try:
        fd, _ = bpf(13, struct.pack("=III", number, 0, 0))  # BPF_PROG_GET_FD_BY_ID
    except OSError as exception:
        answer.update(failed(exception))
        return answer
    try:
        info = ctypes.create_string_buffer(256)
        bpf(15, struct.pack("=IIQ", fd, 80, ctypes.addressof(info)))  # BPF_OBJ_GET_INFO_BY_FD
        length = struct.unpack_from("=I", info, 20)[0]
        name = info.raw[64:80].split(b"\0")[0].decode("utf-8", "replace")
        insns = ctypes.create_string_buffer(max(length, 8))
        info = ctypes.create_string_buffer(256)
        struct.pack_into("=I", info, 20, length)
        struct.pack_into("=Q", info, 32, ctypes.addressof(insns))
        bpf(15, struct.pack("=IIQ", fd, 80, ctypes.addressof(info)))
        answer.update(name=name, xlated=insns.raw[:length].hex())
        if not any(insns.raw[:length]):
            answer.update(error="instructions not shown to this user")
            del answer["xlated"]
    except OSError as exception:
        answer.update(failed(exception))
    finally:
        os.close(fd)
    return answer


def unified():
    """Mount point of the unified cgroup hierarchy."""
    for line in str(read("/proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return before.split()[4]
    return None


# ---------------------------------------------------------------------------------------------------------------
# The questions
# ---------------------------------------------------------------------------------------------------------------


class Probe:
    def __init__(self, job):
        self.job = job
        self.limits = dict({"cuda_s": 20, "command_s": 10, "deadline_s": 40}, **job.get("limits", {}))
        self.lock = threading.Lock()
        self.answers = {}
        self.waiting = {}
        self.root = os.geteuid() == 0
        self.node = job.get("role") == "node" or (job.get("role") is None and os.path.isdir("/etc/pve"))
        self.who = {}

    def put(self, section, value, key=None):
        with self.lock:
            if key is None:
                if isinstance(value, dict):
                    self.answers.setdefault(section, {}).update(value)
                else:
                    self.answers[section] = value
            else:
                self.answers.setdefault(section, {})[key] = value

    def start(self, name, function, *args):
        """Runs one question in its own thread: none waits for another, none can keep the answer from being sent."""

        def work():
            try:
                function(*args)
            except Exception as exception:
                self.put("unanswered", failed(exception)["error"], name)
            with self.lock:
                self.waiting.pop(name, None)

        thread = threading.Thread(target=work, name=name, daemon=True)
        with self.lock:
            self.waiting[name] = thread
        try:
            thread.start()
        except RuntimeError:  # no thread can be started here (pids.max, RLIMIT_NPROC): one question after another
            work()

    def ask(self):
        started = time.monotonic()
        skip = set(self.job.get("skip", ()))
        questions = {
            "files": self.files,
            "stats": self.stats,
            "service": self.service,
            "commands": self.commands,
            "kernel_log": self.kernel_log,
            "pci": self.pci,
            "libraries": self.libraries,
            "modules": self.modules,
            "own_rules": self.own_rules,
            "packages": self.packages,
            "names": self.names,
        }
        if self.node:
            questions["proxmox"] = self.proxmox
        if self.root:
            questions["as_root"] = self.as_root
        for name, question in questions.items():
            if name not in skip:
                self.start(name, question)
        deadline = started + self.limits["deadline_s"]
        while True:
            with self.lock:
                threads = list(self.waiting.values())
            if not threads or time.monotonic() >= deadline:
                break
            threads[0].join(min(0.2, max(0.0, deadline - time.monotonic())))
        with self.lock:
            for name in self.waiting:
                self.answers.setdefault("unanswered", {})[name] = "no answer in %g s" % self.limits["deadline_s"]
            document = {
                "schema": SCHEMA,
                "machine": self.job.get("name") or platform.node(),
                "role": self.job.get("role") or ("node" if self.node else None),
                "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "probe": {
                    "version": VERSION,
                    "python": platform.python_version(),
                    "euid": os.geteuid(),
                    "ms": round((time.monotonic() - started) * 1000),
                    "clock": time.time(),
                    "monotonic": time.monotonic(),
                    "ticks_per_s": os.sysconf("SC_CLK_TCK"),
                    "cpus": os.cpu_count(),
                    "page_bytes": os.sysconf("SC_PAGE_SIZE"),
                },
            }
            document.update(self.answers)
            return json.dumps(document)

    # -- reading --

    def files(self):
        paths = FILES + [path for pattern in GLOBS for path in sorted(glob.glob(pattern))]
        paths += self.job.get("files", [])
        answers = {path: read(path) for path in paths}
        if not isinstance(answers["/proc/self/limits"], str):  # without a descriptor left even that is known
            answers["/proc/self/limits"] = own_limits()
        self.put("files", answers)
        btime = re.search(r"^btime \d+$", str(read("/proc/stat")), re.M)
        self.put("files", {"/proc/stat": btime.group(0) if btime else {"error": "no btime"}})
        env = read("/proc/1/environ")
        if isinstance(env, str):
            names = environment(bytes.fromhex(env[4:]) if env.startswith("hex:") else env.encode())
            env = "\n".join("%s=%s" % item for item in shown(names).items())
        self.put("files", {"/proc/1/environ": env})
        for which in ("self", "1"):
            spaces = {
                name: link("/proc/%s/ns/%s" % (which, name)) for name in ("mnt", "pid", "user", "net", "cgroup", "uts")
            }
            self.put("namespaces", spaces, which)

    def names(self):
        import grp
        import pwd

        self.put("users", {str(p.pw_uid): p.pw_name for p in pwd.getpwall() if p.pw_uid < 1000 or p.pw_uid == 65534})
        self.put("groups", {str(g.gr_gid): g.gr_name for g in grp.getgrall() if g.gr_gid < 1000})

    def node_paths(self):
        paths = set(EXPECTED_NODES) | set(self.job.get("nodes", ()))
        for pattern in NODE_GLOBS:
            paths.update(glob.glob(pattern))
        for path in glob.glob("/proc/driver/nvidia/gpus/*/information"):
            minor = re.search(r"Device Minor:\s*(\d+)", str(read(path)))
            if minor:
                paths.add("/dev/nvidia" + minor.group(1))
        return sorted(p for p in paths if p.startswith("/dev/") and (CUDA_NODE.match(p) or not os.path.isdir(p)))

    def stats(self):
        self.put("nodes", {path: look(path) for path in self.node_paths()})
        self.put("stat", {path: look(path) for path in STAT_ONLY})
        self.put("links", {path: link(path) for path in glob.glob("/dev/char/195:*")})

    def modules(self):
        release = platform.release()
        dep = read("/lib/modules/%s/modules.dep" % release, 4_000_000)
        if isinstance(dep, str):
            dep = "\n".join(line for line in dep.splitlines() if re.search(r"nvidia|nouveau|vfio-pci", line))
        self.put("files", {"/lib/modules/%s/modules.dep" % release: dep})
        self.put("stat", {"/lib/modules/%s/build" % release: look("/lib/modules/%s/build/Makefile" % release)})
        for log in sorted(glob.glob("/var/lib/dkms/nvidia*/*/build/make.log"))[-3:]:
            text = read(log, 2_000_000)
            self.put("files", {log: "\n".join(text.splitlines()[-60:]) if isinstance(text, str) else text})

    def commands(self):
        wanted = COMMANDS + (NODE_COMMANDS if self.node else []) + [list(c) for c in self.job.get("commands", ())]
        for argv in wanted:
            self.start("command " + " ".join(argv), self.one_command, argv)
        units = UNITS + list(self.job.get("units", ()))
        if self.job.get("service", {}).get("unit"):
            units.append(self.job["service"]["unit"])
        if self.node:
            units += ["pve-container@%s.service" % vmid for vmid in self.vmids()]
        self.start("units", self.units, units)

    def one_command(self, argv):
        if argv[0].startswith("nvidia-"):  # these mend device nodes too
            guarded = [sys.executable or "/usr/bin/python3", "-I", "-S", "-c", CHILD]
            guarded.append(json.dumps({"what": "exec", "argv": argv}))
            answer = command(guarded, self.limits["cuda_s"])
            if "FileNotFoundError" in answer.get("stderr", ""):
                answer = {"error": "ENOENT"}
        else:
            answer = command(argv, self.limits["command_s"])
        if argv == ["ldconfig", "-p"] and "stdout" in answer:
            lines = answer["stdout"].splitlines()
            answer["stdout"] = "\n".join(line for line in lines if re.search(r"libcuda|libnvidia|libnv", line))
        self.put("commands", {" ".join(argv): answer})

    def units(self, names):
        listed = command(
            ["systemctl", "list-units", "--all", "--plain", "--no-legend", "gpuctl-*"], self.limits["command_s"]
        )
        names = list(dict.fromkeys(names + [line.split()[0] for line in listed.get("stdout", "").splitlines() if line]))
        answer = command(["systemctl", "show", "--property", UNIT_PROPERTIES, "--", *names], self.limits["command_s"])
        if "stdout" not in answer or answer.get("rc") != 0:
            self.put("units", {"error": answer.get("error") or answer.get("stderr", "").strip() or "no systemd"})
            return
        for name, block in zip(names, answer["stdout"].strip("\n").split("\n\n")):
            unit = dict(line.partition("=")[::2] for line in block.splitlines() if "=" in line)
            if "Environment" in unit:
                unit["Environment"] = masked(unit["Environment"])
            self.put("units", {name: unit})

    def kernel_log(self):
        libc = ctypes.CDLL(None, use_errno=True)
        size = max(libc.klogctl(10, None, 0), 1 << 20)
        buffer = ctypes.create_string_buffer(size)
        length = libc.klogctl(3, buffer, size)
        if length < 0:
            refusal = name_of(ctypes.get_errno())
            answer = command(
                ["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-monotonic", "-n", "20000"],
                self.limits["command_s"],
            )
            text = answer.get("stdout", "")
            if answer.get("rc") != 0 or not text.strip():
                self.put("kernel_log", {"error": refusal})
                return
        else:
            text = buffer.raw[:length].decode("utf-8", "replace")
        lines = [re.sub(r"^<\d+>", "", line) for line in text.splitlines()]
        wanted = [line for line in lines if LOG_WANTED.search(line)][-MAX_LOG_LINES:]
        self.put("kernel_log", {"lines": wanted, "of": len(lines)})

    def pci(self):
        keep = (
            "vendor device class subsystem_vendor subsystem_device numa_node local_cpulist current_link_speed "
            "current_link_width max_link_speed max_link_width enable power_state d3cold_allowed revision resource "
            "reset_method removable".split()
        )
        base, found = "/sys/bus/pci/devices", {}
        try:
            addresses = sorted(os.listdir(base))
        except OSError as exception:
            self.put("pci", failed(exception))
            return
        kinds = {
            address: (
                str(read("%s/%s/vendor" % (base, address), 64)).strip(),
                str(read("%s/%s/class" % (base, address), 64)).strip(),
            )
            for address in addresses
        }
        wanted = set()
        for address, (vendor, kind) in kinds.items():
            if vendor == "0x10de" or kind.startswith("0x03"):
                wanted.add(address)
                for part in os.path.realpath("%s/%s" % (base, address)).split("/"):
                    if part in kinds:
                        wanted.add(part)
        for address in sorted(wanted):
            place = "%s/%s" % (base, address)
            device = {
                key: value.strip()
                for key in keep
                for value in [read("%s/%s" % (place, key), 8192)]
                if isinstance(value, str)
            }
            device["path"] = os.path.realpath(place)
            for key in ("driver", "iommu_group"):
                target = link("%s/%s" % (place, key))
                device[key] = os.path.basename(target) if isinstance(target, str) else None
            try:
                with open(place + "/config", "rb") as file:
                    device["config"] = file.read(4096).rstrip(b"\0").hex()  # zeros at its end are left out
            except OSError as exception:
                device["config"] = failed(exception)
            found[address] = device
        self.put("pci", {"devices": found, "of": len(addresses)})

    def libraries(self):
        found = {}
        for pattern in LIBRARY_GLOBS:
            for path in glob.glob(pattern):
                answer = look(path)
                answer["real"] = os.path.realpath(path)
                found[path] = answer
        self.put("libraries", found)

    def packages(self):
        argv = ["dpkg-query", "-W", "-f", "${db:Status-Abbrev} ${Package} ${Version}\n"]
        answer = command(argv, self.limits["command_s"])
        if answer.get("error") == "ENOENT":
            answer = command(["rpm", "-qa", "--qf", "ii  %{NAME} %{VERSION}-%{RELEASE}\n"], self.limits["command_s"])
        lines = [
            line
            for line in answer.get("stdout", "").splitlines()
            if re.search(r"nvidia|cuda|nvlink|fabricmanager|pve-|lxc|proxmox|-headers|dkms|nouveau", line)
        ]
        self.put("packages", {"lines": lines} if "stdout" in answer else answer)

    def own_rules(self):
        mount = unified()
        own = re.search(r"^0::(.*)$", str(read("/proc/self/cgroup")), re.M)
        if mount is None or own is None:
            return
        self.put("bpf", {"self": device_programs(mount + own.group(1))})

    # -- asking with the eyes of root and of the service's user --

    def as_root(self):
        root = {"uid": 0, "env": {k: v for k, v in os.environ.items() if not ENV_SECRET.search(k)}}
        self.eyes("root", root)

    def eyes(self, name, who):
        skip = set(self.job.get("skip", ()))
        nodes = [
            p for p in self.node_paths() if re.match(r"/dev/nvidia(\d+|ctl|-uvm|-uvm-tools|-modeset|-caps/.*)$", p)
        ]
        nodes += [p for p in self.job.get("nodes", ()) if p not in nodes]
        seconds = self.limits["cuda_s"]
        for what, more in (
            ("open", {"nodes": nodes}),
            ("cuda", {"context": bool(self.job.get("context"))}),
            ("nvml", {}),
        ):
            if what not in skip:
                self.start("%s as %s" % (what, name), self.one_eye, what, name, who, seconds, more)

    def one_eye(self, what, name, who, seconds, more):
        answer = child(what, who, seconds, **more)
        if what != "open":
            self.put(what, {name: answer})
            return
        for path, word in answer.pop("open", {}).items():
            with self.lock:
                self.answers.setdefault("open", {}).setdefault(path, {})[name] = word
        if "error" in answer or "died" in answer:
            self.put("unanswered", answer.get("error") or answer["died"], "open as " + name)

    def service(self):
        wanted = self.job.get("service") or {}
        unit, user = wanted.get("unit"), wanted.get("user")
        answer = {"unit": unit, "user": user}
        env, limits = dict(os.environ), {}
        if unit:
            shows = command(["systemctl", "show", "--property", UNIT_PROPERTIES, "--", unit], self.limits["command_s"])
            show = dict(line.partition("=")[::2] for line in shows.get("stdout", "").splitlines() if "=" in line)
            if not show:
                why = shows.get("error") or shows.get("stderr", "").strip() or "no answer"
                answer["error"] = "%s: systemctl show: %s" % (unit, why)
            elif show.get("LoadState") == "not-found":
                answer["error"] = "there is no unit %s on this machine" % unit
            user = user or show.get("User") or None
            answer["user"] = user
            pid = show.get("MainPID", "0")
            environ = read("/proc/%s/environ" % pid, 1_000_000) if pid not in ("", "0") else None
            if isinstance(environ, str):
                env = environment(bytes.fromhex(environ[4:]) if environ.startswith("hex:") else environ.encode())
                answer["env_from"] = "running process %s" % pid
                answer["limits"] = read("/proc/%s/limits" % pid)
                answer["status"] = read("/proc/%s/status" % pid)
                answer["mapped"] = mapped_by(pid)
                answer["stat"] = read("/proc/%s/stat" % pid)
            elif show.get("LoadState") == "loaded":
                env = {k: v for k, v in env.items() if k in ("PATH", "LANG")}
                env.update(declared(show))
                answer["env_from"] = "unit"
            limits = rlimits(show)
        answer["env"] = shown(env)
        who = None
        if user:
            try:
                import pwd

                entry = pwd.getpwnam(user) if not str(user).isdigit() else pwd.getpwuid(int(user))
                who = {
                    "uid": entry.pw_uid,
                    "gid": entry.pw_gid,
                    "groups": os.getgrouplist(entry.pw_name, entry.pw_gid),
                    "env": env,
                    "rlimits": limits,
                }
                answer.update(uid=entry.pw_uid, gid=entry.pw_gid, groups=who["groups"])
            except KeyError:
                answer["error"] = "no user %s on this machine" % user
        elif unit:
            who = {"uid": 0, "gid": 0, "groups": [0], "env": env, "rlimits": limits}
        if not self.root:
            mine = os.geteuid()
            if who is None or who["uid"] == mine:
                who = {"uid": mine, "env": env, "rlimits": limits}
                answer.setdefault("uid", mine)
            else:
                answer["error"] = "not root: cannot become %s" % (user or "root")
                who = None
        self.put("service", answer)
        if who is not None and "error" not in answer:  # other eyes than the service's would see another machine
            self.eyes("user", who)

    # -- a Proxmox VE node --

    def vmids(self):
        if self.job.get("vmids"):
            return [str(vmid) for vmid in self.job["vmids"]]
        found = {os.path.basename(path)[:-5] for path in glob.glob("/etc/pve/lxc/*.conf")}
        return sorted((v for v in found if v.isdigit()), key=int)

    def proxmox(self):
        files, stats = {}, {}
        for path in glob.glob("/etc/pve/lxc/*.conf"):
            files[path], stats[path] = read(path), look(path)
        for path in glob.glob("/etc/pve/storage.cfg") + glob.glob("/etc/pve/.members"):
            stats[path] = look(path)
        self.put("files", files)
        self.put("stat", stats)
        for vmid in self.vmids():
            self.start("guest " + vmid, self.guest, vmid)

    def guest(self, vmid):
        files = {}
        for path in (
            "/var/lib/lxc/%s/config",
            "/var/lib/lxc/%s/passthrough/devices",
            "/run/pve/ct-%s.stderr",
            "/run/pve/ct-%s.warnings",
            "/sys/fs/cgroup/devices/lxc/%s/devices.list",
            "/sys/fs/cgroup/devices/lxc/%s/ns/devices.list",
            "/sys/fs/cgroup/devices/lxc.payload.%s/devices.list",
        ):
            answer = read(path % vmid)
            if isinstance(answer, str) or not path.startswith("/sys"):
                files[path % vmid] = answer
        self.put("files", files)
        answer = {}
        mount = unified()
        places = ["lxc/%s/ns", "lxc/%s", "lxc.payload.%s", "lxc.payload/%s"]
        cgroup = (
            next((p for p in (os.path.join(mount, place % vmid) for place in places) if os.path.isdir(p)), None)
            if mount
            else None
        )
        answer["cgroup"] = cgroup
        if cgroup is not None:
            answer["device_programs"] = device_programs(cgroup)
            pid = init_of(cgroup)
            if pid is not None:
                answer.update(
                    pid=pid,
                    stat=read("/proc/%d/stat" % pid),
                    uid_map=read("/proc/%d/uid_map" % pid),
                    mountinfo="\n".join(
                        line for line in str(read("/proc/%d/mountinfo" % pid)).splitlines() if " /dev" in line
                    ),
                    attr=read("/proc/%d/attr/current" % pid),
                )
                base = "/proc/%d/root" % pid
                paths = {p[len(base) :] for pattern in NODE_GLOBS[:2] for p in glob.glob(base + pattern)}
                paths |= set(EXPECTED_NODES)
                answer["nodes"] = {path: look(base + path) for path in sorted(paths) if not os.path.isdir(base + path)}
        self.put("guests", {vmid: answer})


def init_of(cgroup):
    """The process id here of PID 1 of the container that lives in this cgroup."""
    candidates = []
    for place in ("init.scope", "", "ns/init.scope", "ns"):
        text = read(os.path.join(cgroup, place, "cgroup.procs"))
        if isinstance(text, str):
            candidates += [int(pid) for pid in text.split()]
    if not candidates:
        for place, _, names in os.walk(cgroup):
            if "cgroup.procs" in names:
                candidates += [
                    int(pid) for pid in str(read(os.path.join(place, "cgroup.procs"))).split() if pid.isdigit()
                ]
    for pid in candidates:
        inner = re.search(r"^NSpid:\s+.*\s(\d+)$", str(read("/proc/%d/status" % pid)), re.M)
        if inner and inner.group(1) == "1":
            return pid
    return None


def mapped_by(pid):
    text = read("/proc/%s/maps" % pid, 8_000_000)
    if not isinstance(text, str):
        return text
    return sorted(
        {
            line.split(None, 5)[5]
            for line in text.splitlines()
            if line.count(" ") > 5 and re.search(r"/(libcuda|libnvidia|libnccl|libcudart)", line)
        }
    )


def masked(text):
    """systemctl's Environment= line without the values that may be secret."""
    try:
        import shlex

        env = dict(item.partition("=")[::2] for item in shlex.split(text))
    except ValueError:
        return "(not shown)"
    return " ".join(shlex.quote("%s=%s" % item) for item in shown(env).items())


def declared(show):
    """The environment a unit will give its service, from Environment= and EnvironmentFile=."""
    import shlex

    env = {}
    try:
        env.update(item.partition("=")[::2] for item in shlex.split(show.get("Environment", "")))
    except ValueError:
        pass
    for path in re.findall(r"(/\S+) \(ignore_errors=", show.get("EnvironmentFiles", "")):
        for line in str(read(path)).splitlines():
            name, equals, value = line.strip().partition("=")
            if equals and re.match(r"^[A-Za-z_]\w*$", name):
                env[name] = value.strip().strip("\"'")
    return env


def rlimits(show):
    wanted = {}
    for key, name in (("LimitNOFILESoft", "RLIMIT_NOFILE"), ("LimitASSoft", "RLIMIT_AS")):
        value = show.get(key, "")
        if value.isdigit() and int(value) < 2**63:
            wanted[name] = int(value)
    return wanted


def main():
    text = sys.stdin.read()
    job = json.loads(text) if text.strip() else {}
    document = Probe(job).ask()
    sys.stdout.write(document + "\n")
    sys.stdout.flush()
    os._exit(0)  # a thread that waits for a dead filesystem or a hung child must not keep us


if __name__ == "__main__":
    main()
