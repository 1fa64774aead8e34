"""A port of a machine on this one: `Tunnel`. For looking only: what is timed through it is timed wrongly.

Each connection becomes one process of OpenSSH (its own configuration, host keys checked) with a bridge at its far end,
so that a guest without sshd is reached through its node's `pct exec` all the same, and no forwarding has to be allowed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from types import TracebackType

from gpuctl.transport.contract import Refused, Transport
from gpuctl.transport.guest import Guest
from gpuctl.transport.local import Local
from gpuctl.transport.ssh import Ssh

# Between its stdin and stdout and a port of the machine it runs on.
_BRIDGE = """
import os, select, socket, sys
try: s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
except OSError as e: sys.exit("%s:%s: %s" % (sys.argv[1], sys.argv[2], e.strerror or e))
s.settimeout(None)
reading = [0, s]
while s in reading:
    for ready in select.select(reading, [], [])[0]:
        data = os.read(0, 65536) if ready == 0 else s.recv(65536)
        if ready == 0 and data: s.sendall(data)
        elif ready == 0: reading.remove(0); s.shutdown(socket.SHUT_WR)
        elif not data: reading.remove(s)
        while ready != 0 and data: data = data[os.write(1, data):]
"""


def command(way: Transport, argv: Sequence[str]) -> list[str]:
    """The argument vector that runs argv on the machine at the end of `way`, its stdin and stdout ours."""
    if isinstance(way, Local):
        return list(argv)
    if isinstance(way, Ssh):
        return way.openssh(argv)
    if isinstance(way, Guest):
        return command(way.node, ["pct", "exec", str(way.vmid), "--", *argv])
    raise Refused(f"{way.name}: there is no tunnel to a machine that is reached like this")


class Tunnel:
    """While it is entered, `port` on 127.0.0.1 is `there` (host, port) as the machine sees it."""

    def __init__(self, way: Transport, there: tuple[str, int], port: int = 0) -> None:
        host, number = there
        self._argv = command(way, ["python3", "-c", _BRIDGE, host, str(number)])
        self._name = way.name
        self._asked = port
        self._running: list[subprocess.Popen[bytes]] = []
        self.port = 0
        self.said = ""  # the last words of a bridge that could not be made

    def __enter__(self) -> Tunnel:
        try:
            self._server = socket.create_server(("127.0.0.1", self._asked))
        except OSError as error:
            raise Refused(f"port {self._asked} here: {os.strerror(error.errno or 0)}; --port names another") from None
        self.port = self._server.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name=f"tunnel to {self._name}", daemon=True)
        self._accepting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # ends accept(2) in the other thread; close alone does not
        self._accepting.join(10)
        self._server.close()
        for process in self._running:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                ours, _ = self._server.accept()
                with ours:
                    process = subprocess.Popen(
                        self._argv, stdin=ours.fileno(), stdout=ours.fileno(), stderr=subprocess.PIPE
                    )
                self._running = [one for one in self._running if one.poll() is None] + [process]
                threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr:
            words = process.stderr.read().decode("utf-8", "replace").strip().splitlines()
        if words:
            self.said = f"{self._name}: {words[-1]}"
