"""What a box is to serve, and how far it does: models in their places, units, and what their health says.

The sections `models` and `serving` are there where somebody asked who knows what is wanted (`gpuctl restore`); without
them nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuctl.box import Fact, Snapshot, Unknown


@dataclass(frozen=True)
class Model:
    """A model that is wanted. `state` as in staging.Found; `mount`: its memory file system, None: there is none."""

    name: str
    path: str
    state: str
    in_memory: bool = True
    mount: str | None = None
    missing: tuple[str, ...] = ()
    why: str = ""  # why it could not be looked at

    @property
    def well(self) -> bool:
        return self.state == "staged" if self.in_memory else self.state in ("complete", "staged")


@dataclass(frozen=True)
class Unit:
    """A unit of a server that is wanted. `health`: what HTTP answered, 200 when it can generate."""

    name: str
    active: str  # as systemd's ActiveState; `absent` where there is no such unit
    result: str = ""
    sub: str = ""  # SubState; auto-restart: it failed, and systemd waits before it tries again
    health: Any = None
    note: str = ""  # what it left when it gave up at boot
    since_s: float | None = None  # seconds in this state
    within_s: float = 900.0  # so long it may take to start

    @property
    def runs(self) -> bool:
        return self.active in ("active", "activating", "reloading") and self.sub != "auto-restart"

    @property
    def answers(self) -> bool:
        """It can generate; of a server that the inventory does not know, nobody knows where to ask."""
        return self.health in (200, "unknown")

    @property
    def starting(self) -> bool:
        """It runs and has not had its time yet."""
        young = self.since_s is None or self.since_s < self.within_s
        return self.runs and not self.answers and young


def _models(snapshot: Snapshot) -> tuple[Model, ...]:
    found = []
    for name, told in _mapping(snapshot, "models").items():
        missing = tuple(str(line) for line in told.get("missing", ()))
        mount, why = told.get("mount"), str(told.get("why", ""))
        in_memory = told.get("in_memory") not in (False, "false", "no")
        found.append(
            Model(str(name), str(told["path"]), str(told.get("state", "unknown")), in_memory, mount, missing, why)
        )
    return tuple(found)


def _units(snapshot: Snapshot) -> tuple[Unit, ...]:
    found = []
    for name, told in _mapping(snapshot, "serving").items():
        health, since = told.get("health"), told.get("since_s")
        found.append(
            Unit(
                str(name),
                str(told.get("ActiveState", "absent")),
                str(told.get("Result", "")),
                str(told.get("SubState", "")),
                200 if str(health) == "200" else health,
                str(told.get("note", "")),
                None if since is None else float(since),
                float(told.get("within_s", 900)),
            )
        )
    return tuple(found)


def _mapping(snapshot: Snapshot, section: str) -> Mapping[str, Mapping[str, Any]]:
    if not snapshot.present or not snapshot.has(section):
        raise Unknown(f"{section}: {snapshot.reason or 'not in the snapshot'}")
    return snapshot.mapping(section)


MODELS: Fact[tuple[Model, ...]] = Fact((("section", "models"),), _models)
SERVERS: Fact[tuple[Unit, ...]] = Fact((("section", "serving"),), _units)
