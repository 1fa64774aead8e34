"""What the user wrote: models.yml, servers.yml and phases.yml of one inventory, checked and expanded. Pure.

All mistakes of all files are found at once, each with file, line and key. hosts.yml is an Ansible inventory
and read by hosts.py; here its names matter, and what it says of servers and models.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import jinja2
from jinja2.sandbox import SandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from gpuctl import hosts, nccl
from gpuctl.spelling import hint, nearest
from gpuctl.yamltext import Document, NotYaml, parse

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"  # becomes a unit name, a file name and a column of a table
_MEET = r"^(\[[0-9A-Fa-f:]+\]|[^\s:\[\]]+):\d{1,5}$"
_CPUS = r"^\d+(-\d+)?(,\d+(-\d+)?)*$"
_PATTERNS = {
    NAME: "a name of letters, digits, dot, dash, underscore",
    _MEET: "host:port",
    _CPUS: "numbers of CPUs, as 0-31,64,",
}
Scalar = bool | int | float | str
_Key = tuple[str | int, ...]  # where a part stands in its file


class ConfigError(Exception):
    """Mistakes in what the user wrote: one line each, `file:line: key: what is wrong`."""

    def __init__(self, mistakes: Iterable[str]) -> None:
        # what a person typed may hold anything: a line of ours stays one line
        self.mistakes = tuple("".join(c if c.isprintable() else repr(c)[1:-1] for c in one) for one in mistakes)
        super().__init__("\n".join(self.mistakes))


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Model(_Strict):
    """Weights a server loads. `path` is where the server finds them; `source` where staging takes them from."""

    path: str = Field(min_length=1)
    hub: str | None = None  # Hugging Face id
    revision: str = "main"
    source: str | None = None  # a folder, a hub cache, ssh://host/folder
    stage: bool = False  # path lies in a tmpfs and has to be filled after a reboot
    files: list[str] = []  # patterns of the files that belong to it; default: all but weights in a second format
    make: str | None = None  # tiny: gpuctl writes the file itself when it is missing (the embedded default)
    context: int | None = Field(default=None, gt=0)  # tokens the model was made for
    config: str | None = None  # a copy of its config.json in the inventory, for planning without the machine
    known_answer: dict[str, str] = {}  # prompt -> words a healthy server's answer has; asked before anything is timed


class Server(_Strict):
    """One configuration of an engine: what becomes one unit. `flags` are the engine's own, without dashes."""

    engine: str
    model: str | None = None
    draft: str | None = None
    program: list[str] = []  # how the engine is started; the engine has a default
    version: str | None = None  # of the engine, for planning without the machine; what is installed wins
    flags: dict[str, Scalar | list[Scalar] | dict[str, Any] | None] = {}
    env: dict[str, Scalar] = {}
    secrets: dict[str, str] = {}  # environment variable -> file on the machine that holds the value
    host: str = "127.0.0.1"
    port: int = Field(default=30000, ge=1, le=65535)
    url: str | None = None  # engine external: where it answers
    nodes: list[str] = []  # boxes; more than one runs the engine's own multi-node mode, the first one answers
    meet: str | None = Field(default=None, pattern=_MEET)  # where those find each other
    user: str | None = None  # service user of the unit
    nccl: str | None = None  # profile of NCCL variables
    numa: str | None = None  # numactl arguments, tried before they are used
    cpus: str | None = Field(default=None, pattern=_CPUS)  # CPUAffinity=, as 0-31,64; tried
    title: str | None = None
    ready_within_s: float = Field(default=900, gt=0)
    api_key_file: str | None = None  # file on the controller with the key that clients must send

    @field_validator("nccl")
    @classmethod
    def _known_profile(cls, value: str | None) -> str | None:
        if value is not None and value not in nccl.PROFILES:
            raise ValueError(f"no profile {value!r}; there are: {', '.join(nccl.PROFILES)}")
        return value

    @field_validator("url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        found = re.fullmatch(
            r"https?://(?:\[[0-9A-Fa-f:.%]+\]|[^\s/:?#@\[\]]+)(?::(\d{1,5}))?(?:/[^\s?#]*)?", value or ""
        )
        if value is not None and (found is None or not 0 < int(found[1] or 80) < 65536):
            raise ValueError(f"{value!r} is not like http://host:port")
        return value


