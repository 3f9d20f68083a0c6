"""Other people's clients: BFCL's package and r0b0bench, both as programs that write what the real ones write."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from scripted import Scripted

from pytest_dspark import outside
from pytest_dspark.checks import bfcl, r0b0bench
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import DsparkError
from pytest_dspark.evidence import Case, new_run, sealed_rows
from pytest_dspark.live import Live
from pytest_dspark.parts import Parts
from pytest_dspark.resume import Stored
from pytest_dspark.verdict import Finding, Status


@pytest.fixture
def endpoint():
    with Scripted((b"",)) as server:
        yield Endpoint(server.url, "served", api_key="a-secret-of-the-server")


def program(folder, text):
    path = folder / "program"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


# --- running them


def test_a_program_is_watched_masked_and_ended_with_its_children(tmp_path):
    code = "import subprocess, sys, time\nsubprocess.Popen(['sleep', '61.7'])\nprint('key a-secret', flush=True)\ntime.sleep(60)"
    looks = []

    def alive():
        looks.append(1)
        if len(looks) > 2:
            raise DsparkError("RANK_EXITED", "rank 0 is gone")

    start = time.monotonic()
    command = [sys.executable, "-c", code]
    with pytest.raises(DsparkError, match="rank 0 is gone"):
        outside.run(
            command, tmp_path / "log", env=outside.environment({}), deadline_s=60, alive=alive, secrets=("a-secret",)
        )
    assert time.monotonic() - start < 10
    assert "a-secret" not in (tmp_path / "log").read_text() and (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"61.7" in line for line in lines)


def test_what_a_program_leaves_behind_is_ended_too(tmp_path):
    code = "import subprocess; subprocess.Popen(['sleep', '62.9'])"
    ended = outside.run([sys.executable, "-c", code], tmp_path / "log", env=outside.environment({}), deadline_s=30)
    assert ended.code == 0
    time.sleep(0.1)
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"62.9" in line for line in lines)


def test_a_deadline_and_a_program_that_is_not_there(tmp_path):
    with pytest.raises(DsparkError, match="deadline") as caught:
        outside.run(["sleep", "60"], tmp_path / "log", env=outside.environment({}), deadline_s=0.1)
    assert caught.value.code == "DEADLINE"
    with pytest.raises(DsparkError, match="nowhere") as caught:
        outside.run([str(tmp_path / "nowhere")], tmp_path / "log", env={}, deadline_s=1)
    assert caught.value.code == "NOT_IMPLEMENTED"


def test_the_callers_environment_does_not_reach_it():
    given = outside.environment(
        {"A": "1"}, {"PATH": "/bin", "HTTPS_PROXY": "x", "HF_TOKEN": "y", "OPENAI_API_KEY": "z"}
    )
    assert given == {"PATH": "/bin", "NO_PROXY": "*", "no_proxy": "*", "A": "1"}


# --- BFCL


FAKE_BFCL = """
import json, os, sys
from pathlib import Path
_, _, mode, request = sys.argv
asked = json.loads(Path(request).read_text())
root = Path(os.environ["BFCL_PROJECT_ROOT"])
plan = json.loads((Path(__file__).parent / "plan.json").read_text())
if mode == "ids":
    entries = {name: f"sha-{name}" for name in plan["answers"]}
    Path(asked["out"]).write_text(json.dumps({"version": "2026.3.23", "entries": entries}))
    sys.exit(0)
(Path(__file__).parent / "asked.json").write_text(json.dumps(asked))
for kind in ("result", "score"):
    (root / kind / "dspark-served" / "non_live").mkdir(parents=True, exist_ok=True)
