"""CUDA does not start, and what was seen names no cause.

The code cuInit gives narrows it down but seldom proves anything: 999 comes from nvidia-uvm denied, missing or broken,
but also from a process out of file descriptors. This lists what is still possible, with the observation that would
tell each from the others.
"""

from collections.abc import Callable, Iterator

from gpuctl.box import Box
from gpuctl.facts import access, cuda, devices, env, libraries, limits, nvidia
from gpuctl.facts.nodes import CTL, UVM
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA

Excluded = Callable[[Box], bool]


def check(box: Box) -> Iterator[Finding]:
    views = box.guest[cuda.VIEWS]
    hangs = any(view.hang or view.died for view in views.values())
    code = access.code(box)
    if access.works(box) is not False or (not code and not hangs) or access.waits_for_nodes(box):
        return
    if hangs and not code:
        left = [(what, how) for what, how, _ in _HANG]
        summary = (
            "cuInit does not come back" if any(view.hang for view in views.values()) else "cuInit kills the process"
        )
    else:
        assert code is not None
        left = [(what, how) for codes, what, how, excluded in _CAUSES if code in codes and not excluded(box)]
        summary = f"CUDA does not start (cuInit = {code}, {cuda.name_of(code)}); what was seen names no cause"
    told = [view.told for view in views.values() if view.told]
    evidence = [*access.symptom(box), *told, *(line for path in (UVM, CTL) for line in access.opening(box, path))]
    lines = [f"{number}. {what}\n   to tell: {how}" for number, (what, how) in enumerate(left, start=1)]
    yield Finding(
        summary,
        LAYER,
        Severity.CRITICAL,
        Certainty.POSSIBLE,
        tuple(dict.fromkeys(evidence)),
        separates=left[0][1] if left else "gpuctl doctor on the machine itself, or a snapshot with more in it",
        advice="still possible:\n" + "\n".join(lines) if lines else "ask the machine itself: gpuctl doctor -t BOX",
    )


def _opens(path: str) -> Excluded:
    return lambda box: access.opened(box, path) == "OK"


def _right_node(box: Box) -> bool:
    node, major = access.node_of(box, UVM), access.uvm_major(box)
    return node is not None and node.kind == "char" and (major is None or node.major == major)


def _never(_: Box) -> bool:
    return False


def _versions_agree(box: Box) -> bool:
    module, found = box.get_kernel(nvidia.MODULE_VERSION), box.guest.get(libraries.USERLAND)
    return module is not None and bool(found) and all(version.number == module for version in found or ())


def _enough_files(box: Box) -> bool:
    limit = (box.guest.get(limits.LIMITS) or {}).get("nofile")
    return limit is not None and (limit.value is None or limit.value >= 256)


def _no_choice(box: Box) -> bool:
    values = box.guest.get(env.ENV)
    return values is not None and "CUDA_VISIBLE_DEVICES" not in values


def _uvm_registered(box: Box) -> bool:
    majors = box.get_kernel(devices.MAJORS)
    return majors is not None and majors.of("nvidia-uvm") is not None


_DENIED = "the device cgroup denies nvidia-uvm (stale or missing rule of a privileged container)"
_CAUSES: tuple[tuple[tuple[int, ...], str, str, Excluded], ...] = (
    ((999, 304), _DENIED, f'open("{UVM}") as root inside: EPERM', _opens(UVM)),
    (
        (999, 304),
        "nvidia-uvm's node is missing, stale or an ordinary file",
        f"ls -l {UVM}; grep nvidia-uvm /proc/devices",
        _right_node,
    ),
    ((999,), "nvidia_uvm is not loaded", "grep nvidia-uvm /proc/devices", _uvm_registered),
    (
        (999,),
        "nvidia_uvm is in its fatal state after an Xid or a suspend",
        "cuInit fails on the node too, while its nodes are right; dmesg | grep -e Xid -e nvidia-uvm",
        _opens(UVM),
    ),
    ((999, 304), "the process is out of file descriptors", "ulimit -n, /proc/PID/limits", _enough_files),
    (
        (999, 803),
        "the driver's libraries and the kernel module have different versions",
        "cat /proc/driver/nvidia/version; ls -l libcuda.so.1 where it is loaded from",
        _versions_agree,
    ),
    (
        (100, 101),
        "CUDA_VISIBLE_DEVICES of the service is empty or names no GPU",
        "systemctl show -p Environment UNIT",
        _no_choice,
    ),
    (
        (100,),
        "/dev/nvidia0 or /dev/nvidiactl is denied or missing",
        "open() of both inside; ls -l /dev/nvidia*",
        lambda box: access.opened(box, "/dev/nvidia0") == "OK" and access.opened(box, CTL) == "OK",
    ),
    (
        (100,),
        "no GPU is left to the driver: vfio-pci, RmInitAdapter failed, MIG without instances",
        "nvidia-smi -L; lspci -nnk -d 10de:; dmesg | grep NVRM",
        _never,
    ),
    ((101,), "a GPU was lost, or an index is too high", "nvidia-smi -L against the indices in use", _never),
    (
        (802,),
        "NVIDIA's fabric manager is not running, or of another version than the driver (NVSwitch machines)",
        "systemctl status nvidia-fabricmanager; lspci -d 10de: | grep -i bridge",
        _never,
    ),
    ((802,), "confidential computing is on and the GPUs are not set ready", "nvidia-smi conf-compute -f", _never),
    (
        (3,),
        "nvidia_uvm's HMM fault on some kernels",
        "cat /sys/module/nvidia_uvm/parameters/uvm_disable_hmm; try options nvidia_uvm uvm_disable_hmm=1",
        _never,
    ),
    ((3,), "the program forked after it had initialised CUDA", "does a fresh process start CUDA?", _never),
    (
        (46,),
        "a compute mode other than Default, and another process holds the GPU",
        "nvidia-smi --query-gpu=compute_mode --format=csv; nvidia-smi",
        _never,
    ),
    (
        (46,),
        "a vGPU without licence, or MIG without a compute instance",
        "nvidia-smi -q | grep -i -e licen -e mig",
        _never,
    ),
    ((2,), "a limit on address space or memory", "ulimit -v; cat /sys/fs/cgroup/memory.max", _never),
    (
        (35,),
        "the driver is older than the CUDA the program was built for",
        "nvidia-smi (CUDA Version) against the program's",
        _never,
    ),
    (
        (205, 304, 999),
        "a sandbox (seccomp, AppArmor) refuses a call",
        "grep Seccomp /proc/PID/status; dmesg | grep DENIED",
        _never,
    ),
    ((804,), "a cuda-compat libcuda on a GPU that is not for data centres", "the libcuda in /proc/PID/maps", _never),
    ((803,), "a cuda-compat libcuda comes first", "the libcuda in /proc/PID/maps", _never),
    (
        (805, 806, 807, 808, 809),
        "the MPS daemon is not there, of another version or full",
        "CUDA_MPS_PIPE_DIRECTORY; nvidia-cuda-mps-control",
        _never,
    ),
)
_HANG: tuple[tuple[str, str, Excluded], ...] = (
    ("a GPU has fallen off the bus or waits for a reset", "dmesg | grep -e Xid -e NVRM on the node", _never),
    (
        "the GPUs initialise slowly without persistence mode",
        "nvidia-smi -q | grep Persistence; does it end after a minute?",
        _never,
    ),
    ("the driver is stuck: processes in state D", "ps -eo pid,stat,wchan:30,comm | grep ' D'", _never),
)
