"""Many streams in one loop: a stream more costs no thread, so that sixteen or 256 of them are stamped like one.

Each request still has a connection of its own, a urllib3 one, made before its first byte is sent. The loop takes what has
arrived, which stamps it, and holds it; several times a second all that is held is read, and at once what ends a stream.
"""

from __future__ import annotations

import http.client
import io
import re
import selectors
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import urllib3

from pytest_dspark import sse
from pytest_dspark.reply import Reply, RequestError, StreamReader
from pytest_dspark.wire import ARRIVAL, PACKET, TICK_S, Body, Call, Plain, Watch, streams_events

AHEAD_S = 1.0  # how long before its moment a request is connected
BURST = 4  # requests that are connected, and sent, between two looks at what has arrived
GATHER = 0.05  # of the gap between a stream's events is waited for others' packets
MOST_GAP_S = 0.02
LEAST_NAP_S = 0.0002
MOST_HEAD = MOST_HELD = 1 << 16
_LAST_CHUNK = b"0\r\n\r\n"
_HEAD_END = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a set of streams is: `waiting` to be sent, `in_flight`, `finished` (well or not), `events` with text so far."""

    waiting: int
    in_flight: int
    finished: int
    events: int


@dataclass(frozen=True, slots=True)
class Route:
    """How requests reach the server. `refuse` raises what an answer that is no stream means: (status, headers, body).

    `translate` makes a RequestError of a library's or the system's.
    """

    host: str
    port: int
    prefix: str
    headers: Mapping[str, str]
    refuse: Callable[[int, Mapping[str, str], bytes], None]
    translate: Callable[[str, BaseException], RequestError]


@dataclass(frozen=True, slots=True)
class Limits:
    """`alive` raises when the engine is lost; `places` is how many may be in flight at once; seconds otherwise."""

    alive: Callable[[], None]
    deadline_s: float
    stall_s: float
    places: int
    clock: Callable[[], float] = time.monotonic


class _Stream:
    """One request on its way: connected, sent, its head, its body, and what came of it."""

    __slots__ = (
        "_head",
        "_held",
        "_plain",
        "_reading",
        "_route",
        "_size",
        "body",
        "call",
        "connection",
        "outcome",
        "reader",
        "watch",
    )

    def __init__(self, call: Call, route: Route, watch: Watch) -> None:
        self.call, self.watch, self._route = call, watch, route
        self.reader = StreamReader()
        self.body: Body | None = None
        self.outcome: Reply | RequestError | None = None
        self._head, self._plain = b"", bytearray()
        self._held: list[tuple[bytes, float]] = []
        self._size = 0
        self._reading = True
        self.connection = Plain(route.host, route.port, timeout=watch.connect_s())
        self.connection.watch = watch

    def connect(self) -> None:
        self._guard(self.connection.connect)

    def send(self, due: float) -> None:
        """Send the request, which was due at that moment; its clocks start now."""
        self.watch.restart(due)
        path = self._route.prefix + self.call.path
        self._guard(lambda: self.connection.request("POST", path, self.call.data, self._route.headers))

    def take(self, buffer: memoryview) -> None:
        """Take and stamp what has arrived, and hold it; read it now if it may end the stream."""
        wire = self.watch.wire
        try:
            data = bytes(buffer[: wire.take(buffer)]) if wire is not None else b""
        except BlockingIOError:
            return
        except OSError as error:
            self.read_held()
            self._broken(error)
            return
        self._held.append((data, self.watch.stamp))
        self._size += len(data)
        if not data or self._size > MOST_HELD or data.endswith(_LAST_CHUNK) or sse.DONE_BYTES in data:
            self.read_held()

    def read_held(self) -> None:
        """Read what is held. Whatever ends the stream becomes its outcome."""
        held, self._held, self._size = self._held, [], 0
        for data, stamp in held:
            if self.outcome is None:
                self.watch.stamp = stamp
                self._read(data)

    def _read(self, data: bytes) -> None:
        try:
            if self.body is not None:
                self._more(self.body, data)
            elif rest := self._start(data):
                self._read(rest)
        except RequestError as error:
            self.fail(error)

    def look(self) -> None:
        """Its deadlines."""
        try:
            self.watch.look()
        except RequestError as error:
            self.fail(error)

    def fail(self, error: RequestError) -> None:
        error.partial, error.partial_reasoning = self.reader.so_far
        error.status, error.elapsed_s = self.watch.status, self.watch.clock() - self.watch.begin
        self.outcome = error

    def close(self) -> None:
        self.watch.close()
        self.connection.close()

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except RequestError as error:
            self.fail(error)
        except (OSError, http.client.HTTPException, urllib3.exceptions.HTTPError) as error:
            self.fail(self._route.translate(self.watch.where, error))

    def _broken(self, error: OSError) -> None:
        """A stream that breaks after its finish is finished."""
        if self.outcome is not None:
            return
        if self.reader.finish_reason is None:
            self.fail(self._route.translate(self.watch.where, error))
        else:
            self._finish()

    def _start(self, data: bytes) -> bytes:
        """The head of the answer, which may come in pieces; gives what follows it."""
        self._head += data
        status = 100
        while 100 <= status < 200:  # what such a status announces is still to come
            found = _HEAD_END.search(self._head)
            if found is None:
                if not data or len(self._head) > MOST_HEAD:
                    raise _headless(self._head, self.watch.where)
                return b""
            status, headers = _parsed(self._head[: found.end()], self.watch.where)
            self._head = self._head[found.end() :]
        rest, self._head = self._head, b""
        self.watch.status = status
        self.body = Body(headers, self.watch, self.reader)
        self._reading = status == 200 and streams_events(headers)
        return rest

    def _more(self, body: Body, data: bytes) -> None:
        if self._reading:
            body.packet(data)
            if body.over:
                self._finish()
            return
        self._plain += body.framing.feed(data)
        if body.framing.ended:
            self._route.refuse(self.watch.status or 0, body.headers, bytes(self._plain))

    def _finish(self) -> None:
        try:
            if self.body is not None:
                self.body.end()
            self.outcome = self.reader.reply(self.call.body, self.call.prompt_sha256, self.watch.timing(self.reader))
        except RequestError as error:
            self.fail(error)


class Loop:
    """Sends each call when it is due and a place is free, and reads all that is in flight; `run` is called once."""

    def __init__(self, route: Route, limits: Limits, on_tick: Callable[[Progress], None] | None = None) -> None:
        self._route, self._limits, self._on_tick = route, limits, on_tick
        self._selector = selectors.DefaultSelector()
        self._buffer = memoryview(bytearray(PACKET))
        self._ready: deque[_Stream] = deque()
        self._open: set[_Stream] = set()
        self._turns: deque[_Stream] = deque()
        self._credit, self._read_at = 0.0, limits.clock()
        self._ended = self._events = self._seen = 0
        self._looked = self._gather = 0.0

    def run(self, calls: Sequence[Call]) -> list[Reply | RequestError]:
        """What came of each call, in their order. Raises what `alive` raises, with everything closed."""
        ordered = deque(sorted(calls, key=lambda call: call.due_s))
        streams: dict[int, _Stream] = {}
        try:
            self._connect(ordered, streams, 0.0, len(ordered))
            start = self._limits.clock()
            while ordered or self._ready or self._open:
                if self._ready or (ordered and self._places() > 0):
                    self._connect(ordered, streams, self._limits.clock() - start, BURST)
                    self._send(start)
                self._take_all(self._sleep(ordered, start))
                self._read_some()
                self._tick(len(ordered))
        finally:
            self._close()
        return [outcome for call in calls if (outcome := streams[id(call)].outcome) is not None]

    def _places(self) -> int:
        return self._limits.places - len(self._open) - len(self._ready)

    def _connect(self, ordered: deque[Call], streams: dict[int, _Stream], now_s: float, most: int) -> None:
        """Connections for what is due soon and has a place."""
        for _ in range(most):
            if not ordered or self._places() < 1 or ordered[0].due_s > now_s + AHEAD_S:
                return
            call = ordered.popleft()
            limits = self._limits
            where = f"POST http://{self._route.host}:{self._route.port}{self._route.prefix}{call.path}"
            watch = Watch(where, _unwatched, limits.clock, limits.deadline_s, limits.stall_s)
            stream = streams[id(call)] = _Stream(call, self._route, watch)
            stream.connect()
            if stream.outcome is None:
                self._ready.append(stream)
            else:
                self._end(stream)

    def _send(self, start: float) -> None:
        for _ in range(BURST):
            if not self._ready or start + self._ready[0].call.due_s > self._limits.clock():
                return
            stream = self._ready.popleft()
            stream.send(start + stream.call.due_s)
            if stream.outcome is None:
                self._open.add(stream)
                self._turns.append(stream)
                self._selector.register(stream.watch.wire, selectors.EVENT_READ, stream)  # type: ignore[arg-type]
            else:
                self._end(stream)

    def _sleep(self, ordered: deque[Call], start: float) -> float:
        """Until the next request is due, one tick at most."""
        if not (ordered or self._ready):
            return TICK_S
        next_due = self._ready[0].call.due_s if self._ready else TICK_S * 1e9
        if ordered and self._places() > 0:
            next_due = min(next_due, ordered[0].due_s - AHEAD_S)
        return max(0.0, min(TICK_S, start + next_due - self._limits.clock()))

    def _take_all(self, timeout: float) -> None:
        """Take what has arrived on every socket."""
        if not self._open:
            time.sleep(timeout)
            return
        if len(self._open) > 1 and (nap := min(self._nap(), timeout)):
            time.sleep(nap)
        for key, _ in self._selector.select(timeout):
            key.data.take(self._buffer)
            if key.data.outcome is not None:
                self._end(key.data)

    def _nap(self) -> float:
        """Seconds to wait for other streams' packets, so that one wake-up reads many: a small part of the gap between the
        events of one stream. Stamps are the kernel's, so it costs them nothing; where it could, there is none."""
        return self._gather if ARRIVAL and self._gather >= LEAST_NAP_S else 0.0

    def _read_some(self) -> None:
        """Read what is held, a few streams at a time and each about four times a second: all at once would keep the loop
        from what arrives meanwhile."""
        now = self._limits.clock()
        self._credit = min(self._credit + len(self._open) * (now - self._read_at) / TICK_S, len(self._open))
        self._read_at = now
        while self._credit >= 1 and self._turns:
            self._credit -= 1
            stream = self._turns.popleft()
            if stream in self._open:
                stream.read_held()
                self._turns.append(stream)
                if stream.outcome is not None:
                    self._end(stream)

    def _tick(self, waiting: int) -> None:
        now = self._limits.clock()
        if now - self._looked < TICK_S:
            return
        seconds, self._looked = now - self._looked, now
        self._gather = self._usual_gap(seconds) * GATHER
        self._limits.alive()
        for stream in list(self._open):
            stream.look()
            if stream.outcome is not None:
                self._end(stream)
        if self._on_tick is not None:
            self._on_tick(Progress(waiting + len(self._ready), len(self._open), self._ended, self._seen))

    def _usual_gap(self, seconds: float) -> float:
        """Seconds between the events of one stream since the last look, at most `MOST_GAP_S`; 0 if nothing came."""
        seen = self._events + sum(len(stream.reader.stamps) for stream in self._open)
        came, self._seen = seen - self._seen, seen
        return min(seconds * len(self._open) / came, MOST_GAP_S) if came > 0 else 0.0

    def _end(self, stream: _Stream) -> None:
        self._ended += 1
        self._events += len(stream.reader.stamps)
        if stream in self._open:
            self._open.discard(stream)
            self._selector.unregister(stream.watch.wire)  # type: ignore[arg-type]
        stream.close()

    def _close(self) -> None:
        for stream in (*self._open, *self._ready):
            stream.close()
        self._selector.close()


def _headless(head: bytes, where: str) -> RequestError:
    """What an answer without a whole head is: nothing, a part of one, or not HTTP."""
    if not head:
        return RequestError("SERVER_LOST", f"{where}: the connection ended without an answer")
    if b"HTTP/".startswith(head[:5]):
        return RequestError("TRUNCATED", f"{where}: the connection ended inside the answer's head")
    return RequestError("PROTOCOL", f"{where}: expected an HTTP answer, found {head[:100]!r}")


def _unwatched() -> None:
    """The loop looks at the engine's life itself, once for all streams."""


def _parsed(head: bytes, where: str) -> tuple[int, Mapping[str, str]]:
    """Status and headers of an answer's head."""
    line, _, rest = head.partition(b"\n")
    version, _, tail = line.partition(b" ")
    code = tail[:3]
    if not version.startswith(b"HTTP/") or not code.isdigit():
        raise RequestError("PROTOCOL", f"{where}: expected an HTTP answer, found {line[:100]!r}")
    try:
        return int(code), cast(Mapping[str, str], http.client.parse_headers(io.BytesIO(rest)))
    except http.client.HTTPException as error:
        raise RequestError("PROTOCOL", f"{where}: the answer's headers cannot be read: {error!r}") from error
