"""The machine a server is measured on: how it is reached, what results depend on there, and fingerprints of that.

One round trip (agent/survey.py) tells of models, packages, kernel, driver, GPUs and settings. A fingerprint holds what
of it can change the number of a cell.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gpuctl import hosts, plugins, together
from gpuctl.cells import Cell
from gpuctl.config import Inventory
from gpuctl.engines import Identity, Launch, environment, program
from gpuctl.results.provenance import sealed, sealed_argv
from gpuctl.serving import bearer, key_of, who_answers
from gpuctl.supervision import SupervisionError, Supervisor
from gpuctl.transport import AGENTS, Transport, TransportError, agent


class SurveyError(Exception):
    """The machine could not say what results depend on. One line."""


# What makes the numbers: the stamps of each request, what is computed from them, and how often it is repeated.
_MAKES_NUMBERS = (AGENTS / "load.py", AGENTS.parent / "metrics.py", AGENTS.parent / "measuring.py")
MEASURING_VERSION = hashlib.sha256(b"".join(path.read_bytes() for path in _MAKES_NUMBERS)).hexdigest()[:12]


@dataclass(frozen=True)
class Target:
    """The machine that serves: how to reach it, and which Python {python} stands for there."""

    name: str
    transport: Transport
    python: str
    base: Path | None = None  # folder that relative model paths start from (this machine only)
    machines: hosts.Inventory | None = None
    node: Transport | None = None  # the way to its node, where it has one
    vmid: int | None = None

    @property
    def ours(self) -> bool:
        """This machine: it is measured and never mended."""
        return self.base is not None

    @property
    def agent_python(self) -> str:
        """What agents run under there."""
        return self.python if self.ours else "python3"


def target(inventory: Inventory, name: str) -> Target:
    """The machine of that name in the inventory's hosts.yml. Raises hosts.BadInventory."""
    return target_of(hosts.load(inventory.folder), name)


def target_of(machines: hosts.Inventory, name: str) -> Target:
    """A machine of those. Raises hosts.BadInventory."""
    (machine, *_) = machines.chosen([name])
    ways = hosts.transports(machines)
    way, node = ways[machine.name], ways.get(machine.node or "")
    if machine.connection == "local":
        return Target(machine.name, way, sys.executable, Path.cwd(), machines, node, machine.vmid)
    return Target(machine.name, way, "python3", None, machines, node, machine.vmid)


def launch_of(inventory: Inventory, name: str, target: Target) -> Launch:
    """A server of the inventory with the paths and the Python of its machine."""
    server = inventory.server(name)

    def path(model: str | None) -> str | None:
        if model is None:
            return None
        where = inventory.models[model].path
        return str(target.base / where) if target.base is not None and not where.startswith("~") else where

    launch = Launch(name, server, path(server.model), path(server.draft), target.python)
    return together.ranked(launch, hosts.load(inventory.folder))[0] if len(server.nodes) > 1 else launch


def ask_survey(target: Target, launches: Mapping[str, Launch], inventory: Inventory) -> dict[str, Any]:
    """Models, packages and machine as they are now, in one round trip.

    "others": the same of each further machine that one of the servers runs on; "served": what servers of somebody else
    say of themselves. Raises SurveyError, NoKey, TransportError.
    """
    answer = _survey_of(target, launches)
    answer["others"] = {}
    answer["served"] = {name: _served(target, launch) for name, launch in launches.items() if launch.server.url}
    names = {node for launch in launches.values() for node in launch.server.nodes[1:]}
    if names:
        machines = hosts.load(inventory.folder)
        for name in sorted(names):
            its = {server: launch for server, launch in launches.items() if name in launch.server.nodes}
            answer["others"][name] = _survey_of(target_of(machines, name), its)
    return answer


def _served(target: Target, launch: Launch) -> Identity:
    """What a server of somebody else serves now; nothing known where it does not answer."""
    engine = plugins.get("engines", launch.server.engine)
    supervisor = Supervisor(target.transport, python=target.agent_python)
    try:
        found, _ = who_answers(launch, engine, supervisor, bearer(key_of(launch.server)))
    except SupervisionError as error:
        raise SurveyError(str(error)) from None
    identity: Identity = engine.identity(found)
    return identity


