"""Printing: results to stdout, progress and errors to stderr, one JSON document with --json."""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import Any

import click

# What is wrong with a file or a folder that somebody named.
_A_FILE = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EISDIR, errno.ENOTDIR,
        errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
    }
)  # fmt: skip
VERBOSE = "GPUCTL_TRACEBACK"  # set it to see where an error comes from


def say(text: str = "") -> None:
    """A line of progress."""
    click.echo(text, err=True)


def out(text: str = "", *, newline: bool = True) -> None:
    """A line of the result."""
    click.echo(text, nl=newline)


def document(value: Any) -> None:
    """The one JSON document of --json."""
    click.echo(json.dumps(value, indent=1, default=str))


class Declined(Exception):
    """Whoever was asked said no."""


def consent(question: str) -> None:
    """Asks whoever sits at the terminal before a change. Raises UsageError where nobody does, Declined at a no."""
    if not sys.stdin.isatty():
        raise click.UsageError("it asks before it changes a machine, and nobody is there; --yes says yes")
    if not click.confirm(question, err=True):
        raise Declined


def open_streams() -> None:
    """Closed standard streams (`>&-`) lead to nowhere from here on: Python has None for them, and the next file that is
    opened would take their number, so that what is printed would be written into it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - it stays open


def colour(stream: Any = None) -> bool:
    """Whether colours are welcome (https://no-color.org); the stream is stdout where none is given."""
    stream = stream or sys.stdout
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def explain(error: BaseException) -> int:
    """One line for an error, and its exit code. Raises what is a fault of ours."""
    from gpuctl.cli import INTERRUPTED, UNKNOWN, USAGE

    if os.environ.get(VERBOSE):
        raise error
    if isinstance(error, Declined):
        say("nothing was changed")
        return INTERRUPTED
    if isinstance(error, KeyboardInterrupt | click.exceptions.Abort):
        say("interrupted; give the same command again")
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return int(error.code or 0)
    if isinstance(error, BrokenPipeError):
        # whoever read our output has gone: what is left of it goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    name = type(error).__name__
    if mistakes := getattr(error, "mistakes", None):
        for mistake in mistakes:
            say(f"gpuctl: {mistake}")
        return USAGE
    unknown = (
        ("transport", "TransportError"),
        ("supervision", "SupervisionError"),
        ("surveying", "SurveyError"),
        ("load", "NoServer"),
    )
    if any(_is(error, f"gpuctl.{module}", kind) for module, kind in unknown):
        say(f"gpuctl: {error}")
        return UNKNOWN
    if _is(error, "gpuctl.store", "StoreError"):
        say(f"gpuctl: {error}")
        return INTERRUPTED if getattr(error, "full", False) else USAGE
    if isinstance(error, OSError) and error.errno in _A_FILE:
        say(f"gpuctl: {error.filename or 'a file'}: {error.strerror}")
        return INTERRUPTED if error.errno in (errno.ENOSPC, errno.EDQUOT) else USAGE
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.EAGAIN, errno.ENOMEM):
        say(f"gpuctl: {error.strerror}: a limit of this shell or cgroup is too low (ulimit -a, pids.max, memory.max)")
        return UNKNOWN
    if type(error).__module__.startswith("gpuctl."):
        say(f"gpuctl: {error}")
        return USAGE
    say(f"gpuctl: a fault of gpuctl itself: {name}: {error}; {VERBOSE}=1 shows where")
    return UNKNOWN


def _is(error: BaseException, module: str, name: str) -> bool:
    """isinstance without importing the module: whoever raised it has imported it."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(error, kind)
