"""The built-in set of sums, which needs no file."""

import pytest

pytestmark = [pytest.mark.profiles("production", "breakable_ab"), pytest.mark.dataset]


@pytest.mark.check("arithmetic.graded")
def test_arithmetic_set(verdict):
    """Five levels of sums, each at least at the recipe's floor; a row a question."""
    assert verdict.passed, verdict
