"""A server with a known schedule: an OpenAI-compatible stream whose every event is due at a stated moment.

A client that measures itself against it knows its own error: `GET /log` tells, per request, when its first byte arrived and
when each event was sent, on the machine's monotonic clock. One process, one loop. `python -m pytest_dspark.schedule` prints
its port as one JSON line and serves until its standard input closes. Standard library alone.

The path chooses the schedule: `/s/FIRST/GAP/EVENTS/TOKENS/v1/...` is EVENTS events of TOKENS tokens each, GAP seconds apart,
the first FIRST seconds after the request has arrived; `/thinking/v1/...` is a role delta at 5 ms, an empty delta at 10 ms,
reasoning at 1 s, content at 1.5 s, then 50 events 20 ms apart. `/metrics` has the counters of an engine.
"""

from __future__ import annotations

import heapq
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

ARRIVAL = getattr(socket, "SO_TIMESTAMPNS", 35)
NAP_S = 0.0002  # the longest sleep while something is due soon; arrivals are stamped by the kernel meanwhile
IDLE_S = 0.05
WORD = " word"
PROMPT = 100  # what every prompt is counted as
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Step:
    """One event: seconds after the request's arrival, what it carries (`role`, `empty`, `reasoning`, `text`), its tokens."""

    at_s: float
    kind: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One event as bytes on the wire; `counts` if it carries text and so is stamped."""

    at_s: float
    data: bytes
    counts: bool
    answers: bool


@dataclass(slots=True)
class Record:
    """One request as the server saw it: arrival of its first byte and the send of each event with text, in seconds."""

    arrival: float
    user: str
    tokens: int
    stamps: list[float] = field(default_factory=list)
    first_answer: float | None = None
    late: list[float] = field(default_factory=list)
    finished: bool = False


@dataclass(slots=True, eq=False)
class Client:
    """One connection: what came in so far, and the stream that goes out."""

    sock: socket.socket
    taken: bytearray = field(default_factory=bytearray)
    arrival: float = 0.0
    pieces: Sequence[Piece] = ()
    next: int = 0
    record: Record | None = None


def steps(parts: Sequence[str]) -> list[Step]:
    """The schedule of a path's first parts. Raises ValueError for a path that has none."""
    if parts[:1] == ["thinking"]:
        tail = [Step(1.5 + 0.02 * number, "text", 1) for number in range(51)]
        return [Step(0.005, "role", 0), Step(0.010, "empty", 0), Step(1.0, "reasoning", 1), *tail]
    if parts[:1] != ["s"] or len(parts) < 5:
        raise ValueError(f"no schedule: {'/'.join(parts)}")
    first, gap, events, tokens = float(parts[1]), float(parts[2]), int(parts[3]), int(parts[4])
    return [Step(first + gap * number, "text", tokens) for number in range(events)]


