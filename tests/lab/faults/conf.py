"""The guest's configuration on its node, wrong in every way the field reports.

Each kind is a function of the text alone, so that tests of parsers and renderers can use it too. The file is edited as
a person with an editor does it; it takes effect at the guest's next start.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.lab.faults.boot import reboot
from tests.lab.lab import Lab
from tests.lab.layout import NoLab

_UVM = re.compile(r"^lxc\.cgroup2\.devices\.allow\s*[:=]\s*c (?!195:)\d+:.*\n", re.M)
_ALLOW = re.compile(r"^lxc\.cgroup2\.devices\.allow\s*[:=].*\n", re.M)
_ENTRY = re.compile(r"^lxc\.mount\.entry\s*[:=]\s*/dev/nvidia.*\n", re.M)
_NODES = (*(f"nvidia{n}" for n in range(8)), "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")


def _main(text: str, change: Callable[[str], str]) -> str:
    """Changes the live section only."""
    cut = _sections(text)
    return change(text[:cut]) + text[cut:]


def _sections(text: str) -> int:
    """Where the sections of snapshots begin."""
    start = re.search(r"^\[", text, re.M)
    return start.start() if start else len(text)


def _drop(text: str, *patterns: re.Pattern[str]) -> str:
    def change(main: str) -> str:
        for pattern in patterns:
            main = pattern.sub("", main)
        return main

    return _main(text, change)


def _add(text: str, *lines: str) -> str:
    def change(main: str) -> str:
        head = main.rstrip("\n")
        return (
            "\n".join([*([head] if head else []), *lines]) + "\n" + ("\n" if len(head) < len(text.rstrip("\n")) else "")
        )

    return _main(text, change)


def stale_major(text: str, major: int = 509) -> str:
    """the rule allows another major than the driver has"""
    return _add(_drop(text, _UVM), f"lxc.cgroup2.devices.allow: c {major}:* rwm")


def no_uvm_rule(text: str) -> str:
    """there is no rule for nvidia-uvm"""
    return _drop(text, _UVM)


def v1_keys(text: str) -> str:
    """rules for cgroup v1, which are ignored"""
    return _main(text, lambda main: main.replace("lxc.cgroup2.devices.", "lxc.cgroup.devices."))


def malformed_rule(text: str) -> str:
    """a rule that LXC cannot read: the guest starts without it, and only lxc-start's stderr says so"""
    return _add(_drop(text, _UVM), "lxc.cgroup2.devices.allow: c 511:*rwm")


def rule_in_snapshot(text: str) -> str:
    """the right rule, in the section of a snapshot, where it is without effect"""
    plain = _drop(text, _UVM).rstrip("\n")
    return f"{plain}\n\n[before-update]\nsnaptime: 1764000000\nlxc.cgroup2.devices.allow: c 511:* rwm\n"


def inline_comment(text: str) -> str:
    """a rule with a comment behind it: LXC reads it after rwm, but not after rw"""
    return _add(_drop(text, _UVM), "lxc.cgroup2.devices.allow: c 511:* rw # uvm")


def allow_all(text: str) -> str:
    """every device is allowed"""
    return _add(_drop(text, _ALLOW), "lxc.cgroup2.devices.allow: a")


def deny_all(text: str) -> str:
    """a rule that takes back all before it"""
    return _add(text, "lxc.cgroup2.devices.deny: a")


def no_mount_entries(text: str) -> str:
    """no device node is bound into the guest"""
    return _drop(text, _ENTRY)


def mount_not_optional(text: str) -> str:
    """a bind of a node that is not there and not optional: the guest does not start"""
    return _add(text, "lxc.mount.entry: /dev/nvidia-not-there dev/nvidia-not-there none bind,create=file")


def devn(text: str) -> str:
    """devN lines in place of raw rules: the way that lasts"""
    plain = _drop(text, _ALLOW, _ENTRY)
    return _main(
        plain, lambda main: "".join(f"dev{n}: /dev/{node},mode=0666\n" for n, node in enumerate(_NODES)) + main
    )


