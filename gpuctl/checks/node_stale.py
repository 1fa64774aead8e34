"""The guest's device node has a number its driver had before and has no more.

A node bound into the container at its start, or made inside, keeps its number. When nvidia-uvm is loaded anew with
another number, or the node's own device node was made anew, the guest's points nowhere (ENXIO) or to another driver.
Restarting the container makes its nodes anew.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, devices
from gpuctl.facts.nodes import Node
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    if not access.in_container(box):
        return
    wrong = wrong_numbers(box)
    if not wrong:
        return
    evidence = list(access.symptom(box))
    for node, right in wrong:
        evidence += access.opening(box, node.path) or [str(node)]
        evidence.append(f"{node.path} must be {right} in this boot (/proc/devices)")
    works = access.works(box)
    guest = access.conf(box)
    names = ", ".join(f"{node.path} ({node.major}:{node.minor}, not {right})" for node, right in wrong)
    severity = Severity.WARNING if works else Severity.CRITICAL
    if guest is None:
        vmid = box.wanted.vmid or "VMID"
        yield Finding(
            f"stale device node: {names}", LAYER, severity, Certainty.PROVED, tuple(evidence),
            advice=f"restart the container, on the node: pct reboot {vmid}",
        )  # fmt: skip
        return
    edit = remedies.for_good(box, guest, access.stale_rules(box, guest))
    yield Finding(
        f"{guest.label}: stale device node {names}", LAYER, severity, Certainty.PROVED, tuple(evidence),
        remedy=remedies.container(edit, restarts="guest"), advice=remedies.advice(box, edit, restarts="guest"),
    )  # fmt: skip


def wrong_numbers(box: Box) -> list[tuple[Node, str]]:
    """Nodes CUDA needs whose number is not their driver's, with the right number."""
    table = access.guest_nodes(box)
    majors = box.get_kernel(devices.MAJORS)
    uvm = access.uvm_major(box)
    found = []
    for path, node in (table or {}).items():
        driver, minor = devices.driver_of(path), devices.minor_of(path)
        if node.kind != "char" or driver not in ("nvidia", "nvidia-uvm") or minor is None or path.endswith("modeset"):
            continue
        major = uvm if driver == "nvidia-uvm" else devices.NVIDIA_MAJOR
        if major is None or (majors is None and driver == "nvidia-uvm" and uvm is None):
            continue
        if (node.major, node.minor) != (major, minor) and not path.endswith("-tools"):
            found.append((node, f"{major}:{minor}"))
    return found
