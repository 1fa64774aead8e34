"""Starting, watching, asking and stopping one server on a machine, through its transport.

`Units` are systemd's; `Processes` are for machines without it (agent/supervise.py keeps the server there).
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuctl.transport import Completed, Transport, TransportError, agent

PROGRESS_BYTES = 1 << 20
FOLDER = "~/.local/state/gpuctl/servers"  # on the machine: state, exit status and log of each server


class SupervisionError(Exception):
    """The server could not be started, asked or stopped. One line."""


class NoRoom(SupervisionError):
    """A disk there is full."""


@dataclass(frozen=True)
class UnitState:
    """A server as its machine knows it. `start` is in clock ticks since boot: pid and start name one process."""

    unit: str
    owner: str | None
    pid: int
    start: int
    boot: str
    running: bool
    exit_status: int | None = None
    signal: str | None = None


@dataclass(frozen=True)
class Listener:
    """Who listens on a port. `unit` is set when it is a server of ours."""

    port: int
    pid: int | None
    command: str | None
    unit: str | None


@dataclass(frozen=True)
class Start:
    """What is started, and as whose. `secrets`: environment variable -> file on the machine that holds the value."""

    unit: str
    argv: Sequence[str]
    env: Mapping[str, str]
    owner: str  # the campaign
    secrets: Mapping[str, str] = field(default_factory=dict)


def _state(answer: Mapping[str, Any]) -> UnitState:
    ended = answer.get("exit") or {}
    return UnitState(
        answer["unit"],
        answer.get("owner"),
        answer["pid"],
        answer["start"],
        answer["boot"],
        bool(answer["running"]),
        ended.get("status"),
        ended.get("signal"),
    )


@dataclass
class Watch:
    """Follows one server until it ends: its log, its signs of life, its health, its end. Ends when closed."""

    log_tail: deque[str] = field(default_factory=lambda: deque(maxlen=400))
    ready: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    exit: Mapping[str, Any] | None = None
    lost: str | None = None  # why the watching itself broke off
    progress_at: float = 0.0  # monotonic time of the last sign of life
    health: Any = None
    _closed: threading.Event = field(default_factory=threading.Event)
    _life: Mapping[str, Any] | None = None  # at the last progress
    _partial: bytes = b""
    _line: str = ""

    def close(self) -> None:
        self._closed.set()

    def take(self, data: bytes, on_log: Callable[[str], None]) -> None:
        if self._closed.is_set():
            raise _Closed
        self._partial += data
        *lines, self._partial = self._partial.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "log" in message:
                self.progress_at = time.monotonic()
                on_log(message["log"])
                text = self._line + message["log"]
                *whole, self._line = text.split("\n")
                self.log_tail.extend(whole)
            elif "exit" in message:
                if self._line:
                    self.log_tail.append(self._line)
                    self._line = ""
                self.exit = message["exit"] or {}
                self.ended.set()
            elif "beat" in message:
                self._judge(message["beat"])
                if message.get("health") is not None:
                    self.health = message["health"]
                    if self.health == 200:
                        self.ready.set()

    def _judge(self, beat: Mapping[str, Any]) -> None:
        """Reading, growing and processes that come or go are progress. Computing is not: a collective that waits for a
        rank in vain computes at full speed. Reads and growth count from a mebibyte on: an idle interpreter has some.
        """
        if not beat:
            return
        then = self._life
        if (
            then is None
            or beat["read_bytes"] - then["read_bytes"] >= PROGRESS_BYTES
            or beat["resident_bytes"] - then["resident_bytes"] >= PROGRESS_BYTES
            or beat["pids"] != then["pids"]
        ):
            self.progress_at = time.monotonic()
            self._life = beat


class _Closed(Exception):
    """Ends the watching from inside the transport."""


class Supervisor:
    """Servers of one machine. What differs between processes and units is in the agent; `start` differs here."""

    systemd = False
    killed_s: float = 60  # what is killed may take that long: the kernel frees hundreds of GiB of pinned memory

    def __init__(self, transport: Transport, folder: str = FOLDER, *, python: str = "python3") -> None:
        self.transport = transport
        self.folder = folder
        self.python = python

    def _job(self, **job: Any) -> tuple[list[str], bytes]:
        return agent("supervise", {"dir": self.folder, "systemd": self.systemd, **job}, python=self.python)

    def _do(self, timeout: float, **job: Any) -> dict[str, Any]:
        command, stdin = self._job(**job)
        done = self.transport.run(command, stdin=stdin, timeout=timeout)
        return _answer(done, self.transport.name)

    def start(self, server: Start) -> UnitState:
        """Starts it and returns as soon as it runs. Raises SupervisionError when it cannot even be executed."""
        raise NotImplementedError

    def status(self, ports: Sequence[int] = ()) -> tuple[list[UnitState], dict[int, Listener]]:
        """Every server known there, and who listens on `ports`."""
        answer = self._do(30, op="status", ports=list(ports))
        listening = {
            int(port): Listener(int(port), who["pid"], who["command"], who["unit"])
            for port, who in answer["listeners"].items()
        }
        return [_state(unit) for unit in answer["units"]], listening

    def owns(self, listener: Listener, unit: str) -> bool:
        """Whether it is the server `unit` (any of its processes) that listens."""
        return listener.unit is not None and listener.unit.rsplit("/", 1)[-1] == unit

    def stop(self, unit: str, grace_s: float = 10) -> UnitState | None:
        """Ends it and all it started; returns how it ended. Raises SupervisionError when something of it stays."""
        answer = self._do(self._stopping_s(grace_s), op="stop", unit=unit, grace_s=grace_s, killed_s=self.killed_s)
        for process in answer.get("left", ()):
            raise SupervisionError(_undying(process, self.transport.name))
        return _state(answer["stopped"]) if answer.get("stopped") else None

    def _stopping_s(self, grace_s: float) -> float:
        """How long a stop may take until something is wrong with it."""
        return grace_s + self.killed_s + 30

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """HTTP requests sent from that machine: each answer has status and body, or error."""
        patience = sum(float(request.get("timeout_s", 10)) for request in requests)
        answers: list[dict[str, Any]] = self._do(patience + 30, op="ask", requests=list(requests))["answers"]
        return answers

    def watch(self, unit: str, health: Sequence[str], on_log: Callable[[str], None]) -> Watch:
        """Follows the server in a thread. `health`: URLs of which the first known one answers 200 when ready."""
        watching = Watch(progress_at=time.monotonic())
        command, stdin = self._job(op="watch", unit=unit, health=list(health))

        def follow() -> None:
            try:
                done = self.transport.run(command, stdin=stdin, on_stdout=lambda data: watching.take(data, on_log))
                if not watching.ended.is_set():
                    watching.lost = done.stderr.decode("utf-8", "replace").strip() or f"exit status {done.rc}"
            except _Closed:
                return
            except (TransportError, ValueError, OSError) as error:
                watching.lost = str(error)
            finally:
                watching.ended.set()

        threading.Thread(target=follow, name=f"watch {unit}", daemon=True).start()
        return watching


class Processes(Supervisor):
    """Servers as supervised processes of the login user."""

    def start(self, server: Start) -> UnitState:
        answer = self._do(
            30,
            op="start",
            unit=server.unit,
            argv=list(server.argv),
            env=dict(server.env),
            owner=server.owner,
            secrets=dict(server.secrets),
        )
        return _started(answer)


class Units(Supervisor):
    """Servers as units of systemd. `place` puts the unit file there: a change of the machine, so Ansible's."""

    systemd = True

    def __init__(self, transport: Transport, place: Callable[[Start], None], *, python: str = "python3") -> None:
        super().__init__(transport, python=python)
        self.place = place

    def _stopping_s(self, grace_s: float) -> float:
        return 150  # the grace is the unit's own, TimeoutStopSec, and a killed server gives back its memory for a while

    def start(self, server: Start) -> UnitState:
        self.place(server)
        return _started(self._do(150, op="start", unit=server.unit))


def _started(answer: Mapping[str, Any]) -> UnitState:
    if "error" in answer:
        raise SupervisionError(str(answer["error"]))
    return _state({**answer["started"], "running": True})


def _undying(process: Mapping[str, Any], machine: str) -> str:
    what = f"{machine}: process {process['pid']} ({process['name']}) does not end though it was killed"
    if process["state"] != "D":
        return f"{what} (state {process['state']}); the same command again, or a restart of the machine"
    waits = f", waits in {process['waits']}" if process["waits"] else ""
    return f"{what}: it hangs in the kernel (state D{waits}), which only a restart of the machine ends; see dmesg"


def _answer(done: Completed, machine: str) -> dict[str, Any]:
    if done.rc == 127:
        raise SupervisionError(f"{machine}: no python3 there; install it (apt install python3-minimal)")
    lines = done.text.strip().splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise SupervisionError(f"{machine}: {words[-1] if words else f'exit status {done.rc}'}") from None
    if not isinstance(answer, dict):
        raise SupervisionError(f"{machine}: not understood: {lines[-1][:200]}")
    return answer
