"""A pack in the form of other tools, and the last lines in the terminal."""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from packed import Made, made  # noqa: F401

from pytest_dspark import closing, junit, pack, packfile, r0b0bench, summary, tables
from pytest_dspark.acceptance import outcome

LAB = Path(__file__).parent / "data" / "lab-pack.tar.xz"


@pytest.fixture(scope="module")
def lab() -> pack.Pack:
    with packfile.opened(LAB) as folder:
        return pack.load(folder)


def with_rows(base: pack.Pack, change) -> pack.Pack:
    rows = copy.deepcopy(list(base.rows))
    return dataclasses.replace(base, rows=tuple(row for row in map(change, rows) if row))


# --- r0b0bench


def test_an_entry_keeps_the_schema_and_its_figures_are_made_again(lab):
    found = r0b0bench.entry(lab)
    assert list(r0b0bench.problems(found)) == []
    row = next(row for row in lab.rows if row["check"] == "performance.latency")
    streams = [stream for one in row["finding"]["repeats"] for stream in one["samples"]]
    wanted = 1000 * statistics.fmean(stream["first_token_s"] for stream in streams)
    assert found["scores"]["latency"]["ttft_ms_mean"] == pytest.approx(wanted)
    assert sorted(found["scores"]["concurrency"]["ladder_aggregate_tok_s"]) == ["1", "2", "4"]
    assert found["model"]["id"] == "smollm2" and found["infra_errors_total"] == 0
    assert found["harness"]["name"] == "pytest-dspark"


def test_no_lane_is_invented(lab):
    """What was not measured is not there, is named, and makes the entry invalid for publishing."""
    found = r0b0bench.entry(lab)
    assert set(found["scores"]) == {"canary", "latency", "concurrency", "throughput"}
    assert "not measured: bfcl_mt, bfcl_ast, niah" in found["disclosures"]
    assert found["invalid_for_publish"] is True
    less = with_rows(lab, lambda row: None if row["lane"] == "performance" else row)
    assert set(r0b0bench.entry(less)["scores"]) == {"canary", "concurrency"}


def test_a_headline_that_was_edited_is_not_believed(lab):
    def boast(row):
        if row["finding"] and "headline" in row["finding"]:
            row["finding"]["headline"]["output_rate"] = {"mean": 1e9, "low": 1e9, "high": 1e9, "n": 3, "reason": None}
        return row

    assert r0b0bench.entry(with_rows(lab, boast))["scores"] == r0b0bench.entry(lab)["scores"]


def test_a_void_row_gives_no_score(lab):
    def void(row):
        if row["check"] == "concurrency.c2":
            row["finding"]["calibration"]["events"] = 0  # and its verdict still says PASS
        return row

    found = r0b0bench.entry(with_rows(lab, void))
    assert sorted(found["scores"]["concurrency"]["ladder_aggregate_tok_s"]) == ["1", "4"]
    assert found["scores"]["concurrency"]["status"] == "ERROR" and found["infra_errors_total"] == 1


def test_needles_of_the_long_window(made: Made):  # noqa: F811
    found = r0b0bench.entry(pack.load(made.long1m / "publish"))["scores"]["niah"]
    assert [one["depth"] for one in found["depths"]] == [262128, 524256, 943660]
    assert found["max_model_len"] == 1048576 and found["generation_reserve"] == 64


def test_a_needle_that_was_not_found_is_no_pass(made: Made):  # noqa: F811
    """Although the row's verdict was edited: the cell is judged anew."""

    def missed(row):
        if row["check"] == "needle.50pct":
            row["finding"]["reply"]["text"] = "I do not know."
        return row

    found = r0b0bench.entry(with_rows(pack.load(made.long1m / "publish"), missed))["scores"]["niah"]
    assert found["status"] == "FAIL" and [one["status"] for one in found["depths"]] == ["PASS", "FAIL", "PASS"]