class Phase(_Strict):
    title: str | None = None
    servers: list[str]  # names or patterns (tp4-*)
    baseline: str | None = None  # speed-ups are against it
    target: str | None = None  # the box, unless -t says otherwise
    reps: int = Field(default=3, ge=1, le=1000)
    unstable_above: float = Field(default=0.05, gt=0)  # coefficient of variation of the repetitions
    workloads: list[Any]  # one mapping each, from a workload to its parameters


class _Servers(_Strict):
    defaults: dict[str, dict[str, Any]] = {}
    servers: dict[str, dict[str, Any]]


class _Phases(_Strict):
    campaign: str | None = Field(default=None, pattern=NAME)
    phases: dict[str, Any]  # looked at one by one, so that a mistake in one hides none of another


@dataclass(frozen=True)
class WorkloadUse:
    """A workload in a phase, its parameters, and for which of the phase's servers."""

    workload: str
    parameters: Mapping[str, Any]
    servers: tuple[str, ...]


@dataclass(frozen=True)
class PhasePlan:
    name: str
    title: str
    servers: tuple[str, ...]
    baseline: str | None
    target: str | None
    reps: int
    unstable_above: float
    workloads: tuple[WorkloadUse, ...]


@dataclass(frozen=True)
class Inventory:
    folder: Path
    campaign: str
    models: Mapping[str, Model]
    servers: Mapping[str, Server]
    phases: Mapping[str, PhasePlan]

    def phase(self, name: str) -> PhasePlan:
        if name not in self.phases:
            raise ConfigError([f"{self.folder}/phases.yml: no phase {name!r}; {hint(name, self.phases)}"])
        return self.phases[name]

    def server(self, name: str) -> Server:
        if name not in self.servers:
            raise ConfigError([f"{self.folder}/servers.yml: no server {name!r}; {hint(name, self.servers)}"])
        return self.servers[name]


