"""The environment the failing process has: of the service where it is known, else what people typed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuctl.box import Fact, Snapshot, Unknown


def parse_env(text: str) -> dict[str, str]:
    """NAME=value lines, `export` and quotes allowed."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"\s*(?:export\s+|declare -x\s+|-e\s+)?([A-Za-z_]\w*)=(.*?)\s*$", line)
        if match:
            value = match.group(2)
            if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
                value = value[1:-1]
            found[match.group(1)] = value
    return found


def _env(snapshot: Snapshot) -> Mapping[str, str]:
    env: dict[str, str] = {}
    known = False
    service = snapshot.mapping("service")
    if isinstance(service.get("env"), Mapping):
        env.update({str(k): str(v) for k, v in service["env"].items()})
        known = True
    for command in ("env", "printenv", "export"):
        try:
            env.update(parse_env(snapshot.output(command).stdout))
            known = True
        except Unknown:
            pass
    if snapshot.has("env"):
        env.update({str(k): "" if v is None else str(v) for k, v in snapshot.mapping("env").items()})
        known = True
    if not known:
        raise Unknown("environment: not in the snapshot")
    return env


ENV: Fact[Mapping[str, str]] = Fact((("section", "service"), ("section", "env")), _env)


def _env_source(snapshot: Snapshot) -> str:
    service = snapshot.mapping("service")
    if snapshot.has("env"):
        return "environment"
    if service.get("unit") and service.get("env_from"):
        return f"environment of {service['unit']} ({service['env_from']})"
    return "environment"


# Where ENV comes from, for evidence lines.
ENV_SOURCE: Fact[str] = Fact((("section", "service"),), _env_source)
