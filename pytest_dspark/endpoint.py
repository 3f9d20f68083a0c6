"""The waist: the only code that speaks HTTP to the engine, and the only one that imports requests.

A generation request is sent exactly once: no retry, no kept-alive connection that could send it again, no proxy unless
asked, no compression. Deadlines are this module's own: a library's read time-out starts anew with every packet, so a
server that pings would never meet it. Durations come from a monotonic clock, stamped when bytes arrive and parsed after.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from pytest_dspark import sse
from pytest_dspark.errors import ConfigError, DsparkError, EndpointError
from pytest_dspark.metrics import Metrics, read_metrics

Messages = Sequence[Mapping[str, Any]]

CONNECT_S = 10.0
LOOK_S = 0.25
EXCERPT = 500


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of /v1/models. `max_model_len` is None, with the reason in `problem`, unless it is a number."""

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


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the moment the request was handed to the socket. None: there was no such event.

    first token: the first event that carries generated text of any kind; first answer: the first with content.
    `events` counts the events that carry text, `gaps` are the seconds between them; neither counts tokens.
    """

    first_token_s: float | None
    first_answer_s: float | None
    last_token_s: float | None
    end_s: float
    events: int
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished answer. `text` is the content, empty if the server sent null; `done_marker` is None if not streamed."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None
    usage: Usage | None
    usage_missing: str
    model: str
    timing: Timing | None
    done_marker: bool | None
    prompt_sha256: str
    logprobs: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the server counts it. `how` says which call told: `render` or `tokenize`."""

    ids: tuple[int, ...]
    how: str