def test_what_nothing_proves_has_no_entry(lab):
    with pytest.raises(ValueError, match="nothing proves what answered"):
        r0b0bench.entry(dataclasses.replace(lab, run={**lab.run, "endpoint": True}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema_version": 2}, "schema_version is 2, expected 1"),
        ({"schema_version": True}, "schema_version is True, expected int"),
        ({"entry_id": "No Spaces"}, "entry_id is 'No Spaces'"),
        ({"entry_id": "ab"}, "entry_id is 'ab'"),
        ({"model": {"id": "x"}}, "model.display_name is missing"),
        ({"model": []}, "model is [], expected dict"),
        ({"harness": {"name": "x", "profile": "hard-subset"}}, "harness.profile is 'hard-subset'"),
        ({"infra_errors_total": -1}, "infra_errors_total is -1"),
        ({"invalid_for_publish": 0}, "invalid_for_publish is 0, expected bool"),
        ({"disclosures": [1]}, "disclosures holds what is no text"),
        ({"scores": None}, "scores is None"),
    ],
)
def test_the_schema_check_finds(lab, change, told):
    assert any(told in why for why in r0b0bench.problems(r0b0bench.entry(lab) | change))


@pytest.mark.parametrize(
    "name", ["schema_version", "entry_id", "model", "harness", "scores", "infra_errors_total", "invalid_for_publish"]
)
def test_the_schema_check_misses_nothing_that_is_required(lab, name):
    found = {key: value for key, value in r0b0bench.entry(lab).items() if key != name}
    assert any(why.startswith(name) for why in r0b0bench.problems(found))


# --- JUnit


def test_the_published_junit_suits_its_readers(made: Made):  # noqa: F811
    """Unique names, verdict first, a story in the output within 500 characters, far below 30 MB."""
    raw = (made.production / "publish" / "junit.xml").read_bytes()
    cases = list(ElementTree.fromstring(raw).iter("testcase"))
    assert len(raw) < 30e6 and len({(one.get("classname"), one.get("name")) for one in cases}) == len(cases) > 30
    for case in cases:
        story = case.findtext("system-out") or ""
        assert story.partition(":")[0] in tables.VERDICTS and len(story) <= 500, case.get("name")
        for problem in (*case.findall("failure"), *case.findall("error"), *case.findall("skipped")):
            assert problem.get("message", "").partition(":")[0] == problem.get("type")
            assert (problem.text or "").startswith(problem.get("type", "?"))
    named = {p.get("value"): one for one in cases for p in one.iter("property") if p.get("name") == "dspark_case"}
    story = named["production/concurrency.c1"].findtext("system-out") or ""
    assert "output tok/s" in story and "first token" in story


def test_a_story_is_cut_and_holds_what_xml_can(tmp_path):
    raw = tmp_path / "junit.xml"
    case = '<testcase classname="a" name="b"><properties><property name="dspark_case" value="p/c"/></properties></testcase>'
    raw.write_text(f'<testsuites><testsuite name="s" tests="1">{case}</testsuite></testsuites>')
    found = junit.derive(raw, {"p/c": ("PASS", "")}, stories={"p/c": "PASS: \x00\x1b<b>" + "x" * 900})
    told = ElementTree.fromstring(found).find(".//system-out").text
    assert len(told) == 500 and told.startswith("PASS: \ufffd\ufffd<b>x")


# --- GitHub


def test_a_step_summary(lab):
    text = summary.summary(lab)
    assert text.startswith("## Accepted\n") and "may NOT be published" in text and "concurrency.c1" in text
    hostile = with_rows(lab, lambda row: row | {"verdict": "FAIL", "message": "<script>[x](http://y) | a"})
    assert "<script>" not in summary.summary(hostile).replace("\\<script\\>", "")


