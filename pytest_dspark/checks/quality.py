"""Lanes of quality that are named and not built, so that nobody takes their absence for a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from pytest_dspark.checks import Check
from pytest_dspark.errors import DsparkError
from pytest_dspark.live import Live
from pytest_dspark.verdict import Finding, Status, Verdict

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint

WHY: Final = {
    "qa": "multiple-choice questions (ARC) are not built",
    "ifeval": "IFEval is not built: its official scorer is not part of this package",
    "humaneval": "HumanEval is not built: it runs code of the model, which needs a sandbox",
}


def _measure(name: str) -> Callable[..., Finding]:
    def measure(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
        raise DsparkError("NOT_IMPLEMENTED", WHY[name])

    return measure


def judge(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    return Verdict(Status.NOT_IMPLEMENTED, "NOT_IMPLEMENTED", "nothing measures this lane")


CHECKS = {name: Check(_measure(name), judge) for name in WHY}
