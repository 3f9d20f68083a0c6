"""Condense, cross-talk and staggered: the judges on findings, and what is asked of a scripted server."""

import json
import time

import pytest
from scripted import CHUNKED, SSE, Scripted, chunk, delta, usage, whole

from pytest_dspark.asking import judge_question
from pytest_dspark.checks.correctness import CHECKS as CORRECTNESS
from pytest_dspark.checks.underload import CHECKS, churn
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import DsparkError
from pytest_dspark.live import Live
from pytest_dspark.verdict import Finding, Status

LIMITS = {"condense": {"margin": 0.5}, "crosstalk": {}, "staggered": {}}
VICTIM = {"prompt": "Count from 1 to 3.", "kind": "count", "expect": "1-3"}


def reply(text, *, finish="stop", reasoning="", tokens=None):
    return {
        "text": text,
        "reasoning": reasoning,
        "tool_calls": [],
        "finish_reason": finish,
        "completion_tokens": 5,
        "tokens": tokens,
    }


def condensed(alone, *beside, others=3, garbled=()):
    rows = [{"victim": 0, "others": others, "parting": {}, **one} for one in beside]
    data = {"victims": [VICTIM], "alone": [alone], "beside": rows, "churn": {"garbled": list(garbled)}}
    return CHECKS["condense"].judge(Finding("underload.condense", data), LIMITS)


def token(text, chosen, **others):
    return [text, chosen, [[text, chosen], *([name, value] for name, value in others.items())]]


RIGHT = reply("1, 2, 3")


def test_condense_judges_the_answer_and_not_its_letters():
    """L08: another wording under load is a divergence and no fault."""
    assert condensed(RIGHT, RIGHT).passed
    assert condensed(RIGHT, reply("Here you are: 1, 2, 3.")).passed
    wrong = condensed(RIGHT, reply("1, 2, 4"))
    assert (wrong.status, wrong.code) == (Status.FAIL, "WRONG_ANSWER") and "beside others" in wrong.message


def test_condense_tells_near_ties_clear_losses_and_lossy_tokens_apart():
    alone = reply("1, 2, 3", tokens=[token("1", -0.1), token(", 2, 3", -0.7, other=-0.8)])
    near = reply("1,2,3", tokens=[token("1", -0.1), token(",2,3", -0.6, **{", 2, 3": -0.7})])
    far = reply("1,2,3", tokens=[token("1", -0.1), token(",2,3", -0.1, **{", 2, 3": -4.0})])
    lossy = reply("1, 2, 3", tokens=[token("1", -3.0, two=-0.1), token(", 2, 3", -0.7)])
    assert condensed(alone, near).passed
    assert condensed(alone, far).code == "DIVERGED"
    found = condensed(alone, lossy)
    assert found.code == "LOSSY" and "'two' was more likely by 2.9" in found.message
    assert condensed(lossy, alone).code == "LOSSY", "alone is looked at too"


def test_condense_names_garbling_cut_answers_and_a_load_that_was_none():
    assert condensed(RIGHT, reply("1, 2, 3 \ufffd")).code == "GARBLED"
    assert condensed(RIGHT, reply("")).code == "NO_ANSWER"
    assert condensed(RIGHT, reply("1, 2,", finish="length")).status is Status.TOKEN_LIMIT
    assert condensed(RIGHT, RIGHT, garbled=["1 characters"]).code == "GARBLED"
    assert condensed(RIGHT, RIGHT, others=0).status is Status.ERROR
    assert condensed(RIGHT).status is Status.ERROR


def crossed(*rounds, floor=1.0):
    data = {"streams": 2, "rounds": [[{"code": code, **one} for code, one in streams] for streams in rounds]}
    limits = {"crosstalk": {"floor": floor}}
    return CHECKS["crosstalk"].judge(Finding("underload.crosstalk", data), limits)


A, B = "KITE-40917", "LAMP-77123"


def test_cross_talk_names_both_streams():
    assert crossed([(A, reply(f"**{A}**")), (B, reply(B))]).passed
    found = crossed([(A, reply(A)), (B, reply(f"It is {A}."))])
    assert (found.status, found.code) == (Status.FAIL, "CROSS_TALK")
    assert f"stream 1 of round 0 said {A}, the secret of stream 0 of round 0" in found.message


def test_cross_talk_sees_reasoning_and_earlier_rounds():
    assert crossed([(A, reply(A, reasoning=f"perhaps {B}")), (B, reply(B))]).code == "CROSS_TALK"
    assert "of round 0" in crossed([(A, reply(A))], [(B, reply(f"{A} {B}"))]).message
    both = crossed([(A, reply(f"{A} or {B}")), (B, reply(B))])
    assert both.code == "CROSS_TALK", "its own secret beside it is no excuse"


def test_cross_talk_without_an_answer_is_wrong_or_cut_and_never_a_leak():
    assert crossed([(A, reply("I do not know.")), (B, reply(B))]).code in ("WRONG_ANSWER", "NO_ANSWER")
    assert crossed([(A, reply("I do not know.")), (B, reply(B))], floor=0.5).passed
    assert crossed([(A, reply("Let me", finish="length")), (B, reply(B))]).status is Status.TOKEN_LIMIT
    assert not crossed([]).passed


