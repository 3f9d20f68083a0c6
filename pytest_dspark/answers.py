"""What a model answered: the final answer out of its text, and whether it is right. Pure, and the same every time.

What is judged is the answer and not its wording: thinking, code fences and emphasis are taken away first. Reasoning is
never searched: a code that was only thought of was not answered. Texts are normalised (NFKC) on both sides, so full-width
digits are the digits they look like; digits of other scripts are not. Callers store the raw text beside `Extracted`.

Whether the token budget ended is not seen here: a missing answer with `finish_reason: length` is the caller's TOKEN_LIMIT.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from pytest_dspark import strictjson

NO_ANSWER: Final = "no final answer"
SHOWN: Final = 200


@dataclass(frozen=True, slots=True)
class Extracted:
    """An answer, the rule that found it, and, when there is none, the problem (then `answer` is empty)."""

    answer: str
    rule: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether an answer is right. `code` is empty, NO_ANSWER or WRONG_ANSWER; `answer` and `rule` say what was judged."""

    ok: bool
    code: str
    message: str
    answer: str
    rule: str


THINK_END: Final = re.compile(r"</think(?:ing)?\s{0,9}>", re.IGNORECASE)
THINK_START: Final = re.compile(r"<think(?:ing)?\s{0,9}>", re.IGNORECASE)
FENCE: Final = re.compile(r"^[ \t]{0,9}(?:```|~~~)[\w+.-]{0,40}[ \t]{0,99}$", re.MULTILINE)
# Replaced by a blank and not by nothing: `4*8213` must not become a code.
EMPHASIS: Final = re.compile(r"[*`]+|(?<![^\W_])_+|_+(?![^\W_])")
# A number by itself: no part of a word, a fraction, a longer number, or of one with other separators.
NUMBER: Final = re.compile(
    r"(?<![\w.,/])(?<![0-9][:^])[-+−]?[$€£]?(?P<digits>[0-9]{1,3}(?:,[0-9]{3}){1,9}(?:\.[0-9]{1,30})?|[0-9]{1,30}(?:\.[0-9]{1,30})?)"
    r"(?![\w/^]|[.,:][0-9]|%[0-9])"
)
WHOLE: Final = re.compile(r"(?<![\w.])(?P<number>[0-9]{1,15})(?!\w|[.][0-9])")
LINE_NUMBER: Final = re.compile(r"^[ \t]{0,9}[0-9]{1,4}[.)][ \t]{1,9}(?=[0-9])", re.MULTILINE)
STATED: Final = re.compile(r"(?i:####|\bboxed\{|\banswer(?:[ \t]{1,4}is|[ \t]{0,4}[:=]))[ \t\n:=]{0,9}")


def final_answer(text: str | None, reasoning: str | None) -> Extracted:
    """The answer without thinking, code fences and emphasis. With nothing left the problem is `no final answer`.

    `reasoning` is what the server sent apart from the content; it only makes the problem clearer. Of several closing
    think tags the last counts, and the opening one may be missing (it stands in the prompt). An opening tag that is
    never closed begins thinking that never ended.
    """
    spoken = _spoken(text, reasoning)
    answer = EMPHASIS.sub(" ", spoken.answer).strip()
    rule = spoken.rule if answer == spoken.answer else f"{spoken.rule}, without emphasis"
    problem = spoken.problem if answer or spoken.problem else NO_ANSWER
    return Extracted(answer, rule, problem)


def _spoken(text: str | None, reasoning: str | None) -> Extracted:
    """What stands after the thinking, without fences."""
    whole = unicodedata.normalize("NFKC", text or "")
    said, rule = _after_thinking(whole)
    plain = FENCE.sub("", said).strip()
    if plain != said.strip():
        rule += ", without fences"
    if plain:
        return Extracted(plain, rule)
    return Extracted(
        "", rule, f"{NO_ANSWER}: nothing but reasoning" if whole.strip() or (reasoning or "").strip() else NO_ANSWER
    )


def _after_thinking(text: str) -> tuple[str, str]:
    ends = list(THINK_END.finditer(text))
    said = text[ends[-1].end() :] if ends else text
    start = THINK_START.search(said)
    if start:
        return said[: start.start()], "before thinking that never ended"
    return said, "after the last </think>" if ends else "the text"


