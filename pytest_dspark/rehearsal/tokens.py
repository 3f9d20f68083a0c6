"""Words to ids and back, without loss, and the chat template.

A word is a run of letters with the blank before it, up to three digits, or one other character. Its id is its checksum
modulo the vocabulary, one of the next few if that is taken, else the word is spelled in byte tokens. What is known is kept
in memory, at most as many words as half the vocabulary.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SPECIALS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<｜Tool｜>",
    "<think>",
    "</think>",
)
BOS, EOS, USER, ASSISTANT, SYSTEM, TOOL, THINK, END_THINK = range(len(SPECIALS))
VOCABULARY = 129280
UNKNOWN = "\ufffd"
PREAMBLE = "You are a model of a rehearsal and you answer what is asked"
"""13 tokens; with the marks of begin, user, assistant and thinking one user message costs 17."""
_FIRST_BYTE = 100
_FIRST_WORD = _FIRST_BYTE + 256
_PROBES = 8
_PATTERN = re.compile("|".join(map(re.escape, SPECIALS)) + r"| ?[A-Za-z]{1,16}| ?[0-9]{1,3}|\n\n| ?[^\sA-Za-z0-9]|\s")


class Tokenizer(dict[str, tuple[int, ...]]):
    """The table itself: a word that is looked up and not known is entered."""

    def __init__(self) -> None:
        super().__init__({text: (number,) for number, text in enumerate(SPECIALS)})
        self.words: dict[int, str] = dict(enumerate(SPECIALS))

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = self._enter(word)
        if len(ids) == 1:
            self[word] = ids
        return ids

    def _enter(self, word: str) -> tuple[int, ...]:
        size = VOCABULARY - _FIRST_WORD
        start = zlib.crc32(word.encode("utf-8", "surrogatepass"))
        if len(self.words) < VOCABULARY // 2:
            for probe in range(_PROBES):
                number = _FIRST_WORD + (start + probe) % size
                if self.words.setdefault(number, word) == word:
                    return (number,)
        return tuple(_FIRST_BYTE + byte for byte in word.encode("utf-8", "surrogatepass"))

    def pieces(self, text: str) -> list[str]:
        """The words of a text; joined they are the text again."""
        return _PATTERN.findall(text)

    def encode(self, text: str) -> list[int]:
        return list(itertools.chain.from_iterable(map(self.__getitem__, _PATTERN.findall(text))))

    def decode(self, ids: Iterable[int]) -> str:
        """Ids that were never given out become a replacement mark."""
        parts: list[str] = []
        pending = bytearray()
        for number in ids:
            word = self.words.get(number)
            if word is None and _FIRST_BYTE <= number < _FIRST_WORD:
                pending.append(number - _FIRST_BYTE)
                continue
            if pending:
                parts.append(_text(pending))
                pending = bytearray()
            parts.append(UNKNOWN if word is None else word)
        return "".join(parts) + _text(pending)


def _text(raw: bytearray) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace")


def out_of_vocabulary(ids: Sequence[int]) -> int | None:
    """The first id that no tokenizer of this vocabulary can have given."""
    return next((number for number in ids if not 0 <= number < VOCABULARY), None)


def rendered(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, thinking: bool, open_turn: bool = True
) -> str:
    """The chat as one text, special tokens included. Raises ValueError for content that is not text."""
    marks = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM, "developer": SYSTEM, "tool": TOOL}
    parts = [SPECIALS[BOS], PREAMBLE]
    parts += [f"\n\nTools: {json.dumps(list(tools))}"] if tools else []
    for message in messages:
        role = str(message.get("role"))
        if role not in marks:
            raise ValueError(f"Unexpected message role: {role!r}")
        parts += [SPECIALS[marks[role]], content_text(message)]
        parts += [SPECIALS[EOS]] if role == "assistant" else []
    if open_turn:
        parts += [SPECIALS[ASSISTANT], SPECIALS[THINK if thinking else END_THINK]]
    return "".join(parts)


def content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("At most 0 image(s) may be provided in one prompt.")
        return "".join(str(part.get("text", "")) for part in content)
    calls = message.get("tool_calls")
    return str(content or "") + (json.dumps(calls) if calls else "")