def test_staggered_judges_every_answer():
    def judged(*replies):
        streams = [{"question": VICTIM, **one} for one in replies]
        return CHECKS["staggered"].judge(Finding("underload.staggered", {"streams": streams}), LIMITS)

    assert judged(RIGHT, RIGHT).passed
    found = judged(RIGHT, reply("1, 3, 2"), RIGHT)
    assert found.status is Status.FAIL and "1 of 3 streams; stream 1" in found.message
    assert judged().status is Status.ERROR


@pytest.mark.parametrize(
    ("question", "text", "passed"),
    [
        ({"kind": "list", "expect": "2, 3, 5"}, "The first three primes are:\n2, 3, 5", True),
        ({"kind": "list", "expect": "2, 3, 5"}, "1. 2\n2. 3\n3. 5", True),
        ({"kind": "list", "expect": "2, 3, 5"}, "2, 3", False),
        ({"kind": "list", "expect": "2, 3, 5"}, "2, 3, 5, 7", False),
        ({"kind": "count", "expect": "9-12"}, "9\n10\n11\n12", True),
        ({"kind": "number", "expect": "81"}, "It is 81.", True),
        ({"kind": "any"}, "Whatever.", True),
        ({"kind": "any"}, "\ufffd", False),
    ],
)
def test_kinds_of_questions(question, text, passed):
    assert judge_question({"prompt": "?", **question}, reply(text)).passed is passed


# --- against a scripted server


def settings(**more):
    condense = {"churn": 2, "rounds": 1, "churn_prompt": "Hi", "churn_tokens": 4, "alternatives": 3, "margin": 0.5}
    victims = [{"prompt": "Say 7.", "expect": "7"}]
    return {
        "max_tokens": 32,
        "deadline_s": 10.0,
        "knobs": {"MAX_NUM_SEQS": 4},
        "condense": {**condense, "victims": victims},
        **more,
    }


def answered(text):
    message = {"role": "assistant", "content": text}
    usage_ = {"prompt_tokens": 3, "completion_tokens": 1}
    return (
        whole({"model": "m", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage_}),
    )


def test_where_log_probabilities_are_refused_the_answer_decides():
    refusal = whole({"error": {"message": "logprobs are switched off"}}, "400 Bad Request")
    with Scripted((whole(b"", "404 Not Found"),), (refusal,), answered("7")) as server:
        found = CHECKS["condense"].measure(Endpoint(server.url, "m"), settings=settings(), live=Live())
    assert "switched off" in found.data["alone"][0]["tokens_missing"] and found.data["alone"][0]["tokens"] is None
    assert CHECKS["condense"].judge(found, settings()).passed
    assert found.data["acceptance"]["alone"]["length"] is None and found.data["acceptance"]["alone"]["missing"]
    bodies = [json.loads(body) for head, body in server.requests if body]
    assert sum("logprobs" in body for body in bodies) >= 1 and any(body["max_tokens"] == 4 for body in bodies)


def test_churn_that_fails_is_infrastructure_and_ends_at_once():
    broken = whole({"error": {"message": "out of order"}}, "500 Internal Server Error")
    with Scripted((broken,)) as server:
        start = time.monotonic()
        with pytest.raises(DsparkError, match="out of order"), churn(Endpoint(server.url, "m"), settings(), 2):
            pass
        assert time.monotonic() - start < 5


def test_one_sequence_at_a_time_is_not_implemented():
    for check in ("condense", "crosstalk", "staggered"):
        given = settings(
            knobs={"MAX_NUM_SEQS": 1},
            crosstalk={"streams": 4, "rounds": 1, "code": "00000", "prompt": "{code}"},
            staggered={"streams": 4, "every_s": 0.1, "questions": [VICTIM]},
        )
        with pytest.raises(DsparkError, match="one sequence at a time") as caught:
            CHECKS[check].measure(Endpoint("http://127.0.0.1:9", "m"), settings=given, live=Live())
        assert caught.value.code == "NOT_IMPLEMENTED"
        with pytest.raises(DsparkError, match="no table"):
            CHECKS[check].measure(Endpoint("http://127.0.0.1:9", "m"), settings={"knobs": {}}, live=Live())


def test_a_stream_that_breaks_is_infrastructure():
    good = (CHUNKED, chunk(delta(content="x") + delta("stop") + usage(1) + b"data: [DONE]\n\n") + b"0\r\n\r\n")
    given = settings(crosstalk={"streams": 2, "rounds": 1, "code": "00000", "prompt": "{code}"})
    with Scripted(good, (SSE, delta(content="half"))) as server:
        with pytest.raises(DsparkError, match="1 of 2 streams failed") as caught:
            CHECKS["crosstalk"].measure(Endpoint(server.url, "m"), settings=given, live=Live())
    assert caught.value.code == "TRUNCATED"


def test_the_stream_check_finds_garbling_and_lets_a_forced_text_go_round():
    def judged(text):
        told = {**reply(text, finish="length"), "completion_tokens": 9, "usage_missing": ""}
        return CORRECTNESS["stream"].judge(Finding("correctness.stream", {"reply": told, "tokens": 9}), {})

    assert judged("and so on, " * 40).passed
    assert judged("The lamp \ufffd was lit.").code == "GARBLED" and judged(" ").code == "NO_ANSWER"
