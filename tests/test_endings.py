"""Sessions that end otherwise than planned, or whose plan another plugin changed: what the exit code and the evidence say."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from rehearsed import ROOT

pytestmark = pytest.mark.timeout(150)
FEW = ("-k", "launch or test_stream or json or teardown")


@pytest.fixture
def plugin(place, monkeypatch):
    """Write a plugin that the session loads with `-p meddler`."""
    monkeypatch.setenv("PYTHONPATH", str(place.folder))
    return (place.folder / "meddler.py").write_text


@pytest.mark.parametrize("workers", ["0", "2"])
def test_profiles_stay_together_whatever_sorts_after_us(place, plugin, workers):
    """As --ff does: what failed is put before everything else, here a case of the profile whose turn is last."""
    plugin(
        "import pytest\n"
        "@pytest.hookimpl(wrapper=True, tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        "    yield\n"
        "    items.sort(key=lambda item: 'test_json[production]' not in item.nodeid)\n"
    )
    session = place.run("-p", "meddler", "-n", workers, *FEW, mark="long1m or production")
    assert session.process.returncode == 0, session.text[-3000:]
    assert set(session.verdicts("long1m").values()) == set(session.verdicts().values()) == {"PASS"}
    order = [f"{row['profile']}/{row['check']}" for row in session.cases()]
    assert order.index("long1m/teardown") < order.index("production/launch")
    assert order[-1] == "production/teardown"


def test_a_case_that_was_not_run_is_never_green(place, plugin):
    """pytest.exit takes any exit code, and a narrowed run requires nothing."""
    plugin(
        "import pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_runtest_protocol(item, nextitem):\n"
        "    if 'test_json' in item.nodeid: pytest.exit('enough', returncode=0)\n"
    )
    session = place.run("-p", "meddler", *FEW)
    assert session.process.returncode == 1, session.text[-3000:]
    assert session.verdicts() == {"launch": "PASS", "correctness.stream": "PASS"}
    assert "production: correctness.json is missing" in session.run_json()["reasons"]
    assert place.living() == []


def test_another_plugin_that_cannot_write_its_report_leaves_ours_whole(place, plugin):
    plugin("def pytest_sessionfinish():\n    raise OSError('no space for the report of another plugin')\n")
    session = place.run("-p", "meddler", *FEW)
    assert session.process.returncode == 1
    assert (session.run_json()["status"], session.run_json()["exit_status"]) == ("complete", 1)
    assert (session.folder / "publish" / "rows.jsonl").exists() and place.living() == []


def test_without_a_terminal_reporter(place):
    session = place.run("-p", "no:terminal", *FEW)
    assert session.process.returncode == 0, session.text[-3000:]
    assert "dspark: subset: not an acceptance" in session.text.splitlines()[-1]


@pytest.mark.parametrize("hangup", [True, False], ids=["terminal", "pipe"])
def test_nobody_reads_what_is_said_any_more(place, hangup):
    """A terminal that hangs up, and `| head`: every write fails from then on, and yet every rank is stopped."""
    place.env = ({"REHEARSAL_FAULT": "hang_after_tokens=150"}, {})
    ours, theirs = os.openpty() if hangup else os.pipe()
    command = [sys.executable, "-m", "pytest", "-m", "production", f"--dspark-cluster={place.cluster()}"]
    command += [f"--dspark-out={place.out}", "-p", "no:cacheprovider", "suites", *FEW]
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    said = b""
    while b"engine proven and ready" not in said:
        said += os.read(ours, 65536)
    assert len(place.living()) == 2
    os.close(ours)
    process.send_signal(signal.SIGHUP if hangup else signal.SIGTERM)
    assert process.wait(timeout=60) != 0
    assert place.living() == []
    (run,) = (place.out / "runs").iterdir()
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    assert json.loads((run / "production" / "teardown.json").read_text())["left_behind"] == []


def test_an_evidence_folder_that_is_gone_leaves_no_rank_running(place):
    """Removed, or on a disk that is gone or read-only: nothing can be written any more, and yet every rank is stopped."""
    place.env = ({"REHEARSAL_FAULT": "hang_after_tokens=150"}, {})
    session = place.start(*FEW)
    session.wait_for("engine proven and ready")
    time.sleep(0.5)
    shutil.rmtree(place.out)
    session.process.send_signal(signal.SIGTERM)
    assert session.end(60) == 1, session.text[-3000:]
    assert place.living() == [] and "INTERNALERROR" not in session.text and "Traceback" not in session.text
    assert "production: HARNESS: the log of rank 0 (host-1) could not be kept" in session.text
    assert "stopped; nothing is left on" not in session.text, "that is said only if all went well"
    assert "NOT accepted: evidence could not be written" in session.text.splitlines()[-1]
    assert "next: dspark verify" not in session.text


@pytest.mark.parametrize("workers", ["0", "2"])
def test_suites_outside_the_root_folder_are_known(place, workers):
    """`--pyargs pytest_dspark.suites`, or another --rootdir: node ids say no folder, and the run is published all the same."""
    elsewhere = place.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "test_launch.py").write_text("raise RuntimeError('not this file')\n")
    session = place.run(f"--rootdir={elsewhere}", "-c", "/dev/null", "-n", workers, *FEW)
    assert session.process.returncode == 0, session.text[-3000:]
    assert {row["nodeid"].partition("::")[0] for row in session.cases()} >= {"test_launch.py", "test_teardown.py"}
    kept = session.folder / "publish" / "inputs" / "suites" / "test_launch.py"
    assert kept.read_bytes() == (ROOT / "suites" / "test_launch.py").read_bytes()
    assert not [reason for reason in session.run_json()["reasons"] if reason.startswith("suite ")]


@pytest.mark.parametrize("broken", ["ledger", "plan"])
def test_evidence_that_is_damaged_is_refused_and_the_run_still_says_how_it_ended(place, broken):
    """A line that a disk spoiled, a file that somebody removed: one sentence, and not a traceback after hours."""
    session = place.start(*FEW)
    session.wait_for("starting rank 1 on")
    if broken == "ledger":
        with (place.out / "ledger.jsonl").open("a") as file:
            file.write("no line of a ledger\n")
    else:
        (session.folder / "production" / "plan.json").unlink()
    assert session.end() == 1, session.text[-3000:]
    told = session.run_json()
    assert (told["status"], told["publishable"]) == ("complete", False)
    assert told["refused"].startswith("what the run left cannot be read: "), told["refused"]
    assert "NOT PUBLISHED" in session.text.splitlines()[-1] and not (session.folder / "publish").exists()
