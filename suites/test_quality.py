"""Lanes of quality that are not built, and say so in every run."""

import pytest

pytestmark = [pytest.mark.profiles("production"), pytest.mark.dataset]


@pytest.mark.check("quality.{lane}")
@pytest.mark.parametrize("lane", ["qa", "ifeval", "humaneval"])
def test_quality(verdict, lane):
    """Named, and NOT_IMPLEMENTED."""
    assert verdict.passed, verdict
