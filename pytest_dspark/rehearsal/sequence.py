"""One request inside the engine: its tokens to come, where it stands, and when what happened."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import answers
import tokens

ACCEPTANCE = (0.93, 0.88, 0.80, 0.70, 0.60, 0.50, 0.45, 0.40)
"""Chance that a draft position is accepted when those before it were."""

LOST = " of"
"""What a lossy rank takes instead of the most likely token."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `kind`: content, reasoning, tool, mark (end of thinking) or eos; `call` numbers tool calls.

    `instead` is the text that was more likely, where another one was taken."""

    number: int
    text: str
    kind: str
    call: int = 0
    name: str = ""
    instead: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """What one step gave one request. `error` ends it without an answer."""

    tokens: tuple[Token, ...] = ()
    finish: str = ""
    stop_reason: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The limits of one request."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request; only the engine changes it."""

    ids: array[int]
    wanted: Wanted
    source: Iterator[Token]
    seed: int
    gone: Callable[[], bool]
    arrived: float
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    cached: int = 0
    computed: int = 0
    generated: int = 0
    scheduled: float = 0.0
    first: float = 0.0
    last: float = 0.0
    done: bool = False
    swapped: bool = False
    retrieves: bool = False
    lossy: int = 0
    held: str = ""
    chooser: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chooser = random.Random(self.seed)

    @property
    def prompt_tokens(self) -> int:
        return len(self.ids)

    @property
    def length(self) -> int:
        """Tokens that must be held before it can go on."""
        return len(self.ids) + self.generated

    @property
    def prefilling(self) -> bool:
        return self.computed < self.length

    def accepted(self, k: int) -> int:
        """How many of k draft tokens the next step accepts."""
        count = 0
        while count < k and self.chooser.random() < ACCEPTANCE[min(count, len(ACCEPTANCE) - 1)]:
            count += 1
        return count

    def take(self, count: int) -> Event:
        """The next tokens, at most `count`, ended by what ends the request."""
        taken: list[Token] = []
        finish, reason = "", None
        while len(taken) < count and not finish:
            token = next(self.source)
            self.generated += 1
            if self.lossy and self.generated % self.lossy == 0 and token.kind == "content":
                token = replace(token, text=LOST, instead=token.text)
            token, reason = self._watched(token)
            taken.append(token)
            finish = self._finish(token, reason)
        if finish == "length" and self.held:
            taken[-1] = replace(taken[-1], text=taken[-1].text + self.held)
        self.done = bool(finish)
        return Event(tuple(taken), finish, reason)

    def _finish(self, token: Token, reason: str | None) -> str:
        if reason is not None or token.kind == "eos":
            return "stop"
        return "length" if self.generated >= self.wanted.max_tokens else ""

    def _watched(self, token: Token) -> tuple[Token, str | None]:
        """Look for stop strings; text that may still become one is held back."""
        if not self.wanted.stop or token.kind not in ("content", "reasoning", "eos"):
            return token, None
        text = self.held + token.text
        found = [(at, stop) for stop in self.wanted.stop if (at := text.find(stop)) >= 0]
        if found and self.generated > self.wanted.min_tokens:
            at, stop = min(found)
            self.held = ""
            return replace(token, text=text[:at]), stop
        keep = 0 if token.kind == "eos" else max(map(len, self.wanted.stop)) - 1
        self.held = text[len(text) - keep :] if keep else ""
        return replace(token, text=text[: len(text) - len(self.held)]), None


def spoken(plan: answers.Plan, tokenizer: tokens.Tokenizer, wanted: Wanted, seed: int) -> Iterator[Token]:
    """The tokens of an answer; after its end an end mark, or more text where the request wants more tokens."""
    given = 0
    for token in _answer(plan, tokenizer):
        given += 1
        yield token
    if not wanted.ignore_eos and given + 1 >= wanted.min_tokens:
        yield Token(tokens.EOS, "", "eos")
    kind = "tool-end" if plan.calls else "content"
    for part in answers.more(seed):
        for token in _said(part, kind, tokenizer):
            if given + 1 >= wanted.min_tokens and not wanted.ignore_eos:
                yield Token(tokens.EOS, "", "eos")
            given += 1
            yield token


def _answer(plan: answers.Plan, tokenizer: tokens.Tokenizer) -> Iterator[Token]:
    if plan.reasoning is not None:
        for part in plan.reasoning:
            yield from _said(part, "reasoning", tokenizer)
        yield Token(tokens.END_THINK, tokens.SPECIALS[tokens.END_THINK], "mark")
    for part in plan.content:
        yield from _said(part, "content", tokenizer)
    for number, call in enumerate(plan.calls):
        yield Token(tokens.TOOL, "", "tool", number, call.name)
        for token in _said(call.arguments, "tool", tokenizer):
            yield replace(token, call=number)


def _said(text: str, kind: str, tokenizer: tokens.Tokenizer) -> Iterator[Token]:
    """Word by word; of a word that is spelled in bytes the last byte brings the text."""
    for word in tokenizer.pieces(text):
        *spelling, last = tokenizer[word]
        yield from (Token(number, "", kind) for number in spelling)
        yield Token(last, word, kind)
