"""This machine as a machine: `Local`."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from gpuctl.transport.contract import Completed, TimedOut, brief


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
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            out, err = _talk(process, stdin, deadline, on_stdout)
            # It may have closed its outputs and run on.
            process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            _kill(process)
            raise TimedOut(f"{self.name}: {brief(argv)} did not end within {timeout:g} s") from None
        except BaseException:
            _kill(process)
            raise
        finally:
            for pipe in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]
        return Completed(process.returncode, out, err)

    def close(self) -> None:
        """Nothing is held."""


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process stuck in a driver does not die of SIGKILL; waiting for it would hang us as well.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2)


def _talk(
    process: subprocess.Popen[bytes],
    stdin: bytes,
    deadline: float | None,
    on_stdout: Callable[[bytes], None] | None,
) -> tuple[bytes, bytes]:
    """Feeds stdin and drains both outputs until they end; raises TimeoutError."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = bytearray(), bytearray()
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
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
            for key, _ in ready.select(None if deadline is None else deadline - time.monotonic()):
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