def load(
    folder: Path, *, engines: Iterable[str], workloads: Mapping[str, Any], multi_node: Iterable[str] = ()
) -> Inventory:
    """Reads an inventory folder. `workloads` maps each known workload to its parameter type; `multi_node` are engines
    that run over several machines. Raises ConfigError.
    """
    mistakes: list[str] = []
    texts: dict[str, str] = {}
    if not folder.is_dir():
        raise ConfigError([f"{folder}: no such inventory folder; `gpuctl init` writes one, -i names one"])
    for name in ("hosts.yml", "models.yml", "servers.yml", "phases.yml"):
        try:
            texts[name] = (folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            mistakes.append(f"{folder / name}: missing; an inventory has hosts.yml models.yml servers.yml phases.yml")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            mistakes.append(f"{folder / name}: {reason}")
    if mistakes:
        raise ConfigError(mistakes)
    check = _Checker(folder, mistakes, tuple(multi_node))
    try:
        check.machines = hosts.load(folder)
    except hosts.BadInventory as error:
        mistakes += error.mistakes
    models = check.mapping(texts["models.yml"], "models.yml", Model)
    servers = check.servers(texts["servers.yml"], models, tuple(engines))
    campaign, phases = check.phases(texts["phases.yml"], servers, workloads)
    check.served(servers)
    check.memory(models)
    if mistakes:
        raise ConfigError(_in_order(mistakes))
    return Inventory(folder, campaign or folder.name, models, servers, phases)


def _in_order(mistakes: Iterable[str]) -> list[str]:
    """File by file, machines first, each from its first line to its last."""
    ours = ["models.yml", "servers.yml", "phases.yml"]

    def place(one: str) -> tuple[int, str, int]:
        found = re.match(r"(.*?\.ya?ml)(?::(\d+))?: ", one)
        file, line = (found[1], int(found[2] or 0)) if found else ("", 0)
        name = Path(file).name
        return (ours.index(name) if name in ours else -1), file, line

    return sorted(mistakes, key=place)


class _Checker:
    """Collects mistakes with their places while the files are read."""

    def __init__(self, folder: Path, mistakes: list[str], multi_node: tuple[str, ...]) -> None:
        self.folder = folder
        self.mistakes = mistakes
        self.multi_node = multi_node
        self.machines: hosts.Inventory | None = None  # None where hosts.yml has mistakes of its own
        # What has mistakes of its own: to name it elsewhere is no further mistake. None: which ones is not known.
        self.broken: dict[str, set[str] | None] = {"models.yml": set(), "servers.yml": set()}

    def document(self, text: str, name: str) -> tuple[Any, Document]:
        try:
            document = parse(text, str(self.folder / name))
        except NotYaml as error:
            self.mistakes.append(str(error))
            self.broken[name] = None
            return None, Document(str(self.folder / name), None, {}, ())
        for path, line in document.twice:
            first = document.lines[path]
            self.mistakes.append(
                f"{document.file}:{line}: {path[-1]}: a second time; it stands on line {first} already"
            )
        return document.value, document

    def say(self, places: Document, path: _Key, what: str) -> None:
        key = ".".join(str(part) for part in path)
        mistake = f"{places.at(*path)}: {key + ': ' if key else ''}{what}"
        if mistake not in self.mistakes:  # what stands in `defaults` is one mistake, however many servers use it
            self.mistakes.append(mistake)

    def is_broken(self, file: str, name: str) -> bool:
        names = self.broken[file]
        return names is None or name in names

    def breaks(self, file: str, name: str) -> None:
        names = self.broken[file]
        if names is not None:
            names.add(name)

    def validate(
        self, kind: Any, value: Any, places: Document, bases: Sequence[_Key] = ((),), also: Iterable[str] = ()
    ) -> Any:
        """`value` as `kind`, or None and the mistakes told. A part stands below the first of `bases` that has it.

        `also`: keys that were taken out before, and may have been meant by an unknown one.
        """
        try:
            return TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            self._say_all(error, lambda loc: [*_keys_at(kind, loc), *([] if loc else also)], places, bases)
            return None

    def _say_all(
        self,
        error: ValidationError,
        known: Callable[[_Key], Sequence[str]],
        places: Document,
        bases: Sequence[_Key],
    ) -> None:
        seen: set[_Key] = set()
        problems = error.errors(include_url=False)
        for problem in problems:
            where = _of_file(problem["loc"])
            if not any(where[: len(told)] == told for told in seen):
                seen.add(where)
                members = [
                    str(p) for other in problems for p in other["loc"] if _of_file(other["loc"])[: len(where)] == where
                ]
                lists = any(member.startswith("list[") for member in members)
                self.say(places, _stands(places, bases, where), _in_words(problem, known(where[:-1]), lists))

    def mapping(self, text: str, name: str, kind: type[BaseModel]) -> dict[str, Any]:
        value, places = self.document(text, name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.say(places, (), f"a mapping of names is expected, not {_kind(value)}")
            return {}
        result = {}
        for key, item in value.items():
            self.check_name(name, places, (key,), key)
            checked = self.validate(kind, item, places, [(key,)])
            if checked is not None:
                result[str(key)] = checked
            else:
                self.breaks(name, str(key))
        return result

    def check_name(self, file: str, places: Document, path: tuple[str | int, ...], name: Any) -> None:
        if not re.match(NAME, str(name)):
            self.say(places, path, f"{name!r} is no name: letters, digits, dot, dash, underscore")

    def servers(self, text: str, models: Mapping[str, Model], engines: tuple[str, ...]) -> dict[str, Server]:
        file = "servers.yml"
        value, places = self.document(text, file)
        raw = self.validate(_Servers, value if value is not None else {"servers": {}}, places)
        if raw is None:
            self.broken[file] = None
            return {}
        result: dict[str, Server] = {}
        for pattern, entry in raw.servers.items():
            path: tuple[str | int, ...] = ("servers", pattern)
            entry = dict(entry)
            variables = entry.pop("for", {})
            uses = entry.pop("use", [])
            uses = [uses] if isinstance(uses, str) else uses
            uses = uses if isinstance(uses, list) else []
            if unknown := [use for use in uses if not isinstance(use, str) or use not in raw.defaults]:
                for use in unknown:
                    self.say(places, (*path, "use"), f"no defaults {use!r}; {hint(str(use), raw.defaults)}")
                self.breaks(file, pattern)
                continue
            merged: dict[str, Any] = {}
            for use in uses:
                merged = _merge(merged, raw.defaults[use])
            merged = _merge(merged, entry)
            bases = [path, *(("defaults", use) for use in reversed(uses))]
            try:
                rows = list(_matrix(variables))
            except ValueError as error:
                self.say(places, (*path, "for"), str(error))
                self.broken[file] = None
                continue
            for row in rows:
                try:
                    name, filled = str(_fill(pattern, row)), _fill(merged, row)
                except jinja2.TemplateError as error:
                    self.say(places, path, f"{error.message}; `for` gives: {', '.join(row) or 'nothing'}")
                    self.broken[file] = None
                    break
                self.check_name(file, places, path, name)
                if name in result:
                    self.say(places, path, f"a second server named {name!r}; put what differs into the name")
                    continue
                server = self.validate(Server, filled, places, bases, also=("use", "for"))
                if server is None:
                    self.breaks(file, name)
                    continue
                self._cross_check(server, places, bases, models, engines)
                result[name] = server
        return result

    def _cross_check(
        self,
        server: Server,
        places: Document,
        bases: Sequence[_Key],
        models: Mapping[str, Model],
        engines: tuple[str, ...],
    ) -> None:
        path = bases[0]
        if server.engine not in engines:
            where = _stands(places, bases, ("engine",))
            self.say(places, where, f"no engine {server.engine!r}; {hint(server.engine, engines)}")
        for key in ("model", "draft"):
            wanted = getattr(server, key)
            if wanted is not None and wanted not in models and not self.is_broken("models.yml", wanted):
                where = _stands(places, bases, (key,))
                self.say(places, where, f"no model {wanted!r}; {hint(wanted, models)}")
        if server.engine == "external":
            if not server.url:
                self.say(places, (*path, "url"), "engine external needs the url where the server answers")
        elif server.model is None:
            self.say(places, (*path, "model"), "a server needs a model")
        for index, node in enumerate(server.nodes):
            where = (*path, "nodes", index)
            if self.machines is not None and node not in self.machines.machines:
                self.say(places, where, f"no machine {node!r} in hosts.yml; {hint(node, self.machines.machines)}")
            elif node in server.nodes[:index]:
                self.say(places, where, f"{node} a second time: a machine has one part of a server")
        if len(server.nodes) > 1 and server.engine in engines and server.engine not in self.multi_node:
            them = " and ".join(self.multi_node)
            self.say(places, (*path, "nodes"), f"{server.engine} runs on one machine; over several run {them}")
        if server.meet is not None and len(server.nodes) < 2:
            self.say(places, (*path, "meet"), "only a server with several nodes needs it")

    def phases(
        self, text: str, servers: Mapping[str, Server], workloads: Mapping[str, Any]
    ) -> tuple[str | None, dict[str, PhasePlan]]:
        file = "phases.yml"
        value, places = self.document(text, file)
        raw = self.validate(_Phases, value if value is not None else {"phases": {}}, places)
        if raw is None:
            return None, {}
        result = {}
        for name, written in raw.phases.items():
            path: _Key = ("phases", name)
            self.check_name(file, places, path, name)
            phase = self.validate(Phase, written, places, [path])
            chosen = None if phase is None else self._servers_of(phase, servers, places, path)
            # what is asked is looked at also where the phase has mistakes of its own
            asked = written.get("workloads") if isinstance(written, dict) else None
            if phase is not None and phase.target is not None and self.machines is not None:
                known = [*self.machines.machines, *self.machines.groups]
                if phase.target not in known:
                    where = (*path, "target")
                    self.say(places, where, f"no machine {phase.target!r} in hosts.yml; {hint(phase.target, known)}")
            uses = self._uses(asked if isinstance(asked, list) else [], chosen, workloads, places, (*path, "workloads"))
            if phase is None or chosen is None:
                continue
            if not phase.workloads:
                what = "it is empty: nothing would be asked; as in `- decode: {max_tokens: [256]}`"
                self.say(places, (*path, "workloads"), what)
            result[name] = PhasePlan(
                name,
                phase.title or name,
                tuple(chosen),
                phase.baseline,
                phase.target,
                phase.reps,
                phase.unstable_above,
                uses,
            )
        return raw.campaign, result

    def _servers_of(self, phase: Phase, servers: Mapping[str, Server], places: Document, path: _Key) -> list[str]:
        """Names of the servers that a phase means."""
        chosen: list[str] = []
        if not phase.servers:
            self.say(places, (*path, "servers"), f"it is empty: no server would be asked; {hint('', servers)}")
        for index, pattern in enumerate(phase.servers):
            hits = [s for s in servers if fnmatch.fnmatchcase(s, pattern)]
            if not hits and (servers or not self.broken["servers.yml"]) and not self._of_broken(pattern):
                where = (*path, "servers", index)
                self.say(places, where, f"no server {pattern!r} in servers.yml; {hint(pattern, servers)}")
            chosen += [s for s in hits if s not in chosen]
        if phase.baseline is not None and phase.baseline not in chosen and not self._of_broken(phase.baseline):
            what = f"{phase.baseline!r} is not one of the phase's servers"
            near = nearest(phase.baseline, chosen)
            self.say(places, (*path, "baseline"), f"{what}; did you mean {near!r}?" if near else what)
        return chosen

    def _uses(
        self,
        asked: Sequence[Any],
        chosen: Sequence[str] | None,
        workloads: Mapping[str, Any],
        places: Document,
        path: _Key,
    ) -> tuple[WorkloadUse, ...]:
        """What a phase asks of its servers (`chosen`; None where they are not known)."""
        uses = []
        for index, item in enumerate(asked):
            if not isinstance(item, dict) or len(item) != 1:
                self.say(places, (*path, index), "each item names one workload, as in `- decode: {max_tokens: [256]}`")
                continue
            ((workload, parameters),) = item.items()
            where = (*path, index, str(workload))
            if workload not in workloads:
                self.say(places, where, f"no workload {workload!r}; {hint(str(workload), workloads)}")
                continue
            if not isinstance(parameters, dict | None):
                self.say(places, where, f"a mapping is expected, not {_kind(parameters)} {parameters!r}"[:200])
                continue
            parameters = dict(parameters or {})
            matching = self._only(parameters.pop("servers", "*"), chosen, places, (*where, "servers"))
            if self._parameters(workloads[workload], parameters, places, where):
                uses.append(WorkloadUse(workload, parameters, matching))
        return tuple(uses)

    def _only(self, only: Any, chosen: Sequence[str] | None, places: Document, where: _Key) -> tuple[str, ...]:
        """Those of a phase's servers that a workload is kept to: a pattern, or a list of them."""
        patterns = [only] if isinstance(only, str) else only
        if not isinstance(patterns, list) or not patterns or not all(isinstance(one, str) for one in patterns):
            self.say(places, where, f"a server of the phase, or a list of them, is expected, not {only!r}"[:200])
            return ()
        if chosen is None:
            return ()
        for pattern in patterns:
            if chosen and not fnmatch.filter(chosen, pattern) and not self._of_broken(pattern):
                self.say(places, where, f"none of the phase's servers is {pattern!r}; {hint(pattern, chosen)}")
        return tuple(s for s in chosen if any(fnmatch.fnmatchcase(s, p) for p in patterns))

    def _parameters(self, kind: type, given: Mapping[Any, Any], places: Document, where: _Key) -> bool:
        """Whether a workload can be asked with these parameters; if not, the mistakes are told."""
        known = [one.name for one in dataclasses.fields(kind)]
        unknown = [key for key in given if key not in known]
        for key in unknown:
            self.say(places, (*where, str(key)), f"unknown key; {_hint_of_key(str(key), [*known, 'servers'])}")
        try:
            _checked(kind)(**{key: value for key, value in given.items() if key in known})
        except ValidationError as error:
            self._say_all(error, lambda loc: known, places, [where])
            return False
        return not unknown

    def served(self, servers: Mapping[str, Server]) -> None:
        """What hosts.yml has machines serve."""
        for machine in self.machines.machines.values() if self.machines else ():
            for index, name in enumerate(machine.serves):
                if name in servers:
                    if servers[name].url:
                        what = f"{name} is somebody else's (url), and cannot be started"
                        self._say_of(machine, ("gpuctl_serves", index), what)
                elif not self._of_broken(name):
                    self._say_of(
                        machine, ("gpuctl_serves", index), f"no server {name!r} in servers.yml; {hint(name, servers)}"
                    )

    def memory(self, models: Mapping[str, Model]) -> None:
        """The memory file systems of hosts.yml: each is the folder of a model that is staged."""
        if self.broken["models.yml"] is None or self.broken["models.yml"]:
            return
        folders = {str(Path(model.path).absolute().parent) for model in models.values() if model.stage}
        for machine in self.machines.machines.values() if self.machines else ():
            for folder in machine.vars.get("gpuctl_tmpfs") or {}:
                if folder not in folders:
                    what = "no model of models.yml with `stage: true` lies there"
                    near = nearest(str(folder), folders)
                    self._say_of(
                        machine,
                        ("gpuctl_tmpfs", str(folder)),
                        f"{folder}: {what}; did you mean {near!r}?" if near else f"{folder}: {what}",
                    )

    def _say_of(self, machine: hosts.Machine, path: tuple[str, str | int], what: str) -> None:
        place = machine.places[path[0]].at(path[1])
        if not any(one.startswith(f"{place}: ") and one.endswith(f": {path[0]}: {what}") for one in self.mistakes):
            self.mistakes.append(f"{place}: {machine.name}: {path[0]}: {what}")

    def _of_broken(self, pattern: str) -> bool:
        """Whether a pattern may mean servers that have mistakes of their own."""
        names = self.broken["servers.yml"]
        return names is None or any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _stands(places: Document, bases: Sequence[_Key], part: _Key) -> _Key:
    """Where a part stands that any of these mappings may bring."""
    return next(((*base, *part) for base in bases if (*base, *part) in places.lines), (*bases[0], *part))


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`; mappings are merged one level down, and a null there takes a key out again."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            both = {**merged[key], **value}
            merged[key] = both
        else:
            merged[key] = value
    return merged


def _matrix(variables: Any) -> Iterator[dict[str, Any]]:
    """All combinations of `for: {tp: [1, 4], budget: [8, 16]}`. Raises ValueError."""
    if not isinstance(variables, Mapping):
        raise ValueError("a mapping from variable to list is expected, as in `for: {tp: [1, 4, 8]}`")
    for name, values in variables.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{name}: a list of values is expected, as in `{name}: [1, 4, 8]`")
    for row in itertools.product(*variables.values()):
        yield dict(zip(variables, row, strict=True))


# A template reaches nothing but its variables.
_JINJA = SandboxedEnvironment(undefined=jinja2.StrictUndefined)
_ONE_EXPRESSION = re.compile(r"\{\{((?:(?!\{\{|\}\}).)*)\}\}", re.DOTALL)


def _fill(value: Any, variables: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        if alone := _ONE_EXPRESSION.fullmatch(value.strip()):  # "{{ budget + 1 }}" stays a number
            filled = _JINJA.compile_expression(alone[1], undefined_to_none=False)(**variables)
            return str(filled) if isinstance(filled, jinja2.Undefined) else filled
        return _JINJA.from_string(value).render(variables) if "{{" in value or "{%" in value else value
    if isinstance(value, Mapping):
        return {_fill(k, variables): _fill(v, variables) for k, v in value.items()}
    if isinstance(value, list):
        return [_fill(v, variables) for v in value]
    return value


def _of_file(path: _Key) -> _Key:
    """A problem's place without what is no key of the file: a union's members, `[key]`."""
    return tuple(part for part in path if part != "[key]" and not _is_union_member(part))


def _is_union_member(part: Any) -> bool:
    return isinstance(part, str) and (
        part in {"bool", "int", "float", "str"} or part.startswith(("list[", "dict[", "nullable["))
    )


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


@functools.cache
def _checked(kind: type) -> Any:
    """A workload's Parameters, checked when they are made."""
    return checked_dataclass(kind, config=ConfigDict(strict=True), frozen=True)


def _keys_at(kind: Any, path: _Key) -> list[str]:
    """Keys that a part of `kind` has; none where it is not ours to say."""
    for _ in path:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return []  # a model inside a model: there is none
        kind = next(iter(get_args(kind)[-1:]), None) if get_origin(kind) in (dict, list) else None
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


def _hint_of_key(key: str, known: Sequence[str]) -> str:
    return hint(key, known, most=len(known))


def _in_words(problem: Any, known: Sequence[str], lists: bool = False) -> str:
    """pydantic's problem as a person would say it. `known`: keys that stand beside the one it is about; `lists`: of
    several types that may stand there, one is a list."""
    what, given = problem["type"], problem.get("input")
    if problem["loc"] and problem["loc"][-1] == "[key]":
        return f"a name is text: write '{given}'"[:200]
    if what in {"extra_forbidden", "unexpected_keyword_argument"}:
        return f"unknown key; {_hint_of_key(str(problem['loc'][-1]), known)}" if known else "unknown key"
    if what in {"missing", "missing_argument"}:
        return "missing"
    if what == "value_error":
        return str(problem["ctx"]["error"])
    if what in {"string_too_short", "too_short"}:
        return "it is empty"
    bounds = {"greater_than": "more than", "greater_than_equal": "at least", "less_than_equal": "at most"}
    if what in bounds:
        (bound,) = problem["ctx"].values()
        return f"{bounds[what]} {bound} is expected, not {given!r}"[:200]
    if what == "string_pattern_mismatch" and (words := _PATTERNS.get(problem["ctx"]["pattern"])):
        return f"{words} is expected, not {given!r}"[:200]
    expected = {
        "string_type": "text",
        "int_type": "a whole number",
        "int_parsing": "a whole number",
        "int_from_float": "a whole number",
        "float_parsing": "a number",
        "finite_number": "a number",
        "bool_parsing": "true or false",
        "float_type": "a number",
        "bool_type": "true or false",
        "list_type": "a list",
        "dict_type": "a mapping",
        "tuple_type": "a list",
        "model_type": "a mapping",
    }.get(what)
    if expected and any(map(_is_union_member, problem["loc"])):
        expected = "text, a number, true or false" + (", or a list of these" if lists else "")
    if expected:
        shown = str(given).lower() if isinstance(given, bool) else f"{_kind(given)} {given!r}"
        return f"{expected} is expected, not {shown}"[:200] + _meant(expected, given)
    return f"{problem['msg'][0].lower()}{problem['msg'][1:]}, not {given!r}"[:200]


def _meant(expected: str, given: Any) -> str:
    """The end of a message: what would be right, where that is plain."""
    if expected == "a list" and (type(given) in (int, float) or re.fullmatch(NAME, str(given))):
        return f"; write [{given}]"
    if expected == "text" and type(given) in (int, float):
        return f"; write '{given}'"
    if expected in {"a number", "a whole number"} and isinstance(given, str | float):
        try:
            number = float(given)  # 1e9 and "256" are texts to YAML
        except ValueError:
            return ""
        if number.is_integer() and abs(number) < 1e16:
            return f"; write {int(number)}"
    return ""
