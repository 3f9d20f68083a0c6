"""Many questions to one engine: threads of our own keep it full, and every answer has its row before the next is asked.

A question is sent once. When the engine is lost, the open ones are ERROR and the rest is BLOCKED; finished ones keep what
they are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from pytest_dspark.errors import DsparkError
from pytest_dspark.evidence import Stopwatch
from pytest_dspark.parts import Part, Parts
from pytest_dspark.reply import RequestError

LOST: Final = frozenset({"SERVER_LOST", "ENGINE_DEAD", "ENGINE_WEDGED", "CANCELLED", "INFRA_RISK"})
ERRORS_IN_A_ROW: Final = 3
"""Answers that fail one after another, with none between, until the rest is not asked."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question; `sha256` is of all that makes it what it is, the expected answer included."""

    id: str
    prompt: str
    expect: str
    sha256: str


Ask = Callable[[Question], Mapping[str, Any]]


class Asker:
    """Asks questions with `streams` threads; `run` is called once.

    `ask` gives what is stored of an answer, and raises what the request raised. `show` is told each finished question.
    """

    def __init__(self, ask: Ask, parts: Parts, streams: int, show: Callable[[Part], None] = lambda _: None) -> None:
        self._ask, self._parts, self._streams, self._show = ask, parts, streams, show
        self._lock = threading.Lock()
        self._waiting: deque[Question] = deque()
        self._done: dict[str, Part] = {}
        self._failed = 0
        self.cause: DsparkError | None = None

    def run(self, questions: Sequence[Question]) -> list[Part]:
        """The parts of the questions, in their order. Finished ones of a resumed run are not asked."""
        for question in questions:
            part = self._parts.replayed(question.id, question.sha256)
            if part is None:
                self._waiting.append(question)
            else:
                self._done[question.id] = part
        self._ask_all()
        for question in self._waiting:
            cause = self.cause or DsparkError("BLOCKED", "the questions were given up")
            blocked = self._parts.unanswered(question.id, cause, Stopwatch.started(), tried=False)
            self._done[question.id] = blocked
        return [self._done[question.id] for question in questions]

    def _ask_all(self) -> None:
        threads = min(self._streams, len(self._waiting))
        if not threads:
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="question") as pool:
            jobs = [pool.submit(self._work) for _ in range(threads)]
            try:
                for job in jobs:
                    job.result()
            except BaseException:  # also a signal or a time-out: no thread begins another question
                self._give_up(DsparkError("CANCELLED", "the questions were given up"))
                raise

    def _work(self) -> None:
        while (question := self._next()) is not None:
            self._one(question)

    def _next(self) -> Question | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting and self.cause is None else None

    def _one(self, question: Question) -> None:
        watch = Stopwatch.started()
        try:
            data = self._ask(question)
        except DsparkError as error:
            self._note(error)
            part = self._parts.unanswered(question.id, error, watch, tried=True)
        else:
            self._note(None)
            part = self._parts.answered(question.id, data, watch)
        with self._lock:
            self._done[question.id] = part
        self._show(part)

    def _note(self, error: DsparkError | None) -> None:
        """After the engine is lost, or after some failures in a row, nothing more is asked."""
        with self._lock:
            self._failed = 0 if error is None else self._failed + 1
            if error is None or self.cause is not None:
                return
            lost = not isinstance(error, RequestError) or error.code in LOST
            if lost or self._failed >= ERRORS_IN_A_ROW:
                self.cause = error

    def _give_up(self, error: DsparkError) -> None:
        with self._lock:
            self.cause = self.cause or error
