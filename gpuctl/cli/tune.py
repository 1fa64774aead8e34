"""`gpuctl tune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from gpuctl.cli import FINDINGS, UNKNOWN, WELL
from gpuctl.cli._console import consent, document, out, say
from gpuctl.cli._options import (
    box_option,
    check_option,
    folder,
    inventory_option,
    json_option,
    options,
    yes_option,
)

if TYPE_CHECKING:
    from gpuctl.hosts import Inventory, Machine
    from gpuctl.playbook import Outcome
    from gpuctl.tuning import Setting


@click.command("tune", short_help="settings of a node: seen, wanted, set, read back, kept over reboots")
@options(inventory_option, box_option)
@click.option("--profile", default="latency", show_default=True, metavar="NAME", help="latency, throughput, or none.")
@click.option("--power", "power_w", type=int, metavar="WATTS", help="Power limit of each GPU, within its own range.")
@click.option(
    "--max-read-request",
    type=int,
    metavar="BYTES",
    help="MaxReadReq of the GPUs and the ports above them, 128 to 4096. Brings little: 512, the default, was the best "
    "where it was measured, and ports of switches ignore it. To measure it.",
)
@click.option(
    "--no-acs-redirect",
    is_flag=True,
    help="Traffic between GPUs no longer goes through the CPU. Takes isolation away: refused where VMs use VFIO.",
)
@click.option(
    "--pci", "only", multiple=True, metavar="ADDRESS", help="MaxReadReq and ACS of these functions only: 0000:41:00.0"
)
@click.option(
    "--guest-cpus",
    is_flag=True,
    help="Keep the guest (-t) on the CPUs and the memory of its GPUs' NUMA node, from its next start on; with --undo, "
    "no longer.",
)
@click.option("--undo", is_flag=True, help="Put back what was before the first time.")
@options(check_option, yes_option, json_option)
def command(
    inventory: str,
    target: str | None,
    profile: str,
    power_w: int | None,
    max_read_request: int | None,
    no_acs_redirect: bool,
    only: tuple[str, ...],
    guest_cpus: bool,
    undo: bool,
    check: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Shows the settings of the machine that has the GPUs, sets those that differ, and reads them back.

    They hold for the whole node, and for everything on it. What does not take has failed and is said. A unit sets them
    again at each boot, before the guests start.
    """
    from gpuctl import deploy, hosts, tuning

    given = click.get_current_context().get_parameter_source("profile") is not click.core.ParameterSource.DEFAULT
    machines = hosts.load(folder(inventory))
    machine = _node(machines, target)
    if only and max_read_request is None and not no_acs_redirect:
        raise click.UsageError("--pci says where, and not what: --max-read-request or --no-acs-redirect")
    if guest_cpus:
        if given or power_w or max_read_request or no_acs_redirect:
            raise click.UsageError("--guest-cpus changes the guest's configuration, and not the node: give it alone")
        return _guest_cpus(machines, target, undo, check, yes, as_json)
    if undo:
        return _undo(machines, machine, check, yes, as_json)
    wishes = tuning.Wishes(max_read_request, power_w, no_acs_redirect, only)
    seen = _seen(machines, machine, profile, wishes)
    if seen is None:
        return UNKNOWN
    settings, kept = seen
    differ = [setting for setting in settings if not setting.well]
    # Also one that is as it is wanted, by hand or by chance, has to be so after the next boot.
    lost = [setting for setting in settings if setting.as_job() not in kept]
    needed = bool(lost) or any(not setting.how.get("may_ignore") for setting in differ)
    if not as_json:
        _show(machine.name, settings)
        _show_kept(settings, lost, kept)
        _show_nccl(profile)
    if check or not (differ or lost):
        if as_json:
            document(_as_json(machine, profile, settings, kept, None))
        return FINDINGS if needed else WELL
    if not yes:
        what = f"set {len(differ)}" if differ else "keep them over reboots"
        consent(f"{what} on {machine.name}?")
    done = deploy.tune(settings, machines, machine, on_step=_told)
    again = _seen(machines, machine, profile, wishes)
    settings, kept = again or seen
    if as_json:
        document(_as_json(machine, profile, settings, kept, done))
    if not done.well:
        say(f"gpuctl: {done.why}")
        return FINDINGS
    if again is None:
        return UNKNOWN
    left = [setting for setting in settings if not setting.well]
    ignored = [setting for setting in left if setting.how.get("may_ignore")]
    lost = [setting for setting in settings if setting.as_job() not in kept]
    if not as_json:
        for setting in left:
            why = "the hardware ignores it" if setting in ignored else "it is not as wanted"
            out(f"  {setting.name}: still {setting.in_words(setting.seen)}: {why}")
        how_kept = f"{len(lost)} are not kept over reboots" if lost else "kept over reboots"
        out(f"{len(differ) - len(left)} set and read back, {how_kept}; `gpuctl tune --undo` puts back what was before")
    return FINDINGS if len(left) > len(ignored) or lost else WELL


