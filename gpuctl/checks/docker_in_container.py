"""Docker inside an unprivileged container cannot set device rules for its own containers.

NVIDIA's runtime wants to change the device cgroup of the container it starts, which an unprivileged guest may not:
"bpf_prog_query(BPF_CGROUP_DEVICE) failed: operation not permitted". It can be told to leave that alone, for the guest
is allowed the devices already.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import cuda
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER
_PATTERN = (
    r"bpf_prog_query\(BPF_CGROUP_DEVICE\) failed|failed to (add|set) device rules|devices\.allow: operation not "
    r"permitted"
    r"|failed to write .*devices\.(allow|deny)"
)


def check(box: Box) -> Iterator[Finding]:
    told = [line.strip() for line in cuda.messages(box.guest) if re.search(_PATTERN, line)]
    if not told:
        return
    config = box.guest.mapping("files").get("/etc/nvidia-container-runtime/config.toml")
    setting = re.search(r"^\s*#?\s*no-cgroups\s*=\s*\w+", config, re.M) if isinstance(config, str) else None
    if setting and "true" in setting.group(0) and "#" not in setting.group(0):
        return
    evidence = told[:3] + (
        [f"/etc/nvidia-container-runtime/config.toml: {setting.group(0).strip()}"] if setting else []
    )
    yield Finding(
        "NVIDIA's container runtime may not set device rules inside this guest",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED,
        tuple(evidence),
        advice="inside the guest, in /etc/nvidia-container-runtime/config.toml, section [nvidia-container-cli]: "
        "no-cgroups = true; "
        "give each container its nodes with --device /dev/nvidia0 --device /dev/nvidiactl --device /dev/nvidia-uvm; "
        "restart docker",
    )
