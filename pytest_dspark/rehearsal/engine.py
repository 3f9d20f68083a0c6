"""Token counts, the KV pool, the scheduler, and the answers: everything behind the API of the emulated head."""

from __future__ import annotations

import argparse
import os
import re
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import answers

PREFILL_TOKENS_S = 1000.0
DECODE_TOKENS_S = 80.0
LEAST_EVENT_S = 0.001
TEMPLATE_TOKENS = 17
_WORD = re.compile(r" ?[A-Za-z]+| ?[0-9]{1,3}|\s+|[^\sA-Za-z0-9]")
# Measured pools in tokens by (KV bytes pinned or None, batched tokens).
_POOLS = {(15998753178, 16384): 156_000, (None, 8192): 1_253_213, (None, 16384): 642_000}


def kv_pool(args: argparse.Namespace) -> int | None:
    """The KV pool in tokens; None where the real engine does not start.

    Known points are the measured ones. Elsewhere: auto shrinks in proportion to the batched tokens, a pin grows in
    proportion to its bytes.
    """
    batched, pinned = args.max_num_batched_tokens, args.kv_cache_memory_bytes
    known = _POOLS.get((pinned, batched))
    if known is not None:
        return known
    if batched >= 32768:
        return None
    return int(156_000 * pinned / 15998753178) if pinned else int(1_253_213 * 8192 / max(batched, 2048))


class Tokenizer:
    """Words to ids and back. An id is the word's checksum, so it is the same in every run; collisions step on."""

    def __init__(self) -> None:
        self._words: dict[int, str] = {}
        self._ids: dict[str, int] = {}
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(word) or self._new(word) for word in _WORD.findall(text)]

    def _new(self, word: str) -> int:
        with self._lock:
            if word in self._ids:
                return self._ids[word]
            number = zlib.crc32(word.encode("utf-8", "surrogatepass")) % 4_000_000 + 10
            while self._words.get(number, word) != word:
                number += 1
            self._words[number], self._ids[word] = word, number
            return number

    def decode(self, ids: list[int]) -> str:
        return "".join(self._words.get(number, "") for number in ids)


@dataclass(slots=True)
class Counters:
    """What /metrics tells. Times in seconds."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    used: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    requests: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One generation as the engine sees it. `cancelled` says whether the client went away."""

    prompt: str
    prompt_tokens: int
    ids: tuple[int, ...]
    body: Mapping[str, Any]
    chat: bool
    cancelled: Callable[[], bool]


class EngineDead(Exception):
    """A rank was lost; what is open ends with an error."""


class Engine:
    """Holds at most max_num_seqs sequences and the KV pool; everything else waits."""

    def __init__(
        self, args: argparse.Namespace, pool: int, factor: float, faults: Mapping[str, str], *, first_decode: Callable[[], None]
    ) -> None:
        self.args, self.pool, self.factor, self.faults = args, pool, factor, faults
        self.tokenizer = Tokenizer()
        self.counters = Counters()
        self.dead = threading.Event()
        self._first_decode: Callable[[], None] | None = first_decode
        self._turn = threading.Condition()
        self._blocks: dict[int, None] = {}
        self._queue: list[object] = []

    # --- scheduling

    def _admit(self, request: Request) -> int:
        """Wait for a place and for room in the pool, first come first served; returns the cached prompt tokens."""
        ticket, counters = object(), self.counters
        budget = int(request.body.get("max_tokens") or 16)
        need = request.prompt_tokens + min(budget, 64)
        with self._turn:
            self._queue.append(ticket)
            counters.waiting += 1
            try:
                while not (self._queue[0] is ticket and counters.running < self.args.max_num_seqs and counters.used + need <= self.pool):
                    self._turn.wait(0.05)
                    if self.dead.is_set() or request.cancelled():
                        raise EngineDead if self.dead.is_set() else ConnectionResetError
            finally:
                self._queue.remove(ticket)
                counters.waiting -= 1
                self._turn.notify_all()
            counters.running += 1
            counters.used += need
            return self._cached(request)

    def _release(self, request: Request) -> None:
        budget = int(request.body.get("max_tokens") or 16)
        with self._turn:
            self.counters.running -= 1
            self.counters.used -= request.prompt_tokens + min(budget, 64)
            self._turn.notify_all()

    def _cached(self, request: Request) -> int:
        """Prompt tokens whose whole blocks were seen before, from the first one on."""
        if not self.args.enable_prefix_caching:
            return 0
        size, hits, state = self.args.block_size, 0, 0
        for start in range(0, len(request.ids) - size + 1, size):
            state = hash((state, request.ids[start : start + size]))
            if state in self._blocks and hits == start:
                hits = start + size
            self._blocks[state] = None
        while len(self._blocks) > 20_000:
            self._blocks.pop(next(iter(self._blocks)))
        self.counters.prefix_queries += request.prompt_tokens
        self.counters.prefix_hits += hits
        return hits

    # --- generating

    def generate(self, request: Request) -> Iterator[answers.Piece]:
        """Pieces of one answer over time; each holds one to K + 1 tokens. Raises EngineDead."""
        cached = self._admit(request)
        begin = time.monotonic()
        try:
            self._sleep((request.prompt_tokens - cached) / PREFILL_TOKENS_S, request)
            self.counters.prompt_tokens += request.prompt_tokens
            self.counters.prefill_s += time.monotonic() - begin
            yield from self._decode(request, cached)
        finally:
            self.counters.requests += 1
            self._release(request)

    def _sleep(self, seconds: float, request: Request) -> None:
        end = time.monotonic() + seconds * self.factor
        while (left := end - time.monotonic()) > 0:
            if self.dead.wait(min(left, 0.05)):
                raise EngineDead
            if request.cancelled():
                raise ConnectionResetError

    def _decode(self, request: Request, cached: int) -> Iterator[answers.Piece]:
        plan = answers.answer(request.prompt, request.body, request.chat, self.args, self.faults, self.tokenizer)
        begin, k = time.monotonic(), int(self.args.speculative_config.get("num_speculative_tokens", 0))
        for piece in answers.pieces(plan, k, self.tokenizer):
            if self.dead.is_set():
                raise EngineDead
            if request.cancelled():
                raise ConnectionResetError
            self._count(piece, k)
            yield answers.with_cached(piece, cached)
            time.sleep(max(piece.tokens / DECODE_TOKENS_S * self.factor, LEAST_EVENT_S))
        self.counters.decode_s += time.monotonic() - begin
        finished = self.counters.finished
        finished[plan.finish] = finished.get(plan.finish, 0) + 1

    def _count(self, piece: answers.Piece, k: int) -> None:
        first, self._first_decode = self._first_decode, None
        if first:
            first()
        counters = self.counters
        counters.generation_tokens += piece.tokens
        if k and piece.tokens:
            counters.drafts += 1
            counters.draft_tokens += k
            counters.accepted += piece.tokens - 1
        self._fault_by_tokens()

    def _fault_by_tokens(self) -> None:
        total = self.counters.generation_tokens
        if "die_after_tokens" in self.faults and total >= int(self.faults["die_after_tokens"]):
            os.kill(os.getpid(), signal.SIGKILL)
        if "hang_after_tokens" in self.faults and total >= int(self.faults["hang_after_tokens"]):
            threading.Event().wait()
