"""A first look at whether the engine is right: arithmetic, JSON, a tool call, a short retrieval.

The questions and the floor come from the recipe (`[checks.correctness]`): what a model was measured to do is true of the
model, not of this code. Each answer is stored as it came, so that the judge can be run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_dspark.answers import judge_code, judge_json, judge_number
from pytest_dspark.audit import Audit, prompt_sha256, same
from pytest_dspark.checks import Check
from pytest_dspark.gate import canary_prompt, judge_tool, weather_tool
from pytest_dspark.haystack import chooser, like, new_code
from pytest_dspark.live import Live
from pytest_dspark.recipe import Canary
from pytest_dspark.reply import Reply
from pytest_dspark.verdict import PASS, Finding, Status, Verdict

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint


def answer(reply: Reply) -> dict[str, Any]:
    """A reply as data: what a judge and a reader need, and no more."""
    usage = reply.usage
    return {
        "text": reply.text,
        "reasoning": reply.reasoning,
        "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in reply.tool_calls],
        "finish_reason": reply.finish_reason,
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "completion_tokens": usage.completion_tokens if usage else None,
        "usage_missing": reply.usage_missing,
        "prompt_sha256": reply.prompt_sha256,
    }


def _ask(endpoint: Endpoint, settings: Mapping[str, Any], prompt: str, **extra: Any) -> dict[str, Any]:
    reply = endpoint.chat(
        [{"role": "user", "content": prompt}],
        max_tokens=settings["max_tokens"],
        thinking=settings.get("thinking"),
        deadline_s=settings["deadline_s"],
        **extra,
    )
    return answer(reply)


def _token_limit(reply: Mapping[str, Any]) -> Verdict | None:
    """The budget ended before there was an answer: apart from wrong, and apart from infrastructure."""
    if reply["finish_reason"] not in ("stop", "tool_calls", "length"):
        return Verdict(
            Status.FAIL, "WRONG_ANSWER", f"the answer ended with {reply['finish_reason']!r}, expected 'stop'"
        )
    if reply["finish_reason"] == "length":
        return Verdict(
            Status.TOKEN_LIMIT,
            "TOKEN_LIMIT",
            f"the budget ended after {reply['completion_tokens']} tokens, before the answer was finished",
        )
    return None


def _verdict(ok: bool, code: str, message: str) -> Verdict:
    return PASS if ok else Verdict(Status.FAIL, code or "WRONG_ANSWER", message)


# --- arithmetic


def measure_arithmetic(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """Every question of the recipe, one after the other."""
    cases = [{**case, "reply": _ask(endpoint, settings, case["prompt"])} for case in settings["arithmetic"]]
    return Finding("correctness.arithmetic", {"cases": cases})


def judge_arithmetic(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS if at least `arithmetic_floor` answers are the expected number (the recipe's measured floor)."""
    cases, floor = finding.data["cases"], limits["arithmetic_floor"]
    if floor < 1 or floor > len(cases):
        return Verdict(Status.ERROR, "RECIPE_INVALID", f"arithmetic_floor is {floor}, expected 1 to {len(cases)}")
    cut = [limit for case in cases if (limit := _token_limit(case["reply"]))]
    results = [judge_number(case["reply"]["text"], case["reply"]["reasoning"], case["expect"]) for case in cases]
    right = sum(result.ok and not _token_limit(case["reply"]) for case, result in zip(cases, results, strict=True))
    if right >= floor:
        return PASS
    if cut and right + len(cut) >= floor:
        return cut[0]
    pairs = zip(cases, results, strict=True)
    wrong = next(
        (f"{case['prompt']!r}: {result.message}" for case, result in pairs if not result.ok), "an answer was cut"
    )
    return Verdict(
        Status.FAIL, "WRONG_ANSWER", f"{right} of {len(cases)} right, expected at least {floor}; first wrong: {wrong}"
    )


# --- JSON


