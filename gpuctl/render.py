"""Whole files of systemd, as text: one unit a server, and what brings a machine back by itself after a boot. Pure.

Quoting is one function for each place a word can stand in: `exec_word` for ExecStart, `env_assignment` for
Environment, `shell_word` for sh, `unit_path` for paths in other settings. What none of them can carry is refused, with
the reason. systemd.syntax(7), systemd.service(5) and systemd.exec(5) are the sources; what they leave open was tried
on systemd 252.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OURS = "# gpuctl\n"  # first line of every file of ours; a file without it is somebody else's
LIB = "/usr/local/lib/gpuctl"  # programs of ours on a machine
ETC = "/etc/gpuctl"  # and what they read
UNITS = "/etc/systemd/system"
PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")

# systemd refuses these in values, also escaped; newline and tab it takes.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


class CannotRender(ValueError):
    """The value cannot stand in a unit. The message is one line: which, and why."""


def _checked(text: str, what: str) -> str:
    if found := _CONTROL.search(text):
        at = text[max(0, found.start() - 20) : found.start()]
        raise CannotRender(f"{what}: the character U+{ord(found[0]):04X} after {at!r} cannot stand in a unit")
    return text


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return '"' + escaped.replace("\n", "\\n").replace("\t", "\\t") + '"'


def exec_word(text: str) -> str:
    """One argument in an ExecStart= that begins with `:` (which leaves `$` alone). Raises CannotRender."""
    return _quoted(_checked(text, "argument"))


def exec_line(argv: Sequence[str]) -> str:
    """ExecStart= for an argument vector whose first word is the absolute path of a program. Raises CannotRender."""
    if not argv or not argv[0].startswith("/"):
        raise CannotRender(f"program: {argv[0] if argv else 'none'} has to be the absolute path of a program")
    return "ExecStart=:" + " ".join(exec_word(word) for word in argv)


def env_assignment(name: str, value: str) -> str:
    """One variable in an Environment=. Raises CannotRender."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise CannotRender(f"env: {name!r} is no name of a variable")
    return _quoted(f"{name}={_checked(value, f'env {name}')}")


def shell_word(text: str) -> str:
    """One word for sh. Raises CannotRender."""
    if "\0" in text:
        raise CannotRender("a word for a shell cannot have the character U+0000")
    return shlex.quote(text)


def unit_path(text: str, what: str = "path") -> str:
    """A path in RequiresMountsFor=, LoadCredential=, Where= ..., which do not quote alike. Raises CannotRender."""
    if not re.fullmatch(r"(/[A-Za-z0-9._@+,=~-]+)+", text) or "/../" in f"{text}/" or "/./" in f"{text}/":
        raise CannotRender(f"{what}: {text!r} has to be an absolute path of letters, digits and . _ @ + , = ~ -")
    return text


def mount_unit_name(path: str) -> str:
    """The name systemd demands of the mount unit for a path: `systemd-escape --path --suffix=mount`."""
    parts = unit_path(path).strip("/")
    escaped = "".join(
        "-" if c == "/" else c if re.match(r"[A-Za-z0-9:_.]", c) and not (i == 0 and c == ".") else f"\\x{ord(c):02x}"
        for i, c in enumerate(parts)
    )
    return f"{escaped}.mount"


def unit_name(name: str) -> str:
    """Checks a name for a unit of ours. Raises CannotRender."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name):
        raise CannotRender(f"unit: {name!r} has to be letters, digits, dot, dash and underscore")
    return name


@dataclass(frozen=True)
class File:
    """A whole file to place. `was`: SHA-256 of the text it was made from (`absent`: there was none)."""

    path: str
    text: str
    mode: str | None = None
    was: str | None = None
    ours: bool = True  # only over a file of ours, or none
    brief: bool = False  # a program of ours: that it changes is said, not how

    def as_vars(self) -> dict[str, Any]:
        """As the playbooks take it."""
        entry: dict[str, Any] = {"path": self.path, "text": self.text}
        if self.mode:
            entry["mode"] = self.mode
        if self.was:
            entry["was"] = self.was
        if self.ours:
            entry["ours"] = OURS.strip()
        if self.brief:
            entry["brief"] = True
        return entry


@dataclass(frozen=True)
class ServerUnit:
    """What decides a server's unit. `secrets`: variable -> file on the machine that holds its value."""

    unit: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    campaign: str = ""
    user: str | None = None
    secrets: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None  # working directory
    mounts: tuple[str, ...] = ()  # paths whose mounts it needs
    after: tuple[str, ...] = ()  # units it needs
    cpus: str | None = None  # CPUAffinity=
    numa: tuple[str, str] | None = None  # NUMAPolicy=, NUMAMask=
    boot: bool = False  # started at boot, and again when it fails


_AGAIN = (
    "Restart=on-failure",
    "RestartSec=30",
    "# SGLang ends itself so when it is stopped: no failure then. Killed by others it is started again all the same.",
    "SuccessExitStatus=SIGKILL",
    "RestartForceExitStatus=SIGKILL",
)


