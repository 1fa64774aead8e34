"""systemd units as `systemctl show` tells them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuctl.box import Fact, Snapshot, Unknown


def parse_show(text: str) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)


def parse_status(text: str) -> dict[str, dict[str, str]]:
    """`systemctl status` and `systemctl is-active` as people paste them: unit -> properties."""
    units: dict[str, dict[str, str]] = {}
    name = ""
    for line in text.splitlines():
        heading = re.match(r"\s*[●○×*↻x]\s+(\S+\.(?:service|timer|mount|socket))\b", line)
        if heading:
            name = heading.group(1)
            units[name] = {"LoadState": "loaded"}
        missing = re.search(r"Unit (\S+?)(?:\.service)? could not be found", line)
        if missing:
            units[missing.group(1).removesuffix(".service") + ".service"] = {
                "LoadState": "not-found",
                "ActiveState": "inactive",
            }
        active = re.match(r"\s*Active: (\w+)(?: \(([\w-]+)(?:: ([\w-]+))?\))?", line)
        if active and name:
            units[name].update(
                ActiveState=active.group(1), SubState=active.group(2) or "", Result=active.group(3) or ""
            )
    return units


def _units(snapshot: Snapshot) -> Mapping[str, Mapping[str, str]]:
    units: dict[str, Mapping[str, str]] = {}
    reason = "not in the snapshot"
    if snapshot.has("units"):
        try:
            units.update(snapshot.section("units"))
        except Unknown as unknown:
            reason = str(unknown)
    for command in snapshot.mapping("commands"):
        asked = re.match(r"systemctl (status|show|is-active)\s+(?:\S*-\S+\s+)*(\S+)", command)
        if not asked:
            continue
        try:
            output = snapshot.output(command)
        except Unknown:
            continue
        unit = asked.group(2) if "." in asked.group(2) else asked.group(2) + ".service"
        if asked.group(1) == "show":
            units[unit] = parse_show(output.stdout)
        elif asked.group(1) == "is-active":
            units[unit] = {"ActiveState": output.text.strip().splitlines()[0] if output.text.strip() else "unknown"}
        else:
            units.update(parse_status(output.text))
    if not units:
        raise Unknown(f"systemd units: {reason}")
    return units


UNITS: Fact[Mapping[str, Mapping[str, str]]] = Fact((("section", "units"),), _units)


def unit(snapshot: Snapshot, name: str) -> Mapping[str, str]:
    """Properties of one unit; raises Unknown where nobody asked for it."""
    units = snapshot[UNITS]
    if name not in units:
        raise Unknown(f"{name}: not in the snapshot")
    return units[name]