def exactly_one_code(answer: str, pattern: re.Pattern[str] | str) -> Extracted:
    """The one code of this shape in an answer. The same code several times is one; two different ones are a problem.

    A code stands by itself: it is no part of a longer word, number or hyphenated name (148213 does not hold 48213).
    """
    codes = codes_in(answer, pattern)
    if len(codes) == 1:
        return Extracted(codes[0], "exactly one code")
    found = f"ambiguous: {' and '.join(codes[:3])}" if codes else "no code"
    return Extracted("", "exactly one code", found)


def codes_in(answer: str, pattern: re.Pattern[str] | str) -> tuple[str, ...]:
    """The different codes of this shape that stand by themselves in an answer, in order."""
    shape = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    alone = re.compile(rf"(?<!\w)(?<!\w-)(?<![0-9][.,])(?:{shape})(?!\w)(?!-\w)(?![.,][0-9])")
    return tuple(dict.fromkeys(match[0] for match in alone.finditer(answer)))


def find_number(answer: str) -> Extracted:
    """The number that an answer comes to, written plainly (`-1234.5`).

    The last one that is stated ("the answer is 7", `#### 7`, `\\boxed{7}`), else the only one, else the last one.
    Thousands commas, currency signs and a percent sign are dropped; fractions and numbers inside words do not count.
    """
    stated = [match for start in STATED.finditer(answer) if (match := NUMBER.match(answer, start.end()))]
    numbers = [_plain(match) for match in stated or NUMBER.finditer(answer)]
    if not numbers:
        return Extracted("", "number", "no number")
    rule = "stated number" if stated else "only number" if len(set(numbers)) == 1 else "last number"
    return Extracted(numbers[-1], rule)


def _plain(match: re.Match[str]) -> str:
    value = Decimal(match["digits"].replace(",", ""))
    negative = match[0][0] in "-−" and value != 0
    text = format(value, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return ("-" if negative else "") + (text.lstrip("0") if text.lstrip("0")[:1].isdigit() else "0" + text.lstrip("0"))


def judge_code(text: str | None, reasoning: str | None, expect: str, pattern: str = "") -> Judgement:
    """Right when the answer holds exactly one code of the shape of `expect` (or of `pattern`), and it is `expect`."""
    wanted = unicodedata.normalize("NFKC", expect)
    final = final_answer(text, reasoning)
    if final.problem:
        return _missing(final)
    code = exactly_one_code(final.answer, pattern or shape_of(wanted))
    return _judged(
        code.answer == wanted, f"expected the code {wanted}, found {code.problem or code.answer}", final, code
    )


def judge_codes(text: str | None, reasoning: str | None, expect: Sequence[str]) -> Judgement:
    """Right when the codes in the answer that look like those of `expect` are exactly these, in any order."""
    if len(expect) == 1:
        return judge_code(text, reasoning, expect[0])
    final = final_answer(text, reasoning)
    if final.problem:
        return _missing(final)
    found = {code: None for wanted in expect for code in codes_in(final.answer, shape_of(wanted))}
    said = ", ".join(found) or "no code"
    return _judged(
        found.keys() == set(expect),
        f"expected the codes {', '.join(expect)}, found {said}",
        final,
        Extracted(said, "exactly these codes"),
    )


def shape_of(code: str) -> str:
    """A pattern for codes that look like this one: each run of letters and digits keeps its length and its kinds.

    A code of letters alone is its own only shape, since any word of its length would look like it.
    """
    if not any(character.isdigit() for character in code):
        return re.escape(code)
    return "".join(_run(part) for part in re.findall(r"[A-Za-z0-9]+|[^A-Za-z0-9]+", code))


def _run(part: str) -> str:
    if not part.isalnum() or not part.isascii():
        return re.escape(part)
    kinds = (("A-Z", str.isupper), ("a-z", str.islower), ("0-9", str.isdigit))
    return f"[{''.join(name for name, test in kinds if any(map(test, part)))}]{{{len(part)}}}"


def judge_number(text: str | None, reasoning: str | None, expect: str | int | float) -> Judgement:
    """Right when the number that the answer comes to (`find_number`) equals `expect`, as a number."""
    final = final_answer(text, reasoning)
    if final.problem:
        return _missing(final)
    number, wanted = find_number(final.answer), Decimal(str(expect).replace(",", ""))
    ok = not number.problem and Decimal(number.answer) == wanted
    return _judged(ok, f"expected the number {expect}, found {number.problem or number.answer}", final, number)


def judge_list(text: str | None, reasoning: str | None, expect: Sequence[int]) -> Judgement:
    """Right when the whole numbers of the answer are exactly these in this order. Line numbers (`12.` or `12)` before another
    number) are not counted, nor is what a sentence before or after the list says in words."""
    final = final_answer(text, reasoning)
    if final.problem:
        return _missing(final)
    said = [int(match["number"].replace(",", "")) for match in WHOLE.finditer(LINE_NUMBER.sub("", final.answer))]
    pairs = zip(said, expect, strict=False)
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(said), len(expect)))
    found = Extracted(", ".join(map(str, said)), "whole numbers in order")
    wrong = f"expected {len(expect)} numbers, found {len(said)}; number {at + 1} is "
    wrong += f"{said[at] if at < len(said) else 'missing'}, expected {expect[at] if at < len(expect) else 'none'}"
    return _judged(said == list(expect), wrong, final, found)


