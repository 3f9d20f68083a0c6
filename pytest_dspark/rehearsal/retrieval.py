"""Finding a code in a text that was declared there: `The secret code is KITE-40917.`"""

from __future__ import annotations

import re
from dataclasses import dataclass

KEYWORD = re.compile(
    r"\b(codes?|secrets?|passwords?|passphrases?|keys?|tokens?|pins?|identifiers?|magic number|needle)\b", re.IGNORECASE
)
_CODE = r"(?:[A-Z0-9]+(?:-[A-Z0-9]+)+|(?=[A-Z]*\d)[A-Z0-9]{4,})"
_DECLARED = re.compile(rf"(?:\bis|\bwas|=|:)\s*[\"'`*“]*({_CODE})(?![\w-])")
_SENTENCE_END = re.compile(r"[.!?\n。](?:\s|$)")
_WORD = re.compile(r"[a-z]+|\d+")
_BACK = 160
_COMMON = frozenset(
    [
        "the",
        "a",
        "an",
        "is",
        "of",
        "in",
        "for",
        "what",
        "which",
        "was",
        "to",
        "with",
        "only",
        "reply",
        "text",
        "above",
        "code",
        "secret",
        "please",
        "tell",
        "me",
        "you",
        "your",
    ]
)


@dataclass(frozen=True, slots=True)
class Declared:
    """One code and the words that declare it."""

    code: str
    words: frozenset[str]


def declared(text: str) -> list[Declared]:
    """Every code that the text declares by a sentence with a keyword in it, in order."""
    found = []
    for match in _DECLARED.finditer(text):
        before = text[max(0, match.start() - _BACK) : match.start()]
        ends = [end.end() for end in _SENTENCE_END.finditer(before)]
        sentence = before[ends[-1] if ends else 0 :]
        if KEYWORD.search(sentence):
            found.append(Declared(match.group(1), _words(sentence)))
    return found


def answer(text: str, question: str, *, fooled: bool = False) -> str:
    """The code that the question asks for, several if it asks for all; "" if none was declared. `fooled`: the one that fits
    the question least."""
    found = declared(text)
    if not found:
        return ""
    if re.search(r"\ball (?:of )?(?:the )?(?:\w+ )?(?:codes|secrets|keys)", question, re.IGNORECASE):
        return ", ".join(dict.fromkeys(item.code for item in found))
    wanted = _words(question)
    choose = min if fooled else max
    return choose(reversed(found), key=lambda item: _score(item.words, wanted)).code


def _score(words: frozenset[str], wanted: frozenset[str]) -> int:
    """Words in common; a number or letter mark that the question does not name counts against it."""
    both = sum(3 if word.isdigit() or len(word) == 1 else 1 for word in words & wanted)
    return both - 3 * sum(word.isdigit() for word in words - wanted)


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.lower())) - _COMMON