where = "dspark-served/non_live/BFCL_v4_multiple"
results, failing = [], []
for name in asked["ids"]:
    said = plan["answers"][name]
    if said == "missing":
        continue
    if said.startswith("error"):
        text = "Error during inference: Error code: 500 - {'error': {'message': 'EngineCore encountered an issue.'}}"
        whole = {"id": name, "result": text, "traceback": "Traceback (most recent call last): ..."}
        whole = {"id": name, "result": [], "traceback": "..."} if said == "error by traceback" else whole
        results.append({"id": name, "result": text} if said == "error by text" else whole)
        failing.append({"id": name, "valid": False, "error": ["Invalid syntax."], "error_type": "ast_decoder:decoder_failed"})
        continue
    call = [{"triangle_properties_get": '{"side1": 5}'}]
    results.append({"id": name, "result": call, "input_token_count": 9, "output_token_count": 4, "latency": 0.1})
    if said == "wrong":
        failing.append({"id": name, "valid": False, "error": ["Wrong number of functions."], "error_type": "x:wrong_count"})
total = len(results) + plan.get("odd", 0)
head = {"accuracy": 0.5, "correct_count": total - len(failing), "total_count": total}
(root / "result" / f"{where}_result.json").write_text("".join(json.dumps(one) + "\\n" for one in results))
if not plan.get("unscored"):
    lines = [head, *failing]
    (root / "score" / f"{where}_score.json").write_text("".join(json.dumps(one) + "\\n" for one in lines))
    Path(asked["out"]).write_text(json.dumps({"version": "2026.3.23"}))
print("done")
sys.exit(plan.get("code", 0))
"""

KNOBS = {"threads": 4, "timeout_s": 3600, "max_tokens": 8192, "retries": 1, "temperature": 0.001, "deadline_s": 60.0}


def category(tmp_path, endpoint, plan, finished=None, **more):
    """One category by the fake package: the parts' verdicts, the finding and the check's verdict."""
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    run = new_run(tmp_path / "evidence")
    check = bfcl.CHECKS["multiple"]
    settings = {
        **KNOBS,
        "knobs": {},
        "artifacts": str(run.path / "production"),
        "bfcl": program(tmp_path, FAKE_BFCL),
        **more,
    }
    case = Case(run.run_id, "n", "bfcl.multiple", "bfcl", "production", "r", "f")
    (run.path / "production").mkdir()
    parts = Parts(run, case, check.judge_part, settings, finished or {})
    found = check.measure(endpoint, settings=settings, live=Live(), parts=parts)
    rows = {row["part"]: row["verdict"] for _, row in sealed_rows(run.rows, run.run_id)}
    return rows, found, check.judge(found, settings)


def test_bfcl_takes_the_scorers_word_and_the_recipes_floor(tmp_path, endpoint):
    plan = {"answers": {"multiple_0": "right", "multiple_1": "wrong", "multiple_2": "right"}}
    rows, found, verdict = category(tmp_path, endpoint, plan, floors={"multiple": 0.6})
    assert rows == {"multiple_0": "PASS", "multiple_1": "FAIL", "multiple_2": "PASS"}
    assert verdict.passed and found.data["accuracy"]["good"] == 2 and found.data["package"] == "bfcl-eval 2026.3.23"
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert {key: asked[key] for key in KNOBS if key != "deadline_s"} == {
        k: v for k, v in KNOBS.items() if k != "deadline_s"
    }
    assert asked["base_url"] == f"{endpoint.base_url}/v1" and asked["model"] == "served"
    assert {"bfcl/multiple/result/dspark-served/non_live/BFCL_v4_multiple_result.json"} <= set(found.data["files"])
    assert category(tmp_path, endpoint, plan, floors={"multiple": 0.9})[2].status is Status.FAIL
    assert category(tmp_path, endpoint, plan)[2].status is Status.NOT_IMPLEMENTED


@pytest.mark.parametrize(("code", "how"), [(0, "error"), (1, "error"), (0, "error by text"), (0, "error by traceback")])
def test_bfcl_a_servers_error_is_never_a_wrong_answer(tmp_path, endpoint, code, how):
    """N07: half of the calls answer 500. The package's own file says accuracy 0.5; here there is none."""
    plan = {"answers": {f"multiple_{n}": how if n % 2 else "right" for n in range(6)}, "code": code}
    rows, found, verdict = category(tmp_path, endpoint, plan, floors={"multiple": 0.1})
    assert list(rows.values()) == ["PASS", "ERROR"] * 3
    assert found.data["infrastructure"]["share"] == 0.5 and found.data["accuracy"] is None
    assert found.data["invalid_for_publish"] is True and found.data["exit_code"] == code
    assert verdict.status is Status.ERROR and "no accuracy" in verdict.message


