"""Load for timed rows: unique prompts, several streams at once, and what the server counted meanwhile.

A timed prompt is a raw completion that begins with a nonce: no chat template, so nothing is shared from the first token
on. Lengths are forced (end of sequence ignored, minimum = maximum). A volley's server readings are taken while nothing of
ours is in flight, and compared with our own counts: traffic that is not ours makes the row void, cached tokens make it warm.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pytest_dspark import timing
from pytest_dspark.endpoint import Endpoint, Reply
from pytest_dspark.metrics import Figure, Metrics, delta, restarted

WATCH_S = 0.5
LOOK_S = 0.2
SETTLE_S = 5.0
PROMPT_CLASSES: Mapping[str, str] = {
    "prose": "Tell a long story about a lighthouse and the people who kept it.",
    "code": "Write a Python module with a class for a binary search tree, its methods, and tests.",
    "list": "List the integers from one upwards, one per line, each with its name in words.",
}
_WORDS = "amber birch copper delta ember flint grove heron iris juniper kelp larch maple north otter pine quartz reed".split()


@dataclass(frozen=True, slots=True)
class Shape:
    """What one request of a timed row asks: `tokens` exactly, after a prompt of the class with `filler` extra words."""

    tokens: int
    prompt_class: str = "prose"
    filler: int = 0
    deadline_s: float = 600.0


def prompts(shape: Shape, count: int, nonce: Callable[[], str]) -> Iterator[str]:
    """Prompts that differ from their first token on."""
    for _ in range(count):
        tag = nonce()
        chooser = random.Random(tag)
        words = " ".join(chooser.choice(_WORDS) for _ in range(shape.filler))
        yield f"{tag} {words}\n{PROMPT_CLASSES[shape.prompt_class]}\n"


def volley(endpoint: Endpoint, shape: Shape, concurrency: int, nonce: Callable[[], str]) -> dict[str, Any]:
    """`concurrency` streams at once, each with a prompt of its own; one repeat of a timed row as data.

    Raises the first EndpointError after every stream has ended.
    """
    given = list(prompts(shape, concurrency, nonce))
    before = endpoint.metrics()
    barrier = threading.Barrier(concurrency)
    with watched(endpoint) as most, ThreadPoolExecutor(concurrency) as pool:
        try:
            jobs = [pool.submit(_stream, endpoint, shape, prompt, barrier) for prompt in given]
            # In short sleeps: a signal's handler runs only when the main thread wakes.
            while (state := wait(jobs, timeout=LOOK_S, return_when=FIRST_EXCEPTION)).not_done:
                for job in state.done:
                    job.result()
            replies = [job.result() for job in jobs]
        except BaseException:
            # A time-out or a signal in this thread, or one stream that failed: the others must not hold it up.
            barrier.abort()
            endpoint.close()
            raise
    after = _settled(endpoint, before, concurrency)
    samples = [sample(reply) for reply in replies]
    return {
        "concurrency": concurrency,
        "samples": samples,
        "output_rate": _aggregate(samples),
        "server": server_side(before, after, samples, most()),
    }


def _stream(endpoint: Endpoint, shape: Shape, prompt: str, barrier: threading.Barrier) -> Reply:
    with suppress(threading.BrokenBarrierError):
        barrier.wait()
    return endpoint.complete(
        prompt,
        max_tokens=shape.tokens,
        min_tokens=shape.tokens,
        ignore_eos=True,
        stream=True,
        deadline_s=shape.deadline_s,
    )


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


@contextmanager
def watched(endpoint: Endpoint) -> Iterator[Callable[[], float | None]]:
    """Look at the server's queue while the block runs; gives the largest running + waiting that was seen."""
    seen: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(WATCH_S):
            now = endpoint.metrics()
            running, waiting = now.value("vllm:num_requests_running"), now.value("vllm:num_requests_waiting")
            if running is not None and waiting is not None:
                seen.append(running + waiting)

    watcher = threading.Thread(target=look, name="dspark-queue", daemon=True)
    watcher.start()
    try:
        yield lambda: max(seen, default=None)
    finally:
        over.set()
        watcher.join()


def sample(reply: Reply) -> dict[str, Any]:
    """One stream as data; every time in seconds, None where there was no such event."""
    times, usage = reply.timing, reply.usage
    assert times is not None
    tokens = usage.completion_tokens if usage else None
    return {
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "completion_tokens": tokens,
        "cached_tokens": usage.cached_tokens if usage else None,
        "finish_reason": reply.finish_reason,
        "wait_s": times.wait_s,
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


def _aggregate(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Aggregate output rate in tokens/s: all completion tokens over the time of the last token of any stream."""
    tokens = [one["completion_tokens"] for one in samples]
    ends = [one["last_token_s"] for one in samples]
    if any(value is None for value in [*tokens, *ends]) or not max(ends):
        return None
    return float(sum(tokens) / max(ends))


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
        "most_in_flight": {"server": most, "ours": len(samples)},
        "prefix_hits": _figure(delta(before, after, "vllm:prefix_cache_hits_total")),
        "preemptions": _figure(delta(before, after, "vllm:num_preemptions_total")),
        "decode_rate": _figure(timing.server_decode_rate(before, after)),
        "decode_rate_uncorrected": _figure(timing.server_decode_rate_uncorrected(before, after)),
        "drafts": _figure(delta(before, after, "vllm:spec_decode_num_drafts_total")),
        "accepted_tokens": _figure(delta(before, after, "vllm:spec_decode_num_accepted_tokens_total")),
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {"value": figure.value, "reason": figure.reason or None}


def _both(figure: Figure, samples: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    ours = [one[key] for one in samples]
    return {"server": _figure(figure), "ours": None if any(value is None for value in ours) else sum(ours)}


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
