"""The waist: the only code that speaks HTTP to the engine, and the only one that imports requests.

A generation request is sent exactly once: every request has a fresh connection, so there is no pooled one that could be
found dead and tried again, no retry, no redirect, no proxy unless asked, no compression. The body is built and the
connection made before the first-byte stamp. Bytes are stamped when they are received, one receive at a time, and read
afterwards. On Linux the stamp is the kernel's own of the packet's arrival, so that neither the interpreter's lock nor a
busy machine moves it: see `_Wire`.

Deadlines are this module's own, since a library's read time-out starts anew with every packet:
- the overall deadline counts from the call, whatever comes;
- the stall limit counts from the last event that carried something generated. Comments, pings, empty deltas and usage
  keep a connection open and are no progress. It counts before the first token too: a long prefill needs a long limit.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import math
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, SupportsIndex
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection

from pytest_dspark import sse
from pytest_dspark.errors import ConfigError, EndpointError
from pytest_dspark.metrics import Metrics, read_metrics
from pytest_dspark.timing import Timing

Messages = Sequence[Mapping[str, Any]]

CONNECT_S = 10.0  # one connection attempt
ASK_S = 15.0  # /v1/models, /version, /metrics
HEALTH_S = 5.0
TICK_S = 0.25  # the longest sleep without a look at the deadlines
ALIVE_S = 0.75  # between two looks at the engine's life
PACKET = 1 << 16
EXCERPT = 500
ARRIVAL = getattr(socket, "SO_TIMESTAMPNS", 35) if sys.platform == "linux" else 0  # the option and its note's type
NOTE = struct.Struct("@qq")  # seconds, nanoseconds
TIMEVAL = struct.Struct("@ll")  # seconds, microseconds


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of /v1/models. `max_model_len` is a positive number, also if sent as decimal text; else None with `problem`."""

    id: str
    max_model_len: int | None
    root: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the server says them; None where it does not."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: its name and its raw argument text, put together from all pieces."""

    name: str
    arguments: str


