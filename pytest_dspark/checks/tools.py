"""Structured output and tool calls: a schema, a call that is chosen, long arguments, streams, two calls, thinking on and off.

Arguments are compared as values, and long ones letter by letter. A server that was started without a tool parser refuses
with HTTP 400: that is NOT_IMPLEMENTED with its own words, and no fault of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pytest_dspark import prose
from pytest_dspark.answers import equal, judge_json
from pytest_dspark.asking import answer, ask, ask_with_tools, section, token_limit
from pytest_dspark.audit import Audit, same
from pytest_dspark.checks import Check
from pytest_dspark.errors import DsparkError
from pytest_dspark.gate import weather_tool
from pytest_dspark.live import Live
from pytest_dspark.strictjson import loads
from pytest_dspark.verdict import PASS, Finding, Status, Verdict

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint

WEATHER: Final = weather_tool("get_weather")
CLOCK: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "set_alarm",
        "description": "Set an alarm clock.",
        "parameters": {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": ["hour"]},
    },
}
NOTE: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "save_note",
        "description": "Save a note under a title.",
        "parameters": {
            "type": "object",
            "properties": {"title": {"type": "string"}, "text": {"type": "string", "description": "the whole note"}},
            "required": ["title", "text"],
        },
    },
}


def judge_calls(reply: Mapping[str, Any], expect: Sequence[tuple[str, Mapping[str, Any]]]) -> Verdict:
    """PASS if the calls are exactly these, in any order; every expected argument must be there with its value."""
    limit = token_limit(reply)
    if limit:
        return limit
    calls = [(call["name"], call["arguments"]) for call in reply["tool_calls"]]
    names = sorted(name for name, _ in expect)
    if sorted(name for name, _ in calls) != names:
        said = f"; it said {reply['text'][:100]!r}" if not calls else ""
        return _wrong(f"tool calls are {[name for name, _ in calls]}, expected {names}{said}")
    left = list(expect)
    for name, text in calls:
        arguments, problem = _parsed(text)
        if problem:
            return _wrong(f"arguments of {name} are no JSON object ({problem}): {text[:60]!r} … {text[-60:]!r}")
        match = next((one for one in left if one[0] == name and _holds(arguments, one[1])), None)
        if match is None:
            return _wrong(f"arguments of {name} are {_short(arguments)}, expected {_short([one[1] for one in left])}")
        left.remove(match)
    return PASS


def _parsed(text: str) -> tuple[dict[str, Any], str]:
    try:
        value = loads(text)
    except (ValueError, RecursionError) as error:
        return {}, str(error)
    return (value, "") if isinstance(value, dict) else ({}, "another value")


def _holds(arguments: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(key in arguments and _same(arguments[key], value) for key, value in wanted.items())


def _same(found: Any, wanted: Any) -> bool:
    """Equal as JSON; true is not 1, at any depth, and letters and blanks count."""
    return type(found) is type(wanted) and equal(found, wanted)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:100]} … {text[-90:]}"


def _wrong(message: str) -> Verdict:
    return Verdict(Status.FAIL, "WRONG_ANSWER", message)


# --- a schema


def measure_schema(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """A nested object of a given JSON schema: numbers, a text of a closed list, a list."""
    asked = section(settings, "schema")
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": json.loads(asked["schema"])}}
    reply = answer(ask(endpoint, settings, asked["prompt"], response_format=form))
    return Finding("tools.schema", {"expect": json.loads(asked["expect"]), "reply": reply})


def judge_schema(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    reply = finding.data["reply"]
    result = judge_json(reply["text"], reply["reasoning"], finding.data["expect"])
    return token_limit(reply) or (PASS if result.ok else Verdict(Status.FAIL, result.code, result.message))


# --- a call that the model chooses


def measure_auto(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """Two tools and a question for one of them, streamed and not streamed; then a question for neither."""
    asked, tools = section(settings, "auto"), [CLOCK, WEATHER]
    given: dict[str, Any] = {"tools": tools, "tool_choice": "auto"}
    replies = [ask_with_tools(endpoint, settings, asked["prompt"], **given, stream=stream) for stream in (False, True)]
    plain = ask_with_tools(endpoint, settings, asked["plain_prompt"], **given)
    return Finding(
        "tools.auto", {"expect": dict(asked["expect"]), "whole": replies[0], "streamed": replies[1], "plain": plain}
    )


def judge_auto(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS if the right tool is called with the right arguments, the same streamed, and none where none is needed."""
    data = finding.data
    expect = [("get_weather", data["expect"])]
    for how in ("whole", "streamed"):
        verdict = judge_calls(data[how], expect)
        if not verdict.passed:
            return Verdict(verdict.status, verdict.code, f"{how}: {verdict.message}")
    plain = data["plain"]
    if plain["tool_calls"]:
        return _wrong(f"called {plain['tool_calls'][0]['name']} for a question that needs no tool")
    return token_limit(plain) or (
        PASS if plain["text"].strip() else Verdict(Status.FAIL, "NO_ANSWER", "no final answer")
    )


