"""GPUs cannot reach each other's memory directly (PCIe access control, IOMMU).

CUDA starts; several GPUs together hang in NCCL or are slow. Access Control Services on the bridges above the cards, or
an IOMMU that translates, send their traffic through the root or nowhere.
"""

from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, cuda
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.TUNING
_STATES = {0: "ok", 1: "chipset not supported", 2: "topology not supported", 3: "disabled by a registry key",
           4: "GPU not supported", 5: "not supported"}  # fmt: skip


def check(box: Box) -> Iterator[Finding]:
    sections = box.guest.mapping("nvml") or box.node.mapping("nvml")
    pairs = [pair for view in sections.values() if isinstance(view, dict) for pair in view.get("pairs") or ()]
    blocked = [pair for pair in pairs if isinstance(pair.get("p2p_read"), int) and pair["p2p_read"] in (1, 2)]
    told = [
        line
        for line in cuda.messages(box.guest)
        if "NCCL" in line and any(w in line for w in ("hang", "timeout", "timed out"))
    ]
    if not blocked:
        return
    evidence = [f"GPU {p['a']} and {p['b']}: {_STATES[p['p2p_read']]}" for p in blocked[:4]]
    if len(blocked) > 4:
        evidence.append(f"and {len(blocked) - 4} more pairs")
    host = box.node if box.node.present else box.guest
    try:
        line = host.file("/proc/cmdline").strip()
        evidence += [f"/proc/cmdline: {word}" for word in line.split() if "iommu" in word]
    except Unknown:
        pass
    yield Finding(
        f"{len(blocked)} pair{'s' * (len(blocked) != 1)} of GPUs without direct access to each other",
        LAYER,
        Severity.WARNING if told else Severity.INFO,
        Certainty.PROVED,
        (*access.symptom(box), *evidence, *told[:1]),
        advice="gpuctl topo shows the bridges; iommu=pt on the node's command line, and ACS off on the bridges "
        "above the GPUs if no "
        "card is passed to a VM; or NCCL_P2P_DISABLE=1 for the service",
    )