class TokenLogprob(NamedTuple):
    """One token with its log probability (natural log; None if not told) and the most likely alternatives."""

    token: str
    logprob: float | None
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """What one event of a stream carried, `at_s` seconds after the first byte sent. Empty: nothing of that kind."""

    at_s: float
    text: str = ""
    reasoning: str = ""
    arguments: str = ""
    finish_reason: str = ""

    @property
    def carries(self) -> bool:
        """Generated text of any kind."""
        return bool(self.text or self.reasoning or self.arguments)


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished answer. `text` is the content, empty if the server sent null; `done_marker` is None if not streamed.

    `usage` is None with the reason in `usage_missing`: a count is never made from events. `timing.first_token_s` is None
    if nothing with text came: such a request is no sample of anything. `prompt_sha256` is over the prompt's or the
    messages' JSON as sent. `raw` is the request body; it holds no key.
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None
    usage: Usage | None
    usage_missing: str
    model: str
    status: int
    done_marker: bool | None
    timing: Timing | None
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_sha256: str
    raw: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the server counts it. `how` says which call told: `render` or `tokenize`."""

    ids: tuple[int, ...]
    how: str


class RequestError(EndpointError):
    """One request that failed as infrastructure, with what was known by then.

    `status` is the HTTP status if there was one, `partial` and `partial_reasoning` the text until then, `elapsed_s` the
    seconds since the call.
    """

    status: int | None = None
    partial: str = ""
    partial_reasoning: str = ""
    elapsed_s: float | None = None

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> tuple[Any, ...]:
        return type(self), (self.code, self.message), self.__dict__


class Endpoint:
    """One OpenAI-compatible server. Safe to use from many threads: each request has a connection and state of its own.

    `alive` is called at least once a second while a request waits for bytes, in that request's thread, and must be quick.
    What it raises (a DsparkError: the engine was found dead) closes the connection at once and is raised instead of what
    the socket would have said. `deadline_s` and `stall_s` are defaults of the generation calls. `proxy` is a URL.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str = "",
        alive: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = 600.0,
        stall_s: float = 120.0,
        proxy: str = "",
    ) -> None:
        self._root = checked_url(base_url)
        self._model, self._engine_alive, self._clock, self._key = model, alive, clock, api_key
        self._closed = threading.Event()
        self._deadline_s, self._stall_s = deadline_s, stall_s
        self._proxies = {"http": proxy, "https": proxy} if proxy else {}
        self._headers = {"Accept-Encoding": "identity", "Connection": "close", "User-Agent": "pytest-dspark"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @property
    def base_url(self) -> str:
        """Without a trailing slash or /v1."""
        return self._root

    @property
    def model(self) -> str:
        return self._model

    def close(self) -> None:
        """End what is still in flight, in whatever thread, within a second. Nothing is kept open between requests."""
        self._closed.set()

    def _alive(self) -> None:
        if self._closed.is_set():
            raise EndpointError("CANCELLED", f"{self._root}: the request was given up")
        self._engine_alive()

    # --- what the server says of itself

    def models(self) -> tuple[ModelCard, ...]:
        """The models it serves. Raises PROTOCOL if the answer is not a list of models."""
        data = self._get("/v1/models").get("data")
        if not isinstance(data, list) or not all(isinstance(entry, Mapping) for entry in data):
            raise RequestError("PROTOCOL", f"{self._root}/v1/models: expected a list of models, found {_short(data)}")
        return tuple(_card(entry) for entry in data)

    def version(self) -> str:
        """The server's own version text. Raises PROTOCOL if it has none."""
        version = self._get("/version").get("version")
        if not isinstance(version, str) or not version:
            raise RequestError("PROTOCOL", f"{self._root}/version: expected a version, found {_short(version)}")
        return version

    def health(self) -> bool:
        """Whether the API answers at all. Says nothing of the engine behind it."""
        try:
            return self._ask("GET", "/health", None, HEALTH_S).status == 200
        except EndpointError:
            return False

    def metrics(self) -> Metrics:
        """Counters now, or unavailable with the reason; a request that fails is a reason too."""
        try:
            answer = self._ask("GET", "/metrics", None, ASK_S)
        except EndpointError as error:
            return read_metrics("", problem=str(error))
        problem = "" if answer.status == 200 else f"{self._root}/metrics: HTTP {answer.status}"
        return read_metrics(answer.body.decode("utf-8", "replace"), problem=problem)

    def tokenize(self, prompt: str | Messages, *, deadline_s: float | None = None, **extra: Any) -> tuple[int, ...]:
        """Token ids of a text, or of messages with the chat template applied."""
        given = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        return _ids(self._post("/tokenize", {"model": self._model, **given, **extra}, deadline_s), "tokens")

    def detokenize(self, ids: Sequence[int], *, deadline_s: float | None = None) -> str:
        """The text of token ids."""
        text = self._post("/detokenize", {"model": self._model, "tokens": list(ids)}, deadline_s).get("prompt")
        if not isinstance(text, str):
            raise RequestError("PROTOCOL", f"{self._root}/detokenize: expected a text, found {_short(text)}")
        return text

    def render(self, messages: Messages, *, deadline_s: float | None = None, **extra: Any) -> Rendered:
        """The prompt of a chat as ids: /v1/chat/completions/render, or /tokenize where that is switched off."""
        body = {"model": self._model, "messages": list(messages), **extra}
        answer = self._ask("POST", "/v1/chat/completions/render", body, deadline_s or self._deadline_s)
        if answer.status in (403, 404, 405):
            return Rendered(self.tokenize(messages, deadline_s=deadline_s, **extra), "tokenize")
        return Rendered(_ids(_json(self._checked(answer)), "token_ids"), "render")

    # --- generation

    def chat(
        self,
        messages: Messages,
        *,
        max_tokens: int,
        temperature: float = 0.0,
        stream: bool = False,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        response_format: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        min_tokens: int | None = None,
        ignore_eos: bool | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        extra: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        stall_s: float | None = None,
        on_event: Callable[[StreamEvent], None] | None = None,
    ) -> Reply:
        """One chat completion, sent once. `thinking` None sends nothing and leaves the server's default.

        `logprobs` is the number of alternatives a token. `extra` is added to the body and wins. Raises RequestError.
        """
        body: dict[str, Any] = {"tools": tools, "tool_choice": tool_choice, "response_format": response_format}
        body |= {"min_tokens": min_tokens, "ignore_eos": ignore_eos, "stop": stop, "seed": seed}
        body |= {"logprobs": True, "top_logprobs": logprobs} if logprobs is not None else {}
        body |= {"chat_template_kwargs": {"thinking": thinking}} if thinking is not None else {}
        body |= {"max_tokens": max_tokens, "temperature": temperature, "stream": stream}
        call = self._call("/v1/chat/completions", "messages", list(messages), body, extra or {})
        return self._generate(call, stream, deadline_s, stall_s, on_event)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        stream: bool = False,
        logprobs: int | None = None,
        min_tokens: int | None = None,
        ignore_eos: bool | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        extra: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        stall_s: float | None = None,
        on_event: Callable[[StreamEvent], None] | None = None,
    ) -> Reply:
        """One completion of a text or of token ids, sent once. Raises RequestError."""
        body: dict[str, Any] = {"min_tokens": min_tokens, "ignore_eos": ignore_eos, "stop": stop, "seed": seed}
        body |= {"logprobs": logprobs, "max_tokens": max_tokens, "temperature": temperature, "stream": stream}
        given = prompt if isinstance(prompt, str) else list(prompt)
        call = self._call("/v1/completions", "prompt", given, body, extra or {})
        return self._generate(call, stream, deadline_s, stall_s, on_event)

    def generate_one(self, *, deadline_s: float) -> Reply:
        """One generated token: the readiness probe, which an API without an engine cannot answer."""
        return self.complete("Hello", max_tokens=1, min_tokens=1, ignore_eos=True, deadline_s=deadline_s)

    def _call(self, path: str, key: str, prompt: Any, given: Mapping[str, Any], extra: Mapping[str, Any]) -> _Call:
        body = {name: value for name, value in given.items() if value is not None} | {"model": self._model}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        kwargs = {**body.get("chat_template_kwargs", {}), **extra.get("chat_template_kwargs", {})}
        body |= dict(extra) | ({"chat_template_kwargs": kwargs} if kwargs else {})
        return _Call(path, {key: prompt, **body}, *_encoded(key, prompt, body))

    def _generate(
        self,
        call: _Call,
        stream: bool,
        deadline_s: float | None,
        stall_s: float | None,
        on_event: Callable[[StreamEvent], None] | None,
    ) -> Reply:
        reader = StreamReader(on_event)
        limit = self._deadline_s if deadline_s is None else deadline_s
        stall = (self._stall_s if stall_s is None else stall_s) if stream else math.inf
        watch = _Watch(f"POST {self._root}{call.path}", self._alive, self._clock, limit, stall)
        try:
            with self._open("POST", call.path, call.data, watch) as raw:
                return self._read(raw, call, watch, reader, stream)
        except RequestError as error:
            error.partial, error.partial_reasoning = reader.so_far
            error.status, error.elapsed_s = watch.status, self._clock() - watch.begin
            raise

    def _read(self, raw: urllib3.HTTPResponse, call: _Call, watch: _Watch, reader: StreamReader, stream: bool) -> Reply:
        if raw.status != 200:
            self._checked(_Answer(raw.status, _body(raw)))
        if stream:
            _expect_events(raw)
            _pump(raw, watch, reader)
            return reader.reply(call.body, call.prompt_sha256, watch.timing(reader))
        data = _json(_Answer(raw.status, _body(raw)))
        return _plain_reply(data, call.body, call.prompt_sha256, watch.timing(reader))

    # --- the wire

    def _get(self, path: str) -> Mapping[str, Any]:
        return _json(self._checked(self._ask("GET", path, None, ASK_S)))

    def _post(self, path: str, body: Mapping[str, Any], deadline_s: float | None) -> Mapping[str, Any]:
        return _json(self._checked(self._ask("POST", path, body, deadline_s or self._deadline_s)))

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> _Answer:
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        watch = _Watch(f"{method} {self._root}{path}", self._alive, self._clock, deadline_s, math.inf)
        with self._open(method, path, data, watch) as raw:
            return _Answer(raw.status, _body(raw))

    @contextmanager
    def _open(self, method: str, path: str, data: bytes | None, watch: _Watch) -> Iterator[urllib3.HTTPResponse]:
        """One request on a connection of its own; every error of a library becomes ours, and the socket is closed."""
        headers = self._headers | ({"Content-Type": "application/json"} if data is not None else {})
        request = requests.Request(method, self._root + path, headers=headers, data=data).prepare()
        adapter = _Adapter(watch)
        try:
            response = adapter.send(
                request, stream=True, timeout=(watch.connect_s(), None), verify=True, proxies=self._proxies
            )
            watch.status = response.status_code
            with response:
                yield response.raw
        except (requests.RequestException, urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
            raise _translated(watch.where, error) from error
        finally:
            watch.close()
            adapter.close()

    def _checked(self, answer: _Answer) -> _Answer:
        if answer.status == 200:
            return answer
        text = _message(answer.body)
        if self._key:
            text = text.replace(self._key, "***")
        error = RequestError("SERVER_ERROR", f"{self._root}: HTTP {answer.status}: {text}")
        error.status = answer.status
        raise error


def checked_url(base_url: str) -> str:
    """The base URL without a trailing slash or /v1. Raises USAGE for anything but plain http(s) without credentials."""
    try:
        parts = urlsplit(base_url.strip())
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError("USAGE", f"base URL: {error}; an IPv6 address stands in brackets") from error
    if "@" in parts.netloc:
        raise ConfigError("USAGE", "base URL must not hold a user or a password; give the key by itself")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ConfigError("USAGE", f"base URL must be http://host:port, found {base_url!r}")
    if "%" in host:
        raise ConfigError("USAGE", f"base URL: an address with a scope ({host}) is not supported; use a routable one")
    return base_url.strip().rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class _Call:
    """One generation request, built before anything is stamped."""

    path: str
    body: Mapping[str, Any]
    data: bytes
    prompt_sha256: str


def _encoded(key: str, prompt: Any, rest: Mapping[str, Any]) -> tuple[bytes, str]:
    """The body as bytes and the prompt's hash; the prompt, which may be megabytes, is encoded once."""
    part = json.dumps(prompt, allow_nan=False, separators=(",", ":")).encode()
    other = json.dumps({name: value for name, value in rest.items() if name != key}, allow_nan=False).encode()
    return b'{"%b":%b,%b' % (key.encode(), part, other[1:]), hashlib.sha256(part).hexdigest()


# --- sockets


class _Watch:
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
        self.begin = self._moved = self._looked = clock()
        self.first_byte = self.sent = self.stamp = self.begin
        self.status: int | None = None
        self.wire: _Wire | None = None

    def connect_s(self) -> float:
        return min(CONNECT_S, self._deadline_s)

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
            first_token_s=stamps[0] if stamps else None,
            first_answer_s=None if reader.first_answer is None else reader.first_answer - start,
            last_token_s=stamps[-1] if stamps else None,
            end_s=self.stamp - start,
            wait_s=start - self.begin,
            sent_s=self.sent - start,
            stamps=stamps,
        )


