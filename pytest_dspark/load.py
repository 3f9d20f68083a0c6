"""Load for timed rows: unique prompts, several streams in one loop, and what the server counted meanwhile.

A timed prompt begins with a nonce: a raw completion has no chat template before it, a chat has it as its system message, so
nothing is shared from the first words on. Lengths are forced (end of sequence ignored, minimum = maximum). A volley's server
readings are taken while nothing of ours is in flight, and compared with our own counts: traffic that is not ours makes the
row void, cached tokens make it warm.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pytest_dspark import timing
from pytest_dspark.audit import SLACK_S as CLOCKS_S
from pytest_dspark.audit import near, rising, same
from pytest_dspark.metrics import Figure, Metrics, delta, restarted
from pytest_dspark.reply import Reply, RequestError

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint, Progress

WATCH_S = 0.5
SETTLE_S = 5.0
SLACK_S = 0.25  # a server may count a request as running for a moment after its last byte
PROMPT_CLASSES: Mapping[str, str] = {
    "prose": "Tell a long story about a lighthouse and the people who kept it.",
    "code": "Write a Python module with a class for a binary search tree, its methods, and tests.",
    "list": "List the integers from one upwards, one per line, each with its name in words.",
}
_WORDS = "amber birch copper delta ember flint grove heron iris juniper kelp larch maple north otter pine quartz reed".split()

Seen = Callable[["Progress", "float | None"], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """What one request of a timed row asks: `tokens` exactly, after a prompt of the class with `filler` extra words.

    `chat` asks through the chat template, where a model may reason before it answers; else it is a raw completion.
    """

    tokens: int
    prompt_class: str = "prose"
    filler: int = 0
    deadline_s: float = 600.0
    chat: bool = False


def prompts(shape: Shape, count: int, nonce: Callable[[], str]) -> Iterator[str]:
    """Prompts that differ from their first token on."""
    for _ in range(count):
        tag = nonce()
        chooser = random.Random(tag)
        words = " ".join(chooser.choice(_WORDS) for _ in range(shape.filler))
        yield f"{tag} {words}\n{PROMPT_CLASSES[shape.prompt_class]}\n"


def bodies(shape: Shape, count: int, nonce: Callable[[], str]) -> Iterator[dict[str, Any]]:
    """Request bodies of forced length."""
    length = {"max_tokens": shape.tokens, "min_tokens": shape.tokens, "ignore_eos": True}
    for prompt in prompts(shape, count, nonce):
        tag, _, rest = prompt.partition(" ")
        messages = [{"role": "system", "content": tag}, {"role": "user", "content": rest}]
        yield length | ({"messages": messages} if shape.chat else {"prompt": prompt})


def together(count: int) -> tuple[float, ...]:
    """All at once."""
    return (0.0,) * count


def staggered(count: int, every_s: float) -> tuple[float, ...]:
    """One every so many seconds."""
    return tuple(every_s * number for number in range(count))


def poisson(count: int, rate: float, seed: str) -> tuple[float, ...]:
    """Open-loop arrivals, `rate` a second on average: exponential gaps, the first at once; the same for the same seed."""
    chooser = random.Random(seed)
    return tuple(accumulate((chooser.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def volley(
    endpoint: Endpoint,
    shape: Shape,
    arrivals: Sequence[float],
    nonce: Callable[[], str],
    seen: Seen = lambda progress, rate: None,  # noqa: ARG005
) -> dict[str, Any]:
    """A stream for each arrival, each with a prompt of its own; one repeat of a timed row as data.

    `seen` is told several times a second how far it is and the server's own tokens/s, if it tells. Raises the first
    RequestError after every stream has ended.
    """
    from pytest_dspark.endpoint import Asked  # a judge imports this module without a client

    asked = [Asked(body, due_s) for body, due_s in zip(bodies(shape, len(arrivals), nonce), arrivals, strict=True)]
    before = endpoint.metrics()
    with watched(endpoint, before) as queue:
        outcomes = endpoint.stream_many(
            asked, deadline_s=shape.deadline_s, on_tick=lambda progress: seen(progress, queue.rate)
        )
    replies = _all_good(outcomes)
    after = _settled(endpoint, before, len(replies))
    samples = [sample(reply, due_s) for reply, due_s in zip(replies, arrivals, strict=True)]
    return {
        "concurrency": in_flight(samples),
        "samples": samples,
        "output_rate": output_rate(samples),
        "decode_rate": decode_rate(samples),
        "server": server_side(before, after, samples, queue.most),
    }


def _all_good(outcomes: Sequence[Reply | RequestError]) -> list[Reply]:
    good = []
    for number, outcome in enumerate(outcomes, 1):
        if isinstance(outcome, RequestError):
            outcome.message = f"stream {number} of {len(outcomes)}: {outcome.message}"
            raise outcome
        good.append(outcome)
    return good


def _settled(endpoint: Endpoint, before: Metrics, finished: int) -> Metrics:
    """A reading after the server has counted our requests as finished; the last one if it never does."""
    wait = threading.Event()
    after = endpoint.metrics()
    for _ in range(int(SETTLE_S / 0.1)):
        done = delta(before, after, timing.FINISHED).value
        if done is None or done >= finished:
            break
        wait.wait(0.1)
        after = endpoint.metrics()
    return after


class Queue:
    """What the server's own counters say while streams run: the most running + waiting, and tokens/s."""

    def __init__(self, before: Metrics) -> None:
        self.most: float | None = None
        self.rate: float | None = None
        self._last, self._at = before, time.monotonic()

    def look(self, now: Metrics) -> None:
        running, waiting = now.value("vllm:num_requests_running"), now.value("vllm:num_requests_waiting")
        if running is not None and waiting is not None:
            self.most = max(self.most or 0.0, running + waiting)
        at, grown = time.monotonic(), delta(self._last, now, timing.GENERATED).value
        self.rate = None if grown is None else grown / (at - self._at)
        self._last, self._at = now, at


