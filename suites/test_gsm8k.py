"""GSM8K's official test set, as much of it as the recipe says."""

import pytest

pytestmark = [pytest.mark.profiles("production", "breakable_ab"), pytest.mark.dataset]


@pytest.mark.check("gsm8k")
def test_gsm8k(verdict):
    """The share of right answers, and whether company changes them; a row a question."""
    assert verdict.passed, verdict