class _Wire(io.RawIOBase):
    """Stands for the socket below http.client: looks at the deadlines while it waits and stamps what it receives.

    `watch.stamp` is when the bytes of the last receive arrived. Linux tells a packet's arrival with it (SO_TIMESTAMPNS), on
    the wall clock; only the packet's age, the few moments between arrival and receive, is taken from that and counted back
    on the monotonic clock. An age that is negative, or longer than since the line was last empty, is a stepped wall clock:
    then, and with TLS or another system or clock, the stamp is the monotonic time right after the receive.
    """

    def __init__(self, sock: socket.socket, watch: _Watch) -> None:
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
        self.reader = io.BufferedReader(self, PACKET)
        watch.wire = self

    def _sleep_at_most(self, seconds: float) -> None:
        """The kernel's limit of one blocking call: one call a packet, where a poll before it would make two."""
        if self._tls is None and seconds != self._sleep:
            self._sleep = seconds
            limit = TIMEVAL.pack(int(seconds), max(1000, int(seconds % 1 * 1e6)))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

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

    def _receive(self, buffer: Any) -> int:
        notes: list[tuple[int, int, bytes]] = []
        if self._noted:
            size, notes, _, _ = self._sock.recvmsg_into([buffer], 64)
        else:
            size = self._sock.recv_into(buffer)
        now = self._watch.clock()
        self._watch.stamp = arrival(notes, now, self._empty)
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


