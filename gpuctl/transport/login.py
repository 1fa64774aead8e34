"""Opening one SSH hop on Fabric: host key checked, logged in by key, every step with a time limit.

What goes wrong becomes one line. Trying again helps with Unreachable; Refused needs a person.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpuctl.transport.contract import Refused, Unreachable
from gpuctl.transport.hops import Hop, KnownKey, known_keys


def connect(hop: Hop, through: Any | None, timeout: float) -> Any:
    """An open fabric.Connection to `hop`, through another one or directly. Raises Unreachable and Refused.

    `timeout` in seconds holds for each step: TCP, banner and key exchange, login, opening a channel.
    """
    import fabric
    import paramiko

    _silence()
    known = known_keys(hop)
    options = {
        "banner_timeout": timeout,
        "auth_timeout": timeout,
        "channel_timeout": timeout,
        "auth_strategy": _Keys(hop),
        "transport_factory": _asking_for(known),
    }
    connection = fabric.Connection(
        hop.host,
        user=hop.user,
        port=hop.port,
        # Neither ssh_config nor fabric.yml: OpenSSH was asked already (hops.py).
        config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
        gateway=through if through is not None else False,
        connect_timeout=max(1, round(timeout)),
        connect_kwargs=options,
    )
    connection.client.set_missing_host_key_policy(_OnlyKnown(hop, known))
    try:
        if hop.proxy_command is not None:
            options["sock"] = _Piped.to(hop.proxy_command, timeout)
        connection.open()
    except BaseException as error:
        spoke = bool(getattr(connection.client.get_transport(), "remote_version", ""))  # the server said its version
        # Without this the thread of a half-open connection lives on.
        with contextlib.suppress(Exception):
            connection.client.close()
        if isinstance(error, paramiko.SSHException | OSError | EOFError):
            raise _told(hop, through, error, spoke=spoke) from None
        raise
    return connection


def _told(hop: Hop, through: Any | None, error: Exception, *, spoke: bool) -> Unreachable | Refused:
    """The error in words, as what it means for trying again. `spoke`: an SSH server said its version before."""
    import paramiko

    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        error = next(iter(error.errors.values()))
    if isinstance(error, paramiko.ChannelException) and through is not None:
        if error.code == 1:  # RFC 4254 5.1: administratively prohibited
            return Refused(f"jump host {through.host} does not allow connections to {hop.host}:{hop.port}")
        return Unreachable(f"jump host {through.host} does not reach {hop.host}:{hop.port}")
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        return Refused(f"{hop}: no common way to talk SSH: {error}")
    if isinstance(error, socket.gaierror):
        return Unreachable(f"{hop}: the name {hop.host} cannot be resolved ({error.strerror})")
    # paramiko gives up waiting for the key exchange: at the same moment as for the version, where nothing was said
    unfinished = str(error).startswith("No existing session")
    if isinstance(error, TimeoutError) or (unfinished and spoke):
        return Unreachable(f"{hop}: no answer in time")
    if isinstance(error, OSError):
        return Unreachable(f"{hop}: {error.strerror or error}")
    if isinstance(error, EOFError) or unfinished or re.search("banner|protocol version", str(error)):
        what = "the proxy command" if hop.proxy_command else "the machine"
        return Unreachable(f"{hop}: {what} answered, but no SSH server spoke")
    return Unreachable(f"{hop}: {str(error).strip().rstrip('.') or type(error).__name__}")


class _OnlyKnown:
    """paramiko's hook for host keys. Its own store is left empty, so that each key comes here.

    paramiko's store knows neither patterns nor revoked keys, and of two known keys of one type believes only the first.
    """

    def __init__(self, hop: Hop, known: Sequence[tuple[str, KnownKey]]) -> None:
        self._hop = hop
        self._known = known

    def missing_host_key(self, _client: Any, _hostname: str, key: Any) -> None:
        shown, proper = key.get_base64(), self._hop.key_names[0]
        here = [one for name, one in self._known if name == proper]
        same = [one for _, one in self._known if one.base64 == shown]
        kind = key.get_name()
        offered = f"{kind} {_fingerprint(key)}"
        look = f"ssh-keygen -lf /etc/ssh/ssh_host_{kind.removeprefix('ssh-').split('-')[0]}_key.pub"
        if revoked := next((one for one in same if one.revoked), None):
            raise Refused(
                f"{self._hop}: its host key {offered} is revoked in {revoked.file} line {revoked.line}: do not log in"
            )
        if same:
            return
        if not here:
            files = " ".join(file for file in self._hop.known_hosts if Path(file).exists()) or " or ".join(
                self._hop.known_hosts[:1]
            )
            raise Refused(
                f"{self._hop}: host key {offered} is not known (no line for {proper} in {files}). "
                f"Compare with `{look}` on its console, then log in once by hand: {self._by_hand()}"
            )
        where = next((one for one in here if one.type == kind), here[0])
        raise Refused(
            f"{self._hop}: the host key HAS CHANGED: it shows {offered}, {where.file} line {where.line} has another. "
            f"Somebody may be listening, or the machine was reinstalled: compare with `{look}` on its console; "
            f"if it is right: ssh-keygen -f {shlex.quote(where.file)} -R {shlex.quote(proper)}, then {self._by_hand()}"
        )

    def _by_hand(self) -> str:
        port = f" -p {self._hop.port}" if self._hop.port != 22 else ""
        return f"ssh{port} {self._hop.user}@{self._hop.host}"


def _fingerprint(key: Any) -> str:
    return str(key.fingerprint)


def _asking_for(known: Sequence[tuple[str, KnownKey]]) -> Any:
    """Makes paramiko's transport ask first for the types of host key that are known, as OpenSSH does."""
    import paramiko

    types = {one.type for _, one in known}

    def make(sock: Any, **options: Any) -> Any:
        transport = paramiko.Transport(sock, **options)
        security = transport.get_security_options()
        known_first = sorted(
            security.key_types, key=lambda kind: ("ssh-rsa" if kind.startswith("rsa-sha2") else kind) not in types
        )
        security.key_types = known_first
        return transport

    return make


