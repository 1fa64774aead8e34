"""What every way of reaching a machine promises: `Transport`, its answer and its errors."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class TransportError(Exception):
    """The machine could not be asked. The message is one line for a person: what, where, what to do."""


class Unreachable(TransportError):
    """No connection: name, network, a machine that is down. Worth trying again."""


class Refused(TransportError):
    """The machine answered and will not have us: host key, login, sudo. Never tried again."""


class TimedOut(TransportError):
    """The command did not end in time. It was told to stop."""


@dataclass(frozen=True)
class Completed:
    rc: int  # a command that a signal ended: the negative signal number
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        return self.stdout.decode("utf-8", "replace")


class Transport(Protocol):
    """A way to run a command on one machine."""

    name: str

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        """Runs argv, gives it stdin, returns what it said. `timeout` in seconds, without the time to connect.

        With `on_stdout`, output is handed over as it arrives and Completed.stdout is empty.
        A command that is not there is rc 127, one that may not be run 126, as in a shell. Raises TransportError.
        """

    def close(self) -> None:
        """Lets go of the connection, also one that another thread is waiting for. The next run opens a new one."""


def brief(argv: Sequence[str]) -> str:
    """The command as a person would type it, cut to what fits into a message."""
    line = " ".join(shlex.join(argv).split())
    return line if len(line) <= 80 else line[:77] + "..."


# Not `exec`: the shell then says 128 + n for a signal, which sshd would say in a message that paramiko does not read.
_LIMITED = 'if command -v timeout >/dev/null; then timeout -k 2 "$@"; else shift; "$@"; fi; exit $?'
_PLAIN = '"$@"; exit $?'


def limited(argv: Sequence[str], timeout: float | None) -> list[str]:
    """The command as the far machine runs it: it ends it itself, so that it does not outlive a lost connection."""
    if timeout is None:
        return ["sh", "-c", _PLAIN, "sh", *argv]
    return ["sh", "-c", _LIMITED, "sh", str(math.ceil(timeout) + 1), *argv]  # we give up first, and say so


def ended(rc: int) -> int:
    """A shell's exit status as Completed.rc: 128 + n, for a command that signal n ended, is -n."""
    return 128 - rc if 128 < rc < 160 else rc
