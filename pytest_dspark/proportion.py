"""Shares of counted things with their uncertainty. Standard library alone."""

from __future__ import annotations

import math
from typing import Any, Final

Z95: Final = 1.959963984540054
"""The two-sided 95 % point of the normal distribution."""


def wilson(good: int, of: int) -> tuple[float, float] | None:
    """Wilson's score interval of a share at 95 % (E. B. Wilson, JASA 22, 1927); None of nothing."""
    if of <= 0:
        return None
    share, z2 = good / of, Z95 * Z95
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = Z95 * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of)) / (1 + z2 / of)
    return (middle - half if good else 0.0), (middle + half if good < of else 1.0)


def share(good: int, of: int) -> dict[str, Any]:
    """`good` of `of` as data: the share and its interval, null of nothing."""
    interval = wilson(good, of)
    if interval is None:
        return {"good": good, "of": of, "share": None, "low": None, "high": None}
    low, high = (round(end, 6) for end in interval)
    return {"good": good, "of": of, "share": round(good / of, 6), "low": low, "high": high}


def shown(told: dict[str, Any]) -> str:
    """`0.935 (0.892 to 0.962), 187 of 200`."""
    if told["share"] is None:
        return f"unmeasured, {told['good']} of {told['of']}"
    return f"{told['share']:.3f} ({told['low']:.3f} to {told['high']:.3f}), {told['good']} of {told['of']}"
