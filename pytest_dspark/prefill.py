"""How far a long prefill is, and whether it goes on at all: readings of /metrics while one request of ours is in flight.

Progress comes from the KV use or from the prompt counter, whichever moves; how long it still takes from a curve through
the cells that are finished. A request that waits while nothing runs and nothing moves is not slow, it is stuck.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_dspark.errors import DsparkError
from pytest_dspark.live import Live
from pytest_dspark.metrics import Metrics

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint

KV_USE: Final = "KV use"
COUNTER: Final = "prompt counter"


@dataclass(frozen=True, slots=True)
class Look:
    """One reading, `at_s` seconds after the first; None is what the server does not say."""

    at_s: float
    running: float | None
    waiting: float | None
    kv_share: float | None
    prompt_tokens: float | None


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt in flight: its name, its tokens, and the pool in tokens if it is known."""

    name: str
    tokens: int
    pool: int | None


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens that are done, None if nothing says so; `by` names what said it, or why nothing does."""

    tokens: int | None
    by: str


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a prefill of n tokens: linear * n + square * n * n, fitted over `cells` finished cells."""

    linear: float
    square: float
    cells: int

    def seconds(self, tokens: float) -> float:
        return self.linear * tokens + self.square * tokens * tokens


def look_at(metrics: Metrics, at_s: float) -> Look:
    return Look(
        at_s,
        metrics.value("vllm:num_requests_running"),
        metrics.value("vllm:num_requests_waiting"),
        metrics.value("vllm:kv_cache_usage_perc"),
        metrics.value("vllm:prompt_tokens_total"),
    )


def progress(first: Look, now: Look, job: Job) -> Progress:
    """What moved since the first reading, the larger one if both did."""
    found = []
    if first.prompt_tokens is not None and now.prompt_tokens is not None:
        found.append((now.prompt_tokens - first.prompt_tokens, COUNTER))
    if first.kv_share is not None and now.kv_share is not None and job.pool:
        found.append(((now.kv_share - first.kv_share) * job.pool, KV_USE))
    if not found:
        return Progress(None, "the server tells neither KV use nor prompt tokens")
    tokens, by = max(found)
    if tokens <= 0:
        return Progress(None, "neither KV use nor the prompt counter has moved")
    return Progress(min(round(tokens), job.tokens), by)


def fitted(cells: Sequence[tuple[float, float]]) -> Curve | None:
    """The curve through (tokens, seconds) of finished cells, by least squares; both parts are at least 0. None without cells."""
    good = [(n, s) for n, s in cells if n > 0 and s > 0]
    if not good:
        return None
    two, three, four = (sum(n**power for n, _ in good) for power in (2, 3, 4))
    first, second = sum(n * s for n, s in good), sum(n * n * s for n, s in good)
    inner = two * four - three * three
    if len({n for n, _ in good}) > 1 and inner > 0:
        linear, square = (first * four - second * three) / inner, (two * second - three * first) / inner
        if linear >= 0 and square >= 0:
            return Curve(linear, square, len(good))
        if linear < 0:
            return Curve(0.0, second / four, len(good))
    return Curve(first / two, 0.0, len(good))


def seconds_left(job: Job, done: int | None, elapsed_s: float, curve: Curve | None) -> tuple[float | None, str]:
    """Seconds until the prefill is done, None if nothing says so, and by what."""
    if curve is not None:
        spent = curve.seconds(done) if done else min(elapsed_s, curve.seconds(job.tokens))
        return max(curve.seconds(job.tokens) - spent, 0.0), f"curve of {curve.cells} finished"
    if done:
        return elapsed_s * (job.tokens - done) / done, "at this rate"
    return None, ""


def told(job: Job, so_far: Progress, elapsed_s: float, curve: Curve | None) -> str:
    """The live line of a prefill."""
    left, by = seconds_left(job, so_far.tokens, elapsed_s, curve)
    end = f", about {clock_text(left)} left ({by})" if left is not None else ""
    if so_far.tokens is None:
        return f"{job.name}: {job.tokens:,} tokens sent {clock_text(elapsed_s)} ago, {so_far.by}{end}"
    rate = so_far.tokens / elapsed_s if elapsed_s > 0 else 0.0
    share = 100 * so_far.tokens / job.tokens
    return (
        f"{job.name}: prefill {so_far.tokens:,} of {job.tokens:,} tokens ({share:.0f} %, by {so_far.by}), "
        f"{rate:,.0f} tok/s, {clock_text(elapsed_s)}{end}"
    )


def hosts_text(readings: Mapping[str, Mapping[str, Any]]) -> str:
    """Free memory and highest temperature of each host that can be read, to be put behind a line."""
    parts = []
    for name, found in readings.items():
        memory, heat = found["free_memory_gib"], found["temperature_c"]
        said = ([f"{memory:.0f} GiB free"] if memory is not None else []) + (
            [f"{heat:.0f} °C"] if heat is not None else []
        )
        parts += [f"{name} {' '.join(said)}"] if said else []
    return f"; {', '.join(parts)}" if parts else ""


def clock_text(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class StallRule:
    """Whether a request was accepted and nothing is done about it, for `limit_s` without a break.

    Only a server that says both how many run and that none do can be stuck: what is not told is no sign, and a prefill
    that runs is left alone however long it takes.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last: Look | None = None
        self._since: float | None = None

    def take(self, now: Look) -> str:
        """Why it is stuck; empty as long as it is not."""
        before, self._last = self._last, now
        moved = before is not None and (before.kv_share, before.prompt_tokens) != (now.kv_share, now.prompt_tokens)
        if moved or now.running != 0 or now.waiting is None:
            self._since = None
            return ""
        self._since = now.at_s if self._since is None else self._since
        still = now.at_s - self._since
        if still < self._limit_s:
            return ""
        where = f"{now.waiting:g} waiting" if now.waiting else "none waiting"
        return f"for {still:.0f} s {where}, none running, KV use and prompt counter still"


class Watcher:
    """Looks at the engine in a thread of its own while one request is in flight, and gives it up when it is stuck.

    `before` is a reading from before the request was sent; `readings` gives what the hosts say of themselves.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        job: Job,
        live: Live,
        *,
        before: Metrics,
        stall_s: float,
        poll_s: float,
        curve: Curve | None = None,
        readings: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint, self._job, self._live, self._curve, self._clock = endpoint, job, live, curve, clock
        self._rule, self._poll_s = StallRule(stall_s), poll_s
        self._first, self._readings = look_at(before, 0.0), readings
        self._over = threading.Event()
        self.answering = False
        self.stuck = ""
        self.looks = 0
        self.last = Progress(None, "the engine was not looked at yet")

    def run(self) -> None:
        begin = self._clock()
        while not self._over.wait(self._poll_s):
            now = look_at(self._endpoint.metrics(), self._clock() - begin)
            if self._over.is_set() or self.answering:
                continue
            self.looks += 1
            self.last = progress(self._first, now, self._job)
            self._live.show(told(self._job, self.last, now.at_s, self._curve) + self._hosts())
            self.stuck = self._rule.take(now)
            if self.stuck:
                self._endpoint.close()
                return

    def _hosts(self) -> str:
        try:
            return hosts_text(self._readings())
        except DsparkError:  # the controller is gone; the request itself will say so
            return ""

    def stop(self) -> None:
        self._over.set()


@contextmanager
def watched(watcher: Watcher) -> Iterator[Watcher]:
    """The watcher's thread, for the time of the block."""
    thread = threading.Thread(target=watcher.run, name="dspark-prefill", daemon=True)
    thread.start()
    try:
        yield watcher
    finally:
        watcher.stop()
        thread.join()
