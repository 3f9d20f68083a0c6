"""Rows, the run folder, the answer of the run, and the derived report."""

import json
import os
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree

import pytest

from pytest_dspark import junit
from pytest_dspark.acceptance import outcome
from pytest_dspark.errors import ConfigError
from pytest_dspark.evidence import Case, new_run, row, sealed_rows
from pytest_dspark.verdict import PASS, Finding, Status, Verdict

CASE = Case("run", "suites/test_x.py::test_x[production]", "x", "x", "production", "recipe", "f" * 16)


def test_run_folder_is_private_exclusive_and_incomplete_from_birth(tmp_path):
    run = new_run(tmp_path / "out")
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    run.append(row(CASE, PASS, Finding("x", {"n": 1}), started="t", elapsed_s=0.5))
    assert {stat.S_IMODE(path.stat().st_mode) for path in run.path.iterdir()} == {0o600}
    assert json.loads((run.path / "run.json").read_text())["status"] == "incomplete"


def test_run_folder_is_refused_inside_a_work_tree(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    with pytest.raises(ConfigError, match="outside git work trees"):
        new_run(tmp_path / "sub")
    assert not (tmp_path / "sub").exists()


def test_rows_of_many_writers_are_whole_and_a_torn_line_is_left_out(tmp_path):
    run = new_run(tmp_path)
    big = Finding("x", {"text": "é" * 20_000})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: run.append(row(CASE, PASS, big, started="t", elapsed_s=0)), range(40)))
    with run.rows.open("ab") as file:
        file.write(b'{"schema": 1, "verd')
    rows = list(run.read())
    assert len(rows) == 40 and all(r["finding"]["text"] == "é" * 20_000 for r in rows)


def test_a_row_says_null_where_nothing_was_measured():
    made = row(CASE, Verdict(Status.ERROR, "RANK_EXITED", "gone"), None, started="t", elapsed_s=0)
    assert made["finding"] is None and made["code"] == "RANK_EXITED"


def judged(rows, *, required=("a", "b"), selected=("a", "b"), **options):
    given = {"narrowed": True, "rehearsal": False, "against_publishing": [], "interrupted": False} | options
    data = [{"profile": "production", "check": check, "verdict": verdict} for check, verdict in rows]
    return outcome(data, {"production": required}, selected={"production": frozenset(selected)}, **given)


def test_accepted_only_if_every_required_check_is_pass_once():
    assert judged([("a", "PASS"), ("b", "PASS")]).accepted is True
    assert judged([("a", "PASS"), ("b", "PASS")]).publishable is True
    for verdict in ("FAIL", "TOKEN_LIMIT", "ERROR", "CAPACITY", "BLOCKED", "NOT_IMPLEMENTED"):
        assert judged([("a", "PASS"), ("b", verdict)]).accepted is False
    assert judged([("a", "PASS")]).accepted is False, "a required row is missing"
    assert judged([("a", "PASS"), ("b", "ERROR"), ("b", "PASS")]).accepted is False, (
        "a second attempt does not wash the first"
    )
    assert judged([], required=(), selected=()).accepted is False, "a recipe that requires nothing accepts nothing"


def test_subset_rehearsal_interrupt_and_foreign_are_never_accepted():
    good = [("a", "PASS"), ("b", "PASS")]
    assert judged([("a", "PASS")], selected=("a",)).accepted is None
    assert judged([("a", "PASS")], selected=("a",), narrowed=False).accepted is False, "missing, and nobody narrowed it"
    assert "subset: not an acceptance" in judged([("a", "PASS")], selected=("a",)).reasons
    assert judged(good, rehearsal=True).accepted is None and judged(good, rehearsal=True).met
    assert judged(good, foreign=True).accepted is None
    assert judged(good, interrupted=True).accepted is False
    assert not any(judged(good, **{key: True}).publishable for key in ("rehearsal", "foreign", "interrupted"))


def test_an_extra_failed_row_is_never_hidden():
    result = judged([("a", "PASS"), ("b", "PASS"), ("c", "ERROR")])
    assert result.accepted is True and not result.publishable and "production: c is ERROR" in result.reasons


