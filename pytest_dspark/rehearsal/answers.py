"""The model: rules that really read the prompt, and prose for everything else. The same prompt and seed, the same answer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice
from typing import Any

import arithmetic
import prose
import retrieval
import tokens
import tools
from faults import Faults

CAPITALS = {
    "argentina": "Buenos Aires", "australia": "Canberra", "austria": "Vienna", "belgium": "Brussels", "brazil": "Brasília",
    "canada": "Ottawa", "chile": "Santiago", "china": "Beijing", "denmark": "Copenhagen", "egypt": "Cairo", "finland": "Helsinki",
    "france": "Paris", "germany": "Berlin", "greece": "Athens", "india": "New Delhi", "ireland": "Dublin", "italy": "Rome",
    "japan": "Tokyo", "kenya": "Nairobi", "mexico": "Mexico City", "norway": "Oslo", "peru": "Lima", "poland": "Warsaw",
    "portugal": "Lisbon", "spain": "Madrid", "sweden": "Stockholm", "switzerland": "Bern", "turkey": "Ankara",
}  # fmt: skip
QUESTION_CHARACTERS = 400
LONG_CHARACTERS = 200_000
_EXACTLY = re.compile(
    r"\b(?:reply|respond|answer|say|output|print|return|write)\b[^.\n]{0,40}?(?::|\b(?:exactly|only|with|word|text))\s*:?\s+"
    r"(?:[\"'`]([^\"'`\n]{1,80})[\"'`]|((?-i:[A-Z0-9]+(?:_[A-Z0-9]+)+)))",
    re.IGNORECASE,
)
_LENGTH = re.compile(r"\b(\d{2,5})[- ](words?|sentences?|tokens?)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request asks of the model. `turn` is all of the last user message, `known` what it knows by heart of it."""

    text: str
    question: str
    seed: int
    thinking: bool
    turn: str = ""
    known: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = "none"
    response_format: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What the model is going to say. Texts come in parts, perhaps without end; `reasoning` None is no thinking."""

    reasoning: Iterable[str] | None
    content: Iterable[str]
    calls: tuple[tools.Call, ...] = ()
    retrieves: bool = False


def turn_of(text: str) -> str:
    """The last user message of a rendered chat, or a plain text."""
    user = text.rpartition(tokens.SPECIALS[tokens.USER])[2]
    return user.partition(tokens.SPECIALS[tokens.ASSISTANT])[0].strip()


def question_of(text: str) -> str:
    """The last question of a rendered chat or of a plain text: its last lines."""
    return turn_of(text)[-QUESTION_CHARACTERS:]


def asking(question: str) -> str:
    """The last sentence with a question mark and all after it; without one, the last two sentences."""
    parts = re.split(r"(?<=[.!?。？])\s+|\n+", question)
    marked = [at for at, part in enumerate(parts) if part.endswith(("?", "？"))]
    return " ".join(parts[marked[-1] if marked else -2 :])


def plan(asked: Asked, faults: Faults, *, garbled: bool) -> Plan:
    """The whole answer, with the model's faults in it."""
    calls = tools.called(asked.tools, asked.tool_choice, asked.turn or asked.question)
    calls = tuple(_faulty_call(call, faults) for call in calls)
    short = "" if calls else asked.known or _short_answer(asked, fooled="answers_decoy" in faults)
    short = _off(short) if short and "wrong_answer" in faults else short
    content: Iterable[str] = () if calls else (short,) if short else _prose(asked)
    if "rambles" in faults and len(asked.text) > LONG_CHARACTERS:
        content = prose.sentences(asked.seed)
    reasoning = _reasoning(asked, short, faults)
    if garbled:
        begin = int(faults.text("garble") or 0)
        content = _garbled(content, asked.seed, begin)
        reasoning = _garbled(reasoning, asked.seed, begin) if reasoning is not None else None
    retrieves = bool(retrieval.KEYWORD.search(asking(asked.question)) and retrieval.declared(asked.text))
    return Plan(reasoning, content, calls, retrieves)


def _reasoning(asked: Asked, short: str, faults: Faults) -> Iterable[str] | None:
    begin = f"The question is: {asked.question[-80:].strip()}\nI read it once more and work it out step by step. "
    if "think_forever" in faults and (asked.thinking or faults.text("think_forever") != "asked"):
        return chain((begin,), prose.sentences(asked.seed))
    if not asked.thinking:
        return None
    return (begin + (f"The result is {short[:60]}, and I give it as asked." if short else "I will write it plainly."),)


