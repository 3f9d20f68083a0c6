"""The floor of a machine: one thread, epoll, raw sockets. It stamps each receive and reads what came after the run.

    python -m benchmarks.reference URL CONCURRENCY REQUESTS

Writes one JSON line in the form of `figures.read_streams`. It trusts its server: no errors inside a stream, no deadlines of
a stream, chunks never split a line's end. Ours has to do all that and may cost half as much again.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.scenarios import PROMPT_TOKENS

PACKET = 1 << 16
END = b"0\r\n\r\n"
SILENCE_S = 60.0


@dataclass(slots=True)
class Stream:
    """One request: when its first byte was sent, and each receive with its moment, on the monotonic clock."""

    user: str
    sock: socket.socket
    start: float = 0.0
    received: list[tuple[float, bytes]] = field(default_factory=list)


def request(url: str, user: str) -> bytes:
    """The whole request as bytes, built before its stamp."""
    parts = urlsplit(url)
    said = [{"role": "user", "content": "word " * PROMPT_TOKENS}]
    body = {"model": "m", "messages": said, "user": user, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST {parts.path}/v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def begin(address: tuple[str, int], user: str, data: bytes) -> Stream:
    """Connect, then stamp and send."""
    stream = Stream(user, socket.socket())
    stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.sock.connect(address)
    stream.start = time.monotonic()
    stream.sock.sendall(data)
    stream.sock.setblocking(False)
    return stream


def run(url: str, concurrency: int, requests: int) -> list[Stream]:
    """All streams, finished. It looks at what has arrived after each request that it sends.

    Raises TimeoutError when nothing comes for a minute.
    """
    parts = urlsplit(url)
    waiting = [(f"r{number}", request(url, f"r{number}")) for number in reversed(range(requests))]
    epoll = select.epoll()
    streams: dict[int, Stream] = {}
    done: list[Stream] = []
    while waiting or streams:
        if waiting and len(streams) < concurrency:
            stream = begin((parts.hostname or "", parts.port or 80), *waiting.pop())
            streams[stream.sock.fileno()] = stream
            epoll.register(stream.sock, select.EPOLLIN)
        more = bool(waiting) and len(streams) < concurrency
        ready = epoll.poll(0 if more else SILENCE_S)
        if not ready and not more:
            raise TimeoutError(f"{url}: nothing came for {SILENCE_S:g} s in {len(streams)} streams")
        done += [streams.pop(number) for number, _ in ready if receive(streams[number])]
    return done


def receive(stream: Stream) -> bool:
    """One receive, stamped; True if it was the last."""
    data = stream.sock.recv(PACKET)
    stream.received.append((time.monotonic(), data))
    if data and not data.endswith(END):
        return False
    stream.sock.close()
    return True


def events(stream: Stream) -> Iterator[tuple[float, dict[str, Any]]]:
    """The events with the moment of the receive that completed their line."""
    rest = b""
    for moment, data in stream.received:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield moment, json.loads(line[6:])


def told(stream: Stream) -> dict[str, Any]:
    """The stream as JSON: a role or an empty delta is no event here."""
    stamps, answer, tokens = [], None, None
    for moment, event in events(stream):
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        delta = event["choices"][0]["delta"] if event["choices"] else {}
        if delta.get("content") or delta.get("reasoning"):
            stamps.append(moment)
        if delta.get("content") and answer is None:
            answer = moment
    return {"user": stream.user, "start": stream.start, "stamps": stamps, "first_answer": answer, "tokens": tokens}


def main() -> None:
    url, concurrency, requests = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    streams = run(url, concurrency, requests)
    print(json.dumps({"streams": [told(stream) for stream in streams]}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # an interpreter that takes itself apart is no client's work, and would count for most at C1
