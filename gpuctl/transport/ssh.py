"""A machine over SSH: `Ssh`, on Fabric.

Three things Fabric leaves open are closed here and in login.py. Host keys are checked on every hop against the
known_hosts files that OpenSSH would use, and never added. Input goes through the raw channel, since
`run(in_stream=...)` feeds one byte per 10 ms. Every step of connecting has a time limit, and a machine that falls
silent for good is noticed.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpuctl.transport import hops, login
from gpuctl.transport.contract import Completed, Refused, TimedOut, Unreachable, brief, ended, limited

CLOSING_S = 0.2  # for a thread that opens a session on a connection that is there
SILENCE = 30.0  # seconds without a byte after which the machine is asked whether it is still there


class Ssh:
    """A machine over SSH. Connects at the first run and stays connected until `close`.

    `options` are arguments of ssh (`-o`, `-J` ...), as in Ansible's ansible_ssh_common_args; `config` is a file in
    place of ~/.ssh/config. `sudo`: commands run as root through `sudo -n` when the login is another user's.
    `connect_timeout` in seconds, for each step of each hop. Several threads may run commands at once.
    """

    def __init__(
        self,
        name: str,
        host: str,
        *,
        port: int | None = None,
        user: str | None = None,
        key: str | None = None,
        config: str | None = None,
        options: Sequence[str] = (),
        sudo: bool = False,
        connect_timeout: float = 10.0,
    ) -> None:
        self.name = name
        self._sudo = sudo
        self._connect_timeout = connect_timeout
        self._config = config
        self._arguments = [
            *options,
            *(["-p", str(port)] if port else []),
            *(["-l", user] if user else []),
            *(["-i", key] if key else []),
            "--",
            host,
        ]
        self._lock = threading.Lock()
        self._unwanted = False  # closed while a thread connects
        self._chain: list[Any] = []  # open connections, the nearest hop first

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        import paramiko

        connection, channel = self._channel()
        sudo = self._sudo and connection.user != "root"
        try:
            channel.exec_command(_line(argv, timeout, sudo))
            threading.Thread(target=_feed, args=(channel, stdin), name=f"stdin of {self.name}", daemon=True).start()
            done = _drain(channel, None if timeout is None else time.monotonic() + timeout, on_stdout)
        except _TooLong:
            raise TimedOut(f"{self.name}: {brief(argv)} did not end within {timeout:g} s") from None
        except (OSError, EOFError, paramiko.SSHException) as error:
            self._drop(connection)
            why = f" ({error})" if str(error) else ""
            raise Unreachable(f"{self.name}: the connection broke while `{brief(argv)}` ran{why}") from None
        finally:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                channel.close()
        return self._by_sudo(done, connection.user) if sudo else done

    def _by_sudo(self, done: Completed, user: str) -> Completed:
        """What a command ended with that sudo was to run; raises Refused where sudo did not get that far."""
        said = next(iter(done.stderr.decode("utf-8", "replace").splitlines()), "")
        if done.rc == 1 and said.startswith("sudo:"):
            if said.endswith(": command not found"):  # not sudo's fault: as a shell says it
                return Completed(127, done.stdout, done.stderr)
            raise Refused(f"{self.name}: {user} may not become root ({said}): allow it without a password")
        if done.rc == 127 and "sudo" in said and not said.startswith("sudo:"):
            raise Refused(f"{self.name}: there is no sudo for {user} to become root by: install it, or log in as root")
        return done

    def openssh(self, argv: Sequence[str]) -> list[str]:
        """The same login as a command line of OpenSSH that runs argv: known host keys only, no questions."""
        strict = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-T"]
        words = shlex.join([*(["sudo", "-n", "-H", "--"] if self._sudo else []), *argv])
        return ["ssh", *(["-F", self._config] if self._config else []), *strict, *self._arguments, words]

    def close(self) -> None:
        self._unwanted = True
        if self._lock.acquire(timeout=CLOSING_S):  # else a thread is connecting, which may take long, and closes it
            chain, self._chain, self._unwanted = self._chain, [], False
            self._lock.release()
            _close(chain)

    def _drop(self, connection: Any) -> None:
        """Closes what broke, and not what another thread has opened since."""
        if self._lock.acquire(timeout=CLOSING_S):
            broken = self._chain if self._chain[-1:] == [connection] else []
            self._chain = [] if broken else self._chain
            self._lock.release()
            _close(broken)

    def _channel(self) -> tuple[Any, Any]:
        """A fresh session channel, on the open connection or on a new one."""
        import paramiko

        with self._lock:
            if self._chain:
                try:
                    return self._chain[-1], self._chain[-1].create_session()
                except paramiko.ChannelException as error:
                    raise Unreachable(f"{self.name}: no further session allowed there ({error.text})") from None
                except (OSError, EOFError, paramiko.SSHException):
                    # It broke while nobody was looking; nothing was sent, so a new one may be tried.
                    _close(self._chain)
                    self._chain = []
            self._unwanted = False
            self._chain = self._connect()
            if self._unwanted:
                _close(self._chain)
                self._chain = []
                raise Unreachable(f"{self.name}: closed while it connected")
            try:
                return self._chain[-1], self._chain[-1].create_session()
            except (OSError, EOFError, paramiko.SSHException) as error:
                _close(self._chain)
                self._chain = []
                raise Unreachable(f"{self.name}: logged in, but no session opens: {error}") from None

    def _connect(self) -> list[Any]:
        opened: list[Any] = []
        try:
            for hop in hops.chain(self._arguments, self._config):
                opened.append(login.connect(hop, opened[-1] if opened else None, self._connect_timeout))
        except (Unreachable, Refused) as error:
            _close(opened)
            raise type(error)(f"{self.name}: {error}") from None
        except BaseException:
            _close(opened)
            raise
        return opened


class _TooLong(Exception):
    """The command's time is up."""


