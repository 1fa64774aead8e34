"""`gpuctl render SERVER`."""

from __future__ import annotations

import shlex

import click

from gpuctl.cli import WELL
from gpuctl.cli._console import document, out
from gpuctl.cli._options import inventory_option, json_option, load_inventory, options


@click.command("render", short_help="unit, environment and command line of a server")
@click.argument("server")
@options(inventory_option, json_option)
def command(server: str, inventory: str, as_json: bool) -> int:
    """What SERVER becomes on its machine: environment and command line. Asks no machine."""
    from gpuctl import plugins
    from gpuctl.engines import Launch

    known = load_inventory(inventory)
    asked = known.server(server)
    engine = plugins.get("engines", asked.engine)
    launch = Launch(
        server,
        asked,
        known.models[asked.model].path if asked.model else None,
        known.models[asked.draft].path if asked.draft else None,
    )
    argv = list(engine.argv(launch))
    environment = {**engine.environment(launch), **{key: str(value) for key, value in asked.env.items()}}
    if as_json:
        document({"schema": "gpuctl.render/1", "server": server, "argv": argv, "environment": environment})
        return WELL
    out(f"# {server}: {asked.title or asked.engine}")
    for key, value in environment.items():
        out(f"{key}={shlex.quote(value)}")
    out(" \\\n  ".join(_lines(argv)) if argv else f"# nothing is deployed; it answers at {asked.url}")
    return WELL


def _lines(argv: list[str]) -> list[str]:
    """One line a flag with its values."""
    lines: list[str] = []
    for word in argv:
        if lines and not word.startswith("-"):
            lines[-1] += " " + shlex.quote(word)
        else:
            lines.append(shlex.quote(word))
    return lines
