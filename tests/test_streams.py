"""Many streams in one loop: due moments, places, one that fails beside the others, and a server with a known schedule."""

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from scripted import HOLD, SSE, Scripted, delta, usage

from pytest_dspark import timing as T
from pytest_dspark.endpoint import Asked, Endpoint, RequestError
from pytest_dspark.errors import EndpointError, LaunchError

ROOT = Path(__file__).parents[1]
DONE = b"data: [DONE]\n\n"
GOOD = (SSE, 0.1, delta(content="a"), 0.1, delta(content="b", finish_reason="stop"), usage(2), DONE)


def asked(number, every_s=0.0):
    return [Asked({"prompt": f"p{n}", "max_tokens": 2}, every_s * n) for n in range(number)]


def test_outcomes_are_in_the_order_asked_and_one_failure_is_one_failure():
    bodies = [(SSE, delta(content=str(n), finish_reason="stop"), usage(1), DONE) for n in range(5)]
    bodies[2] = (SSE, delta(content="half"))
    with Scripted(*bodies) as server:
        outcomes = Endpoint(server.url, "m").stream_many(asked(5))
        prompts = [json.loads(body)["prompt"] for _, body in server.requests]
    assert sorted(prompts) == [f"p{n}" for n in range(5)]
    assert [isinstance(one, RequestError) for one in outcomes].count(True) == 1
    failed = next(one for one in outcomes if isinstance(one, RequestError))
    assert (failed.code, failed.partial) == ("TRUNCATED", "half")
    assert {one.text for one in outcomes if not isinstance(one, RequestError)} == {"0", "1", "3", "4"}


def test_each_is_sent_when_it_is_due():
    with Scripted(GOOD) as server:
        start = time.monotonic()
        outcomes = Endpoint(server.url, "m").stream_many(asked(4, every_s=0.4))
    sent = [one.timing.at_s - start for one in outcomes]
    assert [later - sent[0] for later in sent] == pytest.approx([0.0, 0.4, 0.8, 1.2], abs=0.19)
    assert all(one.timing.wait_s < 0.19 for one in outcomes)


def test_no_more_than_the_places_are_in_flight_and_the_wait_is_a_figure_of_its_own():
    seen = []
    with Scripted(GOOD) as server:
        outcomes = Endpoint(server.url, "m").stream_many(asked(6), places=2, on_tick=seen.append)
    spans = [(one.timing.at_s, one.timing.at_s + one.timing.end_s) for one in outcomes]
    together = max(sum(a <= start < b for a, b in spans) for start, _ in spans)
    assert together == 2
    assert 0.4 <= max(one.timing.wait_s for one in outcomes) + 0.01 < 1.2
    assert all(one.timing.first_token_s < 0.3 for one in outcomes)
    assert seen
    assert all(one.in_flight <= 2 for one in seen)


def test_close_ends_all_of_them_at_once():
    with Scripted((SSE, HOLD)) as server:
        endpoint = Endpoint(server.url, "m")
        start = time.monotonic()

        def tick(progress):
            if progress.in_flight == 8:
                endpoint.close()

        with pytest.raises(EndpointError, match="given up"):
            endpoint.stream_many(asked(8), on_tick=tick)
        assert server.gone.wait(2)
    assert time.monotonic() - start < 2


def test_the_engines_end_is_raised_and_the_life_is_looked_at_once_for_all():
    looks = []

    def alive():
        looks.append(time.monotonic())
        if len(looks) > 3:
            raise LaunchError("RANK_EXITED", "rank 1 exited with 1")

    with Scripted((SSE, HOLD)) as server, pytest.raises(LaunchError, match="rank 1"):
        Endpoint(server.url, "m", alive=alive).stream_many(asked(8))
    assert len(looks) == 4


def test_a_stall_is_of_its_own_stream():
    with Scripted((SSE, delta(content="x"), HOLD), GOOD) as server:
        outcomes = Endpoint(server.url, "m").stream_many(asked(2, every_s=0.05), stall_s=0.5)
    assert [getattr(one, "code", "") for one in outcomes] == ["STALLED", ""]


