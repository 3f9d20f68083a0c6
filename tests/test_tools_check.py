"""Tool calls and schemas: what counts as the right call, and what a server without a parser is told apart from."""

import json

import pytest
from scripted import CHUNKED, Scripted, chunk, delta, usage, whole

from pytest_dspark.checks.correctness import CHECKS as CORRECTNESS
from pytest_dspark.checks.tools import CHECKS, judge_calls, long_text
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import DsparkError
from pytest_dspark.live import Live
from pytest_dspark.verdict import Finding, Status

OSLO = {"city": "Oslo"}
SETTINGS = {
    "max_tokens": 64,
    "thinking_tokens": 128,
    "deadline_s": 10.0,
    "knobs": {},
    "auto": {"prompt": "Weather in Oslo?", "expect": OSLO, "plain_prompt": "2 + 2?"},
    "long": {"words": 40, "max_tokens": 256},
    "parallel": {"prompt": "Oslo and Rome?", "expect": [OSLO, {"city": "Rome"}]},
}


def reply(*calls, text="", finish="tool_calls", reasoning=""):
    return {
        "text": text,
        "reasoning": reasoning,
        "finish_reason": finish,
        "completion_tokens": 9,
        "tool_calls": [{"name": name, "arguments": arguments} for name, arguments in calls],
    }


def weather(city):
    return "get_weather", json.dumps({"city": city})


@pytest.mark.parametrize(
    ("calls", "expect", "words"),
    [
        ([weather("Oslo")], [OSLO], ""),
        ([("get_weather", '{"city": "Oslo", "unit": "C"}')], [OSLO], ""),
        ([weather("Rome"), weather("Oslo")], [OSLO, {"city": "Rome"}], ""),
        ([], [OSLO], "it said 'Sunny.'"),
        ([weather("Oslo"), weather("Oslo")], [OSLO], "expected"),
        ([weather("Oslo"), weather("Oslo")], [OSLO, {"city": "Rome"}], "expected"),
        ([weather("Oslo")], [OSLO, {"city": "Rome"}], "expected"),
        ([weather("Rome")], [OSLO], "Rome"),
        ([("set_alarm", '{"hour": 7}')], [OSLO], "set_alarm"),
        ([("get_weather", '{"city": "Os')], [OSLO], "no JSON object"),
        ([("get_weather", '"Oslo"')], [OSLO], "no JSON object"),
        ([("get_weather", '{"city": "Oslo ')], [OSLO], "no JSON object"),
        ([("get_weather", '{"city": "Oslo "}')], [OSLO], "arguments of get_weather"),
        ([("get_weather", '{"city": "Oslo", "city": "Rome"}')], [OSLO], "no JSON object"),
        ([("get_weather", '{"n": 1}')], [{"n": True}], "arguments of get_weather"),
    ],
)
def test_calls_are_compared_as_values(calls, expect, words):
    verdict = judge_calls(reply(*calls, text="" if calls else "Sunny."), [("get_weather", one) for one in expect])
    assert verdict.passed is (words == "") and words in verdict.message


def judged(check, **data):
    return CHECKS[check].judge(Finding(f"tools.{check}", data), SETTINGS)


def test_a_cut_call_is_a_token_limit():
    assert judge_calls(reply(("get_weather", '{"ci'), finish="length"), []).status is Status.TOKEN_LIMIT


def test_auto_wants_the_call_both_ways_and_none_where_none_is_needed():
    good, plain = reply(weather("Oslo")), reply(text="4", finish="stop")
    assert judged("auto", expect=OSLO, whole=good, streamed=good, plain=plain).passed
    broken = reply(("get_weather", '{"city": "Os'))
    assert judged("auto", expect=OSLO, whole=good, streamed=broken, plain=plain).message.startswith("streamed:")
    assert "needs no tool" in judged("auto", expect=OSLO, whole=good, streamed=good, plain=good).message
    assert judged("auto", expect=OSLO, whole=good, streamed=good, plain=reply(finish="stop")).code == "NO_ANSWER"