def measure_json(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """One object asked for in words, with the server's JSON mode on."""
    wanted = settings["json_expect"]
    schema = {
        "type": "object",
        "properties": {key: {"type": "integer"} for key in wanted},
        "required": sorted(wanted),
        "additionalProperties": False,
    }
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    reply = _ask(endpoint, settings, settings["json_prompt"], response_format=response_format)
    return Finding("correctness.json", {"expect": dict(wanted), "reply": reply})


def judge_json_answer(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    reply = finding.data["reply"]
    result = judge_json(reply["text"], reply["reasoning"], finding.data["expect"])
    return _token_limit(reply) or _verdict(result.ok, result.code, result.message)


# --- tool call


def measure_tool(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """One forced call of one tool, streamed, so that its arguments must be put together again."""
    choice = {"type": "function", "function": {"name": "get_weather"}}
    reply = _ask(
        endpoint,
        settings,
        settings["tool_prompt"],
        tools=[weather_tool("get_weather")],
        tool_choice=choice,
        stream=True,
    )
    return Finding("correctness.tool", {"tool": "get_weather", "expect": settings["tool_expect"], "reply": reply})


def judge_tool_call(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    reply = finding.data["reply"]
    calls = [(call["name"], call["arguments"]) for call in reply["tool_calls"]]
    ok, message = judge_tool(calls, finding.data["tool"], finding.data["expect"])
    return _token_limit(reply) or _verdict(ok, "WRONG_ANSWER", message)


# --- retrieval


def measure_retrieval(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """A code in the middle of filler, asked for at the end."""
    canary = _retrieval_canary(settings)
    reply = _ask(endpoint, settings, canary_prompt(canary))
    return Finding("correctness.retrieval", {"expect": canary.expect, "reply": reply})


def _retrieval_canary(settings: Mapping[str, Any]) -> Canary:
    """With the recipe's code, or one that the challenge makes."""
    code = settings["retrieval_code"]
    if settings.get("challenge"):
        code = new_code(like(code), chooser(settings["challenge"], "correctness.retrieval"))
    return Canary(
        name="retrieval",
        kind="code",
        prompt="What is the secret code in the text above? Reply with only the code.",
        needle=f"The secret code is {code}.",
        expect=code,
        filler=settings["retrieval_filler"],
    )


def judge_retrieval(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    reply = finding.data["reply"]
    result = judge_code(reply["text"], reply["reasoning"], finding.data["expect"])
    return _token_limit(reply) or _verdict(result.ok, result.code, result.message)


# --- a long stream


def measure_stream(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """One streamed answer of a fixed length: end-of-sequence ignored, minimum and maximum equal."""
    length = settings["stream_tokens"]
    reply = endpoint.chat(
        [{"role": "user", "content": settings["stream_prompt"]}],
        max_tokens=length,
        min_tokens=length,
        ignore_eos=True,
        thinking=settings.get("thinking"),
        deadline_s=settings["deadline_s"],
        stream=True,
    )
    return Finding("correctness.stream", {"tokens": length, "reply": answer(reply), "done_marker": reply.done_marker})


def judge_stream(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS if the stream ended at exactly the asked length, as the server itself counted, with text in it."""
    reply, length = finding.data["reply"], finding.data["tokens"]
    if reply["completion_tokens"] is None:
        return Verdict(Status.ERROR, "PROTOCOL", f"the stream carried no usage: {reply['usage_missing']}")
    if reply["finish_reason"] != "length" or reply["completion_tokens"] != length:
        found = f"{reply['completion_tokens']} tokens and finish_reason {reply['finish_reason']!r}"
        return Verdict(Status.FAIL, "WRONG_ANSWER", f"asked for exactly {length} tokens, got {found}")
    text = reply["text"] + reply["reasoning"]
    if not text.strip() or "\ufffd" in text:
        return Verdict(
            Status.FAIL, "NO_ANSWER" if not text.strip() else "WRONG_ANSWER", f"the streamed text is {text[:80]!r}"
        )
    return PASS


# --- what was asked is what the recipe says


def _audit_prompt(name: str, reply: Mapping[str, Any], prompt: str) -> Iterator[str]:
    yield from same(f"{name}.prompt_sha256", reply["prompt_sha256"], prompt_sha256(prompt))


def _audit_arithmetic(finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
    cases = finding.data["cases"]
    asked = [{key: value for key, value in case.items() if key != "reply"} for case in cases]
    yield from same("cases", asked, settings["arithmetic"])
    for number, case in enumerate(cases):
        yield from _audit_prompt(f"cases.{number}.reply", case["reply"], case["prompt"])


def _audit_one(key: str, prompt: str) -> Audit:
    """The finding's `expect` is the recipe's `key`, and the prompt was the recipe's."""

    def audit(finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
        yield from same("expect", finding.data["expect"], settings[key])
        yield from _audit_prompt("reply", finding.data["reply"], settings[prompt])

    return audit


def _audit_retrieval(finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
    canary = _retrieval_canary(settings)
    yield from same("expect", finding.data["expect"], canary.expect)
    yield from _audit_prompt("reply", finding.data["reply"], canary_prompt(canary))


def _audit_stream(finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
    yield from same("tokens", finding.data["tokens"], settings["stream_tokens"])
    yield from _audit_prompt("reply", finding.data["reply"], settings["stream_prompt"])


CHECKS = {
    "stream": Check(measure_stream, judge_stream, audit=_audit_stream),
    "arithmetic": Check(measure_arithmetic, judge_arithmetic, audit=_audit_arithmetic),
    "json": Check(measure_json, judge_json_answer, audit=_audit_one("json_expect", "json_prompt")),
    "tool": Check(measure_tool, judge_tool_call, audit=_audit_one("tool_expect", "tool_prompt")),
    "retrieval": Check(measure_retrieval, judge_retrieval, audit=_audit_retrieval),
}