# --- long arguments


def measure_long(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """A forced call whose text is as long as `words` says, streamed: its pieces must give every letter of it."""
    asked = section(settings, "long")
    text = long_text(asked["words"])
    prompt = f'Call save_note with title = "log" and text = "{text}". Copy the text exactly, to its last full stop.'
    choice = {"type": "function", "function": {"name": "save_note"}}
    given: dict[str, Any] = {"tools": [NOTE], "tool_choice": choice, "max_tokens": asked["max_tokens"]}
    reply = ask_with_tools(endpoint, settings, prompt, **given, stream=True)
    return Finding("tools.long", {"words": asked["words"], "expect": {"title": "log", "text": text}, "reply": reply})


def long_text(words: int) -> str:
    """So many words of prose, the same each time, without quotes."""
    sentences: list[str] = []
    for block in prose.generated(1):
        for sentence in block:
            sentences.append(sentence.strip().replace('"', ""))
            if sum(len(one.split()) for one in sentences) >= words:
                return " ".join(sentences)
    raise DsparkError("HARNESS", "the prose has an end")


def judge_long(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    reply, expect = finding.data["reply"], finding.data["expect"]
    verdict = judge_calls(reply, [("save_note", expect)])
    if verdict.code != "WRONG_ANSWER" or not reply["tool_calls"]:
        return verdict
    said = reply["tool_calls"][0]["arguments"]
    return _wrong(f"{verdict.message}; {len(said)} characters of arguments for a text of {len(expect['text'])}")


# --- two calls at once


def measure_parallel(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """A question that needs the same tool twice, streamed."""
    asked = section(settings, "parallel")
    reply = ask_with_tools(endpoint, settings, asked["prompt"], tools=[CLOCK, WEATHER], tool_choice="auto", stream=True)
    return Finding("tools.parallel", {"expect": [dict(one) for one in asked["expect"]], "reply": reply})


def judge_parallel(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    return judge_calls(finding.data["reply"], [("get_weather", one) for one in finding.data["expect"]])


# --- thinking on and off


def measure_thinking(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """The same call with thinking switched on and off."""
    asked, tools = section(settings, "auto"), [CLOCK, WEATHER]
    replies = {}
    for name, thinking in (("on", True), ("off", False)):
        budget = settings["thinking_tokens"] if thinking else settings["max_tokens"]
        given: dict[str, Any] = {"thinking": thinking, "max_tokens": budget, "tools": tools, "tool_choice": "auto"}
        replies[name] = ask_with_tools(endpoint, settings, asked["prompt"], **given, stream=True)
    return Finding("tools.thinking", {"expect": dict(asked["expect"]), **replies})


def judge_thinking(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS if the call is right both ways and nothing is thought where thinking is off. Thinking that is on and sends none is
    recorded: a server may not show it."""
    data = finding.data
    for how in ("on", "off"):
        verdict = judge_calls(data[how], [("get_weather", data["expect"])])
        if not verdict.passed:
            return Verdict(verdict.status, verdict.code, f"thinking {how}: {verdict.message}")
    if data["off"]["reasoning"].strip():
        return _wrong(f"thinking is off, and it thought {data['off']['reasoning'][:80]!r}")
    return PASS


# --- what was asked is what the recipe says


def _audit(expected: Callable[[Mapping[str, Any]], Any]) -> Audit:
    def audit(finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
        yield from same("expect", finding.data["expect"], expected(settings))

    return audit


def _audit_long(finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
    words = settings["long"]["words"]
    yield from same("words", finding.data["words"], words)
    yield from same("expect", finding.data["expect"], {"title": "log", "text": long_text(words)})


_AUTO: Final = _audit(lambda settings: settings["auto"]["expect"])

CHECKS = {
    "schema": Check(
        measure_schema, judge_schema, audit=_audit(lambda settings: json.loads(settings["schema"]["expect"]))
    ),
    "auto": Check(measure_auto, judge_auto, audit=_AUTO),
    "long": Check(measure_long, judge_long, audit=_audit_long),
    "parallel": Check(measure_parallel, judge_parallel, audit=_audit(lambda settings: settings["parallel"]["expect"])),
    "thinking": Check(measure_thinking, judge_thinking, audit=_AUTO),
}
