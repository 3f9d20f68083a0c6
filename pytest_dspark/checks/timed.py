"""What every timed lane shares: warm-up until the rate is stable, the client's own error, repeats, and the honesty of a row.

A row is void (ERROR) when the server counted traffic that is not ours, when it cannot tell, when prompts were cached, when
the client was not calibrated, or when the engine was another after the row than before it (the canary step). Void rows stay in
the evidence with the reason. Speed itself is never a verdict unless the recipe states a limit.
"""

from __future__ import annotations

import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_dspark.audit import SLACK_S, Audit, same
from pytest_dspark.calibration import audit as calibration_audit
from pytest_dspark.calibration import calibrate, unresolved
from pytest_dspark.live import Live
from pytest_dspark.load import Shape, cache_state, foreign, provable, volley
from pytest_dspark.load import audit as volley_audit
from pytest_dspark.timing import quantile, t_interval, wilson
from pytest_dspark.verdict import PASS, Finding, Status, Verdict

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint, Progress

CANARY = "canary"
STABLE = 0.10
MOST_WARM_UPS = 5
LEAST_REPEATS = 3
SPREAD = ("first_token_s", "first_answer_s", "tpot_s", "end_s", "wait_s")

Arrivals = Callable[[str], Sequence[float]]


def nonce() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Row:
    """What one timed row asks: requests of one shape, arriving as `arrivals` says for the name of a repeat."""

    check: str
    shape: Shape
    arrivals: Arrivals
    how: str


def shape_of(settings: Mapping[str, Any], **changes: Any) -> Shape:
    """The shape of a lane's requests by its recipe table."""
    shape = Shape(settings["tokens"], settings.get("prompt_class", "prose"), deadline_s=settings["deadline_s"])
    return replace(shape, **changes)


def measure_row(row: Row, endpoint: Endpoint, settings: Mapping[str, Any], live: Live) -> Finding:
    """Warm up, calibrate, then the repeats between two canary steps; each repeat is kept whole."""
    watch = Watch(row.check, live, settings["repeats"])
    warm = warm_up(row, endpoint, watch)
    calibration = _calibrated(warm.last, endpoint, watch)
    before = canary_step(endpoint, settings)
    volleys = [_repeat(row, endpoint, watch, number) for number in range(settings["repeats"])]
    after = canary_step(endpoint, settings)
    quoted = headline(volleys, settings.get("slo"))
    quoted["unresolved"] = unresolved(quoted, calibration, row.shape.tokens)
    data = {
        "method": "chat" if row.shape.chat else "completions",
        "arrivals": row.how,
        "tokens": row.shape.tokens,
        "prompt_class": row.shape.prompt_class,
        "reader": endpoint.reader,
        "warm_up": {"rates": warm.rates, "seconds": warm.seconds, "stable": warm.stable},
        "calibration": calibration,
        "canary": {"before": before, "after": after, "drift": drift(before, after)},
        "repeats": volleys,
        "cache": [cache_state(one) for one in volleys],
        "headline": quoted,
    }
    live.line(_told(row.check, quoted))
    return Finding(row.check, data)


