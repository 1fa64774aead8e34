"""The machines of an inventory: inventory/<name>/hosts.yml, which is an Ansible inventory and read as Ansible reads it.

The groups `nodes` and `guests` say what a machine is. Used are the variables that say how to get there (ansible_host,
ansible_port, ansible_user, ansible_ssh_private_key_file, ansible_ssh_common_args, ansible_become, ansible_connection:
ssh, local or pct) and our own (OURS). Templates in them may use the machine's other variables, inventory_hostname and
inventory_dir.

`read` is pure; `load` reads the folder, `transports` makes the ways to the machines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gpuctl.spelling import hint, nearest
from gpuctl.transport import Guest, Local, Ssh, Transport
from gpuctl.transport.hops import settings
from gpuctl.yamltext import Document, NotYaml, parse

FILES = ("hosts.yml", "hosts.yaml")
OURS = (
    "gpuctl_node",  # of a guest: the node it runs on
    "gpuctl_vmid",  # its number there
    "gpuctl_address",  # where other machines reach it, for servers over several
    "gpuctl_serves",  # a server or a list of them, for `gpuctl restore`
    "gpuctl_tmpfs",  # where models are staged, see staging.py
    "gpuctl_hub_cache",  # where downloads go first
    "gpuctl_hub_endpoint",  # HF_ENDPOINT there: a mirror of the hub
    "gpuctl_gpus",  # what `gpuctl plan` takes for granted without the machine
)


_CHECKED = "host keys are always checked; put the machine's key into known_hosts"
_TMPFS = ("size", "numa", "huge")
_HUGE = ("never", "always", "within_size", "advise")


class BadInventory(Exception):
    """The inventory cannot be used. `mistakes`: all of them, each one line with file, line and key."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        self.mistakes = tuple(" ".join(one.splitlines()) for one in mistakes)
        super().__init__("\n".join(self.mistakes))


@dataclass(frozen=True)
class Place:
    """Where a variable stands."""

    document: Document
    path: tuple[str | int, ...]

    def at(self, *deeper: str | int) -> str:
        """`file:line` of it, or of a part of it."""
        return self.document.at(*self.path, *deeper)


class _Said(NamedTuple):
    value: Any
    place: Place


def _said(variables: Mapping[Any, Any], document: Document, path: tuple[str | int, ...]) -> dict[str, _Said]:
    return {key: _Said(value, Place(document, (*path, str(key)))) for key, value in variables.items()}


@dataclass(frozen=True)
class Machine:
    name: str
    kind: str  # node | guest | machine
    connection: str = "ssh"  # ssh | local | pct
    host: str = ""
    port: int | None = None
    user: str | None = None
    key: str | None = None  # private key file
    options: tuple[str, ...] = ()  # arguments of ssh
    sudo: bool = False
    node: str | None = None  # of a guest: its node, where the inventory has it
    vmid: int | None = None
    vars: Mapping[str, Any] = field(default_factory=dict)  # as Ansible merges them, templates as written
    places: Mapping[str, Place] = field(default_factory=dict, repr=False, compare=False)  # of those

    @property
    def serves(self) -> tuple[str, ...]:
        """The servers that `gpuctl restore` brings: gpuctl_serves, one or a list."""
        said = self.vars.get("gpuctl_serves") or []
        return (said,) if isinstance(said, str) else tuple(said)


@dataclass(frozen=True)
class Inventory:
    source: Path  # what Ansible gets as its inventory
    machines: Mapping[str, Machine]
    groups: Mapping[str, tuple[str, ...]]

    def chosen(self, wanted: Sequence[str]) -> tuple[Machine, ...]:
        """The machines of names and groups; `all`, or nothing wanted: the guests, or all where there are none.

        Raises BadInventory for a name that is not there.
        """
        mistakes: list[str] = []
        names: list[str] = []
        for one in wanted:
            if one == "all":
                names += self.groups.get("guests") or list(self.machines)
            elif one in self.machines:
                names.append(one)
            elif one in self.groups:
                names += self.groups[one]
            else:
                known = [*self.machines, *self.groups]
                near = f"did you mean {found!r}?" if (found := nearest(one, known)) else hint("", self.machines)
                mistakes.append(f"{self.source}: no machine and no group {one}; {near}")
        if mistakes:
            raise BadInventory(mistakes)
        if not wanted:
            names = list(self.groups.get("guests") or self.machines)
        return tuple(self.machines[name] for name in dict.fromkeys(names))


