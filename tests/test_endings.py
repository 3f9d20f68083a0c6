"""Sessions that end otherwise than planned, or whose plan another plugin changed: what the exit code and the evidence say."""

import os
import signal

import pytest
from rehearsed import Place

pytestmark = pytest.mark.timeout(150)
FEW = ("-k", "launch or test_stream or json or teardown")


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    for pid in made.living():
        os.kill(pid, signal.SIGKILL)


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