def judge_exact(text: str | None, reasoning: str | None, expect: str) -> Judgement:
    """Right when the answer is `expect` and nothing else, but for quotes, `\\boxed{}` and a full stop around it.

    Two numbers are compared as numbers: 1,234 is 1234.
    """
    final = final_answer(text, reasoning)
    if final.problem:
        return _missing(final)
    found, wanted = _bare(final.answer), _bare(unicodedata.normalize("NFKC", expect))
    bare = Extracted(found, "the whole answer")
    return _judged(_same(found, wanted), f"expected exactly {wanted!r}, found {_shown(found)!r}", final, bare)


def _bare(text: str) -> str:
    text = text.strip()
    for mark in ("\\boxed{", "\\(", "\\["):
        if text.startswith(mark):
            text = text[len(mark) :].rstrip(".}])\\ ")
    stripped = text.strip(" \t\n\"'$“”‘’").rstrip(".").strip(" \t\n\"'$“”‘’")
    return stripped or text


def _same(found: str, wanted: str) -> bool:
    numbers = [NUMBER.fullmatch(side) for side in (found, wanted)]
    if numbers[0] and numbers[1]:
        return _plain(numbers[0]) == _plain(numbers[1])
    return found == wanted


def judge_json(text: str | None, reasoning: str | None, expect: Mapping[str, Any]) -> Judgement:
    """Right when the whole answer is one JSON object (a code fence around it is fine) that equals `expect`.

    Duplicate keys and NaN are no JSON here; true is not 1; keys that were not asked for are wrong.
    """
    spoken = _spoken(text, reasoning)
    if spoken.problem:
        return _missing(spoken)
    answer = Extracted(spoken.answer, "the whole answer as JSON")
    try:
        value = strictjson.loads(spoken.answer)
    except (ValueError, RecursionError) as error:
        return _judged(False, f"expected a JSON object, found {_shown(spoken.answer)!r} ({error})", spoken, answer)
    return _judged(_difference(value, dict(expect)) == "", _difference(value, dict(expect)), spoken, answer)


def _difference(value: Any, expect: dict[str, Any]) -> str:
    """What is wrong with a JSON value, or the empty text."""
    if not isinstance(value, dict):
        return f"expected a JSON object, found {_shown(json.dumps(value))}"
    if value.keys() != expect.keys():
        return f"expected the keys {sorted(expect)}, found {_shown(repr(sorted(value)))}"
    wrong = next((key for key in expect if not equal(value[key], expect[key])), None)
    return "" if wrong is None else f"expected {wrong} to be {expect[wrong]!r}, found {_shown(repr(value[wrong]))}"


def equal(left: Any, right: Any) -> bool:
    """Whether two values are the same JSON: true is not 1, and 1.0 is."""
    if isinstance(left, dict) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return isinstance(left, bool) is isinstance(right, bool) and bool(left == right)


def _missing(final: Extracted) -> Judgement:
    return Judgement(False, "NO_ANSWER", final.problem, "", final.rule)


def _judged(ok: bool, message: str, final: Extracted, found: Extracted) -> Judgement:
    shown = f" in {_shown(final.answer)!r}" if found.problem else ""
    return Judgement(
        ok, "" if ok else "WRONG_ANSWER", "" if ok else message + shown, found.answer, f"{final.rule}: {found.rule}"
    )


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