class _Keys:
    """paramiko's hook for logging in: the keys of the hop, then those of the agent."""

    def __init__(self, hop: Hop) -> None:
        self._hop = hop

    def authenticate(self, transport: Any) -> None:
        import paramiko

        refused: list[str] = []
        notes: list[str] = []
        with contextlib.ExitStack() as stack:
            for label, key in self._offers(stack, notes):
                try:
                    if not (more := transport.auth_publickey(self._hop.user, key)):
                        return
                    raise Refused(
                        f"{self._hop}: after the key it also asks for {', '.join(more)}; gpuctl has only keys"
                    )
                except paramiko.AuthenticationException as error:
                    if "timeout" in str(error).lower():
                        raise TimeoutError from None
                    if not transport.is_active():
                        if refused:
                            raise Refused(
                                f"{self._hop}: it hung up after {len(refused) + 1} keys (MaxAuthTries): name the right "
                                "one (IdentityFile, IdentitiesOnly yes)"
                            ) from None
                        raise EOFError from None
                    refused.append(label)
        tried = f"it refused {', '.join(dict.fromkeys(refused))}" if refused else "there is no key to offer"
        raise Refused("; ".join([f"{self._hop}: login refused: {tried}", *notes]))

    def _offers(self, stack: contextlib.ExitStack, notes: list[str]) -> Iterator[tuple[str, Any]]:
        """(what to call it, key) in the order to try: files named, the agent's of those names, the agent's others."""
        import paramiko
        from cryptography.exceptions import UnsupportedAlgorithm

        named = set()
        for file in self._hop.keys:
            try:
                key = paramiko.PKey.from_path(file)
            except FileNotFoundError:
                continue
            except OSError as error:
                notes.append(f"{file} cannot be read ({error.strerror})")
                continue
            except (
                TypeError,
                ValueError,
                paramiko.SSHException,
                UnsupportedAlgorithm,
            ) as error:
                locked = "encrypted" in str(error) or "assword" in str(error)
                notes.append(f"{file} {'needs its passphrase: ssh-add ' + file if locked else 'is no key we can read'}")
                if (public := _public(f"{file}.pub")) is not None:
                    named.add(public)
                continue
            named.add(key.asbytes())
            yield file, key
        agent = _agent(self._hop.agent, stack)
        yield from ((f"{_called(key)} of the agent", key) for key in agent if key.asbytes() in named)
        if not self._hop.only_keys:
            yield from ((f"{_called(key)} of the agent", key) for key in agent if key.asbytes() not in named)


def _called(key: Any) -> str:
    return key.comment or _fingerprint(key)


def _public(file: str) -> bytes | None:
    import base64

    with contextlib.suppress(OSError, ValueError, IndexError):
        return base64.b64decode(Path(file).read_text(encoding="utf-8").split()[1])
    return None


def _agent(where: str | None, stack: contextlib.ExitStack) -> Sequence[Any]:
    """The keys of the ssh-agent; none when there is no agent or it does not answer."""
    import paramiko

    path = os.environ.get("SSH_AUTH_SOCK", "") if where == "SSH_AUTH_SOCK" else os.path.expandvars(where or "")
    if not path:
        return ()
    agent = paramiko.agent.AgentSSH()
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stack.callback(channel.close)
    channel.settimeout(10)
    try:
        channel.connect(path)
        agent._connect(channel)  # paramiko.Agent does the same, but only for the socket in the environment
    except (OSError, paramiko.SSHException):
        return ()
    keys: Sequence[Any] = agent.get_keys()
    return keys


class _Piped(socket.socket):
    """Our end of a proxy command. (paramiko's own ProxyCommand spins for ever when the command ends.)"""

    _process: subprocess.Popen[bytes]

    @classmethod
    def to(cls, command: str, timeout: float) -> _Piped:
        ours, its = socket.socketpair()
        with its:
            process = subprocess.Popen(
                ["sh", "-c", f"exec {command}"],
                stdin=its.fileno(),
                stdout=its.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # no terminal to ask questions on, and not ended by our Ctrl-C
            )
        piped = cls(fileno=ours.detach())
        piped._process = process
        piped.settimeout(timeout)
        return piped

    def close(self) -> None:
        super().close()
        self._process.kill()
        self._process.wait()


def _silence() -> None:
    """paramiko writes the tracebacks of its threads to stderr unless logging is set up."""
    logger = logging.getLogger("paramiko")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
