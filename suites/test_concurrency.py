"""The concurrency ladder, each level a case; a level above what the profile holds is NOT_IMPLEMENTED."""

import pytest

pytestmark = [pytest.mark.profiles("production", "breakable_ab"), pytest.mark.concurrency]


@pytest.mark.check("concurrency.{level}")
@pytest.mark.parametrize("level", ["c1", "c2", "c4", "c6", "c8", "c12", "c16"])
def test_ladder(verdict, level):
    """Streams at once, every one of exactly the asked length; ours alone, and cold."""
    assert verdict.passed, verdict
