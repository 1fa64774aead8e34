"""`python -m tests.lab`: the lab by hand. `--help` lists the commands, `fault --help` the ways to break it."""

from __future__ import annotations

import os
import sys
import time

import click

from tests.lab.faults import commands
from tests.lab.lab import Lab
from tests.lab.layout import MACHINES, Guest, NoLab
from tests.lab.roots import cache

DEFAULT = "lab"


def say(text: str) -> None:
    click.echo(f"lab: {text}", err=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("-n", "--name", default=lambda: os.environ.get("GPUCTL_LAB") or DEFAULT, help="which lab, GPUCTL_LAB")
@click.pass_context
def main(context: click.Context, name: str) -> None:
    """Two Proxmox-like nodes and their LXC guests on this machine, to be broken and healed. docs/lab.md tells how."""
    context.obj = Lab(name)


@main.command()
@click.option("--keep", is_flag=True, help="leave a lab that does not come up as it is, to look at it")
@click.pass_obj
def up(lab: Lab, keep: bool) -> None:
    """Bring the lab up and print how to reach it."""
    start = time.monotonic()
    if lab.alive():
        say(f"{lab.name} is up already")
    else:
        lab.up(say, keep=keep)
        say(f"up in {time.monotonic() - start:.0f} s")
    click.echo(_how_to_reach(lab))


def _how_to_reach(lab: Lab) -> str:
    inventory = lab.inventory
    lines = [f"gpuctl -i {os.path.relpath(inventory) if lab.name == DEFAULT else inventory} doctor"]
    lines += [f"ssh -F {lab.ssh_config} kpro6        # or kpro7, ct200, ct201, ct210; ct202 has no sshd"]
    lines += ["python -m tests.lab fault --help       # ways to break it", "make lab-down"]
    return "\n".join(lines)


@main.command()
@click.pass_obj
def down(lab: Lab) -> None:
    """Take away everything of the lab."""
    say(f"{lab.name} is gone" if lab.down() else f"there is no lab {lab.name!r}")


@main.command()
@click.pass_obj
def status(lab: Lab) -> None:
    """Which machines are up, their addresses and boot ids. Exit code 1 if one is not."""
    if not lab.alive():
        raise NoLab(f"the lab {lab.name!r} is not up: `make lab`")
    well = True
    for one in MACHINES:
        boot = lab.boot_id(one.name)
        well = well and bool(boot)
        where = "no sshd" if isinstance(one, Guest) and not one.sshd else lab.address(one.name)
        click.echo(f"{one.name:8}{where:16}{'up    ' if boot else 'down  '}{boot}")
    sys.exit(0 if well else 1)


@main.command("ssh-config")
@click.pass_obj
def ssh_config(lab: Lab) -> None:
    """Print the path of the ssh_config that reaches the lab."""
    if not lab.ssh_config.exists():
        raise NoLab(f"the lab {lab.name!r} is not up: `make lab`")
    click.echo(lab.ssh_config)


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("machine")
@click.argument("command", nargs=-1)
@click.pass_obj
def enter(lab: Lab, machine: str, command: tuple[str, ...]) -> None:
    """Run COMMAND (a shell, if none) on MACHINE from behind, whether its network and sshd work or not."""
    argv = lab.way_in(machine, command or ("bash", "-l"), terminal=sys.stdin.isatty())
    os.execvp(argv[0], argv)


main.add_command(commands.group())


@main.command("forget-cache")
def forget_cache() -> None:
    """Delete the file systems kept in the cache; the next `up` builds them anew."""
    import shutil

    shutil.rmtree(cache(), ignore_errors=True)
    say(f"{cache()} is gone")


if __name__ == "__main__":
    try:
        main(prog_name="python -m tests.lab", standalone_mode=False)
    except NoLab as error:
        click.echo(f"lab: {error}", err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("lab: interrupted, and cleaned up", err=True)
        sys.exit(4)
