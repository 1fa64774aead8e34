"""What CUDA answers: cuInit's code, the devices it counts, which libcuda it is; asked, or told in messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuctl.box import Fact, Snapshot, Unknown

# CUresult, cuda.h
CODES = {
    0: ("CUDA_SUCCESS", ""),
    1: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    3: ("CUDA_ERROR_NOT_INITIALIZED", "initialization error"),
    34: ("CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"),
    35: ("cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"),
    36: ("cudaErrorCallRequiresNewerDriver", "API call is not supported in the installed CUDA driver"),
    46: ("CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"),
    100: ("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"),
    101: ("CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"),
    201: ("CUDA_ERROR_INVALID_CONTEXT", "invalid device context"),
    205: ("CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"),
    304: ("CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"),
    719: ("CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"),
    801: ("CUDA_ERROR_NOT_SUPPORTED", "operation not supported"),
    802: ("CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"),
    803: ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"),
    804: ("CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "forward compatibility was attempted on non supported HW"),
    805: ("CUDA_ERROR_MPS_CONNECTION_FAILED", "MPS client failed to connect to the MPS control daemon or server"),
    806: ("CUDA_ERROR_MPS_RPC_FAILURE", "the call between the MPS server and the MPS client failed"),
    807: ("CUDA_ERROR_MPS_SERVER_NOT_READY", "MPS server is not ready to accept new MPS client requests"),
    808: ("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", "no resources left for another MPS client"),
    809: ("CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", "no resources left for another device connection"),
    999: ("CUDA_ERROR_UNKNOWN", "unknown error"),
}  # fmt: skip
_NAMES = {name: code for code, (name, _) in CODES.items()}
_RUNTIME_NAMES = {
    "cudaErrorUnknown": 999, "cudaErrorNoDevice": 100, "cudaErrorInvalidDevice": 101, "cudaErrorStubLibrary": 34,
    "cudaErrorSystemNotReady": 802, "cudaErrorSystemDriverMismatch": 803, "cudaErrorInitializationError": 3,
    "cudaErrorCompatNotSupportedOnDevice": 804, "cudaErrorDevicesUnavailable": 46, "cudaErrorMpsConnectionFailed": 805,
    "cudaErrorOperatingSystem": 304, "cudaErrorMemoryAllocation": 2,
}  # fmt: skip
# Wordings of CUDA, PyTorch, ollama and others, most telling first.
_PHRASES = (
    (r"unsupported display driver ?/ ?cuda driver combination", 803),
    (r"system not yet initialized", 802),
    (r"forward compatibility was attempted on non supported h", 804),
    (r"CUDA driver is a stub library", 34),
    (r"driver version is insufficient|NVIDIA driver on your system is too old|driver too old", 35),
    (r"no CUDA-capable device is detected|No CUDA GPUs are available", 100),
    (r"invalid device ordinal", 101),
    (r"busy or unavailable", 46),
    (r"OS call failed or operation not supported on this OS", 304),
    (r"MPS client failed to connect", 805),
    (r"CUDA unknown error|CUDA(?: driver)? error: unknown error|cuda\w*\W+unknown error", 999),
    (r"cuInit\b.*initialization error|CUDA(?: driver)? error: initialization error|cuda.*: initialization error", 3),
)


def name_of(code: int) -> str:
    return CODES.get(code, (f"CUDA error {code}", ""))[0]


def parse_code(value: object) -> int | None:
    """999, "999 (CUDA_ERROR_UNKNOWN)", "CUDA_ERROR_UNKNOWN", cudaErrorUnknown, a message -> 999; else None."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value
    text = str(value).strip()
    number = re.match(r"(\d{1,4})\b", text)
    if number:
        return int(number.group(1))
    return next(iter(codes_in([text])), None)


def codes_in(lines: Iterable[str]) -> dict[int, str]:
    """CUDA error codes that messages tell, code -> the line, in order."""
    found: dict[int, str] = {}
    for line in lines:
        code = _code_in(line)
        if code is not None and code != 0:
            found.setdefault(code, line.strip())
    return found


def _code_in(line: str) -> int | None:
    for pattern in (
        r"cuInit(?:\(\w*\))?(?!\()[^0-9\n]{1,40}(\d{1,3})\b",
        r"cuda driver library (?:init failure|failed to get device context)\D{0,3}(\d{1,3})\b",
        r"(?:CUresult|CUDA_ERROR|CUDA (?:driver )?(?:error|failure)(?: code)?|cuda init failure|error code)"
        r"[ =:(]+(\d{1,3})\b",
        r"cudaGetDeviceCount\(\)[^\d]{0,60}[Ee]rror (\d{1,3})\b",
        r"\b[Ee]rror (\d{1,3}): (?:system|unknown|forward|no CUDA|initialization|out of memory|CUDA|OS call|operation)",
    ):
        match = re.search(pattern, line, re.I)
        if match:
            return int(match.group(1))
    for name, code in (*_NAMES.items(), *_RUNTIME_NAMES.items()):
        if re.search(rf"\b{name}\b", line):
            return code
    for pattern, code in _PHRASES:
        if re.search(pattern, line, re.I):
            return code
    return None


