"""A scripted socket server for tests: it says exactly the given bytes at the given moments, and keeps what it was asked.

A script is a tuple of steps: bytes are sent, a number is slept (seconds), RESET ends the connection with RST, HOLD keeps it
open until the client goes. The n-th connection plays the n-th script; the last script is played for all that follow.
"""

import json
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

RESET = "reset"
HOLD = "hold"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def event(**data) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def delta(finish_reason=None, **said) -> bytes:
    return event(model="m", choices=[{"index": 0, "delta": said, "finish_reason": finish_reason}])


def usage(completion: int, prompt: int = 5, **more) -> bytes:
    return event(model="m", choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion, **more})


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(body, status: str = "200 OK", kind: str = "application/json") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


@dataclass
class Scripted:
    """`with Scripted(script, …) as server:` — `server.url`, and `server.requests` as (head, body)."""

    scripts: tuple
    requests: list = field(default_factory=list)
    url: str = ""
    gone: threading.Event = field(default_factory=threading.Event)

    def __init__(self, *scripts):
        self.scripts, self.requests, self.gone = scripts, [], threading.Event()

    def __enter__(self):
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        number = 0
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            script = self.scripts[min(number, len(self.scripts) - 1)]
            threading.Thread(target=self._play, args=(connection, script), daemon=True).start()
            number += 1

    def _play(self, connection, script):
        with connection:
            if not self._read(connection):
                return
            try:
                for step in script:
                    self._step(connection, step)
            except OSError:
                self.gone.set()

    def _read(self, connection) -> bool:
        data = b""
        while b"\r\n\r\n" not in data:
            more = connection.recv(65536)
            if not more:
                return False
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        parts, have = [body], len(body)
        while have < length:
            parts.append(connection.recv(1 << 20))
            have += len(parts[-1])
        self.requests.append((head.decode(), b"".join(parts)))
        return True

    def _step(self, connection, step):
        if step == RESET:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        elif step == HOLD:
            connection.recv(1)
            self.gone.set()
        elif isinstance(step, bytes):
            connection.sendall(step)
        else:
            time.sleep(step)
