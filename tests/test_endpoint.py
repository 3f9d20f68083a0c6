"""The waist: every stream scenario in every split of its bytes, and a selection over real sockets."""

import json
import pickle
import random
import socket
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from scripted import CHUNKED, HOLD, RESET, SSE, Scripted, chunk, delta, event, usage, whole

from pytest_dspark import timing as T
from pytest_dspark.endpoint import ARRIVAL, NOTE, Asked, Endpoint, Framing, RequestError, StreamReader, arrival
from pytest_dspark.errors import ConfigError, EndpointError, LaunchError

DONE = b"data: [DONE]\n\n"
ROLE = delta(role="assistant", content="")
MESSAGES = [{"role": "user", "content": "x"}]


# --- scenarios: (arrival in seconds, bytes); what must come of them

CLEAN = [(0.1, ROLE), (0.5, delta(content="Hel")), (1.0, delta(content="lo", finish_reason="stop"))]
TAIL = [(3.0, usage(2)), (3.0, DONE)]
HELLO = {"text": "Hello", "stamps": [0.5, 1.0], "answer": 0.5, "finish": "stop", "tokens": 2, "done": True}
PINGS = (
    b": ping\n\n" * 5
    + b":\n\n"
    + b"data:\n\n"
    + b"data: \n\n"
    + b"event: ping\ndata: {}\n\n"
    + b"event: ping\ndata: hi\n\n"
)
PRETTY = delta(content="Hel").replace(b', "choices"', b',\ndata: "choices"')
ODD = "✅Å a\u2028b a\u0085c 🙂"
TOOL = [
    delta(tool_calls=[{"index": 0, "id": "c", "function": {"name": "get_weather", "arguments": ""}}]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": '{"city": '}}]),
    delta(tool_calls=[{"index": 1, "function": {"name": "b", "arguments": "{}"}}]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": '"Tokyo"}'}}], finish_reason="tool_calls"),
]


def reasoning(**names):
    """CASES L01 under the given names of the reasoning field."""
    return [
        (0.05, ROLE),
        (0.10, delta(content="")),
        (1.0, delta(**names)),
        (3.0, delta(content="X")),
        (3.5, delta(finish_reason="stop")),
        (4.0, usage(2)),
        (4.0, DONE),
    ]


THOUGHT = {"text": "X", "reasoning": "a", "stamps": [1.0, 3.0], "answer": 3.0, "finish": "stop", "tokens": 2}
ENGINE_DIED = event(error={"message": "engine died", "type": "InternalServerError", "code": 500})
GOOD = {
    "clean": (CLEAN + TAIL, HELLO),
    "crlf": ([(at, data.replace(b"\n", b"\r\n")) for at, data in CLEAN + TAIL], HELLO),
    "cr": ([(at, data.replace(b"\n", b"\r")) for at, data in CLEAN + TAIL], HELLO),
    "S01 null error": ([*CLEAN, (2.0, event(error=None, choices=[])), *TAIL], HELLO),
    "S01 empty error": ([*CLEAN, (2.0, event(error="", choices=[])), *TAIL], HELLO),
    "S01 error object of nulls": ([*CLEAN, (2.0, event(error={"message": None}, choices=[])), *TAIL], HELLO),
    "S02c no done": ([*CLEAN, (3.0, usage(2))], HELLO | {"done": False}),
    "S02c no usage, no done": (CLEAN, HELLO | {"done": False, "tokens": None}),
    "S02d after done": (CLEAN + TAIL + [(4.0, ENGINE_DIED + b"data: {{{\n\n")], HELLO),
    "S03 pings": ([(0.3, PINGS), *CLEAN[:2], (0.7, PINGS), CLEAN[2], (2.0, PINGS), *TAIL], HELLO),
    "S03 no space": ([(at, data.replace(b"data: ", b"data:")) for at, data in CLEAN + TAIL], HELLO),
    "S03 two-line data": ([CLEAN[0], (0.5, PRETTY), CLEAN[2], *TAIL], HELLO),
    "bom": ([(0.1, b"\xef\xbb\xbf" + ROLE), *CLEAN[1:], *TAIL], HELLO),
    "done without its blank line": ([*CLEAN, (3.0, usage(2) + b"data: [DONE]")], HELLO),
    "half an event after the finish": ([*CLEAN, (3.0, usage(2)[:30])], HELLO | {"done": False, "tokens": None}),
    "S04 raw utf-8": (
        [(0.5, delta(content=ODD)), (1.0, delta(content="!", finish_reason="stop")), *TAIL],
        HELLO | {"text": ODD + "!"},
    ),
    "S08 choices empty": (CLEAN + TAIL, HELLO),
    "S08 choices absent": ([*CLEAN, (3.0, event(usage={"completion_tokens": 2})), (3.0, DONE)], HELLO),
    "S08 choices null": ([*CLEAN, (3.0, event(choices=None, usage={"completion_tokens": 2})), (3.0, DONE)], HELLO),
    "S08 cumulative on every chunk": (
        [
            (
                0.5 * n,
                event(choices=[{"delta": {"content": text}, "finish_reason": why}], usage={"completion_tokens": n}),
            )
            for n, text, why in ((1, "a", None), (2, "b", None), (3, "c", "stop"))
        ],
        {"text": "abc", "stamps": [0.5, 1.0, 1.5], "answer": 0.5, "finish": "stop", "tokens": 3, "done": False},
    ),
    "S08 usage null on every chunk": (
        [(at, data.replace(b'"choices"', b'"usage": null, "choices"')) for at, data in CLEAN] + TAIL,
        HELLO,
    ),
    "S08 never": ([*CLEAN, (3.0, DONE)], HELLO | {"tokens": None}),
    "zero tokens beside text": ([*CLEAN, (3.0, usage(0)), (3.0, DONE)], HELLO | {"tokens": None}),
    "L01 reasoning": (reasoning(reasoning="a"), THOUGHT),
    "L01 reasoning_content": (reasoning(reasoning_content="a"), THOUGHT),
    "L01 both": (reasoning(reasoning="a", reasoning_content="a"), THOUGHT),
    "L01 content null": (reasoning(reasoning="a", reasoning_content=None, content=None), THOUGHT),
    "L01 role with the first content": ([(0.5, delta(role="assistant", content="Hel")), CLEAN[2], *TAIL], HELLO),
    "L02 several tokens an event": (
        [
            (round(0.5 + 0.1 * n, 1), delta(content="abcdef", finish_reason="length" if n == 9 else None))
            for n in range(10)
        ]
        + [(1.4, usage(60)), (1.4, DONE)],
        {
            "text": "abcdef" * 10,
            "stamps": [round(0.5 + 0.1 * n, 1) for n in range(10)],
            "answer": 0.5,
            "finish": "length",
            "tokens": 60,
        },
    ),
    "N02 thinking to the limit": (
        [(0.1, ROLE), (1.0, delta(reasoning="hm", content=None)), (2.0, delta(finish_reason="length")), *TAIL],
        {"text": "", "reasoning": "hm", "stamps": [1.0], "answer": None, "finish": "length", "tokens": 2},
    ),
    "tool call": (
        [(0.1 * n, piece) for n, piece in enumerate(TOOL, 1)] + TAIL,
        {
            "text": "",
            "calls": [("get_weather", '{"city": "Tokyo"}'), ("b", "{}")],
            "stamps": [0.2, 0.1 * 3, 0.4],
            "answer": None,
            "finish": "tool_calls",
            "tokens": 2,
        },
    ),
    "counted but empty": (
        [(0.1, ROLE), (0.5, delta(finish_reason="stop")), (1.0, usage(1)), (1.0, DONE)],
        {"text": "", "stamps": [], "answer": None, "finish": "stop", "tokens": 1},
    ),
    "completions": (
        [
            (0.5, event(choices=[{"index": 0, "text": "Hel"}])),
            (1.0, event(choices=[{"index": 0, "text": "lo", "finish_reason": "stop"}])),
            *TAIL,
        ],
        HELLO,
    ),
}
BAD = {
    "S01 error in the stream": ([*CLEAN[:2], (0.9, ENGINE_DIED), (0.9, DONE)], "ERROR_IN_STREAM", "engine died", "Hel"),
    "S01 error first": ([(0.1, ENGINE_DIED), (0.1, DONE)], "ERROR_IN_STREAM", "engine died", ""),
    "S01 bare string": ([*CLEAN[:2], (0.9, event(error="engine died"))], "ERROR_IN_STREAM", "engine died", "Hel"),
    "S01 after the finish": ([*CLEAN, (2.0, ENGINE_DIED), *TAIL], "ERROR_IN_STREAM", "engine died", "Hello"),
    "S01 beside choices": (
        [*CLEAN[:2], (0.9, event(error={"message": "engine died"}, choices=[{"delta": {"content": "x"}}]))],
        "ERROR_IN_STREAM",
        "engine died",
        "Hel",
    ),
    "S01 without a wrapper": (
        [(0.1, event(object="error", message="engine died", code=500))],
        "ERROR_IN_STREAM",
        "engine died",
        "",
    ),
    "S01 named error": ([(0.1, b"event: error\ndata: engine died\n\n")], "ERROR_IN_STREAM", "engine died", ""),
    "S01 named error as JSON": (
        [(0.1, b'event: error\ndata: {"message":"engine died"}\n\n')],
        "ERROR_IN_STREAM",
        "engine died",
        "",
    ),
    "finish reason abort": (
        [*CLEAN[:2], (1.0, delta(finish_reason="abort")), *TAIL],
        "ERROR_IN_STREAM",
        "abort",
        "Hel",
    ),
    "S02a end without a finish": (CLEAN[:2], "TRUNCATED", "without a finish reason", "Hel"),
    "S02a with done": ([*CLEAN[:2], (1.0, DONE)], "TRUNCATED", "with [DONE]", "Hel"),
    "cut inside an event": ([*CLEAN[:2], (1.0, CLEAN[2][1][:40])], "TRUNCATED", "without a finish reason", "Hel"),
    "cut inside a character": (
        [*CLEAN[:2], (1.0, delta(content="✅")[:47])],
        "TRUNCATED",
        "without a finish reason",
        "Hel",
    ),
    "nothing at all": ([], "TRUNCATED", "0 events", ""),
    "L01 no token": (
        [(0.1, ROLE), (1.0, delta(finish_reason="stop")), (1.0, DONE)],
        "PROTOCOL",
        "without a single token",
        "",
    ),
    "L01 no token, counted zero": (
        [(1.0, delta(finish_reason="stop")), (1.0, usage(0)), (1.0, DONE)],
        "PROTOCOL",
        "single token",
        "",
    ),
    "no JSON": ([*CLEAN[:2], (1.0, b"data: oops\n\n")], "PROTOCOL", "oops", "Hel"),
    "no object": ([*CLEAN[:2], (1.0, b"data: [1]\n\n")], "PROTOCOL", "[1]", "Hel"),
    "second choice": (
        [(1.0, event(choices=[{"index": 1, "delta": {"content": "x"}}]))],
        "PROTOCOL",
        "another choice",
        "",
    ),
    "content is no text": ([(1.0, delta(content=5))], "PROTOCOL", "expected text", ""),
}


def outcome(packets):
    """All that a stream comes to: texts, times and verdict."""
    reader, events = StreamReader(), []
    reader._on_event = events.append
    watched = T.Timing(None, None, None, 9.0)
    try:
        for at, data in packets:
            if not reader.done:
                reader.feed(data, at)
        if not reader.done:
            reader.feed(b"", packets[-1][0] if packets else 0.0)
        reply = reader.reply({}, "hash", watched)
    except RequestError as error:
        return error.code, error.message, reader.so_far, list(reader.stamps)
    live = "".join(said.text for said in events), [said.at_s for said in events if said.carries]
    assert live == (reply.text, reader.stamps)
    tokens = reply.usage.completion_tokens if reply.usage else None
    assert (tokens is None) == bool(reply.usage_missing)
    return {
        "text": reply.text,
        "reasoning": reply.reasoning,
        "calls": [(call.name, call.arguments) for call in reply.tool_calls],
        "stamps": list(reader.stamps),
        "answer": reader.first_answer,
        "finish": reply.finish_reason,
        "tokens": tokens,
        "done": reply.done_marker,
    }


def cut(segments, places):
    """The segments cut at byte places of the whole; a piece keeps the arrival of its segment."""
    start, pieces = 0, []
    for at, data in segments:
        inside = [0, *(place - start for place in places if start < place < start + len(data)), len(data)]
        pieces += [(at, data[one:two]) for one, two in pairwise(inside)]
        start += len(data)
    return pieces


def splits(segments):
    """Every single place, every byte for itself, and many places at once."""
    total, chance = sum(len(data) for _, data in segments), random.Random(total_seed(segments))
    yield from ((place,) for place in range(1, total))
    yield range(1, total)
    for _ in range(25):
        yield sorted(chance.sample(range(1, total), min(total - 1, chance.randrange(2, 40)))) if total > 1 else ()


def total_seed(segments):
    return sum(len(data) for _, data in segments)


@pytest.mark.parametrize(("segments", "expected"), GOOD.values(), ids=GOOD)
def test_good_streams_in_every_split(segments, expected):
    whole_outcome = outcome(segments)
    assert whole_outcome == {"reasoning": "", "calls": [], "done": True} | expected
    for places in splits(segments):
        assert outcome(cut(segments, places)) == whole_outcome


@pytest.mark.parametrize(("segments", "code", "message", "partial"), BAD.values(), ids=BAD)
def test_bad_streams_in_every_split(segments, code, message, partial):
    whole_outcome = outcome(segments)
    assert isinstance(whole_outcome, tuple), whole_outcome
    assert (whole_outcome[0], whole_outcome[2][0]) == (code, partial)
    assert message in whole_outcome[1]
    for places in splits(segments):
        assert outcome(cut(segments, places)) == whole_outcome


@pytest.mark.parametrize("name", [name for name in GOOD if name[0] != "c"])
def test_events_that_share_a_packet_are_read_alike(name):
    """All at once: other times, same texts and verdict."""
    segments, expected = GOOD[name]
    merged = outcome([(9.0, b"".join(data for _, data in segments))])
    assert merged["text"] == expected["text"]
    assert merged["tokens"] == expected["tokens"]
    assert merged["stamps"] == [9.0] * len(expected["stamps"])


# --- real sockets


@pytest.fixture(params=["alone", "loop"])
def way(request):
    """How a stream is read: by its own thread, or in the loop that reads many."""
    return request.param


def ask(server, *, stream=True, alive=lambda: None, way="alone", **given):
    endpoint = Endpoint(server.url, "m", api_key="sk-EXAMPLE", alive=alive)
    if way == "alone":
        return endpoint.chat(MESSAGES, max_tokens=9, stream=stream, **given)
    [outcome] = endpoint.stream_many([Asked({"messages": MESSAGES, "max_tokens": 9})], **given)
    if isinstance(outcome, RequestError):
        raise outcome
    return outcome


def failure(*script, **given) -> tuple[RequestError, Scripted]:
    with Scripted(script) as server:
        with pytest.raises(RequestError) as caught:
            ask(server, **given)
    return caught.value, server


def body_of(segments) -> bytes:
    return b"".join(data for _, data in segments)


@pytest.mark.parametrize("framing", ["close", "chunked", "chunk a byte", "chunks cut", "length", "no charset", "drip"])
@pytest.mark.parametrize(
    "name", ["S03 pings", "S04 raw utf-8", "tool call", "L01 both", "S08 cumulative on every chunk", "S02d after done"]
)
def test_streams_over_sockets(framing, name, way):
    segments, expected = GOOD[name]
    data = body_of(segments)
    framed = b"".join(chunk(piece) for _, piece in cut(segments, range(1, len(data), 7))) + b"0\r\n\r\n"
    script = {
        "close": (SSE, data),
        "chunked": (CHUNKED, *[chunk(piece) for _, piece in segments], b"0\r\n\r\n"),
        "chunk a byte": (CHUNKED, b"".join(chunk(data[n : n + 1]) for n in range(len(data))) + b"0\r\n\r\n"),
        "chunks cut": (CHUNKED, *[framed[n : n + 11] for n in range(0, len(framed), 11)]),
        "length": (SSE.replace(b"\r\n\r\n", b"\r\ncontent-length: %d\r\n\r\n" % len(data)) + data,),
        "no charset": (b"HTTP/1.1 200 OK\r\n\r\n", data),
        "drip": (
            *[SSE[n : n + 9] for n in range(0, len(SSE), 9)],
            *[step for n in range(0, 50, 5) for step in (data[n : n + 5], 0.01)],
            data[50:],
        ),
    }[framing]
    with Scripted(script) as server:
        reply = ask(server, way=way)
    assert reply.text == expected["text"]
    assert [(call.name, call.arguments) for call in reply.tool_calls] == expected.get("calls", [])
    assert reply.usage.completion_tokens == expected["tokens"]
    assert reply.timing.events == len(expected["stamps"])
    assert reply.done_marker == expected.get("done", True)


@pytest.mark.parametrize(
    ("script", "code", "partial"),
    [
        ((SSE, CLEAN[0][1], CLEAN[1][1]), "TRUNCATED", "Hel"),
        ((CHUNKED, chunk(CLEAN[0][1]), chunk(CLEAN[1][1])), "TRUNCATED", "Hel"),
        ((CHUNKED, chunk(CLEAN[1][1]), b"ff\r\ndata: half"), "TRUNCATED", "Hel"),
        ((SSE.replace(b"\r\n\r\n", b"\r\ncontent-length: 9999\r\n\r\n"), CLEAN[1][1]), "TRUNCATED", "Hel"),
        ((SSE, CLEAN[1][1], 0.1, RESET), "SERVER_LOST", "Hel"),
        ((CHUNKED, chunk(CLEAN[1][1]), 0.1, RESET), "SERVER_LOST", "Hel"),
        ((SSE, ENGINE_DIED, DONE), "ERROR_IN_STREAM", ""),
        ((whole({"error": {"message": "engine died"}}),), "ERROR_IN_STREAM", ""),
        ((whole(b"<html>", kind="text/html"),), "PROTOCOL", ""),
        ((whole({"choices": []}),), "PROTOCOL", ""),
        ((), "SERVER_LOST", ""),
        ((RESET,), "SERVER_LOST", ""),
        ((b"HTTP/1.1 200 OK\r\nconte",), "TRUNCATED", ""),
        ((b"SSH-2.0-OpenSSH\r\n",), "PROTOCOL", ""),
        ((whole({"error": {"message": "engine died", "code": 500}}, "500 Internal Server Error"),), "SERVER_ERROR", ""),
        ((whole({"detail": "engine died"}, "503 Service Unavailable"),), "SERVER_ERROR", ""),
        ((whole(b"", "307 Moved\r\nlocation: /x"),), "SERVER_ERROR", ""),
    ],
)
def test_failures_over_sockets(script, code, partial, way):
    error, server = failure(*script, way=way)
    assert (error.code, error.partial) == (code, partial)
    assert error.elapsed_s < 2
    assert len(server.requests) == 1
    if "died" in str(script):
        assert "engine died" in error.message


def test_a_break_after_the_finish_is_finished(way):
    with Scripted((CHUNKED, chunk(body_of(CLEAN)))) as server:
        reply = ask(server, way=way)
    assert (reply.text, reply.done_marker, reply.usage) == ("Hello", False, None)
    assert reply.usage_missing


def test_nothing_listens(way):
    with Scripted(()) as server:
        pass
    with pytest.raises(RequestError) as caught:
        ask(server, way=way)
    assert caught.value.code == "SERVER_LOST"


# --- deadlines and life


def pings(seconds: float):
    return (SSE, CLEAN[1][1], *[step for _ in range(int(seconds / 0.05)) for step in (0.05, b": ping\n\n")])


def test_pings_meet_the_overall_deadline(way):
    """CASES S03: a read time-out per packet would never end this."""
    error, _ = failure(*pings(3), deadline_s=0.4, way=way)
    assert (error.code, error.partial) == ("DEADLINE", "Hel")
    assert 0.4 <= error.elapsed_s < 1.5


@pytest.mark.parametrize("filler", [b": ping\n\n", b"data:\n\n", ROLE, event(choices=[]), usage(1), b"x"])
def test_only_generated_things_are_progress(filler, way):
    error, _ = failure(SSE, CLEAN[1][1], *[0.05, filler] * 40, stall_s=0.3, way=way)
    assert (error.code, error.partial) == ("STALLED", "Hel")
    assert 0.3 <= error.elapsed_s < 1.5


def test_tokens_keep_a_stream_alive_past_the_stall_limit(way):
    steps = [step for _ in range(10) for step in (0.1, delta(content="a"))]
    with Scripted((SSE, *steps, delta(finish_reason="stop"), usage(10), DONE)) as server:
        assert ask(server, way=way, stall_s=0.3).text == "a" * 10


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [(HOLD,), (b"HTTP/1.1 200 OK\r\n", HOLD), (*[b"H", 0.05] * 40,), (SSE, HOLD)])
def test_a_server_that_says_nothing_meets_the_deadline(script, stream):
    error, server = failure(*script, stream=stream, deadline_s=0.3)
    assert error.code == "DEADLINE"
    assert 0.3 <= error.elapsed_s < 1.5
    assert server.gone.wait(2) or HOLD not in script
    assert len(server.requests) == 1


def test_a_flood_meets_the_deadline(way):
    error, _ = failure(SSE, *[b": ping\n\n" * 2000] * 20000, deadline_s=0.4, way=way)
    assert error.code == "DEADLINE"
    assert error.elapsed_s < 1.5


@pytest.mark.parametrize("script", [(HOLD,), (SSE, HOLD), pings(6)])
def test_a_dead_engine_ends_the_request_at_once(script, way):
    looks = []

    def alive():
        looks.append(time.monotonic())
        if len(looks) == 2:
            raise LaunchError("RANK_EXITED", "rank 1 exited with 1")

    with Scripted(script) as server:
        begin = time.monotonic()
        with pytest.raises(LaunchError) as caught:
            ask(server, way=way, alive=alive, deadline_s=5)
        assert time.monotonic() - begin < 4
        assert looks[1] - looks[0] < 1.5
        assert server.gone.wait(2)
    assert caught.value.code == "RANK_EXITED"


# --- what is sent


def answer(content="hi", finish_reason="stop", completion=1, **message):
    message = {"role": "assistant", "content": content, **message}
    return {
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 5, "completion_tokens": completion},
    }