def _repeat(row: Row, endpoint: Endpoint, watch: Watch, number: int) -> dict[str, Any]:
    name = f"repeat {number + 1}"
    with watch.phase(f"{name} of {watch.repeats}", watch.repeats - number - 1):
        return volley(endpoint, row.shape, row.arrivals(name), nonce, watch.seen)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What it took until the rate was stable: each rate in tokens/s, seconds in all, and the last volley."""

    rates: tuple[float | None, ...]
    seconds: float
    stable: bool
    last: Mapping[str, Any]


def warm_up(row: Row, endpoint: Endpoint, watch: Watch) -> WarmUp:
    """Volleys until two rates in a row differ by less than a tenth, at most five."""
    rates: list[float | None] = []
    stable, start = False, time.monotonic()
    while not stable and len(rates) < MOST_WARM_UPS:
        with watch.phase(f"warm-up {len(rates) + 1}", watch.repeats):
            last = volley(endpoint, row.shape, row.arrivals("warm-up"), nonce, watch.seen)
        rates.append(last["output_rate"])
        stable = bool(len(rates) > 1 and rates[-1] and rates[-2] and abs(rates[-1] / rates[-2] - 1) < STABLE)
    return WarmUp(tuple(rates), time.monotonic() - start, stable, last)


def _calibrated(one: Mapping[str, Any], endpoint: Endpoint, watch: Watch) -> dict[str, Any]:
    """The client's own error at the concurrency and the event rate that the warm-up showed."""
    gaps = [stream["mean_gap_s"] for stream in one["samples"] if stream["mean_gap_s"]]
    gap_s = statistics.median(gaps) if gaps else statistics.median(stream["end_s"] for stream in one["samples"])
    with watch.phase("calibrating the client", watch.repeats):
        return calibrate(one["concurrency"], gap_s, reader=endpoint.reader)


# --- the canary step


def canary_step(endpoint: Endpoint, settings: Mapping[str, Any]) -> dict[str, Any]:
    """One short stream alone: the engine's step time in seconds (mean gap between events), to be the same later.

    The mean: a busy server may send several events in one packet, and then most gaps are nothing and one is long. Always the
    same prompt: with speculation a step's time depends on the text, and the prompt may be cached, since only steps are timed.
    """
    shape = Shape(settings["canary_tokens"], deadline_s=settings["deadline_s"])
    one = volley(endpoint, shape, (0.0,), lambda: CANARY)
    stream = one["samples"][0]
    return {
        "step_s": stream["mean_gap_s"],
        "events": stream["events"],
        "tokens": stream["completion_tokens"],
        "foreign": foreign(one) or None,
    }


