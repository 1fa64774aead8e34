"""Changes that mend, as data: which playbook with which variables, and the commands a person would type. Pure.

playbooks/container.yml, on the node, changes /etc/pve/lxc/<vmid>.conf and what the running guest may open:
  vmid            the container
  conf_path       the file
  conf_sha256     of the text the new one was made from; another text there means: somebody changed it, do nothing
  conf_text       the whole new text; the same as the old one where only the running guest is to be changed
  live_rules      device rules to add to the running guest at once: ["c 511:* rwm"]
  restart         true where the guest has to be restarted; one that does not run is started

playbooks/devices.yml, on the machine with the driver, makes device nodes now and before guests start at each boot:
  minors [0, 1], modeset, caps (minors of nvidia-caps), remove (nodes to make anew), permanent
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpuctl.box import Box
from gpuctl.facts import access, devices, lxc, nodes, nvidia, proxmox
from gpuctl.facts.nodes import CTL, UVM, UVM_TOOLS
from gpuctl.finding import Remedy

# devN: pve-container 5.0.7, in Proxmox VE since 8.1's updates, in the web interface since 8.2 (its changelog)
_DEVN_SINCE = (8, 1)


@dataclass(frozen=True)
class Edit:
    """A configuration before and after, with what the change is in words."""

    guest: proxmox.GuestConf
    after: lxc.Conf
    live_rules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def difference(self) -> list[str]:
        """`- line` and `+ line`, in the order of the file."""
        before, after = str(self.guest.conf).splitlines(), str(self.after).splitlines()
        return [line for line in difflib.ndiff(before, after) if line.startswith(("- ", "+ "))]

    @property
    def changes_file(self) -> bool:
        return str(self.after) != str(self.guest.conf)


def container(edit: Edit, *, restarts: str | None) -> Remedy | None:
    """The remedy for an edit; None where the configuration's file is not known (only `pct config` was seen)."""
    if not edit.guest.vmid or not edit.guest.path:
        return None
    before = str(edit.guest.conf)
    return Remedy(
        "container",
        {
            "vmid": edit.guest.vmid,
            "conf_path": edit.guest.path,
            "conf_sha256": hashlib.sha256(before.encode()).hexdigest(),
            "conf_text": str(edit.after),
            "live_rules": list(edit.live_rules),
            "restart": restarts == "guest",
        },
        on="node",
        restarts=restarts,
    )


def mere_restart(remedy: Remedy) -> bool:
    """Does it change nothing and only restart the guest?"""
    values = remedy.vars
    if remedy.playbook != "container" or values.get("live_rules"):
        return False
    return hashlib.sha256(str(values.get("conf_text")).encode()).hexdigest() == values.get("conf_sha256")


def device_nodes(box: Box, *, remove: Sequence[str] = (), permanent: bool = True) -> Remedy:
    """Makes the device nodes on the machine that has the driver, now and at each boot before guests start."""
    gpus = box.get_kernel(nvidia.DRIVER_GPUS) or ()
    minors = sorted({gpu.minor for gpu in gpus if gpu.minor is not None}) or [0]
    return Remedy(
        "devices",
        {"minors": minors, "modeset": modeset(box), "remove": list(remove), "permanent": permanent},
        on="node" if box.node.present else "guest",
    )


def modeset(box: Box) -> bool:
    majors = box.get_kernel(devices.MAJORS)
    return majors is not None and "nvidia-modeset" in majors.char


def devn_possible(box: Box) -> bool | None:
    """Does this node's Proxmox VE know devN? None where its version is not known."""
    version = box.node.get(proxmox.PVE_VERSION)
    return None if version is None else version[:2] >= _DEVN_SINCE


