"""After the last check: is every host as it was before, with no rank, no process, no port and no GPU memory left?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_dspark.checks import Check
from pytest_dspark.gpus import held
from pytest_dspark.verdict import Finding, Status, Verdict


def measure(stage: Any, mark: str, settings: Mapping[str, Any]) -> Finding:
    finding: Finding = stage.teardown_finding(mark)
    return finding


def judge(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS only if something was stopped and nothing is left; a kept engine is NOT_IMPLEMENTED, never a pass."""
    if finding.data["kept"]:
        return Verdict(Status.NOT_IMPLEMENTED, "NOT_IMPLEMENTED", "kept: the engine was left running as asked")
    result = finding.data["result"]
    if not finding.data["launched"] or not result:
        return Verdict(Status.BLOCKED, "BLOCKED", "nothing was launched, so nothing could be stopped")
    left = [_named(item) for item in result["left_behind"]]
    left += [f"{item['host']}: port {item['port']} held by {item['owner']}" for item in result["ports_taken"]]
    left += result["problems"]
    memory = result.get("gpu_memory", ())
    left += [line for row in memory for line in held(row)]
    left += [line for row in result.get("host_memory", ()) for line in _kept_back(row)]
    if left:
        return Verdict(Status.ERROR, "LEFT_BEHIND", "; ".join(left))
    unseen = [f"GPU memory: {row['reason']}" for row in memory if row["before"] is None]
    unseen += [
        f"{row['host']}: memory: no margin stated" for row in result.get("host_memory", ()) if not row["margin_gib"]
    ]
    return Verdict(Status.PASS, "", "; ".join(f"not observable: {one}" for one in dict.fromkeys(unseen)))


def _kept_back(row: Mapping[str, Any]) -> list[str]:
    """What a host has less free memory than before, beyond the margin that the recipe states."""
    before, after, margin = row["before_gib"], row["after_gib"], row["margin_gib"]
    if margin is None or before is None or after is None or after >= before - margin:
        return []
    return [f"{row['host']}: {after:g} GiB of memory are free, {before:g} before the launch, margin {margin:g}"]


def _named(item: Mapping[str, Any]) -> str:
    then = f"; type: {item['command']}" if "command" in item else ""
    return f"{item['host']}: {item['name']} {item['id']} ({item['status']}{then})"


CHECKS = {"": Check(measure, judge, "stage")}
