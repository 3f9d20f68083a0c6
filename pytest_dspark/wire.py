"""The socket of one request: its deadlines, the stamps of what arrives, HTTP's framing of the body.

Bytes are stamped when they are received, one receive at a time, and read afterwards. On Linux the stamp is the kernel's
own of the packet's arrival, so that neither the interpreter's lock nor a busy machine moves it: see `Wire`.

Deadlines are this module's own, since a library's read time-out starts anew with every packet:
- the overall deadline counts from the call, whatever comes;
- the stall limit counts from the last event that carried something generated. Comments, pings, empty deltas and usage
  keep a connection open and are no progress. It counts before the first token too: a long prefill needs a long limit.
"""

from __future__ import annotations

import io
import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from urllib3.connection import HTTPConnection, HTTPSConnection

from pytest_dspark.reply import RequestError, StreamReader, short
from pytest_dspark.timing import Timing

CONNECT_S = 10.0  # one connection attempt
TICK_S = 0.25  # the longest sleep without a look at the deadlines
ALIVE_S = 0.75  # between two looks at the engine's life
PACKET = 1 << 16
ARRIVAL = getattr(socket, "SO_TIMESTAMPNS", 35) if sys.platform == "linux" else 0  # the option and its note's type
NOTE = struct.Struct("@qq")  # seconds, nanoseconds
MOST_DIGITS = 18  # of a body's length; a longer one is none
HEX = b"0123456789abcdefABCDEF"
TIMEVAL = struct.Struct("@ll")  # seconds, microseconds


class Watch:
    """One request's clock: when it began, its two deadlines, the engine's life, and the socket to close."""

    def __init__(
        self,
        where: str,
        alive: Callable[[], None],
        clock: Callable[[], float],
        deadline_s: float,
        stall_s: float,
    ) -> None:
        self.where, self.clock = where, clock
        self._alive, self._deadline_s, self._stall_s = alive, deadline_s, stall_s
        self.begin = self.due = self._moved = self._looked = clock()
        self.first_byte = self.sent = self.stamp = self.begin
        self.lag = 0.0
        self.status: int | None = None
        self.wire: Wire | None = None

    def connect_s(self) -> float:
        return min(CONNECT_S, self._deadline_s)

    def restart(self, due: float) -> None:
        """The clocks start now, for a request that was due at that moment."""
        self.due = due
        self.begin = self._moved = self._looked = self.first_byte = self.clock()

    def close(self) -> None:
        if self.wire is not None:
            self.wire.end()

    def progress(self) -> None:
        """Something generated came: the stall clock starts again."""
        self._moved = self.clock()

    def look(self) -> float:
        """Raise DEADLINE, STALLED or what `alive` raises; else the seconds until the next look is due."""
        now = self.clock()
        elapsed, still = now - self.begin, now - self._moved
        if elapsed >= self._deadline_s:
            raise RequestError(
                "DEADLINE", f"{self.where}: not finished after {elapsed:.1f} s of {self._deadline_s:g} s"
            )
        if still >= self._stall_s:
            raise RequestError(
                "STALLED", f"{self.where}: nothing generated for {still:.1f} s, limit {self._stall_s:g} s"
            )
        if now - self._looked >= ALIVE_S:
            self._looked = now
            self._alive()
        return min(TICK_S, self._deadline_s - elapsed, self._stall_s - still)

    def timing(self, reader: StreamReader) -> Timing:
        """Every stamp as seconds from the first byte sent."""
        start = self.first_byte
        stamps = tuple(stamp - start for stamp in reader.stamps)
        return Timing(
            at_s=start,
            read_lag_s=self.lag,
            first_token_s=stamps[0] if stamps else None,
            first_answer_s=None if reader.first_answer is None else reader.first_answer - start,
            last_token_s=stamps[-1] if stamps else None,
            end_s=self.stamp - start,
            wait_s=max(start - self.due, 0.0),
            sent_s=self.sent - start,
            stamps=stamps,
        )


