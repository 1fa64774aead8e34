"""Work in a thread of its own, waited for so that Ctrl-C is taken at once and the work is not forgotten by it.

Not Thread.join: interrupted, it takes a thread that runs for one that has ended (CPython before 3.13), and nobody waits
for it any more. Not a ThreadPoolExecutor: Python waits for its threads when it exits, also for one that hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


def begin(work: Callable[[], T], name: str | None = None, among: list[Future[Any]] | None = None) -> Future[T]:
    """work() in a daemon thread: what it returns or raises, whatever that is, is the Future's.

    The Future is put into `among` before anything runs, so that Ctrl-C in the middle of this leaves no work that nobody
    knows of.
    """
    future: Future[T] = Future()
    if among is not None:
        among.append(future)

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it goes to the thread that asked
            future.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except BaseException:
        future.cancel()  # where it does not run yet: then it never does
        raise
    return future


def ended(works: Sequence[Future[Any]], timeout: float | None = None) -> bool:
    """Waits until all have ended, however they did; False when `timeout` (seconds) was over before.

    In steps: a signal that comes just before a wait without end is taken after it.
    """
    until = None if timeout is None else time.monotonic() + timeout
    left = set(works)
    while left:
        step = 0.2 if until is None else min(0.2, until - time.monotonic())
        if step < 0:
            return False
        left = {one for one in wait(left, step).not_done if not one.done()}  # done: also one that was cancelled
    return True
