"""Two sets of repeats: by how much they differ, with an interval, and how sure it is that one is worse.

The formulas, each with its source; standard library alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Final

_STEPS: Final = 300
_TINY: Final = 1e-300


@dataclass(frozen=True, slots=True)
class Change:
    """The ratio of two means less one, with its 95 % interval, and the one-sided p of "not lower" and "not higher"."""

    change: float
    low: float
    high: float
    p_lower: float
    p_higher: float
    degrees: float


def change(was: Sequence[float], now: Sequence[float]) -> Change:
    """How the geometric mean of `now` stands to that of `was`: Welch's unequal-variances t on the logarithms.

    d = mean(ln now) - mean(ln was); s² = var(ln was)/n + var(ln now)/m; the interval is exp(d ± t(0.975, ν)·s) - 1 with
    Satterthwaite's ν = s⁴ / ((var(ln was)/n)²/(n-1) + (var(ln now)/m)²/(m-1)).
    Source: B. L. Welch, Biometrika 34 (1947) 28-35; F. E. Satterthwaite, Biometrics Bulletin 2 (1946) 110-114.
    One figure a repeat: requests inside a repeat are not independent. Raises ValueError below 2 repeats and for what is not
    above 0. Without any spread the interval has no width.
    """
    if min(len(was), len(now)) < 2:
        raise ValueError(f"an interval needs 2 repeats on both sides, there are {len(was)} and {len(now)}")
    if min(*was, *now) <= 0:
        raise ValueError("a figure is not above 0")
    before, after = [math.log(value) for value in was], [math.log(value) for value in now]
    d, a, b = fmean(after) - fmean(before), variance(before) / len(before), variance(after) / len(after)
    if a + b <= 1e-24:
        return Change(math.expm1(d), math.expm1(d), math.expm1(d), float(d >= 0), float(d <= 0), math.inf)
    degrees = (a + b) ** 2 / (a**2 / (len(before) - 1) + b**2 / (len(after) - 1))
    error = math.sqrt(a + b)
    half = t_quantile(0.975, degrees) * error
    below = t_cdf(d / error, degrees)
    return Change(math.expm1(d), math.expm1(d - half), math.expm1(d + half), below, 1 - below, degrees)


def holm(values: Sequence[float]) -> list[float]:
    """p values adjusted for being many: the k-th smallest of n times (n - k + 1), never below the one before it.

    Source: S. Holm, Scandinavian Journal of Statistics 6 (1979) 65-70. Keeps the chance of any false alarm, whatever
    the dependence between the figures.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = highest
    return adjusted


def t_cdf(t: float, degrees: float) -> float:
    """P(T <= t) of Student's t: 1 - I_x(ν/2, 1/2)/2 with x = ν/(ν + t²) for t >= 0 (DLMF 8.17; NIST)."""
    tail = _beta_share(degrees / (degrees + t * t), degrees / 2, 0.5) / 2
    return 1 - tail if t >= 0 else tail


def t_quantile(p: float, degrees: float) -> float:
    """The p-quantile of Student's t, 0.5 <= p < 1, by halving."""
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < p else (low, middle)
    return (low + high) / 2


def _beta_share(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_share(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    return front * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of DLMF 8.17.22, by Lentz's method."""
    c, d = 1.0, 1 / _off_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _STEPS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / _off_zero(1 + term * d), _off_zero(1 + term / c)
            value *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return value


def _off_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
