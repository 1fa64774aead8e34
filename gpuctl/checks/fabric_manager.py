"""NVIDIA's fabric manager is not running, or of another version than the driver.

Machines with NVSwitches (HGX, DGX) need it: without it cuInit gives 802 ("system not yet initialized") while nvidia-smi
shows healthy GPUs. It must have exactly the driver's version. Machines without NVSwitches do not need it, and its
failing there means nothing.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box, Unknown
from gpuctl.facts import access, cuda, kernel_log, libraries, nvidia, pci, systemd
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER
UNIT = "nvidia-fabricmanager.service"


def check(box: Box) -> Iterator[Finding]:
    host = box.node if box.node.present else box.guest
    devices = box.get_kernel(pci.DEVICES)
    switches = [device for device in devices or () if device.is_nvswitch]
    views = (box.guest.get(cuda.VIEWS) or {}).values()
    code = next((view.cu_init for view in views if view.cu_init == 802), access.code(box))
    if code != 802 or (devices is not None and not switches and not majors_have_switch(box)):
        return
    evidence = access.symptom(box)
    evidence += (
        [f"{len(switches)} NVSwitches on the bus: {', '.join(d.address for d in switches[:4])}"] if switches else []
    )
    state = ""
    for snapshot in (host, box.guest):
        try:
            unit = systemd.unit(snapshot, UNIT)
        except Unknown:
            continue
        if unit.get("LoadState") == "not-found":
            state = "not installed"
        elif unit.get("ActiveState") != "active":
            state = (
                f"{unit.get('ActiveState', 'unknown')} ({unit.get('Result') or unit.get('SubState') or ''})".replace(
                    " ()", ""
                )
            )
        else:
            state = "active"
        evidence.append(f"{UNIT} on {snapshot.name}: {state}")
        break
    version = box.get_kernel(nvidia.MODULE_VERSION)
    own = manager_version(box)
    told = [line for s in box.snapshots for line in map(str, s.document.get("errors", ()))
            if re.search(r"fabric ?manager.*(don't match|version)|driver interface version", line, re.I)]  # fmt: skip
    told += kernel_log.grep(box.get_kernel(kernel_log.LINES) or (), r"nvidia-nvswitch.*(error|fail)")[-2:]
    evidence += told
    wrong = own is not None and version is not None and own != version
    if wrong:
        evidence.append(f"fabric manager {own}, driver {version}")
    elif state == "active" and not told:
        return  # it runs, in the right version: another cause of 802
    if not (switches or majors_have_switch(box) or state or told or wrong):
        return  # nothing but the code, which has other causes too
    proved = bool(state and state != "active" and switches) or wrong
    yield Finding(
        "the fabric manager "
        f"{'has version ' + str(own) + ', the driver ' + str(version) if wrong else 'is ' + (state or 'not running')}",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if proved else Certainty.LIKELY,
        tuple(evidence),
        separates=""
        if proved
        else f"systemctl status {UNIT} on the machine with the GPUs; lspci -d 10de: | grep -i nvswitch",
        advice=f"on {host.name}: install nvidia-fabricmanager in exactly the driver's version "
        f"({version or 'see nvidia-smi'}), then\n"
        "  systemctl enable --now nvidia-fabricmanager\nand restart what uses the GPUs",
    )


def majors_have_switch(box: Box) -> bool:
    table = access.guest_nodes(box)
    return any("nvswitch" in path and node.exists for path, node in (table or {}).items())


def manager_version(box: Box) -> str | None:
    """Version of the installed fabric manager, by its package."""
    for snapshot in box.snapshots:
        for line in libraries.package_lines(snapshot):
            found = re.match(rf"ii\s+(?:nvidia-)?fabric-?manager\S*\s+(?:\d+:)?({nvidia.VERSION})", line)
            if found:
                return found.group(1)
    return None