def devn_default_mode(text: str) -> str:
    """devN lines without a mode: only root may open the nodes"""
    return devn(text).replace(",mode=0666", "")


def devn_deny_write(text: str) -> str:
    """devN lines that forbid writing"""
    return devn(text).replace(",mode=0666", ",mode=0666,deny-write=1")


def devn_missing(text: str) -> str:
    """a devN line whose node is not there: the guest does not start"""
    return _main(devn(text), lambda main: "dev20: /dev/nvidia-not-there\n" + main)


def devn_and_mounts(text: str) -> str:
    """devN lines, and the old mount entries beside them: the guest does not start"""
    return _main(text, lambda main: "".join(f"dev{n}: /dev/{node},mode=0666\n" for n, node in enumerate(_NODES)) + main)


def nvidia_hook(text: str) -> str:
    """LXC's nvidia hook in place of raw rules and entries: in a privileged guest it refuses, and the guest does not
    start"""
    return _add(
        _drop(text, _ALLOW, _ENTRY),
        "lxc.environment: NVIDIA_VISIBLE_DEVICES=all",
        "lxc.hook.mount: /usr/share/lxc/hooks/nvidia",
    )


def devn_and_hook(text: str) -> str:
    """devN lines and LXC's nvidia hook, which both make the nodes: the guest does not start"""
    return nvidia_hook(devn(text))


def mount_nodev(text: str) -> str:
    """the node of nvidia-uvm bound with nodev: nobody can open it"""
    return _main(text, lambda main: main.replace("dev/nvidia-uvm none bind,", "dev/nvidia-uvm none bind,nodev,"))


def rolled_back(text: str) -> str:
    """as `pct rollback` leaves it: the rules of a snapshot from before the driver's number changed"""
    cut = _sections(text)
    now, old = text[:cut].strip("\n"), stale_major(text[:cut]).strip("\n")
    spring, autumn = f"[spring]\n{old}\nsnaptime: 1750000000", f"[autumn]\n{now}\nparent: spring\nsnaptime: 1764000000"
    return (
        "\n\n".join(part for part in (f"{old}\nparent: spring", spring, autumn, text[cut:].rstrip("\n")) if part) + "\n"
    )


def duplicate_rules(text: str) -> str:
    """the majors of all reboots so far, one below the other"""
    return _add(_drop(text, _UVM), *(f"lxc.cgroup2.devices.allow: c {n}:* rwm" for n in (234, 235, 507, 508, 509)))


def comment_between(text: str) -> str:
    """comments between the lines, which the next rewrite moves to the top"""
    return _main(text, lambda main: main.replace("lxc.cgroup2", "# GPU: do not touch!\nlxc.cgroup2", 1))


def locked(text: str) -> str:
    """locked by a backup that never ended"""
    return _main(text, lambda main: "lock: backup\n" + main)


_EDITS = (
    *(stale_major, no_uvm_rule, v1_keys, malformed_rule, rule_in_snapshot, inline_comment, allow_all, deny_all),
    *(no_mount_entries, mount_not_optional, mount_nodev, devn, devn_default_mode, devn_deny_write, devn_missing),
    *(devn_and_mounts, nvidia_hook, devn_and_hook, rolled_back, duplicate_rules, comment_between, locked),
)
KINDS: dict[str, Callable[[str], str]] = {edit.__name__.replace("_", "-"): edit for edit in _EDITS}


def edit_conf(lab: Lab, vmid: int, kind: str, *, restart: bool = False) -> None:
    """Edit a guest's conf on its node. KIND is one of those listed below."""
    if kind not in KINDS:
        raise NoLab(f"no kind {kind!r}: there are {', '.join(KINDS)}")
    file = lab.conf(vmid)
    file.write_text(KINDS[kind](file.read_text(encoding="utf-8")), encoding="utf-8")
    if restart:
        reboot(lab, str(vmid))


edit_conf.__doc__ = f"{edit_conf.__doc__}\n\n\b\n" + "\n".join(
    f"{name:18} {function.__doc__}" for name, function in KINDS.items()
)
