"""What the server said: stamped packets of an OpenAI stream, or one JSON body, to a `Reply`. No socket, no clock."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, SupportsIndex

from pytest_dspark import sse
from pytest_dspark.errors import EndpointError
from pytest_dspark.timing import Timing

EXCERPT = 500
_DECODE = json.JSONDecoder().decode


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


class StreamEvent(NamedTuple):
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
        if usage := data.get("usage"):
            self._usage = _merged(self._usage, usage)
        moved = False
        for choice in _choices(data):
            said = self._choice(choice, event.stamp - start)
            self._note(said, event.stamp)
            moved = moved or said.carries or bool(said.finish_reason or choice.get("token_ids"))
        return moved

    def _choice(self, choice: Mapping[str, Any], at_s: float) -> StreamEvent:
        delta = _table(choice.get("delta"), "delta")
        calls = delta.get("tool_calls")
        self._keep_logprobs(choice.get("logprobs"))
        return StreamEvent(
            at_s,
            _text(choice.get("text")) or _text(delta.get("content")),
            _reasoning(delta),
            "".join([self._tool(call) for call in _list(calls, "tool calls")]) if calls else "",
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


def plain_reply(data: Mapping[str, Any], body: Mapping[str, Any], prompt_sha256: str, timing: Timing) -> Reply:
    """The answer of a request that was not streamed."""
    choices = _choices(data)
    if not choices:
        raise RequestError("PROTOCOL", f"expected a choice, found {short(data)}")
    choice = choices[0]
    message = _table(choice.get("message"), "message")
    finish_reason = _text(choice.get("finish_reason")) or None
    text = _text(choice.get("text")) or _text(message.get("content"))
    if finish_reason is None:
        raise RequestError("TRUNCATED", f"the answer has no finish reason: {short(text)}")
    logprobs = choice.get("logprobs")
    reply = Reply(
        text=text,
        reasoning=_reasoning(message),
        tool_calls=tuple(_tool_call(call) for call in _list(message.get("tool_calls"), "tool calls")),
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
        data = _DECODE(event.data)
    except (ValueError, RecursionError) as error:
        if event.name == "error":
            raise RequestError("ERROR_IN_STREAM", f"the server reported: {event.data[:EXCERPT]}") from error
        if event.name != "message" or not event.whole:
            return {}
        raise RequestError("PROTOCOL", f"expected JSON in an event, found {short(event.data)}") from error
    if not isinstance(data, dict):
        raise RequestError("PROTOCOL", f"expected a JSON object in an event, found {short(event.data)}")
    if event.name == "error":
        data = {"error": data.get("error") or data or "an event named error"}
    _refuse_error(data)
    return data


def read_json(body: bytes) -> Mapping[str, Any]:
    """One JSON object. Raises PROTOCOL for anything else, ERROR_IN_STREAM for an error inside it."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError("PROTOCOL", f"expected JSON, found {short(body)}") from error
    if not isinstance(data, dict):
        raise RequestError("PROTOCOL", f"expected a JSON object, found {short(body)}")
    _refuse_error(data)
    return data


def _refuse_error(data: Mapping[str, Any]) -> None:
    """An error inside a 200 is an error; a null or empty one is not. Older servers send it without a wrapper."""
    error = data.get("error")
    if error is None and data.get("object") != "error":
        return
    if isinstance(error, dict) and not any(error.values()):
        return
    if error or data.get("object") == "error":
        raise RequestError("ERROR_IN_STREAM", f"the server answered 200 with an error inside: {_error_text(data)}")


def error_message(body: bytes) -> str:
    """The message of an error body, whatever its form."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "replace").strip()[:EXCERPT]
    return _error_text(data) if isinstance(data, dict) else str(data)[:EXCERPT]


def _error_text(data: Mapping[str, Any]) -> str:
    error = data.get("error") or data
    text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return (text if isinstance(text, str) else json.dumps(text or error))[:EXCERPT]


def _choices(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The choices; none in a usage chunk or where a server leaves them out. One answer was asked for."""
    choices = data.get("choices") or []
    if not isinstance(choices, list):
        raise RequestError("PROTOCOL", f"expected a list of choices, found {short(choices)}")
    for choice in choices:
        if not isinstance(choice, dict):
            raise RequestError("PROTOCOL", f"expected a list of choices, found {short(choices)}")
        if choice.get("index") not in (0, None):
            raise RequestError("PROTOCOL", "one answer was asked for, found another choice than 0")
    return choices


def _table(value: Any, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError("PROTOCOL", f"expected an object as {what}, found {short(value)}")
    return value


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError("PROTOCOL", f"expected text, found {short(value)}")
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
    for told in _list(given.get("content"), "log probabilities"):
        entry = _table(told, "log probability")
        others = [_table(one, "alternative") for one in _list(entry.get("top_logprobs"), "alternatives")]
        top = tuple((str(one.get("token")), _number(one.get("logprob"))) for one in others)
        yield TokenLogprob(str(entry.get("token")), _optional(entry.get("logprob")), top)
    tokens, values = _list(given.get("tokens"), "tokens"), _list(given.get("token_logprobs"), "log probabilities")
    tops = _list(given.get("top_logprobs"), "alternatives") or [None] * len(tokens)
    if not len(tokens) == len(values) == len(tops):
        found = f"{len(values)} and {len(tops)} alternatives of {len(tokens)} tokens"
        raise RequestError("PROTOCOL", f"expected a log probability of each token, found {found}")
    for token, value, alternatives in zip(tokens, values, tops, strict=True):
        rivals = _table(alternatives, "alternatives").items()
        yield TokenLogprob(str(token), _optional(value), tuple((other, _number(one)) for other, one in rivals))


def _list(value: Any, what: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RequestError("PROTOCOL", f"expected a list of {what}, found {short(value)}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError("PROTOCOL", f"expected a number, found {short(value)}")
    return value


def _optional(value: Any) -> float | None:
    return None if value is None else _number(value)


def short(value: Any) -> str:
    """An excerpt for a message; large values are not turned to text as a whole."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return repr(text[:EXCERPT]) if isinstance(text, str) else repr(text)[:EXCERPT]
