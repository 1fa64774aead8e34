"""What is rendered comes to the machines here: units of servers, settings, remedies; every change by a playbook.

It joins the rooms that know one thing each: render (texts), playbook (Ansible), hosts (machines), transport (asking).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpuctl import nccl, render, tuning
from gpuctl.assets import asset
from gpuctl.config import Server
from gpuctl.finding import Finding, Remedy, Severity
from gpuctl.hosts import Inventory, Machine
from gpuctl.playbook import Outcome, Step, play
from gpuctl.render import CannotRender, File, ServerUnit
from gpuctl.supervision import NoRoom, Start, SupervisionError
from gpuctl.transport import Transport

Watching = Callable[[Step], None]


def _nobody(_: Step) -> None:
    pass


def mend(
    remedy: Remedy, inventory: Inventory, guest: Machine, *, check: bool = False, on_step: Watching = _nobody
) -> Outcome:
    """Plays a remedy on the machine it is for: the guest, or its node. With `check` it changes nothing."""
    machine, variables = guest, dict(remedy.vars)
    if remedy.on == "node" and guest.kind != "node":
        if guest.node is None or guest.node not in inventory.machines:
            return Outcome(
                f"{guest.name}: its node is not in the inventory (gpuctl_node), and this is for it", (), {}, 0.0
            )
        machine = inventory.machines[guest.node]
    if remedy.playbook == "devices":
        variables["devices_on"] = "all"  # also a guest that has the driver to itself
    return play(remedy.playbook, inventory.source, [machine.name], variables, check=check, on_step=on_step)


def unmend(
    inventory: Inventory, machine: Machine, *, check: bool = False, on_step: Watching = _nobody
) -> tuple[Outcome, ...]:
    """Takes back what `mend` left on a box: a guest's configuration, and what makes device nodes at boot.

    What the running guest may open stays as it is until its next start. With `check` nothing changes.
    """
    node = inventory.machines.get(machine.node or "")
    source, undo = inventory.source, {"undo": True}
    outcomes = []
    if node is not None and machine.vmid is not None:
        given = {"vmid": machine.vmid, "conf_path": f"/etc/pve/lxc/{machine.vmid}.conf", **undo}
        outcomes.append(play("container", source, [node.name], given, check=check, on_step=on_step))
    host = node or machine
    given = {**undo, "devices_on": "all"}
    return (*outcomes, play("devices", source, [host.name], given, check=check, on_step=on_step))


def tune(
    settings: Sequence[tuning.Setting],
    inventory: Inventory,
    machine: Machine,
    *,
    check: bool = False,
    undo: bool = False,
    boot: bool = True,
    on_step: Watching = _nobody,
) -> Outcome:
    """Sets the settings, reads them back and keeps them over reboots (`boot`); `undo` puts back what was before."""
    jobs = [setting.as_job() for setting in settings]
    program = asset("playbooks", "library", "settle.py").read_text(encoding="utf-8")
    files = render.tune(jobs, program) if boot or undo else ()
    variables = {"settings": jobs, "tune_files": [file.as_vars() for file in files], "undo": undo}
    return play("tune", inventory.source, [machine.name], variables, check=check, on_step=on_step)


def mount(
    wanted: Sequence[render.Tmpfs],
    inventory: Inventory,
    machine: Machine,
    *,
    check: bool = False,
    undo: bool = False,
    remount: bool = False,
    on_step: Watching = _nobody,
) -> Outcome:
    """Mounts memory file systems, now and at each boot; one that is mounted takes a new size and keeps what is in it.

    `remount`: also where the unit stays as it is. `undo` takes them away, with what is in them. Raises CannotRender.
    """
    files = [render.tmpfs(one).as_vars() for one in wanted]
    variables = {"tmpfs_files": files, "tmpfs_remount": remount, "undo": undo}
    return play("tmpfs", inventory.source, [machine.name], variables, check=check, on_step=on_step)


def stage_at_boot(
    files: Sequence[File],
    inventory: Inventory,
    machine: Machine,
    *,
    check: bool = False,
    undo: bool = False,
    on_step: Watching = _nobody,
) -> Outcome:
    """Places what fills models into memory at each boot (`staging.boot_files`), and starts nothing now."""
    variables = {"stage_files": [file.as_vars() for file in files], "undo": undo}
    return play("stage", inventory.source, [machine.name], variables, check=check, on_step=on_step)


def unit_of(
    start: Start,
    server: Server,
    *,
    models: Sequence[str] = (),
    argv: Sequence[str] | None = None,
    boot: bool = False,
    after: Sequence[str] = (),
) -> File:
    """The unit of a server that is about to be started. `models`: paths in memory that have to be mounted first;
    `boot`: it is also started at each boot, `after` these units, which it needs.

    Raises CannotRender.
    """
    words = tuple(argv if argv is not None else start.argv)
    if server.numa:
        words = ("/usr/bin/numactl", *shlex.split(server.numa), *words)
    needed = {str(Path(model).parent) for model in models if model in start.argv}
    return render.server(
        ServerUnit(
            unit=start.unit,
            argv=words,
            env=start.env,
            title=server.title or "",
            campaign=start.owner,
            user=server.user,
            secrets=start.secrets,
            mounts=tuple(sorted(needed)),
            after=tuple(after),
            cpus=server.cpus,
            boot=boot,
        )
    )


def placer(
    inventory: Inventory,
    machine: Machine,
    way: Transport,
    servers: Mapping[str, Server],
    *,
    models: Sequence[str] = (),
    on_step: Watching = _nobody,
    on_trap: Callable[[str, Finding], None] = lambda unit, trap: None,
    on_boot_lost: Callable[[str], None] = lambda unit: None,
    on_placed: Callable[[str, str], None] = lambda unit, exposure: None,
) -> Callable[[Start], None]:
    """What `supervision.Units` calls before it starts a server: its unit is put there, unless it is there already.

    `servers` by unit. `on_trap` hears what of NCCL's variables does not do what it seems to, before anything is placed;
    `on_boot_lost` which unit was started at boot until now: one that is measured must not come up by itself;
    `on_placed` which unit is new, and what systemd says of its exposure.
    The placing raises SupervisionError, in one line, with nothing half-placed.
    """

    def place(start: Start) -> None:
        server = servers[start.unit]
        try:
            first = program(start.argv[0], way, start.env) if start.argv else ""
            file = unit_of(start, server, models=models, argv=(first, *start.argv[1:]))
        except CannotRender as error:
            raise SupervisionError(f"{start.unit}: {error}") from None
        for trap in (*nccl.lint(start.env), *conf_traps(way, start.env, server.user)):
            if trap.severity is Severity.CRITICAL:
                raise SupervisionError(f"{start.unit}: {trap.summary}; {trap.advice}")
            on_trap(start.unit, trap)
        if server.user or start.secrets:
            _try_credentials(server.user, start.secrets, way, start.unit)
        if server.numa:
            _try_numactl(server.numa, way, start.unit)
        if server.cpus:
            _try_cpus(server.cpus, way, start.unit)
        there = way.run(["cat", file.path], timeout=30)
        if there.rc == 0 and there.stdout == file.text.encode() and not _stale(start.unit, way):
            return  # Ansible takes two seconds to find that out
        done = play("server", inventory.source, [machine.name], {"server_files": [file.as_vars()]}, on_step=on_step)
        if not done.well:
            # What did not fit was taken away again: a moment later there is a little room.
            if (full := full_disk(way)) or re.search("No space left on device|Disk quota exceeded", done.why):
                raise NoRoom(f"{way.name}: the disk{f' with {full}' if full else ''} is full; make room there")
            raise SupervisionError(done.why)
        exposure = re.search(r"systemd calls its exposure .*", done.diff)
        on_placed(start.unit, exposure[0] if exposure else "")
        if b"\n[Install]\n" in there.stdout:
            on_boot_lost(start.unit)

    return place


def full_disk(way: Transport) -> str:
    """A folder in which nothing can be written any more, of those that placing a file needs; empty where there is room.
    (What Ansible says then is anything but that.)"""
    script = 'for d in /etc /tmp "$HOME"; do [ "$(stat -f -c %a "$d")" != 0 ] || { echo "$d"; break; }; done'
    return way.run(["sh", "-c", script], timeout=30).text.strip()


def program(word: str, way: Transport, env: Mapping[str, str]) -> str:
    """The absolute path of a program there: systemd looks for a bare name in folders of its own only."""
    if word.startswith("/"):
        return word
    script = 'PATH=${1:-$PATH}; command -v -- "$2"'
    said = way.run(["sh", "-c", script, "sh", env.get("PATH", ""), word], timeout=30)
    path = said.text.strip()
    if said.rc != 0 or not path.startswith("/"):
        raise SupervisionError(f"{way.name}: there is no program {word}; give its whole path in `program`")
    return path


def _stale(unit: str, way: Transport) -> bool:
    """Whether systemd has not read the unit since it was changed, or starts it at boot."""
    asked = ["systemctl", "show", "--property=NeedDaemonReload,LoadState,UnitFileState", f"{unit}.service"]
    said = way.run(asked, timeout=30).text
    return re.search(r"^NeedDaemonReload=no$", said, re.M) is None or "UnitFileState=enabled" in said


def conf_traps(way: Transport, env: Mapping[str, str], user: str | None) -> tuple[Finding, ...]:
    """What is wrong with the machine's own nccl.conf, which count for every server there that does not set the same.

    NCCL reads the one that NCCL_CONF_FILE names, else that of the user, and then that of the machine.
    """
    script = (
        'home=$(getent passwd "${2:-$(id -un)}" | cut -d: -f6); '
        'for f in "${1:-$home/.nccl.conf}" /etc/nccl.conf; do [ -f "$f" ] && echo "== $f" && cat "$f" && echo; done; :'
    )
    said = way.run(["sh", "-c", script, "sh", env.get("NCCL_CONF_FILE", ""), user or ""], timeout=30).text
    parts = re.split(r"^== (/.*)\n", said, flags=re.M)[1:]
    known = dict(env)
    found: list[Finding] = []
    for file, text in zip(parts[::2], parts[1::2], strict=True):
        found += nccl.lint_conf(text, file, known)
        known = nccl.conf_values(text) | known
    return tuple(found)


def _try_credentials(user: str | None, secrets: Mapping[str, str], way: Transport, unit: str) -> None:
    """systemd would say "No such process" and "Protocol error"."""
    script = (
        '[ -z "$1" ] || id -u -- "$1" >/dev/null 2>&1 || echo user; shift; '
        'for f; do { [ -f "$f" ] && [ -r "$f" ]; } || echo "file $f"; done'
    )
    missing = way.run(["sh", "-c", script, "sh", user or "", *secrets.values()], timeout=30).text.splitlines()
    if "user" in missing:
        raise SupervisionError(f"{unit}: user: there is no user {user} on {way.name}; useradd --system {user}")
    for name, file in secrets.items():
        if f"file {file}" in missing:
            raise SupervisionError(f"{unit}: secrets: {name}: {file} is no file that can be read on {way.name}")


# A set that reaches beyond what the guest may use is cut down by the kernel without a word.
_TAKE = """
import os, sys
wanted = set()
for part in sys.argv[1].split(","):
    first, _, last = part.partition("-")
    wanted.update(range(int(first), int(last or first) + 1))
