"""A first look at whether the engine is right, with the recipe's own questions."""

import pytest

pytestmark = [pytest.mark.profiles("production", "breakable_ab"), pytest.mark.correctness]


@pytest.mark.check("correctness.stream")
def test_stream(verdict):
    """A streamed answer that ends at exactly the asked length."""
    assert verdict.passed, verdict


@pytest.mark.check("correctness.arithmetic")
def test_arithmetic(verdict):
    """Arithmetic questions, at least as many right as the recipe's measured floor."""
    assert verdict.passed, verdict


@pytest.mark.check("correctness.json")
def test_json(verdict):
    """A JSON object with the values that were asked for."""
    assert verdict.passed, verdict


@pytest.mark.check("correctness.tool")
def test_tool_call(verdict):
    """A forced tool call, streamed, with whole arguments."""
    assert verdict.passed, verdict


@pytest.mark.check("correctness.retrieval")
def test_retrieval(verdict):
    """A code found in a few thousand characters of filler."""
    assert verdict.passed, verdict
