"""Where two texts part, and whether that was a near tie."""

import math

import pytest

from pytest_dspark.divergence import CLEAR_LOSS, NEAR_TIE, NOT_OBSERVABLE, SAME, losers, parting


def token(text, chosen, **others):
    return [text, chosen, [[text, chosen], *([name, value] for name, value in others.items())]]


def said(*tokens):
    return {"text": "".join(one[0] for one in tokens), "tokens": list(tokens)}


A, B = token("a", -0.1), token("b", -0.2)


def test_equal_texts_do_not_part():
    assert parting(said(A, B), said(A, B), 0.5).kind == SAME


def test_a_near_tie_is_counted_and_a_clear_loss_is_not_one():
    alone = said(A, token("x", -0.7, y=-0.9))
    near = parting(alone, said(A, token("y", -0.72, x=-0.8)), 0.5)
    assert (near.kind, near.at, near.margin) == (NEAR_TIE, 1, 0.2)
    far = parting(alone, said(A, token("y", -0.1, x=-3.1)), 0.5)
    assert (far.kind, far.margin) == (CLEAR_LOSS, 3.0)
    assert "'x' alone, 'y' beside others" in far.message


def test_only_the_first_difference_counts():
    alone = said(token("x", -0.7, y=-0.7), token("b", -0.1, z=-9.0))
    beside = said(token("y", -0.7, x=-0.7), token("z", -0.1, b=-9.0))
    assert parting(alone, beside, 0.5).kind == NEAR_TIE


def test_a_rival_that_is_not_listed_was_less_likely_than_all_that_are():
    alone = said(token("x", -0.1, p=-4.0, q=-5.0))
    assert parting(alone, said(token("y", -0.1)), 0.5).margin == pytest.approx(4.9)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"text": "ab", "tokens": None}, {"text": "ac", "tokens": None}),
        ({"text": "ab", "tokens": [["ab", None, []]]}, {"text": "ac", "tokens": [["ac", None, []]]}),
        (said(A), said(A, B)),
    ],
)
def test_without_log_probabilities_the_margin_is_not_observable(one, other):
    found = parting(one, other, 0.5)
    assert (found.kind, found.margin) == (NOT_OBSERVABLE, None)


def test_losers_are_tokens_that_were_clearly_less_likely_than_another():
    tokens = [A, token("b", -2.0, c=-0.1), token("d", -0.6, e=-0.4)]
    assert losers(tokens, 0.5) == [{"at": 1, "token": "b", "more_likely": "c", "by": 1.9}]
    assert losers(tokens, math.inf) == [] and losers(None, 0.5) == []
