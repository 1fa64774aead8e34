"""The way to a machine: wires and host keys."""

from __future__ import annotations

from tests.lab import furnish
from tests.lab.lab import Lab
from tests.lab.layout import Guest, NoLab, machine


def cut(lab: Lab, machine_: str, *, undo: bool = False) -> None:
    """Cut the network of a machine: packets to it get lost. A node's guests go with it."""
    one = machine(machine_)
    state = "up" if undo else "down"
    if isinstance(one, Guest):
        lab.check(one.node, ["ip", "link", "set", f"veth{one.vmid}i0", state])
        return
    done = lab.behind(["ip", "link", "set", f"vb-{one.name}", state])
    if done.returncode != 0:
        raise NoLab(f"cutting {one.name}: {done.stderr.strip()}")


def change_host_key(lab: Lab, machine_: str, *, undo: bool = False) -> None:
    """Give a machine another SSH host key than the one that is known."""
    one = machine(machine_)
    if isinstance(one, Guest) and not one.sshd:
        raise NoLab(f"{one.name} has no sshd and no host key")
    folder = lab.state / "ssh"
    other = folder / f"other-{one.name}"
    if not other.exists():
        furnish.key(other, f"{one.name}, reinstalled")
    key = folder / f"host-{one.name}" if undo else other
    for suffix in ("", ".pub"):
        text = key.with_name(key.name + suffix).read_text(encoding="utf-8")
        lab.check(one.name, ["sh", "-c", f"cat > /etc/ssh/ssh_host_ed25519_key{suffix}"], stdin=text)
    lab.check(one.name, ["systemctl", "restart", "ssh"])
