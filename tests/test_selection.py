"""Which profiles an invocation asks for."""

import pytest
from _pytest.mark.expression import Expression

from pytest_dspark.selection import order, wanted, wanted_by_ids


def ask(expression):
    compiled = Expression.compile(expression)
    return wanted(lambda names: compiled.evaluate(lambda name, **_: name in names))


@pytest.mark.parametrize(
    ("expression", "marks"),
    [
        ("production", ("production",)),
        ("long1m or production", ("long1m", "production")),
        ("production or long1m", ("long1m", "production")),
        ("production and gate", ("production",)),
        ("production and not niah", ("production",)),
        ("(long1m or breakable_ab) and correctness", ("long1m", "breakable_ab")),
        ("not production", ()),
        ("gate", ()),
        ("slow", ()),
        ("not slow", ()),
    ],
)
def test_profiles_of_an_expression(expression, marks):
    assert ask(expression) == marks


def test_profiles_of_node_ids():
    assert wanted_by_ids(
        ["suites/test_gate.py::test_gate[image-production]", "suites/test_launch.py::test_launch[long1m]"]
    ) == ("long1m", "production")
    assert wanted_by_ids(["suites/test_gate.py", "tests"]) == ()


def test_order_is_launch_gate_rest_teardown_and_long1m_first():
    keys = [
        order("long1m", "launch"),
        order("long1m", "gate.image"),
        order("long1m", "correctness.json"),
        order("long1m", "teardown"),
        order("production", "launch"),
    ]
    assert keys == sorted(keys)
