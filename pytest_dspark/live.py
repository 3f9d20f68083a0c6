"""What runs now, for whoever watches: one line that replaces itself on a terminal, kept lines in a log. Standard library alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from pytest_dspark.errors import printable

TERMINAL_S = 0.25
LOG_S = 60.0
CLEAR = "\r\x1b[K"


class Live:
    """Progress on a stream; on none, silence.

    `show` is for now: on a terminal it replaces the line before it, a few times a second at most; in a log it is kept, once
    a minute at most. `line` is kept.
    """

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._terminal = bool(stream and stream.isatty())
        self._every = TERMINAL_S if self._terminal else LOG_S
        self._shown = clock()
        self._open = False

    def show(self, text: str) -> None:
        now = self._clock()
        if self._stream is None or now - self._shown < self._every:
            return
        text = printable(text)
        self._shown = now
        if self._terminal:
            self._write(f"{CLEAR if self._open else chr(10)}dspark: {text}")
            self._open = True
        else:
            self._write(f"dspark: {text}\n")

    def line(self, text: str) -> None:
        self._write(f"{CLEAR if self._open else ''}dspark: {printable(text)}\n")
        self._open = False
        self._shown = self._clock()

    def clear(self) -> None:
        """What is shown is over; nothing is left of it."""
        if self._open:
            self._write(CLEAR)
        self._open = False

    def _write(self, text: str) -> None:
        """Nobody may be there any more (a terminal that hung up, a closed pipe): then it is silent, and whoever spoke goes on,
        above all with stopping ranks."""
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._stream = None
