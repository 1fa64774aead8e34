"""`gpuctl render SERVER`."""

from __future__ import annotations

import shlex
from typing import Any

import click

from gpuctl.cli import FINDINGS, WELL
from gpuctl.cli._console import document, out, say
from gpuctl.cli._options import completing, folder, inventory_option, json_option, load_inventory, options


@click.command("render", short_help="unit, environment and command line of a server")
@click.argument("server", shell_complete=completing("servers"))
@click.option("--unit", is_flag=True, help="Only the text of its systemd unit.")
@click.option("--boot", is_flag=True, help="The unit as one that is started at boot, and again when it fails.")
@options(inventory_option, json_option)
def command(server: str, unit: bool, boot: bool, inventory: str, as_json: bool) -> int:
    """What SERVER becomes on its machine: environment, command line and unit. Asks no machine.

    Variables of NCCL that do not do what they seem to are named on stderr; exit code 1 where one ends the server.
    """
    from gpuctl import deploy, engines, hosts, nccl, plugins, together
    from gpuctl.finding import Severity
    from gpuctl.serving import unit_name
    from gpuctl.supervision import Start

    known = load_inventory(inventory)
    asked = known.server(server)
    engine = plugins.get("engines", asked.engine)
    launch = engines.Launch(
        server,
        asked,
        known.models[asked.model].path if asked.model else None,
        known.models[asked.draft].path if asked.draft else None,
    )
    environment = engines.environment(engine, launch)
    traps = nccl.lint(environment)
    launches = together.ranked(launch, hosts.load(folder(inventory))) if len(asked.nodes) > 1 else (launch,)
    argvs = [list(engine.argv(each)) for each in launches]
    staged = [model.path for model in known.models.values() if model.stage]
    texts: list[str | None] = []
    for argv in argvs:
        # A machine looks a bare name up on its PATH; here nobody can.
        words = [argv[0] if argv[0].startswith("/") else f"/usr/bin/{argv[0]}", *argv[1:]] if argv else []
        start = Start(unit_name(server), words, environment, known.campaign, asked.secrets)
        texts.append(deploy.unit_of(start, asked, models=staged, boot=boot).text if words else None)
    for trap in traps:
        say(f"gpuctl: {trap.summary}; {trap.advice}")
    code = FINDINGS if any(trap.severity is Severity.CRITICAL for trap in traps) else WELL
    nothing = f"# nothing is deployed; it answers at {asked.url}"
    if as_json:
        found: dict[str, Any] = {
            "schema": "gpuctl.render/1",
            "verdict": "well" if code == WELL else "findings",
            "server": server,
            "argv": argvs[0],
            "environment": environment,
            "unit": texts[0],
        }
        if len(launches) > 1:
            rows = zip(asked.nodes, argvs, texts, strict=True)
            found["nodes"] = [{"node": node, "argv": argv, "unit": text} for node, argv, text in rows]
        document({**found, "findings": [trap.as_json() for trap in traps]})
        return code
    if not unit:
        out(f"# {server}: {asked.title or asked.engine}")
        for key, value in environment.items():
            out(f"{key}={shlex.quote(value)}")
    for number, (argv, text) in enumerate(zip(argvs, texts, strict=True)):
        if len(launches) > 1:
            out(f"{chr(10) * (number > 0 or not unit)}# on {asked.nodes[number]}")
        if unit:
            out(text or f"{nothing}\n", newline=False)
        else:
            out(" \\\n  ".join(_lines(argv)) if argv else nothing)
    return code


def _lines(argv: list[str]) -> list[str]:
    """One line a flag with its values."""
    lines: list[str] = []
    for word in argv:
        if lines and not word.startswith("-"):
            lines[-1] += " " + shlex.quote(word)
        else:
            lines.append(shlex.quote(word))
    return lines
