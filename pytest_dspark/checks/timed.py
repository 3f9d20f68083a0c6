"""What every timed lane shares: warm-up until the rate is stable, repeats, and the honesty of a row.

A row is void (ERROR) when the server counted traffic that is not ours, when it cannot tell, or when prompts were cached.
Void rows stay in the evidence with the reason. Speed itself is never a verdict unless the recipe states a limit.
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_dspark.endpoint import Endpoint
from pytest_dspark.load import Shape, cache_state, foreign, provable, volley
from pytest_dspark.timing import t_interval
from pytest_dspark.verdict import PASS, Finding, Status, Verdict

STABLE = 0.10
MOST_WARM_UPS = 5


def nonce() -> str:
    return secrets.token_hex(8)


def measure_row(check: str, endpoint: Endpoint, shape: Shape, concurrency: int, repeats: int) -> Finding:
    """Warm up, then `repeats` volleys; each repeat is kept whole."""
    warm_ups = warm_up(endpoint, shape, concurrency)
    volleys = [volley(endpoint, shape, concurrency, nonce) for _ in range(repeats)]
    rates = [one["output_rate"] for one in volleys]
    data = {
        "method": "completions, streamed, forced length, unique prompts",
        "concurrency": concurrency,
        "tokens": shape.tokens,
        "prompt_class": shape.prompt_class,
        "warm_up_rates": warm_ups,
        "repeats": volleys,
        "cache": [cache_state(one) for one in volleys],
        "headline": headline(volleys, rates),
    }
    return Finding(check, data)


def warm_up(endpoint: Endpoint, shape: Shape, concurrency: int) -> list[float | None]:
    """Volleys until two rates in a row differ by less than a tenth, at most five; their rates are recorded."""
    rates: list[float | None] = []
    while len(rates) < MOST_WARM_UPS:
        rates.append(volley(endpoint, shape, concurrency, nonce)["output_rate"])
        if len(rates) > 1 and rates[-1] and rates[-2] and abs(rates[-1] / rates[-2] - 1) < STABLE:
            break
    return rates


def headline(volleys: Sequence[Mapping[str, Any]], rates: Sequence[float | None]) -> dict[str, Any]:
    """The figures that are quoted: medians over all streams, and rates with an interval by repeats."""
    streams = [stream for one in volleys for stream in one["samples"]]
    good = [rate for rate in rates if rate is not None]
    interval = t_interval(good)
    return {
        **{
            f"{key}_median": _median(streams, key)
            for key in (
                "first_token_s",
                "first_answer_s",
                "tpot_s",
                "mean_gap_s",
                "end_s",
                "decode_rate",
                "tokens_per_event",
            )
        },
        "longest_gap_s": max((s["longest_gap_s"] for s in streams if s["longest_gap_s"] is not None), default=None),
        "output_rate": {
            "mean": interval.centre,
            "low": interval.low,
            "high": interval.high,
            "n": interval.n,
            "reason": interval.reason or None,
        },
        "fairness": _fairness(streams),
    }


def _median(streams: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [stream[key] for stream in streams]
    return statistics.median(values) if values and all(value is not None for value in values) else None


def _fairness(streams: Sequence[Mapping[str, Any]]) -> float | None:
    """Slowest stream over fastest, by end-to-end time: 1 is fair."""
    ends = [stream["end_s"] for stream in streams]
    return max(ends) / min(ends) if ends and min(ends) > 0 else None


def judge_row(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS if every stream has exactly the asked tokens, every repeat is provably ours alone and cold, and the recipe's
    limits hold."""
    data = finding.data
    volleys = data["repeats"]
    if len(volleys) < 3:
        return Verdict(Status.ERROR, "HARNESS", f"{len(volleys)} repeats, expected at least 3")
    return _void(volleys) or _lengths(volleys, data["tokens"]) or _limits(data["headline"], limits) or PASS


def _void(volleys: Sequence[Mapping[str, Any]]) -> Verdict | None:
    for number, one in enumerate(volleys, 1):
        why = foreign(one)
        if why:
            return Verdict(Status.ERROR, "FOREIGN_TRAFFIC", f"void, repeat {number}: {why}")
        if not provable(one):
            reason = one["server"]["requests"]["server"]["reason"]
            return Verdict(
                Status.ERROR,
                "FOREIGN_TRAFFIC",
                f"void, repeat {number}: nothing proves that the traffic was ours: {reason}",
            )
        state = cache_state(one)
        if state != "cold":
            return Verdict(
                Status.ERROR, "CACHE_WARM", f"void, repeat {number}: the prompt cache is {state}, expected cold"
            )
    return None


def _lengths(volleys: Sequence[Mapping[str, Any]], tokens: int) -> Verdict | None:
    for one in volleys:
        for stream in one["samples"]:
            if stream["completion_tokens"] is None:
                return Verdict(Status.ERROR, "PROTOCOL", "a stream carried no usage, so its tokens are not known")
            if stream["completion_tokens"] != tokens or stream["finish_reason"] != "length":
                found = f"{stream['completion_tokens']} tokens, finish_reason {stream['finish_reason']!r}"
                return Verdict(Status.FAIL, "WRONG_ANSWER", f"asked for exactly {tokens} tokens, got {found}")
            if stream["first_token_s"] is None:
                return Verdict(Status.FAIL, "NO_ANSWER", "a stream carried no text")
    return None


def _limits(quoted: Mapping[str, Any], limits: Mapping[str, Any]) -> Verdict | None:
    """Limits of the recipe, each named with what was found: `max_fairness`, `max_gap_s`."""
    for name, found in (("max_fairness", quoted["fairness"]), ("max_gap_s", quoted["longest_gap_s"])):
        if name in limits and (found is None or found > limits[name]):
            return Verdict(Status.FAIL, "LIMIT_EXCEEDED", f"{name} is {limits[name]:g}, found {found}")
    return None
