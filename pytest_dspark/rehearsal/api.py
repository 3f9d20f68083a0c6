"""The OpenAI API of the emulated head, in the shapes that vLLM 0.26 sends."""

from __future__ import annotations

import argparse
import json
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import answers
import engine as engines
from loglines import VERSION

Reply = tuple[int, Mapping[str, Any]]
DEAD = {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", "type": "InternalServerError", "param": None, "code": 500}


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512
    allow_reuse_address = True


def serve(args: argparse.Namespace, engine: engines.Engine, faults: Mapping[str, str], bind: str) -> Server:
    """Start to answer in threads."""
    handler = type("Handler", (_Handler,), {"args": args, "engine": engine, "faults": faults})
    server = Server((bind or args.host, args.port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _error(message: str, code: int = 400, kind: str = "BadRequestError") -> Reply:
    return code, {"error": {"message": message, "type": kind, "param": None, "code": code}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    args: argparse.Namespace
    engine: engines.Engine
    faults: Mapping[str, str]

    def log_message(self, format: str, *args: Any) -> None:
        """The engine's own access lines are of no use here."""

    def do_GET(self) -> None:
        routes: dict[str, Callable[[], Reply]] = {"/v1/models": self._models, "/version": lambda: (200, {"version": VERSION})}
        if self.path in ("/health", "/ping"):
            self._send(200, b"", "text/plain")
        elif self.path == "/metrics":
            self._send(200, metrics_text(self.args, self.engine).encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif self.path in routes:
            self._json(*routes[self.path]())
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        except ValueError as error:
            self._json(*_error(str(error)))
            return
        routes: dict[str, Callable[[dict[str, Any]], Reply]] = {"/tokenize": self._tokenize, "/detokenize": self._detokenize, "/v1/chat/completions/render": self._render}
        if self.path in routes:
            self._json(*routes[self.path](body))
        elif self.path in ("/v1/chat/completions", "/v1/completions"):
            self._generate(body, chat="chat" in self.path)
        else:
            self._json(404, {"detail": "Not Found"})

    # --- what it says of itself

    def _models(self) -> Reply:
        length = int(self.faults.get("wrong_model_len") or self.args.max_model_len)
        card = {"id": self.args.served_model_name, "object": "model", "created": int(time.time()), "owned_by": "vllm", "root": self.args.model_tag, "parent": None, "max_model_len": length}
        return 200, {"object": "list", "data": [card]}

    def _ids(self, body: Mapping[str, Any]) -> list[int]:
        if "messages" in body:
            return [1] * engines.TEMPLATE_TOKENS + self.engine.tokenizer.encode(chat_text(body["messages"]))
        prompt = body.get("prompt", "")
        return list(prompt) if isinstance(prompt, list) else [1, *self.engine.tokenizer.encode(str(prompt))]

    def _tokenize(self, body: dict[str, Any]) -> Reply:
        ids = self._ids(body)
        return 200, {"count": len(ids), "max_model_len": self.args.max_model_len, "tokens": ids, "token_strs": None}

    def _detokenize(self, body: dict[str, Any]) -> Reply:
        return 200, {"prompt": self.engine.tokenizer.decode(body.get("tokens") or [])}

    def _render(self, body: dict[str, Any]) -> Reply:
        if not self.args.enable_scale_out:
            return 403, {"detail": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."}
        return 200, {"token_ids": self._ids(body)}

    # --- generation

    def _generate(self, body: dict[str, Any], *, chat: bool) -> None:
        if body.get("model") not in (None, self.args.served_model_name):
            self._json(*_error(f"The model `{body.get('model')}` does not exist.", 404, "NotFoundError"))
            return
        ids = self._ids(body)
        budget = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        if len(ids) + budget > self.args.max_model_len:
            text = f"This model's maximum context length is {self.args.max_model_len} tokens. However, you requested {budget} output tokens and your prompt contains {len(ids)} input tokens."
            self._json(*_error(text))
            return
        prompt = chat_text(body["messages"]) if chat else self.engine.tokenizer.decode(ids)
        request = engines.Request(prompt, len(ids), tuple(ids), body, chat, self._gone)
        self._ident = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        if "api_only" in self.faults:
            self.engine.dead.wait()
        if body.get("stream"):
            self._stream(request)
        else:
            self._whole(request)

    def _gone(self) -> bool:
        """Whether the client closed its end."""
        ready, _, _ = select.select([self.connection], [], [], 0)
        return bool(ready) and not self.connection.recv(1, socket.MSG_PEEK)

    def _whole(self, request: engines.Request) -> None:
        try:
            pieces = list(self.engine.generate(request))
        except engines.EngineDead:
            self._json(500, {"error": DEAD})
            return
        except ConnectionResetError:
            self.close_connection = True
            return
        text = {kind: "".join(p.text for p in pieces if p.kind == kind) for kind in ("content", "reasoning", "tool")}
        message: dict[str, Any] = {"role": "assistant", "content": text["content"] or None, "reasoning": text["reasoning"] or None, "tool_calls": []}
        name = next((p.name for p in pieces if p.name), "")
        if name:
            message["tool_calls"] = [{"id": "call_" + uuid.uuid4().hex[:8], "type": "function", "function": {"name": name, "arguments": text["tool"]}}]
        choice: dict[str, Any] = {"index": 0, "message": message} if request.chat else {"index": 0, "text": text["content"]}
        choice |= {"logprobs": None, "finish_reason": pieces[-1].finish, "stop_reason": None}
        self._json(200, self._envelope(request, [choice]) | {"usage": self._usage(request, pieces)})

    def _stream(self, request: engines.Request) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent: list[answers.Piece] = []
        try:
            if request.chat:
                self._event(self._envelope(request, [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]))
            for piece in self.engine.generate(request):
                sent.append(piece)
                if self._spoiled(len(sent)):
                    return
                self._event(self._envelope(request, [self._choice(request, piece, first=piece.name != "")]))
            if (request.body.get("stream_options") or {}).get("include_usage") and "no_usage" not in self.faults:
                self._event(self._envelope(request, []) | {"usage": self._usage(request, sent)})
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        except engines.EngineDead:
            self._fail_in_stream()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _spoiled(self, count: int) -> bool:
        """The faults that end a stream early."""
        if count < 3:
            return False
        if "error_in_stream" in self.faults:
            self._fail_in_stream()
            return True
        if "truncate_stream" in self.faults:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return True
        return False

    def _fail_in_stream(self) -> None:
        """As the real engine: an error and [DONE] inside the 200."""
        self._event({"error": DEAD})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _choice(self, request: engines.Request, piece: answers.Piece, *, first: bool) -> dict[str, Any]:
        end = {"logprobs": None, "finish_reason": piece.finish, "stop_reason": None}
        if not request.chat:
            return {"index": 0, "text": piece.text, **end}
        if piece.kind != "tool":
            return {"index": 0, "delta": {piece.kind: piece.text}, **end}
        function = {"name": piece.name, "arguments": piece.text} if first else {"arguments": piece.text}
        call = {"index": 0, "function": function} | ({"id": "call_" + uuid.uuid4().hex[:8], "type": "function"} if first else {})
        return {"index": 0, "delta": {"tool_calls": [call]}, **end}

    def _envelope(self, request: engines.Request, choices: list[Any]) -> dict[str, Any]:
        kind = "chat.completion" if request.chat else "text_completion"
        kind += ".chunk" if request.chat and request.body.get("stream") else ""
        return {"id": self._ident, "object": kind, "created": int(time.time()), "model": self.args.served_model_name, "choices": choices}

    def _usage(self, request: engines.Request, pieces: list[answers.Piece]) -> dict[str, Any]:
        count = sum(piece.tokens for piece in pieces)
        details = {"cached_tokens": pieces[0].cached} if self.args.enable_prompt_tokens_details and pieces else None
        return {"prompt_tokens": request.prompt_tokens, "total_tokens": request.prompt_tokens + count, "completion_tokens": count, "prompt_tokens_details": details}

    # --- the wire

    def _event(self, data: Mapping[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _json(self, code: int, data: Mapping[str, Any]) -> None:
        self._send(code, json.dumps(data).encode(), "application/json")

    def _send(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


def chat_text(messages: list[Mapping[str, Any]]) -> str:
    """The messages as the model reads them."""
    return "\n".join(str(message.get("content") or "") for message in messages)


def metrics_text(args: argparse.Namespace, engine: engines.Engine) -> str:
    """The counters under the engine's own names, with the siblings that careless readers add up."""
    c, labels = engine.counters, f'engine="0",model_name="{args.served_model_name}"'
    gauges = {"num_requests_running": c.running, "num_requests_waiting": c.waiting, "kv_cache_usage_perc": round(c.used / engine.pool, 6)}
    totals = {
        "prompt_tokens": c.prompt_tokens,
        "generation_tokens": c.generation_tokens,
        "prefix_cache_queries": c.prefix_queries,
        "prefix_cache_hits": c.prefix_hits,
        "num_preemptions": 0,
        "spec_decode_num_drafts": c.drafts,
        "spec_decode_num_draft_tokens": c.draft_tokens,
        "spec_decode_num_accepted_tokens": c.accepted,
    }
    sums = {"request_prefill_time_seconds": c.prefill_s, "request_decode_time_seconds": c.decode_s}
    lines = [f"# TYPE vllm:{name} gauge\nvllm:{name}{{{labels}}} {float(value)}" for name, value in gauges.items()]
    for name, value in totals.items():
        lines.append(f"# TYPE vllm:{name}_total counter\nvllm:{name}_total{{{labels}}} {float(value)}")
        lines.append(f"# TYPE vllm:{name}_created gauge\nvllm:{name}_created{{{labels}}} 1.7803e+09")
    for reason, count in sorted(c.finished.items()):
        lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {float(count)}')
    for name, seconds in sums.items():
        lines.append(f"# TYPE vllm:{name} histogram\nvllm:{name}_bucket{{{labels},le=\"+Inf\"}} {float(c.requests)}")
        lines.append(f"vllm:{name}_count{{{labels}}} {float(c.requests)}\nvllm:{name}_sum{{{labels}}} {seconds}")
    info = f'block_size="4",cache_dtype="{args.kv_cache_dtype}",enable_prefix_caching="{args.enable_prefix_caching}",engine="0",kv_cache_size_tokens="{engine.pool}",num_gpu_blocks="9800"'
    lines.append(f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{info}}} 1.0")
    return "\n".join(lines) + "\n"