class Wire(io.RawIOBase):
    """Stands for the socket below http.client: looks at the deadlines while it waits and stamps what it receives.

    `watch.stamp` is when the bytes of the last receive arrived. Linux tells a packet's arrival with it (SO_TIMESTAMPNS), on
    the wall clock; only the packet's age, the few moments between arrival and receive, is taken from that and counted back
    on the monotonic clock. An age that is negative, or longer than since the line was last empty, is a stepped wall clock:
    then, and with TLS or another system or clock, the stamp is the monotonic time right after the receive.
    """

    def __init__(self, sock: socket.socket, watch: Watch) -> None:
        super().__init__()
        self._sock, self._watch = sock, watch
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._noted = bool(ARRIVAL) and self._tls is None and watch.clock is time.monotonic
        if self._noted:
            sock.setsockopt(socket.SOL_SOCKET, ARRIVAL, 1)
        sock.setblocking(self._tls is None)
        self._sleep = 0.0
        self._sleep_at_most(TICK_S)
        self._empty = watch.begin
        watch.wire = self

    def _sleep_at_most(self, seconds: float) -> None:
        """The kernel's limit of one blocking call: one call a packet, where a poll before it would make two."""
        if self._tls is None and seconds != self._sleep:
            self._sleep = seconds
            limit = TIMEVAL.pack(int(seconds), max(1000, int(seconds % 1 * 1e6)))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @cached_property
    def reader(self) -> io.BufferedReader[Any]:
        """For who reads this stream alone; a loop over many calls `take`."""
        return io.BufferedReader(self, PACKET)

    # what http.client and urllib3 ask of a socket

    def makefile(self, *_: Any, **__: Any) -> io.BufferedReader[Any]:
        return self.reader

    def settimeout(self, _: float | None) -> None:
        """The deadlines are the watch's."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        """http.client closes the socket before it has read the body; `end` does it when the request is over."""

    def end(self) -> None:
        self._sock.close()
        super().close()

    def sendall(self, data: bytes) -> None:
        watch, view = self._watch, memoryview(data)
        if watch.first_byte == watch.begin:
            watch.first_byte = watch.clock()
        while view:
            self._look(select.POLLOUT)
            with suppress(BlockingIOError, ssl.SSLWantWriteError):
                view = view[self._sock.send(view) :]
        watch.sent = watch.clock()

    # what BufferedReader asks of a raw file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            self._look(select.POLLIN)
            with suppress(BlockingIOError, ssl.SSLWantReadError):
                return self._receive(buffer)

    def _look(self, what: int) -> None:
        """A look at the deadlines; TLS does not bear the kernel's limit and is polled."""
        left = self._watch.look()
        self._sleep_at_most(left)
        if self._tls is not None and not self._tls.pending():
            poll = select.poll()
            poll.register(self._tls, what)
            poll.poll(left * 1000)

    def take(self, buffer: Any) -> int:
        """What has arrived, without waiting for it: bytes put into the buffer, 0 when the connection has ended.

        Raises BlockingIOError if nothing has arrived.
        """
        return self._receive(buffer, socket.MSG_DONTWAIT)

    def _receive(self, buffer: Any, flags: int = 0) -> int:
        notes: list[tuple[int, int, bytes]] = []
        if self._noted:
            size, notes, _, _ = self._sock.recvmsg_into([buffer], 64, flags)
        elif self._tls is None:
            size = self._sock.recv_into(buffer, 0, flags)
        else:
            size = self._tls.recv_into(buffer)
        now = self._watch.clock()
        watch = self._watch
        watch.stamp = stamp = arrival(notes, now, self._empty)
        if now - stamp > watch.lag:
            watch.lag = now - stamp
        if size < len(buffer):
            self._empty = now
        return size


def arrival(notes: Sequence[tuple[int, int, bytes]], now: float, empty: float) -> float:
    """When a packet arrived on the monotonic clock: `now` less its age, if the kernel told one that can be true."""
    for level, kind, data in notes:
        if level == socket.SOL_SOCKET and kind == ARRIVAL and len(data) >= NOTE.size:
            seconds, nanoseconds = NOTE.unpack_from(data)
            age = time.clock_gettime(time.CLOCK_REALTIME) - seconds - nanoseconds * 1e-9
            return now - age if 0 <= age <= now - empty else now
    return now


