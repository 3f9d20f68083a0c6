"""r0b0bench as an outside client: its systems lanes, as its own report says them.

Statuses, infrastructure errors and `invalid_for_publish` are carried over as they are. Its exit code is recorded and never
believed: a lane that FAILs ends with 0 all the same.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_dspark import outside
from pytest_dspark.asking import needed
from pytest_dspark.checks import Check
from pytest_dspark.errors import DsparkError
from pytest_dspark.live import Live
from pytest_dspark.verdict import PASS, Finding, Status, Verdict

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint

STATUSES: Final = ("PASS", "FAIL", "SKIP", "ERROR", "NOT_IMPLEMENTED", "NOT_GRADED")
COMMAND: Final = "r0b0bench"


def measure(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """One run of the lanes that the recipe names; its whole folder is evidence."""
    needed(settings, "lanes", "deadline_s")
    command = _command(settings)
    folder = Path(settings["artifacts"]) / "r0b0bench"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    output = folder / "out"
    lanes = list(settings["lanes"])
    arguments = ["run", "--profile", "systems", "--base-url", f"{endpoint.base_url}/v1", "--model", endpoint.model]
    arguments += ["--output", str(output), "--only", ",".join(lanes)]
    arguments += ["--tokenizer", tokenizer] if (tokenizer := _tokenizer(settings)) else []
    ended = outside.run(
        [command, *arguments],
        folder / "client.log",
        env=_environment(endpoint, settings),
        deadline_s=settings["deadline_s"],
        alive=endpoint.check_alive,
        secrets=(endpoint.api_key,) if endpoint.api_key else (),
    )
    report, problem = read_report(output)
    data = {
        "lanes_asked": lanes,
        "report": report,
        "report_missing": problem or None,
        "exit_code": ended.code,
        "tail": ended.tail,
        "elapsed_s": round(ended.elapsed_s, 1),
        "invalid_for_publish": report.get("invalid_for_publish") if report else None,
        "files": {f"r0b0bench/{name}": sha256 for name, sha256 in outside.hashes(folder).items()},
    }
    live.line(f"r0b0bench.systems: {_told(report) or problem}")
    return Finding("r0b0bench.systems", data)


def _command(settings: Mapping[str, Any]) -> str:
    given = settings.get("r0b0bench") or COMMAND
    found = shutil.which(given)
    if found is None:
        text = f"there is no command {given!r}; install r0b0bench and name it with --dspark-r0b0bench"
        raise DsparkError("NOT_IMPLEMENTED", text)
    return found


def _tokenizer(settings: Mapping[str, Any]) -> str:
    return next(
        (str(folder) for folder in settings.get("models", ()) if (Path(folder) / "tokenizer.json").is_file()), ""
    )


def _environment(endpoint: Endpoint, settings: Mapping[str, Any]) -> dict[str, str]:
    bfcl = {"R0B0BENCH_BFCL_PYTHON": settings["bfcl"]} if settings.get("bfcl") else {}
    knobs = {key: str(value) for key, value in settings.get("env", {}).items()}
    own = {key: value for key, value in os.environ.items() if key.startswith("R0B0BENCH_")}
    return outside.environment({"OPENAI_API_KEY": endpoint.api_key, **own, **bfcl, **knobs})


def read_report(output: Path) -> tuple[dict[str, Any] | None, str]:
    """The one report.json under the output folder, without the address that it repeats; or None with the reason."""
    found = sorted(output.rglob("report.json")) if output.is_dir() else []
    if len(found) != 1:
        return None, f"r0b0bench left {len(found) or 'no'} report.json, expected one"
    try:
        report = json.loads(found[0].read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, f"report.json of r0b0bench cannot be read: {error}"
    if not isinstance(report, dict) or not isinstance(report.get("lanes"), list):
        return None, "report.json of r0b0bench has no list of lanes"
    return {key: value for key, value in report.items() if key != "base_url"}, ""


def _told(report: Mapping[str, Any] | None) -> str:
    lanes = report["lanes"] if report else ()
    return ", ".join(f"{lane.get('lane_id')} {lane.get('status')}" for lane in lanes if isinstance(lane, dict))


def judge(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """ERROR for a missing report or lane, an infrastructure error, or a status that nobody knows; then FAIL; then lanes that
    did not run; PASS only if every lane that was asked for says PASS."""
    data = finding.data
    report = data["report"]
    if report is None:
        return Verdict(
            Status.ERROR, "PROTOCOL", f"{data['report_missing']} (it ended with {data['exit_code']}: {data['tail']})"
        )
    lanes = {str(lane.get("lane_id")): lane for lane in report["lanes"] if isinstance(lane, dict)}
    absent = [name for name in data["lanes_asked"] if name not in lanes]
    if absent or not data["lanes_asked"]:
        return Verdict(Status.ERROR, "PROTOCOL", f"the report has no lane {', '.join(absent) or 'at all'}")
    failed = _infrastructure(report, lanes)
    if failed:
        return Verdict(Status.ERROR, "SERVER_ERROR", failed)
    return _by_status({name: str(lanes[name].get("status")) for name in lanes}, report)


def _infrastructure(report: Mapping[str, Any], lanes: Mapping[str, Mapping[str, Any]]) -> str:
    """What the report calls infrastructure; figures that it does not give are no zeros."""
    for name, lane in lanes.items():
        errors = lane.get("infra_errors")
        if type(errors) is not int or errors or lane.get("status") == "ERROR":
            return f"lane {name}: status {lane.get('status')}, infra_errors {errors!r}"
        if lane.get("status") not in STATUSES:
            return f"lane {name}: unknown status {lane.get('status')!r}"
    total = report.get("infra_errors_total")
    return "" if total == 0 and type(total) is int else f"infra_errors_total is {total!r}"


def _by_status(said: Mapping[str, str], report: Mapping[str, Any]) -> Verdict:
    failing = [name for name, status in said.items() if status == "FAIL"]
    if failing:
        return Verdict(Status.FAIL, "WRONG_ANSWER", f"lanes that FAIL: {', '.join(failing)}")
    open_ones = [f"{name} {status}" for name, status in said.items() if status != "PASS"]
    if open_ones:
        return Verdict(Status.NOT_IMPLEMENTED, "NOT_IMPLEMENTED", f"lanes that did not run: {', '.join(open_ones)}")
    if report.get("invalid_for_publish") is False:
        return PASS
    return Verdict(Status.PASS, "", f"its report says invalid_for_publish {report.get('invalid_for_publish')!r}")


CHECKS = {"systems": Check(measure, judge, exclusive=True)}
