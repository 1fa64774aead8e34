"""A module option gives the device nodes a mode that shuts users out.

NVreg_DeviceFileMode is octal: 0660. Given as 660 it is read as decimal and becomes `-w--wx-wT`. With 0660 only the
group of NVreg_DeviceFileGID may open the nodes.
"""

import re
import stat
from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, nodes, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DEVICES
USUAL = 0o666  # 438, as /proc/driver/nvidia/params prints it


def check(box: Box) -> Iterator[Finding]:
    params = box.get_kernel(nvidia.PARAMS) or {}
    text = params.get("DeviceFileMode", "")
    mode = int(text) if text.isdigit() else None
    host = box.node if box.node.present else box.guest
    odd = []
    if mode is None:  # seen by the nodes alone: the unmistakable picture of a decimal 660
        odd = [node for node in (host.get(nodes.NODES) or {}).values() if node.mode == 660]
        if not odd:
            return
    elif mode == USUAL:
        return
    shown = stat.filemode(mode if mode is not None else 660)[1:]
    decimal = (mode if mode is not None else 660) in (660, 666, 644, 600)
    opens = box.guest.get(nodes.OPENS)
    closed = opens is not None and any("EACCES" in opens.refused(path).values() for path in opens.by_path
                                       if not path.startswith("/dev/nvidia-caps"))  # fmt: skip
    nvml = box.guest.get(nvidia.NVML)
    shut = closed or (nvml is not None and nvml.rc == 4) or access.works(box) is False
    evidence = access.symptom(box)
    if mode is not None:
        evidence.append(f"/proc/driver/nvidia/params: DeviceFileMode {mode}, that is {shown}")
        evidence.append(f"DeviceFileUID {params.get('DeviceFileUID')}, DeviceFileGID {params.get('DeviceFileGID')}")
    evidence += [str(node) for node in odd[:3]]
    for path, content in host.files("/etc/modprobe.d/").items():
        evidence += [f"{path}: {line.strip()}" for line in content.splitlines() if re.search(r"NVreg_DeviceFile", line)]
    yield Finding(
        f"the driver makes its device nodes with mode {shown}" + (" (decimal where octal is meant)" if decimal else ""),
        LAYER,
        Severity.CRITICAL if shut else Severity.WARNING,
        Certainty.PROVED,
        tuple(evidence),
        advice=f"on {host.name}: NVreg_DeviceFileMode=0666 in /etc/modprobe.d (octal, with the 0 in front), or "
        "0660 and the "
        "group of NVreg_DeviceFileGID for every user; update-initramfs -u, reboot",
    )