def server(wanted: ServerUnit) -> File:
    """The unit of a server. Raises CannotRender."""
    argv, env = wanted.argv, _environment(wanted.argv, wanted.env)
    if clash := sorted(set(env) & set(wanted.secrets)):
        raise CannotRender(f"env {clash[0]}: given both openly and as a secret")
    if wanted.secrets:
        argv = _with_secrets(argv, wanted.secrets)
    unit = [
        f"Description={_description(wanted.title or wanted.unit)}",
        "After=network.target nvidia-persistenced.service gpuctl-devices.service",
        *(f"RequiresMountsFor={unit_path(path, 'mount')}" for path in wanted.mounts),
        *(f"{key}={unit_name(name)}" for name in wanted.after for key in ("Requires", "After")),
    ]
    if wanted.boot:
        # Engines fail slowly: the usual five starts in ten seconds would never be reached.
        unit += ["StartLimitIntervalSec=30min", "StartLimitBurst=3", "OnFailure=gpuctl-failed@%n.service"]
    service = [
        "# exec: a program that is not there fails the start, and not later.",
        "Type=exec",
        *([f"User={unit_name(wanted.user)}"] if wanted.user else []),
        *([f"WorkingDirectory={unit_path(wanted.folder, 'folder')}"] if wanted.folder else []),
        *(f"Environment={env_assignment(name, value)}" for name, value in env.items()),
        *(f"LoadCredential={unit_name(name)}:{unit_path(file, name)}" for name, file in wanted.secrets.items()),
        exec_line(argv),
        *(_AGAIN if wanted.boot else ["Restart=no"]),
        "# One of its processes killed for memory ends all of them: the rest would hang waiting for it.",
        "OOMPolicy=stop",
        "TimeoutStopSec=60",
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=1048576",
        "LimitCORE=0",
        "TasksMax=infinity",
        *([f"CPUAffinity={_list_of_numbers(wanted.cpus, 'cpus')}"] if wanted.cpus else []),
    ]
    if wanted.numa:
        policy, mask = wanted.numa
        if policy not in ("default", "preferred", "bind", "interleave", "local"):
            raise CannotRender(f"numa: {policy!r} is no policy; there are default, preferred, bind, interleave, local")
        service.append(f"NUMAPolicy={policy}")
        service += [f"NUMAMask={_list_of_numbers(mask, 'numa')}"] if policy not in ("default", "local") else []
    header = f"{OURS}# gpuctl campaign: {_comment(wanted.campaign)}\n" if wanted.campaign else OURS
    header += "# Rendered as a whole: what is changed here is gone the next time.\n"
    # Started again with what it needs: where that failed and is tried again, a start at boot alone would be over.
    needs = " ".join(name for name in wanted.after if name.startswith("gpuctl-stage-"))
    install = [f"WantedBy={' '.join(('multi-user.target', needs)).strip()}"] if wanted.boot else []
    return File(f"{UNITS}/{unit_name(wanted.unit)}.service", _unit(header, Unit=unit, Service=service, Install=install))


