"""The NVIDIA kernel module is not loaded.

After a kernel update there may be no module for the running kernel: the headers were missing, so DKMS could not build
it. nvidia-smi then "couldn't communicate with the NVIDIA driver" (NVML 9), and /proc/driver/nvidia is not there.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, boot, kernel_log, modules, nvidia, pci
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    if box.kernel(nvidia.MODULE_LOADED) or access.works(box):
        return
    host = box.node if box.node.present else box.guest
    lines = kernel_log.grep(
        box.get_kernel(kernel_log.LINES) or (), r"nouveau|key was rejected|probe routine was not called"
    )
    gpus = box.get_kernel(pci.GPUS)
    if gpus is not None and not gpus and (_no_gpu(box) or not access.in_container(box)):
        return  # a machine without NVIDIA GPUs
    if modules.rejected(box) or modules.build_errors(box) or any(gpu.driver == "nouveau" for gpu in gpus or ()):
        return  # these have checks of their own
    release = box.get_kernel(boot.KERNEL_RELEASE)
    evidence = [*access.symptom(box), "/proc/driver/nvidia is not there: no NVIDIA module is loaded"]
    evidence += [f"{gpu.address}: driver in use: {gpu.driver or 'none'}" for gpu in (gpus or ())[:4]]
    built: bool | None = None
    if release:
        try:
            built = bool(re.search(r"/nvidia\.ko", host.file(f"/lib/modules/{release}/modules.dep")))
            evidence.append(f"there is {'a' if built else 'no'} nvidia module for the running kernel {release}")
        except Unknown:
            pass
        headers = host.mapping("stat").get(f"/lib/modules/{release}/build")
        if isinstance(headers, dict) and headers.get("error") == "ENOENT":
            evidence.append(f"the headers of {release} are not installed")
    if earlier := kernel_log.grep(box.get_kernel(kernel_log.LINES) or (), r"NVRM: loading NVIDIA UNIX"):
        built = True
        evidence.append(f"it was loaded earlier in this boot: {earlier[-1].strip()}")
    try:
        status = host.output("dkms status").stdout.strip()
        evidence += [f"dkms status: {line}" for line in status.splitlines() if "nvidia" in line][:3]
    except Unknown:
        pass
    text = f"on {host.name}:"
    if built:
        text += " modprobe -a nvidia nvidia_uvm; what it says tells why (dmesg | tail)"
    else:
        kernel = release or "$(uname -r)"
        package = f"proxmox-headers-{kernel}" if kernel.endswith("-pve") else f"linux-headers-{kernel}"
        text += f"\n  apt install {package}\n  dkms autoinstall\n  modprobe -a nvidia nvidia_uvm"
        text += "\nor boot the kernel before (proxmox-boot-tool kernel pin ...)"
    yield Finding(
        f"the NVIDIA module is not loaded on {host.name}" + (f": none for kernel {release}" if built is False else ""),
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED,
        (*evidence, *lines[-3:]),
        advice=text,
    )


def _no_gpu(box: Box) -> bool:
    """Is it why the module is not loaded? A bus that shows nothing at all is no witness."""
    host = box.node if box.node.present else box.guest
    return bool(host.mapping("pci").get("of")) and access.works(box) is False and access.without_gpu(box)
