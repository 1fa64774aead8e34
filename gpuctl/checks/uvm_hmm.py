"""nvidia-uvm's heterogeneous memory management (HMM) breaks cuInit on some kernels.

cuInit gives 3 ("initialization error") although nvidia-smi works and all nodes are right; seen with drivers 570 to 580
on several kernels. Without HMM (module option uvm_disable_hmm=1) it works. On a few machines without NVSwitches the
same shows as 802, and the kernel's option nokaslr cures it too.
"""

from collections.abc import Iterator

from gpuctl.box import Box, Fact, Unknown
from gpuctl.facts import access, cuda, nvidia, pci
from gpuctl.facts.nodes import UVM
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER
CMDLINE: Fact[str] = Fact((("file", "/proc/cmdline"),), lambda snapshot: snapshot.file("/proc/cmdline"))


def check(box: Box) -> Iterator[Finding]:
    code = access.code(box)
    if code != 3 and not (code == 802 and no_fabric(box)):
        return
    told = " ".join(cuda.messages(box.guest))
    if "fork" in told or access.opened(box, UVM) not in (None, "OK"):
        return
    setting = None
    for snapshot in (box.guest, box.node):
        try:
            setting = snapshot.file("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm").strip()
            break
        except Unknown:
            continue
    if setting in ("Y", "1"):
        return
    evidence = access.symptom(box)
    if setting is not None:
        evidence.append(f"/sys/module/nvidia_uvm/parameters/uvm_disable_hmm: {setting}")
    version = box.get_kernel(nvidia.MODULE_VERSION)
    if version:
        evidence.append(f"the kernel module is {version}")
    nvml = box.guest.get(nvidia.NVML)
    asked = any(view.who != "reported" for view in (box.guest.get(cuda.VIEWS) or {}).values())
    likely = code == 3 and nvml is not None and nvml.works and asked
    try:
        cmdline = box.kernel(CMDLINE)
        if "nokaslr" in cmdline.split() and code == 802:
            return
    except Unknown:
        pass
    host = box.node if box.node.present else box.guest
    yield Finding(
        "cuInit fails with 3 while the driver works: nvidia-uvm's HMM, as it seems"
        if code == 3
        else "802 on a machine without NVSwitches: nvidia-uvm's HMM under a kernel with KASLR, perhaps",
        LAYER,
        Severity.CRITICAL,
        Certainty.LIKELY if likely else Certainty.POSSIBLE,
        tuple(evidence),
        separates="cuInit in a fresh process after nvidia_uvm was loaded with uvm_disable_hmm=1",
        advice=f"on {host.name}:\n  echo 'options nvidia_uvm uvm_disable_hmm=1' > /etc/modprobe.d/nvidia-uvm.conf\n"
        "  update-initramfs -u\n  reboot\n"
        + ("or nokaslr on the kernel's command line, " if code == 802 else "")
        + "or a newer driver. (Reloading nvidia_uvm instead may change its number: restart the containers then)",
    )


def no_fabric(box: Box) -> bool:
    """Is it known that nothing of NVLink's fabric is here, which is what 802 usually speaks of?"""
    devices = box.get_kernel(pci.DEVICES)
    nvml = box.guest.get(nvidia.NVML)
    fabric = nvml is not None and any(gpu.fabric for gpu in nvml.gpus)
    return devices is not None and not any(device.is_nvswitch for device in devices) and not fabric
