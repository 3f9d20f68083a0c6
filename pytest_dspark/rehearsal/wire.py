"""The JSON that goes over the wire, in the shapes of vLLM 0.26."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sequence
import tokens
from sequence import Event, Token

ALTERNATIVES = (" the", " a", ",", ".", " and", " of", " to", " in", " is", "\n")


@dataclass(frozen=True, slots=True)
class Job:
    """One generation as the API sees it. `logprobs` is the number of alternatives, None if none are asked; `weights` is a
    number of the weights, so that log probabilities are others where a byte of them is another; `miscount` is added to
    the prompt tokens of the usage."""

    ident: str
    created: int
    model: str
    chat: bool
    sequence: sequence.Sequence
    fingerprint: str
    stream: bool
    include_usage: bool
    logprobs: int | None
    calls_end_as_tools: bool
    cache_details: bool
    weights: int = 0
    miscount: int = 0


def error(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def stream_error(message: str) -> str:
    """What a stream says when it fails after its status was sent."""
    return json.dumps(error(message, "InternalServerError", 500))


def usage(job: Job) -> dict[str, Any]:
    prompt, generated, cached = job.sequence.prompt_tokens + job.miscount, job.sequence.generated, job.sequence.cached
    details = {"cached_tokens": cached, "created_cache_tokens": prompt - cached} if job.cache_details else None
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + generated,
        "completion_tokens": generated,
        "prompt_tokens_details": details,
    }


def finish_reason(job: Job, finish: str, *, called: bool) -> str | None:
    """A call that the model chose, or that was required, ends as tool_calls; a call of one named tool ends as stop."""
    return "tool_calls" if called and finish == "stop" and job.calls_end_as_tools else finish or None


def plain_text(made: Iterable[Token]) -> str:
    """What a completion shows: everything as it was generated, without special tokens but the end of thinking."""
    return "".join(token.text for token in made if token.kind in ("content", "reasoning", "mark"))


# --- streams


def _chunk(job: Job, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": job.ident, "object": kind, "created": job.created, "model": job.model, "choices": choices}


def first_chunk(job: Job) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return _chunk(job, "chat.completion.chunk", [choice]) | {"prompt_token_ids": None, "prompt_text": None}


def event_chunk(job: Job, event: Event, *, called: bool) -> dict[str, Any] | None:
    """One event as one chunk; None for an event that shows nothing and ends nothing."""
    return _chat_event(job, event, called) if job.chat else _text_event(job, event)


def _chat_event(job: Job, event: Event, called: bool) -> dict[str, Any] | None:
    delta = _delta(job, event.tokens)
    if not delta and not event.finish:
        return None
    choice: dict[str, Any] = {
        "index": 0,
        "delta": delta or {"content": ""},
        "logprobs": _chat_logprobs(job, event.tokens),
    }
    choice["finish_reason"] = finish_reason(job, event.finish, called=called)
    choice |= {"stop_reason": event.stop_reason} if event.finish else {}
    return _chunk(job, "chat.completion.chunk", [choice | {"token_ids": None}])


def _delta(job: Job, made: Sequence[Token]) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    for kind in ("reasoning", "content"):
        text = "".join(token.text for token in made if token.kind == kind)
        delta |= {kind: text} if text else {}
    parts = [_call_delta(job, made, number) for number in sorted({t.call for t in made if t.kind == "tool"})]
    return delta | ({"tool_calls": parts} if parts else {})


def _call_delta(job: Job, made: Sequence[Token], number: int) -> dict[str, Any]:
    own = [token for token in made if token.kind == "tool" and token.call == number]
    function: dict[str, Any] = {"arguments": "".join(token.text for token in own)}
    name = next((token.name for token in own if token.name), "")
    if not name:
        return {"index": number, "function": function}
    return {"id": _call_id(job, number), "type": "function", "index": number, "function": {"name": name} | function}


def _call_id(job: Job, number: int) -> str:
    return f"chatcmpl-tool-{zlib.crc32(f'{job.ident}{number}'.encode()):08x}"


def _text_event(job: Job, event: Event) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": plain_text(event.tokens),
        "logprobs": _text_logprobs(job, event.tokens),
        "finish_reason": event.finish or None,
        "stop_reason": event.stop_reason,
        "prompt_token_ids": None,
        "token_ids": None,
    }
    return _chunk(job, "text_completion", [choice])


def usage_chunk(job: Job) -> dict[str, Any]:
    kind = "chat.completion.chunk" if job.chat else "text_completion"
    return _chunk(job, kind, []) | {"usage": usage(job), "system_fingerprint": job.fingerprint}


# --- whole answers


def whole(job: Job, made: Sequence[Token], last: Event, *, with_usage: bool) -> dict[str, Any]:
    choice = _chat_choice(job, made, last) if job.chat else _text_choice(job, made, last)
    body = _chunk(job, "chat.completion" if job.chat else "text_completion", [choice])
    body |= {"service_tier": None, "system_fingerprint": job.fingerprint, "usage": usage(job) if with_usage else None}
    body |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None} if job.chat else {}
    return body | {"kv_transfer_params": None}


def _chat_choice(job: Job, made: Sequence[Token], last: Event) -> dict[str, Any]:
    delta = _delta(job, made)
    calls = [{"id": c["id"], "type": c["type"], "function": c["function"]} for c in delta.get("tool_calls", ())]
    message = {
        "role": "assistant",
        "content": delta.get("content"),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": calls,
        "reasoning": delta.get("reasoning"),
    }
    return {
        "index": 0,
        "message": message,
        "logprobs": _chat_logprobs(job, made),
        "finish_reason": finish_reason(job, last.finish, called=bool(calls)),
        "stop_reason": last.stop_reason,
        "token_ids": None,
    }


def _text_choice(job: Job, made: Sequence[Token], last: Event) -> dict[str, Any]:
    return {
        "index": 0,
        "text": plain_text(made),
        "logprobs": _text_logprobs(job, made),
        "finish_reason": last.finish or None,
        "stop_reason": last.stop_reason,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }


# --- log probabilities: the same for the same token and the same weights, and no more than that


def _spelled(token: Token) -> str:
    return token.text or (tokens.SPECIALS[token.number] if token.number < len(tokens.SPECIALS) else "")


def _logprob(text: str, rank: int, weights: int) -> float:
    return -round((zlib.crc32(text.encode("utf-8", "surrogatepass"), weights) % 997) / 2500 + 1.5 * rank, 6)


def _ranked(text: str, count: int, weights: int) -> list[tuple[str, float]]:
    """The token itself and others that are less likely."""
    others = [other for other in ALTERNATIVES if other != text]
    candidates = [text, *(others * 3)][: max(1, count)]
    return [(candidate, _logprob(text, rank, weights)) for rank, candidate in enumerate(candidates)]


def _own(token: Token, weights: int) -> float:
    """A token that was taken although another one was more likely is less likely than all that are listed."""
    return _logprob(_spelled(token), 3 if token.instead else 0, weights)


def _likely(token: Token) -> str:
    return token.instead or _spelled(token)


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", "replace"))


def _chat_logprobs(job: Job, made: Iterable[Token]) -> dict[str, Any] | None:
    if job.logprobs is None:
        return None
    content = []
    for token in made:
        ranked, text = _ranked(_likely(token), job.logprobs, job.weights), _spelled(token)
        top = [{"token": t, "logprob": p, "bytes": _bytes(t)} for t, p in ranked]
        own = {"token": text, "logprob": _own(token, job.weights), "bytes": _bytes(text)}
        content.append(own | {"top_logprobs": top if job.logprobs else []})
    return {"content": content}


def _text_logprobs(job: Job, made: Iterable[Token]) -> dict[str, Any] | None:
    if job.logprobs is None:
        return None
    made = list(made)
    texts = list(map(_spelled, made))
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    values = [_own(token, job.weights) for token in made]
    top = [dict(_ranked(_likely(token), job.logprobs, job.weights)) for token in made]
    return {"text_offset": offsets, "token_logprobs": values, "tokens": texts, "top_logprobs": top}
