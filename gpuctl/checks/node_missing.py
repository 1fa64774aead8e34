"""A device node CUDA needs is missing inside the container.

Without nvidiactl NVML says "driver not loaded" although it is; without nvidia-uvm cuInit fails with 999; without
nvidiaN that GPU is gone, and CUDA counts one less without any error. Containers get the nodes when they start, from
devN entries or lxc.mount.entry lines; what the node did not have at that moment is not there.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, devices, nodes, nvidia
from gpuctl.facts.nodes import CTL, UVM
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    table = access.guest_nodes(box)
    if table is None or not access.in_container(box) or box.get_kernel(nvidia.MODULE_LOADED) is False:
        return
    if access.inner(box) and not any(node.exists for node in table.values()):
        return  # started without GPUs: a check of its own
    wanted = [CTL, UVM, *(f"/dev/nvidia{minor}" for minor in access.each_wanted_gpu(box))]
    majors = box.get_kernel(devices.MAJORS)
    if majors is not None and majors.of("nvidia-uvm") is None:
        wanted.remove(UVM)  # uvm_not_loaded says it
    found = {path: table.find(path) for path in wanted}
    missing = [path for path, node in found.items() if node is not None and node.kind == "missing"]
    if table.whole and not any(path[11:].isdigit() for path in table):
        missing = list(dict.fromkeys([*missing, "/dev/nvidia0"]))
    if missing:
        yield finding(box, missing)


def finding(box: Box, missing: list[str]) -> Finding:
    evidence = [*access.symptom(box), *(f"{path} is not there" for path in missing)]
    helper = access.nodes_made_on_demand(box)
    # as root the driver's libraries make a missing node, if the device rules let them
    harmless = bool(access.works(box)) or (bool(helper) and (access.guarded(box) or access.works(box) is None))
    gpu = any(path[11:].isdigit() for path in missing)
    if harmless and gpu and access.works(box) and not (helper and access.guarded(box)):
        harmless = False  # CUDA starts, without this GPU
    if helper and harmless:
        evidence.append(f"{helper} makes it when a program first uses the GPU, if the device rules let it")
    severity = Severity.WARNING if harmless else Severity.CRITICAL
    guest = access.conf(box) if box.guest is not box.node else None
    if guest is None:
        return Finding(
            f"{access.listed(missing)} {'is' if len(missing) == 1 else 'are'} missing in the container",
            LAYER,
            severity,
            Certainty.PROVED,
            tuple(evidence),
            separates="whether the container's configuration passes it, and whether the node had it at the last start",
            advice=guest_advice(box),
        )
    host = box.node.get(nodes.NODES)
    for path in missing:
        lines = access.in_conf(guest, path)
        on_node = host.find(path) if host is not None else None
        if lines:
            late = on_node is not None and on_node.exists
            evidence.append(
                f"{guest.where(lines[0])}  <- passes it" + ("; the node has it now, it came after the start" * late)
            )
        else:
            evidence.append(f"{guest.path or 'pct config'} does not pass {path}")
    edit = remedies.for_good(box, guest, access.stale_rules(box, guest))
    return Finding(
        f"{guest.label} lacks {access.listed(missing)}",
        LAYER,
        severity,
        Certainty.PROVED,
        tuple(evidence),
        remedy=remedies.container(edit, restarts="guest"),
        advice=remedies.advice(box, edit, restarts="guest"),
    )


def guest_advice(box: Box) -> str:
    vmid = box.wanted.vmid or box.guest.document.get("vmid") or "VMID"
    return (
        "on the node: make its device nodes (nvidia-modprobe -c 0 -u), pass them with devN entries in\n"
        f"  /etc/pve/lxc/{vmid}.conf (dev0: /dev/nvidia0,mode=0666 and so on), then: pct reboot {vmid}"
    )
