"""Was the profile launched: every rank started, met the others, and generated a token?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_dspark.checks import Check
from pytest_dspark.verdict import PASS, Finding, Status, Verdict


def measure(stage: Any, mark: str, settings: Mapping[str, Any]) -> Finding:
    finding: Finding = stage.launch_finding(mark)
    return finding


def judge(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS if there was no error and readiness was reached (or an engine was attached or reused and answered)."""
    error = finding.data["error"]
    if error:
        return Verdict(Status.ERROR, error["code"], error["message"])
    reached = [phase["phase"] for phase in finding.data["phases"] if phase["ok"]]
    if "ready" not in reached:
        return Verdict(
            Status.ERROR, "LAUNCH_FAILED", f"the launch ended before readiness, after {', '.join(reached) or 'nothing'}"
        )
    return PASS


CHECKS = {"": Check(measure, judge, "stage")}
