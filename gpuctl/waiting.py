"""Waiting for machines, with tenacity: trying again what may work the next time, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from gpuctl.transport import Unreachable

T = TypeVar("T")


def reached(
    work: Callable[[], T],
    *,
    within: float,
    on_wait: Callable[[Unreachable], None] = lambda error: None,
    at_most: float = 10.0,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What `work` returns, trying again for `within` seconds while the machine is Unreachable.

    A refused login, a wrong host key and a command that ran too long are raised at once: they are answers. `work` may
    run more than once, also after it had half happened, so it must be safe to repeat. `on_wait` hears of each failure;
    `at_most`: seconds between two tries.
    """
    import tenacity

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(Unreachable),
        stop=tenacity.stop_after_delay(within),
        wait=tenacity.wait_random_exponential(multiplier=0.5, max=at_most),
        before_sleep=lambda state: on_wait(state.outcome.exception()),  # type: ignore[union-attr,arg-type]
        sleep=sleep,
        reraise=True,
    )(work)
