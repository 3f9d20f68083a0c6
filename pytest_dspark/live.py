"""Lines that say how a long check goes on: replaced on a terminal, one a minute in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

LOG_S = 60.0
SCREEN_S = 0.5


class Live:
    """`stream` None says nothing. `show` is thinned out, `line` is always kept."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._shown = -LOG_S
        self._terminal = bool(stream and stream.isatty())

    def show(self, text: str) -> None:
        """A line that the next one replaces on a terminal; in a log at most one a minute."""
        now = self._clock()
        if self._stream is None or now - self._shown < (SCREEN_S if self._terminal else LOG_S):
            return
        self._shown = now
        self._print(text, "" if self._terminal else "\n")

    def line(self, text: str) -> None:
        """A line of its own."""
        self._print(text, "\n")

    def _print(self, text: str, end: str) -> None:
        if self._stream is not None:
            clear = "\r\x1b[2K" if self._terminal else ""
            print(f"{clear}dspark: {text}", file=self._stream, end=end, flush=True)
