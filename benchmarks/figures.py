"""The formulas of the table: what a client reported, against what the server's own log says.

Milliseconds unless the name says otherwise. A figure that a client does not tell is None, never 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean, median
from typing import Any

from benchmarks.scenarios import Level
from benchmarks.usage import Usage

P99_FLOOR = 459  # samples below which a p99 is withheld: 1 - 0.99^459 >= 0.99


class BadRun(Exception):
    """A run that measured something else than was asked; the text says what."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream as a client of ours saw it: moments on the monotonic clock in seconds."""

    user: str
    start: float
    stamps: tuple[float, ...]
    first_answer: float | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """What one client said, one value a request. None: it does not tell that figure. `streams` only of ours."""

    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    answer_ms: tuple[float, ...] | None = None
    tokens: tuple[float, ...] | None = None
    streams: tuple[Stream, ...] = ()


@dataclass(frozen=True, slots=True)
class Sent:
    """One request in the server's log: moments on the monotonic clock in seconds."""

    arrival: float
    user: str
    tokens: int
    stamps: tuple[float, ...]
    first_answer: float | None


@dataclass(frozen=True, slots=True)
class Truth:
    """The requests that count, how many events the server sent in all, and when the first request arrived."""

    sent: tuple[Sent, ...]
    events: int
    first_arrival: float
    lateness_p99_ms: float


@dataclass(frozen=True, slots=True)
class Row:
    """One client at one level, errors as reported minus truth in ms. None: not told by the client, or too few samples."""

    ttft_ms: float | None = None
    ttft_p99_ms: float | None = None
    answer_ms: float | None = None
    tpot_ms: float | None = None
    tokens: float | None = None
    stamp_p50_ms: float | None = None
    stamp_p99_ms: float | None = None
    cpu_s: float | None = None
    peak_mb: float | None = None
    lateness_p99_ms: float | None = None


def read_streams(text: str) -> Report:
    """The report of the reference and of ours: `{"streams": [{user, start, stamps, first_answer, tokens}]}`."""
    streams = tuple(_stream(one) for one in json.loads(text)["streams"])
    answers = [one.first_answer - one.start for one in streams if one.first_answer is not None]
    return Report(
        ttft_ms=tuple((one.stamps[0] - one.start) * 1e3 for one in streams),
        tpot_ms=tuple(_tpot_ms(one.stamps, one.tokens) for one in streams),
        answer_ms=tuple(answer * 1e3 for answer in answers) if len(answers) == len(streams) else None,
        tokens=tuple(float(one.tokens) for one in streams if one.tokens is not None),
        streams=streams,
    )


def _stream(data: Mapping[str, Any]) -> Stream:
    if not data["stamps"] or data["tokens"] is None:
        raise BadRun(f"stream {data['user']}: no token or no count came")
    return Stream(data["user"], data["start"], tuple(data["stamps"]), data["first_answer"], data["tokens"])


def _tpot_ms(stamps: Sequence[float], tokens: int | None) -> float:
    """(last - first token time) / (tokens - 1)."""
    if tokens is None or tokens < 2:
        raise BadRun(f"{tokens} token(s) have no time between them")
    return (stamps[-1] - stamps[0]) * 1e3 / (tokens - 1)


def read_log(log: Mapping[str, Any], level: Level, warm_up: int = 0) -> Truth:
    """The server's log of one run. Raises BadRun if it saw other requests than were asked, or did not send all events.

    Requests that did not stream have no stamps and count for nothing; the first `warm_up` streams are a client's own.
    """
    sent = sorted((_sent(one) for one in log["requests"] if one["stamps"]), key=lambda one: one.arrival)
    if len(sent) != level.requests + warm_up:
        raise BadRun(f"the server saw {len(sent)} streams, expected {level.requests + warm_up}")
    for one in sent:
        if (len(one.stamps), one.tokens) != (level.scenario.events, level.scenario.tokens):
            raise BadRun(f"a stream had {len(one.stamps)} of {level.scenario.events} events")
    if log["lateness_p99_ms"] is None:
        raise BadRun("the server does not tell its lateness")
    events = sum(len(one.stamps) for one in sent)
    return Truth(tuple(sent[warm_up:]), events, sent[0].arrival, log["lateness_p99_ms"])


def _sent(data: Mapping[str, Any]) -> Sent:
    return Sent(data["arrival"], data["user"], data["tokens"], tuple(data["stamps"]), data["first_answer"])


def row(report: Report, truth: Truth, usage: Usage) -> Row:
    """One run's figures. Raises BadRun where the report is of another number of requests."""
    count = len(truth.sent)
    for name in ("ttft_ms", "tpot_ms", "answer_ms", "tokens"):
        told = getattr(report, name)
        if told is not None and len(told) != count:
            raise BadRun(f"it reported {name} of {len(told)} requests, the server saw {count}")
    first = [(one.stamps[0] - one.arrival) * 1e3 for one in truth.sent]
    answer = [((one.first_answer or math.nan) - one.arrival) * 1e3 for one in truth.sent]
    errors = stamp_errors(report.streams, truth.sent)
    return Row(
        ttft_ms=fmean(report.ttft_ms) - fmean(first),
        ttft_p99_ms=quantile(report.ttft_ms, 0.99) - quantile(first, 0.99) if count >= P99_FLOOR else None,
        answer_ms=None if report.answer_ms is None else fmean(report.answer_ms) - fmean(answer),
        tpot_ms=fmean(report.tpot_ms) - fmean(_tpot_ms(one.stamps, one.tokens) for one in truth.sent),
        tokens=None if report.tokens is None else fmean(report.tokens) - fmean(one.tokens for one in truth.sent),
        stamp_p50_ms=quantile(errors, 0.5) if errors else None,
        stamp_p99_ms=quantile(errors, 0.99) if len(errors) >= P99_FLOOR else None,
        cpu_s=usage.since(truth.first_arrival) / truth.events * 1e3,
        peak_mb=usage.peak_mb,
        lateness_p99_ms=truth.lateness_p99_ms,
    )


def stamp_errors(streams: Sequence[Stream], sent: Sequence[Sent]) -> list[float]:
    """|client's stamp - server's send stamp| of every event in ms; streams are paired by their `user`."""
    known = {one.user: one for one in sent}
    errors: list[float] = []
    for stream in streams:
        if stream.user not in known or len(known[stream.user].stamps) != len(stream.stamps):
            raise BadRun(f"stream {stream.user} has {len(stream.stamps)} events, which is not what the server sent")
        pairs = zip(stream.stamps, known[stream.user].stamps, strict=True)
        errors += [abs(ours - theirs) * 1e3 for ours, theirs in pairs]
    return errors


def quantile(samples: Sequence[float], p: float) -> float:
    """Linear between order statistics at (n - 1) p."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * p
    low = math.floor(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


def middle(rows: Sequence[Row], late_ms: float) -> Row:
    """The median, figure by figure, over the rounds in which the server kept its schedule to `late_ms` at p99.

    Where these are not most rounds it is over all of them, and then its lateness is over the limit too.
    """
    punctual = [one for one in rows if one.lateness_p99_ms is not None and one.lateness_p99_ms <= late_ms]
    chosen = punctual if 2 * len(punctual) > len(rows) else rows
    return replace(Row(), **{one.name: _over(chosen, one.name) for one in fields(Row)})


def _over(rows: Sequence[Row], name: str) -> float | None:
    """None where a round has none."""
    values = [getattr(one, name) for one in rows]
    return None if not values or any(value is None for value in values) else median(values)
