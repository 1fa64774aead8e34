"""What the GPU, its driver, its compilers and its links say in the log of any engine."""

from __future__ import annotations

from gpuctl.finding import Certainty, Finding, Layer
from gpuctl.logs.rule import Hit, Story, rule, warning

_DOCTOR = "Run `gpuctl doctor`: it finds why CUDA does not start."
_KERNEL = (
    "Not a lack of memory. Use another attention backend (--attention-backend triton), turn CUDA graphs off to see "
    "whether it needs them, turn speculation off to see whether it is the verify kernel; then a newer engine."
)


def _illegal(hit: Hit, story: Story) -> Finding:
    speculation = story.flag("speculative_algorithm") or story.flag("speculative_config")
    with_what = f" with speculation ({speculation})" if speculation else ""
    return hit.rule.say(
        hit,
        summary=f"A GPU kernel crashed{with_what}: an {hit['what']} was encountered. A fault of a kernel on this GPU "
        "(SM120 is known for it), or of its compilation",
        advice=_KERNEL,
    )


def _toolchain(hit: Hit, story: Story) -> Finding:
    path = hit["path"]
    if path.startswith(":"):
        return hit.rule.say(
            hit,
            summary=f"The CUDA compiler is looked for at {path!r}: CUDA_HOME or PATH was put together with an empty "
            "part in front",
            advice="Set CUDA_HOME=/usr/local/cuda in the unit, without a leading colon.",
        )
    return hit.rule.say(hit)


