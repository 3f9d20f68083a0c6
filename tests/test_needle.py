"""The needle lane against a server of these tests' own: what is sent, what is not, and what each answer means."""

import contextlib
import copy
import functools
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from test_tokens import GPT2, made

from pytest_dspark.checks import resolve
from pytest_dspark.checks.needle import CHECKS, cache_state, depth, finished_cells, judge, measure
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import BlockedError, DsparkError
from pytest_dspark.live import Live
from pytest_dspark.verdict import Finding, Status

BEFORE, AFTER = [1, 2, 3], [4, 5]
SETTINGS = {
    "needle": "The access code of the {label} is {code}.",
    "question": "What is the access code of the {label}?",
    "deadline_s": 20.0,
    "deadline_floor_s": 10.0,
    "stall_s": 0.4,
    "poll_s": 0.05,
    "knobs": {},
    "models": [],
    "log_pool": None,
    "earlier": [],
}


class Words:
    """A vocabulary of words that grows: a word with the blank before it, or one blank character."""

    def __init__(self):
        self.ids, self.texts, self.lock = {}, {}, threading.Lock()

    def encode(self, text):
        with self.lock:
            found = [self.ids.setdefault(word, 10 + len(self.ids)) for word in re.findall(r" ?\S+|\s", text)]
            self.texts = {number: word for word, number in self.ids.items()}
        return found

    def decode(self, ids):
        return "".join(self.texts.get(number, "") for number in ids)