def load(folder: Path) -> Inventory:
    """Reads hosts.yml, group_vars and host_vars of an inventory folder. Raises BadInventory."""
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise BadInventory([f"{folder}: no {FILES[0]} there; `gpuctl init` writes one"])
    mistakes: list[str] = []

    def document(path: Path) -> Document | None:
        try:
            return parse(path.read_text(encoding="utf-8"), str(path))
        except NotYaml as error:
            mistakes.append(str(error))
        except (OSError, UnicodeDecodeError) as error:
            mistakes.append(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}")
        return None

    hosts = document(file)
    more: dict[str, dict[str, list[Document]]] = {"group_vars": {}, "host_vars": {}}
    for kind, found in more.items():
        for name, path in _variable_files(folder / kind):
            if (one := document(path)) is not None:
                found.setdefault(name, []).append(one)
    if mistakes or hosts is None:
        raise BadInventory(mistakes)
    return read(hosts, more["group_vars"], more["host_vars"], file)


def _variable_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(group or host, file) as Ansible finds them: NAME, NAME.yml, NAME.yaml, NAME.json, or all files under NAME/."""
    if not folder.is_dir():
        return
    known = ("", ".yml", ".yaml", ".json")
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.name.startswith(".") or path.name.endswith("~"):
            continue
        if path.is_dir():
            inside = (one for one in sorted(path.rglob("*")) if one.is_file() and one.suffix in known)
            yield from ((path.name, one) for one in inside if not one.name.startswith("."))
        elif path.suffix in known:
            yield path.stem if path.suffix else path.name, path


def read(
    hosts: Document,
    group_vars: Mapping[str, Sequence[Document]],
    host_vars: Mapping[str, Sequence[Document]],
    source: Path,
) -> Inventory:
    """The inventory of these documents. Raises BadInventory with all mistakes."""
    tree = _Tree(hosts)
    mistakes = [f"{hosts.file}:{line}: {'.'.join(map(str, path))} is there twice" for path, line in hosts.twice]
    mistakes += tree.mistakes
    outside: dict[str, dict[str, dict[str, _Said]]] = {"group_vars": {}, "host_vars": {}}
    for kind, documents in (("group_vars", group_vars), ("host_vars", host_vars)):
        for name, several in documents.items():
            for one in several:
                if one.value is not None and not isinstance(one.value, dict):
                    mistakes.append(f"{one.file}: has to be a mapping of variables")
                else:
                    outside[kind].setdefault(name, {}).update(_said(one.value or {}, one, ()))
    machines = {}
    told: set[tuple[str, str]] = set()  # what a group says is one mistake, however many machines are in it
    for name in tree.hosts:
        variables = tree.variables(name, outside["group_vars"], outside["host_vars"])
        kind = next((k for k, group in (("node", "nodes"), ("guest", "guests")) if name in tree.members(group)), "")
        machine, wrong = _machine(name, kind, variables, source)
        machines[name] = machine
        for where, what in (*wrong, *_wrong_shapes(machine)):
            stands = machine.places.get(where[0]) or Place(hosts, tree.places[name])
            at, said = stands.at(*where[1:]), ": ".join((*where, what))
            if (at, said) not in told:
                told.add((at, said))
                mistakes.append(f"{at}: {name}: {said}")
    for name, key, what in _contradictions(machines, tree.members("nodes")):
        place = machines[name].places.get(key) or Place(hosts, tree.places[name])
        mistakes.append(f"{place.at()}: {name}: {key}{what}")
    if not machines and not mistakes:
        mistakes.append(f"{hosts.file}: no machine in it")
    if mistakes:
        raise BadInventory(mistakes)
    return Inventory(source, machines, {group: tuple(tree.members(group)) for group in tree.groups})


class _Tree:
    """Groups, their children and hosts, and variables in Ansible's order of precedence."""

    def __init__(self, document: Document) -> None:
        self.mistakes: list[str] = []
        self.groups: dict[str, dict[str, _Said]] = {"all": {}}  # name -> variables
        self.children: dict[str, list[str]] = {}
        self.direct: dict[str, list[str]] = {}
        self.hosts: dict[str, dict[str, _Said]] = {}
        self.places: dict[str, tuple[str | int, ...]] = {}
        self._document = document
        if not isinstance(document.value, dict):
            self.mistakes.append(f"{document.file}: has to be a mapping of groups, as in `nodes: {{hosts: {{...}}}}`")
            return
        for name, group in document.value.items():
            self._group(str(name), group, (str(name),))
        below = {child for children in self.children.values() for child in children}
        self.children.setdefault("all", []).extend(g for g in self.groups if g not in below and g != "all")
        self._refuse_circles()

    def _group(self, name: str, group: Any, path: tuple[str | int, ...]) -> None:
        self.groups.setdefault(name, {})
        if not isinstance(group, dict | None):
            self.mistakes.append(
                f"{self._document.at(*path)}: group {name} has to be a mapping of hosts, vars, children"
            )
            return
        for key, part in (group or {}).items():
            where = self._document.at(*path, str(key))
            if key not in ("hosts", "vars", "children"):
                self.mistakes.append(f"{where}: group {name} has hosts, vars and children, no {key}")
            elif not isinstance(part, dict | None) and not (key != "vars" and isinstance(part, str)):
                self.mistakes.append(f"{where}: {key} of group {name} has to be a mapping")
            elif key == "vars" and isinstance(part, dict | None):
                self.groups[name].update(_said(part or {}, self._document, (*path, "vars")))
            else:
                for one, inside in ({part: None} if isinstance(part, str) else part or {}).items():
                    self._member(name, str(key), str(one), inside, (*path, str(key), str(one)))

    def _member(self, group: str, key: str, name: str, inside: Any, path: tuple[str | int, ...]) -> None:
        if key == "children":
            self.children.setdefault(group, []).append(name)
            self._group(name, inside, path)
            return
        if not isinstance(inside, dict | None):
            self.mistakes.append(f"{self._document.at(*path)}: {name} has to be a mapping of variables")
            return
        for host in _range(name):
            if re.search(r"[\s\[\]:]", host):
                self.mistakes.append(
                    f"{self._document.at(*path)}: {name} is no name of a machine or range like ct[1:9]"
                )
                return
            self.hosts.setdefault(host, {}).update(_said(inside or {}, self._document, path))
            self.places.setdefault(host, path)
            if host not in self.direct.setdefault(group, []):
                self.direct[group].append(host)

    def _refuse_circles(self) -> None:
        def below(group: str, above: tuple[str, ...]) -> None:
            if group in above:
                self.mistakes.append(f"{self._document.at(above[0])}: group {group} is inside itself")
                self.children[group] = []
                return
            for child in list(self.children.get(group, [])):
                below(child, (*above, group))

        for group in list(self.groups):
            below(group, ())

    def members(self, group: str) -> list[str]:
        if group == "all":
            return list(self.hosts)
        found = list(self.direct.get(group, []))
        for child in self.children.get(group, []):
            found += self.members(child)
        return list(dict.fromkeys(found))

    def _depth(self, group: str) -> int:
        return max((self._depth(up) + 1 for up, below in self.children.items() if group in below), default=0)

    def variables(
        self, host: str, group_vars: Mapping[str, Mapping[str, _Said]], host_vars: Mapping[str, Mapping[str, _Said]]
    ) -> dict[str, _Said]:
        """Ansible's precedence: each source from `all` to the deepest group, the inventory file before group_vars."""
        mine = [group for group in self.groups if group != "all" and host in self.members(group)]
        mine.sort(key=lambda group: (self._depth(group), _priority(self.groups[group]), group))
        merged: dict[str, _Said] = {}
        for part in (
            self.groups["all"],
            *(self.groups[group] for group in mine),
            group_vars.get("all", {}),
            *(group_vars.get(group, {}) for group in mine),
            self.hosts[host],
            host_vars.get(host, {}),
        ):
            merged.update(part)
        merged.pop("ansible_group_priority", None)
        return merged