def test_one_request_without_proxy_compression_or_key_in_the_reply(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with Scripted((whole(answer()),)) as server:
        reply = ask(server, stream=False, thinking=False, seed=7, extra={"top_k": 1, "chat_template_kwargs": {"a": 1}})
    ((head, body),) = server.requests
    sent = json.loads(body)
    assert "accept-encoding: identity" in head.lower()
    assert "authorization: bearer sk-example" in head.lower()
    assert "connection: close" in head.lower()
    assert sent == dict(reply.raw)
    assert sent["chat_template_kwargs"] == {"thinking": False, "a": 1}
    assert (sent["top_k"], sent["seed"], sent["max_tokens"], sent["temperature"]) == (1, 7, 9, 0.0)
    assert not {"thinking", "tools", "min_tokens", "stream_options"} & set(sent)
    assert "sk-EXAMPLE" not in repr(reply) + str(reply.raw)


def test_thinking_none_sends_nothing_and_streams_ask_for_usage():
    with Scripted((SSE, body_of(CLEAN + TAIL))) as server:
        ask(server)
    sent = json.loads(server.requests[0][1])
    assert "chat_template_kwargs" not in sent
    assert sent["stream_options"] == {"include_usage": True}


def test_the_key_is_not_in_messages():
    error, _ = failure(whole({"error": {"message": "bad key sk-EXAMPLE"}}, "401 Unauthorized"))
    assert "sk-EXAMPLE" not in str(error)
    assert error.status == 401


def test_context_length_is_a_server_error_with_status_400():
    error, _ = failure(
        whole({"error": {"message": "maximum context length is 9" + "x" * 9999, "code": 400}}, "400 Bad Request")
    )
    assert (error.code, error.status) == ("SERVER_ERROR", 400)
    assert "maximum context length" in error.message
    assert len(error.message) < 700


@pytest.mark.parametrize("close_first", [(), (RESET,), (0.2,)])
def test_a_generation_is_posted_once(close_first):
    """CASES L05: also where a server closes after an earlier good answer on a kept connection."""
    kept = whole(answer())
    with Scripted((kept,), close_first) as server:
        endpoint = Endpoint(server.url, "m")
        endpoint.chat(MESSAGES, max_tokens=1)
        with pytest.raises(RequestError) as caught:
            endpoint.chat(MESSAGES, max_tokens=1, deadline_s=5)
        assert caught.value.code == "SERVER_LOST"
        assert len(server.requests) == 2


def test_a_million_ids_are_sent_quickly():
    ids = list(range(100_000, 1_100_000))
    done = {
        "model": "m",
        "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
        "usage": {"completion_tokens": 1},
    }
    with Scripted((whole(done),)) as server:
        begin = time.process_time()
        reply = Endpoint(server.url, "m").complete(ids, max_tokens=1)
        assert time.process_time() - begin < 2
    assert json.loads(server.requests[0][1])["prompt"] == ids
    assert len(reply.prompt_sha256) == 64
    assert reply.timing.wait_s < 1


# --- answers that are not streamed


def plain(body, **given):
    with Scripted((whole(body),)) as server:
        return ask(server, stream=False, **given)


def test_plain_answers():
    reply = plain(answer("hi", reasoning="hm", completion=3))
    assert (reply.text, reply.reasoning, reply.finish_reason, reply.status) == ("hi", "hm", "stop", 200)
    assert (reply.usage.completion_tokens, reply.usage_missing, reply.done_marker) == (3, "", None)
    assert reply.timing.first_token_s is None
    assert 0 < reply.timing.end_s < 2
    assert reply.timing.events == 0


def test_thinking_that_used_the_budget_is_an_answer_without_text():
    """CASES N02."""
    reply = plain(answer(None, "length", 9, reasoning="so long"))
    assert (reply.text, reply.reasoning, reply.finish_reason) == ("", "so long", "length")


def test_plain_tool_calls():
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    reply = plain(answer(None, "tool_calls", tool_calls=calls))
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"error": {"message": "engine died"}}, "ERROR_IN_STREAM"),
        ({"error": "engine died"}, "ERROR_IN_STREAM"),
        (answer() | {"error": "engine died"}, "ERROR_IN_STREAM"),
        ({"object": "error", "message": "engine died"}, "ERROR_IN_STREAM"),
        (answer("h", None), "TRUNCATED"),
        (answer("h", "abort"), "ERROR_IN_STREAM"),
        (answer(None, "stop", 0), "PROTOCOL"),
        ({"choices": []}, "PROTOCOL"),
        (b"{", "PROTOCOL"),
        (b"[]", "PROTOCOL"),
        (b"", "PROTOCOL"),
    ],
)
def test_plain_failures(body, code):
    with pytest.raises(RequestError) as caught:
        plain(body)
    assert caught.value.code == code


