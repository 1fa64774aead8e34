"""The NVIDIA driver: which module is loaded and how, the GPUs it knows, and what NVML answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpuctl.box import Fact, Snapshot, Unknown
from gpuctl.facts import cuda, kernel_log
from gpuctl.facts.pci import normal_address

VERSION = r"\d{3}\.\d{1,3}(?:\.\d{1,3})?"

# -- the kernel module --


def parse_module_version(text: str) -> str | None:
    """/proc/driver/nvidia/version in both its forms."""
    found = re.search(rf"Kernel Module(?: for \S+)?\s+({VERSION})", text)
    return found.group(1) if found else None


def _module_version(snapshot: Snapshot) -> str:
    for path in ("/proc/driver/nvidia/version", "/sys/module/nvidia/version"):
        try:
            text = snapshot.file(path)
        except Unknown:
            continue
        version = parse_module_version(text) if "Kernel Module" in text else None
        found = re.fullmatch(rf"\s*({VERSION})\s*", text)
        if version or found:
            return version or found.group(1)  # type: ignore[union-attr]
    if snapshot.file_error("/proc/driver/nvidia/version") == "ENOENT":  # whatever was loaded earlier in this boot
        raise Unknown("version of the loaded NVIDIA module: none is loaded")
    lines = snapshot.get(kernel_log.LINES)
    for line in reversed(lines or ()):
        found = re.search(rf"NVRM: loading NVIDIA UNIX.*?\s({VERSION})\s", line)
        found = found or re.search(rf"this kernel module has the version\s+({VERSION})", line)
        if found:
            return found.group(1)
    raise Unknown("version of the loaded NVIDIA module: not in the snapshot")


MODULE_VERSION: Fact[str] = Fact(
    (("file", "/proc/driver/nvidia/version"), ("file", "/sys/module/nvidia/version")), _module_version
)


_GREP = re.compile(r"(?:lsmod ?\| ?)?grep(?: -\w+)* [\"']?nvidia[\"']?(?: /proc/modules)?")


def _module_loaded(snapshot: Snapshot) -> bool:
    try:
        return bool(_module_version(snapshot))
    except Unknown:
        pass
    for path in ("/proc/driver/nvidia/version", "/sys/module/nvidia/version", "/sys/module/nvidia"):
        if snapshot.file_error(path) == "ENOENT":
            return False
    for source in ("/proc/modules", "lsmod"):
        try:
            text = snapshot.file(source) if source.startswith("/") else snapshot.output(source).stdout
        except Unknown:
            continue
        if re.search(r"^\w+\s+\d+\s+-?\d+", text, re.M):
            return bool(re.search(r"^nvidia\s", text, re.M))
    for command in snapshot.mapping("commands"):
        if _GREP.fullmatch(command) and not snapshot.output(command).text.strip():
            return False
    raise Unknown("whether the NVIDIA module is loaded: not in the snapshot")


MODULE_LOADED: Fact[bool] = Fact((("file", "/proc/driver/nvidia/version"), ("file", "/proc/modules")), _module_loaded)


def _params(snapshot: Snapshot) -> Mapping[str, str]:
    text = snapshot.file("/proc/driver/nvidia/params")
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines()) if key}


# Module parameters; DeviceFileMode is printed in decimal, 438 is 0666.
PARAMS: Fact[Mapping[str, str]] = Fact((("file", "/proc/driver/nvidia/params"),), _params)


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as /proc/driver/nvidia/gpus knows it; containers see all of the machine's."""

    bus: str
    minor: int | None
    uuid: str
    model: str
    excluded: bool


def parse_information(text: str, bus: str = "") -> list[DriverGpu]:
    """One or several `information` files, concatenated."""
    found = []
    for block in re.split(r"(?m)^(?=Model:)", text):
        values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in block.splitlines())}
        if "Device Minor" in values or "Bus Location" in values or "Model" in values:
            minor = values.get("Device Minor", "")
            found.append(
                DriverGpu(
                    normal_address(values.get("Bus Location") or bus),
                    int(minor) if minor.isdigit() else None,
                    values.get("GPU UUID", ""),
                    values.get("Model", ""),
                    values.get("GPU Excluded", "No").lower().startswith("y"),
                )
            )
    return found


def _driver_gpus(snapshot: Snapshot) -> tuple[DriverGpu, ...]:
    found: list[DriverGpu] = []
    for path, text in snapshot.files("/proc/driver/nvidia/gpus/", "information").items():
        found += parse_information(text, path.split("/")[5] if path.count("/") > 5 else "")
    for command in snapshot.mapping("commands"):
        if not found and "/proc/driver/nvidia/gpus" in command:
            found += parse_information(snapshot.output(command).stdout)
    if not found:
        raise Unknown("GPUs known to the driver: not in the snapshot")
    return tuple(dict.fromkeys(found))