def wanted_nodes(box: Box, guest: proxmox.GuestConf) -> list[str]:
    """Nodes the guest's configuration is to pass: what it passes now, and always what CUDA needs."""
    now = [mount.source for mount in lxc.nvidia_mounts(guest.conf)]
    now += [device.path for device in guest.conf.devices().values() if "nvidia" in device.path]
    known = sorted(gpu.minor for gpu in box.get_kernel(nvidia.DRIVER_GPUS) or () if gpu.minor is not None)
    host = box.node.get(nodes.NODES)
    gpus = sorted(access.passed_gpus(guest))
    if known:  # a devN entry for a GPU that is not there any more would keep the guest from starting
        gone = {minor for minor in gpus if minor not in known and not _exists(host, f"/dev/nvidia{minor}")}
        gpus = [minor for minor in gpus if minor not in gone]
    if not gpus:
        table = access.guest_nodes(box)
        gpus = sorted(table.gpus()) if table else []
        gpus = gpus or known or [0]
    wanted = [*(f"/dev/nvidia{minor}" for minor in gpus), CTL, UVM]
    tools = host.find(UVM_TOOLS) if host is not None else None
    if UVM_TOOLS in now or (tools is not None and tools.exists):
        wanted.append(UVM_TOOLS)
    others = [path for path in dict.fromkeys(now) if path not in wanted and re.fullmatch(r"/dev/nvidia[\w/-]*", path)]
    for path in others:
        node = host.find(path) if host is not None else None
        if not re.fullmatch(r"/dev/nvidia\d+", path) and (node is None or node.exists):
            wanted.append(path)
    return wanted


def _exists(host: nodes.NodeTable | None, path: str) -> bool:
    node = host.find(path) if host is not None else None
    return node is not None and node.exists


def for_good(box: Box, guest: proxmox.GuestConf, stale: Sequence[access.Stale] = ()) -> Edit:
    """The configuration that survives a reboot with other numbers: devN entries, which Proxmox resolves by name at each
    start; on a node that does not know them, the rule with today's number. Every other line is kept."""
    if devn_possible(box) is False:
        return with_numbers(box, guest, stale)
    conf = guest.conf
    dead = [each.line.number for each in stale if not each.owner]
    notes = [
        f"line {each.line.number} ({each.line.text.strip()}) stays: {each.major} is {each.owner}'s number now"
        for each in stale
        if each.owner
    ]
    majors = box.get_kernel(devices.MAJORS)
    replaced = {devices.NVIDIA_MAJOR, majors.of("nvidia-uvm") if majors is not None else None}
    for line in conf.lxc(*lxc.ALLOW_KEYS, "lxc.cgroup.devices.allow"):
        try:
            rule = lxc.parse_rule(line.value)
        except lxc.Malformed:
            continue
        if rule.kind == "c" and rule.major is not None and rule.major in replaced:
            dead.append(line.number)
    dead += [mount.line.number for mount in lxc.nvidia_mounts(conf)]
    dead += [line.number for line in lxc.nvidia_hooks(conf, acts=True)]
    existing = conf.devices()
    after = conf.without(dead)
    have = {device.path: number for number, device in existing.items()}
    added = []
    free = (n for n in range(256) if n not in existing)
    for path in wanted_nodes(box, guest):
        if path in have:
            device = existing[have[path]]
            if (device.mode & 0o666) != 0o666 and device.uid == 0 and device.gid == 0:
                number = next(line.number for line in after.main() if line.text == device.line.text)
                after = after.replaced(number, f"dev{have[path]}: {path},mode=0666")
            continue
        added.append(f"dev{next(free)}: {path},mode=0666")
    after = after.added(added)
    return Edit(guest, after, live_rules(box), tuple(notes))


def with_numbers(box: Box, guest: proxmox.GuestConf, stale: Sequence[access.Stale] = ()) -> Edit:
    """The first dead rule gets nvidia-uvm's number of this boot, other dead ones go; without any, a rule is added."""
    major = access.uvm_major(box)
    if major is None:
        return Edit(guest, guest.conf)
    dead = [each.line for each in stale if not each.owner]
    text = f"lxc.cgroup2.devices.allow: c {major}:* rwm"
    conf = guest.conf
    if dead:
        conf = conf.replaced(dead[0].number, text).without([line.number for line in dead[1:]])
    elif not access.next_start(box, guest).allows("c", major, 0):
        conf = conf.added([text])
    if not lxc.rules_of(conf).allows("c", devices.NVIDIA_MAJOR, 255) and not conf.devices():
        conf = conf.added([f"lxc.cgroup2.devices.allow: c {devices.NVIDIA_MAJOR}:* rwm"])
    note = "this number may change at the next boot; entries dev0: /dev/nvidia0,mode=0666 ... (Proxmox VE 8.2) do not"
    return Edit(guest, conf, live_rules(box), (note,))