@pytest.mark.parametrize(
    "plan",
    [
        {"answers": {"multiple_0": "right", "multiple_1": "missing"}},
        {"answers": {"multiple_0": "right"}, "unscored": True},
        {"answers": {"multiple_0": "right"}, "odd": 1},
    ],
)
def test_bfcl_files_that_are_not_whole_pass_nothing_with_exit_code_0(tmp_path, endpoint, plan):
    rows, _, verdict = category(tmp_path, endpoint, plan, floors={"multiple": 0.0})
    assert "ERROR" in rows.values() and verdict.status is Status.ERROR


def test_bfcl_finished_questions_are_not_asked_again(tmp_path, endpoint):
    stored = {"sha256": "sha-multiple_0", "right": False, "error": "wrong", "result_sha256": "x"}
    finished = {"multiple_0": Stored("A", "FAIL", stored, "", "t", 1.0, 1)}
    plan = {"answers": {"multiple_0": "right", "multiple_1": "right"}}
    rows, found, _ = category(tmp_path, endpoint, plan, finished, floors={"multiple": 0.5})
    assert rows == {"multiple_0": "FAIL", "multiple_1": "PASS"} and found.data["counts"] == {"FAIL": 1, "PASS": 1}
    assert json.loads((tmp_path / "asked.json").read_text())["ids"] == ["multiple_1"]


def test_bfcl_a_part_of_a_category_and_a_strange_id(tmp_path, endpoint):
    plan = {"answers": {f"multiple_{n}": "right" for n in range(9)}}
    rows, _, _ = category(tmp_path, endpoint, plan, ids={"multiple": ["multiple_7"]})
    assert list(rows) == ["multiple_7"]
    assert len(category(tmp_path, endpoint, plan, limit=4)[0]) == 4
    with pytest.raises(DsparkError, match="no 'multiple_77'"):
        category(tmp_path, endpoint, plan, ids={"multiple": ["multiple_77"]})


@pytest.mark.parametrize("python", ["", "/nowhere/python", sys.executable])
def test_bfcl_without_the_package_is_not_implemented(tmp_path, endpoint, python):
    """This environment has no bfcl-eval either."""
    settings = {**KNOBS, "knobs": {}, "artifacts": str(tmp_path), "bfcl": python}
    with pytest.raises(DsparkError, match=r"bfcl-eval|nowhere") as caught:
        bfcl.CHECKS["multiple"].measure(endpoint, settings=settings, live=Live(), parts=None)
    assert caught.value.code == "NOT_IMPLEMENTED"


# --- r0b0bench


LANES = ["canary", "latency"]
FAKE_R0B0BENCH = """
import json, sys
from pathlib import Path
here = Path(__file__).parent
(here / "argv.json").write_text(json.dumps(sys.argv[1:]))
plan = json.loads((here / "plan.json").read_text())
output = Path(sys.argv[sys.argv.index("--output") + 1]) / "20260822T101500Z-0a1b2c3d"
output.mkdir(parents=True)
if plan["report"] is not None:
    (output / "report.json").write_text(json.dumps(plan["report"]) if isinstance(plan["report"], dict) else plan["report"])
print("finished")
sys.exit(plan["code"])
"""


def lane(name, status="PASS", infra=0):
    return {
        "lane_id": name,
        "status": status,
        "summary": {},
        "artifacts": {},
        "infra_errors": infra,
        "imported": False,
        "elapsed_s": 3.1,
    }


def report(*lanes, total=0, invalid=True):
    return {
        "schema_version": 2,
        "r0b0bench_version": "1.0.0rc2",
        "run_id": "20260822T101500Z-0a1b2c3d",
        "profile": "systems",
        "base_url": "http://192.0.2.7:8888/v1",
        "model": "served",
        "systems_lanes": LANES,
        "invalid_for_publish": invalid,
        "started_utc": "2026-08-22T10:15:00Z",
        "elapsed_s": 6.2,
        "lanes": list(lanes),
        "infra_errors_total": total,
    }


