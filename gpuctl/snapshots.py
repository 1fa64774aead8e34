"""Snapshot documents as people and programs write them (docs/snapshot.md) -> Snapshot. Pure.

Reading is tolerant in spelling and strict in meaning: many keys are understood, an unknown one is refused with file,
line and the known one nearest to it, for evidence that is dropped silently leads to a wrong diagnosis.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from gpuctl import bugreport, pasted
from gpuctl.box import SCHEMA, Snapshot
from gpuctl.facts import cuda, nodes
from gpuctl.facts.errnos import errno_name
from gpuctl.spelling import nearest


class NotASnapshot(ValueError):
    """The document cannot be read. One line: file, line, key, what to do."""


Path = tuple[str, ...]


@dataclass
class _Source:
    """The document's name and where its parts stand, for messages."""

    name: str
    lines: dict[Path, int] = field(default_factory=dict)

    def wrong(self, path: Path, message: str) -> NotASnapshot:
        known = path
        while known and known not in self.lines:
            known = known[:-1]
        line = f" line {self.lines[known]}" if known in self.lines else ""
        key = f": {'.'.join(path)}" if path else ""
        return NotASnapshot(f"{self.name}{line}{key}: {message}")


def read(text: str, name: str) -> list[Snapshot]:
    """The snapshots in a document: one, or guest and node. `name` is the file's, for messages. Raises NotASnapshot."""
    if "\0" in text:
        raise NotASnapshot(f"{name}: binary; a snapshot is text (YAML, JSON, a pasted terminal, nvidia-bug-report.log)")
    if bugreport.is_one(text):
        return [Snapshot(bugreport.parse(text), source=name)]
    source = _Source(name)
    document = _load(text, source)
    if isinstance(document, str):
        found = pasted.parse(document)
        if found is None:
            raise NotASnapshot(f"{name}: nothing to read; see docs/snapshot.md for what it may hold")
        document = found
    if not document:
        raise NotASnapshot(f"{name}: empty; see docs/snapshot.md for what it may hold")
    schema = document.get("schema")
    if schema is not None and schema != SCHEMA:
        raise source.wrong(("schema",), f"{schema!r} is not {SCHEMA}, which this version of gpuctl reads")
    if "probe" in document:
        return [Snapshot(_saved(document, source), source=name)]
    return _machines(document, source)


# -- text to values --


