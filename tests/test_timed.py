"""Timed rows: a known schedule is reported as it was, and a row that is not ours alone or not cold is void."""

import contextlib
import copy
import itertools
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pytest_dspark import calibration
from pytest_dspark.checks import timed
from pytest_dspark.checks.concurrency import CHECKS as CONCURRENCY
from pytest_dspark.checks.performance import CHECKS as PERFORMANCE
from pytest_dspark.checks.timed import goodput, judge_row, speculation
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import DsparkError
from pytest_dspark.live import Live
from pytest_dspark.load import Shape, bodies, cache_state, in_flight, poisson, prompts, staggered, volley
from pytest_dspark.verdict import Finding

EVENTS, EACH, GAP_S, FIRST_S = 10, 6, 0.1, 0.1
SETTINGS = {
    "tokens": EVENTS * EACH,
    "canary_tokens": EVENTS * EACH,
    "latency_tokens": EVENTS * EACH,
    "deadline_s": 20.0,
    "repeats": 3,
    "knobs": {"MAX_NUM_SEQS": 4},
    "staggered": {"streams": 3, "every_s": 0.2},
    "poisson": {"streams": 4, "per_s": 5.0, "slo": {"first_token_s": 5.0, "tpot_s": 1.0}},
}


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
            prompt = body.get("prompt") or body["messages"]
            c["hits"] += self.server.seen.count(prompt) * 16
            self.server.seen.append(prompt)
        start = time.monotonic()
        for number in range(EVENTS):
            time.sleep(max(start + FIRST_S + number * GAP_S - time.monotonic(), 0))
            end = "length" if number == EVENTS - 1 else None
            said = {"text": " w" * EACH} if "prompt" in body else {"delta": {"content": " w" * EACH}}
            self.event({"choices": [{"index": 0, **said, "finish_reason": end}]})
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


