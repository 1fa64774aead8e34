"""`gpuctl init`."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuctl.cli import WELL
from gpuctl.cli._console import document, out, say
from gpuctl.cli._options import json_option, load_inventory, options

if TYPE_CHECKING:
    from gpuctl.box import Snapshot
    from gpuctl.firstinventory import Seen, Way


@click.command("init", short_help="ask a machine, and write an inventory for it")
@click.argument("machine")
@click.option("--into", metavar="DIR", help="Folder to write. [default: inventory/<name of the machine>]")
@click.option(
    "-F", "ssh_config", metavar="FILE", help="An ssh_config in place of ~/.ssh/config, as ssh's -F; it is written down."
)
@options(json_option)
def command(machine: str, into: str | None, ssh_config: str | None, as_json: bool) -> int:
    """Asks MACHINE ([user@]host[:port], or `local`) once what it is, and writes hosts.yml, models.yml, servers.yml and
    phases.yml with comments. What is there already is never overwritten; on the machine nothing is changed.

    A Proxmox VE node brings its containers that have GPUs, and the models and engines in them.
    Its host key has to be in known_hosts: log in once by hand, and compare the fingerprint.
    """
    way, name = _way(machine, ssh_config)
    folder = Path(into) if into is not None else Path("inventory") / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise click.UsageError(f"{folder} is there already, and nothing is overwritten: --into names another folder")
    say(f"asking {name} ...")
    found, way = _ask(way, name)
    _write(folder, found, way)
    if as_json:
        document(_as_json(folder, found))
        return WELL
    for line in _in_words(found):
        out(line)
    out(f"wrote {folder}/: hosts.yml models.yml servers.yml phases.yml")
    given = folder.name if folder.parent == Path("inventory") else folder
    out(f"next: gpuctl doctor -i {given}")
    if any(place.models and place.engines for place in found.places):
        out(f"      gpuctl bench first -i {given} --check")
    return WELL


def _way(machine: str, ssh_config: str | None) -> tuple[Way, str]:
    from gpuctl.config import NAME
    from gpuctl.firstinventory import Way

    if machine == "local":
        return Way(local=True), "local"
    read = re.fullmatch(
        r"(?:ssh://)?(?:(?P<user>[^@\s/]+)@)?(?:\[(?P<six>[0-9A-Fa-f:]+)\]|(?P<host>[^@\s/:\[\]-][^@\s/:\[\]]*))"
        r"(?::(?P<port>\d{1,5}))?/?",
        machine,
    )
    if read is None or (read["port"] and not 1 <= int(read["port"]) <= 65535):
        raise click.BadParameter(f"{machine!r} is no machine: [user@]host[:port], or local")
    host = read["six"] or read["host"]
    options = ""
    if ssh_config is not None:
        file = Path(ssh_config).expanduser().resolve()
        if not file.is_file():
            raise click.BadParameter(f"-F {ssh_config}: no such file")
        if "{" in str(file):
            raise click.BadParameter(f"-F {ssh_config}: Ansible takes braces in a name for a template")
        options = f"-F {shlex.quote(str(file))}"
    address = read["six"] or re.fullmatch(r"[\d.]+", host)
    name = re.sub(r"[^A-Za-z0-9_-]", "-", host) if address else host.partition(".")[0]
    if not re.match(NAME, name):
        raise click.BadParameter(f"{machine!r}: {name!r} is no name for a machine: letters, digits, dash, underscore")
    return Way(False, host, read["user"], int(read["port"]) if read["port"] else None, options), name


def _ask(way: Way, name: str) -> tuple[Seen, Way]:
    """What the machine is; and the way, with sudo where it takes that. Raises TransportError."""
    from dataclasses import replace

    from gpuctl.firstinventory import seen
    from gpuctl.transport import Local, Refused, Ssh
    from gpuctl.transport.hops import chain

    if way.local:
        return seen(_probe(Local(name), name), name), way
    options = shlex.split(way.options)
    place = [*options, *(["-p", str(way.port)] if way.port else []), *(["-l", way.user] if way.user else [])]
    sudo = chain([*place, "--", way.host], None)[-1].user != "root"
    for become in (True, False) if sudo else (False,):
        ssh = Ssh(name, way.host, port=way.port, user=way.user, options=options, sudo=become)
        try:
            return seen(_probe(ssh, name), name), replace(way, sudo=become)
        except Refused as error:
            if not become or "may not become root" not in str(error):
                raise
            say(f"gpuctl: {error}; asked without root: GPUs of guests and settings stay unseen")
        finally:
            ssh.close()
    raise AssertionError("one of the two ways returns or raises")


def _probe(way: Any, name: str) -> Snapshot:
    from gpuctl.asking import probe
    from gpuctl.firstinventory import LOOK
    from gpuctl.transport import TransportError

    job = {"name": name, "commands": [LOOK], "limits": {"command_s": 40, "deadline_s": 50}}
    snapshot = probe(way, job)
    if isinstance(snapshot, TransportError):
        raise snapshot
    return snapshot


def _write(folder: Path, found: Seen, way: Way) -> None:
    """All four files or none: written beside, read as every verb will read them, then renamed."""
    from gpuctl import hosts
    from gpuctl.firstinventory import files

    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for file, text in files(found, way).items():
            (draft / file).write_text(text, encoding="utf-8")
        hosts.load(draft)
        load_inventory(str(draft.resolve()))
        draft.chmod(0o755)
        draft.rename(folder)  # over an empty folder too, never over one with something in it
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _in_words(found: Seen) -> list[str]:
    kinds = sorted(set(found.gpus))
    gpus = f"{len(found.gpus)} GPU{'s' * (len(found.gpus) != 1)}" + (f" ({', '.join(kinds)})" if kinds else "")
    what = "a Proxmox VE node" if found.node else "a machine"
    lines = [f"{found.machine.name}: {what}, {gpus}"]
    if found.node and not found.guests:
        lines.append("  no container of it has NVIDIA devices")
    for place in found.places:
        state = "" if place.running else " (not running: nothing was looked at in it)"
        engines = ", ".join(f"{one.engine} {one.version}".strip() for one in place.engines)
        models = ", ".join(model.name for model in place.models)
        lines.append(f"  {place.name}{state}: engines: {engines or 'none found'}; models: {models or 'none found'}")
    return lines


def _as_json(folder: Path, found: Seen) -> dict[str, Any]:
    return {
        "schema": "gpuctl.init/1",
        "verdict": "well",
        "folder": str(folder),
        "machine": found.machine.name,
        "proxmox_node": found.node,
        "gpus": list(found.gpus),
        "places": [
            {
                "name": place.name,
                "vmid": place.vmid,
                "running": place.running,
                "engines": [{"engine": e.engine, "version": e.version, "program": e.start} for e in place.engines],
                "models": [{"name": m.name, "path": m.path, "bytes": m.size_bytes, "hub": m.hub} for m in place.models],
            }
            for place in found.places
        ],
    }
