"""Questions of a recipe, asked as chats, and their answers as data; the judges that all checks of answers share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pytest_dspark.answers import Judgement, judge_code, judge_exact, judge_list, judge_number
from pytest_dspark.errors import ConfigError, DsparkError
from pytest_dspark.garble import IMMEDIATE_END, garbled
from pytest_dspark.reply import Reply, RequestError
from pytest_dspark.verdict import PASS, Status, Verdict

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint

NO_PARSER: Final = re.compile(r"tool-call-parser|enable-auto-tool-choice", re.IGNORECASE)
KINDS: Final = ("number", "code", "exact", "list", "count", "any")


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


def ask(endpoint: Endpoint, settings: Mapping[str, Any], prompt: str, **extra: Any) -> Reply:
    """One chat of one message with the budget, thinking and deadline of the settings; `extra` wins."""
    given = {key: settings[key] for key in ("max_tokens", "deadline_s")} | {"thinking": settings.get("thinking")}
    return endpoint.chat([{"role": "user", "content": prompt}], **(given | extra))


def ask_with_tools(endpoint: Endpoint, settings: Mapping[str, Any], prompt: str, **extra: Any) -> dict[str, Any]:
    """The same with tools, as data. Raises NOT_IMPLEMENTED where the server says that it was started without a parser."""
    try:
        return answer(ask(endpoint, settings, prompt, **extra))
    except RequestError as error:
        if error.status == 400 and NO_PARSER.search(error.message):
            text = f"the server was started without a tool parser: {error.message}"
            raise DsparkError("NOT_IMPLEMENTED", text) from error
        raise


def section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of the lane's settings. Raises NOT_IMPLEMENTED where the recipe has none."""
    table = settings.get(name)
    if not isinstance(table, Mapping):
        raise DsparkError("NOT_IMPLEMENTED", f"the recipe has no table {name!r} among this lane's settings")
    return table


def needed(settings: Mapping[str, Any], *names: str) -> None:
    """Raises NOT_IMPLEMENTED where the recipe does not say these."""
    absent = [name for name in names if name not in settings]
    if absent:
        raise DsparkError("NOT_IMPLEMENTED", f"the recipe does not say {', '.join(absent)} for this lane")


def chat_body(settings: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    """The same as the body of a stream among many."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "max_tokens": settings["max_tokens"]}
    thinking = settings.get("thinking")
    return body | ({} if thinking is None else {"chat_template_kwargs": {"thinking": thinking}})


def ask_many(endpoint: Endpoint, settings: Mapping[str, Any], asked: Sequence[tuple[str, float]]) -> list[Reply]:
    """Prompts with the seconds after which each is sent, all streamed. Raises what the first one that failed raised."""
    from pytest_dspark.endpoint import Asked  # a judge imports this module without a client

    streams = [Asked(chat_body(settings, prompt), due) for prompt, due in asked]
    outcomes = endpoint.stream_many(streams, deadline_s=settings["deadline_s"])
    failed = next((outcome for outcome in outcomes if isinstance(outcome, RequestError)), None)
    if failed is not None:
        number = sum(isinstance(outcome, RequestError) for outcome in outcomes)
        raise DsparkError(failed.code, f"{number} of {len(outcomes)} streams failed; the first: {failed.message}")
    return [outcome for outcome in outcomes if isinstance(outcome, Reply)]


def level_of(settings: Mapping[str, Any], most: int) -> int:
    """Requests at once that keep the engine full: as many as the profile runs together, at most `most`."""
    return max(1, min(int(settings["knobs"].get("MAX_NUM_SEQS") or most), most))


def streams_of(settings: Mapping[str, Any], most: int) -> int:
    """The same where one request alone would prove nothing. Raises NOT_IMPLEMENTED below two."""
    level = level_of(settings, most)
    if level < 2:
        raise DsparkError("NOT_IMPLEMENTED", "this profile runs one sequence at a time: nothing runs beside it")
    return level


def token_limit(reply: Mapping[str, Any]) -> Verdict | None:
    """The budget ended before there was an answer: apart from wrong, and apart from infrastructure."""
    if reply["finish_reason"] not in ("stop", "tool_calls", "length"):
        text = f"the answer ended with {reply['finish_reason']!r}, expected 'stop'"
        return Verdict(Status.FAIL, "WRONG_ANSWER", text)
    if reply["finish_reason"] == "length":
        text = f"the budget ended after {reply['completion_tokens']} tokens, before the answer was finished"
        return Verdict(Status.TOKEN_LIMIT, "TOKEN_LIMIT", text)
    return None


def garble_verdict(reply: Mapping[str, Any]) -> Verdict | None:
    """What is garbled in an answer or in its reasoning."""
    cut = reply["finish_reason"] == "length"
    problem = garbled(reply["reasoning"], cut=cut) if reply["reasoning"].strip() else ""
    if not problem and (reply["text"].strip() or not (reply["reasoning"].strip() or reply["tool_calls"])):
        problem = garbled(reply["text"], cut=cut)
    if not problem:
        return None
    code = "NO_ANSWER" if problem == IMMEDIATE_END else "GARBLED"
    return Verdict(Status.FAIL, code, f"{problem}, in {(reply['text'] or reply['reasoning'])[:80]!r}")


def checked(question: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A recipe's question: `prompt`, `kind` and what it expects. Raises RECIPE_INVALID."""
    kind = question.get("kind", "number")
    if not isinstance(question.get("prompt"), str) or kind not in KINDS:
        text = f"{where}: a question needs a prompt and a kind of {', '.join(KINDS)}, found {dict(question)!r}"
        raise ConfigError("RECIPE_INVALID", text)
    if kind != "any" and not isinstance(question.get("expect"), str):
        raise ConfigError("RECIPE_INVALID", f"{where}: {question['prompt']!r} does not say as text what it expects")
    return question


def judge_question(question: Mapping[str, Any], reply: Mapping[str, Any]) -> Verdict:
    """Garbled, cut by its budget, wrong, or PASS. The kind `any` asks only for text that is whole."""
    problem = garble_verdict(reply) or token_limit(reply)
    if problem or question.get("kind", "number") == "any":
        return problem or PASS
    result = _judgement(question, reply)
    return PASS if result.ok else Verdict(Status.FAIL, result.code, f"{question['prompt'][-80:]!r}: {result.message}")


def _judgement(question: Mapping[str, Any], reply: Mapping[str, Any]) -> Judgement:
    text, reasoning, expect = reply["text"], reply["reasoning"], question["expect"]
    kind = question.get("kind", "number")
    if kind in ("list", "count"):
        return judge_list(text, reasoning, numbers_of(expect) if kind == "list" else counted(expect))
    if kind == "code":
        return judge_code(text, reasoning, expect)
    return judge_exact(text, reasoning, expect) if kind == "exact" else judge_number(text, reasoning, expect)


def numbers_of(expect: str) -> list[int]:
    """`2, 3, 5` as numbers. Raises ValueError."""
    return [int(number) for number in expect.split(",")]


def counted(expect: str) -> list[int]:
    """`101-140` as all whole numbers from the first to the last. Raises ValueError."""
    first, _, last = expect.partition("-")
    return list(range(int(first), int(last) + 1))
