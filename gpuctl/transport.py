"""Reaching a machine: one method, `run`. Local here; Ssh and Guest and Replay speak the same.

Commands are argument vectors; whoever needs a shell says `["sh", "-c", ...]` and quotes with `shlex`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

AGENTS = Path(__file__).parent / "agent"


class TransportError(Exception):
    """The machine could not be asked. The message is one line for a person: what, where, what to do."""


class Unreachable(TransportError):
    """No connection: name, network, refused. Worth trying again."""


class Refused(TransportError):
    """The machine answered and will not have us: host key, login, sudo. Never tried again."""


class TimedOut(TransportError):
    """The command did not end in time. It was told to stop."""


@dataclass(frozen=True)
class Completed:
    rc: int  # as a shell sees it for signals: negative signal number
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
        """Runs argv, gives it stdin, returns what it said. `timeout` in seconds.

        With `on_stdout`, output is handed over as it arrives and Completed.stdout is empty.
        A command that is not there is rc 127, as in a shell. Raises TransportError.
        """


class Local:
    """This machine."""

    def __init__(self, name: str = "local") -> None:
        self.name = name

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError:
            return Completed(127, b"", f"{argv[0]}: command not found".encode())
        except PermissionError:
            return Completed(126, b"", f"{argv[0]}: permission denied".encode())
        try:
            out, err = _talk(process, stdin, timeout, on_stdout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            for pipe in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]
        return Completed(process.wait(), out, err)


def _talk(
    process: subprocess.Popen[bytes],
    stdin: bytes,
    timeout: float | None,
    on_stdout: Callable[[bytes], None] | None,
) -> tuple[bytes, bytes]:
    """Feeds stdin and drains both outputs until they end; raises TimedOut."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = bytearray(), bytearray()
    deadline = None if timeout is None else time.monotonic() + timeout
    left = memoryview(stdin)
    with selectors.DefaultSelector() as ready:
        os.set_blocking(process.stdin.fileno(), False)
        ready.register(process.stdout, selectors.EVENT_READ, "out")
        ready.register(process.stderr, selectors.EVENT_READ, "err")
        if left:
            ready.register(process.stdin, selectors.EVENT_WRITE, "in")
        else:
            process.stdin.close()
        while any(key.data != "in" for key in ready.get_map().values()):
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = ready.select(wait)
            if not events and deadline is not None and time.monotonic() >= deadline:
                raise TimedOut(f"{process.args!r} did not end within {timeout:g} s")
            for key, _ in events:
                if key.data == "in":
                    try:
                        left = left[os.write(key.fd, left[:65536]) :]
                    except BrokenPipeError:
                        left = left[:0]
                    if not left:
                        ready.unregister(process.stdin)
                        with contextlib.suppress(BrokenPipeError):
                            process.stdin.close()
                    continue
                data = os.read(key.fd, 65536)
                if not data:
                    ready.unregister(key.fileobj)
                elif key.data == "err":
                    err += data
                elif on_stdout is not None:
                    on_stdout(data)
                else:
                    out += data
    return bytes(out), bytes(err)


# The first line of stdin says how long the program is, then comes the program, then the job it reads.
_BOOTSTRAP = (
    "import sys;b=sys.stdin.buffer;n=int(b.readline());"
    "exec(compile(b.read(n),sys.argv[1],'exec'),{'__name__':'__main__'})"
)


def agent(name: str, job: Mapping[str, Any], *, python: str = "python3") -> tuple[list[str], bytes]:
    """Command and stdin that run gpuctl/agent/<name>.py on a machine that has only python3.

    The program travels on stdin (an argument is capped at 128 KiB and shows in ps), the job follows it as JSON.
    """
    program = (AGENTS / f"{name}.py").read_bytes()
    stdin = f"{len(program)}\n".encode() + program + json.dumps(job).encode() + b"\n"
    return [python, "-c", _BOOTSTRAP, f"{name}.py"], stdin
