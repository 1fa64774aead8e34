"""`gpuctl completion SHELL`."""

from __future__ import annotations

import click

from gpuctl.cli import WELL
from gpuctl.cli._console import out


@click.command("completion", short_help="verbs, options, phases, servers and boxes, completed by your shell")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Prints what makes SHELL complete gpuctl's words: verbs and options, and the names in your inventory.

    \b
    bash    eval "$(gpuctl completion bash)"    in ~/.bashrc
    zsh     eval "$(gpuctl completion zsh)"     in ~/.zshrc, behind compinit
    fish    gpuctl completion fish > ~/.config/fish/completions/gpuctl.fish
    """
    from click.shell_completion import get_completion_class

    from gpuctl.cli import gpuctl

    kind = get_completion_class(shell)
    assert kind is not None
    try:
        source = kind(gpuctl, {}, "gpuctl", "_GPUCTL_COMPLETE").source()
    except RuntimeError as error:  # a bash older than 4.4
        raise click.UsageError(str(error)) from None
    out(source)
    return WELL
