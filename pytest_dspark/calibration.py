"""The client measures itself: streams of a known schedule on loopback, at a row's concurrency and event rate.

The truth is the server's own record (`schedule.py`): when a request's first byte arrived and when each event was sent, on
the machine's one monotonic clock. What the client reports beyond that is its error, and each timed row carries it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytest_dspark.audit import rising, same
from pytest_dspark.errors import DsparkError
from pytest_dspark.reply import Reply
from pytest_dspark.timing import quantile, sample_floor

EVENTS = sample_floor(0.99) + 1
MOST_S = 5.0
LEAST_GAP_S = 0.001
FIRST_S = 0.2
CLEARLY_ABOVE = 10.0
"""A figure is well above the client's error from ten times of it on."""


def calibrate(concurrency: int, gap_s: float, *, reader: str = "") -> dict[str, Any]:
    """The client's own error at that many streams with an event every `gap_s` seconds each.

    Long enough for a p99 of the stamps; where that would take longer than five seconds the events come faster, which is the
    harder test. Raises HARNESS if the server's record and the client's do not match one to one.
    """
    from pytest_dspark.endpoint import Asked, Endpoint  # a judge imports this module without a client

    each = max(2, math.ceil(EVENTS / concurrency))
    gap = max(LEAST_GAP_S, min(gap_s, MOST_S / each))
    with schedule_server() as url:
        endpoint = Endpoint(f"{url}/s/{FIRST_S}/{gap:.6f}/{each}/1", "m", reader=reader)
        asked = [Asked({"prompt": "x", "max_tokens": each, "user": str(n)}) for n in range(concurrency)]
        outcomes = endpoint.stream_many(asked, deadline_s=60.0, stall_s=30.0)
        log = ask_log(url)
    return errors(outcomes, log) | {
        "concurrency": concurrency,
        "gap_s": gap,
        "row_gap_s": gap_s,
        "reader": endpoint.reader,
    }


@contextmanager
def schedule_server() -> Iterator[str]:
    """The schedule server as a process of its own; gives its base URL. It ends when its standard input closes."""
    path = str(Path(__file__).with_name("schedule.py"))
    with subprocess.Popen([sys.executable, "-I", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        try:
            line = process.stdout.readline()
            if not line:
                raise DsparkError("HARNESS", f"the schedule server ended at once: {sys.executable} -I {path}")
            yield f"http://127.0.0.1:{json.loads(line)['port']}"
        finally:
            process.stdin.close()
            process.terminate()


def ask_log(url: str, method: str = "GET", *, timeout_s: float = 10.0) -> Mapping[str, Any]:
    """The schedule server's record, by no proxy; DELETE clears it after it was told."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(f"{url}/log", method=method), timeout=timeout_s) as answer:
        log: Mapping[str, Any] = json.load(answer)
    return log


def errors(outcomes: Sequence[Any], log: Mapping[str, Any]) -> dict[str, Any]:
    """Reported less true, in seconds: of every event's stamp, and of each stream's first token."""
    records = {one["user"]: one for one in log["requests"]}
    stamps: list[float] = []
    firsts: list[float] = []
    for number, reply in enumerate(outcomes):
        record = records.get(str(number))
        if not isinstance(reply, Reply) or reply.timing is None or record is None:
            raise DsparkError("HARNESS", f"calibration: stream {number} did not come through: {reply}")
        if not record["stamps"] or len(record["stamps"]) != reply.timing.events:
            found = f"{len(record['stamps'])} events were sent, {reply.timing.events} were read"
            raise DsparkError("HARNESS", f"calibration: stream {number}: {found}")
        at_s, sent = reply.timing.at_s, record["stamps"]
        stamps += [abs(at_s + mine - true) for mine, true in zip(reply.timing.stamps, sent, strict=True)]
        firsts.append(abs(reply.timing.stamps[0] - (sent[0] - record["arrival"])))
    return {
        "events": len(stamps),
        "stamp_error_s": _spread(stamps),
        "first_token_error_s": _spread(firsts),
        "server_lateness_s": {"p50": log["lateness_p50_ms"] / 1000, "p99": log["lateness_p99_ms"] / 1000},
    }


def _spread(samples: Sequence[float]) -> dict[str, Any]:
    p99 = quantile(samples, 0.99)
    return {
        "p50": quantile(samples, 0.5).value,
        "p99": p99.value,
        "p99_reason": p99.reason or None,
        "max": max(samples),
    }


def audit(found: Mapping[str, Any]) -> Iterator[str]:
    """What of a stored calibration does not follow from the rest of it."""
    concurrency = found["concurrency"]
    each = max(2, math.ceil(EVENTS / concurrency))
    yield from same("calibration.events", found["events"], each * concurrency)
    yield from same("calibration.gap_s", found["gap_s"], max(LEAST_GAP_S, min(found["row_gap_s"], MOST_S / each)))
    for name in ("stamp_error_s", "first_token_error_s"):
        spread = found[name]
        yield from rising(f"calibration.{name}", least=0.0, p50=spread["p50"], p99=spread["p99"], max=spread["max"])
        count = found["events"] if name == "stamp_error_s" else concurrency
        why = quantile([0.0] * count, 0.99).reason or None
        yield from same(f"calibration.{name}.p99_reason", spread["p99_reason"], why)
        yield from same(f"calibration.{name}.p99", spread["p99"] is None, why is not None)
    lateness = found["server_lateness_s"]
    yield from rising("calibration.server_lateness_s", p50=lateness["p50"], p99=lateness["p99"])


def bound(spread: Mapping[str, Any]) -> float:
    """The error to reckon with, in seconds: p99, or the largest seen where there are too few for that."""
    return float(spread["max"] if spread["p99"] is None else spread["p99"])


def unresolved(headline: Mapping[str, Any], calibration: Mapping[str, Any], tokens: int) -> list[str]:
    """The figures of a row that are not well above the client's own error, each with both numbers.

    A gap has the error of two stamps; TPOT has that of two stamps over n - 1 tokens.
    """
    stamp, first = bound(calibration["stamp_error_s"]), bound(calibration["first_token_error_s"])
    floors = {
        "first_token_s_median": first,
        "first_answer_s_median": first,
        "mean_gap_s_median": 2 * stamp,
        "longest_gap_s": 2 * stamp,
        "tpot_s_median": 2 * stamp / max(tokens - 1, 1),
    }
    return [
        f"{name}: {headline[name]:.6f} s is not {CLEARLY_ABOVE:g} times the client's own error of {error:.6f} s"
        for name, error in floors.items()
        if headline.get(name) is not None and headline[name] < CLEARLY_ABOVE * error
    ]