def _priority(variables: Mapping[str, _Said]) -> int:
    try:
        return int(variables["ansible_group_priority"].value) if "ansible_group_priority" in variables else 1
    except (TypeError, ValueError):
        return 1


def _range(name: str) -> list[str]:
    """`ct[08:10]` -> ct08, ct09, ct10, as in Ansible (numbers only)."""
    found = re.fullmatch(r"(.*?)\[(\d*):(\d+)(?::(\d+))?\](.*)", name)
    if not found:
        return [name]
    before, first, last, step, after = found.groups()
    first = first or "0"
    width = len(first) if first.startswith("0") and len(first) > 1 else 0
    if width and len(last) != width:
        return [name]  # Ansible refuses it; the brackets left in the name say so
    if int(last) - int(first) > 10_000:
        return [name]  # a slip of the finger
    numbers = range(int(first), int(last) + 1, int(step or 1) or 1)
    return [f"{before}{number:0{width}d}{rest}" for number in numbers for rest in _range(after)]


def _machine(
    name: str, kind: str, said: Mapping[str, _Said], source: Path
) -> tuple[Machine, list[tuple[tuple[str, ...], str]]]:
    """The machine, and what is wrong with it: each thing with its variable."""
    wrong: list[tuple[tuple[str, ...], str]] = []
    variables = {key: one.value for key, one in said.items()}
    values = {
        **variables,
        "inventory_hostname": name,
        "inventory_dir": str(source.parent),
        "inventory_file": str(source),
    }

    def value(*names: str) -> Any:
        """The last of the names that is set wins, as in Ansible's ssh plug-in."""
        found = next((one for one in reversed(names) if variables.get(one) is not None), None)
        if found is None:
            return None
        try:
            return _rendered(variables[found], values)
        except ValueError as error:
            wrong.append(((found,), str(error)))
            return None

    def number(found: Any, key: str, lowest: int, highest: int) -> int | None:
        if found is None:
            return None
        if isinstance(found, bool) or not re.fullmatch(r"\d{1,9}", str(found)) or not lowest <= int(found) <= highest:
            wrong.append(((key,), f"{found!r} is no number from {lowest} to {highest}"))
            return None
        return int(found)

    wrong += [
        ((secret,), "gpuctl logs in by key and uses `sudo -n`; take the password out of the inventory")
        for secret in ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password", "ansible_become_password")
        if secret in variables
    ]
    connection = str(value("ansible_connection") or "ssh")
    if connection in ("smart", "paramiko", "paramiko_ssh", "ansible.builtin.ssh", "ansible.builtin.paramiko_ssh"):
        connection = "ssh"
    connection = {"ansible.builtin.local": "local"}.get(connection, connection)
    if connection not in ("ssh", "local", "pct"):
        wrong.append((("ansible_connection",), f"{connection} is not known; there are ssh, local and pct"))
    if (method := value("ansible_become_method")) not in (None, "sudo", "ansible.builtin.sudo"):
        wrong.append((("ansible_become_method",), f"{method}; gpuctl knows sudo"))
    if (whom := value("ansible_become_user")) not in (None, "root"):
        wrong.append((("ansible_become_user",), f"{whom}; gpuctl becomes root"))
    options: list[str] = []
    for key in ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args"):
        try:
            options += shlex.split(str(value(key) or ""))
        except ValueError as error:
            wrong.append(((key,), str(error)))
    if re.search(r"(?i)stricthostkeychecking[=\s]*(no|off|false|accept-new|ask)", " ".join(options)):
        wrong.append((("StrictHostKeyChecking",), _CHECKED))
    for key in ("ansible_host_key_checking", "ansible_ssh_host_key_checking"):
        if str(value(key)).lower() in ("false", "no", "off", "0"):
            wrong.append(((key,), _CHECKED))
    wrong += [
        ((key,), f"no variable of gpuctl's; {hint(key, OURS, most=len(OURS))}")
        for key in variables
        if key.startswith("gpuctl_") and key not in OURS
    ]
    vmid = number(value("gpuctl_vmid"), "gpuctl_vmid", 100, 999999999)
    node = value("gpuctl_node")
    port = number(value("ansible_port", "ansible_ssh_port"), "ansible_port", 1, 65535)
    text = {
        field: None if found is None else str(found)
        for field, found in {
            "user": value("ansible_user", "ansible_ssh_user"),
            "key": value("ansible_private_key_file", "ansible_ssh_private_key_file"),
        }.items()
    }
    become = value("ansible_become")
    return Machine(
        name=name,
        kind=kind or ("guest" if vmid is not None else "machine"),
        connection=connection,
        host=str(value("ansible_host", "ansible_ssh_host") or name),
        port=port,
        user=text["user"],
        key=str(Path(text["key"]).expanduser()) if text["key"] else None,
        options=tuple(options),
        sudo=str(become).lower() in ("true", "yes", "on", "1", "y", "t"),
        node=None if node is None else str(node),
        vmid=vmid,
        vars=variables,
        places={key: one.place for key, one in said.items()},
    ), wrong


