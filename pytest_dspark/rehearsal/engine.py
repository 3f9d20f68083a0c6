"""The engine core: one loop of steps over the requests that run, as many as fit; the others wait, first come first served.

A step computes up to --max-num-batched-tokens of prompts and gives each request that decodes one event of 1 to K + 1
tokens. All ranks take part in a step: it ends when the workers have answered, so a worker that stands still (paused, cut
off) makes the engine stand still, while the API goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

import kvpool
import metrics
from argv import Settings
from faults import Faults
from pace import Pace
from sequence import Event, Sequence

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
IDLE_LOOK_S = 0.02
STEP_TIMEOUT_S = 300.0
LONG = 2000

Sync = Callable[[], Awaitable[None]]
Told = Callable[[int, bool], None]


class Engine:
    """`sync` is one round trip to the workers; `told` gets the tokens generated so far, and whether any were decoded."""

    def __init__(
        self, settings: Settings, pool: int, pace: Pace, faults: Faults, sync: Sync, told: Told, lossy: int = 0
    ) -> None:
        self.pool, self._lossy = pool, lossy
        self.numbers = metrics.Numbers()
        self.dead = False
        self._settings, self._pace, self._faults, self._sync = settings, pace, faults, sync
        self._told = told
        self._cache = kvpool.PrefixCache(settings.block_size, pool, enabled=settings.enable_prefix_caching)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._wake = asyncio.Event()
        self._dawdled = False

    def submit(self, sequence: Sequence) -> None:
        """Queue a request; what becomes of it arrives in its `events`."""
        if self.dead:
            sequence.events.put_nowait(Event(error=DEAD))
            return
        sequence.lossy = self._lossy
        self._waiting.append(sequence)
        self._gauges()
        self._wake.set()

    def kill(self) -> None:
        """Every request that is here ends with the engine's error."""
        self.dead = True
        for sequence in (*self._running, *self._waiting):
            sequence.events.put_nowait(Event(error=DEAD))
        self._running.clear()
        self._waiting.clear()
        self._gauges()

    async def run(self, step_timeout_s: float) -> None:
        """Steps for ever. Raises TimeoutError when the workers do not answer a step in time."""
        while True:
            self._drop_gone()
            self._admit()
            self._gauges()
            if self._running:
                await self._step(step_timeout_s)
            elif self._waiting:
                await asyncio.sleep(IDLE_LOOK_S)
            else:
                self._wake.clear()
                await self._wake.wait()

    # --- who runs

    def _drop_gone(self) -> None:
        for sequence in [s for s in (*self._running, *self._waiting) if s.gone()]:
            self._forget(sequence)
            self.numbers.finished["abort"] += 1
            sequence.events.put_nowait(Event(error="the client went away"))

    def _forget(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)

    def _held(self) -> int:
        return sum(sequence.length for sequence in self._running)

    def _admit(self) -> None:
        """The first in the queue, while it fits; one that never fits keeps all behind it waiting."""
        while self._waiting and len(self._running) < self._settings.max_num_seqs:
            if self._held() + self._waiting[0].length + 1 > self.pool or self._ignored(self._waiting[0]):
                return
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            self._begin(sequence)
            if "swapped_answers" in self._faults or ("cross_talk" in self._faults and sequence.retrieves):
                self._cross(sequence)

    def _ignored(self, sequence: Sequence) -> bool:
        least = self._faults.number("never_scheduled")
        return least is not None and sequence.prompt_tokens >= least

    def _begin(self, sequence: Sequence) -> None:
        numbers = self.numbers
        sequence.computed = self._cache.hits(sequence.ids)
        if not sequence.scheduled:
            sequence.cached = sequence.computed
            numbers.prefix_queries += sequence.prompt_tokens
            numbers.prefix_hits += sequence.cached
            sequence.scheduled = time.monotonic()
            numbers.observe("request_queue_time_seconds", sequence.scheduled - sequence.arrived)

    def _cross(self, sequence: Sequence) -> None:
        both = "swapped_answers" in self._faults
        others = [s for s in self._running if s is not sequence and not s.swapped and (both or s.retrieves)]
        other = others[0] if others else None
        if other is not None:
            sequence.source, other.source = other.source, sequence.source
            sequence.swapped = other.swapped = True

    def _preempt(self) -> None:
        """Too many tokens for the pool: the youngest goes back to the head of the queue and computes again."""
        while self._running and self._held() + len(self._running) * (self._settings.k + 1) > self.pool:
            sequence = self._running.pop()
            sequence.computed = 0
            self._waiting.appendleft(sequence)
            self.numbers.preemptions += 1

    # --- one step

    async def _step(self, timeout_s: float) -> None:
        if any(not sequence.prefilling for sequence in self._running):
            self._preempt()
        decoding = [sequence for sequence in self._running if not sequence.prefilling]
        prefilling = self._share_prefill()
        begin = time.monotonic()
        await self._hang_if_asked()
        await self._dawdle_if_asked()
        await asyncio.wait_for(self._sync(), timeout_s)
        duration = self._pace.step(sum(tokens for _, tokens in prefilling), len(decoding))
        await asyncio.sleep(max(0.0, begin + duration - time.monotonic()))
        self._apply(decoding, prefilling)

    def _share_prefill(self) -> list[tuple[Sequence, int]]:
        left, shares = self._settings.max_num_batched_tokens, []
        for sequence in self._running:
            tokens = min(left, sequence.length - sequence.computed)
            if tokens > 0:
                shares.append((sequence, tokens))
                left -= tokens
        return shares

    async def _hang_if_asked(self) -> None:
        if self._faults.stands_still(self.numbers.generation_tokens):
            await asyncio.Event().wait()

    async def _dawdle_if_asked(self) -> None:
        seconds = self._faults.number("slow_step_s")
        if seconds is not None and self.numbers.generation_tokens >= LONG and not self._dawdled:
            self._dawdled = True
            await asyncio.sleep(seconds)

    def _apply(self, decoding: list[Sequence], prefilling: list[tuple[Sequence, int]]) -> None:
        """What the step gave: prompts go on, and everyone who decodes gets an event."""
        now, before = time.monotonic(), self.numbers.generation_tokens
        for sequence in decoding:
            accepted = sequence.accepted(self._settings.k)
            if self._settings.k:
                self.numbers.draft(self._settings.k, accepted)
            self._emit(sequence, accepted + 1, now)
        for sequence, tokens in prefilling:
            sequence.computed += tokens
            if not sequence.prefilling:
                self._prefilled(sequence, now)
        self._told(self.numbers.generation_tokens, bool(decoding))
        computed = sum(tokens for _, tokens in prefilling)
        self.numbers.observe("iteration_tokens_total", computed + self.numbers.generation_tokens - before)

    def _prefilled(self, sequence: Sequence, now: float) -> None:
        """The first token comes with the last part of the prompt; a request that was preempted has had it."""
        self._cache.add(sequence.ids)
        if not sequence.first:
            sequence.first = now
            self.numbers.prompt_tokens += sequence.prompt_tokens
            self.numbers.cached_tokens += sequence.cached
            self.numbers.observe("time_to_first_token_seconds", now - sequence.arrived)
        self._emit(sequence, 1, now)

    def _emit(self, sequence: Sequence, count: int, now: float) -> None:
        event = sequence.take(count)
        sequence.computed += len(event.tokens) if not sequence.done else 0
        sequence.computed = min(sequence.computed, sequence.length)
        self.numbers.generation_tokens += len(event.tokens)
        if sequence.last:
            self.numbers.observe("inter_token_latency_seconds", now - sequence.last)
        sequence.last = now
        if sequence.done:
            self._finished(sequence, event.finish)
        sequence.events.put_nowait(event)

    def _finished(self, sequence: Sequence, finish: str) -> None:
        self._running.remove(sequence)
        self._gauges()
        numbers, generated = self.numbers, sequence.generated
        numbers.finished[finish] += 1
        decode = sequence.last - sequence.first
        for name, value in (
            ("request_prompt_tokens", sequence.prompt_tokens),
            ("request_generation_tokens", generated),
            ("request_max_num_generation_tokens", generated),
            ("request_params_n", 1),
            ("request_params_max_tokens", sequence.wanted.max_tokens),
            ("request_time_per_output_token_seconds", decode / (generated - 1) if generated > 1 else 0.0),
            ("e2e_request_latency_seconds", sequence.last - sequence.arrived),
            ("request_inference_time_seconds", sequence.last - sequence.scheduled),
            ("request_prefill_time_seconds", sequence.first - sequence.scheduled),
            ("request_decode_time_seconds", decode),
            ("request_prefill_kv_computed_tokens", sequence.prompt_tokens - sequence.cached),
        ):
            numbers.observe(name, value)

    def _gauges(self) -> None:
        self.numbers.running, self.numbers.waiting = len(self._running), len(self._waiting)
        self.numbers.kv_tokens = sum(sequence.computed for sequence in self._running)
