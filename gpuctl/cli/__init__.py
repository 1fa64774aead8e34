"""The command line: parse, call one verb, print, exit code. One file a verb; the file name is the verb.

Exit codes: 0 well, 1 findings or failed cells, 2 usage or configuration, 3 could not tell (unreachable, unreadable),
4 interrupted, the same command goes on. Results go to stdout, progress to stderr.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

import click

from gpuctl import __version__

WELL, FINDINGS, USAGE, UNKNOWN, INTERRUPTED = 0, 1, 2, 3, 4


class _Verbs(click.Group):
    """Finds verbs in this folder, and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        # as plugins.names does, but without pkgutil, whose import costs more than all verbs together
        files = (name for name in os.listdir(os.path.dirname(__file__)) if name.endswith(".py"))  # noqa: PTH120, PTH208
        return sorted(name[:-3] for name in files if not name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"gpuctl.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            from gpuctl.spelling import nearest

            near = nearest(args[0], self.list_commands(ctx))
            if near:
                raise click.UsageError(f"No such command {args[0]!r}; did you mean {near!r}?", ctx) from None
            raise


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="gpuctl")
@click.option("-i", "--inventory", metavar="DIR", help="Inventory of the command; it may also stand behind it.")
@click.pass_context
def gpuctl(ctx: click.Context, inventory: str | None) -> None:
    """Finds why CUDA does not start, brings a rebooted GPU box back to serving, and measures LLM servers.

    \b
    CUDA is dead after a reboot:    gpuctl doctor
    Measure servers, unattended:    gpuctl bench PHASE
    Try it here, without a GPU:     gpuctl bench demo
    """
    if inventory is not None:
        ctx.default_map = {verb: {"inventory": inventory} for verb in gpuctl.list_commands(ctx)}


def main(args: list[str] | None = None) -> None:
    """The program. Mistakes of the user are one line each, and never a traceback."""
    from gpuctl.cli._console import explain, open_streams

    open_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):  # whoever ends us, or the terminal that went: as Ctrl-C does
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup it stays ignored
            signal.signal(number, signal.default_int_handler)
    try:
        code: Any = gpuctl.main(args=args, prog_name="gpuctl", standalone_mode=False)
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = USAGE
    except click.ClickException as error:
        ctx = getattr(error, "ctx", None)
        words = " ".join(error.format_message().split()).rstrip(".")
        # a question has named what was meant
        more = "" if words.rstrip(")").endswith("?") else f"; {ctx.command_path if ctx else 'gpuctl'} --help says more"
        click.echo(f"gpuctl: {words}{more}", err=True)
        code = USAGE
    except BaseException as error:  # noqa: BLE001 - told as one line, or raised again
        code = explain(error)
    sys.exit(code or 0)
