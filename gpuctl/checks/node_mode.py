"""The service's user may not open the device nodes; root usually may.

A devN entry without `mode=` makes a node 0660 root:root in the container, so a service that does not run as root gets
EACCES; as root all looks well. The same comes of a module option (NVreg_DeviceFileMode), a udev rule or chmod. Root
without CAP_DAC_OVERRIDE (a unit with CapabilityBoundingSet=) is held to the mode like everybody.
"""

import re
import stat
from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, nodes, nvidia
from gpuctl.facts.nodes import CTL, UVM, Node
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    table = access.guest_nodes(box)
    if table is None:
        return
    closed: list[Node] = []
    tried = root = False
    for path, node in table.items():
        if path not in (CTL, UVM) and not re.fullmatch(r"/dev/nvidia\d+", path):
            continue
        word = access.opened(box, path, "user") or (access.opened(box, path) if not root_asked(box) else None)
        if word is None and access.opened(box, path, "root") == "EACCES":
            word, root = "EACCES", True
        if node.kind != "char" or node.mode is None or not explained(node, path, box):
            continue
        if word == "EACCES":
            closed.append(node)
            tried = True
        elif word is None and not may(box, node):
            closed.append(node)
    if not closed:
        return
    user = "root without capabilities" if root else access.user_name(box)
    evidence = list(access.symptom(box))
    for node in closed:
        evidence += access.opening(box, node.path) or [str(node)]
    groups = box.guest.mapping("service").get("groups")
    if groups:
        evidence.append(f"{user} is in the groups {', '.join(str(group) for group in groups)}")
    names = access.listed(node.path for node in closed)
    modes = ", ".join(sorted({stat.filemode(node.mode or 0)[1:] for node in closed}))
    summary = f"{user} may not open {names} (mode {modes}, owner {closed[0].uid}:{closed[0].gid})"
    certainty = Certainty.PROVED if tried else Certainty.LIKELY
    separates = "" if tried else f"open() of the nodes as {user}: EACCES proves it"
    guest = access.conf(box) if box.guest is not box.node else None
    passed = {device.path: device for device in guest.conf.devices().values()} if guest is not None else {}
    if guest is not None:
        for node in closed:
            if node.path in passed:
                evidence.append(f"{guest.where(passed[node.path].line)}  <- without mode= it is 0660")
        edit = remedies.for_good(box, guest, access.stale_rules(box, guest))
        yield Finding(
            summary, LAYER, Severity.CRITICAL, certainty, tuple(evidence), separates=separates,
            remedy=remedies.container(edit, restarts="guest"), advice=remedies.advice(box, edit, restarts="guest"),
        )  # fmt: skip
        return
    params = box.get_kernel(nvidia.PARAMS)
    if params is not None and params.get("DeviceFileMode", "438") != "438":
        evidence.append(f"/proc/driver/nvidia/params: DeviceFileMode {params['DeviceFileMode']} (438 is 0666)")
    text = f"chmod 0666 {' '.join(node.path for node in closed)}"
    if access.in_container(box):
        text = "on the node: mode=0666 in the devN entries (or gid= of a group of the user), then restart the container"
    yield Finding(
        summary, Layer.CONTAINER if access.in_container(box) else Layer.DEVICES, Severity.CRITICAL, certainty,
        tuple(evidence), separates=separates, advice=text,
    )  # fmt: skip


def root_asked(box: Box) -> bool:
    opens = box.guest.get(nodes.OPENS)
    return any("root" in answers for answers in opens.by_path.values()) if opens is not None else False


def explained(node: Node, path: str, box: Box) -> bool:
    """Does the mode explain it? An owner nobody maps and a nodev mount have checks of their own."""
    if (node.mode or 0) & 0o006 == 0o006 or node.uid in ("65534", "nobody"):
        return False
    return nodes.nodev_mount(box.guest, path) is None


def may(box: Box, node: Node) -> bool:
    """May the service's user open it, by mode, owner and groups? True where the user is not known or is root."""
    service = box.guest.mapping("service")
    user = box.wanted.user or service.get("user")
    uid, groups = service.get("uid"), service.get("groups")
    mode = node.mode or 0
    if mode & 0o006 == 0o006 or user in (None, "", "root") or uid == 0:
        return True
    if node.uid in (str(uid), str(user)) and mode & 0o600 == 0o600:
        return True
    if mode & 0o060 == 0o060:
        if groups is None and node.gid not in ("0", "root"):
            return True  # it may be a group of the user; nobody said
        return groups is not None and node.gid in {str(group) for group in groups}
    return False
