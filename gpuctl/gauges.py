"""What a server's GPUs drew and held while it was measured: agent/gauges.py beside it, and what its readings say.

`Gauges` follows the GPUs of a machine in a thread from before a server starts until after it stopped. Which of them are
the server's is told by their memory: those where more of it is in use than at the least that was seen. (Process numbers
would tell too, but not in a container.) What cannot be known is left out, never guessed: no NVIDIA GPU, too short
a time, a server that was there before.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType

from gpuctl.transport import Transport, TransportError, agent

EVERY_S = 0.2
SHORTEST_S = 1.0  # a shorter time has too few readings, and the driver's own are some 0.1 s old
OURS_BYTES = 512 << 20  # a CUDA context alone takes as much; a desktop or a monitor comes and goes with less
FREE_WITHIN_S = 60.0  # a driver takes some seconds to take back what a killed process held
PATIENCE_S = 2.0  # for readings that are still on their way


@dataclass(frozen=True)
class Reading:
    """The GPUs at one moment, in the order of the driver. None: it does not say."""

    t: float  # CLOCK_MONOTONIC of the machine, in seconds
    mw: tuple[int | None, ...]
    mj: tuple[int | None, ...]
    used: tuple[int | None, ...]


def between(readings: Sequence[Reading], start: float, end: float) -> dict[str, float]:
    """Metrics of the time from start to end, for the GPUs whose memory grew: `gpu_power_w` (the sum of their mean
    powers), `gpu_memory_bytes` (the most they held together). Pure; empty where it cannot be told.

    Power is the driver's energy counter, read between readings by straight lines; where a GPU has none, the mean of its
    power over the time.
    """
    inside = [reading for reading in readings if start <= reading.t <= end]
    before = max((reading for reading in readings if reading.t < start), key=lambda r: r.t, default=None)
    after = min((reading for reading in readings if reading.t > end), key=lambda r: r.t, default=None)
    if end - start < SHORTEST_S or len(inside) < 2 or before is None or after is None:
        return {}
    ours = [
        gpu
        for gpu in range(len(inside[0].used))
        if (least := min((u for r in readings if (u := r.used[gpu]) is not None), default=None)) is not None
        and max((u for r in inside if (u := r.used[gpu]) is not None), default=0) - least >= OURS_BYTES
    ]
    if not ours:
        return {}
    found = {"gpu_memory_bytes": float(max(sum(r.used[gpu] or 0 for gpu in ours) for r in inside))}
    powers = [_power_w([before, *inside, after], gpu, start, end) for gpu in ours]
    known = [power for power in powers if power is not None]
    if len(known) == len(powers):
        found["gpu_power_w"] = sum(known)
    return found


def _power_w(readings: Sequence[Reading], gpu: int, start: float, end: float) -> float | None:
    energy = [(r.t, mj / 1e3) for r in readings if (mj := r.mj[gpu]) is not None]
    if len(energy) == len(readings) and all(a[1] <= b[1] for a, b in pairwise(energy)):
        joules = _at(energy, end) - _at(energy, start)
        if joules > 0:
            return joules / (end - start)
    power = [(r.t, mw / 1e3) for r in readings if (mw := r.mw[gpu]) is not None]
    if len(power) < len(readings):
        return None
    inner = [(start, _at(power, start)), *((t, w) for t, w in power if start < t < end), (end, _at(power, end))]
    return sum((a[1] + b[1]) / 2 * (b[0] - a[0]) for a, b in pairwise(inner)) / (end - start)


def _at(curve: Sequence[tuple[float, float]], t: float) -> float:
    """The value at t, on straight lines between the points around it."""
    for (t0, v0), (t1, v1) in pairwise(curve):
        if t0 <= t <= t1 and t1 > t0:
            return v0 + (v1 - v0) * (t - t0) / (t1 - t0)
    return curve[-1][1]


def _held(readings: Sequence[Reading]) -> dict[int, int]:
    """What each GPU holds beyond the least that was seen of it, where that is a server's."""
    found = {}
    for gpu, now in enumerate(readings[-1].used):
        least = min((used for reading in readings if (used := reading.used[gpu]) is not None), default=None)
        if now is not None and least is not None and now - least >= OURS_BYTES:
            found[gpu] = now - least
    return found


@dataclass
class Gauges:
    """Follows the GPUs of a machine while it is entered. `whole`: all GPUs of the server are there; of one that runs on
    other machines as well, power and memory here are not the server's."""

    transport: Transport
    python: str = "python3"
    whole: bool = True
    readings: list[Reading] = field(default_factory=list)
    _closed: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)  # nothing more will come
    _partial: bytes = b""

    def __enter__(self) -> Gauges:
        threading.Thread(target=self._follow, name=f"gauges of {self.transport.name}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()

    def during(self, rows: Sequence[Mapping[str, object]]) -> dict[str, float]:
        """`between`, for the time from the first request to the last chunk of a repetition (rows of agent/load.py)."""
        sent = [t for row in rows if isinstance(t := row.get("t_request"), float)]
        chunks = [c[-1] for row in rows if isinstance(c := row.get("t_chunks"), Sequence) and c]
        if not sent or not chunks or not self.whole:
            return {}
        start, end = min(sent), max(chunks)
        until = time.monotonic() + PATIENCE_S
        while not self._over.is_set() and time.monotonic() < until:
            if self.readings and self.readings[-1].t > end:
                break
            self._over.wait(0.05)
        return between(tuple(self.readings), start, end)

    def wait_until_free(self, within_s: float = FREE_WITHIN_S) -> dict[int, int]:
        """Waits until no GPU holds more than at the least that was seen. What is held all the same: GPU -> bytes."""
        seen, until = len(self.readings), time.monotonic() + within_s
        held: dict[int, int] = {}
        while True:
            if len(self.readings) > seen:
                held = _held(self.readings)
                if not held:
                    return {}
            if self._over.wait(0.05) or time.monotonic() > until:
                return held

    def _follow(self) -> None:
        command, stdin = agent("gauges", {"every_s": EVERY_S}, python=self.python)
        try:
            self.transport.run(command, stdin=stdin, on_stdout=self._take)
        except (_Closed, TransportError, ValueError, LookupError, OSError):
            pass  # a machine that goes away is seen by those who measure; without readings there is no number
        finally:
            self._over.set()

    def _take(self, data: bytes) -> None:
        if self._closed.is_set():
            raise _Closed
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "t" in told:
                self.readings.append(Reading(told["t"], tuple(told["mw"]), tuple(told["mj"]), tuple(told["used"])))


class _Closed(Exception):
    """Ends the following from inside the transport."""