def test_a_step_summary_holds_one_mebibyte(lab):
    many = with_rows(lab, lambda row: row | {"verdict": "FAIL", "message": "é" * 300})
    many = dataclasses.replace(many, rows=many.rows * 60)
    text = summary.summary(many)
    assert len(text.encode()) <= 1 << 20 and "Cut here" in text


# --- the terminal


def said(rows, interrupted=False, **more):
    found = outcome(
        rows, {"production": ["launch"]}, selected={"production": frozenset({"launch"})}, narrowed=False, rehearsal=False, against_publishing=(), interrupted=interrupted
    )  # fmt: skip
    options = {
        "word": "accepted",
        "profiles": {"production": "profile p, fingerprint f"},
        "run": Path("/runs/r 1"),
        "refused": "",
    }
    return closing.closing(rows, found, **{**options, **more})


def test_the_last_section_says_all_in_20_lines(lab, monkeypatch):
    """Verdict, counts, figures with intervals, where the pack is, the next command; also where everything failed."""
    lines = said(lab.rows)
    text = "\n".join(lines)
    assert len(lines) <= 20 and max(map(len, lines)) <= 160
    for word in (
        "33 PASS, 6 NOT_IMPLEMENTED",
        "answer: accepted; may be published",
        "1 stream: 4.1 (1.8 – 6.4) tok/s",
        "pack: /runs/r 1/publish",
        "next: dspark verify '/runs/r 1/publish'",
    ):
        assert word in text, text
    some = [row | ({"verdict": "FAIL", "message": "no"} if row["lane"] == "correctness" else {}) for row in lab.rows]
    assert len(said(some, profiles=dict.fromkeys("abcdef", "p"))) == 20
    rows = [row | {"verdict": "ERROR", "code": "RANK_EXITED", "message": "dead " * 99} for row in lab.rows]
    lines = said(rows, refused="x" * 400, profiles=dict.fromkeys("abcdef", "p"))
    assert len(lines) <= 20 and max(map(len, lines)) <= 160
    assert "ERROR production/launch (fault: infrastructure): dead" in "\n".join(lines)
    monkeypatch.setattr(closing, "_REASONS", 99)
    assert len(said(rows)) == 20, "whatever there is to say"
    assert lines[-1].startswith("next: pytest … --dspark-resume") and lines[-2] == "evidence: /runs/r 1"


def test_the_first_cause_stands_before_what_it_blocked(lab):
    rows = [row | {"verdict": "BLOCKED", "message": "first cause: dead"} for row in lab.rows[1:]]
    rows = [*rows, lab.rows[0] | {"verdict": "ERROR", "code": "RANK_EXITED", "message": "rank 1 is dead"}]
    failed = [line for line in said(rows) if "(fault:" in line]
    assert failed == ["ERROR production/launch (fault: infrastructure): rank 1 is dead"]


def test_an_interrupted_run_is_to_be_resumed(lab):
    assert said(lab.rows[:3], interrupted=True)[-1].startswith("next: pytest … --dspark-resume")


def test_counts_are_complete(lab):
    counted = Counter(row["verdict"] for row in lab.rows)
    assert said(lab.rows)[0] == f"verdicts: {counted['PASS']} PASS, {counted['NOT_IMPLEMENTED']} NOT_IMPLEMENTED"


def test_the_command_writes_json(lab, capsys, tmp_path):
    from pytest_dspark import cli

    assert cli.main(["export", "r0b0bench", str(LAB)]) == 0
    assert json.loads(capsys.readouterr().out)["schema_version"] == 1
    assert cli.main(["export", "junit", str(LAB), "--out", str(tmp_path / "j.xml")]) == 0
    assert (tmp_path / "j.xml").read_bytes() == lab.junit


def test_a_summary_goes_where_github_reads_it(monkeypatch, tmp_path):
    from pytest_dspark import cli

    target = tmp_path / "summary"
    target.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(target))
    assert cli.main(["export", "github-summary", str(LAB)]) == 0
    assert target.read_text().startswith("before\n## Accepted")