def live_rules(box: Box) -> tuple[str, ...]:
    """Rules that let the running guest open what it is refused now, without a restart of it."""
    majors = {refusal.number.major for refusal in access.refused(box)}
    return tuple(f"c {major}:* rwm" for major in sorted(majors))


def live_suffices(box: Box) -> bool:
    """Is a rule added to the running guest enough? Only where its nodes are right as they are."""
    majors = box.get_kernel(devices.MAJORS)
    for number in access.needed(box):
        node = access.node_of(box, number.path)
        if node is not None and (node.kind != "char" or (majors is not None and (node.major, node.minor) != (
            number.major, number.minor
        ))):  # fmt: skip
            return False
    return True


def what_restarts(box: Box, outlook: access.Outlook) -> str | None:
    """What has to restart once the rules are right: nothing while it works, only the service where a live rule does."""
    if not outlook.now:
        return None
    return "service" if access.refused(box) and live_suffices(box) else "guest"


def advice(box: Box, edit: Edit, *, restarts: str | None) -> str:
    """The commands and lines for a person: what helps at once, what lasts, what restarts."""
    guest, vmid = edit.guest, edit.guest.vmid or "VMID"
    node = box.node.name if box.node.present and box.node is not box.guest else (box.wanted.node or "the node")
    path = guest.path or f"/etc/pve/lxc/{vmid}.conf"
    lines = []
    if edit.live_rules and restarts != "guest":
        lines.append(f"now, on {node} (the guest keeps running, only the GPU program restarts):")
        lines += [f'  lxc-cgroup -n {vmid} devices.allow "{rule}"' for rule in edit.live_rules]
    if edit.changes_file:
        when = "" if restarts == "guest" else "; it counts from the next start of the container"
        lines.append(f"for good, in {path} on {node}, above the first line that starts with [{when}:")
        lines += [f"  {line}" for line in edit.difference()]
        if any(line.startswith("+ dev") for line in edit.difference()):
            lines.append("  (Proxmox looks the numbers of devN entries up at each start, so they cannot go stale)")
            major = access.uvm_major(box)
            if devn_possible(box) is None and major is not None and not guest.conf.devices():
                rule = f"lxc.cgroup2.devices.allow: c {major}:* rwm"
                lines.append(f"  (before Proxmox VE 8.2 there is no devN; there: {rule})")
    lines += [f"  {note}" for note in edit.notes]
    if restarts == "guest":
        stopped = not box.guest.present or box.guest is box.node
        lines.append(f"then, on {node}: pct {'start' if stopped else 'reboot'} {vmid}")
    return "\n".join(lines)


def nodes_advice(box: Box, *, remove: Sequence[str] = ()) -> str:
    """Commands that make the device nodes on the machine with the driver."""
    inside = access.in_container(box) and not box.node.present  # it can load no module
    where = box.node.name if box.node.present else (box.wanted.node or "the node") if inside else box.guest.name
    minors = device_nodes(box).vars["minors"]
    counts = " ".join(f"-c {minor}" for minor in minors)
    lines = [f"now, on {where}:"]
    if remove:
        lines.append(f"  rm -f {' '.join(remove)}")
    lines.append(f"  nvidia-modprobe {counts} -u" + (" -m" if modeset(box) else ""))
    when = "before guests start" if box.node.present or inside else "at boot"
    lines.append(f"for good: a unit that does this {when} (gpuctl doctor --fix installs it)")
    return "\n".join(lines)