def _node(machines: Inventory, target: str | None) -> Machine:
    """The machine whose settings are meant: a guest's are its node's."""
    (machine, *others) = machines.chosen([target] if target else [])
    if others and not target:
        raise click.UsageError(f"name a box: -t {machine.name}")
    if machine.kind != "guest":
        return machine
    if machine.node is None or machine.node not in machines.machines:
        raise click.UsageError(f"{machine.name} is a guest and its node is not in the inventory: they are the node's")
    return machines.machines[machine.node]


_Seen = tuple[tuple["Setting", ...], tuple[Mapping[str, Any], ...]]


def _seen(machines: Inventory, machine: Machine, profile: str, wishes: Any) -> _Seen | None:
    """The settings as they are, and what the machine sets again at each boot; None where it did not answer."""
    from gpuctl import tuning
    from gpuctl.asking import ask

    (asked,) = ask(machines, [machine.name])
    if asked.box is None:
        for why in asked.missing.values():
            say(f"gpuctl: {why}")
        return None
    return tuning.wanted(asked.box.guest, profile, wishes), tuning.kept(asked.box.guest)


def _show(name: str, settings: Sequence[Setting]) -> None:
    rows = _alike(settings)
    wide = max((len(row[0]) for row in rows), default=0)
    many = f"{len(settings)} setting{'s' if len(settings) != 1 else ''}"
    out(f"{name}: {many if settings else 'nothing is asked for'}")
    for title, seen, wanted, setting in rows:
        mark = "  " if setting.well else "->"
        note = f" ({setting.note})" if setting.note else ""
        change = seen if setting.well else f"{seen} {mark} {wanted}{note}"
        out(f"  {title:<{wide}}  {change}")
    for reason, source in dict.fromkeys((s.reason, s.source) for s in settings if not s.well):
        out(f"    {reason} [{source}]")


def _show_kept(settings: Sequence[Setting], lost: Sequence[Setting], kept: Sequence[Mapping[str, Any]]) -> None:
    if not lost:
        return
    out(f"  {len(lost)} of them are not set again at the next boot, as it is")
    names = {setting.name for setting in settings}
    if others := [str(job.get("name")) for job in kept if job.get("name") not in names]:
        more = f" and {len(others) - 4} more" if len(others) > 4 else ""
        out(f"  no longer set again at boots, since this does not ask for it: {', '.join(others[:4])}{more}")


def _show_nccl(profile: str) -> None:
    from gpuctl import nccl

    known = nccl.PROFILES[profile]
    if known.env:
        variables = " ".join(map("=".join, known.env.items()))
        out(f"NCCL's variables are a server's, `nccl: {profile}` in servers.yml: {variables}")
        out(f"    {known.reason} [{known.source}]")


