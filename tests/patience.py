"""How long is too long on a machine that is busy with other tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """The block takes less than this where a core is free; where others wait for one too, as many times longer."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    share = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert took < seconds * share, f"took {took:.2f} s, not under {seconds:g} s, with {share:.1f} waiting for each core"


def wait_until(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Whether the condition came true in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
