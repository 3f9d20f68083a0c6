"""What acquiring the engine proved, one case a requirement; no other check runs unless all of it holds."""

import pytest

from pytest_dspark.gate import REQUIREMENTS

pytestmark = [pytest.mark.profiles("long1m", "production", "breakable_ab"), pytest.mark.gate]


@pytest.mark.check("gate.{requirement}")
@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_gate(verdict, requirement):
    """The requirement holds on every rank that can show it."""
    assert verdict.passed, verdict