@pytest.mark.parametrize("error", [None, "", {}, {"message": None}])
def test_no_error_is_no_error(error):
    assert plain(answer() | {"error": error}).text == "hi"


def test_usage_details_and_missing_usage():
    body = answer()
    body["usage"] |= {
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    usage_told = plain(body).usage
    assert (usage_told.cached_tokens, usage_told.reasoning_tokens) == (3, 0)
    assert plain(answer()).usage.cached_tokens is None
    del body["usage"]
    assert plain(body).usage is None
    assert plain(body).usage_missing


def test_logprobs_of_both_forms():
    body = answer()
    top = [{"token": "hi", "logprob": -0.1}, {"token": "ho", "logprob": -2.5}]
    body["choices"][0]["logprobs"] = {"content": [{"token": "hi", "logprob": -0.1, "top_logprobs": top}]}
    expected = (("hi", -0.1, (("hi", -0.1), ("ho", -2.5))),)
    assert plain(body, logprobs=2).logprobs == expected
    body["choices"][0]["logprobs"] = {
        "tokens": ["hi"],
        "token_logprobs": [-0.1],
        "top_logprobs": [{"hi": -0.1, "ho": -2.5}],
    }
    assert plain(body).logprobs == expected
    assert plain(answer()).logprobs is None


# --- times


def test_times_on_the_wire(way):
    """Waits before the first byte are no part of any time; a usage chunk is no token."""
    steps = [0.4, delta(content="a"), 0.4, delta(content="b", finish_reason="stop"), 0.4, usage(2), DONE]
    with Scripted((SSE, *steps)) as server:
        timing = ask(server, way=way).timing
    assert timing.first_token_s == pytest.approx(0.4, abs=0.19)
    assert timing.last_token_s == pytest.approx(0.8, abs=0.19)
    assert timing.end_s == pytest.approx(1.2, abs=0.19)
    assert timing.gaps[0] == pytest.approx(0.4, abs=0.19)
    assert 0 < timing.wait_s < 0.5


def test_the_wall_clock_is_not_used(monkeypatch, way):
    """CASES L07."""
    times = iter(range(10**9, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(times)))
    with Scripted((SSE, *[step for _, data in CLEAN + TAIL for step in (0.02, data)])) as server:
        timing = ask(server, way=way).timing
    assert 0 < timing.first_token_s < timing.last_token_s <= timing.end_s < 60
    assert all(gap >= 0 for gap in timing.gaps)  # two packets may come as one where the machine is busy


def note(age: float) -> list[tuple[int, int, bytes]]:
    at = time.clock_gettime(time.CLOCK_REALTIME) - age
    return [(socket.SOL_SOCKET, ARRIVAL, NOTE.pack(int(at), int(at % 1 * 1e9)))]


@pytest.mark.skipif(not ARRIVAL, reason="only Linux tells the arrival of a packet")
def test_an_arrival_is_the_packets_and_a_stepped_wall_clock_is_not_believed():
    assert arrival(note(0.004), 100.0, 99.0) == pytest.approx(99.996, abs=0.002)
    for age in (-3600.0, 3600.0, 1.5):
        assert arrival(note(age), 100.0, 99.0) == 100.0
    assert arrival([], 100.0, 99.0) == 100.0


@pytest.mark.skipif(not ARRIVAL, reason="only Linux tells the arrival of a packet")
def test_stamps_are_of_the_arrival_while_the_interpreter_is_busy():
    """The thread that reads is kept from it for 60 ms after each packet came; the stamps do not move."""
    steps = [step for _ in range(5) for step in (0.1, delta(content="a"))]
    with Scripted((SSE, *steps, delta(finish_reason="stop"), usage(5), DONE)) as server:
        timing = ask(server, on_event=lambda _: time.sleep(0.16)).timing
    assert timing.first_token_s == pytest.approx(0.1, abs=0.05)
    assert timing.last_token_s == pytest.approx(0.5, abs=0.12)


FRAMED = {
    "chunked": (
        {"Transfer-Encoding": "chunked"},
        b"3\r\nabc\r\nA;x=y\r\n0123456789\r\n1\n\n\n0\r\n\r\n",
        b"abc0123456789\n",
        False,
    ),
    "chunked, no end": ({"Transfer-Encoding": "chunked"}, b"3\r\nabc\r\n", b"abc", True),
    "chunked, cut": ({"Transfer-Encoding": "chunked"}, b"3\r\nab", b"ab", True),
    "length": ({"Content-Length": "3"}, b"abc", b"abc", False),
    "length, cut": ({"Content-Length": "4"}, b"abc", b"abc", True),
    "close": ({}, b"abc", b"abc", False),
}


@pytest.mark.parametrize(("headers", "data", "body", "short"), FRAMED.values(), ids=FRAMED)
def test_framing_in_every_split(headers, data, body, short):
    for places in [(), *((place,) for place in range(1, len(data))), range(1, len(data))]:
        framing, parts = Framing(headers), []
        for _, piece in [*cut([(0.0, data)], places), (0.0, b"")]:
            if not framing.ended:
                parts.append(framing.feed(piece))
        assert (b"".join(parts), framing.short) == (body, short)


@pytest.mark.parametrize("line", [b"xyz\r\n", b"zz\r\nab\r\n", b"-5\r\n", b"+5\r\n", b"0x5\r\n"])
def test_a_chunk_without_a_size_is_no_http(line):
    with pytest.raises(RequestError) as caught:
        Framing({"Transfer-Encoding": "chunked"}).feed(line)
    assert caught.value.code == "PROTOCOL"


def test_events_are_live():
    seen = []
    with Scripted((SSE, delta(content="a"), 0.3, delta(content="b", finish_reason="stop"), usage(2), DONE)) as server:
        ask(server, on_event=lambda said: seen.append((said.text, time.monotonic())))
    assert [text for text, _ in seen] == ["a", "b"]
    assert seen[1][1] - seen[0][1] > 0.2


def test_many_threads_share_an_endpoint():
    with Scripted((SSE, *[step for _, data in CLEAN + TAIL for step in (0.01, data)])) as server:
        endpoint, replies = Endpoint(server.url, "m"), []
        threads = [
            threading.Thread(target=lambda: replies.append(endpoint.chat(MESSAGES, max_tokens=2, stream=True)))
            for _ in range(32)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [reply.text for reply in replies] == ["Hello"] * 32
    assert len(server.requests) == 32


# --- what the server says of itself


def test_models():
    cards = [{"id": "a", "max_model_len": 327680, "root": "/model"}, {"id": "b", "max_model_len": "327680"}]
    cards += [
        {"id": "c"},
        {"id": "d", "max_model_len": None},
        {"id": "e", "max_model_len": "many"},
        {"id": "f", "max_model_len": True},
    ]
    with Scripted((whole({"data": cards}),)) as server:
        models = Endpoint(server.url, "m").models()
    assert [card.id for card in models] == list("abcdef")
    assert [card.max_model_len for card in models] == [327680, 327680, None, None, None, None]
    assert [bool(card.problem) for card in models] == [False, False, True, True, True, True]
    assert models[0].root == "/model"


@pytest.mark.parametrize("body", [{}, {"data": None}, {"data": ["a"]}, b"<html>", {"error": {"message": "no"}}])
def test_models_that_are_none(body):
    with Scripted((whole(body),)) as server, pytest.raises(EndpointError):
        Endpoint(server.url, "m").models()


def test_version_health_and_metrics():
    with Scripted((whole({"version": "0.26.0"}),)) as server:
        assert Endpoint(server.url, "m").version() == "0.26.0"
    with Scripted((whole(b""),), (whole(b"", "503 Down"),), (RESET,)) as server:
        assert [Endpoint(server.url, "m").health() for _ in range(3)] == [True, False, False]
    with Scripted(
        (whole(b"a_total 3\n", kind="text/plain"),), (whole(b"a_total 3\n", "404 Not Found"),), (RESET,)
    ) as server:
        readings = [Endpoint(server.url, "m").metrics() for _ in range(3)]
    assert [reading.value("a_total") for reading in readings] == [3, None, None]
    assert "404" in readings[1].problem
    assert "SERVER_LOST" in readings[2].problem


def test_tokenize_detokenize_and_render():
    with Scripted(
        (whole({"tokens": [1, 2]}),), (whole({"prompt": "ab"}),), (whole({"token_ids": [1, 2, 3]}),)
    ) as server:
        endpoint = Endpoint(server.url, "m")
        assert endpoint.tokenize("ab") == (1, 2)
        assert endpoint.detokenize((1, 2)) == "ab"
        rendered = endpoint.render(MESSAGES)
    assert (rendered.ids, rendered.how) == ((1, 2, 3), "render")


@pytest.mark.parametrize("status", ["403 Forbidden", "404 Not Found"])
def test_render_falls_back_and_says_so(status):
    with Scripted((whole({"detail": "no"}, status),), (whole({"tokens": [7]}),)) as server:
        rendered = Endpoint(server.url, "m").render(MESSAGES)
    assert (rendered.ids, rendered.how) == ((7,), "tokenize")
    assert json.loads(server.requests[1][1])["messages"] == MESSAGES


def test_generate_one():
    done = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
    with Scripted((whole(done),)) as server:
        assert Endpoint(server.url, "m").generate_one(deadline_s=5).usage.completion_tokens == 1
    assert json.loads(server.requests[0][1])["max_tokens"] == 1


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", " http://h:1/v1"])
def test_base_urls(url):
    assert Endpoint(url, "m").base_url == "http://h:1"


def test_base_urls_with_paths_and_ipv6():
    assert Endpoint("https://h/proxy/v1", "m").base_url == "https://h/proxy"
    assert Endpoint("http://[fd00::10]:8888/v1", "m").base_url == "http://[fd00::10]:8888"


@pytest.mark.parametrize(
    "url",
    [
        "h:1",
        "ftp://h",
        "http://",
        "http://u:secret@h:1",
        "http://u@h",
        "http://fd00::10:8888",
        "http://::1",
        "http://h:x",
        "http://[fe80::1%eth0]:1",
        "http://h/v1?a=b",
        "",
    ],
)
def test_base_urls_that_are_refused(url):
    with pytest.raises(ConfigError) as caught:
        Endpoint(url, "m")
    assert caught.value.code == "USAGE"
    assert "secret" not in str(caught.value)


def test_an_ipv6_server():
    try:
        probe = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 loopback on this machine")
    with probe:
        port = probe.getsockname()[1]
        threading.Thread(target=lambda: probe.accept()[0].close(), daemon=True).start()
        with pytest.raises(RequestError) as caught:
            Endpoint(f"http://[::1]:{port}/v1", "m").models()
    assert caught.value.code == "SERVER_LOST"


def test_errors_travel_between_processes():
    error, _ = failure(SSE, CLEAN[1][1])
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.code, copy.message, copy.partial, copy.status) == (error.code, error.message, "Hel", 200)


RECORDED = Path(__file__).parents[2] / "shared/data/logs/vllm-0.26.0-h200-tp2-ngram/stream.txt"


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded stream of vLLM 0.26 is not on this machine")
def test_a_recorded_stream_in_many_splits():
    segments = [(1.0, RECORDED.read_bytes())]
    first = outcome(segments)
    assert (first["tokens"], first["finish"], first["done"]) == (60, "length", True)
    assert first["text"].startswith("1. Red\n2. Green\n3. Blue")
    chance = random.Random(5)
    for _ in range(150):
        places = sorted(chance.sample(range(1, len(segments[0][1])), chance.randrange(1, 200)))
        assert outcome(cut(segments, places)) == first