def _close(chain: Sequence[Any]) -> None:
    for connection in reversed(chain):
        with contextlib.suppress(Exception):
            connection.close()


def _line(argv: Sequence[str], timeout: float | None, sudo: bool) -> str:
    """The one string that sshd hands to the login shell."""
    return shlex.join([*(["sudo", "-n", "-H", "--"] if sudo else []), *limited(argv, timeout)])


def _feed(channel: Any, stdin: bytes) -> None:
    # The command may not want its input, and end; the connection may break: the other thread sees both.
    with contextlib.suppress(OSError, EOFError):
        for start in range(0, len(stdin), 65536):
            channel.sendall(stdin[start : start + 65536])
        channel.shutdown_write()


def _drain(channel: Any, deadline: float | None, on_stdout: Callable[[bytes], None] | None) -> Completed:
    """Reads both outputs until they end, then the exit status. Raises _TooLong, EOFError."""
    from paramiko import pipe

    out, err = bytearray(), bytearray()
    # Not channel.fileno(): closing the channel while data comes in lets paramiko write into a closed descriptor.
    ready = threading.Event()
    for buffer, event in zip((channel.in_buffer, channel.in_stderr_buffer), pipe.make_or_pipe(ready), strict=True):
        buffer.set_event(event)
    heard = time.monotonic()
    while True:
        over = channel.eof_received or channel.closed
        quiet = True
        if channel.recv_ready():
            quiet = False
            data = channel.recv(65536)
            on_stdout(data) if on_stdout is not None else out.extend(data)
        if channel.recv_stderr_ready():
            quiet = False
            err.extend(channel.recv_stderr(65536))
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            raise _TooLong
        if not quiet:
            heard = now
            continue
        if over and channel.status_event.is_set():
            break
        if now - heard >= SILENCE:
            _ask_for_life(channel)
            heard = time.monotonic()
        wait = max(0.0, min(heard + SILENCE, deadline if deadline is not None else math.inf) - now)
        if over:
            channel.status_event.wait(wait)
        else:
            ready.wait(min(wait, 1.0))  # two buffers share it, unlocked: a mark may get lost
    rc = channel.exit_status
    if rc < 0:
        raise EOFError("no exit status came")
    return Completed(ended(rc), bytes(out), bytes(err))


def _ask_for_life(channel: Any) -> None:
    """Opens and closes a session: a refusal is an answer too, only silence is not. Raises SSHException, EOFError."""
    import paramiko

    with contextlib.suppress(paramiko.ChannelException):
        channel.get_transport().open_session().close()
