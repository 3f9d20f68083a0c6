"""The last case of each profile: the engine is stopped and nothing is left on any host."""

import pytest

pytestmark = [pytest.mark.profiles("long1m", "production", "breakable_ab"), pytest.mark.gate]


@pytest.mark.check("teardown")
def test_teardown(verdict):
    """No rank, no process and no port is left."""
    assert verdict.passed, verdict
