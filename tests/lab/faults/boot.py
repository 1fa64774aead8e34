"""Restarts: the fault nothing is broken by, and everything that lived in memory is gone after it."""

from __future__ import annotations

import time

from tests.lab.lab import Lab
from tests.lab.layout import GUESTS, Guest, NoLab, machine


def reboot(lab: Lab, machine_: str, *, wait: bool = True) -> None:
    """Reboot a node or a guest from inside, as `reboot` typed there does."""
    names = affected(machine_)
    before = {name: lab.boot_id(name) for name in names}
    lab.peek(machine_, ["systemctl", "--no-block", "reboot"])
    if wait:
        lab.wait(*names, since=before)


def power_cut(lab: Lab, node: str, *, seconds: float = 0.5, wait: bool = True) -> None:
    """Pull the plug of a node; the power comes back after a while."""
    if isinstance(machine(node), Guest):
        raise NoLab(f"{node} has no plug: it is a guest; `pct stop` on its node is what comes nearest")
    names = affected(node)
    before = {name: lab.boot_id(name) for name in names}
    lab.keeper("cut", node)
    time.sleep(seconds)
    lab.keeper("boot", node)
    if wait:
        lab.wait(*names, since=before)


def affected(name: str) -> tuple[str, ...]:
    """The machine, and the guests that restart with it."""
    one = machine(name)
    if isinstance(one, Guest):
        return (one.name,)
    return (one.name, *(guest.name for guest in GUESTS if guest.node == one.name))
