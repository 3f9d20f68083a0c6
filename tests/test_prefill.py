"""Progress and stalls of a long prefill, from readings alone."""

import io
import itertools

import pytest

from pytest_dspark.live import Live
from pytest_dspark.metrics import read_metrics
from pytest_dspark.prefill import (
    COUNTER,
    KV_USE,
    Curve,
    Job,
    Look,
    StallRule,
    Watcher,
    fitted,
    hosts_text,
    look_at,
    progress,
    seconds_left,
    told,
    watched,
)

JOB = Job("needle.50pct", 1000, 4000)
START = Look(0.0, 0.0, 0.0, 0.0, 500.0)


def look(at_s=1.0, running=1.0, waiting=0.0, kv_share=0.0, prompt_tokens=500.0):
    return Look(at_s, running, waiting, kv_share, prompt_tokens)


@pytest.mark.parametrize(
    ("now", "job", "tokens", "by"),
    [
        (look(kv_share=0.1), JOB, 400, KV_USE),
        (look(prompt_tokens=700.0), JOB, 200, COUNTER),
        (look(kv_share=0.1, prompt_tokens=700.0), JOB, 400, KV_USE),
        (look(kv_share=0.1), Job("x", 1000, None), None, "neither KV use nor the prompt counter has moved"),
        (look(), JOB, None, "neither KV use nor the prompt counter has moved"),
        (look(kv_share=None, prompt_tokens=None), JOB, None, "the server tells neither"),
        (look(kv_share=0.9), JOB, 1000, KV_USE),
    ],
)
def test_progress_is_what_moves(now, job, tokens, by):
    found = progress(START, now, job)
    assert found.tokens == tokens and found.by.startswith(by)


def test_a_reading_of_real_names():
    text = "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.25\nvllm:prompt_tokens_total 7\n"
    assert look_at(read_metrics(text), 3.0) == Look(3.0, 1.0, 2.0, 0.25, 7.0)
    assert look_at(read_metrics("", problem="no answer"), 3.0) == Look(3.0, None, None, None, None)


def test_the_curve_goes_through_finished_cells():
    assert fitted([]) is None and fitted([(0, 1), (5, 0)]) is None
    one = fitted([(1000, 2.0)])
    assert one is not None and one.seconds(2000) == pytest.approx(4.0)
    two = fitted([(n, 0.001 * n + 1e-6 * n * n) for n in (1000, 2000, 3000)])
    assert (two.linear, two.square, two.cells) == (pytest.approx(0.001), pytest.approx(1e-6), 3)
    for points in ([(1000, 5.0), (2000, 6.0)], [(1000, 1.0), (2000, 9.0)]):
        curve = fitted(points)
        assert curve.linear >= 0 and curve.square >= 0 and curve.seconds(4000) > 0


def test_seconds_left():
    curve = Curve(0.01, 0.0, 2)
    assert seconds_left(JOB, 400, 3.0, curve) == (pytest.approx(6.0), "curve of 2 finished")
    assert seconds_left(JOB, None, 3.0, curve)[0] == pytest.approx(7.0)
    assert seconds_left(JOB, 250, 3.0, None) == (9.0, "at this rate")
    assert seconds_left(JOB, None, 3.0, None) == (None, "")
    assert seconds_left(JOB, None, 30.0, curve)[0] == 0.0


def test_the_line_says_what_moves():
    line = told(JOB, progress(START, look(kv_share=0.1), JOB), 8.0, None)
    assert line == (
        "needle.50pct: prefill 400 of 1,000 tokens (40 %, by KV use), 50 tok/s, 0:00:08, about 0:00:12 left (at this rate)"
    )
    still = told(JOB, progress(START, look(), JOB), 3725.0, None)
    assert still == "needle.50pct: 1,000 tokens sent 1:02:05 ago, neither KV use nor the prompt counter has moved"


def test_hosts_that_can_be_read_are_named():
    readings = {
        "spark-1": {"free_memory_gib": 11.6, "temperature_c": 71.2},
        "spark-2": {"free_memory_gib": None, "temperature_c": 64.0},
        "spark-3": {"free_memory_gib": None, "temperature_c": None},
    }
    assert hosts_text(readings) == "; spark-1 12 GiB free 71 °C, spark-2 64 °C"
    assert hosts_text({}) == ""


# --- stuck or slow


def rule_says(looks, limit=60.0):
    rule = StallRule(limit)
    return [bool(rule.take(look(at_s=10.0 * n, **given))) for n, given in enumerate(looks)]


WAITING = {"running": 0.0, "waiting": 1.0}


@pytest.mark.parametrize(
    ("looks", "stuck"),
    [
        ([WAITING] * 7, True),
        ([WAITING] * 6, False),
        ([{"running": 0.0, "waiting": 0.0}] * 7, True),
        ([{"running": 1.0}] * 2000, False),
        ([{"running": 1.0, "waiting": 3.0}] * 2000, False),
        ([{"running": 0.0, "waiting": None}] * 2000, False),
        ([{"running": None, "waiting": 1.0}] * 2000, False),
        ([{**WAITING, "kv_share": n / 1000} for n in range(100)], False),
        ([{**WAITING, "prompt_tokens": float(n)} for n in range(100)], False),
        ([WAITING] * 5 + [{"running": 1.0}] + [WAITING] * 6, False),
        ([WAITING] * 5 + [{"running": 1.0}] + [WAITING] * 7, True),
    ],
    ids=itertools.count(),
)
def test_stuck_is_only_what_is_not_scheduled_for_the_whole_limit(looks, stuck):
    assert any(rule_says(looks)) is stuck


class Engine:
    """Stands for an endpoint: the readings it is given, and whether it was given up."""

    def __init__(self, text):
        self.text, self.closed = text, False

    def metrics(self):
        return read_metrics(self.text)

    def close(self):
        self.closed = True


@pytest.mark.parametrize(("running", "given_up"), [(0, True), (1, False)])
def test_the_watcher_gives_up_what_is_stuck_and_nothing_else(running, given_up):
    engine = Engine(f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 1\n")
    stream = io.StringIO()
    clock = itertools.count(0.0, 100.0)
    live = Live(stream, clock=lambda: next(clock))
    hot = {"spark-1": {"free_memory_gib": 3.0, "temperature_c": None}}
    watcher = Watcher(engine, JOB, live, before=engine.metrics(), stall_s=0.2, poll_s=0.02, readings=lambda: hot)
    with watched(watcher):
        for _ in range(40):
            if engine.closed:
                break
            watcher._over.wait(0.02)
    assert engine.closed is given_up and bool(watcher.stuck) is given_up
    assert watcher.looks and "needle.50pct: 1,000 tokens sent" in stream.getvalue()
    assert "; spark-1 3 GiB free" in stream.getvalue()


def test_once_it_answers_nothing_is_stuck():
    engine = Engine("vllm:num_requests_running 0\nvllm:num_requests_waiting 1\n")
    watcher = Watcher(engine, JOB, Live(), before=engine.metrics(), stall_s=0.05, poll_s=0.01)
    watcher.answering = True
    with watched(watcher):
        watcher._over.wait(0.2)
    assert not engine.closed and not watcher.stuck
