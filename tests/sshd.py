"""A real sshd on loopback with throw-away keys, for whoever tests against a machine over SSH."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

# bash reads ~/.bashrc at a command over SSH, unless it takes itself for not the first shell. Whatever a person has in it
# is no part of what is tested: pyenv takes seconds, and a lock that stays where it is killed.
NO_BASHRC = "SHLVL=1"
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def make_key(file: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", file.name, "-f", str(file)], check=True)
    return file


class Sshd:
    """One sshd in `folder`: `port`, the login `key`, its `known_hosts`, and `config`, an ssh_config that knows it.

    `around`: a command that ends by becoming the one behind it.
    """

    def __init__(
        self, folder: Path, *, host_key: Path | None = None, lines: tuple[str, ...] = (), around: tuple[str, ...] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)  # where Debian's sshd drops its privileges
        self.folder, self.around = folder, around
        self.port = free_port()
        self.user = getpass.getuser()
        self.host_key = host_key or make_key(folder / "host_key")
        self.key = folder / "key"
        if not self.key.exists():
            make_key(self.key)
        self.authorized = folder / "authorized_keys"
        self.authorized.write_bytes(self.key.with_suffix(".pub").read_bytes())
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text(self.known_line())
        self.config = folder / "ssh_config"
        self.config.write_text(
            f"Host machine\n  HostName 127.0.0.1\n  Port {self.port}\n  User {self.user}\n"
            f"Host *\n  IdentityFile {self.key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile none\n"
        )
        options = [
            "ListenAddress 127.0.0.1",
            f"Port {self.port}",
            f"HostKey {self.host_key}",
            f"AuthorizedKeysFile {self.authorized}",
            "PidFile none",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin yes",
            "MaxStartups 200",
            f"SetEnv {NO_BASHRC}",
            "Subsystem sftp internal-sftp",
            # A bash that sshd starts reads ~/.bashrc, unless it is inside of another: whatever stands there is not for tests.
            "SetEnv SHLVL=1",
        ]
        # sshd takes the first word on a matter.
        (folder / "sshd_config").write_text("\n".join([*lines, *options]) + "\n")
        self.log = folder / "sshd.log"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.around, SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        self._wait()

    def known_line(self, name: str | None = None) -> str:
        kind, blob = self.host_key.with_suffix(".pub").read_text().split()[:2]
        return f"{name or f'[127.0.0.1]:{self.port}'} {kind} {blob}\n"

    def stop(self) -> None:
        """Ends the sshd and the sessions it has."""
        for pid in (*self.children(), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def children(self) -> list[int]:
        """The processes of its sessions."""
        listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        parents = {int(pid): int(parent) for pid, parent in (line.split() for line in listed.splitlines())}
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found[1:]

    def freeze(self) -> None:
        """The machine falls silent: connections stay, nothing answers."""
        for pid in (self.process.pid, *self.children()):
            with contextlib.suppress(ProcessLookupError):  # a session may just have ended
                os.kill(pid, signal.SIGSTOP)

    def _wait(self) -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"sshd did not start: {self.log.read_text()}")