RAW = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" errors="2" failures="1" skipped="1" tests="5" hostname="my-secret-host">
<testcase classname="s" name="t[a]"><properties><property name="dspark_case" value="p/a"/></properties><error message="failed on setup with &quot;Failed: ERROR RANK_EXITED: rank 1&quot;">trace</error></testcase>
<testcase classname="s" name="t[b]"><failure message="boom">trace</failure></testcase>
<testcase classname="s" name="t[b]"><error message="teardown">trace</error></testcase>
<testcase classname="s" name="t[c]"><skipped message="why">trace</skipped></testcase>
<testcase classname="s" name="t[d]"/></testsuite></testsuites>"""


def test_derived_report_has_the_verdict_first_the_same_cases_and_no_host(tmp_path):
    raw = tmp_path / "junit.xml"
    raw.write_text(RAW)
    derived = junit.derive(raw, {"p/a": ("BLOCKED", "first cause: rank 1")})
    suite = ElementTree.fromstring(derived).find("testsuite")
    assert suite.get("tests") == "4" and suite.get("hostname") == "host" and b"my-secret-host" not in derived
    problems = [(p.tag, p.get("type"), p.get("message")) for case in suite for p in case if p.tag != "properties"]
    assert problems[0] == ("error", "BLOCKED", "BLOCKED: first cause: rank 1")
    assert [p[1] for p in problems] == ["BLOCKED", "FAIL", "ERROR", "NOT_IMPLEMENTED"]
    assert set(junit.case_ids(derived)) == set(junit.case_ids(RAW.encode()))


def test_derived_report_of_no_report(tmp_path):
    with pytest.raises(ValueError, match="absent"):
        junit.derive(tmp_path / "absent.xml", {})


def test_half_a_character_is_kept_as_an_escape(tmp_path):
    run = new_run(tmp_path)
    run.append(row(CASE, PASS, Finding("x", {"text": "\ud83d"}), started="t", elapsed_s=0))
    run.write("a.json", {"x": "\ud83d"})
    assert next(run.read())["finding"]["text"] == json.loads((run.path / "a.json").read_text())["x"] == "\ud83d"


def test_write_whole_leaves_no_part(tmp_path):
    run = new_run(tmp_path)
    run.write("a.json", {"x": 1})
    with pytest.raises(ValueError, match="JSON"):
        run.write("a.json", {"x": float("nan")})
    assert json.loads((run.path / "a.json").read_text()) == {"x": 1}
    assert not [name for name in os.listdir(run.path) if name.startswith(".")]


# --- what resuming rests on


def three_rows(tmp_path):
    run = new_run(tmp_path)
    for number in range(3):
        run.append(row(CASE, PASS, Finding("x", {"n": number, "text": "é\ud83d\n"}), started="t", elapsed_s=0))
    return run


def test_rows_are_sealed_one_to_the_next_and_a_half_last_line_is_left_out(tmp_path):
    run = three_rows(tmp_path)
    whole = run.rows.read_bytes()
    assert [found["finding"]["n"] for _, found in sealed_rows(run.rows, run.run_id)] == [0, 1, 2]
    for cut in range(1, 400, 7):
        run.rows.write_bytes(whole[:-cut])
        assert len(list(sealed_rows(run.rows, run.run_id))) == 2 - whole[-cut:-1].count(b"\n")
    with pytest.raises(ValueError, match="line 1 was changed"):
        list(sealed_rows(run.rows, "another run"))


def test_any_changed_byte_of_a_whole_line_is_found(tmp_path):
    run = three_rows(tmp_path)
    whole = run.rows.read_bytes()
    first = whole.index(b"\n")
    for place in range(0, first, 3):
        run.rows.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="line 1"):
            list(sealed_rows(run.rows, run.run_id))


def test_a_writer_cuts_off_the_half_line_of_a_killed_one(tmp_path):
    run = three_rows(tmp_path)
    with run.rows.open("ab") as file:
        file.write(b'{"schema": 1, "half')
    run.append(row(CASE, PASS, Finding("x", {"n": 3}), started="t", elapsed_s=0))
    assert [found["finding"]["n"] for _, found in sealed_rows(run.rows, run.run_id)] == [0, 1, 2, 3]


def test_the_first_half_line_is_cut_off_too(tmp_path):
    run = new_run(tmp_path)
    run.rows.write_bytes(b"x" * 200_000)
    run.append(row(CASE, PASS, Finding("x", {"text": "y" * 300_000}), started="t", elapsed_s=0))
    run.append(row(CASE, PASS, Finding("x", {"n": 1}), started="t", elapsed_s=0))
    assert len(list(sealed_rows(run.rows, run.run_id))) == 2


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    run = three_rows(tmp_path)
    before, write = run.rows.read_bytes(), os.write

    def full(handle, data):
        if len(data) > 5:
            return write(handle, data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", lambda handle, data: full(handle, data) if len(data) > 600 else full(handle, b""))
    with pytest.raises(OSError, match="No space"):
        run.append(row(CASE, PASS, Finding("x", {"text": "y" * 900}), started="t", elapsed_s=0))
    monkeypatch.setattr(os, "write", write)
    assert run.rows.read_bytes() == before


def test_a_resumed_run_says_who_measured_what_and_what_was_tried_twice():
    def run(attempt=1, resumed="A"):
        rows = [
            {"profile": "p", "check": "a", "verdict": "PASS", "run": "B", "measured_in": "A", "attempt": 1},
            {"profile": "p", "check": "b", "verdict": "PASS", "run": "B", "measured_in": "B", "attempt": attempt},
        ]
        rows = [made | {"finding": {}} for made in rows]
        return outcome(
            rows,
            {"p": ("a", "b")},
            selected={"p": frozenset("ab")},
            narrowed=False,
            rehearsal=False,
            against_publishing=[],
            interrupted=False,
            resumed=resumed,
        )

    first, twice = run(), run(attempt=2)
    assert first.accepted and first.publishable and first.as_json()["resumed"] == "A"
    assert first.disclosures == ("resumed from run A", "measured in run A: p/a")
    assert first.measured_in == {"A": 1, "B": 1}
    assert twice.accepted and not twice.publishable and "p: b was tried 2 times" in twice.reasons
