"""Whether two measured means differ, and by what factor, with 95 % intervals. Pure.

Welch's approximation throughout: the two sides may scatter differently and have different numbers of
repetitions. Degrees of freedom are rounded down, which widens an interval, never narrows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpuctl.records import Estimate, t95


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval. Without one (`low` and `high` None) where a side was measured only once."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def known(self) -> bool:
        return self.low is not None and self.high is not None

    def excludes(self, value: float) -> bool:
        """Whether the interval is known and does not hold `value`."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


def _variance_of_mean(e: Estimate) -> float | None:
    return None if e.sd is None or e.n < 2 else e.sd * e.sd / e.n


def _welch_degrees(v1: float, n1: int, v2: float, n2: int) -> int:
    """Welch-Satterthwaite for the sum of two independent variances of means; at least 1."""
    total = v1 + v2
    if total <= 0:
        return n1 + n2 - 2
    # Shares of the total, not the variances themselves: their squares may underflow.
    a, b = v1 / total, v2 / total
    return max(1, math.floor(1 / (a * a / (n1 - 1) + b * b / (n2 - 1)) + 1e-9))


def difference(new: Estimate, old: Estimate) -> Interval:
    """new - old in their unit, with Welch's interval."""
    value = new.mean - old.mean
    v1, v2 = _variance_of_mean(new), _variance_of_mean(old)
    if v1 is None or v2 is None or not math.isfinite(v1 + v2):
        return Interval(value)
    half = t95(_welch_degrees(v1, new.n, v2, old.n)) * math.sqrt(v1 + v2)
    return Interval(value, value - half, value + half)


def ratio(new: Estimate, old: Estimate) -> Interval | None:
    """new / old with Fieller's interval. None where a ratio means nothing (the old mean is not positive).

    The interval is unknown too when the old mean is not told apart from zero.
    """
    if old.mean <= 0:
        return None
    r = new.mean / old.mean
    if not math.isfinite(r):
        return None
    v1, v2 = _variance_of_mean(new), _variance_of_mean(old)
    if v1 is None or v2 is None or not math.isfinite(v1 + r * r * v2):
        return Interval(r)
    t = t95(_welch_degrees(v1, new.n, r * r * v2, old.n))
    # Fieller (1954) without covariance, variances relative to the old mean.
    a, b = v1 / old.mean / old.mean, v2 / old.mean / old.mean
    g = t * t * b
    if not (g < 1 and math.isfinite(a)):
        return Interval(r)
    half = t * math.sqrt(a * (1 - g) + r * r * b)
    return Interval(r, (r - half) / (1 - g), (r + half) / (1 - g))


def improvement(new: Estimate, old: Estimate, better: int) -> Interval | None:
    """By what factor new is better than old: `better` +1 where more is better, -1 where less is, as `ratio`."""
    return ratio(old, new) if better < 0 else ratio(new, old)


def change_percent(new: Estimate, old: Estimate) -> Interval | None:
    """By how many per cent the new mean differs from the old one; None where that means nothing."""
    r = ratio(new, old)
    if r is None:
        return None
    if r.low is None or r.high is None:
        return Interval((r.value - 1) * 100)
    return Interval((r.value - 1) * 100, (r.low - 1) * 100, (r.high - 1) * 100)
