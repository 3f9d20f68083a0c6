"""Filling a JSON schema, or the arguments of a tool, from what a question says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PAIR = re.compile(
    r"[\"'`]?\b([A-Za-z_]\w*)[\"'`]?\s*(?:is set to|set to|equal to|is|=|:|to)\s*(-?\d+(?:\.\d+)?|\"[^\"]*\"|'[^']*'|true\b|false\b|null\b)"
)
_NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?(?![\w])")
_NAME = re.compile(r"(?<![.!?\n] )(?<!^)\b[A-Z][a-zà-ÿ]+(?:[ -][A-Z][a-zà-ÿ]+)*")
_NOT_NAMES = frozenset(
    [
        "Use",
        "The",
        "What",
        "Which",
        "Please",
        "Reply",
        "Return",
        "Compute",
        "Json",
        "I",
        "It",
        "Call",
        "Get",
        "Only",
        "Weather",
        "Celsius",
        "Fahrenheit",
        "Today",
    ]
)
_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str


def pairs(text: str) -> dict[str, Any]:
    """`alpha is 2 and beta is 3` as {"alpha": 2, "beta": 3}."""
    return {
        key: _value(raw)
        for key, raw in _PAIR.findall(text)
        if key.lower() not in ("answer", "what", "which", "it", "this")
    }


def _value(raw: str) -> Any:
    return raw[1:-1] if raw[0] in "\"'" else json.loads(raw)


def literal(text: str) -> str:
    """The first JSON object that stands in the text, as it stands there; "" if there is none."""
    reader = json.JSONDecoder()
    for match in re.finditer(r"\{", text):
        try:
            value, end = reader.raw_decode(text, match.start())
        except ValueError:
            continue
        if isinstance(value, dict) and value:
            return text[match.start() : end]
    return ""


@dataclass(slots=True)
class _Sources:
    """What the question offers; each name and number is used once."""

    question: str
    pairs: dict[str, Any]
    names: list[str]
    numbers: list[Any]


def names_in(question: str) -> list[str]:
    """Proper names, in order."""
    return [name for name in _NAME.findall(question) if name not in _NOT_NAMES]


def filled(schema: Mapping[str, Any], question: str, names: Sequence[str] | None = None) -> Any:
    """A value that meets the schema (type, enum, const, properties, items), taken from the question where it can be."""
    names = list(names_in(question) if names is None else names)
    numbers = [json.loads(n) for n in _NUMBER.findall(question)]
    return _fill(schema, "", _Sources(question, pairs(question), names, numbers))


def _fill(schema: Mapping[str, Any], name: str, sources: _Sources) -> Any:
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        choices = schema["enum"]
        said = [c for c in choices if re.search(rf"\b{re.escape(str(c))}\b", sources.question, re.IGNORECASE)]
        return (said or choices)[0]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {key: _fill(sub, key, sources) for key, sub in (schema.get("properties") or {}).items()}
    if kind == "array":
        return [_fill(schema.get("items") or {}, name, sources)]
    return _scalar(str(kind), name, sources)


def _scalar(kind: str, name: str, sources: _Sources) -> Any:
    said = sources.pairs.get(name)
    if kind == "boolean":
        return said if isinstance(said, bool) else True
    if kind in ("integer", "number"):
        if isinstance(said, (int, float)) and not isinstance(said, bool):
            return int(said) if kind == "integer" else said
        number = sources.numbers.pop(0) if sources.numbers else 0
        return int(number) if kind == "integer" else number
    if kind == "null":
        return None
    return str(said) if said is not None else sources.names.pop(0) if sources.names else ""


def called(tools: Sequence[Mapping[str, Any]], choice: Any, question: str) -> tuple[Call, ...]:
    """The calls for a tool choice of auto, required, none or one named function; `both` asks for one a name."""
    functions = [tool["function"] for tool in tools]
    if not functions or choice == "none":
        return ()
    if isinstance(choice, Mapping):
        wanted = choice["function"]["name"]
        chosen = [function for function in functions if function["name"] == wanted]
    else:
        best = max(functions, key=lambda function: _nearness(function, question))
        asked = choice == "required" or re.search(r"\b(tool|function)s?\b", question, re.IGNORECASE)
        chosen = [best] if asked or _nearness(best, question) > 0 else []
    calls = [Call(f["name"], json.dumps(filled(f.get("parameters") or {}, question))) for f in chosen]
    each = (
        names_in(question)
        if re.search(r"\bboth\b", question, re.IGNORECASE) and not isinstance(choice, Mapping)
        else []
    )
    if len(chosen) == 1 and len(each) > 1:
        schema = chosen[0].get("parameters") or {}
        calls = [Call(chosen[0]["name"], json.dumps(filled(schema, question, [name]))) for name in each]
    return tuple(calls)


def _nearness(function: Mapping[str, Any], question: str) -> int:
    """Words that a function's name and the question have in common."""
    common = {"get", "set", "the", "a", "of", "is", "what", "to", "for", "use", "tool", "function"}
    return len((set(_WORD.findall(function["name"].lower())) & set(_WORD.findall(question.lower()))) - common)
