"""Which profiles an invocation asks for: pure functions over a marker expression.

A profile is wanted when the expression needs its mark: `production and gate` wants production, `not production` wants
nothing, and neither does an empty expression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pytest_dspark.recipe import LANES

PROFILE_MARKS = ("long1m", "production", "breakable_ab")

Matches = Callable[[frozenset[str]], bool]


def wanted(matches: Matches, lanes: Sequence[str] = LANES) -> tuple[str, ...]:
    """The profiles that the expression needs, in launch order."""
    sets = [frozenset[str](), *(frozenset({lane}) for lane in lanes)]
    return tuple(mark for mark in PROFILE_MARKS if any(matches(lane | {mark}) and not matches(lane) for lane in sets))


def wanted_by_ids(args: Iterable[str]) -> tuple[str, ...]:
    """The profiles named in brackets by node ids, in launch order."""
    brackets = [arg.partition("[")[2].rstrip("]").split("-") for arg in args if "::" in arg and "[" in arg]
    return tuple(mark for mark in PROFILE_MARKS if any(mark in parts for parts in brackets))


_FIRST = (
    "launch",
    "gate",
    "correctness",
    "tools",
    "underload",
    "performance.canary",
    "performance.latency",
    "concurrency",
    "performance",
    "arithmetic",
    "gsm8k",
    "bfcl",
    "r0b0bench",
    "quality",
)
_LAST = ("needle", "teardown")


def order(mark: str, check: str) -> tuple[int, int]:
    """Profiles in launch order; within one from what is proven to what is timed, needles late, the teardown last."""
    lane = check.partition(".")[0]
    place = next((n for n, name in enumerate(_FIRST) if name in (check, lane)), len(_FIRST))
    return PROFILE_MARKS.index(mark), len(_FIRST) + 1 + _LAST.index(lane) if lane in _LAST else place