_GPUS = {"count": (1, 1024), "memory_mib": (256, 1 << 22)}  # lowest and highest


def _gpus(said: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with `gpuctl_gpus: {count, name, memory_mib}`, each thing with its key."""
    if said is None:
        return
    keys = ("count", "name", "memory_mib")
    if not isinstance(said, dict) or not set(keys) <= set(said):
        yield (), "count, name and memory_mib are expected, as nvidia-smi tells them"
        return
    for key, found in said.items():
        if key in _GPUS:
            lowest, highest = _GPUS[key]
            whole = not isinstance(found, bool) and re.fullmatch(r"[0-9]{1,9}", str(found))
            if not whole or not lowest <= int(found) <= highest:
                yield (key,), f"{str(found)[:40]!r} is no whole number from {lowest} to {highest}"
        elif key == "name":
            if not isinstance(found, str) or not found.strip():
                yield (key,), f"{str(found)[:40]!r} is no name of a GPU, as nvidia-smi tells it"
        else:
            yield (str(key),), f"unknown key; {hint(str(key), keys)}"


def _wrong_shapes(machine: Machine) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with our own variables that are more than a text or a number."""
    serves = machine.vars.get("gpuctl_serves") or []
    if not isinstance(serves, str) and not (isinstance(serves, list) and all(isinstance(one, str) for one in serves)):
        yield ("gpuctl_serves",), f"a server, or a list of servers, is expected, not {serves!r}"[:200]
    for key, what in wrong_tmpfs(machine.vars.get("gpuctl_tmpfs") or {}):
        yield ("gpuctl_tmpfs", *key), what
    for key, what in _gpus(machine.vars.get("gpuctl_gpus")):
        yield ("gpuctl_gpus", *key), what


def wrong_tmpfs(wanted: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with a gpuctl_tmpfs, each thing with its place in it: a mapping from folder to size, numa, huge."""
    if not isinstance(wanted, Mapping):
        yield (), "has to be a mapping, as in {/run/gpuctl/models: {size: 64G}}"
        return
    for folder, options in wanted.items():
        if not isinstance(options, Mapping | None):
            yield (str(folder),), "has to be a mapping of size, numa, huge"
            continue
        for key, value in (options or {}).items():
            where = (str(folder), str(key))
            if key not in _TMPFS:
                yield where, f"unknown key; {hint(str(key), _TMPFS)}"
            elif key == "size" and bytes_of(value) is None:
                yield where, f"{value!r} is no size, as 64G"
            elif key == "numa" and not re.fullmatch(r"none|interleave(:[\d,-]+)?|bind:[\d,-]+", str(value)):
                yield where, f"{value!r}; there are interleave, bind:N, none"
            elif key == "huge" and value is not None and value not in _HUGE:
                yield where, f"{value!r}; there are {', '.join(_HUGE)}"


def bytes_of(size: Any) -> int | None:
    """A size as people write it, 64G or 512 MiB; None for what is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(size).strip(), re.I)
    if not found or not float(found[1]):
        return None
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def _contradictions(machines: Mapping[str, Machine], nodes: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(machine, variable, how the message goes on)"""
    seen: dict[tuple[str, int], str] = {}
    for machine in machines.values():
        if machine.node is not None and machine.node not in machines:
            near = f"; did you mean {found!r}?" if (found := nearest(machine.node, nodes)) else ""
            yield machine.name, "gpuctl_node", f": no machine {machine.node} in this inventory{near}"
        elif machine.node is not None and machine.node not in nodes:
            yield machine.name, "gpuctl_node", f": {machine.node} is not in the group nodes"
        given = [machine.vars.get(key) is not None for key in ("gpuctl_node", "gpuctl_vmid")]  # rightly or wrongly
        if any(given) and not all(given) and machine.kind == "guest":
            yield machine.name, "gpuctl_node", " and gpuctl_vmid belong together"
        if machine.connection == "pct" and not all(given):
            yield machine.name, "ansible_connection", ": pct needs gpuctl_node and gpuctl_vmid"
        if machine.node is not None and machine.vmid is not None:
            other = seen.setdefault((machine.node, machine.vmid), machine.name)
            if other != machine.name:
                yield machine.name, "gpuctl_vmid", f": {machine.vmid} on {machine.node} is {other} already"


def _rendered(value: Any, values: Mapping[str, Any]) -> Any:
    """A template with the machine's own variables. Raises ValueError; what needs Ansible's filters is one."""
    if not (isinstance(value, str) and "{" in value and re.search(r"\{[{%#]", value)):
        return value
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)  # noqa: S701 - no HTML
    try:
        for _ in range(5):
            value = environment.from_string(value).render(values)
            if not re.search(r"\{[{%#]", value):
                return value
    except jinja2.TemplateError as error:
        raise ValueError(f"{error.message or error}".splitlines()[0]) from None
    raise ValueError("the template refers to itself")


def transports(inventory: Inventory, *, connect_timeout: float = 10.0) -> dict[str, Transport]:
    """A way to each machine, by name. Nothing is connected yet; guests without SSH share the way to their node."""
    ways: dict[str, Transport] = {}
    for machine in sorted(inventory.machines.values(), key=lambda machine: machine.connection == "pct"):
        if machine.connection == "local":
            ways[machine.name] = Local(machine.name)
        elif machine.connection == "pct":
            ways[machine.name] = through_node(machine, ways)
        else:
            ways[machine.name] = Ssh(
                machine.name,
                machine.host,
                port=machine.port,
                user=machine.user,
                key=machine.key,
                options=machine.options,
                sudo=machine.sudo,
                connect_timeout=connect_timeout,
            )
    return ways


def address(machine: Machine) -> str:
    """Where other machines reach it: gpuctl_address, or what ssh makes of its name. Raises BadInventory."""
    if given := machine.vars.get("gpuctl_address"):
        return str(given)
    found = ""
    if machine.connection == "ssh":
        found = (settings([*machine.options, "--", machine.host]).get("hostname") or [""])[0]
    if not found or found == "localhost" or found.startswith(("127.", "::1")):
        raise BadInventory([f"{machine.name}: give gpuctl_address, at which the other machines of a server reach it"])
    return found


def through_node(guest: Machine, ways: Mapping[str, Transport]) -> Transport:
    """The way to a guest by its node's `pct exec`, also where the guest has sshd. It needs node and vmid."""
    assert guest.node is not None
    assert guest.vmid is not None
    return Guest(guest.name, ways[guest.node], guest.vmid)