@contextmanager
def watched(endpoint: Endpoint, before: Metrics) -> Iterator[Queue]:
    """Look at the server's queue while the block runs."""
    queue, over = Queue(before), threading.Event()

    def look() -> None:
        while not over.wait(WATCH_S):
            queue.look(endpoint.metrics())

    watcher = threading.Thread(target=look, name="dspark-queue", daemon=True)
    watcher.start()
    try:
        yield queue
    finally:
        over.set()
        watcher.join()


def sample(reply: Reply, due_s: float = 0.0) -> dict[str, Any]:
    """One stream as data; every time in seconds, None where there was no such event. `at_s` places streams of one row."""
    times, usage = reply.timing, reply.usage
    assert times is not None
    tokens = usage.completion_tokens if usage else None
    return {
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "completion_tokens": tokens,
        "cached_tokens": usage.cached_tokens if usage else None,
        "finish_reason": reply.finish_reason,
        "due_s": due_s,
        "at_s": times.at_s,
        "wait_s": times.wait_s,
        "read_lag_s": times.read_lag_s,
        "first_token_s": times.first_token_s,
        "first_answer_s": times.first_answer_s,
        "last_token_s": times.last_token_s,
        "end_s": times.end_s,
        "events": times.events,
        "tpot_s": timing.tpot(times, tokens).value,
        "decode_rate": timing.decode_rate(times, tokens).value,
        "tokens_per_event": timing.tokens_per_event(times, tokens).value,
        "mean_gap_s": timing.mean_gap(times).value,
        "longest_gap_s": timing.longest_gap(times).value,
        "prompt_sha256": reply.prompt_sha256,
    }


def in_flight(samples: Sequence[Mapping[str, Any]], slack_s: float = 0.0) -> int:
    """The most streams at one moment, from the first byte sent to `slack_s` after the last byte read."""
    ends = [one["at_s"] + one["end_s"] + slack_s for one in samples]
    moments = [(one["at_s"], 1) for one in samples] + [(end, -1) for end in ends]
    return max(accumulate(step for _, step in sorted(moments)), default=0)


