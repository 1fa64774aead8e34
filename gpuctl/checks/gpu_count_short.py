"""CUDA starts and counts fewer GPUs than there are.

With one GPU's node denied, hidden or missing, cuInit still succeeds and only the count tells. A tensor-parallel server
then fails much later, or serves with fewer cards than it was given.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, cuda, env, nvidia, pci
from gpuctl.facts.pci import normal_address
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA


def check(box: Box) -> Iterator[Finding]:
    for who, view in box.guest[cuda.VIEWS].items():
        if not view.works or view.count is None or limited_by_environment(box, who):
            continue
        expected, evidence, sure = expectation(box)
        if expected is None or view.count >= expected:
            continue
        name = access.user_name(box) if who == "user" else who
        if made_on_demand(box, expected - view.count):
            sure = False
        lines = [f"as {name}: {view}", *evidence, *missing_gpus(box, view)]
        yield Finding(
            f"CUDA counts {view.count} of {expected} GPUs; nothing fails, one is just not there"
            if expected - view.count == 1
            else f"CUDA counts {view.count} of {expected} GPUs; nothing fails, they are just not there",
            LAYER,
            Severity.CRITICAL if sure else Severity.WARNING,
            Certainty.PROVED if sure else Certainty.LIKELY,
            tuple(lines),
            separates="" if sure else "how many GPUs this guest is meant to have (gpus in the inventory)",
            advice="look at the missing GPU's node: what opening it gives, and its entry in the configuration",
        )
        return


def made_on_demand(box: Box, short: int) -> bool:
    """Are the missing GPUs those whose nodes are made when a program first asks, which the probe forbids?"""
    table = access.guest_nodes(box)
    wanted = [f"/dev/nvidia{minor}" for minor in access.each_wanted_gpu(box)]
    missing = [path for path in wanted if table is not None and table[path].kind == "missing"] if wanted else []
    return len(missing) == short and access.guarded(box) and bool(access.nodes_made_on_demand(box))


def limited_by_environment(box: Box, who: str) -> bool:
    """Does CUDA_VISIBLE_DEVICES choose among the GPUs? Then a smaller count is wanted."""
    values = box.guest.get(env.ENV) or {}
    return bool(values.get("CUDA_VISIBLE_DEVICES", "").strip()) and values.get("CUDA_VISIBLE_DEVICES") != "all"


def expectation(box: Box) -> tuple[int | None, list[str], bool]:
    """How many GPUs there should be, why, and whether that is certain."""
    if box.wanted.gpus is not None:
        return box.wanted.gpus, [f"{box.wanted.gpus} GPUs are expected here"], True
    table = access.guest_nodes(box)
    nvml = box.guest.get(nvidia.NVML)
    mig = nvml is not None and any(gpu.mig for gpu in nvml.gpus)
    if mig:
        return None, [], False
    best: tuple[int | None, list[str], bool] = (None, [], False)
    if table is not None:
        nodes = {path: node for path, node in table.items() if re.fullmatch(r"/dev/nvidia\d+", path) and node.exists}
        if nodes:
            best = (len(nodes), [f"there are {len(nodes)} nodes: {', '.join(sorted(nodes))}"], True)
    if nvml is not None and nvml.works and nvml.count is not None and nvml.count > (best[0] or 0):
        best = (nvml.count, [f"NVML counts {nvml.count}"], True)
    wanted = list(access.each_wanted_gpu(box))
    if len(wanted) > (best[0] or 0):
        source = "/proc/driver/nvidia/gpus" if not access.in_container(box) else "the container's configuration"
        best = (len(wanted), [f"{source} has {len(wanted)}: {', '.join(f'nvidia{minor}' for minor in wanted)}"], True)
    if not access.in_container(box):
        bus = [gpu for gpu in box.guest.get(pci.GPUS) or () if gpu.driver in ("nvidia", None) or not gpu.driver_known]
        if len(bus) > (best[0] or 0):
            addresses = ", ".join(gpu.address for gpu in bus)
            bound = all(gpu.driver == "nvidia" for gpu in bus)
            best = (len(bus), [f"the PCI bus has {len(bus)} GPUs: {addresses}"], bound)
    return best


def missing_gpus(box: Box, view: cuda.Cuda) -> list[str]:
    """Which GPUs CUDA does not see, with what opening their nodes gives."""
    seen = {normal_address(str(gpu["bus"])) for gpu in view.gpus if gpu.get("bus")}
    known = box.get_kernel(nvidia.DRIVER_GPUS) or ()
    lines = []
    if seen and len(seen) == view.count:
        wanted = set(access.each_wanted_gpu(box))
        lines = [
            f"not counted: {gpu.model} {gpu.bus}, /dev/nvidia{gpu.minor}"
            for gpu in known
            if gpu.bus not in seen and (not wanted or gpu.minor in wanted)
        ]
    table = access.guest_nodes(box)
    for path in sorted(table or ()):
        node = table.find(path) if table is not None else None
        if node is None or not re.fullmatch(r"/dev/nvidia\d+", path):
            continue
        if node.kind != "char":
            lines.append(str(node))
        elif access.opened(box, path) not in (None, "OK"):
            lines += access.opening(box, path)
    return lines