RULES = (
    rule("cuda-init-999", "CUDA unknown error", r"CUDA unknown error",
         "CUDA does not initialise (error 999) although the driver is there: usually /dev/nvidia-uvm is missing, "
         "has another major number than the container allows, or its module is not loaded", _DOCTOR, specificity=90,
         layer=Layer.CUDA),
    rule("cuda-init-999", "cuInit", r"cuInit.{0,60}(?:999|CUDA_ERROR_UNKNOWN)",
         "CUDA does not initialise (error 999) although the driver is there: usually /dev/nvidia-uvm is missing, "
         "has another major number than the container allows, or its module is not loaded", _DOCTOR, specificity=90,
         layer=Layer.CUDA),
    rule("no-gpu-visible", "No CUDA GPUs are available", r"No CUDA GPUs are available",
         "CUDA sees no GPU", f"CUDA_VISIBLE_DEVICES may hide them; the container may not have them. {_DOCTOR}",
         specificity=85, layer=Layer.CUDA),
    rule("no-gpu-visible", "no CUDA-capable device is detected", r"no CUDA-capable device is detected",
         "CUDA sees no GPU", f"CUDA_VISIBLE_DEVICES may hide them; the container may not have them. {_DOCTOR}",
         specificity=85, layer=Layer.CUDA),
    rule("driver-too-old", "CUDA driver version is insufficient", r"driver version is insufficient",
         "The driver is older than the CUDA runtime needs",
         "Update the driver, or install a build for the driver's CUDA.", specificity=88, layer=Layer.DRIVER),
    rule("nvml-lost", "Failed to initialize NVML", r"Failed to initialize NVML: (?P<why>.{1,60})",
         "NVML stopped working in this container: {why}. `systemctl daemon-reload` on the host takes GPU devices from "
         "running containers whose rules it does not know",
         "Restart the container; for good: pass the devices explicitly (--device, lxc.cgroup2.devices.allow). "
         f"{_DOCTOR}", specificity=75, layer=Layer.DEVICES, certainty=Certainty.LIKELY),
    rule("gpu-index", "invalid device ordinal", r"invalid device ordinal",
         "More GPUs are asked for than this process sees: a GPU index does not exist",
         "Lower the tensor-parallel size (--tp-size), or check CUDA_VISIBLE_DEVICES and `nvidia-smi -L`.",
         specificity=88, layer=Layer.CUDA),
    rule("no-kernel-image", "no kernel image is available", r"no kernel image is available for execution on the device",
         "The installed build has no code for this GPU's architecture",
         "Install a build for it (torch and kernels for the GPU's SM version), or compile.", specificity=90,
         layer=Layer.CUDA),
    rule("illegal-access-tma", "CUDA_ERROR_ILLEGAL_ADDRESS", r"CUDA_ERROR_ILLEGAL_ADDRESS",
         "A kernel of this engine version reads wrong addresses on this GPU (TMA descriptor, seen on B300)",
         "Use the version that worked before, or another GEMM backend (SGLANG_ENABLE_JIT_DEEPGEMM=0).",
         specificity=82, layer=Layer.CUDA, certainty=Certainty.LIKELY),
    rule("illegal-access-tma", "TMA descriptor", r"[Ff]ailed to initialize the TMA descriptor",
         "A kernel of this engine version reads wrong addresses on this GPU (TMA descriptor, seen on B300)",
         "Use the version that worked before, or another attention or GEMM backend.",
         specificity=80, layer=Layer.CUDA, certainty=Certainty.LIKELY),
    rule("kernel-crash", "illegal instruction", r"(?:CUDA error: )?an? (?P<what>illegal instruction) was encountered",
         specificity=80, layer=Layer.CUDA, explain=_illegal),
    rule("kernel-crash", "illegal memory access", r"an? (?P<what>illegal memory access) was encountered",
         specificity=78, layer=Layer.CUDA, explain=_illegal),
    rule("shared-memory", "out of resource: shared memory",
         r"shared memory, Required: (?P<need>\d+), Hardware limit: (?P<limit>\d+)",
         "A Triton kernel needs {need} bytes of shared memory, this GPU has {limit}: it was tuned for a larger GPU",
         "Use another backend for that operation, or a newer engine with a configuration for this GPU.",
         specificity=90, layer=Layer.CUDA),
    rule("ptxas-too-old", "is not defined for option 'gpu-name'", r"ptxas\s+fatal\s*:.{0,20}'(?P<arch>sm_\w+)'",
         "The ptxas that Triton brings does not know {arch}",
         "Set TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas (a toolkit that knows the GPU).", specificity=90,
         layer=Layer.CUDA),
    rule("feature-not-on-gpu", "not supported on .target",
         r"Feature '(?P<feature>[^']{1,60})' not supported on \.target '(?P<arch>\w+)'",
         "A kernel uses {feature}, which {arch} does not have",
         "Use another backend: the kernel is for data-centre GPUs.", specificity=88, layer=Layer.CUDA),
    rule("cuda-toolkit-too-old", "requires CUDA >=", r"(?P<arch>SM [\d.x]+) requires CUDA >= (?P<need>[\d.]*\d)",
         "{arch} needs a CUDA toolkit of at least {need} for kernels compiled on the machine",
         "Install that toolkit and set CUDA_HOME, or the packages with kernels built ahead (flashinfer-jit-cache).",
         specificity=88, layer=Layer.CUDA),
    rule("jit-tool-missing", "No such file or directory: 'ninja'", r"No such file or directory: 'ninja'",
         "Kernels have to be compiled and `ninja` is not in the PATH of the server (systemd gives units a bare one)",
         "In the unit: Environment=PATH=<venv>/bin:/usr/local/cuda/bin:/usr/bin:/bin", specificity=92,
         layer=Layer.CUDA),
    rule("jit-tool-missing", "nvcc", r"(?P<path>:?/\S*nvcc): (?:not found|No such file or directory)|"
         r"No such file or directory: '(?P<other>[^']*nvcc)'|[Cc]ould not find nvcc",
         "Kernels have to be compiled and the CUDA compiler nvcc is not there",
         "Install the CUDA toolkit; in the unit set CUDA_HOME and add /usr/local/cuda/bin to PATH.",
         specificity=90, layer=Layer.CUDA, explain=_toolchain),
    rule("jit-header-missing", "fatal error: ", r"fatal error: (?P<header>\S+\.h(?:pp)?): No such file",
         "Kernels have to be compiled and the header {header} is not installed",
         "Install the development files of the CUDA toolkit (cuda-cudart-dev, libcurand-dev, ... of its version).",
         specificity=90, layer=Layer.CUDA),
    rule("jit-sources-missing", "missing and no known rule to make it",
         r"ninja: error: '(?P<file>[^']+)', needed by .{1,300}, missing and no known rule",
         "Kernels have to be compiled and their source {file} is not installed: the package is incomplete",
         "Install the package whole again (pip install --force-reinstall --no-deps PACKAGE), or one with kernels "
         "built ahead.", specificity=90, layer=Layer.CUDA),
    rule("jit-failed", "Ninja build failed", r"Ninja build failed", "Compiling a kernel on the machine failed",
         "The compiler's own words stand above.", specificity=50, layer=Layer.CUDA),
    rule("library-missing", "cannot open shared object file",
         r"(?P<library>lib[\w.+-]+): cannot open shared object file",
         "The shared library {library} is missing on the server's machine",
         "libnuma.so.1: apt install libnuma1. libcuda.so.1: the driver's libraries are not in the container. "
         "libnvrtc, libcudart: the wheel is for another CUDA version.", specificity=86, layer=Layer.CUDA),
    rule("library-mismatch", "undefined symbol",
         r"(?P<library>[\w./+-]+\.so[\w.]*): undefined symbol: (?P<symbol>\w{1,120})",
         "{library} was built for another torch: undefined symbol",
         "Install the kernel package that belongs to the installed torch (the engine's pins).", specificity=84,
         layer=Layer.CUDA),
    # Links between GPUs
    rule("shm-too-small", "posix_fallocate failed", r"posix_fallocate failed\s*:\s*No space left on device",
         "NCCL finds too little room in /dev/shm",
         "Make it larger: mount -o remount,size=32G /dev/shm (Docker: --shm-size 32g or --ipc=host). A model "
         "staged in /dev/shm counts too.", specificity=92, layer=Layer.CONTAINER),
    rule("shm-too-small", "shared memory segment", r"Error while creating shared memory segment /dev/shm/nccl",
         "NCCL finds too little room in /dev/shm",
         "Make it larger: mount -o remount,size=32G /dev/shm (Docker: --shm-size 32g or --ipc=host). A model "
         "staged in /dev/shm counts too.", specificity=90, layer=Layer.CONTAINER),
    rule("nccl-no-memory", "Failed to CUDA calloc", r"Failed to CUDA calloc (?P<bytes>\d+) bytes",
         "NCCL found no GPU memory for its buffers ({bytes} bytes): something else had taken it all",
         "Lower the memory fraction (--mem-fraction-static, --gpu-memory-utilization), or free the GPU.",
         specificity=86),
    rule("nccl-interface-probe", "bnxt_re", r"(?:[Ss]egmentation fault|SIGSEGV|Signal 11).{0,400}bnxt_re|"
         r"bnxt_re.{0,400}(?:[Ss]egmentation fault|SIGSEGV)|libbnxt_re",
         "NCCL crashed while it probed an RDMA adapter (bnxt_re)", "Set NCCL_IB_DISABLE=1.",
         specificity=84, certainty=Certainty.LIKELY),
    rule("vgpu-interception", "libvgpu", r"libvgpu\.so|/libvgpu/",
         "GPU calls go through HAMi's libvgpu.so, which deadlocks or crashes in NCCL",
         "Set CUDA_DISABLE_CONTROL=true for a container that has whole GPUs.", specificity=82,
         certainty=Certainty.LIKELY, layer=Layer.CONTAINER),
    rule("vgpu-interception", "HAMI-core", r"HAMI-core",
         "GPU calls go through HAMi's libvgpu.so, which deadlocks or crashes in NCCL",
         "Set CUDA_DISABLE_CONTROL=true for a container that has whole GPUs.", specificity=80,
         certainty=Certainty.LIKELY, layer=Layer.CONTAINER),
    rule("nccl-error", "NCCL error", r"NCCL error.{0,20}: (?P<what>.{1,160})",
         "NCCL failed: {what}", "Set NCCL_DEBUG=WARN: the line 'NCCL WARN' says why. Another rank may have died first.",
         specificity=35, certainty=Certainty.LIKELY),
    rule("rank-lost", "Connection reset by peer", r"(?:TCPStore|gloo|Gloo|nccl|NCCL).{0,200}Connection reset by peer",
         "The connection to another rank was lost: it died first", "Look for the other rank's exception.",
         specificity=15, certainty=Certainty.LIKELY),
    rule("gpu-out-of-memory", "CUDA error: out of memory", r"CUDA error: out of memory",
         "Out of GPU memory", "Lower what the server takes, or free the GPU.", specificity=55),
    warning("weight-only-marlin", "Using Marlin backend for WNA16 MoE",
            r"group_size=(?P<group>\d+), num_bits=(?P<bits>\d+)",
            "INT{bits} experts run through the Marlin kernels, which give wrong answers on SM121 (and were "
            "reported on SM12x)", "Check the server with a question whose answer is known before trusting a number.",
            layer=Layer.CUDA, certainty=Certainty.POSSIBLE),
)  # fmt: skip
