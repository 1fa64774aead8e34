"""A GPU waits for a reset (Xid 154, or NVML's recovery action).

After some errors the driver refuses a card until it was reset or the machine was rebooted; the log says so with
"GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)".
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, kernel_log, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER


def check(box: Box) -> Iterator[Finding]:
    last: dict[str, str] = {}
    for xid in box.get_kernel(kernel_log.XIDS) or ():
        if xid.number == 154:
            last[xid.address] = xid.text
    waiting = {a: line for a, line in last.items() if not re.search(r"to 0x0 ", line)}
    nvml = box.guest.get(nvidia.NVML)
    asked = [gpu for gpu in (nvml.gpus if nvml is not None else ()) if gpu.recovery_action not in (None, "None", "N/A")]
    if not waiting and not asked and not (nvml is not None and nvml.rc == 16):
        return
    action = " ".join(waiting.values()) + " ".join(str(gpu.recovery_action) for gpu in asked)
    reboot = "Reboot" in action
    evidence = [*access.symptom(box), *waiting.values()]
    evidence += [f"{gpu.bus or gpu.index}: GPU Recovery Action: {gpu.recovery_action}" for gpu in asked]
    yield Finding(
        f"a GPU waits for a {'reboot of the machine' if reboot else 'reset'}",
        LAYER,
        Severity.WARNING if access.works(box) else Severity.CRITICAL,
        Certainty.PROVED,
        tuple(evidence),
        advice="reboot the machine"
        if reboot
        else "stop what uses it, nvidia-smi --gpu-reset -i N on the node, then restart the "
        "containers; if it does not take, reboot",
    )