try: os.sched_setaffinity(0, wanted)
except OSError as e: sys.exit(e.strerror)
left = wanted - os.sched_getaffinity(0)
if left: sys.exit("not allowed here: " + ",".join(map(str, sorted(left)[:8])))
"""


def _try_cpus(cpus: str, way: Transport, unit: str) -> None:
    """systemd would start the server on fewer CPUs, or not at all: better said now."""
    done = way.run(["python3", "-c", _TAKE, cpus], timeout=30)
    if done.rc != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        why = said[-1] if said else f"status {done.rc}"
        raise SupervisionError(f"{unit}: cpus: {cpus} is refused on {way.name}: {why}; see cpuset.cpus of the guest")


def _try_numactl(words: str, way: Transport, unit: str) -> None:
    """numactl ends before Python starts when a container may not bind: better said now, in its words."""
    done = way.run(["/usr/bin/numactl", *shlex.split(words), "true"], timeout=30)
    if done.rc == 127:
        raise SupervisionError(f"{unit}: numa: there is no numactl on {way.name}; apt install numactl")
    if done.rc != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        why = said[0] if said else f"status {done.rc}"
        raise SupervisionError(
            f"{unit}: `numactl {words}` is refused on {way.name}: {why}; see cpuset.mems of the guest"
        )