def _guest_cpus(machines: Inventory, target: str | None, undo: bool, check: bool, yes: bool, as_json: bool) -> int:
    """The CPU set of a guest, in its configuration on its node."""
    from gpuctl import deploy, remedies, tuning
    from gpuctl.asking import ask

    (guest, *_) = machines.chosen([target] if target else [])
    if guest.kind != "guest":
        raise click.UsageError(f"{guest.name} is no guest: -t names one")
    (asked,) = ask(machines, [guest.name])
    if asked.box is None or not asked.box.node.present:
        for why in asked.missing.values():
            say(f"gpuctl: {why}")
        return UNKNOWN
    edit = tuning.guest_edit(asked.box, undo=undo)
    remedy = remedies.container(edit, restarts=None) if edit.changes_file else None
    if not as_json:
        out(f"{guest.name}: {edit.guest.path}" + ("" if edit.changes_file else ": nothing to change"))
        for line in edit.difference():
            out(f"  {line}")
        if edit.changes_file and not undo:
            out(f"    {tuning.GUEST_CPUS} [{tuning.GUEST_CPUS_SOURCE}]")
    why = ""
    if remedy is not None and not check:
        if not yes:
            consent(f"change it on {guest.node}? It holds from the guest's next start on")
        why = deploy.mend(remedy, machines, guest, on_step=_told).why
        (again,) = ask(machines, [guest.name])
        if not why and (again.box is None or tuning.guest_edit(again.box, undo=undo).changes_file):
            why = f"{edit.guest.path} does not read as it was written"
    if as_json:
        verdict = "findings" if why or (check and edit.changes_file) else "well"
        document(
            {
                "schema": "gpuctl.tune-guest/1",
                "verdict": verdict,
                "guest": guest.name,
                "difference": edit.difference(),
                "why": why,
            }
        )
    elif why:
        say(f"gpuctl: {why}")
    elif remedy is not None and not check:
        out(f"written and read back; it holds from the next start on: pct reboot {guest.vmid} on {guest.node}")
    return FINDINGS if why or (check and edit.changes_file) else WELL


def _alike(settings: Sequence[Setting]) -> list[tuple[str, str, str, Setting]]:
    """One row for settings of one kind that were seen and are wanted alike: 64 governors are one."""
    groups: dict[tuple[str, str, str], list[Setting]] = {}
    for setting in settings:
        many = setting.how.get("optional") or ":" in setting.name
        kind = setting.name.rsplit(" ", 1)[0] if many else setting.name
        key = (kind, setting.in_words(setting.seen), setting.in_words(setting.want))
        groups.setdefault(key, []).append(setting)
    return [
        (members[0].name if len(members) == 1 else f"{kind} ({len(members)})", seen, wanted, members[0])
        for (kind, seen, wanted), members in groups.items()
    ]


def _undo(machines: Inventory, machine: Machine, check: bool, yes: bool, as_json: bool) -> int:
    from gpuctl import deploy

    done = would = deploy.tune((), machines, machine, check=True, undo=True)
    if would.well and not as_json:
        out(would.diff or f"{machine.name}: nothing was set by gpuctl", newline=not would.diff)
    if would.well and would.changed and not check:
        if not yes:
            consent(f"undo this on {machine.name}?")
        done = deploy.tune((), machines, machine, undo=True, on_step=_told)
    if as_json:
        verdict = "well" if done.well else "findings"
        document({"schema": "gpuctl.tune/1", "verdict": verdict, "why": done.why, "difference": would.diff})
    if not done.well:
        say(f"gpuctl: {done.why}")
    return WELL if done.well else FINDINGS


def _told(step: Any) -> None:
    if step.state in ("changed", "failed", "unreachable"):
        say(f"  {step.machine}: {step.task}: {step.state}")


def _as_json(
    machine: Machine,
    profile: str,
    settings: Sequence[Setting],
    kept: Sequence[Mapping[str, Any]],
    done: Outcome | None,
) -> dict[str, Any]:
    from gpuctl import nccl

    well = all((setting.well or setting.how.get("may_ignore")) and setting.as_job() in kept for setting in settings)
    well = well and (done is None or done.well)
    return {
        "schema": "gpuctl.tune/1",
        "verdict": "well" if well else "findings",
        "machine": machine.name,
        "why": done.why if done is not None else "",
        "nccl": dict(nccl.PROFILES[profile].env),
        "settings": [
            {
                "name": setting.name,
                "seen": setting.seen,
                "wanted": setting.want,
                "well": setting.well,
                "kept": setting.as_job() in kept,
                "reason": setting.reason,
                "source": setting.source,
                "command": setting.command,
            }
            for setting in settings
        ],
    }