DRIVER_GPUS: Fact[tuple[DriverGpu, ...]] = Fact((("file", "/proc/driver/nvidia/gpus/*/information"),), _driver_gpus)

# -- NVML and nvidia-smi --

NVML_CODES = {
    0: "success", 1: "uninitialized", 2: "invalid argument", 3: "not supported", 4: "insufficient permissions",
    6: "not found", 8: "power cables not connected", 9: "driver not loaded", 10: "timeout", 11: "interrupt problem",
    12: "NVML library not found", 13: "function not found", 14: "infoROM corrupted", 15: "GPU is lost",
    16: "reset required", 17: "operating system refuses access to the GPU", 18: "driver/library version mismatch",
    19: "in use", 20: "memory", 23: "state", 999: "unknown error",
}  # fmt: skip
_SMI_TEXTS = (
    (r"Driver/library version mismatch", 18),
    (r"couldn't communicate with the NVIDIA driver", 9),
    (r"Failed to initialize NVML: Unknown Error", 999),
    (r"Failed to initialize NVML: Insufficient Permissions", 4),
    (r"Failed to initialize NVML: Driver Not Loaded", 9),
    (r"GPU access blocked by the operating system", 17),
    (r"couldn't find libnvidia-ml\.so|libnvidia-ml\.so(?:\.1)?: cannot open shared object", 12),
    (r"GPU is lost", 15),
    (r"Failed to initialize NVML: (?:Not Found|N/A)", 9),
    (r"Failed to initialize NVML: GPU is lost", 15),
    (r"No devices were found", 0),
)

_FABRIC = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML tells it; None: not asked, or the call failed."""

    index: int
    name: str = ""
    uuid: str = ""
    bus: str = ""
    minor: int | None = None
    error: int | None = None  # NVML's code where the GPU itself could not be reached
    persistence: bool | None = None
    compute_mode: int | None = None  # 0 default, 1 exclusive thread, 2 prohibited, 3 exclusive process
    mig: bool | None = None
    mig_pending: bool | None = None
    fabric: str | None = None
    fabric_status: int | None = None
    processes: tuple[Mapping[str, Any], ...] | None = None
    memory_bytes: Mapping[str, int] | None = None
    power_limit_mw: int | None = None
    recovery_action: str | None = None
    mig_devices: int = 0


@dataclass(frozen=True)
class Nvml:
    """NVML as one user sees it, or as nvidia-smi's text shows it. rc None: it hung, died, or nobody asked."""

    who: str
    rc: int | None
    count: int | None = None
    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    library_version: str | None = None  # in the driver's numbering: 580.159.04
    cuda_version: str | None = None
    dlopen: str | None = None
    hang: Mapping[str, Any] | None = None
    text: str = ""  # the line that tells the failure

    @property
    def works(self) -> bool:
        return self.rc == 0

    def __str__(self) -> str:
        if self.rc is None:
            return self.dlopen or self.text or "NVML not asked"
        if self.rc == 0:
            return "NVML works" + (
                f", {self.count} GPU{'s' if self.count != 1 else ''}" if self.count is not None else ""
            )
        return f"nvmlInit = {self.rc} ({NVML_CODES.get(self.rc, 'unknown')})"


def library_version(text: str) -> str | None:
    """NVML's own number, 13.580.159.04, or nvidia-smi's, 580.159 -> the driver's."""
    found = re.search(rf"(?:^|\b\d{{2}}\.)({VERSION})\b", text.strip())
    return found.group(1) if found else None


def parse_smi(text: str) -> Nvml | None:
    """The table, the list (-L) or the query (-q) of nvidia-smi, or its message of failure; None for anything else."""
    for pattern, code in _SMI_TEXTS:
        found = re.search(rf"^.*(?:{pattern}).*$", text, re.M)
        if found:
            library = re.search(r"NVML library version: (\S+)", text)
            return Nvml("nvidia-smi", code, 0 if code == 0 else None, text=found.group(0).strip(),
                        library_version=library_version(library.group(1)) if library else None)  # fmt: skip
    version = re.search(rf"Driver Version\s*: ({VERSION})", text)
    smi = re.search(rf"NVIDIA-SMI ({VERSION})", text)
    toolkit = re.search(r"CUDA(?: UMD)? Version\s*: ?(\d+\.\d+)", text)
    gpus = _smi_query(text) or _smi_table(text) or _smi_list(text)
    if version is None and not gpus:
        return None
    return Nvml("nvidia-smi", 0, len(gpus) if gpus or "| GPU" not in text else None, tuple(gpus),
                driver_version=version.group(1) if version else None,
                library_version=smi.group(1) if smi else None,
                cuda_version=toolkit.group(1) if toolkit else None)  # fmt: skip


