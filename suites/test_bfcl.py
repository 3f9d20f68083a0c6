"""BFCL by the official bfcl-eval package, which lives in an environment of its own."""

import pytest

pytestmark = [pytest.mark.profiles("production"), pytest.mark.dataset]


@pytest.mark.check("bfcl.{category}")
@pytest.mark.parametrize("category", ["multi_turn_base", "multiple", "parallel", "parallel_multiple"])
def test_bfcl(verdict, category):
    """The share of right answers by the package's own scorer; a row a question, and a server's error is never an answer."""
    assert verdict.passed, verdict
