"""Needle in a haystack at three shares of the usable window; each cell is a case, since each may take hours."""

import pytest

pytestmark = [pytest.mark.profiles("long1m"), pytest.mark.niah]


@pytest.mark.check("needle.{cell}")
@pytest.mark.parametrize("cell", ["25pct", "50pct", "90pct"])
def test_needle(verdict, cell):
    """The code in the middle of a prompt of exactly this share of the window; decoys around it."""
    assert verdict.passed, verdict
