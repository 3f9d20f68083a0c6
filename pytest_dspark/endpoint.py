"""The waist: the only code that speaks HTTP to the engine, and the only one that imports requests.

A generation request is sent exactly once: every request has a fresh connection, so there is no pooled one that could be
found dead and tried again, no retry, no redirect, no proxy unless asked, no compression. The body is built and the
connection made before the first-byte stamp. Stamps and deadlines are `wire.py`'s, answers `reply.py`'s; many timed streams
are read in one loop by `streams.py`.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from pytest_dspark.errors import ConfigError, EndpointError
from pytest_dspark.metrics import Metrics, read_metrics, whole
from pytest_dspark.reply import (
    EXCERPT,
    Reply,
    RequestError,
    StreamEvent,
    StreamReader,
    TokenLogprob,
    ToolCall,
    Usage,
    error_message,
    plain_reply,
    read_json,
    short,
)
from pytest_dspark.sanitize import mask_text
from pytest_dspark.streams import Limits, Loop, Progress, Route
from pytest_dspark.wire import (
    ARRIVAL,
    NOTE,
    PACKET,
    TICK_S,
    Body,
    Call,
    Framing,
    Plain,
    Secure,
    Watch,
    arrival,
    media_type,
    streams_events,
)

__all__ = [
    "ARRIVAL",
    "NOTE",
    "Asked",
    "Endpoint",
    "Framing",
    "ModelCard",
    "Progress",
    "Rendered",
    "Reply",
    "RequestError",
    "StreamEvent",
    "StreamReader",
    "TokenLogprob",
    "ToolCall",
    "Usage",
    "arrival",
    "checked_url",
]

Messages = Sequence[Mapping[str, Any]]

ASK_S = 15.0  # /v1/models, /version, /metrics
HEALTH_S = 5.0


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of /v1/models. `max_model_len` is a positive number, also if sent as decimal text; else None with `problem`."""

    id: str
    max_model_len: int | None
    root: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """One streamed generation: the request's body without model and stream, due so many seconds after the first."""

    body: Mapping[str, Any]
    due_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the server counts it. `how` says which call told: `render` or `tokenize`."""

    ids: tuple[int, ...]
    how: str


class Endpoint:
    """One OpenAI-compatible server. Safe to use from many threads: each request has a connection and state of its own.

    `alive` is called at least once a second while a request waits for bytes, in that request's thread, and must be quick.
    What it raises (a DsparkError: the engine was found dead) closes the connection at once and is raised instead of what
    the socket would have said. `deadline_s` and `stall_s` are defaults of the generation calls. `proxy` is a URL.
    `reader` is for measuring a way of reading itself; left out, it follows from the URL.
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
        reader: str = "",
    ) -> None:
        self._root = checked_url(base_url)
        self._model, self._engine_alive, self._clock, self._key = model, alive, clock, api_key
        self._closed = threading.Event()
        self._deadline_s, self._stall_s = deadline_s, stall_s
        self._proxies = {"http": proxy, "https": proxy} if proxy else {}
        self._reader = reader or ("loop" if self._root.startswith("http://") and not proxy else "threads")
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

    @property
    def api_key(self) -> str:
        """For an outside client's environment; never to be written."""
        return self._key

    def check_alive(self) -> None:
        """Raises what is known of the engine's death, or CANCELLED: for whoever waits for an outside client."""
        self._alive()

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
            raise RequestError("PROTOCOL", f"{self._root}/v1/models: expected a list of models, found {short(data)}")
        return tuple(_card(entry) for entry in data)

    def version(self) -> str:
        """The server's own version text. Raises PROTOCOL if it has none."""
        version = self._get("/version").get("version")
        if not isinstance(version, str) or not version:
            raise RequestError("PROTOCOL", f"{self._root}/version: expected a version, found {short(version)}")
        return version

    def health(self) -> bool:
        """Whether the API answers at all. Says nothing of the engine behind it."""
        try:
            return self._ask("GET", "/health", None, HEALTH_S).status == 200
        except EndpointError:
            return False

    def health_status(self) -> tuple[int | None, str]:
        """The status of /health, None if nobody answers, and what was said or what happened."""
        try:
            answer = self._ask("GET", "/health", None, HEALTH_S)
        except EndpointError as error:
            return None, error.message
        return answer.status, f"/health: HTTP {answer.status}"

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
            raise RequestError("PROTOCOL", f"{self._root}/detokenize: expected a text, found {short(text)}")
        return text

    def render(self, messages: Messages, *, deadline_s: float | None = None, **extra: Any) -> Rendered:
        """The prompt of a chat as ids: /v1/chat/completions/render, or /tokenize where that is switched off."""
        body = {"model": self._model, "messages": list(messages), **extra}
        answer = self._ask("POST", "/v1/chat/completions/render", body, deadline_s or self._deadline_s)
        if answer.status in (403, 404, 405):
            return Rendered(self.tokenize(messages, deadline_s=deadline_s, **extra), "tokenize")
        return Rendered(_ids(read_json(self._checked(answer).body), "token_ids"), "render")

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

    def stream_many(
        self,
        asked: Sequence[Asked],
        *,
        deadline_s: float | None = None,
        stall_s: float | None = None,
        places: int | None = None,
        on_tick: Callable[[Progress], None] | None = None,
    ) -> list[Reply | RequestError]:
        """Streamed generations, each sent once when it is due, at most `places` at a time, all read in one loop.

        Gives what came of each, in their order. Over TLS or a proxy each stream has a thread instead (`reader`). Raises
        what `alive` raises, CANCELLED after `close`.
        """
        calls = [self._asked(one) for one in asked]
        limits = Limits(
            self._alive,
            self._deadline_s if deadline_s is None else deadline_s,
            self._stall_s if stall_s is None else stall_s,
            places or max(len(calls), 1),
            self._clock,
        )
        if self.reader == "threads":
            return self._stream_in_threads(calls, limits)
        parts = urlsplit(self._root)
        headers = self._headers | {"Content-Type": "application/json"}
        route = Route(parts.hostname or "", parts.port or 80, parts.path, headers, self._refuse, _translated)
        return Loop(route, limits, on_tick).run(calls)

    @property
    def reader(self) -> str:
        """How `stream_many` reads: `loop`, or `threads` over TLS or a proxy."""
        return self._reader

    def _asked(self, one: Asked) -> Call:
        key = "messages" if "messages" in one.body else "prompt"
        body = {name: value for name, value in one.body.items() if name != key}
        path = "/v1/chat/completions" if key == "messages" else "/v1/completions"
        call = self._call(path, key, one.body[key], {"temperature": 0.0, **body, "stream": True}, {})
        return replace(call, due_s=one.due_s)

    def _refuse(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        _refuse_compression(headers)
        self._checked(_Answer(status, body))
        _refuse_body(headers, body)

    def _stream_in_threads(self, calls: Sequence[Call], limits: Limits) -> list[Reply | RequestError]:
        start = self._clock()
        with ThreadPoolExecutor(limits.places) as pool:
            jobs = [pool.submit(self._one_of_many, call, start, limits) for call in calls]
            while wait(jobs, timeout=TICK_S).not_done:
                self._alive()
        return [job.result() for job in jobs]

    def _one_of_many(self, call: Call, start: float, limits: Limits) -> Reply | RequestError:
        self._closed.wait(max(start + call.due_s - self._clock(), 0.0))
        try:
            return self._generate(call, True, limits.deadline_s, limits.stall_s, None)
        except RequestError as error:
            return error

    def generate_one(self, *, deadline_s: float) -> Reply:
        """One generated token: the readiness probe, which an API without an engine cannot answer."""
        return self.complete("Hello", max_tokens=1, min_tokens=1, ignore_eos=True, deadline_s=deadline_s)

    def _call(self, path: str, key: str, prompt: Any, given: Mapping[str, Any], extra: Mapping[str, Any]) -> Call:
        body = {name: value for name, value in given.items() if value is not None} | {"model": self._model}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        kwargs = {**body.get("chat_template_kwargs", {}), **extra.get("chat_template_kwargs", {})}
        body |= dict(extra) | ({"chat_template_kwargs": kwargs} if kwargs else {})
        return Call(path, {key: prompt, **body}, *_encoded(key, prompt, body))

    def _generate(
        self,
        call: Call,
        stream: bool,
        deadline_s: float | None,
        stall_s: float | None,
        on_event: Callable[[StreamEvent], None] | None,
    ) -> Reply:
        reader = StreamReader(on_event)
        limit = self._deadline_s if deadline_s is None else deadline_s
        stall = (self._stall_s if stall_s is None else stall_s) if stream else math.inf
        watch = Watch(f"POST {self._root}{call.path}", self._alive, self._clock, limit, stall)
        try:
            with self._open("POST", call.path, call.data, watch) as raw:
                return self._read(raw, call, watch, reader, stream)
        except RequestError as error:
            error.partial, error.partial_reasoning = reader.so_far
            error.status, error.elapsed_s = watch.status, self._clock() - watch.begin
            raise

    def _read(self, raw: urllib3.HTTPResponse, call: Call, watch: Watch, reader: StreamReader, stream: bool) -> Reply:
        if raw.status != 200:
            self._checked(_Answer(raw.status, _body(raw)))
        if stream:
            if not streams_events(raw.headers):
                _refuse_body(raw.headers, _body(raw))
            _pump(raw, watch, reader)
            return reader.reply(call.body, call.prompt_sha256, watch.timing(reader))
        return plain_reply(read_json(_body(raw)), call.body, call.prompt_sha256, watch.timing(reader))

    # --- the wire

    def _get(self, path: str) -> Mapping[str, Any]:
        return read_json(self._checked(self._ask("GET", path, None, ASK_S)).body)

    def _post(self, path: str, body: Mapping[str, Any], deadline_s: float | None) -> Mapping[str, Any]:
        return read_json(self._checked(self._ask("POST", path, body, deadline_s or self._deadline_s)).body)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> _Answer:
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        watch = Watch(f"{method} {self._root}{path}", self._alive, self._clock, deadline_s, math.inf)
        with self._open(method, path, data, watch) as raw:
            return _Answer(raw.status, _body(raw))

    @contextmanager
    def _open(self, method: str, path: str, data: bytes | None, watch: Watch) -> Iterator[urllib3.HTTPResponse]:
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
        body = mask_text(answer.body.decode("utf-8", "replace"), [self._key])  # before it is cut, which may halve a key
        text = error_message(body.encode())
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


def _encoded(key: str, prompt: Any, rest: Mapping[str, Any]) -> tuple[bytes, str]:
    """The body as bytes and the prompt's hash; the prompt, which may be megabytes, is encoded once."""
    part = json.dumps(prompt, allow_nan=False, separators=(",", ":")).encode()
    other = json.dumps({name: value for name, value in rest.items() if name != key}, allow_nan=False).encode()
    return b'{"%b":%b,%b' % (key.encode(), part, other[1:]), hashlib.sha256(part).hexdigest()


# --- requests and urllib3


class _Adapter(HTTPAdapter):
    """requests' own transport with one watched connection and no retry."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        super().__init__(pool_connections=1, pool_maxsize=1, max_retries=0)

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        pool = super().get_connection_with_tls_context(*args, **kwargs)
        pool.ConnectionCls = self._secure if pool.scheme == "https" else self._plain  # type: ignore[attr-defined]
        return pool

    def _plain(self, **kwargs: Any) -> Plain:
        connection = Plain(**kwargs)
        connection.watch = self._watch
        return connection

    def _secure(self, **kwargs: Any) -> Secure:
        connection = Secure(**kwargs)
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


def _body(raw: urllib3.HTTPResponse) -> bytes:
    _refuse_compression(raw.headers)
    parts = []
    while data := raw.read1(PACKET):
        parts.append(data)
    return b"".join(parts)


def _refuse_compression(headers: Mapping[str, str]) -> None:
    coding = headers.get("Content-Encoding", "")
    if coding not in ("", "identity"):
        raise RequestError("PROTOCOL", f"the body is compressed, which was not asked for: {coding}")


def _refuse_body(headers: Mapping[str, str], body: bytes) -> None:
    """A stream was asked for and something else came, with status 200."""
    kind = media_type(headers)
    if kind.endswith("json"):
        read_json(body)
    raise RequestError("PROTOCOL", f"expected text/event-stream, found {kind}: {short(body)}")


def _pump(raw: urllib3.HTTPResponse, watch: Watch, reader: StreamReader) -> None:
    """Read packets until the stream says that it is done or ends. One that breaks after its finish is finished.

    http.client has read the head; the body is read below it, a receive at a time, which costs a third.
    """
    body = Body(raw.headers, watch, reader)
    try:
        while not body.over and watch.wire is not None:
            body.packet(watch.wire.reader.read1(PACKET))
    except OSError:
        if reader.finish_reason is None:
            raise
    body.end()


def _card(entry: Mapping[str, Any]) -> ModelCard:
    value = entry.get("max_model_len")
    number = whole(value) if isinstance(value, str) else value
    good = isinstance(number, int) and not isinstance(number, bool) and number > 0
    problem = "" if good else f"max_model_len is {value!r}, expected a number"
    return ModelCard(str(entry.get("id", "")), number if good else None, str(entry.get("root") or ""), problem)


def _ids(data: Mapping[str, Any], key: str) -> tuple[int, ...]:
    ids = data.get(key)
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise RequestError("PROTOCOL", f"expected a list of token ids under {key!r}, found {short(ids)}")
    return tuple(ids)
