"""Sessions of the needle lane against emulated ranks: a million tokens, a pool that is too small, and each fault."""

import re
import xml.etree.ElementTree as ET

import pytest
from rehearsed import ROOT, Place

CELLS = ("needle.25pct", "needle.50pct", "needle.90pct")
PRODUCTION = "--dspark-profile=dspark-r0b0tlab-production"


def run(place, *args, mark="long1m"):
    session = place.start(*args, mark=mark)
    session.end(300.0)
    return session


def needles(session):
    return {row["check"]: row for row in session.rows() if row["lane"] == "needle"}


def verdicts(session):
    return [(needles(session)[cell]["verdict"], needles(session)[cell]["code"]) for cell in CELLS]


def small(tmp_path, *faults, window=40_000):
    """The 1M profile with a small window, and faults on the head."""
    place = Place(tmp_path, env=({"REHEARSAL_FAULT": ",".join(faults)}, {}) if faults else ({}, {}))
    profile = tmp_path / "small.env"
    lines = (ROOT / "profiles" / "dspark-r0b0tlab-1m.env").read_text().splitlines()
    profile.write_text(
        "\n".join(re.sub(r"^MAX_MODEL_LEN=.*", f"MAX_MODEL_LEN={window}", line) for line in lines) + "\n"
    )
    return place, f"--dspark-profile={profile}"


def test_three_cells_of_a_million_tokens(tmp_path):
    session = run(Place(tmp_path))
    assert session.process.returncode == 0, session.text[-3000:]
    assert verdicts(session) == [("PASS", None)] * 3
    for cell, tokens in zip(CELLS, (262_128, 524_256, 943_660), strict=True):
        finding = needles(session)[cell]["finding"]
        assert finding["planned_tokens"] == finding["reply"]["prompt_tokens"] == tokens
        assert finding["cache"]["state"] == "cold" and finding["window"] == 1_048_576
        assert needles(session)[cell]["nodeid"] == f"suites/test_niah.py::test_needle[long1m-{cell.partition('.')[2]}]"
    assert session.run_json()["accepted"] is None and session.run_json()["requirements_met"] is True
    assert [row["check"] for row in session.rows()][-4:] == [*CELLS, "teardown"], "needles come last"
    assert "needle.90pct: 943,660 tokens answered, first token after" in session.text


def test_the_production_profile_named_for_it_runs_what_fits(tmp_path):
    session = run(Place(tmp_path), PRODUCTION)
    assert session.process.returncode == 1
    assert verdicts(session) == [("PASS", None), ("CAPACITY", "CAPACITY"), ("CAPACITY", "CAPACITY")]
    for cell, tokens in (("needle.50pct", "163,808"), ("needle.90pct", "294,854")):
        row = needles(session)[cell]
        assert row["message"].startswith("the pool holds 156,000 tokens") and f"needs {tokens} and 64" in row["message"]
        assert row["finding"]["sent"] is False and row["finding"]["pool_tokens"] == 156_000
    suite = ET.parse(session.folder / "junit.xml").getroot()[0]
    assert (suite.get("errors"), suite.get("failures")) == ("2", "0"), "what does not fit is no failure of the model"


def test_the_production_mark_has_no_needle(tmp_path):
    session = run(Place(tmp_path), "-k", "needle or launch", mark="production")
    assert needles(session) == {}


@pytest.mark.parametrize(
    ("fault", "expected", "words"),
    [
        ("answers_decoy", ("FAIL", "WRONG_ANSWER"), "is the decoy of the"),
        ("rambles", ("TOKEN_LIMIT", "TOKEN_LIMIT"), "the budget ended after 64 tokens"),
        ("wrong_usage=1", ("ERROR", "PROTOCOL"), "the server counted 78,685 prompt tokens, planned were 78,684"),
        ("never_scheduled=50000", ("ERROR", "CAPACITY_STALL"), "was accepted and never scheduled: for 1"),
        ("truncate_stream", ("ERROR", "TRUNCATED"), "needle.50pct of 78,684 tokens"),
    ],
)
def test_faults(tmp_path, fault, expected, words):
    place, profile = small(tmp_path, fault, window=157_432)
    session = run(place, profile, "-k", "launch or 50pct or teardown")
    row = needles(session)["needle.50pct"]
    assert session.process.returncode == 1, session.text[-3000:]
    assert (row["verdict"], row["code"]) == expected and words in row["message"], row
    assert place.living() == []


def test_a_dead_rank_is_named_and_not_the_model(tmp_path):
    """The last cell takes three quarters of a minute here; the worker dies long before."""
    place, profile = small(tmp_path, window=157_432)
    slow = {"REHEARSAL_TIME": "0.001", "REHEARSAL_SPEED": "300"}
    place.env = (slow, slow | {"REHEARSAL_FAULT": "die_after_s=25"})
    session = run(place, profile, "-k", "launch or 90pct or teardown")
    row = needles(session)["needle.90pct"]
    assert session.process.returncode == 1 and (row["verdict"], row["code"]) == ("ERROR", "RANK_EXITED"), row
    assert "needle.90pct of 141,631 tokens, done" in row["message"]
    assert not {row["verdict"] for row in session.rows()} & {"FAIL", "TOKEN_LIMIT"}


def test_a_deadline_below_the_floor_is_refused_before_anything_is_launched(tmp_path):
    place = Place(tmp_path)
    recipes = ROOT / "recipe"
    text = (recipes / "rehearsal.toml").read_text().replace("deadline_s = 600.0", "deadline_s = 59.0")
    (tmp_path / "low.toml").write_text(text)
    (tmp_path / "dspark-sm121.toml").write_text((recipes / "dspark-sm121.toml").read_text())
    session = run(place, f"--dspark-recipe={tmp_path / 'low.toml'}")
    assert session.process.returncode == 4 and "deadline_s is 59, the floor is 60" in session.text
    assert not place.out.exists()