class Server(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def send(self, body, kind="application/json", status=200):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/metrics":
            self.send(self.server.metrics(), "text/plain")
        else:
            self.send({"data": [{"id": "m", **self.server.card}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posts.append(self.path)
        if self.path.endswith("/render"):
            self.send({"detail": "Not Found"}, status=404)
        elif self.path == "/tokenize":
            self.send({"tokens": self.server.ids(body)})
        else:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.generate(body)

    def generate(self, body):
        ids = self.server.ids(body)
        self.server.bodies.append(body)
        self.server.hold(self)
        if self.server.drop:
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        text = self.server.answer(self.server.words.decode(ids))
        said = {"text": text} if "prompt" in body else {"delta": {"content": text}}
        self.event({"choices": [{"index": 0, **said, "finish_reason": self.server.finish}]})
        with self.server.lock:
            self.server.prompt_tokens += len(ids)
        if self.server.usage is not None:
            counted = {"prompt_tokens": len(ids) + self.server.usage, "completion_tokens": 3}
            self.event({"choices": [], "usage": counted})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, data):
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()


class Engine(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Server)
        self.words, self.lock = Words(), threading.Lock()
        self.card = {"max_model_len": 4096}
        self.pool, self.running, self.waiting, self.hits, self.prompt_tokens = "10000", 0, 0, 0, 0
        self.posts, self.bodies = [], []
        self.usage, self.finish, self.drop = 0, "stop", False
        self.hold = lambda _: None
        self.answer = right

    def metrics(self):
        label = f'kv_cache_size_tokens="{self.pool}"' if self.pool else 'block_size="16"'
        return (
            f"vllm:cache_config_info{{{label}}} 1.0\nvllm:num_requests_running {self.running}\n"
            f"vllm:num_requests_waiting {self.waiting}\nvllm:prompt_tokens_total {self.prompt_tokens}\n"
            f"vllm:prefix_cache_hits_total {self.hits}\n"
        )

    def ids(self, body):
        given = body.get("prompt")
        if isinstance(given, list):
            return given
        if given is not None:
            return self.words.encode(given)
        return BEFORE + self.words.encode(body["messages"][0]["content"]) + AFTER

    @property
    def generations(self):
        return [path for path in self.posts if path.endswith("completions")]


def told(text, label):
    return re.search(rf"access code of the {label} is (\S+)\.", text)[1]


def right(text):
    return told(text, text.rpartition("access code of the ")[2].rstrip("?"))


def decoy(text):
    asked = text.rpartition("access code of the ")[2].rstrip("?")
    return next(code for label, code in re.findall(r"code of the ([a-z ]+) is (\S+)\.", text) if label != asked)


@pytest.fixture
def engine():
    made = Engine()
    threading.Thread(target=functools.partial(made.serve_forever, 0.02), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def cell(engine, percent=50, **changes):
    endpoint = Endpoint(f"http://127.0.0.1:{engine.server_port}", "m")
    return measure(percent, endpoint, settings=SETTINGS | changes, live=Live())


def said(engine, percent=50, **changes):
    finding = cell(engine, percent, **changes)
    again = Finding(finding.check, json.loads(json.dumps(finding.data)))
    assert judge(again, {}) == judge(finding, {}), "a stored finding must be judged alike"
    return judge(finding, {})


# --- sizes


@pytest.mark.parametrize(
    ("window", "reserve", "depths"),
    [
        (1_048_576, 64, (262_128, 524_256, 943_660)),
        (1_048_576, 256, (262_080, 524_160, 943_488)),
        (327_680, 64, (81_904, 163_808, 294_854)),
        (3400, 64, (834, 1668, 3002)),
        (8192, 64, (2032, 4064, 7315)),
    ],
)
def test_depths_are_those_that_were_published(window, reserve, depths):
    assert tuple(depth(window, reserve, percent) for percent in (25, 50, 90)) == depths
    assert depths == tuple(int((window - reserve) * share) for share in (0.25, 0.5, 0.9))


def test_every_cell_is_a_check_that_holds_the_engine_alone():
    assert set(CHECKS) == {"25pct", "50pct", "90pct"} and all(check.exclusive for check in CHECKS.values())
    assert resolve("needle.90pct") is CHECKS["90pct"]


# --- a cell that is sent


@pytest.mark.parametrize("percent", [25, 50, 90])
def test_a_cell_is_sent_once_at_its_exact_length(engine, percent):
    finding = cell(engine, percent)
    data = finding.data
    assert judge(finding, {}).passed and finding.check == f"needle.{percent}pct"
    assert engine.generations == ["/v1/completions"]
    sent = engine.bodies[0]
    assert len(sent["prompt"]) == data["planned_tokens"] == data["reply"]["prompt_tokens"] == 4032 * percent // 100
    assert sent["prompt"][:3] == BEFORE and sent["prompt"][-2:] == AFTER and sent["max_tokens"] == 64
    assert sent["temperature"] == 0.0
    digest = hashlib.sha256(json.dumps(sent["prompt"], separators=(",", ":")).encode()).hexdigest()
    assert data["prompt_sha256"] == data["reply"]["prompt_sha256"] == digest
    for one in [*data["needles"], *data["decoys"]]:
        stands = engine.words.decode(sent["prompt"][one["offset"] : one["offset"] + one["tokens"]])
        assert stands == f" {one['sentence']}"
    assert abs(data["needles"][0]["offset"] / data["planned_tokens"] - 0.5) < 0.05 and len(data["decoys"]) == 2
    assert data["template"] == {"before": 3, "after": 2, "how": "tokenize"}
    assert data["cache"]["state"] == "cold" and data["pool_source"].startswith("metrics")
    assert "no tokenizer.json on this machine" in data["counted_by"]


def test_text_to_chat_is_sized_until_the_server_counts_as_planned(engine):
    finding = cell(engine, send="chat")
    assert judge(finding, {}).passed and engine.generations == ["/v1/chat/completions"]
    assert finding.data["reply"]["prompt_tokens"] == finding.data["planned_tokens"] == 2016
    assert finding.data["method"] == "text to /v1/chat/completions"


def test_several_needles(engine):
    engine.answer = lambda text: ", ".join(
        told(text, label) for label in text.rpartition("codes of the ")[2].rstrip("?").split(" and of the ")
    )
    changes = {"positions": [0.1, 0.5, 0.9], "question": "What are the codes of the {labels}?"}
    finding = cell(engine, 90, **changes)
    assert judge(finding, {}).passed and len(finding.data["needles"]) == 3
    engine.answer = decoy
    assert said(engine, 90, **changes).status is Status.FAIL


def test_a_tokenizer_of_another_model_is_not_used(engine, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(made(GPT2)), "utf-8")
    finding = cell(engine, models=[str(tmp_path)])
    assert judge(finding, {}).passed and "is not the server's" in finding.data["counted_by"]
    with pytest.raises(DsparkError, match="not those of"):
        cell(engine, tokenizer=str(tmp_path / "tokenizer.json"))
    assert len(engine.generations) == 1


def test_cached_prompts_are_marked(engine):
    engine.hold = lambda _: setattr(engine, "hits", engine.hits + 128)
    finding = cell(engine)
    assert judge(finding, {}).passed and finding.data["cache"]["state"] == "warm"
    assert finding.data["cache"]["prefix_hits"] == 128 and finished_cells([finding.data]) == []


@pytest.mark.parametrize(
    ("hits", "cached", "state"),
    [
        (0.0, None, "cold"),
        (0.0, 5, "cold"),
        (3.0, 0, "warm"),
        (None, 4, "warm"),
        (None, 0, "cold"),
        (None, None, "unknown"),
    ],
)
def test_unknown_is_not_cold(hits, cached, state):
    assert cache_state(hits, cached) == state


# --- a cell that is not sent


@pytest.mark.parametrize(
    ("pool", "log", "source"), [("2000", 9000, "metrics: kv_cache_size_tokens"), ("", 2079, "engine log")]
)
def test_what_the_pool_cannot_hold_is_not_sent(engine, pool, log, source):
    engine.pool = pool
    verdict = said(engine, log_pool=log)
    assert (verdict.status, verdict.code, engine.posts) == (Status.CAPACITY, "CAPACITY", [])
    assert source in verdict.message and "the cell needs 2,016 and 64 for the answer" in verdict.message
    assert f"{int(pool or log):,} tokens" in verdict.message


@pytest.mark.parametrize("log", [2080, None])
def test_what_just_fits_and_what_nobody_knows_is_sent(engine, log):
    engine.pool = ""
    finding = cell(engine, log_pool=log)
    assert judge(finding, {}).passed and len(engine.generations) == 1
    assert finding.data["pool_tokens"] == log and finding.data["pool_source"].startswith(
        "engine log" if log else "unknown"
    )


@pytest.mark.parametrize("card", [{}, {"max_model_len": None}, {"id": "other", "max_model_len": 4096}])
def test_a_window_that_is_not_told_is_an_error(engine, card):
    engine.card = card
    with pytest.raises(DsparkError, match="no window of m") as caught:
        cell(engine)
    assert caught.value.code == "PROTOCOL" and engine.posts == []


def test_a_window_smaller_than_the_question_is_refused(engine):
    engine.card = {"max_model_len": 128}
    with pytest.raises(DsparkError, match="template, needles and question take"):
        cell(engine)
    assert engine.generations == []


def test_a_filler_that_speaks_the_template_is_refused(engine, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("It rained. <|im_end|> The end. " * 400)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(DsparkError, match=re.escape("the filler holds '<|'")):
        cell(engine, filler=str(path), filler_sha256=digest)
    path.write_text("".join(f"It rained on {'and '.join(['Monday '] * (n % 9 + 1))}. " for n in range(900)))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    finding = cell(engine, filler=str(path), filler_sha256=digest)
    assert judge(finding, {}).passed and finding.data["filler"] == {"kind": "file", "sha256": digest}


# --- stuck, slow, broken


def test_a_prompt_that_is_never_scheduled_ends_soon(engine):
    engine.waiting = 1
    gone = threading.Event()
    engine.hold = lambda _: gone.wait(10)
    begin = time.monotonic()
    verdict = said(engine)
    gone.set()
    assert (verdict.status, verdict.code) == (Status.ERROR, "CAPACITY_STALL") and time.monotonic() - begin < 4
    assert (
        "2,016 tokens was accepted and never scheduled" in verdict.message
        and "1 waiting, none running" in verdict.message
    )
    assert len(engine.generations) == 1


def test_after_a_stall_larger_cells_are_blocked_and_smaller_ones_are_not(engine):
    stuck = {"stuck": "for 300 s 1 waiting", "planned_tokens": 1008}
    with pytest.raises(BlockedError, match="a prompt of 1,008 tokens was never scheduled; this one has 2,016"):
        cell(engine, earlier=[stuck])
    assert engine.generations == []
    assert said(engine, earlier=[stuck | {"planned_tokens": 3000}]).passed


def test_a_long_prefill_is_left_alone(engine):
    engine.running = 1
    engine.hold = lambda _: time.sleep(1.5)
    assert said(engine).passed and len(engine.generations) == 1


def test_a_server_that_does_not_count_or_counts_wrong_is_an_error(engine):
    for usage, words in ((None, "nothing says what was read"), (-1, "the server counted 2,015 prompt tokens")):
        engine.usage = usage
        verdict = said(engine)
        assert (verdict.status, verdict.code) == (Status.ERROR, "PROTOCOL") and words in verdict.message


def test_an_empty_answer_is_the_models_failure(engine):
    engine.answer = lambda _: ""
    assert (said(engine).status, said(engine).code) == (Status.FAIL, "NO_ANSWER")


def test_a_lost_server_is_an_error_and_nothing_is_sent_again(engine):
    engine.drop, engine.running = True, 1
    with pytest.raises(DsparkError, match=r"needle\.50pct of 2,016 tokens, done unknown") as caught:
        cell(engine)
    assert caught.value.code == "SERVER_LOST" and len(engine.generations) == 1


def test_a_deadline_is_an_error_and_nothing_is_sent_again(engine):
    engine.running = 1
    gone = threading.Event()
    engine.hold = lambda _: gone.wait(10)
    with pytest.raises(DsparkError, match="not finished after") as caught:
        cell(engine, deadline_s=0.5, deadline_floor_s=0.5)
    gone.set()
    assert caught.value.code == "DEADLINE" and len(engine.generations) == 1


def test_a_deadline_below_the_floor_is_refused(engine):
    with pytest.raises(DsparkError, match="deadline_s is 5, the floor is 10"):
        cell(engine, deadline_s=5.0)
    assert engine.posts == []


# --- judging


@pytest.fixture
def good(engine):
    return copy.deepcopy(dict(cell(engine).data))


def with_reply(data, **changes):
    return Finding("needle.50pct", data | {"reply": data["reply"] | changes})


def test_answers_by_their_content(good):
    code, other = good["needles"][0]["code"], good["decoys"][0]
    wide = code.translate({n: n + 0xFEE0 for n in range(0x30, 0x3A)})
    for text in (
        code,
        f"**{code}**",
        f"The code is {code}.",
        f"```\n{code}\n```",
        f"<think>maybe {other['code']}</think>{code}",
        f"maybe {other['code']}</think>{code}",
        wide,
    ):
        assert judge(with_reply(good, text=text), {}).passed, text
    for text in (
        f"<think>{code}</think>",
        f"1{code}",
        f"{code} or {other['code']}",
        "not found",
        good["nonce"],
        code[:-1],
    ):
        assert judge(with_reply(good, text=text), {}).status is Status.FAIL, text


@pytest.mark.parametrize(
    ("changes", "status", "code", "words"),
    [
        ({"prompt_tokens": 2015}, "ERROR", "PROTOCOL", "the server counted 2,015 prompt tokens, planned were 2,016"),
        (
            {"prompt_tokens": None, "usage_missing": "no usage"},
            "ERROR",
            "PROTOCOL",
            "nothing says what was read: no usage",
        ),
        ({"prompt_sha256": "0" * 64}, "ERROR", "HARNESS", "not the prompt that was built"),
        ({"finish_reason": "length"}, "TOKEN_LIMIT", "TOKEN_LIMIT", "the budget ended after 3 tokens"),
        ({"finish_reason": "length", "text": "", "reasoning": "hm"}, "TOKEN_LIMIT", "TOKEN_LIMIT", "the budget ended"),
        ({"finish_reason": "content_filter"}, "FAIL", "WRONG_ANSWER", "ended with 'content_filter'"),
        ({"text": ""}, "FAIL", "NO_ANSWER", "no final answer"),
        ({"text": "", "reasoning": "It is there."}, "FAIL", "NO_ANSWER", "nothing but reasoning"),
    ],
)
def test_verdicts(good, changes, status, code, words):
    verdict = judge(with_reply(good, **changes), {})
    assert (str(verdict.status), verdict.code) == (status, code) and words in verdict.message


def test_a_decoy_is_named(good):
    one = good["decoys"][1]
    verdict = judge(with_reply(good, text=f"It is {one['code']}."), {})
    assert verdict.status is Status.FAIL and f"{one['code']} is the decoy of the {one['label']}" in verdict.message


def test_time_decides_nothing(good):
    slow = good | {"timing": dict.fromkeys(good["timing"], 1e6)}
    assert judge(Finding("needle.50pct", slow), {}).passed


def test_nothing_asked_and_nothing_sent_are_no_pass(good):
    assert judge(Finding("x", good | {"needles": []}), {}).code == "HARNESS"
    assert judge(Finding("x", good | {"sent": False}), {}).code == "HARNESS"
