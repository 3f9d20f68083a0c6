"""The HTTP API of the head: what each path answers."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import metrics
import tokens
import wire
from argv import Settings
from engine import DEAD, Engine
from faults import Faults
from httpserver import Reply, Request, dumped
from intake import Intake, Refused
from loglines import VERSION
from sequence import Event, Token

BIG_BODY = 200_000
"""Bytes above which a body is read in a thread, so that a long prompt does not stop the others."""
EVENTS_BEFORE_A_FAULT = 3
SCALE_OUT = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
Body = dict[str, Any]


def _weights(folder: str) -> int:
    """A number of every byte of what stands for the weights; 0 where there are none."""
    total = 0
    for path in sorted(Path(folder).glob("*.safetensors")):
        total = zlib.crc32(path.read_bytes(), total)
    return total


def learnt(path: str) -> dict[str, str]:
    """What the model knows by heart: lines of JSON with `question` and `answer`, the answer's number after `####`."""
    known = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines() if path else ():
        told = json.loads(line)
        steps, _, number = re.sub(r"<<[^>]*>>", "", told["answer"]).partition("####")
        known[told["question"].strip()] = f"{steps.strip()}\nThe answer is {number.strip()}."
    return known


class Api:
    """Answers requests with the engine."""

    def __init__(self, settings: Settings, engine: Engine, faults: Faults, *, garbled: bool, key: str) -> None:
        self._settings, self._engine, self._faults, self._key = settings, engine, faults, key
        self._tokenizer = tokens.Tokenizer()
        config = zlib.crc32(repr(sorted(settings.given.items(), key=str)).encode())
        fingerprint = f"vllm-{VERSION}-tp{settings.tensor_parallel_size}-{config:08x}"
        weights, known = _weights(settings.model), learnt(os.environ.get("REHEARSAL_KNOWS", ""))
        self._intake = Intake(settings, self._tokenizer, faults, fingerprint, garbled, weights, known)
        self._gets: Mapping[str, Callable[[Reply], Awaitable[None]]] = {
            "/v1/models": self._models,
            "/version": lambda reply: reply.json(200, {"version": VERSION}),
            "/health": self._health,
            "/ping": self._health,
            "/metrics": self._metrics,
            "/load": lambda reply: reply.json(200, {"server_load": engine.numbers.running + engine.numbers.waiting}),
        }
        self._posts: Mapping[str, Callable[[Body, Reply], Awaitable[None]]] = {
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/chat/completions/render": self._render,
            "/v1/chat/completions": lambda body, reply: self._generate(body, reply, chat=True),
            "/v1/completions": lambda body, reply: self._generate(body, reply, chat=False),
        }

    async def answer(self, request: Request, reply: Reply) -> None:
        """One request, whatever it is."""
        try:
            await self._answer(request, reply)
        except Refused as refused:
            await reply.json(refused.code, refused.body)
        if request.path != "/metrics":
            key = request.path, request.method, f"{reply.status // 100}xx"
            self._engine.numbers.http[key] = self._engine.numbers.http.get(key, 0) + 1

    async def _answer(self, request: Request, reply: Reply) -> None:
        if self._key and request.path.startswith("/v1") and not self._allowed(request):
            await reply.json(401, {"error": "Unauthorized"})
        elif request.method in ("GET", "HEAD") and request.path in self._gets:
            await self._gets[request.path](reply)
        elif request.method == "POST" and request.path == "/ping":
            await self._health(reply)
        elif request.method == "POST" and request.path in self._posts:
            await self._posts[request.path](await self._read(request), reply)
        elif request.path in self._gets or request.path in self._posts:
            await reply.json(405, {"detail": "Method Not Allowed"})
        else:
            await reply.json(404, {"detail": "Not Found"})

    def _allowed(self, request: Request) -> bool:
        return hmac.compare_digest(request.headers.get("authorization", ""), f"Bearer {self._key}")

    async def _read(self, request: Request) -> Body:
        big = len(request.body) > BIG_BODY
        try:
            body = await asyncio.to_thread(json.loads, request.body) if big else json.loads(request.body)
        except ValueError as error:
            raise Refused(f"1 validation error: Invalid JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refused("1 validation error: Input should be a valid dictionary")
        return body

    # --- what it says of itself

    async def _models(self, reply: Reply) -> None:
        length = int(self._faults.number("wrong_model_len") or self._settings.max_model_len)
        name, now = self._settings.served_model_name, int(time.time())
        permission = {
            "id": f"modelperm-{zlib.crc32(name.encode()):08x}",
            "object": "model_permission",
            "created": now,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {"id": name, "object": "model", "created": now, "owned_by": "vllm", "root": self._settings.model}
        card |= {"parent": None, "max_model_len": length, "permission": [permission]}
        await reply.json(200, {"object": "list", "data": [card]})

    async def _health(self, reply: Reply) -> None:
        await reply.text(503 if self._engine.dead else 200, "")

    async def _metrics(self, reply: Reply) -> None:
        text = metrics.page(self._engine.numbers, self._settings, self._engine.pool)
        await reply.text(200, text, "text/plain; version=1.0.0; charset=utf-8")

    # --- tokens

    async def _tokenize(self, body: Body, reply: Reply) -> None:
        self._intake.check_model(body)
        ids = await asyncio.to_thread(self._intake.prompt_ids, body)
        strings = [self._tokenizer.decode((number,)) for number in ids] if body.get("return_token_strs") else None
        found = {"count": len(ids), "max_model_len": self._settings.max_model_len, "tokens": ids, "token_strs": strings}
        await reply.json(200, found)

    async def _detokenize(self, body: Body, reply: Reply) -> None:
        self._intake.check_model(body)
        ids = body.get("tokens")
        if not isinstance(ids, list) or not all(type(number) is int for number in ids):
            raise Refused("tokens: expected a list of token ids")
        if (stranger := tokens.out_of_vocabulary(ids)) is not None:
            raise Refused(f"Token id {stranger} is out of vocabulary")
        await reply.json(200, {"prompt": await asyncio.to_thread(self._tokenizer.decode, ids)})

    async def _render(self, body: Body, reply: Reply) -> None:
        if not self._settings.enable_scale_out:
            raise Refused(SCALE_OUT, 403, "Forbidden")
        self._intake.check_model(body)
        if "messages" not in body:
            raise Refused("messages: expected a list of at least one message")
        ids = await asyncio.to_thread(self._intake.prompt_ids, body)
        ident = f"chatcmpl-{zlib.crc32(str(time.time_ns()).encode()):08x}"
        found = {"request_id": ident, "token_ids": ids, "features": None, "model": self._settings.served_model_name}
        await reply.json(200, found | {"stream": False, "cache_salt": None, "priority": 0, "kv_transfer_params": None})

    # --- generation

    async def _generate(self, body: Body, reply: Reply, *, chat: bool) -> None:
        if self._engine.dead:
            raise Refused(DEAD, 500, "InternalServerError")
        try:
            job = await asyncio.to_thread(self._intake.job, body, chat=chat, gone=reply.gone)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise Refused(f"1 validation error: {error!r}") from error
        if "api_only" in self._faults:
            await _never(reply)
            return
        self._engine.submit(job.sequence)
        await (self._stream(job, reply) if job.stream else self._whole(job, reply))

    async def _whole(self, job: wire.Job, reply: Reply) -> None:
        made: list[Token] = []
        while True:
            event = await job.sequence.events.get()
            if event.error or ("error_in_stream" in self._faults and len(made) >= EVENTS_BEFORE_A_FAULT):
                raise Refused(event.error or DEAD, 500, "InternalServerError")
            made += event.tokens
            if event.finish:
                body = wire.whole(job, made, event, with_usage="no_usage" not in self._faults)
                await reply.json(200, body)
                return

    async def _stream(self, job: wire.Job, reply: Reply) -> None:
        await reply.begin()
        seen, called = 0, False
        while True:
            event = await job.sequence.events.get()
            if fault := self._stream_fault(event, seen):
                await self._break(fault, event, reply)
                return
            if seen == 0 and job.chat:
                await reply.send(dumped(wire.first_chunk(job)))
            seen += 1
            called = called or any(token.kind == "tool" for token in event.tokens)
            chunk = wire.event_chunk(job, event, called=called)
            if chunk is not None:
                await reply.send(dumped(chunk))
            if event.finish:
                break
        if job.include_usage and "no_usage" not in self._faults:
            await reply.send(dumped(wire.usage_chunk(job)))
        await reply.send("[DONE]")
        await reply.end()

    def _stream_fault(self, event: Event, seen: int) -> str:
        """What ends a stream before its time: the engine's error, or a fault of the rehearsal."""
        if event.error:
            return "error"
        due = seen >= EVENTS_BEFORE_A_FAULT or bool(event.finish)
        return next((name for name in ("error_in_stream", "truncate_stream") if due and name in self._faults), "")

    async def _break(self, fault: str, event: Event, reply: Reply) -> None:
        if fault != "truncate_stream":
            await reply.send(wire.stream_error(event.error or DEAD))
            await reply.send("[DONE]")
        if self._faults.text("truncate_stream") == "abrupt" and fault == "truncate_stream":
            reply.cut()
            return
        await reply.end()
        reply.close = reply.close or fault == "truncate_stream"


async def _never(reply: Reply) -> None:
    """Accepted, and no byte until the client gives up."""
    while not reply.gone():
        await asyncio.sleep(0.05)
    reply.close = True
