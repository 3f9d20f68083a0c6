"""The gate's requirements as checks: they show what acquiring the engine already compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pytest_dspark.checks import Check
from pytest_dspark.gate import REQUIREMENTS, judge
from pytest_dspark.verdict import Finding


def _measure(requirement: str) -> Callable[..., Finding]:
    def measure(stage: Any, mark: str, settings: Mapping[str, Any]) -> Finding:
        finding: Finding = stage.gate_finding(mark, requirement)
        return finding

    return measure


CHECKS = {name: Check(_measure(name), judge, "stage") for name in REQUIREMENTS}
