"""The formulas. Seconds on one monotonic clock, counted from the first byte sent. Unmeasured is None with a reason.

An event may carry several tokens (speculative decoding), so events are never counted as tokens: counts come from `usage`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean, median, stdev

from pytest_dspark.metrics import Figure, Metrics, delta

CONFIDENCE = 0.99
GENERATED = "vllm:generation_tokens_total"
FINISHED = "vllm:request_success_total"
DECODE_S = "vllm:request_decode_time_seconds_sum"
PROMPTS = "vllm:prompt_tokens_total"
PREFILL_S = "vllm:request_prefill_time_seconds_sum"


@dataclass(frozen=True, slots=True)
class Timing:
    """One request's times in seconds from the first byte sent. None: there was no such event.

    `first_token_s` is the first event with generated text of any kind (content, reasoning under either name, tool
    arguments), `first_answer_s` the first with content, `last_token_s` the last with text; a role, an empty delta, a
    finish reason, a usage chunk or a ping is none of these. `end_s` is the last byte read. `wait_s` is the time before
    the first byte: the wait for a place and a connection. `sent_s` is when the last byte of the request was handed over.
    `at_s` is the first byte itself on the monotonic clock, to place streams of one
    machine beside each other. `read_lag_s` is the longest that a packet lay before it was read: long beside the gaps, events
    may have shared a stamp. `events` counts the events that carry text, `stamps` are their times, `gaps` the seconds between them.
    """

    first_token_s: float | None
    first_answer_s: float | None
    last_token_s: float | None
    end_s: float
    wait_s: float = 0.0
    sent_s: float = 0.0
    at_s: float = 0.0
    read_lag_s: float = 0.0
    stamps: tuple[float, ...] = ()

    @property
    def events(self) -> int:
        return len(self.stamps)

    @property
    def gaps(self) -> tuple[float, ...]:
        return tuple(later - earlier for earlier, later in pairwise(self.stamps))


@dataclass(frozen=True, slots=True)
class Interval:
    """A centre with its lower and upper limit; `low` and `high` are None, with the reason, where `n` is too small."""

    centre: float | None
    low: float | None
    high: float | None
    n: int
    reason: str = ""


def first_token(timing: Timing) -> Figure:
    """Time to first token in seconds: the first event that carries generated text of any kind."""
    return _known(timing.first_token_s, "the stream carried no token")


def first_answer(timing: Timing) -> Figure:
    """Time to first answer token in seconds: the first event that carries content, after any reasoning."""
    return _known(timing.first_answer_s, "the stream carried no content")


def tpot(timing: Timing, tokens: int | None) -> Figure:
    """Time per output token in seconds: (last - first token time) / (completion tokens - 1); None below 2 tokens.

    A stream of one event has no span, whatever its count: None as well.
    """
    span = _span(timing, tokens)
    return span if span.value is None or tokens is None else Figure(span.value / (tokens - 1))


def decode_rate(timing: Timing, tokens: int | None) -> Figure:
    """Decode rate in tokens/s as the client sees it: (completion tokens - 1) / (last - first token time) = 1 / TPOT."""
    span = _span(timing, tokens)
    return span if span.value is None or tokens is None else Figure((tokens - 1) / span.value)


def output_rate(timing: Timing, tokens: int | None) -> Figure:
    """End-to-end rate in tokens/s: completion tokens / time of the last byte. Contains the first token's wait."""
    return _ratio(tokens, timing.end_s, "tokens")


def prefill_rate(timing: Timing, prompt_tokens: int | None, cached_tokens: int | None = 0) -> Figure:
    """Prefill rate in tokens/s: (prompt - cached tokens) / time to first token. Unknown cache state: None."""
    if prompt_tokens is None or cached_tokens is None or timing.first_token_s is None:
        return Figure(None, "prompt tokens, cached tokens or the first token are not known")
    return _ratio(prompt_tokens - cached_tokens, timing.first_token_s, "uncached prompt tokens")


def tokens_per_event(timing: Timing, tokens: int | None) -> Figure:
    """Completion tokens / events that carry text: the accepted length as it shows on the wire."""
    return _ratio(tokens, timing.events, "tokens")


def mean_gap(timing: Timing) -> Figure:
    """Mean seconds between events that carry text (inter-chunk latency, not time per token)."""
    gaps = timing.gaps
    return Figure(fmean(gaps)) if gaps else Figure(None, f"{timing.events} event(s) have no gap")


def median_gap(timing: Timing) -> Figure:
    """Median seconds between events that carry text: one engine step, and one hiccup does not move it."""
    gaps = timing.gaps
    return Figure(median(gaps)) if gaps else Figure(None, f"{timing.events} event(s) have no gap")