def pieces(schedule: Sequence[Step], *, chat: bool) -> tuple[list[Piece], int]:
    """The schedule as bytes, encoded once, and its tokens; completions know no role and no empty delta."""
    last = len(schedule) - 1
    kept = [(n, step) for n, step in enumerate(schedule) if chat or step.kind not in ("role", "empty")]
    made = [
        Piece(
            step.at_s,
            _chunk(_event(step, chat=chat, final=n == last)),
            step.kind in ("reasoning", "text"),
            step.kind == "text",
        )
        for n, step in kept
    ]
    tokens = sum(step.tokens for step in schedule)
    tail = _chunk({"id": "x", "object": "chunk", "created": 1, "model": "m", "choices": [], "usage": _usage(tokens)})
    end = made[-1]
    made[-1] = Piece(end.at_s, end.data + tail + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n", end.counts, end.answers)
    return made, tokens


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": PROMPT, "completion_tokens": tokens, "total_tokens": PROMPT + tokens}


def _event(step: Step, *, chat: bool, final: bool) -> dict[str, Any]:
    text = WORD * step.tokens
    said: dict[str, Any] = {"text": text}
    if chat:
        delta = {
            "role": {"role": "assistant", "content": ""},
            "empty": {"content": ""},
            "reasoning": {"reasoning": text},
            "text": {"content": text},
        }
        said = {"delta": delta[step.kind]}
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": "length" if final else None}
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": "x", "object": kind, "created": 1, "model": "m", "choices": [choice], "usage": None}


def _chunk(event: dict[str, Any]) -> bytes:
    return _framed(b"data: " + json.dumps(event).encode() + b"\n\n")


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Server:
    """Serves until `stdin` closes."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self._listener.setblocking(False)
        self._poll = select.poll()
        self._clients: dict[int, Client] = {}
        self._due: list[tuple[float, int, Client]] = []
        self._order = count()
        self._records: list[Record] = []
        self._made: dict[tuple[str, bool], tuple[list[Piece], int]] = {}
        self.port = self._listener.getsockname()[1]

    def run(self) -> None:
        stdin = sys.stdin.fileno()
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(stdin, select.POLLIN | select.POLLHUP)
        while True:
            for number, _ in self._poll.poll(self._wait()):
                if number == stdin:
                    return
                self._accept() if number == self._listener.fileno() else self._read(self._clients[number])
            self._send_due()

    def _wait(self) -> float:
        """Milliseconds to wait for arrivals; short sleeps while something is due, since the poll knows whole ones only."""
        if not self._due:
            return IDLE_S * 1000
        left = self._due[0][0] - time.monotonic()
        if left > 0.002:
            return int((left - 0.001) * 1000)
        if left > 0:
            time.sleep(min(left, NAP_S))
        return 0

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, ARRIVAL, 1)
            self._clients[sock.fileno()] = Client(sock)
            self._poll.register(sock, select.POLLIN)

    def _read(self, client: Client) -> None:
        try:
            data, notes, _, _ = client.sock.recvmsg(1 << 18, 64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        if not client.taken:
            client.arrival = _arrival(notes)
        client.taken += data
        while (request := _request(client.taken)) is not None:
            self._answer(client, *request)

    def _answer(self, client: Client, method: str, path: str, body: bytes) -> None:
        parts = path.strip("/").split("/")
        if parts == ["log"]:
            self._reply(client, self._log())
            if method == "DELETE":
                self._records.clear()
        elif parts[-1] == "metrics":
            self._text(client, metrics(self._records))
        elif method == "GET":
            self._reply(client, {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 1 << 20}]})
        else:
            self._generate(client, parts, body)

    def _generate(self, client: Client, parts: list[str], body: bytes) -> None:
        asked = json.loads(body)
        chat = parts[-2:] == ["chat", "completions"]
        key = ("/".join(parts[:5]), chat)
        try:
            made, tokens = self._made.get(key) or self._made.setdefault(key, pieces(steps(parts), chat=chat))
        except ValueError as error:
            self._reply(client, {"error": {"message": str(error)}}, b"404 Not Found")
            return
        record = Record(client.arrival, str(asked.get("user", "")), tokens)
        self._records.append(record)
        if not asked.get("stream"):
            self._reply(client, _whole(record.tokens, chat=chat))
            self._records.remove(record)
            return
        client.pieces, client.next, client.record = made, 0, record
        self._put(client, HEAD)
        self._plan(client)

    def _plan(self, client: Client) -> None:
        heapq.heappush(self._due, (client.arrival + client.pieces[client.next].at_s, next(self._order), client))

    def _send_due(self) -> None:
        """At most a few events between two looks for arrivals."""
        for _ in range(16):
            if not self._due or self._due[0][0] > time.monotonic():
                return
            due, _, client = heapq.heappop(self._due)
            piece, record = client.pieces[client.next], client.record
            stamp = time.monotonic()
            if record is None or not self._put(client, piece.data):
                continue
            if piece.counts:
                record.stamps.append(stamp)
                record.late.append(stamp - due)
            if piece.answers and record.first_answer is None:
                record.first_answer = stamp
            client.next += 1
            if client.next < len(client.pieces):
                self._plan(client)
            else:
                record.finished = True

    def _put(self, client: Client, data: bytes) -> bool:
        """Send all of it; a client that does not take what is sent is dropped."""
        try:
            if client.sock.send(data) == len(data):
                return True
        except OSError:
            pass
        self._drop(client)
        return False

    def _drop(self, client: Client) -> None:
        if self._clients.pop(client.sock.fileno(), None) is not None:
            self._poll.unregister(client.sock)
        client.record = None
        client.sock.close()

    def _reply(self, client: Client, body: dict[str, Any], status: bytes = b"200 OK") -> None:
        self._text(client, json.dumps(body), b"application/json", status)

    def _text(self, client: Client, text: str, kind: bytes = b"text/plain", status: bytes = b"200 OK") -> None:
        data = text.encode()
        head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (status, kind, len(data))
        client.sock.setblocking(True)
        self._put(client, head + data)
        if client.sock.fileno() >= 0:
            client.sock.setblocking(False)

    def _log(self) -> dict[str, Any]:
        late = sorted(value for record in self._records for value in record.late)
        return {
            "requests": [
                {
                    "arrival": one.arrival,
                    "user": one.user,
                    "tokens": one.tokens,
                    "stamps": one.stamps,
                    "first_answer": one.first_answer,
                }
                for one in self._records
            ],
            "lateness_p50_ms": _at(late, 0.5),
            "lateness_p99_ms": _at(late, 0.99),
        }


def metrics(records: Sequence[Record]) -> str:
    """The counters of an engine, under vLLM's names, of what has been served; there is no prompt cache to hit."""
    done = [record for record in records if record.finished]
    spans = [record.stamps[-1] - record.stamps[0] for record in done]
    firsts = [record.stamps[0] - record.arrival for record in done]
    told = {
        "request_success_total": len(done),
        "prompt_tokens_total": PROMPT * len(done),
        "generation_tokens_total": sum(record.tokens for record in done),
        "prefix_cache_hits_total": 0,
        "request_decode_time_seconds_sum": sum(spans),
        "request_prefill_time_seconds_sum": sum(firsts),
        "num_requests_running": len(records) - len(done),
        "num_requests_waiting": 0,
    }
    return "".join(f"vllm:{name} {value}\n" for name, value in told.items())


def _at(ordered: Sequence[float], share: float) -> float | None:
    """A quantile in milliseconds; None of nothing."""
    return ordered[int((len(ordered) - 1) * share)] * 1000 if ordered else None


def _whole(tokens: int, *, chat: bool) -> dict[str, Any]:
    """The answer of a request that does not stream, at once."""
    said: dict[str, Any] = (
        {"message": {"role": "assistant", "content": WORD * tokens}} if chat else {"text": WORD * tokens}
    )
    choice = {"index": 0, **said, "finish_reason": "length"}
    return {"id": "x", "object": "completion", "created": 1, "model": "m", "choices": [choice], "usage": _usage(tokens)}


def _arrival(notes: Sequence[tuple[int, int, bytes]]) -> float:
    """When the bytes arrived on the monotonic clock: now, less the packet's age by the kernel's stamp."""
    now = time.monotonic()
    for level, kind, data in notes:
        if level == socket.SOL_SOCKET and kind == ARRIVAL and len(data) >= 16:
            seconds, nanoseconds = struct.unpack_from("@qq", data)
            age = time.clock_gettime(time.CLOCK_REALTIME) - seconds - nanoseconds * 1e-9
            return now - age if 0 <= age < 1 else now
    return now


def _request(taken: bytearray) -> tuple[str, str, bytes] | None:
    """One whole request taken off the front: method, path, body; None while it is not whole."""
    end = taken.find(b"\r\n\r\n")
    if end < 0:
        return None
    line, *headers = bytes(taken[:end]).decode("latin-1").split("\r\n")
    lengths = [int(header.partition(":")[2]) for header in headers if header.lower().startswith("content-length:")]
    stop = end + 4 + (lengths[0] if lengths else 0)
    if len(taken) < stop:
        return None
    body = bytes(taken[end + 4 : stop])
    del taken[:stop]
    method, path, _ = line.split(" ")
    return method, path, body


def main() -> None:
    with suppress(OSError, AttributeError):  # where it is allowed: its punctuality is the measure
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    server = Server(0)
    print(json.dumps({"port": server.port}), flush=True)
    server.run()


if __name__ == "__main__":
    main()
