"""Bytes to events: the same events for every split of the bytes."""

import random
from itertools import pairwise

import pytest

from pytest_dspark.sse import Event, Parser

BODIES = {
    "lf": (b"data: a\n\ndata: b\n\n", ["a", "b"]),
    "crlf": (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
    "cr": (b"data: a\r\rdata: b\r\r", ["a", "b"]),
    "mixed ends": (b"data: a\r\n\ndata: b\n\r\ndata: c\r\r\ndata: d\n\n", ["a", "b", "c", "d"]),
    "cr cr lf lf": (b"data: a\r\r\n\ndata: b\n\n", ["a", "b"]),
    "comments": (b": ping\n\n: ping\n\n:\n\ndata: a\n: between\ndata: b\n\n", ["a\nb"]),
    "empty data": (b"data:\n\ndata: \n\ndata\n\ndata: a\n\n", ["a"]),
    "no space": (b"data:a\n\ndata:  b\n\n", ["a", " b"]),
    "two lines": (b'data: {"a":\ndata: 1}\n\n', ['{"a":\n1}']),
    "bom": (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
    "bom later is text": ("data: \ufeffa\n\n".encode(), ["\ufeffa"]),
    "separators are text": (
        "data: a\u2028b\u2029c\u0085d\x0b\x0c\x1c\x1d\x1ee\n\n".encode(),
        ["a\u2028b\u2029c\u0085d\x0b\x0c\x1c\x1d\x1ee"],
    ),
    "byte 85": ("data: ✅Å…\n\n".encode(), ["✅Å…"]),
    "four bytes": ("data: 🙂𝄞\n\n".encode(), ["🙂𝄞"]),
    "other fields": (b"id: 7\nretry: 10\nfoo: bar\ndata: a\nnothing\n\n", ["a"]),
    "name only": (b"event: ping\n\ndata: a\n\n", ["a"]),
    "no last blank": (b"data: a\n\ndata: b\n", ["a", "b"]),
    "no last end": (b"data: a\n\ndata: b", ["a", "b"]),
    "ends with cr": (b"data: a\r\rdata: b\r", ["a", "b"]),
}


def packets(data: bytes, cuts) -> list[bytes]:
    places = [0, *sorted(cuts), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


def play(parts) -> list[tuple[str, str]]:
    parser = Parser()
    events = [event for part in parts for event in parser.feed(part, 0.0)]
    return [(event.name, event.data) for event in [*events, *parser.end(0.0)]]


@pytest.mark.parametrize(("body", "expected"), BODIES.values(), ids=BODIES)
def test_every_split_gives_the_same_events(body, expected):
    assert [data for _, data in play([body])] == expected
    first = play([body])
    for one in range(len(body) + 1):
        for two in range(one, len(body) + 1):
            assert play(packets(body, (one, two))) == first
    assert play([body[place : place + 1] for place in range(len(body))]) == first


def test_many_events_cut_anywhere():
    body = b"".join(rest for rest, _ in BODIES.values() if rest.endswith((b"\n\n", b"\r\r", b"\r\n\r\n")))
    first, chance = play([body]), random.Random(7)
    for _ in range(300):
        assert play(packets(body, chance.choices(range(len(body)), k=chance.randrange(1, 40)))) == first


def test_names():
    assert play([b"event: ping\ndata: {}\n\ndata: a\n\n"]) == [("ping", "{}"), ("message", "a")]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_the_stamp_is_that_of_the_completing_byte(end):
    parser, body, stamps = Parser(), (b"data: a" + end * 2) * 2, {}
    for place in range(len(body)):
        for event in parser.feed(body[place : place + 1], float(place)):
            stamps[len(stamps)] = event.stamp
    blank = 7 + len(end)
    assert stamps == {0: float(blank), 1: float(blank + 7 + 2 * len(end))}


def test_what_is_cut_is_marked():
    parser = Parser()
    assert parser.feed(b'data: {"a', 1.0) == []
    assert parser.end(2.0) == [Event('{"a', 2.0, "message", whole=False)]
    assert parser.end(3.0) == []


def test_one_event_of_megabytes_in_small_packets_is_linear():
    body = b"data: " + b"x" * 2_000_000 + b"\n\n"
    parser = Parser()
    events = [event for place in range(0, len(body), 500) for event in parser.feed(body[place : place + 500], 0.0)]
    assert [len(event.data) for event in events] == [2_000_000]
