"""Many machines at once: `each`."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from gpuctl.transport.contract import TimedOut, Transport, TransportError

T = TypeVar("T")


def each(
    transports: Sequence[Transport],
    work: Callable[[Transport], T],
    *,
    limit: int = 16,
    timeout: float = 60.0,
    on_answer: Callable[[str, T | TransportError], None] = lambda name, answer: None,
) -> dict[str, T | TransportError]:
    """work(transport) for each, `limit` at a time; by name, in the order given: what it returned or why it could not.

    A machine has `timeout` seconds from the moment its turn comes. One that does not answer gives its place to the next
    and is left behind in a daemon thread: threads of a ThreadPoolExecutor would be waited for when Python exits.
    Errors other than TransportError are raised once all machines have ended. `on_answer(name, answer)` is called here
    as each answer comes.
    """
    waiting = deque(transports)
    turns: dict[int, tuple[Transport, float]] = {}  # running: number -> machine, deadline
    answers: queue.SimpleQueue[tuple[int, T | BaseException, bool]] = queue.SimpleQueue()
    done: dict[str, T | TransportError] = {}
    broken: list[BaseException] = []

    def turn(number: int, transport: Transport) -> None:
        try:
            answers.put((number, work(transport), True))
        except BaseException as error:  # noqa: BLE001 - it goes to the thread that asked
            answers.put((number, error, False))

    started = 0
    while waiting or turns:
        while waiting and len(turns) < limit:
            transport = waiting.popleft()
            turns[started] = (transport, time.monotonic() + timeout)
            threading.Thread(target=turn, args=(started, transport), name=transport.name, daemon=True).start()
            started += 1
        nearest = min(deadline for _, deadline in turns.values())
        try:
            number, answer, well = answers.get(timeout=max(0.0, nearest - time.monotonic()))
        except queue.Empty:
            for number, (transport, deadline) in list(turns.items()):
                if deadline <= time.monotonic():
                    del turns[number]
                    late = TimedOut(f"{transport.name}: no answer within {timeout:g} s")
                    done[transport.name] = late
                    on_answer(transport.name, late)
                    threading.Thread(target=transport.close, name=f"close {transport.name}", daemon=True).start()
            continue
        if number not in turns:
            continue  # too late
        transport, _ = turns.pop(number)
        if well or isinstance(answer, TransportError):
            done[transport.name] = answer  # type: ignore[assignment]
            on_answer(transport.name, done[transport.name])
        else:
            broken.append(answer)  # type: ignore[arg-type]
    if broken:
        raise broken[0]
    return {transport.name: done[transport.name] for transport in transports}
