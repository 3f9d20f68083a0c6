"""Several streams at once, each level a case; a level above what the profile holds is NOT_IMPLEMENTED."""

import pytest

pytestmark = [pytest.mark.profiles("production", "breakable_ab"), pytest.mark.concurrency]


@pytest.mark.check("concurrency.{level}")
@pytest.mark.parametrize("level", ["c1", "c2", "c4", "c6", "c8", "c12", "c16"])
def test_ladder(verdict, level):
    """Streams that start together, every one of exactly the asked length; ours alone, and cold."""
    assert verdict.passed, verdict


@pytest.mark.check("concurrency.{arrivals}")
@pytest.mark.parametrize("arrivals", ["staggered", "poisson"])
def test_arrivals(verdict, arrivals):
    """Streams that come one after another, and at random moments whether the engine keeps up or not."""
    assert verdict.passed, verdict
