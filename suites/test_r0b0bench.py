"""r0b0bench's systems lanes, if that client is installed."""

import pytest

pytestmark = [pytest.mark.profiles("production"), pytest.mark.dataset]


@pytest.mark.check("r0b0bench.systems")
def test_r0b0bench(verdict):
    """Every lane as its own report says it; infrastructure errors and invalid_for_publish stay what they are."""
    assert verdict.passed, verdict
