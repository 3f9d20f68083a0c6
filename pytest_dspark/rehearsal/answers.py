"""What the emulated model says: rules that really read the prompt, so that a wrong prompt gets a wrong answer."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

_CODE = re.compile(r"(?:code|secret|key|password|number)[^.\n]{0,40}? is:? \**([A-Z0-9]{2,}(?:-[A-Z0-9]+)+|[0-9]{4,8})", re.IGNORECASE)
_TIMES = re.compile(r"(-?\d+)\s*(?:times|multiplied by|[x×*])\s*(-?\d+)", re.IGNORECASE)
_SUM = re.compile(r"(-?\d+)\s*(plus|minus|\+|-)\s*(-?\d+)", re.IGNORECASE)
_PAIR = re.compile(r"([a-z_]+) is (-?\d+)")
_CAPITALS = {"France": "Paris", "Germany": "Berlin", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo"}
_WORDS = """the keeper climbed the narrow stairs while rain beat on the glass and far below the grey sea turned over its stones
a lamp burned in the upper room where nobody had slept since spring and the old clock kept its own slow time""".split()


@dataclass(frozen=True, slots=True)
class Plan:
    """One answer before it is cut into pieces. `calls` are (name, arguments text)."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...]
    budget: int
    finish: str
    seed: int
    exact: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """One event: text of one kind and how many tokens it stands for."""

    kind: str
    text: str
    tokens: int
    finish: str | None = None
    name: str = ""
    cached: int = 0


def with_cached(piece: Piece, cached: int) -> Piece:
    return replace(piece, cached=cached)


def answer(prompt: str, body: Mapping[str, Any], chat: bool, args: argparse.Namespace, faults: Mapping[str, str], tokenizer: Any) -> Plan:
    """The whole answer to one request, cut to its budget."""
    seed = int(hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:8], 16)
    budget = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
    thinking = chat and _thinking(body, args)
    calls = _calls(prompt, body, faults) if chat else ()
    text = "" if calls else _text(prompt, body, seed)
    if "wrong_answer" in faults and not calls:
        text = re.sub(r"\d", lambda match: str((int(match.group()) + 1) % 10), text)
    if "garble" in faults or int(args.compilation_config.get("mode", 3)) != 0:
        text = "\ufffd" + text[::-1] + " 的的的的 \ufffd\ufffd"
    reasoning = "I read the question and look at what it asks for. " * (4000 if "think_forever" in faults else 1) if thinking else ""
    plan = Plan(reasoning, text, calls, budget, "tool_calls" if calls else "stop", seed)
    return _fit(plan, body, tokenizer)


def _thinking(body: Mapping[str, Any], args: argparse.Namespace) -> bool:
    given = dict(args.default_chat_template_kwargs) | dict(body.get("chat_template_kwargs") or {})
    return bool(given.get("thinking", False)) and bool(args.reasoning_parser)


def _fit(plan: Plan, body: Mapping[str, Any], tokenizer: Any) -> Plan:
    """Cut to the budget, or fill up to min_tokens; `exact` is the number of tokens where the length was asked for."""
    ids = tokenizer.encode(plan.text)
    spent = len(tokenizer.encode(plan.reasoning))
    least = plan.budget if body.get("ignore_eos") else int(body.get("min_tokens") or 0)
    if len(ids) + spent < least and not plan.calls:
        prose = tokenizer.encode(" " + _prose(plan.seed, least * 2))
        ids = (ids + prose)[: max(least - spent, 0)]
    if spent >= plan.budget and plan.reasoning:
        return replace(plan, reasoning=tokenizer.decode(tokenizer.encode(plan.reasoning)[: plan.budget]), text="", calls=(), finish="length")
    finish = "length" if len(ids) + spent >= plan.budget and not plan.calls else plan.finish
    return replace(plan, text=tokenizer.decode(ids[: plan.budget - spent]), finish=finish)


def _prose(seed: int, words: int) -> str:
    chooser = random.Random(seed)
    return " ".join(chooser.choice(_WORDS) for _ in range(words))


def _question(prompt: str) -> str:
    """The last lines decide what is asked."""
    return prompt[-400:]


def _text(prompt: str, body: Mapping[str, Any], seed: int) -> str:
    question = _question(prompt)
    if body.get("response_format") or "JSON" in question:
        return _json(question, body)
    found = re.search(r"\b(?:code|secret|key|password)\b", question, re.IGNORECASE) and _CODE.search(prompt)
    if found:
        return found.group(1)
    return _number(question) or _capital(question) or _prose(seed, 40 + seed % 20)


def _number(question: str) -> str:
    times, total = _TIMES.search(question), _SUM.search(question)
    if times:
        return str(int(times[1]) * int(times[2]))
    if total:
        sign = -1 if total[2].lower() in ("minus", "-") else 1
        return str(int(total[1]) + sign * int(total[3]))
    return ""


def _capital(question: str) -> str:
    if "capital" not in question:
        return ""
    return next((f"The capital of {land} is {city}." for land, city in _CAPITALS.items() if land in question), "")


def _json(question: str, body: Mapping[str, Any]) -> str:
    pairs = {key: int(value) for key, value in _PAIR.findall(question)}
    schema = ((body.get("response_format") or {}).get("json_schema") or {}).get("schema") or {}
    wanted = schema.get("properties") or pairs
    return json.dumps({key: pairs.get(key, 0) for key in wanted})


def _calls(prompt: str, body: Mapping[str, Any], faults: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    tools, choice = body.get("tools") or (), body.get("tool_choice", "auto")
    if not tools or choice == "none":
        return ()
    forced = choice.get("function", {}).get("name") if isinstance(choice, Mapping) else None
    functions = [tool["function"] for tool in tools if forced in (None, tool["function"]["name"])]
    if not functions or (choice == "auto" and not re.search(r"weather|tool", prompt, re.IGNORECASE)):
        return ()
    arguments = json.dumps(_arguments(_question(prompt), functions[0].get("parameters") or {}))
    return ((functions[0]["name"], arguments[: len(arguments) // 2] if "cut_tool_args" in faults else arguments),)


def _arguments(question: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    names = re.findall(r"\b(?:in|of|for) ([A-Z][a-z]+)", question) or [""]
    numbers = [int(number) for number in re.findall(r"\d+", question)] or [0]
    kinds = {"integer": numbers[0], "number": numbers[0], "boolean": True}
    return {name: kinds.get(spec.get("type", ""), names[0]) for name, spec in (parameters.get("properties") or {}).items()}


def pieces(plan: Plan, k: int, tokenizer: Any) -> Iterator[Piece]:
    """The answer as events of one to K + 1 tokens; the last one says why it ended."""
    chooser = random.Random(plan.seed)
    made: list[Piece] = []
    for kind, text in (("reasoning", plan.reasoning), ("content", plan.text)):
        ids = tokenizer.encode(text)
        while ids:
            count = min(len(ids), chooser.randint(1, k + 1) if k else 1)
            made.append(Piece(kind, tokenizer.decode(ids[:count]), count))
            ids = ids[count:]
    for name, arguments in plan.calls:
        parts = [arguments[at : at + 7] for at in range(0, len(arguments), 7)] or [""]
        made.append(Piece("tool", parts[0], 3, name=name))
        made += [Piece("tool", part, 3) for part in parts[1:]]
    made = made or [Piece("content", "", 1)]
    yield from made[:-1]
    yield replace(made[-1], finish=plan.finish)
