"""Several streams: the concurrency ladder (all at once, each level a row), staggered and open-loop arrivals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_dspark.audit import Audit
from pytest_dspark.checks import Check
from pytest_dspark.checks.timed import Row, audit_row, judge_row, measure_row, shape_of
from pytest_dspark.errors import DsparkError
from pytest_dspark.live import Live
from pytest_dspark.load import poisson, staggered, together
from pytest_dspark.verdict import Finding

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint

LEVELS = (1, 2, 4, 6, 8, 12, 16)


def _ladder(level: int) -> Callable[..., Finding]:
    def measure(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
        most = min(int(settings["knobs"].get("MAX_NUM_SEQS") or level), int(settings.get("max_level", level)))
        if level > most:
            raise DsparkError(
                "NOT_IMPLEMENTED", f"level {level} is above what this profile and recipe measure ({most})"
            )
        row = Row(f"concurrency.c{level}", shape_of(settings), lambda _: together(level), f"{level} at once")
        return measure_row(row, endpoint, settings, live)

    return measure


def _staggered(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """One stream every so many seconds, so that prefills fall between the steps of the others."""
    asked = settings["staggered"]
    count, every_s = asked["streams"], asked["every_s"]
    how = f"{count}, one every {every_s:g} s"
    row = Row("concurrency.staggered", shape_of(settings), lambda _: staggered(count, every_s), how)
    return measure_row(row, endpoint, settings, live)


def _poisson(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """Open loop: requests come at random moments at a stated rate, whether the engine keeps up or not."""
    asked = settings["poisson"]
    count, rate = asked["streams"], asked["per_s"]
    how = f"{count}, open loop, {rate:g} a second on average, exponential gaps seeded by the repeat's name"
    row = Row("concurrency.poisson", shape_of(settings), lambda name: poisson(count, rate, name), how)
    return measure_row(row, endpoint, {**settings, "slo": asked["slo"]}, live)


def _audit_ladder(level: int) -> Audit:
    return audit_row(shape_of, lambda _, __: together(level))


def _staggered_arrivals(settings: Mapping[str, Any], name: str) -> Sequence[float]:
    return staggered(settings["staggered"]["streams"], settings["staggered"]["every_s"])


def _poisson_arrivals(settings: Mapping[str, Any], name: str) -> Sequence[float]:
    return poisson(settings["poisson"]["streams"], settings["poisson"]["per_s"], name)


CHECKS = {f"c{level}": Check(_ladder(level), judge_row, exclusive=True, audit=_audit_ladder(level)) for level in LEVELS}
CHECKS["staggered"] = Check(_staggered, judge_row, exclusive=True, audit=audit_row(shape_of, _staggered_arrivals))
CHECKS["poisson"] = Check(_poisson, judge_row, exclusive=True, audit=audit_row(shape_of, _poisson_arrivals))
