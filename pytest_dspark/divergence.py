"""Two texts of one greedy question: where they part, and whether that was a near tie. Pure.

Greedy text is not the same bit for bit at every load: sums are taken in another order, and two tokens that are almost equally
likely change places. From then on the texts differ and nothing is broken. So only the first token that differs is looked
at, since up to there both runs had read the same. Where the one that was taken was clearly less likely than the other one,
something other than rounding has chosen it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_dspark.reply import Reply

SAME: Final = "same"
NEAR_TIE: Final = "near tie"
CLEAR_LOSS: Final = "clear loss"
NOT_OBSERVABLE: Final = "margin not observable"
Token = Sequence[Any]
"""`[text, log probability, [[text, log probability], …]]`, as stored; natural logarithms, null where not told."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two texts part. `at` is the token (or the character, if there are no tokens); `margin` is how much more likely
    the loser was, in units of log probability: the larger of both runs, None if neither tells."""

    kind: str
    at: int | None = None
    margin: float | None = None
    message: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "at": self.at, "margin": self.margin, "message": self.message}


def tokens_of(reply: Reply) -> list[list[Any]] | None:
    """The tokens of a reply as data; None where the server told no log probabilities."""
    if reply.logprobs is None:
        return None
    return [[one.token, one.logprob, [list(pair) for pair in one.top]] for one in reply.logprobs]


def parting(alone: Mapping[str, Any], beside: Mapping[str, Any], margin: float) -> Parting:
    """Compare two answers, each with `text` and `tokens`; `margin` is what still counts as a near tie."""
    if alone["text"] == beside["text"]:
        return Parting(SAME)
    one, other = alone["tokens"], beside["tokens"]
    if not one or not other:
        return Parting(NOT_OBSERVABLE, _first(alone["text"], beside["text"]), None, "no log probabilities")
    at = _first([token[0] for token in one], [token[0] for token in other])
    if at >= min(len(one), len(other)):
        return Parting(NOT_OBSERVABLE, at, None, "one text ended where the other went on")
    return _weighed(one[at], other[at], at, margin)


def _weighed(one: Token, other: Token, at: int, margin: float) -> Parting:
    told = [lead for lead in (_lead(one, other[0]), _lead(other, one[0])) if lead is not None]
    said = f"token {at}: {one[0]!r} alone, {other[0]!r} beside others"
    if not told:
        return Parting(NOT_OBSERVABLE, at, None, f"{said}; no log probability of the other one")
    worst = round(max(told), 6)
    kind = NEAR_TIE if worst <= margin else CLEAR_LOSS
    return Parting(kind, at, worst, f"{said}; apart by {worst:g}, a near tie is {margin:g}")


def _lead(chosen: Token, rival: str) -> float | None:
    """How much more likely the chosen token was than its rival where it was chosen. A rival that is not among the
    alternatives was less likely than the last of them: the lead is at least that."""
    if chosen[1] is None or not chosen[2]:
        return None
    known: dict[str, float] = dict(chosen[2])
    return float(chosen[1]) - float(known.get(rival, min(known.values())))


def _first(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def losers(tokens: Sequence[Token] | None, margin: float) -> list[dict[str, Any]]:
    """Tokens of one greedy text that were taken although another one was more likely by more than the margin.

    A greedy server has none, speculation or not: the draft's tokens are kept only where the model itself would take them.
    """
    found = []
    for at, (text, value, top) in enumerate(tokens or ()):
        best = max(top, key=lambda pair: pair[1], default=None)
        if best is not None and value is not None and best[1] - value > margin:
            lost_by = round(best[1] - value, 6)
            found.append({"at": at, "token": text, "more_likely": best[0], "by": lost_by})
    return found