class _Plain(HTTPConnection):
    watch: _Watch

    def connect(self) -> None:
        super().connect()
        self.sock = _Wire(self.sock, self.watch)


class _Secure(HTTPSConnection):
    watch: _Watch

    def connect(self) -> None:
        super().connect()
        self.sock = _Wire(self.sock, self.watch)


class _Adapter(HTTPAdapter):
    """requests' own transport with one watched connection and no retry."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch
        super().__init__(pool_connections=1, pool_maxsize=1, max_retries=0)

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        pool = super().get_connection_with_tls_context(*args, **kwargs)
        pool.ConnectionCls = self._secure if pool.scheme == "https" else self._plain  # type: ignore[attr-defined]
        return pool

    def _plain(self, **kwargs: Any) -> _Plain:
        connection = _Plain(**kwargs)
        connection.watch = self._watch
        return connection

    def _secure(self, **kwargs: Any) -> _Secure:
        connection = _Secure(**kwargs)
        connection.watch = self._watch
        return connection


def _translated(where: str, error: BaseException) -> RequestError:
    """SERVER_LOST: refused, reset, gone. TRUNCATED: ended inside its own framing. PROTOCOL: not HTTP."""
    chain = list(_chain(error))
    text = f"{where}: {type(chain[-1]).__name__}: {str(chain[-1])[:EXCERPT]}"
    if any(isinstance(one, http.client.IncompleteRead) for one in chain):
        return RequestError("TRUNCATED", text)
    lost = any(isinstance(one, OSError) and not isinstance(one, requests.RequestException) for one in chain)
    odd = any(isinstance(one, http.client.HTTPException) for one in chain)
    return RequestError("PROTOCOL" if odd and not lost else "SERVER_LOST", text)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it, outermost first: libraries wrap it as an argument or a cause."""
    chain = [error]
    for one in chain:
        yield one
        inner = [*one.args, getattr(one, "reason", None), one.__cause__, one.__context__]
        for other in inner:
            if isinstance(other, BaseException) and not any(other is known for known in chain):
                chain.append(other)


