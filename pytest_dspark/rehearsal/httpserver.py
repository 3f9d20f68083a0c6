"""As much of HTTP/1.1 as an API server needs: keep-alive, bodies by length or in chunks, streams in chunks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    422: "Unprocessable Entity",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
HEAD_LIMIT = 2**16


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    client: str


class Reply:
    """What is sent back for one request: `json`, `text`, or a stream of `begin`, `send` and `end`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, close: bool) -> None:
        self._reader, self._writer = reader, writer
        self.close = close
        self.status = 0

    def gone(self) -> bool:
        """Whether the client has closed its end."""
        return self._reader.at_eof() or self._writer.is_closing()

    def _head(self, status: int, kind: str, more: str) -> bytes:
        self.status = status
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, '')}", f"date: {formatdate(usegmt=True)}", "server: uvicorn"]
        lines += [f"content-type: {kind}"] if kind else []
        lines += ["connection: close"] if self.close else []
        return "\r\n".join([*lines, more, "", ""]).encode()

    async def _flush(self) -> None:
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def text(self, status: int, body: str, kind: str = "text/plain; charset=utf-8") -> None:
        raw = body.encode("utf-8", "replace")
        self._writer.write(self._head(status, kind if raw else "", f"content-length: {len(raw)}") + raw)
        await self._flush()

    async def json(self, status: int, body: Any) -> None:
        await self.text(status, dumped(body), "application/json")

    async def begin(self) -> None:
        self._writer.write(self._head(200, "text/event-stream; charset=utf-8", "transfer-encoding: chunked"))
        await self._flush()

    async def send(self, data: str) -> None:
        """One server-sent event."""
        raw = f"data: {data}\n\n".encode("utf-8", "replace")
        self._writer.write(b"%x\r\n%s\r\n" % (len(raw), raw))
        await self._flush()

    async def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")
        await self._flush()

    def cut(self) -> None:
        """End the connection here, in the middle of a body."""
        self.close = True


Handler = Callable[[Request, Reply], Awaitable[None]]


def dumped(body: Any) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


async def serve(listener: socket.socket, handle: Handler, access: Callable[[str], None]) -> asyncio.Server:
    """Answer on a bound socket. `access` gets a line for each request."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            while await _one(reader, writer, handle, access):
                pass
        writer.close()

    return await asyncio.start_server(connection, sock=listener, limit=HEAD_LIMIT, backlog=2048)


async def _one(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Handler, access: Callable[[str], None]
) -> bool:
    """One request and its reply; whether another may follow."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, version = head[0].split(" ")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
    }
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await _body(reader, headers)
    host, port = writer.get_extra_info("peername")[:2]
    reply = Reply(reader, writer, close=headers.get("connection", "").lower() == "close" or version == "HTTP/1.0")
    await handle(Request(method, target.partition("?")[0], headers, body, f"{host}:{port}"), reply)
    access(f'{host}:{port} - "{method} {target} HTTP/1.1" {reply.status} {REASONS.get(reply.status, "")}')
    return not reply.close


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "chunked" not in headers.get("transfer-encoding", ""):
        return await reader.readexactly(int(headers.get("content-length") or 0))
    parts = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    while (await reader.readline()).strip():
        pass
    return b"".join(parts)
