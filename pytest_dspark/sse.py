"""Stamped bytes to server-sent events: incremental, for every split of the bytes.

Lines end with CR LF, LF or CR, and with nothing else (U+0085 and U+2028 are text). Bytes are decoded a whole line at a
time, so that half a character is never decoded. An event's stamp is that of the bytes that completed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its data (lines joined by a line feed), its name, and the arrival of its last byte in seconds."""

    data: str
    stamp: float
    name: str = "message"


@dataclass(slots=True)
class Parser:
    """Feed it bytes as they come; it gives events as they are completed. Comments and empty events give nothing."""

    _line: bytearray = field(default_factory=bytearray)
    _data: list[str] = field(default_factory=list)
    _name: str = ""
    _after_cr: bool = False
    _first: bool = True

    def feed(self, data: bytes, stamp: float) -> list[Event]:
        """The events that these bytes complete."""
        if self._after_cr and data[:1] == b"\n":
            data = data[1:]
        if data or not self._after_cr:
            self._after_cr = data.endswith(b"\r")
        self._line += data
        if b"\n" not in data and b"\r" not in data:
            return []
        *lines, rest = bytes(self._line).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._line = bytearray(rest)
        return [event for line in lines if (event := self._take(line, stamp))]

    def end(self, stamp: float) -> list[Event]:
        """The body has ended: what is left is dispatched, so that a last event without its blank line is not lost."""
        events = self.feed(b"\n", stamp) if self._line else []
        last = self._take(b"", stamp)
        return [*events, last] if last else events

    def _take(self, raw: bytes, stamp: float) -> Event | None:
        if self._first:
            raw, self._first = raw.removeprefix(b"\xef\xbb\xbf"), False
        if not raw:
            return self._dispatch(stamp)
        field_name, _, value = raw.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if field_name == "data":
            self._data.append(value)
        elif field_name == "event":
            self._name = value
        return None

    def _dispatch(self, stamp: float) -> Event | None:
        data, name = "\n".join(self._data), self._name or "message"
        self._data, self._name = [], ""
        return Event(data, stamp, name) if data else None
