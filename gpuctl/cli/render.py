"""`gpuctl render SERVER`."""

from __future__ import annotations

import shlex
from typing import Any

import click

from gpuctl.cli import FINDINGS, WELL
from gpuctl.cli._console import document, out, say
from gpuctl.cli._options import inventory_option, json_option, load_inventory, options


@click.command("render", short_help="unit, environment and command line of a server")
@click.argument("server")
@click.option("--unit", is_flag=True, help="Only the text of its systemd unit.")
@click.option("--boot", is_flag=True, help="The unit as one that is started at boot, and again when it fails.")
@options(inventory_option, json_option)
def command(server: str, unit: bool, boot: bool, inventory: str, as_json: bool) -> int:
    """What SERVER becomes on its machine: environment, command line and unit. Asks no machine.

    Variables of NCCL that do not do what they seem to are named on stderr; exit code 1 where one ends the server.
    """
    from gpuctl import deploy, engines, nccl, plugins
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
    argv, environment = list(engine.argv(launch)), engines.environment(engine, launch)
    traps = nccl.lint(environment)
    text = None
    if argv:
        # A machine looks a bare name up on its PATH; here nobody can.
        words = [argv[0] if argv[0].startswith("/") else f"/usr/bin/{argv[0]}", *argv[1:]]
        start = Start(unit_name(server), words, environment, known.campaign, asked.secrets)
        staged = [model.path for model in known.models.values() if model.stage]
        text = deploy.unit_of(start, asked, models=staged, boot=boot).text
    for trap in traps:
        say(f"gpuctl: {trap.summary}; {trap.advice}")
    code = FINDINGS if any(trap.severity is Severity.CRITICAL for trap in traps) else WELL
    if as_json:
        found: dict[str, Any] = {
            "schema": "gpuctl.render/1",
            "server": server,
            "argv": argv,
            "environment": environment,
        }
        document({**found, "unit": text, "findings": [trap.as_json() for trap in traps]})
    elif unit:
        out(text or f"# nothing is deployed; it answers at {asked.url}\n", newline=False)
    else:
        out(f"# {server}: {asked.title or asked.engine}")
        for key, value in environment.items():
            out(f"{key}={shlex.quote(value)}")
        out(" \\\n  ".join(_lines(argv)) if argv else f"# nothing is deployed; it answers at {asked.url}")
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