class Endpoint:
    """One OpenAI-compatible server. Safe to use from many threads; each request has a connection of its own.

    `alive` is called about once a second while a request waits; what it raises ends the request at once and is raised
    instead of what the broken socket would have said.
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
        stall_s: float = 300.0,
    ) -> None:
        self._root = checked_url(base_url)
        self._model, self._alive, self._clock = model, alive, clock
        self._deadline_s, self._stall_s = deadline_s, stall_s
        self._headers = {"Accept-Encoding": "identity", "Connection": "close"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @property
    def base_url(self) -> str:
        return self._root

    @property
    def model(self) -> str:
        return self._model

    def close(self) -> None:
        """Nothing is kept open between requests."""

    # --- what the server says of itself

    def models(self) -> tuple[ModelCard, ...]:
        """The models it serves. Raises PROTOCOL if the answer is not a list of models."""
        data = self._get_json("/v1/models").get("data")
        if not isinstance(data, list):
            raise EndpointError("PROTOCOL", f"{self._root}/v1/models: expected a list of models, found {str(data)[:EXCERPT]!r}")
        return tuple(_card(entry) for entry in data if isinstance(entry, Mapping))

    def version(self) -> str:
        return str(self._get_json("/version").get("version", ""))

    def health(self) -> bool:
        """Whether the API answers at all. Says nothing of the engine behind it."""
        try:
            return self._request("GET", "/health", None, 5.0).status == 200
        except EndpointError:
            return False

    def metrics(self) -> Metrics:
        """Counters now, or unavailable with the reason; never an exception and never 0 for unknown."""
        try:
            answer = self._request("GET", "/metrics", None, 15.0)
        except EndpointError as error:
            return read_metrics("", problem=str(error))
        if answer.status != 200:
            return read_metrics("", problem=f"HTTP {answer.status}")
        return read_metrics(answer.body.decode("utf-8", "replace"))

    def tokenize(self, prompt: str | Messages, **extra: Any) -> tuple[int, ...]:
        """Token ids of a text, or of messages with the chat template applied."""
        given = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        return _ids(self._post_json("/tokenize", {"model": self._model, **given, **extra}), "tokens")

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._post_json("/detokenize", {"model": self._model, "tokens": list(ids)}).get("prompt", ""))

    def render(self, messages: Messages, **extra: Any) -> Rendered:
        """The prompt of a chat as ids: /v1/chat/completions/render, or /tokenize where that is switched off."""
        body = {"model": self._model, "messages": list(messages), **extra}
        answer = self._request("POST", "/v1/chat/completions/render", body, self._deadline_s)
        if answer.status in (403, 404, 405):
            return Rendered(self.tokenize(messages, **extra), "tokenize")
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
        stop: Sequence[str] | None = None,
        seed: int | None = None,
        extra: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        stall_s: float | None = None,
    ) -> Reply:
        """One chat completion. `thinking` None sends nothing and leaves the server's default."""
        body: dict[str, Any] = {"messages": list(messages), "tools": tools, "tool_choice": tool_choice, "response_format": response_format}
        body |= {"min_tokens": min_tokens, "ignore_eos": ignore_eos, "stop": stop, "seed": seed}
        body |= {"logprobs": True, "top_logprobs": logprobs} if logprobs is not None else {}
        body |= {"chat_template_kwargs": {"thinking": thinking}} if thinking is not None else {}
        return self._generate("/v1/chat/completions", body, max_tokens, temperature, stream, extra, deadline_s, stall_s)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        stream: bool = False,
        min_tokens: int | None = None,
        ignore_eos: bool | None = None,
        stop: Sequence[str] | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
        extra: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        stall_s: float | None = None,
    ) -> Reply:
        """One completion of a text or of token ids."""
        body: dict[str, Any] = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "logprobs": logprobs}
        body |= {"min_tokens": min_tokens, "ignore_eos": ignore_eos, "stop": stop, "seed": seed}
        return self._generate("/v1/completions", body, max_tokens, temperature, stream, extra, deadline_s, stall_s)

    def generate_one(self, *, deadline_s: float) -> Reply:
        """One generated token: the readiness probe, which an API without an engine cannot answer."""
        return self.complete("Hello", max_tokens=1, min_tokens=1, ignore_eos=True, deadline_s=deadline_s)

    def _generate(
        self,
        path: str,
        given: Mapping[str, Any],
        max_tokens: int,
        temperature: float,
        stream: bool,
        extra: Mapping[str, Any] | None,
        deadline_s: float | None,
        stall_s: float | None,
    ) -> Reply:
        body = {key: value for key, value in given.items() if value is not None}
        body |= {"model": self._model, "max_tokens": max_tokens, "temperature": temperature, "stream": stream}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        body |= dict(extra or {})
        limit = deadline_s or self._deadline_s
        if stream:
            return self._stream(path, body, limit, stall_s or self._stall_s)
        return _plain_reply(_json(self._checked(self._request("POST", path, body, limit))), body)

    def _stream(self, path: str, body: Mapping[str, Any], deadline_s: float, stall_s: float) -> Reply:
        collected = _Stream()
        with self._open("POST", path, body, deadline_s) as (raw, begin, guard):
            if raw.status != 200:
                self._checked(_Answer(raw.status, raw.read(65536)))
            parser = sse.Parser()
            guard.stall_s = stall_s
            while not collected.done:
                data = raw.read1(65536)
                stamp = self._clock() - begin
                events = parser.feed(data, stamp) if data else parser.end(stamp)
                if any([collected.take(event) for event in events]):
                    guard.progress()
                if not data:
                    break
        return collected.reply(body, self._clock() - begin)

    # --- the wire

    def _get_json(self, path: str) -> Mapping[str, Any]:
        return _json(self._checked(self._request("GET", path, None, 15.0)))

    def _post_json(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return _json(self._checked(self._request("POST", path, body, self._deadline_s)))

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> _Answer:
        with self._open(method, path, body, deadline_s) as (raw, _, _guard):
            parts = []
            while data := raw.read1(1 << 20):
                parts.append(data)
            return _Answer(raw.status, b"".join(parts))

    @contextmanager
    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float
    ) -> Iterator[tuple[urllib3.HTTPResponse, float, _Guard]]:
        """One request on a connection of its own, watched by a guard; every library error becomes ours."""
        where = f"{method} {self._root}{path}"
        with requests.Session() as session:
            session.trust_env = False
            guard = _Guard(self._alive, self._clock, deadline_s, where)
            session.mount("http://", _Adapter(guard))
            session.mount("https://", _Adapter(guard))
            data = json.dumps(body, allow_nan=False).encode() if body is not None else None
            headers = self._headers | ({"Content-Type": "application/json"} if data else {})
            try:
                with guard:
                    begin = self._clock()
                    response = session.request(
                        method, self._root + path, data=data, headers=headers, stream=True, timeout=(CONNECT_S, None), allow_redirects=False
                    )
                    with response:
                        yield response.raw, begin, guard
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                raise guard.cause or _lost(where, error) from error
            if guard.cause:
                raise guard.cause

    def _checked(self, answer: _Answer) -> _Answer:
        if answer.status == 200:
            return answer
        raise EndpointError("SERVER_ERROR", f"{self._root}: HTTP {answer.status}: {_message(answer.body)}")


