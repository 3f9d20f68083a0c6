"""--dspark-resume: what a killed or unfinished run had measured is judged again and never measured again."""

import fcntl
import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rehearsed import ROOT

from pytest_dspark.errors import ConfigError
from pytest_dspark.evidence import Case, new_run, sealed, sealed_rows
from pytest_dspark.resume import Replay, Stored, take

pytestmark = pytest.mark.timeout(150)
KILLER = """
import os, signal
from pytest_dspark.evidence import RunFolder
begin = RunFolder.begin
def killing(run, case):
    begin(run, case)
    if case.check == os.environ["KILL_AT"]:
        worker = "PYTEST_XDIST_WORKER" in os.environ
        os.kill(os.getppid() if worker else os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
RunFolder.begin = killing
"""


@pytest.fixture
def kill(place, monkeypatch):
    """Run a session that dies by SIGKILL when it begins to measure a check, with its engine left up."""

    def run(check, *args, **options):
        (place.folder / "killer.py").write_text(KILLER)
        monkeypatch.setenv("KILL_AT", check)
        monkeypatch.setenv("PYTHONPATH", str(place.folder))
        session = place.run("-p", "killer", *args, **options)
        monkeypatch.delenv("PYTHONPATH")
        assert session.process.returncode == -signal.SIGKILL, session.text[-3000:]
        # a second xdist worker may still write what it is about: wait as a resume does
        os.close(take(session.folder, say=print))
        assert session.run_json()["status"] == "incomplete" and len(place.living()) == 2
        return session

    return run


def resume(session, *args, **options):
    return session.place.run(f"--dspark-resume={session.folder.name}", *args, **options)


def snapshot(folder):
    """Every file but the ranks' logs: while a process rank lives, its log is one file under several names."""
    return {
        str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".log"
    }


def rows_by_check(session):
    return {row["check"]: row for row in session.cases()}


def measured(session):
    """The checks that the session began to measure, without those that cannot run here and are looked at each time."""
    path, rows = session.folder / "begun.jsonl", rows_by_check(session)
    begun = [json.loads(line)["check"] for line in path.read_text().splitlines()] if path.exists() else []
    return [check for check in begun if rows.get(check, {}).get("verdict") != "NOT_IMPLEMENTED"]


