"""An explicit deny rule, or a file included by the configuration, takes the device away from the container.

Unprivileged containers may open every device unless `lxc.cgroup2.devices.deny` says otherwise; `deny: a` turns the
list into one that allows nothing but what is named. An included file may hold such lines out of sight.
"""

from collections.abc import Iterator

from gpuctl import remedies
from gpuctl.box import Box
from gpuctl.facts import access, lxc, proxmox
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    for guest in proxmox.confs_of_interest(box):
        rules = access.next_start(box, guest)
        refusals = access.refused(box)
        numbers = access.needed(box) or [refusal.number for refusal in refusals]
        deniers: dict[lxc.Line, list[access.Number]] = {}
        for number in numbers:
            allowed, line = rules.decide("c", number.major, number.minor)
            if not allowed and line is not None:
                deniers.setdefault(line, []).append(number)
        includes = guest.conf.lxc("lxc.include")
        if deniers and guest.conf.unprivileged:
            names = ", ".join(str(n) for n in dict.fromkeys(n for each in deniers.values() for n in each))
            evidence = access.seen(box, refusals)
            evidence += [guest.where(line) for line in deniers]
            conf = guest.conf.without([line.number for line in deniers])
            edit = remedies.Edit(guest, conf, remedies.live_rules(box))
            restarts = remedies.what_restarts(box)
            yield Finding(
                f"{guest.label}: a deny rule takes {names} away",
                LAYER, Severity.CRITICAL, Certainty.PROVED if refusals else Certainty.LIKELY, tuple(evidence),
                separates="" if refusals else "open() of the nodes inside the guest as root: EPERM proves it",
                remedy=remedies.container(edit, restarts=restarts),
                advice=remedies.advice(box, edit, restarts=restarts),
            )  # fmt: skip
        elif refusals and guest.conf.unprivileged and includes:
            evidence = access.seen(box, refusals)
            evidence += [guest.where(line) for line in includes]
            yield Finding(
                f"{guest.label}: an included file seems to take devices away; its own rules allow them",
                LAYER, Severity.CRITICAL, Certainty.LIKELY, tuple(evidence),
                separates=f"the lines lxc.cgroup2.devices in {', '.join(line.value for line in includes)}",
                advice=f"look for lxc.cgroup2.devices.deny in {', '.join(line.value for line in includes)} on the node",
            )  # fmt: skip