def output_rate(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Aggregate output rate in tokens/s: all completion tokens / (last token of any stream - first byte sent of any)."""
    rows = [(one["completion_tokens"], one["last_token_s"]) for one in samples]
    if not rows or any(value is None for row in rows for value in row):
        return None
    span = max(one["at_s"] + one["last_token_s"] for one in samples) - min(one["at_s"] for one in samples)
    return float(sum(tokens for tokens, _ in rows) / span) if span > 0 else None


def decode_rate(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Decode rate of one stream in tokens/s, all streams together: sum of (tokens - 1) / sum of (last - first token time).

    The client's side of `timing.server_decode_rate`, which is the same quotient of the server's own sums.
    """
    rows = [(one["completion_tokens"], one["first_token_s"], one["last_token_s"]) for one in samples]
    if not rows or any(value is None for row in rows for value in row):
        return None
    span = sum(last - first for _, first, last in rows)
    return float(sum(tokens - 1 for tokens, _, _ in rows) / span) if span > 0 else None


def server_side(
    before: Metrics, after: Metrics, samples: Sequence[Mapping[str, Any]], most: float | None
) -> dict[str, Any]:
    """What the server counted during the volley, beside what we counted; null with a reason where it does not say."""
    finished = delta(before, after, timing.FINISHED)
    return {
        "restarted": restarted(before, after),
        "requests": {"server": _figure(finished), "ours": len(samples)},
        "prompt_tokens": _both(delta(before, after, "vllm:prompt_tokens_total"), samples, "prompt_tokens"),
        "generation_tokens": _both(delta(before, after, timing.GENERATED), samples, "completion_tokens"),
        "most_in_flight": {"server": most, "ours": in_flight(samples, SLACK_S)},
        "prefix_hits": _figure(delta(before, after, "vllm:prefix_cache_hits_total")),
        "preemptions": _figure(delta(before, after, "vllm:num_preemptions_total")),
        "decode_rate": _figure(timing.server_decode_rate(before, after)),
        "decode_rate_uncorrected": _figure(timing.server_decode_rate_uncorrected(before, after)),
        "prefill_rate": _figure(timing.server_prefill_rate(before, after)),
        "decode_s": _figure(delta(before, after, timing.DECODE_S)),
        "prefill_s": _figure(delta(before, after, timing.PREFILL_S)),
        "drafts": _figure(delta(before, after, "vllm:spec_decode_num_drafts_total")),
        "accepted_tokens": _figure(delta(before, after, "vllm:spec_decode_num_accepted_tokens_total")),
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {"value": figure.value, "reason": figure.reason or None}


def _both(figure: Figure, samples: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    ours = [one[key] for one in samples]
    return {"server": _figure(figure), "ours": None if any(value is None for value in ours) else sum(ours)}


# --- the figures of a volley, made again


def audit(name: str, one: Mapping[str, Any], arrivals: Sequence[float]) -> Iterator[str]:
    """What of a stored volley does not follow from its raw samples and the server's counters."""
    samples = one["samples"]
    yield from same(f"{name}.due_s", [stream["due_s"] for stream in samples], list(arrivals))
    for number, stream in enumerate(samples):
        yield from _audit_stream(f"{name}.samples.{number}", stream)
    made = {"concurrency": in_flight(samples), "output_rate": output_rate(samples), "decode_rate": decode_rate(samples)}
    yield from same(name, {key: one[key] for key in made}, made)
    yield from _audit_server(f"{name}.server", one["server"], samples)


def _audit_stream(name: str, stream: Mapping[str, Any]) -> Iterator[str]:
    first, last, events, tokens = (
        stream[key] for key in ("first_token_s", "last_token_s", "events", "completion_tokens")
    )
    times = timing.Timing(first, stream["first_answer_s"], last, stream["end_s"])
    yield from rising(name, start=0.0, first_token_s=first, first_answer_s=stream["first_answer_s"], last_token_s=last)
    yield from rising(name, CLOCKS_S, last_token_s=last, end_s=stream["end_s"])
    yield from rising(name, CLOCKS_S, due_s=0.0, wait_s=stream["wait_s"])
    yield from same(f"{name}.tpot_s", stream["tpot_s"], timing.tpot(times, tokens).value)
    yield from same(f"{name}.decode_rate", stream["decode_rate"], timing.decode_rate(times, tokens).value)
    yield from near(
        f"{name}.tokens_per_event", stream["tokens_per_event"], tokens / events if tokens and events else None
    )
    span = last - first if events > 1 else None
    yield from near(f"{name}.mean_gap_s", stream["mean_gap_s"], span / (events - 1) if span is not None else None)
    if (
        span is not None
        and not stream["mean_gap_s"] <= stream["longest_gap_s"] * (1 + 1e-9) <= span * (1 + 1e-6) + 1e-9
    ):
        yield f"{name}.longest_gap_s is {stream['longest_gap_s']!r}, not between the mean gap and the whole"


def _audit_server(name: str, server: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    value = {key: one["value"] for key, one in server.items() if isinstance(one, Mapping) and "value" in one}
    value |= {key: server[key]["server"]["value"] for key in ("requests", "prompt_tokens", "generation_tokens")}
    ours: dict[str, int | None] = {"requests": len(samples), "most_in_flight": in_flight(samples, SLACK_S)}
    ours |= {
        key: _summed(samples, one)
        for key, one in (("prompt_tokens", "prompt_tokens"), ("generation_tokens", "completion_tokens"))
    }
    for key, made in ours.items():
        yield from same(f"{name}.{key}.ours", server[key]["ours"], made)
    spoken = (
        None
        if None in (value["generation_tokens"], value["requests"])
        else value["generation_tokens"] - value["requests"]
    )
    yield from near(f"{name}.decode_rate", value["decode_rate"], _quotient(spoken, value["decode_s"]))
    yield from near(
        f"{name}.decode_rate_uncorrected",
        value["decode_rate_uncorrected"],
        _quotient(value["generation_tokens"], value["decode_s"]),
    )
    yield from near(
        f"{name}.prefill_rate", value["prefill_rate"], _quotient(value["prompt_tokens"], value["prefill_s"])
    )


def _summed(samples: Sequence[Mapping[str, Any]], key: str) -> int | None:
    found = [one[key] for one in samples]
    return None if any(value is None for value in found) else sum(found)


def _quotient(amount: float | None, over: float | None) -> float | None:
    return amount / over if amount is not None and amount > 0 and over is not None and over > 0 else None


# --- judging a volley


def cache_state(one: Mapping[str, Any]) -> str:
    """`cold`, `warm` or `unknown`: the server's hit counter first, then usage details; neither is not cold."""
    hits = one["server"]["prefix_hits"]["value"]
    if hits is not None:
        return "warm" if hits > 0 else "cold"
    cached = [stream["cached_tokens"] for stream in one["samples"]]
    if any(value is None for value in cached):
        return "unknown"
    return "warm" if sum(cached) > 0 else "cold"


def foreign(one: Mapping[str, Any]) -> str:
    """Why the row holds traffic that is not ours; empty if every counter equals ours or is not told."""
    server = one["server"]
    if server["restarted"]:
        return str(server["restarted"])
    for name in ("requests", "prompt_tokens", "generation_tokens"):
        theirs, ours = server[name]["server"]["value"], server[name]["ours"]
        if theirs is not None and ours is not None and theirs != ours:
            return f"the server counted {theirs:g} {name.replace('_', ' ')}, ours are {ours}"
    most = server["most_in_flight"]
    if most["server"] is not None and most["server"] > most["ours"]:
        return f"{most['server']:g} requests were in flight, ours are {most['ours']}"
    return ""


def provable(one: Mapping[str, Any]) -> bool:
    """Whether the server told enough to say that the traffic was ours alone."""
    return one["server"]["requests"]["server"]["value"] is not None
