"""A host that is about to die under a running check: the request ends, the engine is stopped, the rest is BLOCKED."""

import json
import time

import pytest

pytestmark = pytest.mark.timeout(150)
FINE = {"free_memory_gib": 8.0, "temperature_c": 60}


@pytest.fixture
def place(place, tmp_path):
    """A place whose hosts say what files tell them, and whose long streams hang."""
    for number in (1, 2):
        pretend(place, number, **FINE)
    paths = [str(tmp_path / f"readings-{number}.json") for number in (1, 2)]
    place.env = (
        {"REHEARSAL_READINGS": paths[0], "REHEARSAL_FAULT": "hang_after_tokens=150"},
        {"REHEARSAL_READINGS": paths[1]},
    )
    return place


def pretend(place, number, **told):
    path = place.folder / f"readings-{number}.json"
    path.with_suffix(".new").write_text(json.dumps(told))
    path.with_suffix(".new").replace(path)


def begun(session, check):
    session.wait_for("dspark: run ")  # names the folder; the header may come after what is said of the launch
    deadline = time.monotonic() + 60
    path = session.folder / "begun.jsonl"
    while not (path.exists() and check in path.read_text()):
        assert time.monotonic() < deadline and session.process.poll() is None, session.text[-3000:]
        time.sleep(0.05)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_memory_under_the_floor_ends_the_check_and_the_engine(place, workers):
    session = place.start("-n", workers, "-k", "launch or gate or stream or json or tool_call or teardown")
    session.wait_for("engine proven and ready")
    begun(session, "correctness.stream")
    pretend(place, 2, free_memory_gib=0.05, temperature_c=60)
    crossed = time.monotonic()
    session.wait_for("INFRA_RISK", seconds=30)
    assert time.monotonic() - crossed < 20
    pretend(place, 2, **FINE)  # the engine gives its memory back
    assert session.end() == 1, session.text[-3000:]
    rows = {row["check"]: row for row in session.rows()}
    stream = rows["correctness.stream"]
    assert (stream["verdict"], stream["code"]) == ("ERROR", "INFRA_RISK")
    assert "host-2: free memory is 0.05 GiB, the recipe brakes below 0.1 GiB" in stream["message"]
    later = [rows[f"correctness.{name}"] for name in ("json", "tool")]
    # with two workers one of them may have been in flight as well
    assert {(row["verdict"], row["code"]) for row in later} <= {
        ("BLOCKED", "BLOCKED"),
        ("PASS", None),
        ("ERROR", "INFRA_RISK"),
    }
    if workers == "0":
        assert all("first cause: INFRA_RISK: host-2" in row["message"] for row in later)
    brake = json.loads((session.folder / "production" / "brake.json").read_text())
    assert (brake["host"], brake["reading"]["free_memory_gib"]) == ("host-2", 0.05)
    assert session.run_json()["profiles"]["production"]["hosts"]["host-2"]["least_free_memory_gib"] == 0.05
    assert 'failures="0"' in (session.folder / "junit.xml").read_text()
    assert rows["teardown"]["verdict"] == "PASS" and place.living() == []


LINGERS = """
import time
def pytest_runtest_logfinish(nodeid):
    if "test_stream" in nodeid:
        time.sleep(15)
"""


def test_a_host_that_stays_too_hot_brakes_at_once_even_an_engine_to_keep(place, monkeypatch):
    (place.folder / "lingers.py").write_text(LINGERS)
    monkeypatch.setenv("PYTHONPATH", str(place.folder))
    session = place.start("--dspark-keep", "-p", "lingers", "-k", "launch or stream or json")
    session.wait_for("engine proven and ready")
    begun(session, "correctness.stream")
    pretend(place, 1, free_memory_gib=8, temperature_c=130)
    session.wait_for("INFRA_RISK", seconds=30)
    session.wait_for("nothing is left on", seconds=13)
    assert place.living() == [] and session.process.poll() is None, "the engine lived on until the session ended"
    assert session.end() == 1
    row = {row["check"]: row for row in session.rows()}["correctness.stream"]
    assert row["code"] == "INFRA_RISK" and "pretended is at 130 °C" in row["message"], session.text[-3000:]
    assert not list((place.out / "kept").glob("*.json")), "an engine on a host that is about to die was kept"


def test_unreadable_brakes_never_and_is_null_with_the_reason(place):
    for number in (1, 2):
        (place.folder / f"readings-{number}.json").unlink()
    session = place.run("-k", "launch or gate or json or tool_call or teardown")
    assert session.process.returncode == 0, session.text[-3000:]
    assert "host-2: free memory and temperature cannot be read, so nothing brakes on it" in session.text
    hosts = session.run_json()["profiles"]["production"]["hosts"]
    for host in ("host-1", "host-2"):
        assert hosts[host]["least_free_memory_gib"] is None and "No such file" in hosts[host]["unreadable"][0]


def test_a_braked_run_is_resumed_when_the_host_is_well_again(place):
    session = place.start("-k", "launch or gate or arithmetic or stream or teardown")
    session.wait_for("engine proven and ready")
    begun(session, "correctness.stream")
    pretend(place, 1, free_memory_gib=0.01, temperature_c=60)
    assert session.end() == 1 and place.living() == []
    pretend(place, 1, **FINE)
    again = place.run(f"--dspark-resume={session.folder.name}", "-k", "launch or gate or arithmetic or teardown")
    assert again.process.returncode == 0, again.text[-3000:]
    assert again.text.count("starting rank 0") == 1 and place.living() == []
