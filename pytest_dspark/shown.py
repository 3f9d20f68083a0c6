"""What the drawings of a report show, as plain numbers: made from a pack's rows and readings, before anything is drawn.

Only rows that passed are drawn: a void row is no result, and what was not measured is no 0. Standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_dspark.calibration import bound
from pytest_dspark.pack import Pack, lines
from pytest_dspark.tables import STAMP, Row, moment, placed

MOST_DOTS = 400


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the ladder: the mean output rate with its interval (None: no interval), and the rate of each repeat."""

    streams: int
    mean: float
    low: float | None
    high: float | None
    repeats: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """One row's values in seconds, each of one stream, and the client's own error (None: not measured)."""

    label: str
    values: tuple[float, ...]
    longest: tuple[float, ...]
    error: float | None


@dataclass(frozen=True, slots=True)
class Bar:
    """A row or a phase on the time axis, in seconds from the first."""

    lane: str
    label: str
    start: float
    end: float
    verdict: str


@dataclass(frozen=True, slots=True)
class Trace:
    """What was read of one host: (seconds from the first row, value)."""

    host: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Session:
    """The whole run on one time axis."""

    bars: tuple[Bar, ...]
    memory: tuple[Trace, ...]
    heat: tuple[Trace, ...]


def ladder(rows: Iterable[Row]) -> list[Level]:
    """The rows `concurrency.cN` of one group that passed, in the order of N."""
    found = [row for row in rows if row["verdict"] == "PASS" and row["check"].removeprefix("concurrency.c").isdigit()]
    return sorted((_level(row) for row in found if _rates(row)), key=lambda one: one.streams)


def _level(row: Row) -> Level:
    quoted = row["finding"]["headline"]["output_rate"]
    return Level(
        int(row["check"].removeprefix("concurrency.c")), quoted["mean"], quoted["low"], quoted["high"], _rates(row)
    )


def _rates(row: Row) -> tuple[float, ...]:
    return tuple(one["output_rate"] for one in row["finding"]["repeats"] if one["output_rate"] is not None)


def first_tokens(rows: Iterable[Row]) -> list[Spread]:
    """The wait for the first token of every stream, a row at a time."""
    return [_spread(row, "first_token_s", "", "first_token_error_s", 1) for row in _good(rows)]


def gaps(rows: Iterable[Row]) -> list[Spread]:
    """The mean and the longest gap of every stream, a row at a time; a gap has the error of two stamps."""
    return [_spread(row, "mean_gap_s", "longest_gap_s", "stamp_error_s", 2) for row in _good(rows)]


def _good(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["verdict"] == "PASS"]


def _spread(row: Row, key: str, second: str, error: str, times: int) -> Spread:
    streams = [stream for one in row["finding"]["repeats"] for stream in one["samples"]]
    known = row["finding"]["calibration"]
    return Spread(
        row["check"].partition(".")[2],
        _thinned([stream[key] for stream in streams if stream[key] is not None]),
        _thinned([stream[second] for stream in streams if second and stream[second] is not None]),
        times * bound(known[error]) if known else None,
    )


def _thinned(values: Sequence[float]) -> tuple[float, ...]:
    """At most so many dots; the least and the most stay."""
    ordered = sorted(value for value in values if value > 0)
    if len(ordered) <= MOST_DOTS:
        return tuple(ordered)
    step = (len(ordered) - 1) / (MOST_DOTS - 1)
    return tuple(ordered[round(index * step)] for index in range(MOST_DOTS))


def session(pack: Pack) -> Session:
    """Phases, rows and readings from the first row on; rows of an earlier run that was resumed are not on this axis."""
    rows = placed(pack.rows)
    begin = min((moment(row["started"]) for row in rows), default=0.0)
    bars = [bar for row in rows for bar in _phases(row, begin) or [_bar(row, begin)]]
    memory, heat = _traces(pack, begin, "free_memory_gib"), _traces(pack, begin, "temperature_c")
    return Session(tuple(bars), memory, heat)


def _bar(row: Row, begin: float) -> Bar:
    start = moment(row["started"]) - begin
    return Bar(row["lane"], f"{row['profile']}/{row['check']}", start, start + row["elapsed_s"], row["verdict"])


def _phases(row: Row, begin: float) -> list[Bar]:
    if row["check"] != "launch" or not row["finding"]:
        return []
    at, bars = moment(row["started"]) - begin, []
    for one in row["finding"]["phases"]:
        bars.append(Bar(one["phase"], one["phase"], at, at + one["elapsed_s"], "PASS" if one["ok"] else "ERROR"))
        at += one["elapsed_s"]
    return bars


def _traces(pack: Pack, begin: float, key: str) -> tuple[Trace, ...]:
    points: dict[str, list[tuple[float, float]]] = {}
    for mark in pack.profiles:
        path = pack.path / mark / "readings.jsonl"
        for one in lines(path) if path.is_file() else ():
            if one[key] is not None and STAMP.fullmatch(str(one["at"])):
                points.setdefault(str(one["host"]), []).append((moment(one["at"]) - begin, float(one[key])))
    return tuple(Trace(host, tuple(sorted(found))) for host, found in sorted(points.items()))