def _refuse_compression(raw: urllib3.HTTPResponse) -> None:
    coding = raw.headers.get("Content-Encoding", "")
    if coding not in ("", "identity"):
        raise RequestError("PROTOCOL", f"the body is compressed, which was not asked for: {coding}")


def _body(raw: urllib3.HTTPResponse) -> bytes:
    _refuse_compression(raw)
    parts = []
    while data := raw.read1(PACKET):
        parts.append(data)
    return b"".join(parts)


def _expect_events(raw: urllib3.HTTPResponse) -> None:
    """A stream was asked for: a JSON body is an error inside a 200 or a server that cannot stream."""
    _refuse_compression(raw)
    kind = raw.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind in ("", "text/event-stream", "text/plain", "application/octet-stream"):
        return
    body = _body(raw)
    if kind.endswith("json"):
        _json(_Answer(raw.status, body))
    raise RequestError("PROTOCOL", f"expected text/event-stream, found {kind}: {_short(body)}")


def _pump(raw: urllib3.HTTPResponse, watch: _Watch, reader: StreamReader) -> None:
    """Read packets until the stream says that it is done or ends. One that breaks after its finish is finished.

    http.client has read the head; the body is read below it, a receive at a time, which costs a third.
    """
    framing = Framing(raw.headers)
    try:
        while not reader.done and not framing.ended and watch.wire is not None:
            data = framing.feed(watch.wire.reader.read1(PACKET))
            if data and reader.feed(data, watch.stamp, watch.first_byte):
                watch.progress()
    except OSError:
        if reader.finish_reason is None:
            raise
    if framing.short and reader.finish_reason is None and not reader.done:
        raise RequestError("TRUNCATED", f"{watch.where}: the connection ended inside the body")
    reader.feed(b"", watch.stamp, watch.first_byte)