@dataclass(frozen=True, slots=True)
class Call:
    """One generation request, built before anything is stamped; due so many seconds after the first."""

    path: str
    body: Mapping[str, Any]
    data: bytes
    prompt_sha256: str
    due_s: float = 0.0


class Framing:
    """Takes HTTP's own framing off the body's bytes: chunks, a length, or all until the connection ends."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
        length = headers.get("Content-Length", "")
        told = length.isdecimal() and len(length) <= MOST_DIGITS and not self._chunked
        self._length = int(length) if told else None
        self._left, self._rest = self._length or 0, b""
        self.ended = self._length == 0
        self.short = False

    def feed(self, data: bytes) -> bytes:
        """The body's bytes in this packet (empty: the connection ended, `short` if that was too early)."""
        if not data:
            self.ended, self.short = True, not self.ended and (self._chunked or self._length is not None)
            return b""
        if self._chunked:
            return self._chunks(self._rest + data)
        if self._length is not None:
            self._left -= len(data)
            self.ended = self._left <= 0
        return data

    def _chunks(self, data: bytes) -> bytes:
        if not self._left and data.endswith(b"\r\n"):
            size, _, rest = data.partition(b"\r\n")
            if size and not size.strip(HEX) and int(size, 16) == len(rest) - 2 > 0:  # one whole chunk, as most are
                self._rest = b""
                return rest[:-2]
        parts, at = [], 0
        while not self.ended:
            part = data[at : at + self._left]
            self._left -= len(part)
            at += len(part)
            parts.append(part)
            end = -1 if self._left else data.find(b"\n", at)
            if end < 0:
                break
            self._size(data[at:end].partition(b";")[0].strip())
            at = end + 1
        self._rest = data[at:]
        return b"".join(parts)

    def _size(self, line: bytes) -> None:
        """A chunk's size line; the line end after a chunk is an empty one."""
        if not line:
            return
        if not line.isalnum() or b"x" in line.lower():
            raise RequestError("PROTOCOL", f"expected the size of a chunk, found {short(line)}")
        try:
            self._left = int(line, 16)
        except ValueError as error:
            raise RequestError("PROTOCOL", f"expected the size of a chunk, found {short(line)}") from error
        self.ended = self._left == 0


def media_type(headers: Mapping[str, str]) -> str:
    """The body's type without its parameters; empty if it is not told."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def streams_events(headers: Mapping[str, str]) -> bool:
    """Whether the body may be a stream of events. A JSON body is an error inside a 200, or a server that cannot stream."""
    kind = media_type(headers)
    plain = headers.get("Content-Encoding", "") in ("", "identity")
    return plain and kind in ("", "text/event-stream", "text/plain", "application/octet-stream")


class Body:
    """The body of a stream, packet by packet: HTTP's framing comes off, events are read, the end is judged."""

    def __init__(self, headers: Mapping[str, str], watch: Watch, reader: StreamReader) -> None:
        self.headers, self.framing = headers, Framing(headers)
        self._watch, self._reader = watch, reader

    @property
    def over(self) -> bool:
        return self._reader.done or self.framing.ended

    def packet(self, data: bytes) -> None:
        """Bytes as they came, stamped by the watch; empty when the connection has ended."""
        data = self.framing.feed(data)
        if data and self._reader.feed(data, self._watch.stamp, self._watch.first_byte):
            self._watch.progress()

    def end(self) -> None:
        """Raises TRUNCATED if the connection ended inside its own framing, unless the server had said why it stopped."""
        if self.framing.short and self._reader.finish_reason is None and not self._reader.done:
            raise RequestError("TRUNCATED", f"{self._watch.where}: the connection ended inside the body")
        self._reader.feed(b"", self._watch.stamp, self._watch.first_byte)


class Plain(HTTPConnection):
    """A connection whose socket is watched; `watch` is given before it connects."""

    watch: Watch

    def connect(self) -> None:
        super().connect()
        self.sock = Wire(self.sock, self.watch)


class Secure(HTTPSConnection):
    """The same over TLS."""

    watch: Watch

    def connect(self) -> None:
        super().connect()
        self.sock = Wire(self.sock, self.watch)
