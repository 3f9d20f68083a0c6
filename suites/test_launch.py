"""The launch has a case and a time of its own: it is the first case of each profile."""

import pytest

pytestmark = [pytest.mark.profiles("long1m", "production", "breakable_ab"), pytest.mark.gate]


@pytest.mark.check("launch")
def test_launch(verdict):
    """Every rank starts, the ranks meet, and the engine generates a token."""
    assert verdict.passed, verdict
