"""What makes a bare root into this machine of this lab: names, keys, units, doubles of what it cannot really have."""

from __future__ import annotations

import hashlib
import importlib
import subprocess
from pathlib import Path
from types import ModuleType

from tests.lab.layout import GUESTS, MACHINES, NODES, Guest, Machine, Node, hosts_file, pct_config
from tests.lab.pct import install as pct
from tests.lab.roots import shift

# Doubles: packages beside this one with a module `install` in which any of these may be:
#   install_node(root), install_guest(root)   writes into a machine's root, as root of that machine, before it boots;
#                                             follow no absolute link there, it would lead into this machine
#   around_node(name, state) -> list[str]     words before the command that starts a node, such as a program that
#                                             starts it under its supervision and exits as it does
DOUBLES = ("nvidia", "engines", "hub")

# Units without a purpose here that cost time at every boot.
NEEDLESS = (
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer"),
    *("e2scrub_reap.service", "systemd-firstboot.service"),
    *("console-getty.service", "container-getty@.service", "getty@.service", "getty-static.service"),
    *("lxc-net.service", "lxcfs.service", "lxc.service", "lxc-monitord.service"),
    *("dev-hugepages.mount", "sys-kernel-debug.mount", "sys-kernel-tracing.mount", "sys-fs-fuse-connections.mount"),
    # Of inotify instances root has few: these take two, the service three for each login over SSH.
    *("systemd-ask-password-console.path", "systemd-ask-password-wall.path", "user@.service"),
)

# Programs that every boot and every `systemctl daemon-reload` runs, and that find nothing to do here; fstab's stays.
NEEDLESS_GENERATORS = (
    *("cryptsetup", "debug", "getty", "gpt-auto", "hibernate-resume", "integritysetup", "rc-local", "run"),
    *("system-update", "sysv", "veritysetup"),
)

_SSHD = """\
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
UseDNS no
MaxStartups 100
MaxSessions 100
"""

_NETWORK = """\
[Unit]
Description=vmbr0, the bridge of the guests
Before=network.target ssh.service pve-guests.service
Wants=network.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/sbin/ip link set lo up
ExecStart=-/usr/sbin/ip link add vmbr0 address {mac} type bridge forward_delay 0
ExecStart=/usr/sbin/ip link set host0 up master vmbr0
ExecStart=/usr/sbin/ip addr replace {address}/24 dev vmbr0
ExecStart=/usr/sbin/ip link set vmbr0 up
[Install]
WantedBy=multi-user.target
"""


def doubles() -> list[ModuleType]:
    there = [name for name in DOUBLES if (Path(__file__).parent / name / "install.py").exists()]
    return [importlib.import_module(f"tests.lab.{name}.install") for name in there]


def around_node(name: str, state: Path) -> list[str]:
    return [word for double in doubles() if hasattr(double, "around_node") for word in double.around_node(name, state)]


def keys(state: Path, subnet: str) -> None:
    """The controller's key, a host key for each machine, and known_hosts with all of them."""
    folder = state / "ssh"
    folder.mkdir(mode=0o700)
    key(folder / "controller", "controller of the lab")
    known = ""
    for one in MACHINES:
        key(folder / f"host-{one.name}", one.name)
        known += known_hosts_line(folder, one, subnet)
    (folder / "known_hosts").write_text(known, encoding="utf-8")


def key(file: Path, comment: str) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(file)], check=True)


def known_hosts_line(folder: Path, one: Machine, subnet: str) -> str:
    kind, text, *_ = (folder / f"host-{one.name}.pub").read_text(encoding="utf-8").split()
    return f"{one.name},{subnet}.{one.byte} {kind} {text}\n"


def pve(folder: Path, subnet: str) -> None:
    """What of /etc/pve the nodes of a cluster share."""
    for node in NODES:
        (folder / "nodes" / node.name / "lxc").mkdir(parents=True)
    for guest in GUESTS:
        conf = folder / "nodes" / guest.node / "lxc" / f"{guest.vmid}.conf"
        conf.write_text(pct_config(guest, subnet), encoding="utf-8")


def machine(one: Machine, root: Path, state: Path, subnet: str) -> None:
    """Writes what every machine has, then what nodes or guests have, then the doubles."""
    write(root / "etc/hostname", f"{one.hostname}\n")
    write(root / "etc/hosts", hosts_file(subnet))
    write(root / "etc/machine-id", hashlib.sha256(f"{state.name}/{one.name}".encode()).hexdigest()[:32] + "\n")
    for unit in NEEDLESS:
        mask(root, unit)
    for name in NEEDLESS_GENERATORS:
        nothing(root / f"etc/systemd/system-generators/systemd-{name}-generator")
    install = install_node if isinstance(one, Node) else install_guest
    install(one, root, state, subnet)  # type: ignore[operator]
    for double in doubles():
        if install_double := getattr(double, "install_node" if isinstance(one, Node) else "install_guest", None):
            install_double(root)
    if isinstance(one, Guest) and not one.privileged:
        shift(root, root.parent / "upper")


def install_node(one: Node, root: Path, state: Path, subnet: str) -> None:
    sshd(one, root, state)
    pct.install_node(root, one.name)
    unit(root, "vmbr0.service", _NETWORK.format(mac=f"02:67:70:75:01:{one.byte:02x}", address=f"{subnet}.{one.byte}"))


def install_guest(one: Guest, root: Path, state: Path, subnet: str) -> None:
    if one.sshd:
        sshd(one, root, state)
    else:
        mask(root, "ssh.service")
        mask(root, "ssh.socket")


def sshd(one: Machine, root: Path, state: Path) -> None:
    write(root / "etc/ssh/sshd_config.d/lab.conf", _SSHD)
    host_key = root / "etc/ssh/ssh_host_ed25519_key"
    write(host_key, (state / "ssh" / f"host-{one.name}").read_text(encoding="utf-8"), 0o600)
    write(host_key.with_suffix(".pub"), (state / "ssh" / f"host-{one.name}.pub").read_text(encoding="utf-8"))
    write(root / "var/lib/systemd/linger/root", "")  # else the last one out takes /run/user/0 away, each time
    (root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    write(root / "root/.ssh/authorized_keys", (state / "ssh/controller.pub").read_text(encoding="utf-8"), 0o600)


def write(file: Path, text: str, mode: int = 0o644) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)


def unit(root: Path, name: str, text: str, wanted_by: str = "multi-user.target") -> None:
    """Writes a unit and enables it."""
    write(root / "etc/systemd/system" / name, text)
    link = root / "etc/systemd/system" / f"{wanted_by}.wants" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(f"/etc/systemd/system/{name}")


def mask(root: Path, name: str) -> None:
    nothing(root / "etc/systemd/system" / name)


def nothing(file: Path) -> None:
    """What systemd takes for: there shall be none of this name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/null")