def longest_gap(timing: Timing) -> Figure:
    """Longest seconds between events that carry text."""
    gaps = timing.gaps
    return Figure(max(gaps)) if gaps else Figure(None, f"{timing.events} event(s) have no gap")


def server_decode_rate(before: Metrics, after: Metrics) -> Figure:
    """The server's decode rate of one stream in tokens/s.

    (Δ generation_tokens - Δ finished requests) / Δ request_decode_time_seconds_sum: decode time runs from the first to
    the last token of each request and so spans n - 1 tokens of it. Right only if nothing was in flight at either reading.
    """
    tokens, finished = delta(before, after, GENERATED), delta(before, after, FINISHED)
    if tokens.value is None or finished.value is None:
        return Figure(None, tokens.reason or finished.reason)
    return _per_decode_second(tokens.value - finished.value, before, after)


def server_decode_rate_uncorrected(before: Metrics, after: Metrics) -> Figure:
    """Δ generation_tokens / Δ request_decode_time_seconds_sum, as others publish it: too high by n / (n - 1)."""
    tokens = delta(before, after, GENERATED)
    return tokens if tokens.value is None else _per_decode_second(tokens.value, before, after)


def server_prefill_rate(before: Metrics, after: Metrics) -> Figure:
    """The server's prefill rate of one stream in tokens/s: Δ prompt_tokens / Δ request_prefill_time_seconds_sum.

    Cached tokens count as prompt tokens and take no time: right only where nothing was cached.
    """
    tokens, seconds = delta(before, after, PROMPTS), delta(before, after, PREFILL_S)
    if tokens.value is None or seconds.value is None:
        return Figure(None, tokens.reason or seconds.reason)
    return _ratio(tokens.value, seconds.value, "prompt tokens")


def sample_floor(p: float) -> int:
    """Samples needed before a quantile is shown: 1 - p^n >= 0.99, so that one sample at least lies above it.

    n = ceil(ln 0.01 / ln p): 44 for p90, 459 for p99. At or below the median: 1.
    """
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(p)) if p > 0.5 else 1


def quantile(samples: Sequence[float], p: float) -> Figure:
    """The p-quantile (0 < p < 1), linear between order statistics at (n - 1) p; withheld below `sample_floor(p)`."""
    need = sample_floor(p)
    if len(samples) < need:
        return Figure(None, f"p{p * 100:g} needs {need} samples, there are {len(samples)}")
    ordered = sorted(samples)
    place = (len(ordered) - 1) * p
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return Figure(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def wilson(successes: int, n: int, *, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a share; right also at 0 and at n, where p ± z·sqrt(p(1-p)/n) says no width."""
    if n < 1 or not 0 <= successes <= n:
        return Interval(None, None, None, n, f"{successes} of {n} is no share")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(share, middle - half if successes else 0.0, middle + half if successes < n else 1.0, n)


def t_interval(samples: Sequence[float]) -> Interval:
    """95 % interval of the mean by repeats: mean ± t(0.975, n - 1) · s / sqrt(n). None below 2 repeats.

    The samples are one figure a repeat; requests inside one repeat are not independent and do not count as repeats.
    """
    n = len(samples)
    if n < 2:
        return Interval(samples[0] if samples else None, None, None, n, f"an interval needs 2 repeats, there are {n}")
    centre, half = fmean(samples), t_975(n - 1) * stdev(samples) / math.sqrt(n)
    return Interval(centre, centre - half, centre + half, n)


def t_975(degrees: int) -> float:
    """The 0.975 quantile of Student's t: by table to 30 degrees, then Cornish-Fisher (error below 1e-4)."""
    if degrees <= len(_T975):
        return _T975[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + (z**3 + z) / (4 * degrees) + second / degrees**2


_T975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def _known(value: float | None, reason: str) -> Figure:
    return Figure(value, "" if value is not None else reason)


def _span(timing: Timing, tokens: int | None) -> Figure:
    """Last - first token time, where at least two tokens and two moments are known."""
    if tokens is None:
        return Figure(None, "the server sent no token count")
    if tokens < 2:
        return Figure(None, f"{tokens} token(s) have no time between them")
    if timing.first_token_s is None or timing.last_token_s is None:
        return Figure(None, "the stream carried no token")
    span = timing.last_token_s - timing.first_token_s
    return Figure(span) if span > 0 else Figure(None, "all tokens came in one moment")


def _ratio(amount: float | None, over: float, what: str) -> Figure:
    if amount is None or amount <= 0:
        return Figure(None, f"{what}: not known" if amount is None else f"{what}: {amount:g}")
    return Figure(amount / over) if over > 0 else Figure(None, "nothing to divide by")


def _per_decode_second(tokens: float, before: Metrics, after: Metrics) -> Figure:
    seconds = delta(before, after, DECODE_S)
    return seconds if seconds.value is None else _ratio(tokens, seconds.value, "generated tokens")