@pytest.fixture(scope="module", autouse=True)
def quick_calibration():
    """Events a millisecond apart, so that a calibration takes half a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "MOST_S", 0.5)
        yield


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
def row(server, quick_calibration):
    endpoint = Endpoint(f"http://127.0.0.1:{server.server_port}", "m")
    return CONCURRENCY["c2"].measure(endpoint, settings=SETTINGS, live=Live())


def test_a_known_schedule_is_reported_as_it_was(row):
    quoted, error = row.data["headline"], row.data["calibration"]
    assert error["events"] >= 460
    assert error["stamp_error_s"]["p50"] < 0.02
    assert quoted["tpot_s_median"] == pytest.approx(0.9 / 59, abs=0.002)
    assert quoted["mean_gap_s_median"] == pytest.approx(0.1, abs=0.01)
    assert quoted["tokens_per_event_median"] == 6.0
    assert quoted["first_token_s_median"] == pytest.approx(FIRST_S, abs=0.09)
    assert quoted["output_rate"]["mean"] == pytest.approx(120 / 1.0, rel=0.15)
    assert quoted["output_rate"]["low"] <= quoted["output_rate"]["mean"] <= quoted["output_rate"]["high"]
    assert quoted["decode"]["client"]["mean"] == pytest.approx(59 / 0.9, rel=0.1)
    assert quoted["decode"]["server"]["mean"] == pytest.approx(59 / 0.9, rel=0.001)
    assert quoted["decode"]["server_uncorrected"]["mean"] == pytest.approx(60 / 0.9, rel=0.001)
    assert row.data["canary"]["before"]["step_s"] == pytest.approx(0.1, abs=0.05)
    assert abs(row.data["canary"]["drift"]) < 0.5
    assert judge_row(row, {"max_drift": 0.5}).passed, judge_row(row, {"max_drift": 0.5})


def test_percentiles_are_withheld_below_their_sample_size(row):
    told = row.data["headline"]["percentiles"]["first_token_s"]
    assert told["n"] == 6
    assert told["p50"] == pytest.approx(FIRST_S, abs=0.09)
    assert (told["p90"], told["p99"]) == (None, None)
    assert told["withheld"] == ["p90 needs 44 samples, there are 6", "p99 needs 459 samples, there are 6"]


def test_the_verdict_is_the_same_from_a_stored_row(row):
    stored = Finding(row.check, json.loads(json.dumps(row.data)))
    assert judge_row(stored, {}) == judge_row(row, {})


def test_a_second_client_voids_the_row(server, endpoint, monkeypatch):
    """Another client asks once, somewhere in the repeats."""
    other = threading.Thread(
        target=lambda: Endpoint(endpoint.base_url, "m").complete("theirs", max_tokens=60, stream=True)
    )
    calls = itertools.count()

    def nonce_and_intrude():
        if next(calls) == 4:
            other.start()
        return str(next(calls))

    monkeypatch.setattr(timed, "nonce", nonce_and_intrude)
    finding = CONCURRENCY["c1"].measure(endpoint, settings=SETTINGS, live=Live())
    other.join()
    verdict = judge_row(finding, {})
    assert (str(verdict.status), verdict.code) == ("ERROR", "FOREIGN_TRAFFIC"), verdict


def test_a_repeated_prompt_makes_the_row_warm(endpoint, monkeypatch):
    monkeypatch.setattr(timed, "nonce", lambda: "the same")
    finding = CONCURRENCY["c1"].measure(endpoint, settings=SETTINGS, live=Live())
    verdict = judge_row(finding, {})
    assert (str(verdict.status), verdict.code) == ("ERROR", "CACHE_WARM")
    assert "warm" in finding.data["cache"]


@pytest.mark.parametrize("name", ["latency", "prefill"])
def test_one_stream_rows(endpoint, name):
    settings = SETTINGS | {"prefill_tokens": 60, "prefill_words": 50}
    finding = PERFORMANCE[name].measure(endpoint, settings=settings, live=Live())
    assert judge_row(finding, settings).passed, judge_row(finding, settings)
    assert finding.data["method"] == ("chat" if name == "latency" else "completions")
    assert finding.data["headline"]["first_answer_s_median"] == pytest.approx(FIRST_S, abs=0.09)
    assert finding.data["headline"]["prefill"]["client"]["mean"] == pytest.approx(20 / FIRST_S, rel=0.5)


def test_staggered_and_open_loop_arrivals(endpoint):
    finding = CONCURRENCY["staggered"].measure(endpoint, settings=SETTINGS, live=Live())
    assert judge_row(finding, SETTINGS).passed, judge_row(finding, SETTINGS)
    begins = [one["at_s"] for one in finding.data["repeats"][0]["samples"]]
    assert [later - earlier for earlier, later in itertools.pairwise(begins)] == pytest.approx([0.2, 0.2], abs=0.15)
    finding = CONCURRENCY["poisson"].measure(endpoint, settings=SETTINGS, live=Live())
    assert judge_row(finding, SETTINGS).passed, judge_row(finding, SETTINGS)
    good = finding.data["headline"]["goodput"]
    assert (good["met"], good["of"], good["high"]) == (12, 12, 1.0)
    tight = judge_row(finding, SETTINGS | {"min_goodput": 1.01})
    assert (str(tight.status), tight.code) == ("FAIL", "LIMIT_EXCEEDED")


def test_poisson_arrivals_have_the_stated_rate_and_are_the_same_for_a_seed():
    arrivals = poisson(20_000, 5.0, "a")
    assert arrivals[0] == 0.0
    assert arrivals[-1] / 20_000 == pytest.approx(0.2, rel=0.03)
    assert arrivals == poisson(20_000, 5.0, "a") != poisson(20_000, 5.0, "b")
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.01)
    assert staggered(3, 0.5) == (0.0, 0.5, 1.0)


def test_in_flight_counts_what_overlaps():
    def one(at_s, end_s):
        return {"at_s": at_s, "end_s": end_s}

    assert in_flight([one(0, 1), one(0.5, 1), one(2, 1)]) == 2
    assert in_flight([one(0, 1), one(1.1, 1)]) == 1
    assert in_flight([one(0, 1), one(1.1, 1)], slack_s=0.25) == 2


def test_goodput_counts_the_wait_and_the_time_per_token():
    def stream(wait_s, first, tpot):
        return {"wait_s": wait_s, "first_token_s": first, "tpot_s": tpot, "due_s": 1.0, "end_s": 1.0}

    slo = {"first_token_s": 1.0, "tpot_s": 0.1}
    streams = [stream(0, 0.9, 0.1), stream(0.2, 0.9, 0.1), stream(0, 0.9, 0.11), stream(0, None, None)]
    good = goodput([{"samples": streams}], slo)
    assert (good["met"], good["of"], good["share"]) == (1, 4, 0.25)
    assert good["per_s"] == pytest.approx(1 / 2.2)


def drafted(drafts, accepted, seconds, tokens=0, requests=0, reason=None):
    told = {"drafts": drafts, "accepted_tokens": accepted, "decode_s": seconds}
    figures = {key: {"value": value, "reason": reason} for key, value in told.items()}
    both = {"requests": requests, "generation_tokens": tokens}
    return {"server": figures | {key: {"server": {"value": value}, "ours": value} for key, value in both.items()}}


def test_speculation_keeps_length_and_steps_apart():
    """A drafting model: each step drafts, so the accepted length is the tokens a step."""
    told = speculation([drafted(100, 300, 5.0, 401, 1), drafted(100, 340, 5.0, 441, 1)])
    assert told["accepted_length"] == told["tokens_per_step"] == pytest.approx(4.2)
    assert told["steps_per_s"] == pytest.approx(20.0)
    nothing = {"accepted_length": None, "tokens_per_step": None, "steps_per_s": None}
    assert speculation([drafted(None, None, 5.0, reason="no drafts")]) == {**nothing, "reason": "no drafts"}
    assert speculation([drafted(0, 0, 5.0)]) == {**nothing, "reason": "nothing was drafted"}


def test_steps_without_a_draft_are_steps():
    """N-gram drafts, as real vLLM 0.26 counted them: 18 of the 48 steps drafted, and 49 events came."""
    told = speculation([drafted(18, 79, 1.09900197, 128, 1)])
    assert told["accepted_length"] == pytest.approx(5.39, abs=0.01)
    assert told["tokens_per_step"] == pytest.approx(127 / 48)
    assert told["steps_per_s"] * told["tokens_per_step"] == pytest.approx(115.55939249135102)


def test_the_canary_lane(endpoint):
    finding = PERFORMANCE["canary"].measure(endpoint, settings=SETTINGS, live=Live())
    judge = PERFORMANCE["canary"].judge
    assert judge(finding, SETTINGS | {"max_drift": 1.0}).passed
    assert len(finding.data["steps"]) == 5
    for change, code in (
        ({"spread": 0.4}, "DRIFT"),
        ({"spread": None}, "DRIFT"),
        ({"asked": 61}, "WRONG_ANSWER"),
        ({"steps": [*finding.data["steps"][:4], finding.data["steps"][4] | {"foreign": "theirs"}]}, "FOREIGN_TRAFFIC"),
    ):
        assert judge(Finding("x", {**finding.data, **change}), {"max_drift": 0.3}).code == code


def test_what_runs_is_shown_while_it_runs(endpoint):
    stream = Terminal()
    CONCURRENCY["c2"].measure(endpoint, settings=SETTINGS, live=Live(stream))
    text = "".join(stream.said)
    assert re.search(
        r"dspark: concurrency.c2, warm-up 1: 2 in flight, 0 done, ([\d.]+ tok/s|\d+ events), \d+ s", text
    ), text
    assert re.search(r"concurrency.c2, repeat 2 of 3: .*about \d+ s left", text), text
    assert re.search(r"dspark: concurrency.c2: [\d.]+ \([\d.]+ to [\d.]+\) tok/s, first token [\d.]+ ms\n$", text), text


class Terminal:
    def __init__(self, terminal=True):
        self.said, self.terminal = [], terminal

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.said.append(text)

    def flush(self):
        pass


def test_a_log_gets_one_line_a_minute_and_the_kept_ones():
    moments = iter([0.0, 1.0, 61.0, 62.0, 63.0, 64.0])
    log = Terminal(terminal=False)
    live = Live(log, clock=lambda: next(moments))
    for text in ("at 1 s", "at 61 s", "at 62 s"):
        live.show(text)
    live.line("kept")
    assert "".join(log.said) == "dspark: at 61 s\ndspark: kept\n"


def test_silence_is_silent(capfd):
    live = Live(None)
    live.show("x")
    live.line("x")
    live.clear()
    assert capfd.readouterr() == ("", "")


def changed(row, path, value):
    data = copy.deepcopy(json.loads(json.dumps(row.data)))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return judge_row(Finding(row.check, data), {"max_fairness": 5.0, "max_drift": 0.5})


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
        (["calibration"], None, "ERROR", "HARNESS"),
        (["calibration", "events"], 0, "ERROR", "HARNESS"),
        (["canary", "drift"], 0.6, "ERROR", "DRIFT"),
        (["canary", "drift"], -0.6, "ERROR", "DRIFT"),
        (["canary", "drift"], None, "ERROR", "DRIFT"),
        (["canary", "before", "foreign"], "theirs", "ERROR", "FOREIGN_TRAFFIC"),
        (["canary", "after", "foreign"], "theirs", "ERROR", "FOREIGN_TRAFFIC"),
    ],
)
def test_every_part_of_a_row_can_turn_it_red(row, path, value, status, code):
    verdict = changed(row, path, value)
    assert (str(verdict.status), verdict.code) == (status, code)


def test_an_infinite_drift_is_recorded_and_not_judged(row):
    data = json.loads(json.dumps(row.data)) | {"canary": {**row.data["canary"], "drift": None}}
    assert judge_row(Finding(row.check, data), {"max_drift": float("inf")}).passed
    assert judge_row(Finding(row.check, data), {"max_drift": 0.5}).code == "DRIFT"


def test_cache_state_without_a_counter_needs_every_stream_to_say():
    def one(*cached):
        return {"server": {"prefix_hits": {"value": None}}, "samples": [{"cached_tokens": c} for c in cached]}

    assert [cache_state(one(0, 0)), cache_state(one(0, 3)), cache_state(one(0, None))] == ["cold", "warm", "unknown"]


def test_prompts_differ_from_the_first_word_on():
    counter = itertools.count()
    made = list(prompts(Shape(tokens=1, filler=20), 50, lambda: f"n{next(counter)}"))
    assert len({text.split()[0] for text in made}) == 50


def test_a_chat_differs_from_its_first_message_on():
    numbers = itertools.count()
    made = list(bodies(Shape(tokens=4, chat=True), 20, lambda: f"n{next(numbers)}"))
    assert len({body["messages"][0]["content"] for body in made}) == 20
    assert all(body["min_tokens"] == body["max_tokens"] == 4 and body["ignore_eos"] for body in made)


def test_a_level_above_the_profile_is_not_implemented(endpoint):
    with pytest.raises(DsparkError) as caught:
        CONCURRENCY["c8"].measure(endpoint, settings=SETTINGS, live=Live())
    assert caught.value.code == "NOT_IMPLEMENTED"


def test_giving_up_ends_every_stream_at_once(endpoint):
    """A time-out or Ctrl-C in the main thread must not wait for streams that still run."""
    threading.Timer(0.4, endpoint.close).start()
    start = time.monotonic()
    with pytest.raises(DsparkError, match="given up"):
        volley(endpoint, Shape(tokens=60), (0.0,) * 4, lambda: str(time.monotonic_ns()))
    assert time.monotonic() - start < 2.5
