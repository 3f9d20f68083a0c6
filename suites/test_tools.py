"""Structured output and tool calls beyond a first look."""

import pytest

pytestmark = [pytest.mark.profiles("production", "breakable_ab"), pytest.mark.correctness]


@pytest.mark.check("tools.{case}")
@pytest.mark.parametrize("case", ["schema", "auto", "long", "parallel", "thinking"])
def test_tools(verdict, case):
    """A nested schema; a call that the model chooses, streamed and whole; long arguments; two calls; thinking on and off."""
    assert verdict.passed, verdict