def checked_url(base_url: str) -> str:
    """The base URL without a trailing slash or /v1. Raises USAGE for anything but plain http(s) without credentials."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("USAGE", f"base URL must be http://host:port, found {base_url!r}")
    if parts.username or parts.password:
        raise ConfigError("USAGE", "base URL must not hold a user or a password; use DSPARK_API_KEY")
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes


class _Guard:
    """Ends a request from outside: overall deadline, stall deadline, or an engine that was found dead."""

    def __init__(self, alive: Callable[[], None], clock: Callable[[], float], deadline_s: float, where: str) -> None:
        self._alive, self._clock, self._where = alive, clock, where
        self._begin = self._moved = clock()
        self._deadline_s = deadline_s
        self.stall_s: float | None = None
        self.cause: DsparkError | None = None
        self.connection: urllib3.connection.HTTPConnection | None = None
        self._over = threading.Event()

    def __enter__(self) -> _Guard:
        threading.Thread(target=self._watch, name="dspark-guard", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def progress(self) -> None:
        """Generated text came: the stall clock starts again. Comments and pings do not count."""
        self._moved = self._clock()

    def _watch(self) -> None:
        looked = self._clock()
        while not self._over.wait(LOOK_S):
            now = self._clock()
            self.cause = self._late(now)
            if self.cause is None and now - looked >= 1.0:
                looked = now
                self.cause = self._dead()
            if self.cause:
                self._cut()
                return

    def _late(self, now: float) -> DsparkError | None:
        if now - self._begin > self._deadline_s:
            return EndpointError("DEADLINE", f"{self._where}: not finished within {self._deadline_s:g} s")
        if self.stall_s is not None and now - self._moved > self.stall_s:
            return EndpointError("STALLED", f"{self._where}: no token for {self.stall_s:g} s")
        return None

    def _dead(self) -> DsparkError | None:
        try:
            self._alive()
        except DsparkError as error:
            return error
        return None

    def _cut(self) -> None:
        while not self._over.is_set():
            sock = getattr(self.connection, "sock", None)
            if sock is not None:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
                return
            self._over.wait(LOOK_S)


class _Adapter(HTTPAdapter):
    """One connection, no retry; the guard learns which connection it is."""

    def __init__(self, guard: _Guard) -> None:
        self._guard = guard
        super().__init__(pool_connections=1, pool_maxsize=1, max_retries=0)

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        pool = super().get_connection_with_tls_context(*args, **kwargs)
        make, guard = pool._new_conn, self._guard

        def new_connection() -> Any:
            guard.connection = make()
            return guard.connection

        pool._new_conn = new_connection
        return pool


def _lost(where: str, error: BaseException) -> EndpointError:
    return EndpointError("SERVER_LOST", f"{where}: {type(error).__name__}: {str(error)[:EXCERPT]}")


def _json(answer: _Answer) -> Mapping[str, Any]:
    try:
        data = json.loads(answer.body)
    except ValueError as error:
        raise EndpointError("PROTOCOL", f"expected JSON, found {answer.body[:EXCERPT]!r}") from error
    if not isinstance(data, Mapping):
        raise EndpointError("PROTOCOL", f"expected a JSON object, found {answer.body[:EXCERPT]!r}")
    _refuse_error(data)
    return data


def _refuse_error(data: Mapping[str, Any]) -> None:
    """An error inside a 200 is an error; a null or empty one is not."""
    error = data.get("error")
    if error:
        text = error.get("message") if isinstance(error, Mapping) else error
        raise EndpointError("ERROR_IN_STREAM", f"the server answered 200 with an error inside: {str(text)[:EXCERPT]}")


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)
        error = error.get("error", error) if isinstance(error, Mapping) else error
        text = error.get("message", error) if isinstance(error, Mapping) else error
    except ValueError:
        text = body.decode("utf-8", "replace")
    return str(text)[:EXCERPT]


def _card(entry: Mapping[str, Any]) -> ModelCard:
    value = entry.get("max_model_len")
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    good = isinstance(number, int) and not isinstance(number, bool)
    problem = "" if good else f"max_model_len is {value!r}"
    return ModelCard(str(entry.get("id", "")), number if good else None, str(entry.get("root") or ""), problem)


def _ids(data: Mapping[str, Any], key: str) -> tuple[int, ...]:
    ids = data.get(key)
    if not isinstance(ids, list):
        raise EndpointError("PROTOCOL", f"expected a list under {key!r}, found {str(ids)[:EXCERPT]!r}")
    return tuple(ids)


def _usage(data: Any) -> Usage | None:
    if not isinstance(data, Mapping):
        return None

    def number(table: Any, key: str) -> int | None:
        value = table.get(key) if isinstance(table, Mapping) else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    return Usage(
        number(data, "prompt_tokens"),
        number(data, "completion_tokens"),
        number(data.get("prompt_tokens_details"), "cached_tokens"),
        number(data.get("completion_tokens_details"), "reasoning_tokens"),
    )


def _reasoning(part: Mapping[str, Any]) -> str:
    """Both names of one field; never added up where a server sends both."""
    return part.get("reasoning") or part.get("reasoning_content") or ""


def prompt_sha256(body: Mapping[str, Any]) -> str:
    prompt = body.get("messages") or body.get("prompt")
    return hashlib.sha256(json.dumps(prompt, ensure_ascii=False, sort_keys=True).encode()).hexdigest()


def _plain_reply(data: Mapping[str, Any], body: Mapping[str, Any]) -> Reply:
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise EndpointError("PROTOCOL", f"expected a choice, found {json.dumps(data)[:EXCERPT]}")
    choice = choices[0]
    message = choice.get("message") or {}
    calls = tuple(_call(call) for call in message.get("tool_calls") or ())
    usage = _usage(data.get("usage"))
    return Reply(
        text=choice.get("text") or message.get("content") or "",
        reasoning=_reasoning(message),
        tool_calls=calls,
        finish_reason=choice.get("finish_reason"),
        usage=usage,
        usage_missing="" if usage else "the server sent no usage",
        model=str(data.get("model", "")),
        timing=None,
        done_marker=None,
        prompt_sha256=prompt_sha256(body),
        logprobs=tuple(((choice.get("logprobs") or {}).get("content")) or ()),
    )


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function") or {}
    return ToolCall(str(function.get("name") or ""), str(function.get("arguments") or ""))


@dataclass(slots=True)
class _Stream:
    """What a stream said so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    stamps: list[float] = field(default_factory=list)
    first_answer: float | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    model: str = ""
    logprobs: list[Any] = field(default_factory=list)
    done: bool = False

    def take(self, event: sse.Event) -> bool:
        """Read one event; True if it carried generated text of any kind."""
        if self.done:
            return False
        if event.data == sse.DONE:
            self.done = True
            return False
        try:
            data = json.loads(event.data)
        except ValueError as error:
            raise EndpointError("PROTOCOL", f"expected JSON in an event, found {event.data[:EXCERPT]!r}") from error
        if not isinstance(data, Mapping):
            return False
        _refuse_error(data)
        self.model = str(data.get("model") or self.model)
        self.usage = _usage(data.get("usage")) or self.usage
        return self._choices(data.get("choices") or (), event.stamp)

    def _choices(self, choices: Sequence[Any], stamp: float) -> bool:
        carried = False
        for choice in choices:
            delta = choice.get("delta") or {}
            content = choice.get("text") or delta.get("content") or ""
            reasoning = _reasoning(delta)
            tools = [self._tool(call) for call in delta.get("tool_calls") or ()]
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.logprobs += ((choice.get("logprobs") or {}).get("content")) or ()
            self.text.append(content)
            self.reasoning.append(reasoning)
            if content and self.first_answer is None:
                self.first_answer = stamp
            carried = carried or bool(content or reasoning or any(tools))
        if carried:
            self.stamps.append(stamp)
        return carried

    def _tool(self, call: Mapping[str, Any]) -> bool:
        function = call.get("function") or {}
        known = self.calls.setdefault(int(call.get("index") or 0), ["", ""])
        known[0] += function.get("name") or ""
        known[1] += function.get("arguments") or ""
        return bool(function.get("arguments"))

    def reply(self, body: Mapping[str, Any], end_s: float) -> Reply:
        """The finished answer. Raises TRUNCATED if the stream ended before the server said why."""
        if self.finish_reason is None:
            got = f"{len(self.stamps)} events, {'with' if self.done else 'without'} [DONE]"
            raise EndpointError("TRUNCATED", f"the stream ended without a finish reason, after {got}")
        stamps = self.stamps
        gaps = tuple(later - earlier for earlier, later in zip(stamps, stamps[1:], strict=False))
        return Reply(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(ToolCall(name, arguments) for _, (name, arguments) in sorted(self.calls.items())),
            finish_reason=self.finish_reason,
            usage=self.usage,
            usage_missing="" if self.usage else "the stream carried no usage",
            model=self.model,
            timing=Timing(stamps[0] if stamps else None, self.first_answer, stamps[-1] if stamps else None, end_s, len(stamps), gaps),
            done_marker=self.done,
            prompt_sha256=prompt_sha256(body),
            logprobs=tuple(self.logprobs),
        )
