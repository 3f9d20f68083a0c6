"""Is a text garbled? Pure, and without a language model: it looks for what no healthy answer of any language holds.

- replacement and control characters: bytes that were no text;
- words of mixed scripts (`q是ж`): Latin and Cyrillic letters in one word, or an alphabet and Chinese characters letter by letter;
- lines that go to and fro between three scripts: tokens drawn at random;
- loops: one phrase again and again up to the end;
- an end before the first word.

Ordinary texts stay clean: Chinese or Japanese with Latin names in it, Greek letters of formulas, code, tables, lists of
numbers, names for one thing in many languages. What is only wrong is not garbled: the judges of answers look for that.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Final

IMMEDIATE_END: Final = "an immediate end: no word was said"
LOOP_CHARACTERS: Final = 160
"""Characters that a phrase and its repetitions must fill to be a loop."""
LOOP_TIMES: Final = 6
LOOP_TAIL: Final = 4000
RULE_CHARACTERS: Final = 600
"""The same for a phrase without letters and digits, as in the rules of tables."""
MIXED_WORDS: Final = 2
SLIP: Final = 20
"""So many words of mixed scripts are still taken for a slip, if the text has 20 times as many words."""
SALAD_TURNS: Final = 6
# Tab, line feed and carriage return are text.
_BROKEN: Final = re.compile("[\ufffd\ufffe\uffff\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_LETTERS: Final = re.compile(r"[^\W\d_]+")
# One written language uses them side by side.
_EAST_ASIAN: Final = frozenset(
    ["CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO", "IDEOGRAPHIC", "KATAKANA-HIRAGANA"]
)
# Letters of formulas and units stand in words of every script.
_NEUTRAL: Final = frozenset(
    ["GREEK", "MICRO", "MATHEMATICAL", "MODIFIER", "SUPERSCRIPT", "FEMININE", "MASCULINE", "OHM"]
)


def garbled(text: str, *, cut: bool = False, loops: bool = True) -> str:
    """What is wrong with the text, one clause; empty if nothing is.

    `cut`: the text was ended by its budget, so that half a character may stand at its end. `loops` False lets it repeat
    itself.
    """
    if not text.strip():
        return IMMEDIATE_END
    whole = text.rstrip("\ufffd") if cut and len(text) - len(text.rstrip("\ufffd")) <= 3 else text
    return _broken(whole) or _mixed(whole) or _salad(whole) or (loop(whole) if loops else "")


def _broken(text: str) -> str:
    found = _BROKEN.findall(text)
    if not found:
        return ""
    kinds = ", ".join(dict.fromkeys(f"U+{ord(one):04X}" for one in found[:5]))
    return f"{len(found)} characters that are no text ({kinds})"


@lru_cache(maxsize=4096)
def script(letter: str) -> str:
    """The family of scripts of a letter; empty for one that stands in words of every script."""
    if letter.isascii() or not letter.isalpha():
        return "LATIN" if letter.isascii() else ""
    name = unicodedata.name(letter, "").partition(" ")[0]
    if name in _NEUTRAL:
        return ""
    return "CJK" if name in _EAST_ASIAN else "LATIN" if name == "FULLWIDTH" else name


def _runs(word: str) -> list[tuple[str, int]]:
    """Scripts of a word in order with the letters of each, neutral ones left out."""
    runs: list[tuple[str, int]] = []
    for family in filter(None, map(script, word)):
        if runs and runs[-1][0] == family:
            runs[-1] = (family, runs[-1][1] + 1)
        else:
            runs.append((family, 1))
    return runs


def _is_mixed(word: str, *, east_asian: bool) -> bool:
    """Two alphabets in one word; or letters and Chinese characters in one: in an East Asian text only if they take turns one
    by one, since there a name of Latin letters stands between the characters without a blank."""
    runs = _runs(word)
    families = {family for family, _ in runs}
    if len(families) < 2:
        return False
    if len(families - {"CJK"}) > 1 or not east_asian:
        return True
    short = sum(length == 1 for family, length in runs if family != "CJK")
    return len(runs) > 3 and 2 * short > sum(family != "CJK" for family, _ in runs)


def _mixed(text: str) -> str:
    words = _LETTERS.findall(text)
    letters = [family for word in words for family, length in _runs(word) for _ in range(length)]
    east_asian = 5 * letters.count("CJK") > len(letters)
    mixed = [word for word in words if _is_mixed(word, east_asian=east_asian)]
    if not mixed or (len(mixed) <= MIXED_WORDS and len(words) >= SLIP * len(mixed)):
        return ""
    return f"{len(mixed)} of {len(words)} words mix scripts, as {mixed[0][:30]!r}"


def _salad(text: str) -> str:
    for line in text.splitlines():
        families = [family for word in _LETTERS.findall(line) for family, _ in _runs(word)]
        turns = sum(one != other for one, other in pairwise(families))
        if turns >= SALAD_TURNS and len(set(families)) > 2 and 2 * turns > len(families):
            return f"a line goes to and fro between {', '.join(sorted(set(families)))}: {line[:60]!r}"
    return ""


def loop(text: str) -> str:
    """The phrase that the text ends in repeating, as one clause; empty if there is none."""
    tail = text.rstrip()[-LOOP_TAIL:]
    for period, length in _periods(tail):
        phrase = tail[-period:]
        enough = LOOP_CHARACTERS if any(map(str.isalnum, phrase)) else RULE_CHARACTERS
        if length >= enough and length >= LOOP_TIMES * period:
            return f"a loop: {phrase.strip()[:60]!r} {length // period} times at the end"
    return ""


def _periods(tail: str) -> Iterator[tuple[int, int]]:
    """Each period with the characters at the end that keep to it."""
    for period in range(1, len(tail) // LOOP_TIMES + 1):
        length = period
        while length < len(tail) and tail[-length - 1] == tail[-length - 1 + period]:
            length += 1
        yield period, length
