"""Arithmetic as people ask for it: `7 multiplied by 19`, `17×19`, `(3 + 4) * 5`, `the sum of 2 and 3`."""

from __future__ import annotations

import re
from fractions import Fraction

_N = r"(-?\d+(?:\.\d+)?)"
_REWRITES = tuple(
    (re.compile(pattern, re.IGNORECASE), new)
    for pattern, new in (
        (r"(?<=\d),(?=\d{3}\b)", ""),
        (rf"\bsum of {_N} and {_N}", r"(\1 + \2)"),
        (rf"\bproduct of {_N} and {_N}", r"(\1 * \2)"),
        (rf"\bdifference (?:of|between) {_N} and {_N}", r"(\1 - \2)"),
        (rf"\bsubtract {_N} from {_N}", r"(\2 - \1)"),
        (rf"\badd {_N} (?:and|to) {_N}", r"(\1 + \2)"),
        (rf"\bmultiply {_N} (?:and|by|with) {_N}", r"(\1 * \2)"),
        (rf"\bdivide {_N} by {_N}", r"(\1 / \2)"),
        (rf"{_N} squared", r"(\1 * \1)"),
        (r"(?<=[\d)])\s*(?:multiplied by|times|×|·|乘以|x(?=\s*\d))\s*", " * "),
        (r"(?<=[\d)])\s*(?:divided by|÷|除以)\s*", " / "),
        (r"(?<=[\d)])\s*(?:plus|added to|加)\s*", " + "),
        (r"(?<=[\d)])\s*(?:minus|less|减|−|–)\s*", " - "),
    )
)
_CANDIDATE = re.compile(
    r"(?<![A-Za-z0-9_.\-])[-(\s]*\d(?:[\d.()\s]|[+*/]|(?<=\s)-|-(?=[\d(\s]))*[\d)](?![A-Za-z0-9_\-])"
)
_LOOKS_LIKE_A_NUMBER_OF_SOMETHING = re.compile(r"^[\d-]+$")
_TOKEN = re.compile(r"\d+(?:\.\d+)?|[-+*/()]")


def value(question: str) -> Fraction | None:
    """The value of the longest expression in the question; None if there is none."""
    for pattern, new in _REWRITES:
        question = pattern.sub(new, question)
    found = [m.group().strip() for m in _CANDIDATE.finditer(question)]
    for text in sorted(found, key=len, reverse=True):
        if _LOOKS_LIKE_A_NUMBER_OF_SOMETHING.match(text) and not re.fullmatch(r"\d{1,3}-\d{1,3}", text):
            continue
        if re.search(r"[\d)]\s*[-+*/]\s*[-(\d]", text):
            try:
                return _Reader(_TOKEN.findall(text)).whole()
            except (ValueError, ZeroDivisionError):
                continue
    return None


def spelled(number: Fraction) -> str:
    """An integer, else a decimal of at most six places."""
    if number.denominator == 1:
        return str(number.numerator)
    return f"{float(number):.6f}".rstrip("0").rstrip(".")


class _Reader:
    """Recursive descent over + - * / and parentheses."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens

    def whole(self) -> Fraction:
        result = self._sum()
        if self._tokens:
            raise ValueError(self._tokens)
        return result

    def _next(self, wanted: str) -> str:
        if self._tokens and self._tokens[0] in wanted:
            return self._tokens.pop(0)
        return ""

    def _sum(self) -> Fraction:
        result = self._product()
        while sign := self._next("+-"):
            result = result + self._product() if sign == "+" else result - self._product()
        return result

    def _product(self) -> Fraction:
        result = self._atom()
        while sign := self._next("*/"):
            result = result * self._atom() if sign == "*" else result / self._atom()
        return result

    def _atom(self) -> Fraction:
        if self._next("-"):
            return -self._atom()
        if self._next("("):
            result = self._sum()
            if not self._next(")"):
                raise ValueError("unclosed")
            return result
        if not self._tokens or not self._tokens[0][0].isdigit():
            raise ValueError(self._tokens)
        return Fraction(self._tokens.pop(0))