# --- short answers


def _short_answer(asked: Asked, *, fooled: bool) -> str:
    question = asked.question
    if asked.response_format and asked.response_format.get("type") in ("json_object", "json_schema"):
        return _json_answer(asked)
    exact = _EXACTLY.search(question)
    if exact:
        return exact.group(1) or exact.group(2)
    if re.search(r"\bJSON\b", question, re.IGNORECASE) and (tools.literal(question) or tools.pairs(question)):
        return tools.literal(question) or json.dumps(tools.pairs(question))
    wish = asking(question)
    if retrieval.KEYWORD.search(wish):
        found = retrieval.answer(asked.text, wish, fooled=fooled)
        if found or re.search(r"\b(what|which|find|recall|retrieve)\b", wish, re.IGNORECASE):
            return found or "I could not find that in the text."
    return _known(wish) or _known(question)


def _known(question: str) -> str:
    number = arithmetic.value(question)
    if number is not None:
        return arithmetic.spelled(number)
    lowered = question.lower()
    primes = re.search(r"\b(\d{1,4}) prime", lowered)
    if primes:
        return ", ".join(map(str, _primes(int(primes.group(1)))))
    count = re.search(r"\bcount (?:from )?(\d{1,5}) (?:up )?to (\d{1,5})\b", lowered)
    if count:
        return ", ".join(map(str, range(int(count.group(1)), int(count.group(2)) + 1)))
    if "capital" in lowered:
        return next((city for country, city in CAPITALS.items() if country in lowered), "")
    return ""


def _primes(count: int) -> list[int]:
    found: list[int] = []
    number = 2
    while len(found) < count:
        if all(number % prime for prime in found if prime * prime <= number):
            found.append(number)
        number += 1
    return found


def _json_answer(asked: Asked) -> str:
    form = asked.response_format or {}
    schema = (form.get("json_schema") or {}).get("schema")
    if schema:
        return json.dumps(tools.filled(schema, asked.question))
    said = tools.literal(asked.question)
    return said or json.dumps(tools.pairs(asked.question) or {"answer": _known(asked.question) or "unknown"})


# --- long answers


def _prose(asked: Asked) -> Iterable[str]:
    """As long as the question asks for: so many words, `long`, else a paragraph."""
    subject = re.search(r"\babout (an? [a-z]+(?: [a-z]+)?|the [a-z]+)", asked.question)
    name = re.sub(r"^an? ", "the ", subject.group(1)) if subject else ""
    length = _LENGTH.search(asked.question)
    endless = prose.sentences(asked.seed, name)
    if length and length.group(2).lower().startswith("sentence"):
        return islice(endless, int(length.group(1)))
    words = (
        int(length.group(1)) if length else 500 if re.search(r"\b(long|essay|detail)", asked.question.lower()) else 60
    )
    return (prose.text(asked.seed, name, words),)


def more(seed: int) -> Iterable[str]:
    """What comes when a request wants more tokens than the answer has."""
    return chain((" ",), prose.sentences(seed ^ 0x5EED))


# --- faults


def _off(text: str) -> str:
    """The same shape with other contents: each digit one more, each word-like code's first letter another."""
    moved = re.sub(r"\d", lambda m: str((int(m.group()) + 1) % 10), text)
    return moved if moved != text else f"{text[::-1]}"


def _faulty_call(call: tools.Call, faults: Faults) -> tools.Call:
    arguments = call.arguments
    if "wrong_answer" in faults:
        arguments = json.dumps({key: _off_value(value) for key, value in json.loads(arguments).items()})
    if "cut_tool_args" in faults and len(arguments) > int(faults.text("cut_tool_args") or 0):
        arguments = arguments[: max(1, len(arguments) // 2)]
    return tools.Call(call.name, arguments)


def _off_value(value: Any) -> Any:
    if isinstance(value, (int, float, Fraction)) and not isinstance(value, bool):
        return value + 1
    return _off(value) if isinstance(value, str) and value else value


def _garbled(parts: Iterable[str], seed: int, begin: int) -> Iterable[str]:
    """Letters and digits replaced after `begin` characters, among them some from other scripts; the words keep their shape."""
    chooser, given = random.Random(seed), 0
    letters = "abcdefghijklmnopqrstuvwxyz的是яжüß"
    for part in parts:
        whole = max(0, begin - given)
        given += len(part)
        yield part[:whole] + "".join(chooser.choice(letters) if char.isalnum() else char for char in part[whole:])
