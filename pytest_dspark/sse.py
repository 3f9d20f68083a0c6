"""Stamped bytes to server-sent events: pure, incremental, and the same for every split of the bytes.

Lines end with CR LF, LF or CR and with nothing else: U+0085 and U+2028 are text. Bytes are decoded one whole line at a
time and always as UTF-8, so half a character is never decoded and a missing charset changes nothing. An event's stamp is
that of the packet whose byte completed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

DONE = "[DONE]"
DONE_BYTES = DONE.encode()
_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event: its data (lines joined by a line feed), its name, and the arrival of its last byte in seconds.

    `whole` is False for what stood unfinished when the body ended: it may be half an event.
    """

    data: str
    stamp: float
    name: str = "message"
    whole: bool = True


@dataclass(slots=True)
class Parser:
    """Feed it packets as they come; it gives the events that they complete. Comments and empty events give nothing."""

    _rest: bytearray = field(default_factory=bytearray)
    _data: list[str] = field(default_factory=list)
    _name: str = ""
    _skip_lf: bool = False
    _first: bool = True

    def feed(self, data: bytes, stamp: float) -> list[Event]:
        """The events that these bytes complete."""
        if not (self._rest or self._data or self._name or self._skip_lf or self._first) and _one_event(data):
            return [Event(data[6:-2].decode("utf-8", "replace"), stamp)]
        if self._skip_lf and data:
            self._skip_lf = False
            data = data.removeprefix(b"\n")
        self._skip_lf = self._skip_lf or data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *lines = data.split(b"\n")
        self._rest += first
        if not lines:
            return []
        lines = [bytes(self._rest), *lines]
        self._rest = bytearray(lines.pop())
        return [event for line in lines if (event := self._take(line, stamp))]

    def end(self, stamp: float) -> list[Event]:
        """The body has ended: what is left is given as well, marked as not whole."""
        self._skip_lf = False
        events = self.feed(b"\n\n", stamp) if self._rest else self.feed(b"\n", stamp)
        return [Event(event.data, event.stamp, event.name, whole=False) for event in events]

    def _take(self, raw: bytes, stamp: float) -> Event | None:
        if self._first:
            raw, self._first = raw.removeprefix(_BOM), False
        if not raw:
            return self._dispatch(stamp)
        name, _, value = raw.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._name = value
        return None

    def _dispatch(self, stamp: float) -> Event | None:
        data, name = "\n".join(self._data), self._name or "message"
        self._data, self._name = [], ""
        return Event(data, stamp, name) if data else None


def _one_event(data: bytes) -> bool:
    """Whether the packet is `data: …`, one line and its empty one: what most packets of a stream are."""
    end = len(data) - 2
    return (
        end > 6
        and data.startswith(b"data: ")
        and data.find(b"\n") == end
        and data.endswith(b"\n\n")
        and b"\r" not in data
    )