def _load(text: str, source: _Source) -> Any:
    """A mapping, or the text itself where it is neither YAML nor JSON but something pasted."""
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except ValueError as error:
            if '"schema"' in text[:300] or not isinstance(error, json.JSONDecodeError):
                raise NotASnapshot(f"{source.name}: not JSON: {error}") from None
        else:
            source.lines.update(_json_lines(text))
            return value
    if pasted.has_prompts(text):
        return text
    try:
        loader = yaml.BaseLoader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        if not _typed(text, source.name) or _complaints(text, source.name):
            return text
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark is not None else ""
        why = " ".join(str(error.problem or error.context).split())
        raise NotASnapshot(
            f"{source.name}{line}: not YAML: {why}; text of several lines goes indented below its key and a | "
            "(|2 where the first of them begins with blanks)"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise NotASnapshot(f"{source.name}: not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(node, yaml.MappingNode) or not _typed(text, source.name):
        return text
    return _build(node, (), source, set())


def _typed(text: str, name: str) -> bool:
    """Is it meant as YAML? By its name, or because a line begins with a key this knows; logs have colons too."""
    if re.search(r"\.(ya?ml|json)$", name):
        return True
    keys = re.findall(r"(?m)^(?!\s)[\"']?([^:\n]{1,80}?)[\"']?:(?=\s|$)", text)
    return any(_is_known(key) for key in keys)


def _complaints(text: str, name: str) -> bool:
    """Is each line a program's own words (`ls: cannot access ...`)? That looks like a command and its output."""
    lines = [line for line in text.splitlines() if line.strip()]
    return not re.search(r"\.(ya?ml|json)$", name) and all(
        (found := re.match(r"([\w./-]+): \S", line)) is not None and pasted.command_of(found.group(1)) is not None
        for line in lines
    )


def _is_known(key: str) -> bool:
    name = _normal(key)
    flat = re.sub(r"\(\w*\)", "", name)
    return (
        name in _SECTION
        or name in _RAW
        or name in _NOTES
        or flat in _CUDA_KEYS
        or flat in _NVML_KEYS
        or key.startswith(("/proc/", "/dev/", "/etc/", "/sys/", "/var/", "/run/"))
        or re.fullmatch(r"\d+\.conf", key) is not None
        or pasted.command_of(key) is not None
    )


def _build(node: yaml.Node, path: Path, source: _Source, open_nodes: set[int]) -> Any:
    """Values of a YAML node, every scalar as text: 195:0 is no base-60 number here, `no` no truth value."""
    if id(node) in open_nodes or len(path) > 20:
        raise source.wrong(path, "an anchor that contains itself")
    if len(source.lines) > 200_000:
        raise source.wrong(path, "too many parts")
    if isinstance(node, yaml.ScalarNode):
        return None if node.style is None and node.value in ("null", "~") else str(node.value)
    inner = open_nodes | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        return [_build(each, (*path, str(i)), source, inner) for i, each in enumerate(node.value)]
    found: dict[str, Any] = {}
    assert isinstance(node, yaml.MappingNode)
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise source.wrong(path, f"line {key.start_mark.line + 1}: a key must be text")
        name = str(key.value)
        here = (*path, name)
        if name in found:
            first = source.lines[here]
            raise NotASnapshot(
                f"{source.name} line {key.start_mark.line + 1}: {name}: a second time (first on line {first})"
            )
        source.lines[here] = key.start_mark.line + 1
        found[name] = _build(value, here, source, inner)
    return found


def _json_lines(text: str) -> dict[Path, int]:
    """Lines of the top-level keys, for messages; JSON typed by hand is small."""
    if len(text) > 200_000:
        return {}
    try:
        node = yaml.BaseLoader(text).get_single_node()
    except yaml.YAMLError:
        return {}
    found: dict[Path, int] = {}

    def walk(each: yaml.Node, path: Path) -> None:
        if isinstance(each, yaml.MappingNode) and len(path) < 4:
            for key, value in each.value:
                here = (*path, str(key.value))
                found[here] = key.start_mark.line + 1
                walk(value, here)

    if node is not None:
        walk(node, ())
    return found


# -- values to sections --

# What people call a section -> its name here. Keys are compared in lower case, with _ for blanks and dashes.
_ALIASES = {
    "machine": ("machine", "name", "hostname"),
    "role": ("role", "kind", "where", "place"),
    "vmid": ("vmid", "ctid", "ct_id", "container_id", "lxc_id"),
    "taken": ("taken", "date", "time", "when"),
    "files": ("files", "file"),
    "nodes": ("nodes", "device_nodes", "dev", "dev_nodes", "device_files"),
    "open": ("open", "opens", "open_errno", "open_errors", "opening"),
    "commands": ("commands", "command", "outputs", "cmds"),
    "cuda": ("cuda",),
    "nvml": ("nvml",),
    "env": ("env", "environment", "environ"),
    "errors": ("errors", "error", "error_lines", "error_message", "messages", "message", "log", "logs", "symptom",
               "symptoms", "stderr", "traceback", "output", "report", "app_log", "service_log"),
    "kernel_log": ("kernel_log", "dmesg", "kernel_messages", "kernel_lines", "kmsg", "syslog", "journal"),
    "libraries": ("libraries", "libs"),
    "mapped": ("mapped", "maps", "loaded_libraries", "libcuda", "libcuda_loaded", "libcuda_path"),
    "service": ("service",),
    "units": ("units", "unit", "systemd"),
    "packages": ("packages",),
    "pci": ("pci",),
    "device_rules": ("device_rules", "rules", "effective_rules", "device_cgroup", "cgroup_rules", "rules_in_force",
                     "effective_device_rules"),
    "limits": ("limits", "rlimits", "ulimits"),
    "majors": ("majors", "devices", "proc_devices", "character_devices"),
    "driver": ("driver", "driver_version", "kernel_module", "module_version", "nvidia_version", "module",
               "kernel_driver"),
    "conf": ("conf", "config", "lxc_conf", "container_conf", "ct_conf", "lxc_config", "pct_conf"),
    "expected_gpus": ("expected_gpus", "gpus_expected", "gpus"),
    "unprivileged": ("unprivileged",),
    "privileged": ("privileged",),
    "uid_map": ("uid_map", "uidmap"),
    "kernel": ("kernel", "kernel_version", "uname"),
    "guest": ("guest", "container", "ct", "lxc", "guest_machine"),
    "node": ("node", "host", "pve", "hypervisor", "pve_node", "pve_host", "proxmox"),
    "user": ("user", "service_user"),
    "start_error": ("start_error", "start_errors", "pct_start_error", "ct_stderr"),
}  # fmt: skip
_SECTION = {alias: section for section, aliases in _ALIASES.items() for alias in aliases}
# For people, for tests and for other programs.
_NOTES = {"schema", "expect", "may", "never", "certainty", "severity", "title", "comment", "comments", "note", "notes",
          "source", "description", "id", "about", "url", "cause", "fix", "resolution"}  # fmt: skip
# Sections as the probe writes them, kept as they are.
_RAW = {"stat", "links", "guests", "bpf", "namespaces", "users", "groups", "unanswered", "probe", "models", "serving"}
# All the sections the probe writes.
_FORMAT = _RAW | {"schema", "machine", "role", "vmid", "taken", "files", "nodes", "open", "commands", "cuda", "nvml",
                  "service", "units", "libraries", "packages", "kernel_log", "pci"}  # fmt: skip
_CUDA_KEYS = {"cuinit": "cuInit", "cudevicegetcount": "cuDeviceGetCount", "cudrivergetversion": "cuDriverGetVersion",
              "cudadriverversion": "cuDriverGetVersion", "dlopen": "dlopen", "mapped": "mapped", "hang": "hang",
              "died": "died", "code": "cuInit", "error": "cuInit", "init": "cuInit", "devices": "cuDeviceGetCount",
              "count": "cuDeviceGetCount", "device_count": "cuDeviceGetCount", "gpus": "gpus", "guard": "guard",
              "ms": "ms", "cuinit_ms": "cuInit_ms", "stderr": "stderr", "name": "name", "driver_version":
              "cuDriverGetVersion", "cudageterror": "cuInit"}  # fmt: skip
_NVML_KEYS = {"nvmlinit": "nvmlInit", "nvmlinit_v2": "nvmlInit", "nvmlinitwithflags": "nvmlInit", "init": "nvmlInit",
              "code": "nvmlInit", "error": "nvmlInit", "nvmldevicegetcount": "count", "nvmldevicegetcount_v2": "count",
              "count": "count", "devices": "count", "device_count": "count", "gpus": "gpus", "dlopen": "dlopen",
              "driver_version": "driver_version", "nvml_version": "nvml_version", "library_version": "nvml_version",
              "cuda_version": "cuda_version", "pairs": "pairs", "hang": "hang", "died": "died", "guard": "guard",
              "ms": "ms", "mapped": "mapped", "stderr": "stderr"}  # fmt: skip
_CALLS = ("cuInit", "cuDeviceGetCount", "cuDriverGetVersion", "nvmlInit")
_WHO = ("root", "user", "reported")
# The program that was to read a file did not run.
_NOT_RUN = re.compile(r": command not found|^(?:ba|da|z)?sh: .*: not found$|error while loading shared librar")
_NODE_FILES = re.compile(r"^/(etc/pve/|var/lib/lxc/|run/pve/|sys/fs/cgroup/devices/lxc)")
_NODE_COMMANDS = re.compile(r"^(pct|pveversion|pvesh|qm|bpftool|lxc-cgroup|lxc-start|pve\w+)\b")


def _normal(key: str) -> str:
    return re.sub(r"[\s\-]+", "_", key.strip().lower()).rstrip(":")


def _machines(document: Mapping[str, Any], source: _Source) -> list[Snapshot]:
    """One snapshot, or two where the document has both machines or a Proxmox configuration beside a guest's answers."""
    if not isinstance(document, Mapping):
        raise source.wrong((), "a mapping of keys to values is expected")
    parts: dict[str, Mapping[str, Any]] = {}
    rest: dict[str, Any] = {}
    for key, value in document.items():
        section = _SECTION.get(_normal(str(key)))
        if section in ("guest", "node") and isinstance(value, Mapping):
            parts[section] = value
            for inner in list(source.lines):
                if inner[0] == key and len(inner) > 1:
                    source.lines.setdefault(inner[1:], source.lines[inner])
        else:
            rest[str(key)] = value
    if parts:
        found = []
        for role, part in parts.items():
            if "probe" in part:  # as `--save` writes guest and node
                found.append({"role": role, **_saved(part, source)})
                continue
            built = _Machine(source)
            built.take(part)
            built.document["role"] = built.document.get("role", role)
            found.append(built.document)
        shared = _Machine(source)
        shared.take(rest)
        for snapshot in found:
            _fill(snapshot, shared.document)
            if "inside" in shared.extra and snapshot["role"] == "guest":
                _fill(snapshot, shared.extra["inside"].document)
        return [Snapshot(part, source=source.name) for part in found]
    machine = _Machine(source)
    machine.take(rest)
    return [Snapshot(part, source=source.name) for part in machine.split()]


def _saved(document: Mapping[str, Any], source: _Source) -> dict[str, Any]:
    """What the probe wrote, as it is. Keys that somebody added to it are read as everywhere, and count more."""
    written = {key: value for key, value in document.items() if key in _FORMAT or not _is_known(key)}
    typed = _Machine(source)
    typed.take({key: value for key, value in document.items() if key not in written})
    if not typed.document:
        return written
    _fill(typed.document, written)
    return typed.document


def _fill(target: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Parts that stand outside `guest:` and `node:` hold for both."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            target[key] = {**value, **target[key]}
        elif isinstance(value, list) and isinstance(target.get(key), list):
            target[key] = target[key] + value
        else:
            target.setdefault(key, value)


class _Machine:
    """Builds the canonical document of one machine from the keys people wrote."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.document: dict[str, Any] = {}
        self.extra: dict[str, _Machine] = {}

    def take(self, document: Mapping[str, Any]) -> None:
        for key, value in document.items():
            self._key(str(key), value)

    def section(self, name: str) -> dict[str, Any]:
        found = self.document.setdefault(name, {})
        assert isinstance(found, dict)
        return found

    def split(self) -> list[dict[str, Any]]:
        """The node's part apart from the guest's, where one flat document has both."""
        document = self.document
        role = document.get("role")
        node_files = {p: t for p, t in document.get("files", {}).items() if _NODE_FILES.match(p)}
        node_commands = {c: a for c, a in document.get("commands", {}).items() if _NODE_COMMANDS.match(c)}
        if role in ("node", "machine") or not (node_files or document.get("guests") or "inside" in self.extra):
            if "inside" in self.extra:
                inside = self.extra["inside"].document
                return [{**inside, "role": "guest"}, {**document, "role": "node"}]
            return [document]
        if "inside" in self.extra:  # `pct exec N -- command` beside the node's own answers
            inside = {**self.extra["inside"].document, "role": "guest"}
            for key in ("vmid", "errors", "expected_gpus", "env", "device_rules", "service"):
                if key in document:
                    inside.setdefault(key, document[key])
            return [inside, {**document, "role": "node"}]
        node = {"role": "node", "files": node_files, "commands": node_commands}
        for key in ("guests", "device_rules", "stat"):
            if key in document:
                node[key] = document[key]
        for key in ("vmid", "node_name", "packages"):
            if key in document:
                node[key] = document[key]
        if "node_name" in document:
            node["machine"] = document["node_name"]
        guest = {key: value for key, value in document.items() if key not in ("guests", "device_rules")}
        guest["role"] = "guest"
        guest["files"] = {p: t for p, t in document.get("files", {}).items() if p not in node_files}
        guest["commands"] = {c: a for c, a in document.get("commands", {}).items() if c not in node_commands}
        return [guest, node]

    # -- one key --

    def _key(self, key: str, value: Any) -> None:
        name = _normal(key)
        here = (key,)
        section = _SECTION.get(name)
        flat = name.replace("()", "").replace("(0)", "")
        if name in _NOTES:
            return
        if section is not None:
            getattr(self, f"_take_{section}")(here, value)
        elif name in _RAW:
            self.document[name] = value
        elif flat in _CUDA_KEYS and flat.startswith("cu"):
            self._take_cuda(here, {key: value})
        elif flat in _NVML_KEYS and flat.startswith("nvml"):
            self._take_nvml(here, {key: value})
        elif re.match(r"/dev/nvidia", key):
            self._take_nodes(here, {key: value})
        elif key.startswith("/"):
            self._take_files(here, {key: value})
        elif re.fullmatch(r"(lxc/)?\d+\.conf", key):
            self._file(here, f"/etc/pve/lxc/{key.removeprefix('lxc/')}", value)
        elif re.fullmatch(r"[A-Z][A-Z0-9_]+", key) and not isinstance(value, Mapping):
            self._take_env(here, {key: value})
        elif pasted.command_of(key) is not None:
            self._command(here, key, value)
        elif re.match(r"torch\.|tf\.|tensorflow", key):
            self._take_errors(here, [f"{key}: {_text(value)}"])
        else:
            known = {word.lower(): word for word in (*sorted({*_SECTION, *_RAW}), *_CALLS)}
            near = nearest(name, known, alike=0.7)
            hint = f"did you mean {known[near]}?" if near else "see docs/snapshot.md; a free remark goes under note:"
            raise self.source.wrong(here, f"unknown key; {hint}")

    # -- sections --

    def _take_machine(self, here: Path, value: Any) -> None:
        self.document["machine"] = self._scalar(here, value)

    def _take_taken(self, here: Path, value: Any) -> None:
        self.document["taken"] = self._scalar(here, value)

    def _take_role(self, here: Path, value: Any) -> None:
        word = self._scalar(here, value).lower()
        role = {"guest": "guest", "container": "guest", "lxc": "guest", "ct": "guest", "node": "node", "pve": "node",
                "host": "node", "proxmox": "node", "machine": "machine", "bare": "machine", "bare metal": "machine",
                "bare-metal": "machine", "vm": "machine", "baremetal": "machine"}.get(word)  # fmt: skip
        if role is None:
            raise self.source.wrong(here, f"{word!r} is none of guest, node, machine")
        self.document["role"] = role

    def _take_vmid(self, here: Path, value: Any) -> None:
        word = self._scalar(here, value)
        if not word.isdigit():
            raise self.source.wrong(here, f"{word!r} is no container id (a number such as 200)")
        self.document["vmid"] = int(word)

    def _take_guest(self, here: Path, value: Any) -> None:
        word = self._scalar(here, value)
        self.document.setdefault("role", "guest")
        if word.isdigit():
            self.document["vmid"] = int(word)
        elif word not in ("lxc", "yes", "true"):
            self.document["machine"] = word

    def _take_node(self, here: Path, value: Any) -> None:
        self.document["node_name"] = self._scalar(here, value)

    def _take_user(self, here: Path, value: Any) -> None:
        self.section("service")["user"] = self._scalar(here, value)

    def _take_expected_gpus(self, here: Path, value: Any) -> None:
        word = self._scalar(here, value)
        if not word.isdigit():
            raise self.source.wrong(here, f"{word!r} is no number of GPUs")
        self.document["expected_gpus"] = int(word)

    def _take_unprivileged(self, here: Path, value: Any) -> None:
        self.document["unprivileged"] = "1" if _truth(self._scalar(here, value)) else "0"
        self.document.setdefault("role", "guest")

    def _take_privileged(self, here: Path, value: Any) -> None:
        self.document["unprivileged"] = "0" if _truth(self._scalar(here, value)) else "1"
        self.document.setdefault("role", "guest")

    def _take_files(self, here: Path, value: Any) -> None:
        for path, text in self._mapping(here, value).items():
            if re.match(r"/dev/nvidia", path):
                self._take_nodes(here, {path: text})
                continue
            if re.fullmatch(r"\d+\.conf", path):
                path = f"/etc/pve/lxc/{path}"
            self._file((*here, path), path, text)

    def _file(self, here: Path, path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            if "error" not in value:
                raise self.source.wrong(here, "a file is its text, or {error: ENOENT}")
            error = str(value["error"])
            self.section("files")[path] = {"error": errno_name(error) or error}
            return
        text = _text(value)
        lines = text.strip().splitlines()
        if len(lines) == 1 and _NOT_RUN.search(lines[0]):
            return
        error_name = errno_name(lines[0]) if len(lines) == 1 and len(text) < 200 else None
        if error_name and error_name != "OK" and not re.fullmatch(r"\s*\d+\s*", text):
            self.section("files")[path] = {"error": error_name}
        else:
            self.section("files")[path] = text

    def _take_majors(self, here: Path, value: Any) -> None:
        if isinstance(value, Mapping):
            rows = []
            for name, number in value.items():
                left, right = str(name).strip(), str(number).strip()
                if left.isdigit():
                    left, right = right, left
                if not right.isdigit():
                    raise self.source.wrong((*here, str(name)), f"{right!r} is no major number")
                rows.append(f"{right} {left}")
            value = "\n".join(rows)
        self._file(here, "/proc/devices", value)

    def _take_driver(self, here: Path, value: Any) -> None:
        text = self._scalar(here, value)
        if errno_name(text) == "ENOENT" or text.lower() in ("none", "not loaded", "no"):
            self.section("files")["/proc/driver/nvidia/version"] = {"error": "ENOENT"}
            return
        found = re.search(r"\d{3}\.\d+(\.\d+)?", text)
        if not found:
            raise self.source.wrong(here, f"{text!r} has no driver version in it (such as 580.95.05)")
        if "Kernel Module" in text:
            self.section("files")["/proc/driver/nvidia/version"] = text
        else:
            self.section("files")["/sys/module/nvidia/version"] = found.group(0)

    def _take_conf(self, here: Path, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, text in value.items():
                number = re.search(r"(\d+)", str(key))
                vmid = number.group(1) if number else "0"
                self._file((*here, str(key)), f"/etc/pve/lxc/{vmid}.conf", text)
            return
        self._file(here, f"/etc/pve/lxc/{self.document.get('vmid', 0)}.conf", value)

    def _take_uid_map(self, here: Path, value: Any) -> None:
        self._file(here, "/proc/self/uid_map", value)

    def _take_kernel(self, here: Path, value: Any) -> None:
        text = _text(value)
        if len(text.strip().splitlines()) > 1:
            self._take_kernel_log(here, value)
        else:
            self.section("files")["/proc/sys/kernel/osrelease"] = text

    def _take_nodes(self, here: Path, value: Any) -> None:
        if not isinstance(value, Mapping):
            text = _text(value)
            if not any(path.startswith("/dev/nv") for path in nodes.parse_ls(text)):
                raise self.source.wrong(
                    here, "no line of `ls -l` in it, and no mapping of node to `crw-rw-rw- ... 195:0`"
                )
            self.section("commands")["ls -l /dev/nvidia*"] = text
            return
        for key, each in value.items():
            path = key if str(key).startswith("/") else f"/dev/{key}"
            if nodes.parse_node(path, each) is None:
                raise self.source.wrong(
                    (*here, str(key)),
                    f"not understood: {_text(each)!r}; write `crw-rw-rw- root root 195:0`, `missing` or `regular file`",
                )
            self.section("nodes")[path] = each

    def _take_open(self, here: Path, value: Any) -> None:
        if not isinstance(value, Mapping):
            found = nodes.parse_opens_in(iter(_text(value).splitlines()))
            if not found:
                raise self.source.wrong(here, "a mapping of node to OK, EPERM ... is expected")
            for path, answers in found.items():
                self.section("open").setdefault(path, {}).update(answers)
            return
        for key, answers in value.items():
            path = str(key) if str(key).startswith("/") else f"/dev/{key}"
            where = (*here, str(key))
            if not isinstance(answers, Mapping):
                answers = {"root": answers}
            for who, word in answers.items():
                name = errno_name(word)
                if name is None and str(word) != "not a device":
                    raise self.source.wrong(
                        where, f"{_text(word)!r} is no answer of open: OK, EPERM, EACCES, ENOENT, ENXIO ..."
                    )
                who = "root" if str(who).lower() in ("root", "as root", "0") else "user"
                self.section("open").setdefault(path, {})[who] = name or str(word)

    def _take_commands(self, here: Path, value: Any) -> None:
        for command, answer in self._mapping(here, value).items():
            self._command((*here, command), command, answer)

    def _command(self, here: Path, line: str, answer: Any) -> None:
        """One command: kept under its line without prompt and sudo, and what it shows also under its section."""
        command = pasted.command_of(line) or " ".join(line.split())
        if not command:
            raise self.source.wrong(here, "a command line is expected as the key")
        inside = pasted.INSIDE.match(command)
        if inside:
            machine = self.extra.setdefault("inside", _Machine(self.source))
            machine.document["vmid"] = int(inside.group(1))
            self.document.setdefault("vmid", int(inside.group(1)))
            machine._command(here, inside.group(2), answer)
            return
        if isinstance(answer, Mapping):
            if not set(answer) & {"stdout", "stderr", "rc", "error", "text", "output"}:
                raise self.source.wrong(here, "a command's answer is its output, or {rc, stdout, stderr}")
            text = _text(answer.get("stdout", answer.get("output", answer.get("text", ""))))
            stderr, rc = _text(answer.get("stderr", "")), answer.get("rc")
            if rc is not None and not re.fullmatch(r"-?\d+", str(rc)):
                raise self.source.wrong((*here, "rc"), f"{rc!r} is no return code")
            if "error" in answer:
                stored: Any = {"error": errno_name(answer["error"]) or str(answer["error"])}
            else:
                stored = {"rc": None if rc is None else int(rc), "stdout": text, "stderr": stderr}
        else:
            text, stderr = _text(answer), ""
            if re.fullmatch(r"(?:ba|da)?sh: .*: (?:command )?not found\s*", text):
                stored = {"error": "ENOENT"}
            else:
                stored = text
        self.section("commands")[command] = stored
        for section, content in pasted.sections_of(command, text, stderr).items():
            if section == "files":
                for path, body in content.items():
                    self._file(here, path, body)
            elif section == "env":
                self.section("env").update(content)
            elif section == "errors":
                self.document.setdefault("errors", []).extend(content)

    def _take_cuda(self, here: Path, value: Any) -> None:
        if not isinstance(value, Mapping):
            value = {"cuInit": value}
        if any(str(key) in _WHO for key in value):
            for who, answers in value.items():
                if str(who) not in _WHO:
                    raise self.source.wrong((*here, str(who)), "beside root: and user: only these two are expected")
                self._cuda((*here, str(who)), str(who), self._mapping((*here, str(who)), answers))
            return
        self._cuda(here, "root", value)

    def _cuda(self, here: Path, who: str, answers: Mapping[str, Any]) -> None:
        target = self.section("cuda").setdefault(who, {})
        for key, value in answers.items():
            name = _CUDA_KEYS.get(re.sub(r"\(\w*\)", "", _normal(str(key))))
            where = here if here[-1] == key else (*here, str(key))
            if name is None:
                raise self.source.wrong(
                    where, "unknown; known are cuInit, cuDeviceGetCount, cuDriverGetVersion, dlopen, mapped"
                )
            if name == "cuInit" and not isinstance(value, Mapping):
                text = _text(value).strip()
                if errno_name(text) == "hang":
                    target["hang"] = {"doing": "cuInit"}
                    continue
                code = cuda.parse_code(text)
                if code is None and text.lower() in ("ok", "success", "works"):
                    code = 0
                if code is None:
                    raise self.source.wrong(where, f"{text!r} is no CUDA error: a number such as 999, or its name")
                value = code
            elif name in ("cuDeviceGetCount", "cuDriverGetVersion") and not isinstance(value, (Mapping, int)):
                text = _text(value).strip()
                dotted = re.fullmatch(r"(\d+)\.(\d+)", text)
                if dotted and name == "cuDriverGetVersion":
                    text = str(int(dotted.group(1)) * 1000 + int(dotted.group(2)) * 10)
                if not re.fullmatch(r"-?\d+", text):
                    raise self.source.wrong(where, f"{text!r} is no number")
                value = int(text)
                if value < 0:
                    continue
            elif name == "mapped":
                value = [value] if isinstance(value, str) else value
            target[name] = _numbers(value) if name in ("gpus", "cuInit_ms", "hang", "died") else value

    def _take_mapped(self, here: Path, value: Any) -> None:
        paths = [line.strip() for line in _text(value).splitlines() if line.strip()]
        for path in paths:
            version = re.fullmatch(r"v?(\d{3}\.\d+(?:\.\d+)?)", path)
            if version:
                self.section("libraries")[f"libcuda.so.{version.group(1)}"] = f"libcuda.so.{version.group(1)}"
            else:
                found = re.search(r"(/\S*lib\S+\.so\S*)", path)
                if not found:
                    raise self.source.wrong(here, f"{path!r} is no path of a library, and no version")
                self.section("cuda").setdefault("root", {}).setdefault("mapped", []).append(found.group(1))

    def _take_nvml(self, here: Path, value: Any) -> None:
        if not isinstance(value, Mapping):
            value = {"nvmlInit": value}
        if any(str(key) in _WHO for key in value):
            for who, answers in value.items():
                self._nvml((*here, str(who)), str(who), self._mapping((*here, str(who)), answers))
            return
        self._nvml(here, "root", value)

    def _nvml(self, here: Path, who: str, answers: Mapping[str, Any]) -> None:
        target = self.section("nvml").setdefault(who, {})
        for key, value in answers.items():
            name = _NVML_KEYS.get(re.sub(r"\(\w*\)", "", _normal(str(key))))
            where = here if here[-1] == key else (*here, str(key))
            if name is None:
                raise self.source.wrong(where, "unknown; known are nvmlInit, count, driver_version, nvml_version, gpus")
            if name in ("nvmlInit", "count") and not isinstance(value, (Mapping, int)):
                text = _text(value).strip()
                if name == "nvmlInit" and text.lower() in ("ok", "success", "works"):
                    text = "0"
                found = re.match(r"-?\d+", text)
                if not found:
                    raise self.source.wrong(where, f"{text!r} is no number")
                value = int(found.group(0))
            target[name] = _numbers(value) if name in ("gpus", "pairs", "hang", "died") else value

    def _take_env(self, here: Path, value: Any) -> None:
        from gpuctl.facts.env import parse_env

        if isinstance(value, Mapping):
            self.section("env").update({str(k): _text(v) for k, v in value.items()})
            return
        found = parse_env(_text(value))
        if not found and _text(value).strip():
            raise self.source.wrong(here, "NAME=value lines or a mapping are expected")
        self.section("env").update(found)

    def _take_errors(self, here: Path, value: Any) -> None:
        if isinstance(value, Mapping):
            value = [f"{key}: {_text(each)}" for key, each in value.items()]
        lines = [line for each in (value if isinstance(value, list) else [value]) for line in _text(each).splitlines()]
        self.document.setdefault("errors", []).extend(line for line in lines if line.strip())

    def _take_start_error(self, here: Path, value: Any) -> None:
        self._take_errors(here, value)

    def _take_kernel_log(self, here: Path, value: Any) -> None:
        if isinstance(value, Mapping):
            self.document["kernel_log"] = value
            return
        log = self.section("kernel_log")
        log.setdefault("lines", []).extend(line for line in _text(value).splitlines() if line.strip())

    def _take_libraries(self, here: Path, value: Any) -> None:
        if isinstance(value, Mapping):
            self.section("libraries").update(value)
        else:
            for line in _text(value).splitlines():
                found = re.search(r"(\S*lib\S+\.so\S*)(?: -> (\S+))?", line)
                if found:
                    self.section("libraries")[found.group(1)] = found.group(2) or found.group(1)

    def _take_service(self, here: Path, value: Any) -> None:
        if isinstance(value, Mapping):
            self.section("service").update(value)
        else:
            self.section("service")["unit"] = self._scalar(here, value)

    def _take_units(self, here: Path, value: Any) -> None:
        if not isinstance(value, Mapping):
            self.section("commands")["systemctl status -"] = _text(value)
            return
        for name, answer in value.items():
            unit = str(name) if "." in str(name) else f"{name}.service"
            if isinstance(answer, Mapping):
                self.section("units")[unit] = {str(k): _text(v) for k, v in answer.items()}
            else:
                word = _text(answer).strip()
                missing = re.search(r"not.found|could not be found|not installed|missing", word)
                self.section("units")[unit] = (
                    {"LoadState": "not-found", "ActiveState": "inactive"} if missing
                    else {"LoadState": "loaded", "ActiveState": word.split()[0] if word else "unknown"}
                )  # fmt: skip

    def _take_packages(self, here: Path, value: Any) -> None:
        if isinstance(value, Mapping) and "lines" in value:
            self.document["packages"] = value
        elif isinstance(value, Mapping):
            lines = [f"ii  {name} {_text(version)}" for name, version in value.items()]
            self.section("packages").setdefault("lines", []).extend(lines)
        else:
            lines = [re.sub(r"\s+", " ", line).strip() for line in _text(value).splitlines() if line.strip()]
            self.section("packages").setdefault("lines", []).extend(
                line if line.startswith("ii") else f"ii {line}" for line in lines
            )

    def _take_pci(self, here: Path, value: Any) -> None:
        if isinstance(value, Mapping):
            self.document["pci"] = value if "devices" in value else {"devices": value}
        else:
            self.section("commands")["lspci -nnk"] = _text(value)

    def _take_device_rules(self, here: Path, value: Any) -> None:
        from gpuctl.box import Unknown
        from gpuctl.facts.proxmox import parse_rule_list

        lines = [line for each in (value if isinstance(value, list) else [value]) for line in _text(each).splitlines()]
        try:
            parse_rule_list(lines)
        except Unknown as problem:
            raise self.source.wrong(here, str(problem)) from None
        self.document["device_rules"] = [line for line in lines if line.strip()]

    def _take_limits(self, here: Path, value: Any) -> None:
        if isinstance(value, Mapping):
            self.section("limits").update({_normal(str(k)).removeprefix("rlimit_"): _text(v) for k, v in value.items()})
        else:
            self._file(here, "/proc/self/limits", value)

    # -- shapes --

    def _mapping(self, here: Path, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self.source.wrong(here, f"a mapping is expected, not {_kind(value)}")
        return {str(key): each for key, each in value.items()}

    def _scalar(self, here: Path, value: Any) -> str:
        if isinstance(value, (Mapping, list)):
            raise self.source.wrong(here, f"one value is expected, not {_kind(value)}")
        return _text(value).strip()


def _kind(value: Any) -> str:
    return "a mapping" if isinstance(value, Mapping) else "a list" if isinstance(value, list) else "text"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return "\n".join(_text(each) for each in value)
    if isinstance(value, Mapping):
        return json.dumps(value)
    return str(value)


def _numbers(value: Any) -> Any:
    """Numbers that were typed, as numbers."""
    if isinstance(value, Mapping):
        return {key: _numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,15}", value):
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"-?\d+\.\d+", value):
        return float(value)
    return value


def _truth(word: str) -> bool:
    return word.lower() in ("1", "yes", "true", "on")


def sections() -> Iterable[str]:
    """Every key that is understood, for the documentation's test."""
    return sorted(_SECTION)