@dataclass(frozen=True)
class Cuda:
    """CUDA as one user sees it. Fields are None where it was not asked or could not answer."""

    who: str  # root | user | reported (from messages)
    cu_init: int | None = None
    count: int | None = None
    driver_version: int | None = None  # 13000 for CUDA 13.0
    dlopen: str | None = None  # "OK", or why libcuda.so.1 did not load
    mapped: tuple[str, ...] = ()
    hang: Mapping[str, Any] | None = None
    died: Mapping[str, Any] | None = None
    gpus: tuple[Mapping[str, Any], ...] = ()
    init_ms: float | None = None
    guard: tuple[str, ...] = ()
    told: str = ""  # the message a reported code was read from

    @property
    def works(self) -> bool:
        return self.cu_init == 0

    @property
    def loaded(self) -> bool | None:
        """Did libcuda load? None where it is not known."""
        if self.dlopen is not None:
            return self.dlopen == "OK"
        return True if self.cu_init is not None else None

    @property
    def libcuda(self) -> str | None:
        """The libcuda that was really mapped."""
        return next((path for path in self.mapped if re.search(r"/libcuda\.so", path)), None)

    def __str__(self) -> str:
        if self.cu_init is None:
            return self.told or self.dlopen or "cuInit not asked"
        text = CODES.get(self.cu_init, ("", ""))[0]
        count = (
            f", {self.count} device{'s' if self.count != 1 else ''}"
            if self.cu_init == 0 and self.count is not None
            else ""
        )
        return f"cuInit = {self.cu_init}" + (f" ({text})" if text and self.cu_init else "") + count


def _int(value: Any) -> int | None:
    if isinstance(value, Mapping):
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def view(who: str, answers: Mapping[str, Any]) -> Cuda:
    mapped = answers.get("mapped") or ()
    return Cuda(
        who=who,
        cu_init=parse_code(answers.get("cuInit")),
        count=_int(answers.get("cuDeviceGetCount")),
        driver_version=_int(answers.get("cuDriverGetVersion")),
        dlopen=None if answers.get("dlopen") is None else str(answers["dlopen"]),
        mapped=tuple(str(path) for path in ([mapped] if isinstance(mapped, str) else mapped)),
        hang=answers.get("hang"),
        died=answers.get("died"),
        gpus=tuple(answers.get("gpus") or ()),
        init_ms=answers.get("cuInit_ms"),
        guard=tuple(answers.get("guard") or ()),
    )


def messages(snapshot: Snapshot) -> list[str]:
    """Lines in which programs and people tell of failures: `errors`, and outputs that are no known format."""
    lines = [str(line) for line in snapshot.document.get("errors", ())]
    for command, answer in snapshot.mapping("commands").items():
        if re.match(r"(?:\S*/)?(nvidia-smi|dmesg|ls|cat|lspci|ldconfig|dkms|pct|pveversion|systemctl show|id|env|mount|"
                    r"bpftool|lsmod|stat|modinfo|mokutil|uname|journalctl -k)\b", command):  # fmt: skip
            continue
        text = answer if isinstance(answer, str) else f"{answer.get('stdout', '')}\n{answer.get('stderr', '')}"
        lines += text.splitlines()
    return lines


_NO_LIBRARY = r"libcuda(?:\.so(?:\.1)?)?\b.*(?:cannot open shared|not found|file too short|(?:invalid|wrong) ELF)"


def _views(snapshot: Snapshot) -> Mapping[str, Cuda]:
    views: dict[str, Cuda] = {}
    section = snapshot.mapping("cuda")
    for who, answers in section.items():
        if isinstance(answers, Mapping) and set(answers) - {"error", "ms", "guard"}:
            views[who] = view(who, answers)
    lines = messages(snapshot)
    missing = next((line for line in lines if re.search(_NO_LIBRARY, line, re.I)), None)
    if not any(v.cu_init is not None or v.dlopen for v in views.values()):
        codes = codes_in(lines)
        if codes:
            code, line = next(iter(codes.items()))
            views["reported"] = Cuda("reported", cu_init=code, told=line)
        elif missing:
            views["reported"] = Cuda("reported", dlopen=missing.strip(), told=missing.strip())
    if not views:
        why = next(
            (str(a["error"]) for a in section.values() if isinstance(a, Mapping) and "error" in a),
            "not in the snapshot",
        )
        raise Unknown(f"CUDA: {why}")
    return views


# Who -> what CUDA answered them.
VIEWS: Fact[Mapping[str, Cuda]] = Fact((("section", "cuda"), ("section", "errors")), _views)


def _cuda(snapshot: Snapshot) -> Cuda:
    views = snapshot[VIEWS]
    for who in ("user", "root", "reported"):
        if who in views:
            return views[who]
    return next(iter(views.values()))


# As the service's user sees it where there is one, else as root does.
CUDA: Fact[Cuda] = Fact((("section", "cuda"),), _cuda)