class Framing:
    """Takes HTTP's own framing off the body's bytes: chunks, a length, or all until the connection ends."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
        length = headers.get("Content-Length", "")
        self._length = int(length) if length.isdecimal() and not self._chunked else None
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
            raise RequestError("PROTOCOL", f"expected the size of a chunk, found {_short(line)}")
        try:
            self._left = int(line, 16)
        except ValueError as error:
            raise RequestError("PROTOCOL", f"expected the size of a chunk, found {_short(line)}") from error
        self.ended = self._left == 0


# --- what the server said


class StreamReader:
    """Stamped packets of an OpenAI stream to a Reply: no socket, no clock.

    `stamps` are those of the events that carried generated text. `finish_reason` is None until the server gave one.
    """

    def __init__(self, on_event: Callable[[StreamEvent], None] | None = None) -> None:
        self._parser, self._on_event = sse.Parser(), on_event
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[str]] = {}
        self._logprobs: list[TokenLogprob] | None = None
        self._usage: Usage | None = None
        self._model = ""
        self.stamps: list[float] = []
        self.first_answer: float | None = None
        self.finish_reason: str | None = None
        self.done = False

    @property
    def so_far(self) -> tuple[str, str]:
        """The content and the reasoning until now."""
        return "".join(self._text), "".join(self._reasoning)

    def feed(self, data: bytes, stamp: float, start: float = 0.0) -> bool:
        """Read one packet (empty: the body has ended); True if it brought anything generated.

        Raises ERROR_IN_STREAM, or PROTOCOL for what is no event of this kind. What follows [DONE] is not read.
        """
        events = self._parser.feed(data, stamp) if data else self._parser.end(stamp)
        moved = False
        for event in events:
            if self.done:
                break
            moved = self._take(event, start) or moved
        return moved

    def reply(self, body: Mapping[str, Any], prompt_sha256: str, timing: Timing) -> Reply:
        """The finished answer. Raises TRUNCATED if the stream ended before the server said why it stopped."""
        if self.finish_reason is None:
            got = f"after {len(self.stamps)} events with text, {'with' if self.done else 'without'} [DONE]"
            raise RequestError("TRUNCATED", f"the stream ended without a finish reason, {got}")
        text, reasoning = self.so_far
        calls = tuple(ToolCall(name, arguments) for _, (name, arguments) in sorted(self._calls.items()))
        reply = Reply(
            text=text,
            reasoning=reasoning,
            tool_calls=calls,
            finish_reason=self.finish_reason,
            usage=self._usage,
            usage_missing="",
            model=self._model,
            status=200,
            done_marker=self.done,
            timing=timing,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            prompt_sha256=prompt_sha256,
            raw=body,
        )
        return _finished(reply)

    def _take(self, event: sse.Event, start: float) -> bool:
        if event.data.strip() == sse.DONE:
            self.done = True
            return False
        data = _chunk(event)
        self._model = self._model or str(data.get("model") or "")
        self._usage = _merged(self._usage, data.get("usage"))
        moved = False
        for choice in _choices(data):
            said = self._choice(choice, event.stamp - start)
            self._note(said, event.stamp)
            moved = moved or said.carries or bool(said.finish_reason or choice.get("token_ids"))
        return moved

    def _choice(self, choice: Mapping[str, Any], at_s: float) -> StreamEvent:
        delta = _table(choice.get("delta"), "delta")
        self._keep_logprobs(choice.get("logprobs"))
        return StreamEvent(
            at_s,
            _text(choice.get("text")) or _text(delta.get("content")),
            _reasoning(delta),
            "".join([self._tool(call) for call in delta.get("tool_calls") or ()]),
            _text(choice.get("finish_reason")),
        )

    def _note(self, said: StreamEvent, stamp: float) -> None:
        self._text.append(said.text)
        self._reasoning.append(said.reasoning)
        self.finish_reason = said.finish_reason or self.finish_reason
        if said.text and self.first_answer is None:
            self.first_answer = stamp
        if said.carries:
            self.stamps.append(stamp)
        if self._on_event is not None and (said.carries or said.finish_reason):
            self._on_event(said)

    def _tool(self, call: Any) -> str:
        """One piece of a call; pieces of one call share its index. Gives the piece of the arguments."""
        table = _table(call, "tool call")
        function = _table(table.get("function"), "function")
        index = table.get("index")
        known = self._calls.setdefault(index if isinstance(index, int) else len(self._calls), ["", ""])
        arguments = _text(function.get("arguments"))
        known[0] += _text(function.get("name"))
        known[1] += arguments
        return arguments

    def _keep_logprobs(self, given: Any) -> None:
        if isinstance(given, dict):
            self._logprobs = [*(self._logprobs or ()), *_logprobs(given)]


def _plain_reply(data: Mapping[str, Any], body: Mapping[str, Any], prompt_sha256: str, timing: Timing) -> Reply:
    """The answer of a request that was not streamed."""
    choices = _choices(data)
    if not choices:
        raise RequestError("PROTOCOL", f"expected a choice, found {_short(data)}")
    choice = choices[0]
    message = _table(choice.get("message"), "message")
    finish_reason = _text(choice.get("finish_reason")) or None
    text = _text(choice.get("text")) or _text(message.get("content"))
    if finish_reason is None:
        raise RequestError("TRUNCATED", f"the answer has no finish reason: {_short(text)}")
    logprobs = choice.get("logprobs")
    reply = Reply(
        text=text,
        reasoning=_reasoning(message),
        tool_calls=tuple(_tool_call(call) for call in message.get("tool_calls") or ()),
        finish_reason=finish_reason,
        usage=_merged(None, data.get("usage")),
        usage_missing="",
        model=str(data.get("model") or ""),
        status=200,
        done_marker=None,
        timing=timing,
        logprobs=tuple(_logprobs(logprobs)) if isinstance(logprobs, dict) else None,
        prompt_sha256=prompt_sha256,
        raw=body,
    )
    return _finished(reply)


def _finished(reply: Reply) -> Reply:
    """Refuse what is no answer; say why there is no usage.

    A finish reason of `abort` or `error` is the server's failure. Counts of zero beside text are no counts. An answer
    without any text and without a counted token was never generated.
    """
    if reply.finish_reason in ("abort", "error"):
        raise RequestError(
            "ERROR_IN_STREAM", f"the server ended the answer itself: finish_reason {reply.finish_reason!r}"
        )
    said = bool(reply.text or reply.reasoning or reply.tool_calls)
    counted = reply.usage.completion_tokens if reply.usage else None
    if not said and not counted:
        raise RequestError("PROTOCOL", f"finished ({reply.finish_reason}) without a single token")
    if counted is None:
        reason = "the usage has no completion_tokens" if reply.usage else "the server sent no usage"
        return replace(reply, usage=None, usage_missing=reason)
    if counted <= 0:
        return replace(reply, usage=None, usage_missing=f"the usage says {counted} completion tokens beside text")
    return reply


def _chunk(event: sse.Event) -> Mapping[str, Any]:
    """One event as a JSON object; empty for what is no answer: a named ping, half an event at the end."""
    try:
        data = json.loads(event.data)
    except ValueError as error:
        if event.name == "error":
            raise RequestError("ERROR_IN_STREAM", f"the server reported: {event.data[:EXCERPT]}") from error
        if event.name != "message" or not event.whole:
            return {}
        raise RequestError("PROTOCOL", f"expected JSON in an event, found {_short(event.data)}") from error
    if not isinstance(data, dict):
        raise RequestError("PROTOCOL", f"expected a JSON object in an event, found {_short(event.data)}")
    if event.name == "error":
        data = {"error": data.get("error") or data or "an event named error"}
    _refuse_error(data)
    return dict(data)


def _json(answer: _Answer) -> Mapping[str, Any]:
    try:
        data = json.loads(answer.body)
    except ValueError as error:
        raise RequestError("PROTOCOL", f"expected JSON, found {_short(answer.body)}") from error
    if not isinstance(data, dict):
        raise RequestError("PROTOCOL", f"expected a JSON object, found {_short(answer.body)}")
    _refuse_error(data)
    return data


def _refuse_error(data: Mapping[str, Any]) -> None:
    """An error inside a 200 is an error; a null or empty one is not. Older servers send it without a wrapper."""
    error = data.get("error")
    if isinstance(error, dict) and not any(error.values()):
        return
    if error or data.get("object") == "error":
        raise RequestError("ERROR_IN_STREAM", f"the server answered 200 with an error inside: {_error_text(data)}")


def _message(body: bytes) -> str:
    """The message of an error body, whatever its form."""
    try:
        data = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace").strip()[:EXCERPT]
    return _error_text(data) if isinstance(data, dict) else str(data)[:EXCERPT]


def _error_text(data: Mapping[str, Any]) -> str:
    error = data.get("error") or data
    text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return (text if isinstance(text, str) else json.dumps(text or error))[:EXCERPT]


def _choices(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The choices; none in a usage chunk or where a server leaves them out. One answer was asked for."""
    choices = data.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise RequestError("PROTOCOL", f"expected a list of choices, found {_short(choices)}")
    if any(choice.get("index") not in (0, None) for choice in choices):
        raise RequestError("PROTOCOL", "one answer was asked for, found another choice than 0")
    return choices


