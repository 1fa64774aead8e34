"""A box back to serving: looked at, healed from the lowest layer up, looked at again.

The loop is the doctor's (doctor/healing.py); what a remedy does to a machine is here: playbooks, models brought to
their place, servers started and asked. `gpuctl restore` heals all layers, `gpuctl bench` all but the servers, which it
starts itself.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from gpuctl import background, config, deploy, doctor, hosts, plugins, render, staging
from gpuctl.agent.stage import size_of
from gpuctl.asking import ask
from gpuctl.box import Box, Snapshot
from gpuctl.doctor import Healing, Played
from gpuctl.engines import Launch, environment
from gpuctl.finding import Finding, Layer, Remedy, Severity
from gpuctl.playbook import Outcome, Step, play
from gpuctl.serving import StartFailed, follow
from gpuctl.staging import StagingError
from gpuctl.supervision import Start, SupervisionError, Supervisor, Units
from gpuctl.transport import TransportError, Unreachable, agent

Tell = Callable[..., None]
# Asked before a change: the remedy, where it is made, and what it would change.
Allowed = Callable[[Remedy, str, str], bool]

# Remedies of these layers leave those below as they are: they are not probed again to verify them.
_UPPER = frozenset({"tmpfs", "stage", "server"})
_NOT_SERVERS = ("gpuctl-stage-", "gpuctl-tune.", "gpuctl-devices.", "gpuctl-failed@")
NOTES = "/var/lib/gpuctl/failed"


MISHAPS = (StagingError, StartFailed, SupervisionError, render.CannotRender)  # of a remedy, each in one line


class NotAllowed(Exception):
    """A change is needed that nobody is there to allow. One line that follows the name of the box."""

    def __init__(self, remedy: Remedy, where: str, why: str = "nobody is there to allow it, --yes does") -> None:
        restarts = f", and a restart of the {remedy.restarts}" if remedy.restarts else ""
        super().__init__(f"needs a change: {remedy.playbook}.yml on {where}{restarts}; {why}")


@dataclass(frozen=True)
class Wants:
    """What a box is to have: names of models.yml in their places, names of servers.yml running and started at boot."""

    models: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()


def wants_of(machine: hosts.Machine, inventory: config.Inventory) -> Wants:
    """What hosts.yml says of a machine. `inventory`: as it was checked when it was read (`config.load`)."""
    return Wants(models_of(inventory, machine.serves), machine.serves)


def models_of(inventory: config.Inventory, servers: Sequence[str]) -> tuple[str, ...]:
    """The models that these servers read and staging brings, each once."""
    used = [name for one in servers for name in (inventory.server(one).model, inventory.server(one).draft) if name]
    return tuple(dict.fromkeys(name for name in used if inventory.models[name].stage))


class Restorer:
    """Heals one box of an inventory.

    `wants`: what it is to have; None: what is enabled there at boot. `allowed` is asked before each change, with what
    it would change; without it everything is allowed, and nothing is tried in check mode first. `verify`: models are
    read whole, SHA-256 and all. `tell(event, **facts)` hears: looking, found, would, playing, step, progress, stage,
    mended.
    """

    def __init__(
        self,
        machines: hosts.Inventory,
        name: str,
        inventory: config.Inventory | None = None,
        wants: Wants | None = None,
        *,
        tell: Tell,
        allowed: Allowed | None = None,
        verify: bool = False,
    ) -> None:
        self.machines, self.machine = machines, machines.machines[name]
        self.inventory, self.wants = inventory, wants
        self.tell, self.allowed, self.verify = tell, allowed, verify
        self.looks = 0
        self.spent: dict[str, float] = {}  # seconds, by what they went to
        self._ways = hosts.transports(machines)
        self.way = self._ways[name]
        self._last: Box | None = None
        self._upper = False  # since the last look only upper layers have been changed
        self._found: dict[str, staging.Found] = {}

    # -- looking

    def look(self) -> Box:
        """The box as it is now: every machine of it probed side by side, models and servers beside that. What a remedy
        of the upper layers cannot have changed is not probed again. Raises TransportError."""
        self.tell("looking", box=self.machine.name)
        with self._timed("looking"):
            again = self._last if self._upper else None
            probed = background.begin(lambda: again or self._probed())
            above = [background.begin(self._models), background.begin(self._serving)]
            background.ended([probed, *above])
            box = probed.result()
            parts = self._above(above) if box.guest.present else {}
        self.looks += 1
        guest = Snapshot({**box.guest.document, **{key: part for key, part in parts.items() if part}})
        self._last = Box(guest, guest if box.node is box.guest else box.node, box.wanted)
        self._upper = False
        return self._last

    def _above(self, asked: Sequence[Future[dict[str, Any]]]) -> dict[str, Any]:
        """Models and servers of a guest that was probed: where its own way fails, by its node."""
        try:
            return dict(zip(("models", "serving"), (one.result() for one in asked), strict=True))
        except Unreachable:
            if self.machine.connection == "pct" or not self.machine.node or self.machine.vmid is None:
                raise
            self.way = hosts.through_node(self.machine, self._ways)
            return {"models": self._models(), "serving": self._serving()}

    def _probed(self) -> Box:
        (asked,) = ask(self.machines, [self.machine.name])
        if asked.box is None:
            raise Unreachable("; ".join(asked.missing.values()))
        return asked.box

    def _models(self) -> dict[str, Any]:
        """The section `models`."""
        told: dict[str, Any] = {}
        for name in self._wanted().models:
            try:
                found = staging.look(self.way, self._job(name), verify=self.verify)
            except StagingError as error:
                told[name] = {"path": self._model(name).path, "why": str(error)}
                continue
            self._found[name] = found
            mount = found.raw.get("mount") or {}
            told[name] = {
                "path": found.path,
                "state": found.state,
                "in_memory": found.in_memory,
                # /run is in memory, too: the system's own, a tenth of the machine, and not for this
                "mount": mount.get("point") if mount.get("in_memory") and mount.get("point") != "/run" else None,
                "missing": list(found.missing),
            }
        return told

    def _serving(self) -> dict[str, Any]:
        """The section `serving`."""
        if self.wants is not None and not self.wants.servers:
            return {}
        glance = self._glance()
        units = {str(one["Id"]): one for one in glance["units"]} if isinstance(glance["units"], list) else {}
        wanted = [f"gpuctl-{name}.service" for name in self._wanted(units).servers]
        health = self._health({unit: self._urls(unit) for unit in wanted})
        told = {}
        for unit in wanted:
            known = units.get(unit, {})
            since = known.get("since")
            told[unit] = {
                "ActiveState": known.get("ActiveState", "absent"),
                "SubState": known.get("SubState", ""),
                "Result": known.get("Result", ""),
                "health": health[unit],
                "since_s": round(glance["now"] - since, 1) if since else None,
                "within_s": self._ready_within(unit),
                "note": glance["failed"].get(unit, ""),
            }
        return told

    def _glance(self) -> dict[str, Any]:
        command, stdin = agent("glance", {"models": []})
        done = self.way.run(command, stdin=stdin, timeout=60)
        try:
            answer: dict[str, Any] = json.loads(done.text)
        except ValueError:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise TransportError(f"{self.way.name}: {said[-1] if said else f'status {done.rc}'}") from None
        return answer

    def _wanted(self, units: Mapping[str, Mapping[str, Any]] | None = None) -> Wants:
        """What the box is to have. Without a word in the inventory: the servers of ours that are enabled there."""
        if self.wants is None:
            if units is None:
                units = {str(one["Id"]): one for one in self._glance()["units"]}
            enabled = [
                name.removeprefix("gpuctl-").removesuffix(".service")
                for name, one in units.items()
                if one.get("UnitFileState") == "enabled" and name.endswith(".service")
                if not name.startswith(_NOT_SERVERS)
            ]
            known = [name for name in enabled if self.inventory is not None and name in self.inventory.servers]
            self.wants = Wants(models_of(self.inventory, known) if self.inventory else (), tuple(enabled))
        return self.wants

    def _health(self, urls: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """By unit: 200, or what came in its place."""
        asked = [(unit, url) for unit, several in urls.items() for url in several]
        supervisor = Supervisor(self.way)
        answers = supervisor.ask([{"url": url, "timeout_s": 5} for _, url in asked]) if asked else []
        told: dict[str, Any] = dict.fromkeys(urls, "unknown")
        for (unit, _), answer in zip(asked, answers, strict=True):
            value = answer.get("status") or answer.get("error")
            if told[unit] in ("unknown", 404):
                told[unit] = value
        return told

    # -- what the inventory says

    def _model(self, name: str) -> config.Model:
        assert self.inventory is not None
        return self.inventory.models[name]

    def _job(self, name: str) -> dict[str, Any]:
        assert self.inventory is not None
        return staging.job_for(name, self._model(name), self.machine, self.inventory.servers)

    def _server(self, unit: str) -> config.Server | None:
        name = unit.removeprefix("gpuctl-").removesuffix(".service")
        return self.inventory.servers.get(name) if self.inventory is not None else None

    def _launch(self, unit: str) -> Launch:
        name = unit.removeprefix("gpuctl-").removesuffix(".service")
        assert self.inventory is not None
        server, models = self.inventory.server(name), self.inventory.models
        model, draft = (models[one].path if one else None for one in (server.model, server.draft))
        return Launch(name, server, model, draft)

    def _urls(self, unit: str) -> list[str]:
        if self._server(unit) is None:
            return []
        launch = self._launch(unit)
        return [launch.base_url + path for path in plugins.get("engines", launch.server.engine).HEALTH]

    # -- changing

    def play(self, remedy: Remedy) -> Played:
        """Makes one change, with what has to restart for it."""
        where = (self.machine.node if remedy.on == "node" else None) or self.machine.name
        try:
            if self.allowed is not None:
                shown = self.would(remedy)
                self.tell("would", remedy=remedy, where=where, shown=shown)
                if not self.allowed(remedy, where, shown):
                    return Played(False, False, "not wanted")
            self.tell("playing", remedy=remedy, where=where)
            with self._timed(remedy.playbook):
                outcome = self._change(remedy)
        except MISHAPS as error:
            return Played(False, True, str(error))
        finally:
            self._upper = remedy.playbook in _UPPER
        return Played(outcome.well, any(outcome.changed.values()), outcome.why)

    def would(self, remedy: Remedy) -> str:
        """What a remedy would change, as text. Raises what it raises when it is played, but for TransportError."""
        with self._timed("trying in check mode"):
            return self._would(remedy)

    def _would(self, remedy: Remedy) -> str:
        if remedy.playbook == "stage":
            found = self._found[str(remedy.vars["model"])]
            size = f" ({size_of(found.source_bytes)})" if found.source_bytes else ""
            text = f"model {found.model}{size} into {found.path}\n"
            return text + (self._differences(self._boot_stage_files(found.model)) if self._systemd() else "")
        if remedy.playbook == "server" and remedy.vars.get("wait"):
            return f"nothing: it is waited for, up to {self._ready_within(str(remedy.vars['unit'])):g} s"
        if remedy.playbook == "server" and self._server(str(remedy.vars["unit"])) is not None:
            return self._differences(self.boot_unit(str(remedy.vars["unit"])))
        outcome = self._change(remedy, check=True)
        return outcome.diff or ("" if outcome.well else outcome.why)

    def _ready_within(self, unit: str) -> float:
        server = self._server(unit)
        return server.ready_within_s if server is not None else 900.0

    def _differences(self, files: Sequence[render.File]) -> str:
        """What placing these files would change. Not asked of Ansible, which minds what is not there yet."""
        text = []
        for file in files:
            there = self.way.run(["cat", file.path], timeout=30)
            before = there.text.splitlines(keepends=True) if there.rc == 0 else []
            if file.brief:
                text += [] if there.text == file.text else [f"{file.path}: a new version\n"]
                continue
            text += difflib.unified_diff(before, file.text.splitlines(keepends=True), file.path, file.path)
        return "".join(text)

    def _change(self, remedy: Remedy, *, check: bool = False) -> Outcome:
        values = remedy.vars
        if remedy.playbook == "tmpfs":
            return self._mount(str(values["folder"]), check=check)
        if remedy.playbook == "stage":
            return self._stage(str(values["model"]))
        if remedy.playbook == "server":
            return self._serve(str(values["unit"]), values, check=check)
        if remedy.playbook == "tune" and values.get("kept"):
            return self._settle(remedy.on, check=check)
        return deploy.mend(remedy, self.machines, self.machine, check=check, on_step=self._step)

    def _play(
        self,
        playbook: str,
        variables: Mapping[str, Any],
        *,
        check: bool,
        on: str | None = None,
        tags: Sequence[str] = (),
    ) -> Outcome:
        where = [on or self.machine.name]
        return play(playbook, self.machines.source, where, variables, check=check, tags=tags, on_step=self._step)

    def _settle(self, on: str, *, check: bool) -> Outcome:
        """The settings that the machine keeps, set again and read back."""
        name = (self.machine.node if on == "node" else None) or self.machine.name
        done = self._ways[name].run(["cat", f"{render.ETC}/tune.json"], timeout=30)
        try:
            settings = json.loads(done.stdout)["settings"]
        except (ValueError, KeyError, TypeError):
            return Outcome(f"{name}: {render.ETC}/tune.json cannot be read; gpuctl tune writes it", (), {}, 0.0)
        return self._play("tune", {"settings": settings, "kept": True}, check=check, on=name)

    def _mount(self, folder: str, *, check: bool) -> Outcome:
        """The memory file system, and what fills it at each boot: one run of Ansible costs as much as both."""
        found = [one for one in self._found.values() if str(PurePosixPath(one.path).parent) == folder]
        if not check:  # how large it has to be is known when the source is there
            for one in found:
                if one.source_bytes is None:
                    self._found[one.model] = self._fetched(one.model)
            found = [self._found[one.model] for one in found]
        file = render.tmpfs(staging.tmpfs_for(self.machine, folder, found))
        boot = {one.path: one for model in found for one in self._boot_stage_files(model.model)}
        variables = {"tmpfs_files": [file.as_vars()], "stage_files": [one.as_vars() for one in boot.values()]}
        return self._play("site", variables, check=check, tags=("tmpfs", "stage"))

    def _fetched(self, name: str) -> staging.Found:
        with self._timed("download"):
            return staging.fetch(self.way, self._job(name), on_progress=lambda row: self.tell("progress", row=row))

    def _stage(self, name: str) -> Outcome:
        """The model into memory, and what does so at each boot. Counted as staging is the moving of bytes alone."""
        node = self.machine.node if self.machine.node in self.machines.machines else None
        limits = []
        if node is not None:
            limits = staging.node_limits(self._ways[node], self.machine.vmid)
        with self._timed("moving"):
            staging.stage(
                self.way,
                self._job(name),
                verify=True,
                limits=limits,
                on_progress=lambda row: self.tell("progress", row=row),
            )
        placed = self._boot_stage(name)
        return replace(placed, changed={**placed.changed, self.machine.name: 1})

    def _boot_stage_files(self, name: str) -> tuple[render.File, ...]:
        folder = str(PurePosixPath(self._model(name).path).parent)
        return staging.boot_files(self._job(name), folder, self._found.get(name))

    def _boot_stage(self, name: str) -> Outcome:
        """Places what stages a model at boot, unless it is in place. Nothing on machines without systemd."""
        files, unit = self._boot_stage_files(name), f"gpuctl-stage-{name}.service"
        if self._systemd() and not self._in_place(files, unit):
            return self._play("stage", {"stage_files": [file.as_vars() for file in files]}, check=False)
        return Outcome("", (), {}, 0.0)

    def _systemd(self) -> bool:
        return self.way.run(["test", "-d", "/run/systemd/system"], timeout=30).rc == 0

    def _in_place(self, files: Sequence[render.File], unit: str) -> bool:
        """Whether all of these files are there as they are, the unit enabled, and no note of a failure lies there."""
        script = (
            'unit=$1; shift; [ "$(systemctl is-enabled "$unit" 2>/dev/null)" = enabled ] || exit 1; '
            f'[ ! -e "{NOTES}/$unit" ] || exit 1; for file; do cat "$file" || exit 1; done'
        )
        done = self.way.run(["sh", "-c", script, "sh", unit, *(file.path for file in files)], timeout=30)
        return done.rc == 0 and done.stdout == b"".join(file.text.encode() for file in files)

    def boot_unit(self, unit: str) -> tuple[render.File, ...]:
        """The unit of a server as it is started at boot, and what notes its failure. Raises CannotRender."""
        launch = self._launch(unit)
        engine = plugins.get("engines", launch.server.engine)
        argv = engine.argv(launch)
        start = Start(f"gpuctl-{launch.name}", argv, environment(engine, launch), "", launch.server.secrets)
        program = deploy.program(argv[0], self.way, start.env)
        models = models_of(self.inventory, [launch.name]) if self.inventory else ()
        file = deploy.unit_of(
            start,
            launch.server,
            models=[self._model(name).path for name in models],
            argv=(program, *argv[1:]),
            boot=True,
            after=[f"gpuctl-stage-{name}.service" for name in models],
        )
        return file, render.failed_note()

    def _serve(self, unit: str, values: Mapping[str, Any], *, check: bool) -> Outcome:
        """Places a server's unit for each boot and starts it, unless it only has to be waited for; makes sure that it
        answers. Raises StartFailed."""
        outcome = Outcome("", (), {}, 0.0)
        if not values.get("wait"):
            if self._server(unit) is None:
                text = self.way.run(["systemctl", "cat", unit], timeout=30).text
                path = next((line[2:] for line in text.splitlines() if line.startswith("# /")), "")
                text = text.partition("\n")[2]
                files: tuple[render.File, ...] = (render.File(path, text, ours=False),)
            else:
                files = self.boot_unit(unit)
            state = "restarted" if values.get("anew") else "started"
            variables = {"server_files": [file.as_vars() for file in files], "server_state": state}
            outcome = self._play("server", variables, check=check)
        if check or not outcome.well or self._server(unit) is None:
            return outcome
        launch = self._launch(unit)
        model = self.inventory.models.get(launch.server.model or "") if self.inventory else None
        with self._timed("engine start"):
            follow(
                plugins.get("engines", launch.server.engine),
                launch,
                Units(self.way, lambda start: None),
                tell=self.tell,
                known_answer=model.known_answer if model else None,
            )
        return outcome

    # -- the whole

    def heal(self) -> Healing:
        """Mends what keeps the box from serving, and what would keep it from coming back at the next boot where
        something had to be mended. Raises TransportError, and what `allowed` raises."""
        healing = doctor.heal(self.look(), self.look, self.play, wanted=needed, on_step=self._told)
        if healing.state == "mended":
            assert healing.box is not None
            more = doctor.heal(healing.box, self.look, self.play, on_step=self._told)
            healing = doctor.together(healing, more)
        return healing

    def check(self) -> tuple[doctor.Diagnosis, list[tuple[Finding, str]]]:
        """What is wrong, and what `heal` would do about each, as far as it can be told before the first is done."""
        diagnosis = doctor.diagnose(self.look())
        shown = []
        for finding in sorted(doctor.wrong(diagnosis, needed), key=lambda one: one.layer):
            text = "nothing: it has no remedy"
            if finding.remedy is not None:
                try:
                    text = self.would(finding.remedy)
                except MISHAPS as error:
                    text = str(error)
            shown.append((finding, text))
        return diagnosis, shown

    def install(self) -> Played:
        """Places all that brings the box back by itself at its next boot (playbooks/site.yml), in guest and node; what
        runs is left as it is. To be called after `look`. Raises TransportError, and what `allowed` raises."""
        machines = [self.machine.name]
        if self.machine.kind == "guest" and self.machine.node in self.machines.machines:
            machines.insert(0, str(self.machine.node))
        remedy = Remedy("site")
        try:
            files = self._boot_files()
            variables = {name: [file.as_vars() for file in several] for name, several in files.items()}

            def site(check: bool) -> Outcome:
                source = self.machines.source
                return play("site", source, machines, variables, check=check, on_step=self._step)

            if self.allowed is not None:
                would = site(True)
                if would.well and not any(would.changed.values()):
                    return Played(True, False)
                where = ", ".join(machines)
                self.tell("would", remedy=remedy, where=where, shown=would.diff or would.why)
                if not self.allowed(remedy, where, would.diff):
                    return Played(False, False, "not wanted")
            self.tell("playing", remedy=remedy, where=", ".join(machines))
            with self._timed("site"):
                done = site(False)
        except MISHAPS as error:
            return Played(False, False, str(error))
        return Played(done.well, any(done.changed.values()), done.why)

    def _boot_files(self) -> dict[str, list[render.File]]:
        """Variable of site.yml -> files, each path once."""
        wants = self._wanted()
        folders: dict[str, list[staging.Found]] = {}
        for name in wants.models:
            found = self._found[name]
            folders.setdefault(str(PurePosixPath(found.path).parent), []).append(found)
        known = [f"gpuctl-{name}.service" for name in wants.servers if self._server(f"gpuctl-{name}.service")]
        several: dict[str, list[render.File]] = {
            "tmpfs_files": [render.tmpfs(staging.tmpfs_for(self.machine, *each)) for each in folders.items()],
            "stage_files": [file for name in wants.models for file in self._boot_stage_files(name)],
            "server_files": [file for unit in known for file in self.boot_unit(unit)],
        }
        return {name: list({file.path: file for file in files}.values()) for name, files in several.items()}

    def close(self) -> None:
        for way in self._ways.values():
            way.close()

    def _told(self, finding: Finding, step: doctor.Step | None) -> None:
        if step is None:
            self.tell("found", box=self.machine.name, finding=finding)
        else:
            self.tell("mended", finding=finding, gone=step.gone, text=step.played.text)

    def _step(self, step: Step) -> None:
        self.tell("step", step=step)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent[what] = self.spent.get(what, 0.0) + time.monotonic() - began


def needed(finding: Finding) -> bool:
    """What has to go before the box is as it should be: what stops serving, and settings that a reboot took."""
    return finding.severity is Severity.CRITICAL or (finding.layer is Layer.TUNING and finding.remedy is not None)


def overhead(spent: Mapping[str, float], took: float) -> float:
    """Seconds of a restore beyond moving the models and starting the engine."""
    return took - sum(spent.get(what, 0.0) for what in ("moving", "download", "engine start"))
