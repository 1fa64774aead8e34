"""An explicit deny rule, or a file included by the configuration, takes the device away from the container.

Unprivileged containers may open every device unless `lxc.cgroup2.devices.deny` says otherwise; a bare `deny: a` empties
the list, in privileged ones too: every rule before it is gone. An included file may hold such lines out of sight.
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
        passed = {device.path for device in guest.conf.devices().values()} if guest.conf.unprivileged else set()
        deniers: dict[lxc.Line, list[access.Number]] = {}
        for number in access.needed(box):
            allowed, line = rules.decide("c", number.major, number.minor)
            if not allowed and line is not None and line.key in lxc.DENY_KEYS and number.path not in passed:
                deniers.setdefault(line, []).append(number)
        includes = guest.conf.lxc("lxc.include")
        refusals = access.refused(box)
        if deniers:
            numbers = list(dict.fromkeys(number for each in deniers.values() for number in each))
            outlook = access.outlook(box, numbers)
            edit = remedies.Edit(guest, guest.conf.without([line.number for line in deniers]), remedies.live_rules(box))
            restarts = remedies.what_restarts(box, outlook)
            yield Finding(
                f"{guest.label}: a deny rule takes {access.named(numbers)} away",
                LAYER,
                outlook.severity,
                outlook.certainty,
                (*outlook.evidence, *(guest.where(line) for line in deniers)),
                (),
                access.to_prove(outlook, numbers[0].path),
                remedies.container(edit, restarts=restarts),
                remedies.advice(box, edit, restarts=restarts),
            )
        elif refusals and includes and (guest.conf.unprivileged or read_as_it_is(box, guest, rules, refusals)):
            names = ", ".join(line.value for line in includes)
            yield Finding(
                f"{guest.label}: an included file seems to take {access.named([r.number for r in refusals])} away; "
                "its own rules allow it",
                LAYER,
                Severity.CRITICAL,
                Certainty.LIKELY,
                (*access.seen(box, refusals), *(guest.where(line) for line in includes)),
                separates=f"the lines lxc.cgroup2.devices in {names}",
                advice=f"look for lxc.cgroup2.devices.deny in {names} on the node",
            )


def read_as_it_is(box: Box, guest: proxmox.GuestConf, rules: lxc.Rules, refusals: list[access.Refusal]) -> bool:
    """Does the configuration allow what is refused, and was it not changed since the container's start?"""
    allowed = all(rules.allows("c", refusal.number.major, refusal.number.minor) for refusal in refusals)
    since = access.edited_after_start(box, guest)
    return allowed and since is not None and since < 0