def _environment(argv: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Its own variables, and a PATH with its environment's programs and nvcc, and no downloads."""
    env = dict(given)
    own = argv[0].rpartition("/")[0] if argv else ""
    cuda = f"{env.get('CUDA_HOME', '/usr/local/cuda')}/bin"
    folders = [*([own] if own and own not in PATH else []), cuda, *PATH]
    env.setdefault("PATH", ":".join(folders))
    # A server that starts asks no hub: its model is there, or staging says why not.
    env.setdefault("HF_HUB_OFFLINE", "1")
    env.setdefault("PYTHONUNBUFFERED", "1")
    return dict(sorted(env.items()))


def _with_secrets(argv: Sequence[str], secrets: Mapping[str, str]) -> tuple[str, ...]:
    """Takes the values out of the credentials: in no argument and no unit, only in the process's environment."""
    reads = "".join(
        f'{name}=$(cat "$CREDENTIALS_DIRECTORY/{name}") || exit 1; export {name}; ' for name in sorted(secrets)
    )
    for name in secrets:
        env_assignment(name, "")
    return ("/bin/sh", "-c", f'{reads}exec "$@"', "sh", *argv)


def _list_of_numbers(text: str, what: str) -> str:
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise CannotRender(f"{what}: {text!r} has to be numbers and ranges, as in 0-3,8")
    return text


def _comment(text: str) -> str:
    return " ".join(_checked(text, "campaign").split())


def _description(text: str) -> str:
    return " ".join(_checked(text, "title").split()).replace("%", "%%").rstrip("\\")


def _unit(header: str, **sections: Sequence[str]) -> str:
    parts = [f"[{name}]\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections.items() if lines]
    return header + "\n".join(parts)


@dataclass(frozen=True)
class Tmpfs:
    """A memory file system for models. `size_bytes` is its limit; `policy` as in tmpfs(5): interleave, bind:0 ..."""

    path: str
    size_bytes: int
    policy: str | None = None
    huge: str | None = None  # never | always | within_size | advise
    mode: str = "0755"


def tmpfs(wanted: Tmpfs) -> File:
    """Its mount unit. Raises CannotRender."""
    if wanted.size_bytes <= 0:
        raise CannotRender(f"size: {wanted.size_bytes} bytes; 0 would mean no limit")
    if wanted.policy and not re.fullmatch(
        r"default|local|prefer:\d+|bind:[\d,-]+|interleave(:[\d,-]+)?", wanted.policy
    ):
        raise CannotRender(f"policy: {wanted.policy!r}; there are default, local, prefer:N, bind:N, interleave")
    if wanted.huge and wanted.huge not in ("never", "always", "within_size", "advise"):
        raise CannotRender(f"huge: {wanted.huge!r}; there are never, always, within_size, advise")
    options = [f"size={wanted.size_bytes}", f"mode={wanted.mode}"]
    options += [f"mpol={wanted.policy}"] if wanted.policy else []
    options += [f"huge={wanted.huge or 'never'}"]  # a remount without it leaves what there was
    text = _unit(
        OURS,
        Unit=["Description=Models in memory"],
        Mount=["What=tmpfs", "Type=tmpfs", f"Where={unit_path(wanted.path)}", f"Options={','.join(options)}"],
        # Not local-fs.target: without it a machine still boots.
        Install=["WantedBy=multi-user.target"],
    )
    return File(f"{UNITS}/{mount_unit_name(wanted.path)}", text)


def stage(model: str, job: Mapping[str, Any], mount: str, agent: str) -> tuple[File, ...]:
    """What stages a model at boot: the agent's program, its job, its unit gpuctl-stage-<model>. Raises CannotRender."""
    name = unit_name(f"gpuctl-stage-{model}")
    path = f"{ETC}/stage/{unit_name(model)}.json"
    far = str(job.get("source") or "").startswith("ssh://")  # others do not wait for a network
    text = _unit(
        OURS,
        Unit=[
            f"Description=Model {_description(model)} into memory",
            f"RequiresMountsFor={unit_path(mount, 'mount')}",
            *(["Wants=network-online.target", "After=network-online.target"] if far else ["After=network.target"]),
            "# Five tries: each after the first is counted twice, as the server that waits for it is started with it.",
            "StartLimitIntervalSec=1h",
            "StartLimitBurst=9",
            "OnFailure=gpuctl-failed@%n.service",
        ],
        Service=[
            "Type=oneshot",
            "RemainAfterExit=yes",
            f"StandardInput=file:{path}",
            f"ExecStart=/usr/bin/python3 {LIB}/stage.py",
            "Restart=on-failure",
            "RestartPreventExitStatus=2",
            "RestartSec=30",
            "TimeoutStartSec=infinity",
        ],
        Install=["WantedBy=multi-user.target"],
    )
    return (
        File(f"{LIB}/stage.py", agent, mode="0755", ours=False, brief=True),
        File(path, json.dumps(job, indent=1, sort_keys=True) + "\n", mode="0600", ours=False),
        File(f"{UNITS}/{name}.service", text),
        failed_note(),
    )


def failed_note() -> File:
    """The unit others name in OnFailure=: it leaves a note, which is there until somebody looks after it.

    A unit that only waits for what it needs has "success" as its result: no note while that is still tried again.
    """
    note = (
        'why=$MONITOR_SERVICE_RESULT; if [ "$why" = success ]; then why=dependency; '
        'for one in $(systemctl show --property=Requires --value "$MONITOR_UNIT"); do '
        'if [ "$(systemctl is-active "$one")" = activating ]; then exit 0; fi; done; fi; '
        'mkdir -p /var/lib/gpuctl/failed && echo "$(date -u +%FT%TZ) $why" > "$1"'
    )
    text = _unit(
        OURS,
        Unit=["Description=Note that %i failed"],
        Service=["Type=oneshot", exec_line(["/bin/sh", "-c", note, "sh"]) + " /var/lib/gpuctl/failed/%i"],
    )
    return File(f"{UNITS}/gpuctl-failed@.service", text)


def tune(settings: Sequence[Mapping[str, Any]], program: str) -> tuple[File, ...]:
    """What sets a node's settings again at each boot, before its guests start: program, job, unit gpuctl-tune."""
    text = _unit(
        OURS,
        Unit=[
            "Description=Settings of gpuctl, before the guests start",
            "After=systemd-modules-load.service systemd-sysctl.service nvidia-persistenced.service "
            "gpuctl-devices.service",
            "# pve-guests starts the guests marked onboot; those under high availability are started by pve-ha-lrm.",
            "Before=pve-guests.service pve-ha-lrm.service",
        ],
        Service=[
            "Type=oneshot",
            "RemainAfterExit=yes",
            f"ExecStart=/usr/bin/python3 {LIB}/settle.py {ETC}/tune.json",
            "TimeoutStartSec=120",
        ],
        Install=["WantedBy=multi-user.target"],
    )
    job = {"settings": [dict(setting) for setting in settings]}
    return (
        File(f"{LIB}/settle.py", program, mode="0755", ours=False, brief=True),
        File(f"{ETC}/tune.json", json.dumps(job, indent=1, sort_keys=True) + "\n", ours=False),
        File(f"{UNITS}/gpuctl-tune.service", text),
    )