# --- the server with a known schedule


@pytest.fixture(scope="module")
def schedule():
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest_dspark.schedule"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    port = json.loads(process.stdout.readline())["port"]
    yield f"http://127.0.0.1:{port}"
    process.stdin.close()
    assert process.wait(5) == 0
    process.stdout.close()


def log(schedule, method="GET"):
    with urllib.request.urlopen(urllib.request.Request(f"{schedule}/log", method=method)) as answer:
        return json.load(answer)


def test_six_tokens_an_event_are_reported_as_they_were(schedule):
    log(schedule, "DELETE")
    endpoint = Endpoint(f"{schedule}/s/0.5/0.1/10/6", "m")
    outcomes = endpoint.stream_many([Asked({"prompt": "x", "max_tokens": 60, "user": str(n)}) for n in range(4)])
    told = {one["user"]: one for one in log(schedule)["requests"]}
    for number, reply in enumerate(outcomes):
        truth = told[str(number)]
        assert reply.usage.completion_tokens == 60
        assert T.tokens_per_event(reply.timing, 60).value == 6.0
        assert T.tpot(reply.timing, 60).value == pytest.approx(0.9 / 59, abs=0.002)
        assert T.mean_gap(reply.timing).value == pytest.approx(0.1, abs=0.01)
        assert reply.timing.first_token_s == pytest.approx(truth["stamps"][0] - truth["arrival"], abs=0.09)
        ours = [reply.timing.at_s + stamp for stamp in reply.timing.stamps]
        assert len(ours) == len(truth["stamps"]) == 10
        assert all(mine >= sent - 0.01 for mine, sent in zip(ours, truth["stamps"], strict=True))


def test_thinking_is_not_the_answer_and_a_role_is_no_token(schedule):
    [reply] = Endpoint(f"{schedule}/thinking", "m").stream_many([Asked({"messages": [], "max_tokens": 52})])
    assert reply.timing.first_token_s == pytest.approx(1.0, abs=0.1)
    assert reply.timing.first_answer_s == pytest.approx(1.5, abs=0.1)
    assert (reply.timing.events, reply.usage.completion_tokens) == (52, 52)


def test_a_path_without_a_schedule_is_refused(schedule):
    [outcome] = Endpoint(f"{schedule}/nothing", "m").stream_many([Asked({"prompt": "x", "max_tokens": 1})])
    assert (outcome.code, outcome.status) == ("SERVER_ERROR", 404)


def test_the_suite_reports_the_known_schedule(schedule, tmp_path):
    """Six tokens an event, 100 ms apart, through the suite as a user runs it: within the error that the row itself states."""
    recipe = tmp_path / "known.toml"
    base, tokens = ROOT / "recipe" / "rehearsal.toml", "tokens = 60\ncanary_tokens = 60\n"
    recipe.write_text(f'extends = "{base}"\nname = "known"\n[checks.concurrency]\n{tokens}')
    command = [sys.executable, "-m", "pytest", "suites", "-m", "production and concurrency", "-k", "c2"]
    command += [f"--dspark-endpoint={schedule}/s/0.5/0.1/10/6", "--dspark-model=m", f"--dspark-recipe={recipe}"]
    command += [f"--dspark-out={tmp_path}/out", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    (rows,) = tmp_path.glob("out/runs/*/rows.jsonl")
    (row,) = [json.loads(line) for line in rows.read_text().splitlines()]
    assert row["verdict"] == "PASS", done.stdout + str(row["message"])
    data = row["finding"]
    quoted, stamp_s = data["headline"], data["calibration"]["stamp_error_s"]["max"] + 0.002
    assert quoted["tpot_s_median"] == pytest.approx(0.9 / 59, abs=2 * stamp_s / 59)
    assert quoted["mean_gap_s_median"] == pytest.approx(0.1, abs=2 * stamp_s)
    assert quoted["tokens_per_event_median"] == 6.0
    assert {one["completion_tokens"] for repeat in data["repeats"] for one in repeat["samples"]} == {60}
    assert quoted["decode"]["agree"] is True
