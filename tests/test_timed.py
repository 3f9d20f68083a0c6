"""Timed rows: a known schedule is reported as it was, and a row that is not ours alone or not cold is void."""

import contextlib
import copy
import itertools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pytest_dspark.checks.concurrency import CHECKS as LADDER
from pytest_dspark.checks.timed import judge_row, measure_row
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import DsparkError
from pytest_dspark.load import Shape, cache_state, foreign, prompts
from pytest_dspark.verdict import Finding

EVENTS, EACH, GAP_S, FIRST_S = 10, 6, 0.1, 0.1


class Scripted(BaseHTTPRequestHandler):
    """Ten events of six tokens, 100 ms apart; counters under vLLM's names."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        c = self.server.counts
        lines = [
            f'vllm:request_success_total{{finished_reason="length"}} {c["requests"]}',
            f"vllm:prompt_tokens_total {c['prompt']}",
        ]
        lines += [f"vllm:generation_tokens_total {c['generated']}", f"vllm:prefix_cache_hits_total {c['hits']}"]
        lines += [f"vllm:request_decode_time_seconds_sum {c['decode_s']}", f"vllm:num_requests_running {c['running']}"]
        lines += ["vllm:num_requests_waiting 0"]
        self.reply("\n".join(lines).encode() + b"\n", "text/plain")

    def reply(self, body, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.complete()

    def complete(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        c = self.server.counts
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        with self.server.lock:
            c["running"] += 1
            c["hits"] += self.server.seen.count(body["prompt"]) * 16
            self.server.seen.append(body["prompt"])
        start = time.monotonic()
        for number in range(EVENTS):
            time.sleep(max(start + FIRST_S + number * GAP_S - time.monotonic(), 0))
            end = "length" if number == EVENTS - 1 else None
            self.event({"choices": [{"index": 0, "text": " w" * EACH, "finish_reason": end}]})
        with self.server.lock:
            c["requests"] += 1
            c["prompt"] += 20
            c["generated"] += EVENTS * EACH
            c["decode_s"] += (EVENTS - 1) * GAP_S
            c["running"] -= 1
        usage = {"prompt_tokens": 20, "completion_tokens": EVENTS * EACH, "total_tokens": 80}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, data):
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()


@pytest.fixture(scope="module")
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    made.counts = dict.fromkeys(("requests", "prompt", "generated", "hits", "decode_s", "running"), 0)
    made.lock, made.seen = threading.Lock(), []
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def endpoint(server):
    return Endpoint(f"http://127.0.0.1:{server.server_port}", "m")


@pytest.fixture(scope="module")
def row(server):
    shape = Shape(tokens=EVENTS * EACH)
    return measure_row("concurrency.c2", Endpoint(f"http://127.0.0.1:{server.server_port}", "m"), shape, 2, 3)


def test_a_known_schedule_is_reported_as_it_was(row):
    quoted = row.data["headline"]
    assert quoted["tpot_s_median"] == pytest.approx(0.9 / 59, abs=0.0008)
    assert quoted["mean_gap_s_median"] == pytest.approx(0.1, abs=0.005)
    assert quoted["tokens_per_event_median"] == 6.0
    assert quoted["first_token_s_median"] == pytest.approx(FIRST_S, abs=0.03)
    assert quoted["output_rate"]["mean"] == pytest.approx(120 / 1.0, rel=0.06)
    assert quoted["output_rate"]["low"] <= quoted["output_rate"]["mean"] <= quoted["output_rate"]["high"]
    for one in row.data["repeats"]:
        assert one["server"]["decode_rate"]["value"] == pytest.approx(59 / 0.9, rel=0.02)
        assert one["server"]["decode_rate_uncorrected"]["value"] == pytest.approx(60 / 0.9, rel=0.02)
    assert judge_row(row, {}).passed, judge_row(row, {})


def test_the_verdict_is_the_same_from_a_stored_row(row):
    stored = Finding(row.check, json.loads(json.dumps(row.data)))
    assert judge_row(stored, {}) == judge_row(row, {})


def test_a_second_client_voids_the_row(server, endpoint):
    other = threading.Thread(target=lambda: endpoint.complete("someone else", max_tokens=60, stream=True))

    def nonce_then_intrude():
        if not other.is_alive() and other.ident is None:
            other.start()
        return "n"

    from pytest_dspark.load import volley

    counter = itertools.count()
    first = volley(endpoint, Shape(tokens=60), 1, lambda: f"{nonce_then_intrude()}{next(counter)}")
    other.join()
    assert "the server counted 2 requests, ours are 1" in foreign(first) or "in flight" in foreign(first), first[
        "server"
    ]


def test_a_repeated_prompt_makes_the_row_warm(endpoint):
    row = measure_row_with_nonce(endpoint, lambda: "the same")
    verdict = judge_row(row, {})
    assert (str(verdict.status), verdict.code) == ("ERROR", "CACHE_WARM")
    assert "warm" in row.data["cache"]


def measure_row_with_nonce(endpoint, nonce):
    from pytest_dspark.checks import timed

    old, timed.nonce = timed.nonce, nonce
    try:
        return measure_row("x", endpoint, Shape(tokens=60), 1, 3)
    finally:
        timed.nonce = old


def changed(row, path, value):
    data = copy.deepcopy(json.loads(json.dumps(row.data)))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return judge_row(Finding(row.check, data), {"max_fairness": 5.0})


@pytest.mark.parametrize(
    ("path", "value", "status", "code"),
    [
        (["repeats", 1, "server", "requests", "server", "value"], 3, "ERROR", "FOREIGN_TRAFFIC"),
        (["repeats", 1, "server", "requests", "server", "value"], None, "ERROR", "FOREIGN_TRAFFIC"),
        (["repeats", 0, "server", "generation_tokens", "server", "value"], 121, "ERROR", "FOREIGN_TRAFFIC"),
        (["repeats", 0, "server", "prompt_tokens", "server", "value"], 41, "ERROR", "FOREIGN_TRAFFIC"),
        (["repeats", 2, "server", "most_in_flight", "server"], 3, "ERROR", "FOREIGN_TRAFFIC"),
        (["repeats", 2, "server", "restarted"], "a counter went back", "ERROR", "FOREIGN_TRAFFIC"),
        (["repeats", 2, "server", "prefix_hits", "value"], 16, "ERROR", "CACHE_WARM"),
        (["repeats", 2, "server", "prefix_hits", "value"], None, "ERROR", "CACHE_WARM"),
        (["repeats", 0, "samples", 1, "completion_tokens"], 59, "FAIL", "WRONG_ANSWER"),
        (["repeats", 0, "samples", 1, "completion_tokens"], None, "ERROR", "PROTOCOL"),
        (["repeats", 0, "samples", 1, "finish_reason"], "stop", "FAIL", "WRONG_ANSWER"),
        (["repeats", 0, "samples", 1, "first_token_s"], None, "FAIL", "NO_ANSWER"),
        (["headline", "fairness"], 9.0, "FAIL", "LIMIT_EXCEEDED"),
        (["headline", "fairness"], None, "FAIL", "LIMIT_EXCEEDED"),
        (["repeats"], [], "ERROR", "HARNESS"),
    ],
)
def test_every_part_of_a_row_can_turn_it_red(row, path, value, status, code):
    verdict = changed(row, path, value)
    assert (str(verdict.status), verdict.code) == (status, code)


def test_cache_state_without_a_counter_needs_every_stream_to_say():
    def one(*cached):
        return {"server": {"prefix_hits": {"value": None}}, "samples": [{"cached_tokens": c} for c in cached]}

    assert [cache_state(one(0, 0)), cache_state(one(0, 3)), cache_state(one(0, None))] == ["cold", "warm", "unknown"]


def test_prompts_differ_from_the_first_word_on():
    counter = itertools.count()
    made = list(prompts(Shape(tokens=1, filler=20), 50, lambda: f"n{next(counter)}"))
    assert len({text.split()[0] for text in made}) == 50


def test_a_level_above_the_profile_is_not_implemented(endpoint):
    settings = {"tokens": 8, "prompt_class": "prose", "deadline_s": 9, "repeats": 3, "knobs": {"MAX_NUM_SEQS": 4}}
    with pytest.raises(DsparkError) as caught:
        LADDER["c8"].measure(endpoint, settings=settings)
    assert caught.value.code == "NOT_IMPLEMENTED"


def test_giving_up_ends_every_stream_at_once(endpoint):
    """A time-out or Ctrl-C in the main thread must not wait for streams that still run."""
    from pytest_dspark.load import volley

    threading.Timer(0.4, endpoint.close).start()
    start = time.monotonic()
    with pytest.raises(DsparkError, match="given up"):
        volley(endpoint, Shape(tokens=60), 4, lambda: str(time.monotonic_ns()))
    assert time.monotonic() - start < 2.5
