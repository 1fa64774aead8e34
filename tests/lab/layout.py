"""What a lab consists of: nodes, guests, their addresses and first configurations. Pure; the rest builds it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

STATES = Path("/run/gpuctl-lab")  # a folder for each lab; gone with the machine's own reboot, as the lab is

# Set aside for the testing of network devices (RFC 2544): no route leads there on a machine that works for its living.
SUBNETS = tuple(f"198.{18 + n // 256}.{n % 256}" for n in range(512))
CONTROLLER = 1  # last byte of the address the controller has in the lab's network
DISK = "4G"  # what a machine's file system holds before it is full


class NoLab(Exception):
    """The lab cannot be had. The message is one line for a person: why, and what to do."""


@dataclass(frozen=True)
class Node:
    """A Proxmox VE host."""

    name: str
    byte: int  # last byte of its address

    @property
    def hostname(self) -> str:
        return self.name


@dataclass(frozen=True)
class Guest:
    """An LXC guest of a node."""

    vmid: int
    node: str
    privileged: bool = True
    sshd: bool = True  # without: only `pct exec` reaches it

    @property
    def name(self) -> str:
        return f"ct{self.vmid}"

    @property
    def hostname(self) -> str:
        return self.name

    @property
    def byte(self) -> int:
        return self.vmid

    @property
    def volume(self) -> str:
        """Where the node keeps the guest's file system, as a directory storage does."""
        return f"/var/lib/vz/images/{self.vmid}/subvol-{self.vmid}-disk-0.subvol"


Machine = Node | Guest

NODES = (Node("kpro6", 6), Node("kpro7", 7))
GUESTS = (
    Guest(200, "kpro6"),
    Guest(201, "kpro6", privileged=False),
    Guest(202, "kpro6", sshd=False),
    Guest(210, "kpro7"),
)
MACHINES: tuple[Machine, ...] = (*NODES, *GUESTS)
SHIFT = 100_000  # first id on the node of an unprivileged guest's users, as Proxmox maps them


def machine(name: str) -> Machine:
    """The machine of this name (`kpro6`, `ct200`, or just `200`). Raises NoLab."""
    for one in MACHINES:
        if name in (one.name, one.name.removeprefix("ct")):
            return one
    raise NoLab(f"the lab has no machine {name!r}: it has {', '.join(one.name for one in MACHINES)}")


def check_name(name: str) -> str:
    """A lab's name becomes a folder, a cgroup and part of host names. Raises NoLab."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name):
        raise NoLab(f"{name!r} is no name for a lab: lower-case letters, digits and dashes, at most 31")
    return name


def interface(name: str) -> str:
    """The lab's end of the wire on this machine: a name of at most 15 characters."""
    return "gl" + hashlib.sha256(name.encode()).hexdigest()[:10]


def hardware_address(one: Machine) -> str:
    """A locally administered MAC address, the same at each start."""
    return f"02:67:70:75:00:{one.byte:02x}"


def pct_config(guest: Guest, subnet: str) -> str:
    """The guest's first /etc/pve/lxc/<vmid>.conf, as pct itself would have written it.

    The GPU is passed through the way most guides say and the incident had it: raw rules with the majors of the day.
    """
    keys = {
        "arch": "amd64",
        "cores": "2",
        "features": "nesting=1",
        "hostname": guest.hostname,
        "memory": "8192",
        "net0": f"name=eth0,bridge=vmbr0,host-managed=1,hwaddr={hardware_address(guest).upper()},"
        f"ip={subnet}.{guest.byte}/24,type=veth",
        "onboot": "1",
        "ostype": "debian",
        "rootfs": f"local:{guest.vmid}/subvol-{guest.vmid}-disk-0.subvol,size=4G",
        "startup": f"order={guest.vmid - 199}",
        "swap": "0",
        **({} if guest.privileged else {"unprivileged": "1"}),
    }
    nodes = [*(f"nvidia{n}" for n in range(8)), "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]
    raw = ["lxc.cgroup2.devices.allow: c 195:* rwm", "lxc.cgroup2.devices.allow: c 509:* rwm"]
    raw += [f"lxc.mount.entry: /dev/{node} dev/{node} none bind,optional,create=file" for node in nodes]
    return "".join(f"{line}\n" for line in [*(f"{key}: {value}" for key, value in sorted(keys.items())), *raw])


def hosts_file(subnet: str) -> str:
    """/etc/hosts of every machine."""
    lines = ["127.0.0.1 localhost", f"{subnet}.{CONTROLLER} controller"]
    lines += [f"{subnet}.{one.byte} {one.hostname}" for one in MACHINES]
    return "".join(f"{line}\n" for line in lines)


def ssh_config(state: Path, subnet: str) -> str:
    """An ssh_config that reaches every machine with an sshd, by name or by address, and believes only known keys."""
    text = f"# Written by the lab: ssh -F {state}/ssh/config kpro6\n"
    for one in MACHINES:
        if isinstance(one, Node) or one.sshd:
            text += f"Host {one.name}\n    HostName {subnet}.{one.byte}\n"
    return text + (
        "Host *\n"
        "    User root\n"
        f"    IdentityFile {state}/ssh/controller\n"
        "    IdentitiesOnly yes\n"
        "    IdentityAgent none\n"
        "    BatchMode yes\n"
        f"    UserKnownHostsFile {state}/ssh/known_hosts\n"
        "    GlobalKnownHostsFile /dev/null\n"
        "    StrictHostKeyChecking yes\n"
        "    ConnectTimeout 5\n"
    )


def inventory(state: Path, subnet: str, name: str) -> str:
    """hosts.yml: an Ansible inventory that gpuctl reads too."""
    text = (
        f"# Written by the lab {name!r}, taken away with it. `nodes` are Proxmox VE hosts, `guests` their containers.\n"
        "all:\n"
        "  vars:\n"
        "    ansible_user: root\n"
        "    ansible_python_interpreter: /usr/bin/python3\n"
        f"    ansible_ssh_private_key_file: {state}/ssh/controller\n"
        f"    ansible_ssh_common_args: -F {state}/ssh/config\n"
        "  children:\n"
        "    nodes:\n"
        "      hosts:\n"
    )
    for node in NODES:
        text += f"        {node.name}:\n          ansible_host: {subnet}.{node.byte}\n"
    text += "    guests:\n      hosts:\n"
    for guest in GUESTS:
        text += f"        {guest.name}:\n"
        if guest.sshd:
            text += f"          ansible_host: {subnet}.{guest.byte}\n"
        text += f"          gpuctl_node: {guest.node}\n          gpuctl_vmid: {guest.vmid}\n"
        if not guest.sshd:
            text += "          ansible_connection: pct\n"
    return text