def _smi_list(text: str) -> list[Gpu]:
    gpus: list[Gpu] = []
    for line in text.splitlines():
        found = re.match(r"\s*GPU (\d+): (.*?)(?: \(UUID: (\S+)\))?\s*$", line)
        if found:
            gpus.append(Gpu(int(found.group(1)), found.group(2), found.group(3) or ""))
        elif re.match(r"\s+MIG ", line) and gpus:
            gpus[-1] = replace(gpus[-1], mig=True, mig_devices=gpus[-1].mig_devices + 1)
    return gpus


def _smi_table(text: str) -> list[Gpu]:
    gpus: list[Gpu] = []
    for line in text.splitlines():
        head = re.match(
            r"^\|\s+(\d+)\s+(\S.*?)\s+(On|Off|N/A)\s*\|\s*([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s", line
        )
        if head:
            gpus.append(
                Gpu(
                    int(head.group(1)),
                    head.group(2),
                    bus=normal_address(head.group(4)),
                    persistence=head.group(3) == "On",
                )
            )
            continue
        second = re.search(r"(\d+)MiB /\s*(\d+)MiB \|\s*\S+\s+(Default|E\. Process|E\. Thread|Prohibited)\s*\|", line)
        if second and gpus:
            mode = {"Default": 0, "E. Thread": 1, "Prohibited": 2, "E. Process": 3}[second.group(3)]
            memory = {"used": int(second.group(1)) << 20, "total": int(second.group(2)) << 20}
            gpus[-1] = replace(gpus[-1], compute_mode=mode, memory_bytes=memory)
            continue
        third = re.match(r"^\|\s+\|\s+\|\s+(Enabled|Disabled|N/A)\*?\s*\|", line)
        if third and gpus and gpus[-1].mig is None:
            gpus[-1] = replace(gpus[-1], mig=third.group(1) == "Enabled")
    return gpus


def _smi_query(text: str) -> list[Gpu]:
    if "NVSMI LOG" not in text:
        return []
    gpus: list[Gpu] = []
    for block in re.split(r"(?m)^(?=GPU [0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:)", text)[1:]:
        bus = normal_address(block.split()[1])
        values = _query_values(block)
        minor = values.get("Minor Number", "")
        mode = {"Default": 0, "Exclusive_Thread": 1, "Prohibited": 2, "Exclusive_Process": 3}.get(
            values.get("Compute Mode", "")
        )
        mig = values.get("MIG Mode/Current")
        pending = values.get("MIG Mode/Pending")
        fabric = values.get("Fabric/State")
        gpus.append(
            Gpu(
                len(gpus), values.get("Product Name", ""), values.get("GPU UUID", ""), bus,
                int(minor) if minor.isdigit() else None,
                persistence={"Enabled": True, "Disabled": False}.get(values.get("Persistence Mode", "")),
                compute_mode=mode,
                mig={"Enabled": True, "Disabled": False}.get(mig or ""),
                mig_pending={"Enabled": True, "Disabled": False}.get(pending or ""),
                fabric=None if fabric in (None, "N/A") else fabric.lower(),
                recovery_action=values.get("GPU Recovery Action"),
            )
        )  # fmt: skip
    return gpus


def _query_values(block: str) -> dict[str, str]:
    """`Key : value` lines of one GPU; keys of an indented group as Group/Key."""
    values: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in block.splitlines()[1:]:
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        while path and path[-1][0] >= indent:
            path.pop()
        key, colon, value = line.strip().partition(" : ")
        if not colon:
            key, colon, value = line.strip().partition(": ")
        name = "/".join([part for _, part in path] + [key.strip()])
        if colon:
            values.setdefault(name, value.strip())
        else:
            path.append((indent, key.strip()))
    return values


def _value(answer: Any) -> Any:
    return None if isinstance(answer, Mapping) and "rc" in answer else answer


def _text(answer: Any) -> str:
    return str(answer) if isinstance(answer, str) else ""


def _nvml_gpu(index: int, gpu: Mapping[str, Any]) -> Gpu:
    mig, persistence = _value(gpu.get("mig_mode")), _value(gpu.get("persistence"))
    fabric = gpu.get("fabric")
    fabric = fabric if isinstance(fabric, Mapping) and "state" in fabric else {}
    processes = gpu.get("processes")
    return Gpu(
        int(gpu.get("index", index)),
        _text(gpu.get("name")),
        _text(gpu.get("uuid")),
        normal_address(_text(gpu.get("bus"))) if gpu.get("bus") else "",
        _value(gpu.get("minor")),
        error=gpu.get("rc"),
        persistence=None if persistence is None else bool(persistence),
        compute_mode=_value(gpu.get("compute_mode")),
        mig=bool(mig[0]) if isinstance(mig, (list, tuple)) and mig else None,
        mig_pending=bool(mig[1]) if isinstance(mig, (list, tuple)) and len(mig) > 1 else None,
        fabric=_FABRIC.get(fabric["state"], str(fabric["state"])) if fabric else None,
        fabric_status=fabric.get("status"),
        processes=tuple(processes) if isinstance(processes, (list, tuple)) else None,
        memory_bytes=_value(gpu.get("memory_bytes")),
        power_limit_mw=_value(gpu.get("power_limit_mw")),
    )