def _table(value: Any, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError("PROTOCOL", f"expected an object as {what}, found {_short(value)}")
    return value


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError("PROTOCOL", f"expected text, found {_short(value)}")
    return value


def _reasoning(part: Mapping[str, Any]) -> str:
    """Both names of one field; never added up where a server sends both."""
    return _text(part.get("reasoning")) or _text(part.get("reasoning_content"))


def _tool_call(call: Any) -> ToolCall:
    function = _table(_table(call, "tool call").get("function"), "function")
    return ToolCall(_text(function.get("name")), _text(function.get("arguments")))


def _merged(known: Usage | None, data: Any) -> Usage | None:
    """Usage may stand on any event and is cumulative: what is told last is right, what is not told stays."""
    if not isinstance(data, dict) or not data:
        return known
    old = known or Usage(None, None)
    told = (
        _count(data, "prompt_tokens"),
        _count(data, "completion_tokens"),
        _count(data.get("prompt_tokens_details"), "cached_tokens"),
        _count(data.get("completion_tokens_details"), "reasoning_tokens"),
    )
    before = (old.prompt_tokens, old.completion_tokens, old.cached_tokens, old.reasoning_tokens)
    return Usage(*(there if new is None else new for new, there in zip(told, before, strict=True)))


def _count(table: Any, key: str) -> int | None:
    value = table.get(key) if isinstance(table, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _logprobs(given: Mapping[str, Any]) -> Iterator[TokenLogprob]:
    """Chat form (`content`: a list of tokens with their alternatives) or completions form (parallel lists)."""
    for entry in given.get("content") or ():
        top = tuple((str(one.get("token")), float(one["logprob"])) for one in entry.get("top_logprobs") or ())
        yield TokenLogprob(str(entry.get("token")), entry.get("logprob"), top)
    tokens, values = given.get("tokens") or (), given.get("token_logprobs") or ()
    tops = given.get("top_logprobs") or [None] * len(tokens)
    for token, value, alternatives in zip(tokens, values, tops, strict=False):
        yield TokenLogprob(str(token), value, tuple((alternatives or {}).items()))


def _card(entry: Mapping[str, Any]) -> ModelCard:
    value = entry.get("max_model_len")
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value
    good = isinstance(number, int) and not isinstance(number, bool) and number > 0
    problem = "" if good else f"max_model_len is {value!r}, expected a number"
    return ModelCard(str(entry.get("id", "")), number if good else None, str(entry.get("root") or ""), problem)


def _ids(data: Mapping[str, Any], key: str) -> tuple[int, ...]:
    ids = data.get(key)
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise RequestError("PROTOCOL", f"expected a list of token ids under {key!r}, found {_short(ids)}")
    return tuple(ids)


def _short(value: Any) -> str:
    """An excerpt for a message; large values are not turned to text as a whole."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return repr(text[:EXCERPT]) if isinstance(text, str) else repr(text)[:EXCERPT]
