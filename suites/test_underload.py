"""Right answers while the engine works for others; nothing here is timed."""

import pytest

pytestmark = [pytest.mark.profiles("production", "breakable_ab"), pytest.mark.correctness]


@pytest.mark.check("underload.condense")
def test_condense(verdict):
    """A text alone and the same beside others: right both times, and apart at near ties alone."""
    assert verdict.passed, verdict


@pytest.mark.check("underload.crosstalk")
def test_crosstalk(verdict):
    """Streams with a secret each: none says another one's."""
    assert verdict.passed, verdict


@pytest.mark.check("underload.staggered")
def test_staggered(verdict):
    """Streams that come one after another, every answer judged."""
    assert verdict.passed, verdict