def test_long_arguments_must_be_whole_to_the_last_letter():
    text = long_text(40)
    assert len(text.split()) >= 40 and '"' not in text and long_text(40) == text
    expect = {"title": "log", "text": text}
    assert judged("long", words=40, expect=expect, reply=reply(("save_note", json.dumps(expect)))).passed
    for damaged in (text[:-1], text.replace("a", "e", 1), text + " "):
        said = reply(("save_note", json.dumps({"title": "log", "text": damaged})))
        assert "characters of arguments" in judged("long", words=40, expect=expect, reply=said).message
    assert not judged("long", words=40, expect=expect, reply=reply(text="I cannot.")).passed


def test_thinking_off_must_not_think_and_thinking_that_eats_the_budget_is_a_token_limit():
    good = reply(weather("Oslo"))
    assert judged("thinking", expect=OSLO, on=reply(weather("Oslo"), reasoning="Hm."), off=good).passed
    assert judged("thinking", expect=OSLO, on=good, off=good).passed, "a server may not show what it thinks"
    assert (
        "thinking is off"
        in judged("thinking", expect=OSLO, on=good, off=reply(weather("Oslo"), reasoning="Hm")).message
    )
    eaten = reply(finish="length", reasoning="Let me see. " * 9)
    assert judged("thinking", expect=OSLO, on=eaten, off=good).status is Status.TOKEN_LIMIT


REFUSAL = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'


@pytest.mark.parametrize("check", ["auto", "long", "parallel", "thinking"])
def test_a_server_without_a_parser_is_not_implemented(check):
    with Scripted((whole({"error": {"message": REFUSAL}}, "400 Bad Request"),)) as server:
        with pytest.raises(DsparkError, match="without a tool parser") as caught:
            CHECKS[check].measure(Endpoint(server.url, "m"), settings=SETTINGS, live=Live())
    assert caught.value.code == "NOT_IMPLEMENTED"


def test_the_first_look_at_a_tool_call_is_not_implemented_there_either_and_other_refusals_are_errors():
    given = {**SETTINGS, "tool_prompt": "Weather in Oslo?", "tool_expect": OSLO}
    for words, code in ((REFUSAL, "NOT_IMPLEMENTED"), ("the context is too long", "SERVER_ERROR")):
        with Scripted((whole({"error": {"message": words}}, "400 Bad Request"),)) as server:
            with pytest.raises(DsparkError, match=r"tool parser|too long") as caught:
                CORRECTNESS["tool"].measure(Endpoint(server.url, "m"), settings=given, live=Live())
        assert caught.value.code == code


def test_streamed_pieces_of_two_calls_are_put_together():
    def piece(index, name=None, arguments=""):
        function = {"arguments": arguments} | ({"name": name} if name else {})
        return delta(tool_calls=[{"index": index, "function": function}])

    pieces = [piece(0, "get_weather", '{"ci'), piece(1, "get_weather", '{"city": "Ro'), piece(0, None, 'ty": "Oslo"}')]
    pieces += [piece(1, None, 'me"}'), delta("tool_calls"), usage(9), b"data: [DONE]\n\n"]
    with Scripted((CHUNKED, *(chunk(one) for one in pieces), b"0\r\n\r\n")) as server:
        found = CHECKS["parallel"].measure(Endpoint(server.url, "m"), settings=SETTINGS, live=Live())
    assert CHECKS["parallel"].judge(found, SETTINGS).passed
    asked = json.loads(server.requests[0][1])
    assert asked["tool_choice"] == "auto" and len(asked["tools"]) == 2


def test_a_recipe_without_the_table_is_not_implemented():
    for check in ("schema", "auto", "long", "parallel", "thinking"):
        with pytest.raises(DsparkError, match="no table") as caught:
            CHECKS[check].measure(Endpoint("http://127.0.0.1:9", "m"), settings={"knobs": {}}, live=Live())
        assert caught.value.code == "NOT_IMPLEMENTED"