def _nvml_view(who: str, answers: Mapping[str, Any]) -> Nvml:
    rc = answers.get("nvmlInit")
    if rc is None:
        rc = answers.get("nvmlInit_v2")
    if isinstance(rc, Mapping):
        rc = rc.get("rc")
    if isinstance(rc, str):
        rc = int(rc) if rc.strip().isdigit() else next((c for p, c in _SMI_TEXTS if re.search(p, rc, re.I)), None)
    gpus = tuple(_nvml_gpu(i, gpu) for i, gpu in enumerate(answers.get("gpus") or ()) if isinstance(gpu, Mapping))
    count = _value(answers.get("count", answers.get("nvmlDeviceGetCount")))
    dlopen = answers.get("dlopen")
    version = answers.get("nvml_version")
    return Nvml(
        who,
        12 if rc is None and dlopen not in (None, "OK") else rc,
        int(count) if count is not None else (len(gpus) if gpus else None),
        gpus,
        _text(answers.get("driver_version")) or None,
        library_version(version) if isinstance(version, str) else None,
        None if answers.get("cuda_version") is None else str(answers["cuda_version"]),
        None if dlopen is None else str(dlopen),
        answers.get("hang"),
        str(dlopen) if dlopen not in (None, "OK") else "",
    )


def _nvml_views(snapshot: Snapshot) -> Mapping[str, Nvml]:
    views: dict[str, Nvml] = {}
    for who, answers in snapshot.mapping("nvml").items():
        if isinstance(answers, Mapping) and set(answers) - {"error", "ms", "guard"}:
            views[who] = _nvml_view(who, answers)
    texts = []
    for command, answer in snapshot.mapping("commands").items():
        if re.match(r"(?:\S*/)?nvidia-smi\b", command) and not re.search(r"\btopo\b|--query", command):
            if isinstance(answer, Mapping) and answer.get("error") == "hang":
                views.setdefault("nvidia-smi", Nvml("nvidia-smi", None, hang=answer, text="nvidia-smi does not end"))
                continue
            text = answer if isinstance(answer, str) else f"{answer.get('stdout', '')}\n{answer.get('stderr', '')}"
            texts.append((len(command), text))
    texts += [(999, "\n".join(cuda.messages(snapshot)))]
    for _, text in texts:
        seen = parse_smi(text)
        if seen is None:
            continue
        old = views.get("nvidia-smi")
        views["nvidia-smi"] = seen if old is None else merge(old, seen)
    if not views:
        raise Unknown("NVML: not in the snapshot")
    return views


def merge(old: Nvml, new: Nvml) -> Nvml:
    """Two outputs of nvidia-smi: what the first does not tell is taken from the second."""
    values = {
        key: getattr(new, key) if getattr(old, key) in (None, "", ()) else getattr(old, key) for key in old.__dict__
    }
    if len(new.gpus) == len(old.gpus) and new.gpus:
        gpus = []
        for a, b in zip(old.gpus, new.gpus, strict=True):
            gpus.append(
                Gpu(**{k: getattr(b, k) if getattr(a, k) in (None, "", 0, ()) else getattr(a, k) for k in a.__dict__})
            )
        values["gpus"] = tuple(gpus)
    return Nvml(**values)


NVML_VIEWS: Fact[Mapping[str, Nvml]] = Fact((("section", "nvml"), ("command", "nvidia-smi")), _nvml_views)


def answers(snapshot: Snapshot) -> Mapping[str, Any]:
    """What NVML itself answered root, or whoever was asked where root was not; empty where it did not answer."""
    said = snapshot.mapping("nvml")
    found = [said.get(who) for who in ("root", "user", *said)]
    return next((each for each in found if isinstance(each, Mapping) and each.get("gpus")), {})


def _nvml(snapshot: Snapshot) -> Nvml:
    views = snapshot[NVML_VIEWS]
    for who in ("root", "user", "nvidia-smi"):
        if who in views and (views[who].rc is not None or views[who].hang):
            return views[who]
    return next(iter(views.values()))


# As root sees it where root was asked: the one who sees most.
NVML: Fact[Nvml] = Fact((("section", "nvml"), ("command", "nvidia-smi")), _nvml)