def benched(tmp_path, endpoint, given, code=0):
    (tmp_path / "plan.json").write_text(json.dumps({"report": given, "code": code}))
    folder = tmp_path / f"artifacts-{time.monotonic_ns()}"
    folder.mkdir()
    settings = {
        "lanes": LANES,
        "deadline_s": 60.0,
        "artifacts": str(folder),
        "r0b0bench": program(tmp_path, FAKE_R0B0BENCH),
    }
    found = r0b0bench.CHECKS["systems"].measure(endpoint, settings=settings, live=Live())
    return found, r0b0bench.judge(found, settings)


GOOD = [lane("canary"), lane("latency")]


def test_r0b0bench_passes_only_by_its_report_and_keeps_its_own_doubt(tmp_path, endpoint):
    found, verdict = benched(tmp_path, endpoint, report(*GOOD))
    assert verdict.passed and "invalid_for_publish True" in verdict.message
    assert found.data["invalid_for_publish"] is True and found.data["report"]["r0b0bench_version"] == "1.0.0rc2"
    assert "192.0.2.7" not in json.dumps(dict(found.data)), "its report repeats an address"
    asked = json.loads((tmp_path / "argv.json").read_text())
    assert (
        asked[:3] == ["run", "--profile", "systems"]
        and f"{endpoint.base_url}/v1" in asked
        and "canary,latency" in asked
    )
    assert any(name.endswith("report.json") for name in found.data["files"])
    assert benched(tmp_path, endpoint, report(*GOOD, invalid=False))[1].message == ""


@pytest.mark.parametrize(
    ("given", "code", "status"),
    [
        (report(lane("canary"), lane("latency", "FAIL")), 0, Status.FAIL),
        (report(*GOOD), 2, Status.PASS),
        (report(lane("canary"), lane("latency", "ERROR", 1), total=1), 0, Status.ERROR),
        (report(lane("canary"), lane("latency", "PASS", 3), total=3), 0, Status.ERROR),
        (report(lane("canary"), lane("latency", "FAIL", 2), total=2), 0, Status.ERROR),
        (report(*GOOD, total=1), 0, Status.ERROR),
        (report(lane("canary"), lane("latency", "PASS", 3)), 0, Status.ERROR),
        (report(lane("canary"), lane("latency", "PASS", None)), 0, Status.ERROR),
        (report(*GOOD, total=None), 0, Status.ERROR),
        (report(lane("canary"), lane("latency", "SKIP")), 0, Status.NOT_IMPLEMENTED),
        (report(lane("canary"), lane("latency", "NOT_IMPLEMENTED")), 0, Status.NOT_IMPLEMENTED),
        (report(lane("canary"), lane("latency", "GREAT")), 0, Status.ERROR),
        (report(lane("canary")), 0, Status.ERROR),
        (report(), 0, Status.ERROR),
        (None, 0, Status.ERROR),
        ("<html>", 0, Status.ERROR),
        ({"schema_version": 2}, 0, Status.ERROR),
    ],
)
def test_r0b0bench_exit_codes_are_never_believed(tmp_path, endpoint, given, code, status):
    found, verdict = benched(tmp_path, endpoint, given, code)
    assert (verdict.status, found.data["exit_code"]) == (status, code), verdict


def test_r0b0bench_that_is_not_installed_is_not_implemented(endpoint, tmp_path):
    for command in ("", str(tmp_path / "nowhere")):
        settings = {"lanes": LANES, "deadline_s": 9.0, "artifacts": str(tmp_path), "r0b0bench": command}
        with pytest.raises(DsparkError, match="install r0b0bench") as caught:
            r0b0bench.measure(endpoint, settings=settings, live=Live())
        assert caught.value.code == "NOT_IMPLEMENTED"


def test_r0b0bench_no_lanes_is_no_pass():
    data = {"report": report(), "lanes_asked": [], "exit_code": 0, "tail": ""}
    assert r0b0bench.judge(Finding("r0b0bench.systems", data), {}).status is Status.ERROR
    assert os.path.basename(r0b0bench.COMMAND) == "r0b0bench"