def _survey_of(target: Target, launches: Mapping[str, Launch]) -> dict[str, Any]:
    models = sorted({path for launch in launches.values() for path in (launch.model, launch.draft) if path})
    programs = [
        one for launch in launches.values() if (one := _program(launch, plugins.get("engines", launch.server.engine)))
    ]
    job = {"models": models, "programs": programs}
    command, stdin = agent("survey", job, python=target.agent_python)
    done = target.transport.run(command, stdin=stdin, timeout=300)
    if done.rc < 0:
        raise TransportError(f"{target.name}: the survey was killed (signal {-done.rc})")
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise SurveyError(f"{target.name}: {said[-1] if said else f'exit status {done.rc}'}") from None
    answer["programs"] = list(zip(programs, answer["programs"], strict=True))
    return answer


def _program(launch: Launch, engine: ModuleType) -> dict[str, Any] | None:
    """What the survey is asked of a server's program; None where the server is somebody else's."""
    words = program(launch, getattr(engine, "PROGRAM", ()))
    path = environment(engine, launch).get("PATH")
    return {"words": list(words), "path": path, "packages": sorted(engine.VERSIONS)} if words else None


def missing_programs(launches: Mapping[str, Launch], survey: Mapping[str, Any]) -> dict[str, str]:
    """Why servers cannot be started where they shall run, by server: "nosuchprog: not found"."""
    found = {}
    for name, launch in launches.items():
        engine = plugins.get("engines", launch.server.engine)
        for place in (survey, *(survey["others"][other] for other in launch.server.nodes[1:])):
            said = str(_versions(launch, engine, place).get("error", ""))
            if said.endswith(": not found") and not launch.server.url:
                found[name] = said
    return found


def fingerprint(cell: Cell, launch: Launch, engine: ModuleType, survey: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that can change the number of a cell, as far as the machine tells."""
    others = {name: _of_machine(launch, engine, survey["others"][name]) for name in launch.server.nodes[1:]}
    return {
        **_of_machine(launch, engine, survey),
        **({"others": others} if others else {}),
        **intended(cell, launch, engine),
    }


def intended(cell: Cell, launch: Launch, engine: ModuleType) -> dict[str, Any]:
    """The part of a fingerprint that is known without the machine."""
    return {
        "argv": sealed_argv(engine.argv(launch)) or [launch.server.url],
        "environment": sealed(environment(engine, launch)),
        **{key: value for key in ("numa", "cpus", "user") if (value := getattr(launch.server, key)) is not None},
        "workload": cell.definition(),
        "load_agent": MEASURING_VERSION,
    }


def _of_machine(launch: Launch, engine: ModuleType, survey: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a fingerprint that a machine tells."""
    of_a_boot = {"boot_id", "pid1_start", "systemd"}
    machine = {key: value for key, value in survey["machine"].items() if key not in of_a_boot}
    # by their place on the bus, so that a difference names the card
    machine["gpus"] = {gpu["pci"]: {k: v for k, v in gpu.items() if k != "pci"} for gpu in machine.get("gpus", ())}
    model, versions = survey["models"].get(launch.model or "", {}).get("id"), _versions(launch, engine, survey)
    if launch.server.url:  # nobody tells of its files: it says what it is
        served = survey["served"][launch.name]
        model = served.model_path or ", ".join(served.models) or None
        versions = {"version": served.version, "context": served.context}
    return {
        "model": model,
        "draft": survey["models"].get(launch.draft or "", {}).get("id"),
        "engine": {"name": launch.server.engine, **versions},
        "machine": machine,
    }


def _versions(launch: Launch, engine: ModuleType, survey: Mapping[str, Any]) -> Mapping[str, Any]:
    wanted = _program(launch, engine)
    return next((found for asked, found in survey["programs"] if asked == wanted), {})