def properties(path):
    cases = ElementTree.parse(path).getroot().iter("testcase")
    return {case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")} for case in cases}


def rewrite(session, change):
    """Change rows of a run and seal all of them anew, as somebody would who knows how."""
    before, lines = session.folder.name.encode(), []
    for _, row in list(sealed_rows(session.folder / "rows.jsonl", session.folder.name)):
        row.pop("seal")
        change(row)
        lines.append(sealed(json.dumps(row, ensure_ascii=False).encode(), before))
        before = json.loads(lines[-1])["seal"].encode()
    (session.folder / "rows.jsonl").write_bytes(b"".join(lines))


def edited_finding(row):
    if row["check"] == "correctness.json":
        row["finding"]["reply"]["text"] = '{"alpha": 99}'


# --- without a session


CASE = Case("B", "suites/test_x.py::test_x[p-1]", "x.1", "x", "p", "r", "f" * 16, settings="s")


def test_other_settings_are_another_measurement_and_another_path_is_refused():
    stored = Stored("A", "PASS", {}, "s", "t", 1.0, 1)
    replay = Replay("A", Path("A"), {("p", "x.1", CASE.nodeid): stored}, {("p", "x.1", CASE.nodeid): 1})
    assert replay.stored(CASE) is stored
    assert replay.stored(replace(CASE, settings="other")) is None
    assert replay.stored(replace(CASE, check="x.2", nodeid="suites/test_x.py::test_x[p-2]")) is None
    assert replay.attempt("p", "x.1", CASE.nodeid) == 2 and replay.attempt("p", "x.2", "n") == 1
    with pytest.raises(ConfigError, match="start pytest in the same folder"):
        replay.stored(replace(CASE, nodeid="test_x.py::test_x[p-1]"))


def test_a_run_is_taken_by_one_alone_and_only_when_nobody_works_for_it(tmp_path):
    run, said = new_run(tmp_path), []
    worker = run.hold()
    with pytest.raises(ConfigError, match="still running, or another session resumes it"):
        take(run.path, say=said.append, patience_s=0.3)
    assert len(said) == 1
    threading.Timer(0.5, os.close, [worker]).start()
    first = take(run.path, say=said.append, patience_s=10)
    with pytest.raises(ConfigError, match="still running"):
        take(run.path, say=said.append, patience_s=0.3)
    os.close(first)


# --- after SIGKILL


def test_killed_in_the_second_cell_then_resumed(place, kill, tmp_path):
    """A cell may take hours: the one that was finished is not measured again."""
    profile, text = tmp_path / "small.env", (ROOT / "profiles" / "dspark-r0b0tlab-1m.env").read_text()
    profile.write_text(text.replace("MAX_MODEL_LEN=1048576", "MAX_MODEL_LEN=40000"))
    given = (f"--dspark-profile={profile}",)
    first = kill("needle.50pct", *given, mark="long1m")
    assert rows_by_check(first)["needle.25pct"]["verdict"] == "PASS" and "needle.50pct" not in rows_by_check(first)
    second = resume(first, *given, mark="long1m")
    assert second.process.returncode == 0, second.text[-4000:]
    assert "starting rank" not in second.text, "the engine that was left up is used"
    rows = rows_by_check(second)
    assert measured(second) == ["needle.50pct", "needle.90pct"]
    cells = ("needle.25pct", "needle.50pct", "needle.90pct")
    assert [rows[cell]["verdict"] for cell in cells] == ["PASS"] * 3
    assert [rows[cell]["measured_in"] == first.folder.name for cell in cells] == [True, False, False]
    assert rows["needle.25pct"]["finding"] == rows_by_check(first)["needle.25pct"]["finding"]
    told = properties(second.folder / "junit.xml")
    assert len(told) == len(rows) == 22
    who = {names["dspark_case"]: names["dspark_measured_in"] for names in told.values()}
    assert who == {f"long1m/{check}": row["measured_in"] for check, row in rows.items()}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_killed_in_a_later_check_then_resumed(place, kill, workers):
    first = kill("correctness.retrieval", "-n", workers)
    passed = {row["check"] for row in first.rows() if row["verdict"] == "PASS"}
    stored = {check for check in passed if check != "launch" and not check.startswith("gate.")}
    assert stored and "correctness.retrieval" not in stored
    ranks, before = sorted(place.living()), snapshot(first.folder)
    second = resume(first, "-n", workers)
    assert second.process.returncode == 0, second.text[-4000:]
    # the running engine was taken over: one launch in both sessions, the same processes
    assert first.text.count("starting rank 0") == 1 and "starting rank" not in second.text
    launch = rows_by_check(second)["launch"]["finding"]
    assert launch["adopted_from"] == first.folder.name and launch["reused"] is True
    # what was finished is not measured again, and says who measured it
    rows = rows_by_check(second)
    assert len(rows) == len(second.cases()) == 42, "one row a case"
    assert set(measured(second)).isdisjoint(stored) and "correctness.retrieval" in measured(second)
    for check, row in rows.items():
        earlier = check in stored
        assert row["measured_in"] == (first.folder.name if earlier else second.folder.name), check
        assert row["run"] == second.folder.name
        if earlier:
            assert row["finding"] == rows_by_check(first)[check]["finding"] and row["attempt"] == 1
    assert rows["correctness.retrieval"]["attempt"] == 2, "the attempt that the kill cut off counts"
    # the old run is as it was; nothing is left running
    assert snapshot(first.folder) == before
    assert place.living() == [] and len(ranks) == 2
    # JUnit is complete, and says which run measured what
    for report in ("junit.xml", "publish/junit.xml"):
        told = properties(second.folder / report)
        assert len(told) == len(rows) and all(names["dspark_run"] == second.folder.name for names in told.values())
        who = {names["dspark_case"]: names["dspark_measured_in"] for names in told.values()}
        assert who == {f"production/{check}": row["measured_in"] for check, row in rows.items()}
    run = second.run_json()
    assert run["resumed"] == first.folder.name and run["requirements_met"] and not run["publishable"]
    assert run["measured_in"][first.folder.name] == len(stored)
    assert any("correctness.retrieval was tried 2 times" in reason for reason in run["reasons"])
    assert f"resumed from run {first.folder.name}" in second.text.strip().splitlines()[-1]


def test_a_resumed_run_that_was_killed_is_resumed_again(place, kill):
    first = kill("correctness.json")
    (place.folder / "killer.py").write_text(KILLER.replace('os.environ["KILL_AT"]', '"correctness.retrieval"'))
    os.environ["PYTHONPATH"] = str(place.folder)
    try:
        second = resume(first, "-p", "killer")
    finally:
        del os.environ["PYTHONPATH"]
    assert second.process.returncode == -signal.SIGKILL
    third = resume(second)
    assert third.process.returncode == 0, third.text[-4000:]
    assert "starting rank" not in second.text + third.text, "the engine was started anew"
    rows = rows_by_check(third)
    assert [rows[f"correctness.{name}"]["measured_in"] for name in ("stream", "json", "retrieval")] == [
        first.folder.name, second.folder.name, third.folder.name,
    ]  # fmt: skip
    assert [rows[f"correctness.{name}"]["attempt"] for name in ("stream", "json", "retrieval")] == [1, 2, 2]
    assert place.living() == []


@pytest.mark.parametrize("victim", ["head", "worker"])
def test_half_an_engine_is_stopped_and_a_new_one_started(place, kill, victim):
    first = kill("correctness.retrieval")
    for pid in place.living():
        headless = b"--headless" in Path(f"/proc/{pid}/cmdline").read_bytes()
        if headless == (victim == "worker"):
            os.kill(pid, signal.SIGKILL)
    second = resume(first)
    assert second.process.returncode == 0, second.text[-4000:]
    launch = rows_by_check(second)["launch"]["finding"]
    assert launch["adopted_from"] is None and second.text.count("starting rank 0") == 1
    assert rows_by_check(second)["correctness.stream"]["measured_in"] == first.folder.name
    assert place.living() == []


def test_an_engine_that_the_gate_refuses_now_is_stopped_and_a_new_one_started(place, kill):
    first = kill("correctness.retrieval")
    ranks = place.living()
    for log in (place.out / "hosts").glob("*.log"):
        log.write_text(log.read_text() + "fallback to eager\n")
    second = resume(first)
    assert second.process.returncode == 0, second.text[-4000:]
    launch = rows_by_check(second)["launch"]["finding"]
    assert launch["adopted_from"] is None and "GATE_FAILED: gate.forbidden" in launch["not_adopted"]
    assert second.text.count("starting rank 0") == 1 and not set(ranks) & set(place.living())
    folder = second.folder / "production"
    stopped = json.loads((folder / "left-stopped.json").read_text())
    assert stopped["run"] == first.folder.name and stopped["left_behind"] == []
    assert "fallback to eager" in (folder / "left-rank0.log").read_text()
    assert "fallback to eager" not in (folder / "rank0.log").read_text() and place.living() == []


def test_interrupted_while_an_engine_is_taken_over(place, kill):
    """The old engine is halted, so that it answers nobody."""
    first = kill("correctness.retrieval")
    ranks = place.living()
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    second = place.start(f"--dspark-resume={first.folder.name}")
    second.wait_for("taking over the engine that run")
    second.process.send_signal(signal.SIGINT)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    assert second.end(60) == 2 and place.living() == [], second.text[-3000:]


def test_without_an_engine_the_rest_is_measured_on_a_new_one(place, kill):
    first = kill("correctness.json")
    for pid in place.living():
        os.kill(pid, signal.SIGKILL)
    second = resume(first)
    assert second.process.returncode == 0, second.text[-4000:]
    assert rows_by_check(second)["launch"]["finding"]["adopted_from"] is None
    again = {check for check in measured(second) if check.startswith("correctness")}
    assert again == {"correctness.json", "correctness.retrieval", "correctness.tool"}


# --- after an end in order


def test_a_finished_run_is_judged_again_and_an_error_is_tried_again(place):
    first = place.run()
    assert first.process.returncode == 0

    def change(row):
        if row["check"] == "correctness.tool":
            row.update(verdict="ERROR", code="FOREIGN_TRAFFIC", message="void, though measured")
        if row["check"] == "correctness.retrieval":
            row.update(verdict="BLOCKED", code="BLOCKED", message="first cause", finding=None)

    rewrite(first, change)
    (first.folder / "begun.jsonl").unlink()
    second = resume(first)
    rows = rows_by_check(second)
    assert second.process.returncode == 0, second.text[-4000:]
    assert measured(second) == ["correctness.tool", "correctness.retrieval"]
    assert (rows["correctness.tool"]["attempt"], rows["correctness.retrieval"]["attempt"]) == (2, 1)
    assert rows["launch"]["measured_in"] == rows["gate.canaries"]["measured_in"] == second.folder.name


def test_a_stored_pass_whose_finding_was_edited_goes_red(place):
    first = place.run()
    rewrite(first, edited_finding)
    second = resume(first)
    row = rows_by_check(second)["correctness.json"]
    assert second.process.returncode == 1 and row["verdict"] == "FAIL", second.text[-3000:]
    assert f"run {first.folder.name} had called this PASS" in row["message"]
    assert measured(second) == [], "a finished check was measured again"


def test_a_stored_finding_without_its_shape_is_an_error_and_no_traceback(place):
    first = place.run()
    rewrite(first, lambda row: row.update(finding={}) if row["check"] == "correctness.json" else None)
    second = resume(first)
    row = rows_by_check(second)["correctness.json"]
    assert (row["verdict"], row["code"], second.process.returncode) == ("ERROR", "HARNESS", 1)
    assert "cannot be judged" in row["message"] and "Traceback" not in second.text


def test_another_path_to_the_same_suites_is_blocked_and_not_measured_twice(place):
    first = place.run("-k", "launch or json")
    rewrite(first, lambda row: row.update(nodeid=row["nodeid"].replace("suites/", "x/suites/")))
    second = resume(first, "-k", "launch or json")
    row = rows_by_check(second)["correctness.json"]
    assert (row["verdict"], row["code"]) == ("BLOCKED", "RESUME_REFUSED") and measured(second) == []


# --- with the other ways to get an engine


def test_resume_of_a_kept_run_reuses_its_engine_and_attach_leaves_it(place):
    first = place.run("--dspark-keep", "-k", "launch or gate or stream")
    ranks = place.living()
    attached = resume(first, "--dspark-attach")
    rows = rows_by_check(attached)
    assert rows["correctness.stream"]["measured_in"] == first.folder.name and rows["teardown"]["verdict"] != "PASS"
    assert place.living() == ranks and "starting rank" not in attached.text
    again = resume(first)
    assert again.process.returncode == 0, again.text[-3000:]
    assert "reusing the engine kept by run" in again.text and place.living() == []


def test_an_engine_that_another_live_session_uses_is_left_alone(place):
    """A kept engine keeps the label of its run; a second session uses it while the first run is resumed."""
    first = place.run("--dspark-keep", "-k", "launch or gate or stream")
    (store,) = (place.out / "kept").glob("*.json")
    store.rename(store.with_suffix(".claimed"))
    ranks = place.living()
    with store.with_suffix(".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = resume(first)
    assert second.process.returncode == 1 and "held by another session" in second.text, second.text[-3000:]
    assert rows_by_check(second)["launch"]["code"] == "NAME_TAKEN" and place.living() == ranks


def test_a_kept_engine_of_another_profile_is_left_alone(place):
    first = place.run("--dspark-keep", "-k", "launch or json", mark="long1m or production")
    ranks = place.living()
    assert len(ranks) == 2 and rows_by_check(first)["launch"]["verdict"] == "PASS"
    second = resume(first, "-k", "launch or json", mark="long1m or production")
    assert {row["profile"]: row["code"] for row in second.rows() if row["check"] == "launch"}["long1m"] == "NAME_TAKEN"
    assert "starting rank" not in second.text and place.living() == []


# --- refused, each in one sentence, with nothing launched


def refuses(place, run, words, *args, **options):
    runs = set((place.out / "runs").iterdir())
    done = place.run(f"--dspark-resume={run}", *args, **options)
    assert done.process.returncode == 4 and "RESUME_REFUSED" in done.text, done.text[-3000:]
    assert words in done.text, done.text[-2000:]
    assert set((place.out / "runs").iterdir()) == runs and "starting rank" not in done.text


def test_what_cannot_be_resumed_is_refused(place):
    first = place.run("-k", "launch or json or teardown")
    run, rows = first.folder.name, first.folder / "rows.jsonl"
    refuses(place, "20260101T000000Z-deadbeef", "is no run folder")
    refuses(place, run, "it was about production, this session is about long1m", mark="long1m")
    profile = place.folder / "other.env"
    text = (ROOT / "profiles" / "dspark-r0b0tlab-production.env").read_text()
    profile.write_text(text.replace("MAX_NUM_SEQS=16", "MAX_NUM_SEQS=8"))
    refuses(place, run, "fingerprint of production is", f"--dspark-profile={profile}")
    whole = rows.read_bytes()
    lines = whole.splitlines(keepends=True)
    for damaged, words in (
        (whole.replace(b'"verdict": "PASS"', b'"verdict": "FAIL"', 1), "line 1 was changed"),
        (b"".join(lines[1:]), "line 1 was changed, moved or put in, or the one before it was taken out"),
        (lines[0] + lines[2], "line 2 was changed, moved"),
        (lines[0] + b'{"schema": 1}\n' + lines[1], "line 2 is no sealed row"),
        (lines[0] + b"\n" + lines[1], "line 2 is no sealed row"),
    ):
        rows.write_bytes(damaged)
        refuses(place, run, words)
    rows.write_bytes(whole + b'{"schema": 1, "run": "half a li')
    assert resume(first, "-k", "launch or json").process.returncode == 0, "a half last line is what a kill leaves"
    (first.folder / "run.lock").unlink()
    refuses(place, run, "run.lock: No such file")


def test_a_real_run_and_a_rehearsal_are_not_mixed(place):
    first = place.run("-k", "launch or json or teardown")
    told = first.run_json()
    (first.folder / "run.json").write_text(json.dumps(told | {"rehearsal": False}))
    refuses(place, first.folder, "it was of a real engine, this session is of a rehearsal")
    (first.folder / "run.json").write_text(json.dumps(told | {"endpoint": True}))
    refuses(place, first.folder, "nothing proves what answered it")
    other = place.out / "runs" / "another"
    shutil.copytree(first.folder, other)
    (other / "run.json").write_text(json.dumps(told | {"run": "another"}))
    refuses(place, other, "line 1 was changed")


def test_a_run_that_is_still_going_on_is_refused(place, monkeypatch):
    place.env = ({"REHEARSAL_FAULT": "hang_after_tokens=150"}, {})
    first = place.start()
    first.wait_for("engine proven and ready")
    ranks = place.living()
    begin = time.monotonic()
    second = place.run(f"--dspark-resume={first.folder.name}")
    assert second.process.returncode == 4 and "it is still running" in second.text, second.text[-3000:]
    assert time.monotonic() - begin < 60 and place.living() == ranks and first.process.poll() is None
    first.process.send_signal(signal.SIGINT)
    assert first.end() == 2 and place.living() == []


def test_resume_and_a_foreign_endpoint_exclude_each_other(place):
    place.folder.joinpath("evidence", "runs").mkdir(parents=True)
    done = place.run("--dspark-resume=x", "--dspark-endpoint=http://127.0.0.1:1")
    assert done.process.returncode == 4 and "exclude each other" in done.text
