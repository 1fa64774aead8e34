"""The service's unit takes its devices away (PrivateDevices=, DevicePolicy=, DeviceAllow=).

systemd gives such a unit a /dev without NVIDIA's nodes, or device rules that do not name them. In a shell everything
works, in the service nothing does.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, systemd
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.SERVER
NEEDED = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0")


def check(box: Box) -> Iterator[Finding]:
    name = box.wanted.unit or box.guest.mapping("service").get("unit")
    if not name:
        return
    try:
        unit = systemd.unit(box.guest, str(name))
    except Unknown:
        return
    evidence = []
    if unit.get("PrivateDevices") == "yes":
        evidence.append("PrivateDevices=yes: the service has a /dev of its own, without NVIDIA's nodes")
    policy, allowed = unit.get("DevicePolicy", "auto"), unit.get("DeviceAllow", "")
    limited = policy in ("closed", "strict") or (allowed.strip() and policy == "auto")
    everything = re.search(r"char-\*|char-nvidia", allowed) is not None
    missing = [path for path in NEEDED if path not in allowed]
    if limited and not everything and missing:
        evidence.append(
            f"DevicePolicy={policy}, DeviceAllow={allowed or '(nothing)'}: does not name {', '.join(missing)}"
        )
    if not evidence:
        return
    failed = unit.get("ActiveState") in ("failed", "activating") or unit.get("Result") not in ("success", "", None)
    yield Finding(
        f"{name} takes the GPUs' device nodes away from its service",
        LAYER,
        Severity.CRITICAL if failed else Severity.WARNING,
        Certainty.PROVED if failed else Certainty.LIKELY,
        (*access.symptom(box), *(f"{name}: {line}" for line in evidence)),
        separates="" if failed else "cuInit within the service (its log)",
        advice=f"systemctl edit {name}: PrivateDevices=no, DevicePolicy=auto, and no DeviceAllow= (or one for each of "
        "/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidiaN rw); then systemctl restart it",
    )