def drift(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """Step time after over before, less one; None where there was no step."""
    return after["step_s"] / before["step_s"] - 1 if before["step_s"] and after["step_s"] else None


# --- what is shown while it runs


class Watch:
    """The live line of one row: phase, in flight, tokens/s by the server's counter, seconds, and what is left."""

    def __init__(self, check: str, live: Live, repeats: int) -> None:
        self.repeats = repeats
        self._check, self._live = check, live
        self._begin = self._start = time.monotonic()
        self._name, self._left = "", 0
        self._usual: float | None = None

    def phase(self, name: str, left: int) -> Watch:
        self._name, self._left = name, left
        return self

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        if self._name.startswith(("warm-up", "repeat")):
            self._usual = time.monotonic() - self._start

    def seen(self, progress: Progress, rate: float | None) -> None:
        now = time.monotonic()
        parts = [f"{progress.in_flight} in flight", f"{progress.finished} done"]
        parts += [f"{progress.waiting} to come"] if progress.waiting else []
        parts += [f"{rate:.1f} tok/s" if rate is not None else f"{progress.events} events"]
        parts += [f"{now - self._begin:.0f} s"]
        if self._usual is not None:
            parts += [f"about {max(self._usual * (self._left + 1) - (now - self._start), 0):.0f} s left"]
        self._live.show(f"{self._check}, {self._name}: {', '.join(parts)}")


def _told(check: str, quoted: Mapping[str, Any]) -> str:
    """One line a row."""
    rate, first = quoted["output_rate"], quoted["first_token_s_median"]
    spread = "" if rate["low"] is None else f" ({rate['low']:.1f} to {rate['high']:.1f})"
    speed = "no rate" if rate["mean"] is None else f"{rate['mean']:.1f}{spread} tok/s"
    return f"{check}: {speed}, first token {'unknown' if first is None else f'{first * 1000:.1f} ms'}"


# --- the figures that are quoted


def headline(volleys: Sequence[Mapping[str, Any]], slo: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Medians and percentiles over all streams, and rates with an interval by repeats."""
    streams = [stream for one in volleys for stream in one["samples"]]
    keys = ("first_token_s", "first_answer_s", "tpot_s", "mean_gap_s", "end_s", "decode_rate", "tokens_per_event")
    return {
        **{f"{key}_median": _median(streams, key) for key in keys},
        "percentiles": {key: _percentiles(streams, key) for key in SPREAD},
        "longest_gap_s": max((s["longest_gap_s"] for s in streams if s["longest_gap_s"] is not None), default=None),
        "read_lag_s": max((s["read_lag_s"] for s in streams), default=None),
        "output_rate": _interval([one["output_rate"] for one in volleys]),
        "decode": _sides(volleys),
        "prefill": {
            "client": _interval([_prefill_rate(one) for one in volleys]),
            "server": _interval([one["server"]["prefill_rate"]["value"] for one in volleys]),
        },
        "speculation": speculation(volleys),
        "fairness": _fairness(volleys),
        "goodput": goodput(volleys, slo) if slo else None,
    }


def _sides(volleys: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The decode rate of one stream as the client and as the server saw it; `agree` if their intervals meet."""
    client = _interval([one["decode_rate"] for one in volleys])
    server = _interval([one["server"]["decode_rate"]["value"] for one in volleys])
    uncorrected = _interval([one["server"]["decode_rate_uncorrected"]["value"] for one in volleys])
    known = client["low"] is not None and server["low"] is not None
    agree = client["low"] <= server["high"] and server["low"] <= client["high"] if known else None
    return {"client": client, "server": server, "server_uncorrected": uncorrected, "agree": agree}


def speculation(volleys: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accepted length (tokens a step that drafted: 1 + accepted / drafts), tokens a step, and steps/s of one stream, kept apart.

    A step gives one token and what it accepts, and the first token comes from the prefill: tokens - requests - accepted is the
    number of steps, also where a step need not draft (n-gram). Tokens a step times steps/s is the decode rate of the server;
    a faster engine and a luckier draft are different things.
    """
    keys = ("drafts", "accepted_tokens", "decode_s", "requests", "generation_tokens")
    told = [[_server(one, key) for one in volleys] for key in keys]
    if any(value is None for values in told for value in values) or not sum(told[0]):
        reason = next((one["server"]["drafts"]["reason"] for one in volleys if one["server"]["drafts"]["reason"]), None)
        nothing = dict.fromkeys(("accepted_length", "tokens_per_step", "steps_per_s"))
        return {**nothing, "reason": reason or "nothing was drafted"}
    drafts, accepted, seconds, requests, tokens = (sum(values) for values in told)
    steps = tokens - requests - accepted
    return {
        "accepted_length": 1 + accepted / drafts,
        "tokens_per_step": (tokens - requests) / steps if steps > 0 else None,
        "steps_per_s": steps / seconds if seconds > 0 else None,
        "reason": None,
    }


def _server(one: Mapping[str, Any], key: str) -> Any:
    """The server's own count, or None; some are kept beside ours."""
    figure = one["server"][key]
    return figure.get("server", figure)["value"]


def goodput(volleys: Sequence[Mapping[str, Any]], slo: Mapping[str, float]) -> dict[str, Any]:
    """Requests that met the stated limits, as a share (Wilson interval) and per second of the row.

    A request meets them if its wait and first token together stay within `first_token_s`, and its TPOT within `tpot_s`.
    """
    streams = [stream for one in volleys for stream in one["samples"]]
    met = sum(_meets(stream, slo) for stream in streams)
    seconds = sum(max(s["due_s"] + s["wait_s"] + s["end_s"] for s in one["samples"]) for one in volleys)
    share = wilson(met, len(streams))
    return {
        "slo": dict(slo),
        "met": met,
        "of": len(streams),
        "share": share.centre,
        "low": share.low,
        "high": share.high,
        "per_s": met / seconds if seconds > 0 else None,
    }


def _meets(stream: Mapping[str, Any], slo: Mapping[str, float]) -> bool:
    first, tpot = stream["first_token_s"], stream["tpot_s"]
    if first is None or tpot is None:
        return False
    return bool(stream["wait_s"] + first <= slo["first_token_s"] and tpot <= slo["tpot_s"])


def _prefill_rate(one: Mapping[str, Any]) -> float | None:
    """Prompt tokens / time to first token of one stream alone; of several at once, or of cached prompts, it says nothing."""
    stream = one["samples"][0]
    known = stream["prompt_tokens"] and stream["first_token_s"] and cache_state(one) == "cold"
    return stream["prompt_tokens"] / stream["first_token_s"] if known and len(one["samples"]) == 1 else None


def _interval(values: Sequence[float | None]) -> dict[str, Any]:
    good = [value for value in values if value is not None]
    found = t_interval(good)
    missing = f"{len(values) - len(good)} of {len(values)} repeats have none" if len(good) < len(values) else None
    return {
        "mean": found.centre,
        "low": found.low,
        "high": found.high,
        "n": found.n,
        "reason": missing or found.reason or None,
    }


def _percentiles(streams: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """p50, p90 and p99 over all streams, each withheld below its sample size."""
    values = [stream[key] for stream in streams if stream[key] is not None]
    figures = {f"p{share * 100:g}": quantile(values, share) for share in (0.5, 0.9, 0.99)} if values else {}
    return {
        "n": len(values),
        **{name: figure.value for name, figure in figures.items()},
        "withheld": [figure.reason for figure in figures.values() if figure.reason],
    }


def _median(streams: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [stream[key] for stream in streams]
    return statistics.median(values) if values and all(value is not None for value in values) else None


def _fairness(volleys: Sequence[Mapping[str, Any]]) -> float | None:
    """Slowest stream over fastest, by end-to-end time, in the worst repeat: 1 is fair."""
    ends = [[stream["end_s"] for stream in one["samples"]] for one in volleys]
    return max((max(each) / min(each) for each in ends if each and min(each) > 0), default=None)


# --- every figure, made again


def audit_row(
    shape: Callable[[Mapping[str, Any]], Shape], arrivals: Callable[[Mapping[str, Any], str], Sequence[float]]
) -> Audit:
    """The audit of a row that asks for requests of this shape, arriving so in the repeat of a name."""

    def audit(finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
        data, asked = finding.data, shape(settings)
        told = {"tokens": asked.tokens, "prompt_class": asked.prompt_class}
        told["method"] = "chat" if asked.chat else "completions"
        yield from same("row", {key: data[key] for key in told}, told)
        yield from same("repeats", len(data["repeats"]), settings["repeats"])
        names = [f"repeat {number + 1}" for number in range(len(data["repeats"]))]
        for number, (name, one) in enumerate(zip(names, data["repeats"], strict=True)):
            yield from volley_audit(f"repeats.{number}", one, arrivals(settings, name))
        yield from _audit_quoted(data, settings)
        yield from _audit_around(data, settings)

    return audit


def _audit_quoted(data: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    """The figures that are quoted."""
    slo = settings.get("slo") or (settings["poisson"]["slo"] if data["headline"]["goodput"] else None)
    made = headline(data["repeats"], slo)
    made["unresolved"] = unresolved(made, data["calibration"], data["tokens"])
    yield from same("headline", data["headline"], made)
    yield from same("cache", data["cache"], [cache_state(one) for one in data["repeats"]])


def _audit_around(data: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    """Warm-up, calibration, canaries, and the order of the repeats."""
    rates, canary, calibration = data["warm_up"]["rates"], data["canary"], data["calibration"]
    settled = len(rates) > 1 and rates[-1] and rates[-2] and abs(rates[-1] / rates[-2] - 1) < STABLE
    yield from same("warm_up.stable", data["warm_up"]["stable"], bool(settled))
    if not 1 <= len(rates) <= MOST_WARM_UPS:
        yield f"warm_up.rates are {len(rates)}"
    yield from same("canary.drift", canary["drift"], drift(canary["before"], canary["after"]))
    yield from calibration_audit(calibration)
    ends = [max(s["at_s"] + s["end_s"] for s in one["samples"]) for one in data["repeats"]]
    starts = [min(s["at_s"] for s in one["samples"]) for one in data["repeats"]]
    for number, (end, start) in enumerate(zip(ends, starts[1:], strict=False)):
        if start < end - SLACK_S:
            yield f"repeats.{number + 1} begins before repeats.{number} has ended"
    for one in data["repeats"]:
        yield from _audit_arrivals(one["samples"])


def _audit_arrivals(samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Every stream was sent when it was due and had waited, on the row's own clock."""
    begins = [one["at_s"] - one["due_s"] - one["wait_s"] for one in samples]
    for number, begin in enumerate(begins):
        if abs(begin - begins[0]) > SLACK_S:
            yield f"samples.{number}: at_s, due_s and wait_s are not those of one row"


def seconds_of(data: Mapping[str, Any]) -> float:
    """The least time that the row took, by its own stamps."""
    first = min(s["at_s"] for s in data["repeats"][0]["samples"])
    last = max(s["at_s"] + s["end_s"] for one in data["repeats"] for s in one["samples"])
    return float(data["warm_up"]["seconds"] + last - first)


# --- the verdict


def judge_row(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS if every stream has exactly the asked tokens, every repeat is provably ours alone and cold, the client was
    calibrated, the engine did not change meanwhile, and the recipe's limits hold."""
    data = finding.data
    volleys = data["repeats"]
    if len(volleys) < LEAST_REPEATS:
        return Verdict(Status.ERROR, "HARNESS", f"{len(volleys)} repeats, expected at least {LEAST_REPEATS}")
    return (
        _void(volleys)
        or _uncalibrated(data["calibration"])
        or _drifted(data["canary"], limits)
        or _lengths(volleys, data["tokens"])
        or _limits(data["headline"], limits)
        or PASS
    )


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


def _uncalibrated(calibration: Mapping[str, Any] | None) -> Verdict | None:
    if calibration and calibration["events"] > 0:
        return None
    return Verdict(Status.ERROR, "HARNESS", "void: the client's own error was not measured")


def _drifted(canary: Mapping[str, Any], limits: Mapping[str, Any]) -> Verdict | None:
    for when in ("before", "after"):
        if canary[when]["foreign"]:
            text = f"void, canary {when} the row: {canary[when]['foreign']}"
            return Verdict(Status.ERROR, "FOREIGN_TRAFFIC", text)
    if math.isinf(limits.get("max_drift", math.inf)):
        return None
    if canary["drift"] is None:
        return Verdict(Status.ERROR, "DRIFT", "void: the canary step shows no step time, so a drift cannot be seen")
    if abs(canary["drift"]) > limits["max_drift"]:
        steps = f"{canary['before']['step_s'] * 1000:.1f} ms before and {canary['after']['step_s'] * 1000:.1f} ms after"
        text = f"void: a step took {steps} the row, a drift of {canary['drift']:+.0%}, limit {limits['max_drift']:.0%}"
        return Verdict(Status.ERROR, "DRIFT", text)
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
    """Limits of the recipe, each named with what was found: `max_fairness`, `max_gap_s`, `min_goodput`."""
    for name, found in (("max_fairness", quoted["fairness"]), ("max_gap_s", quoted["longest_gap_s"])):
        if name in limits and (found is None or found > limits[name]):
            return Verdict(Status.FAIL, "LIMIT_EXCEEDED", f"{name} is {limits[name]:g}, found {found}")
    good = quoted["goodput"]
    if good and "min_goodput" in limits and (good["share"] is None or good["share"] < limits["min_goodput"]):
        text = f"min_goodput is {limits['min_goodput']:g}, found {good['share']} ({good['met']} of {good['of']})"
        return Verdict(Status.FAIL, "LIMIT_EXCEEDED", text)
    return None
