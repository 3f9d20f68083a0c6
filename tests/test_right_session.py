"""Sessions against emulated ranks with a defect each: exactly the right cases turn red, with the right verdict, and no other."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from pytest_dspark.datasets import GSM8K

pytestmark = pytest.mark.timeout(150)
OFFICIAL = Path(__file__).parents[2] / "shared" / "data"
HAVE_GSM8K = (OFFICIAL / GSM8K.file).exists()
needs_gsm8k = pytest.mark.skipif(not HAVE_GSM8K, reason="the official GSM8K file is not beside this clone")
KNOWS = {"REHEARSAL_KNOWS": str(OFFICIAL / GSM8K.file)} if HAVE_GSM8K else {}
GSM8K_TOO = {"gsm8k": ("FAIL", "WRONG_ANSWER")} if HAVE_GSM8K else {}
GIVEN = (f"--dspark-data={OFFICIAL}",)


FAULTS = {
    # what one request was told comes out of another one
    "cross_talk": (("cross_talk", ""), {"underload.crosstalk": ("FAIL", "CROSS_TALK")}),
    # a text that breaks after a while: the canaries of the gate are too short to see it, the long stream is not
    "garble": (("garble=1000", ""), {"correctness.stream": ("FAIL", "GARBLED")}),
    # a parser that has room for so many characters
    "cut tool arguments": (("cut_tool_args=200", ""), {"tools.long": ("FAIL", "WRONG_ANSWER")}),
    # one rank of the two, and not the one that serves the API
    "lossy text on one rank": (("", "lossy=110"), {"underload.condense": ("FAIL", "LOSSY")}),
    # everything that asks at least two things at once and looks at the answers
    "swapped answers": (
        ("swapped_answers", ""),
        {
            "underload.condense": ("FAIL", "DIVERGED"),
            "underload.crosstalk": ("FAIL", "CROSS_TALK"),
            "underload.staggered": ("FAIL", "WRONG_ANSWER"),
            "arithmetic.graded": ("FAIL", "WRONG_ANSWER"),
            **GSM8K_TOO,
        },
    ),
    "thinking that eats the budget": (("think_forever=asked", ""), {"tools.thinking": ("TOKEN_LIMIT", "TOKEN_LIMIT")}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_defect_turns_exactly_its_own_cases_red(place, name):
    faults, expected = FAULTS[name]
    place.env = tuple({"REHEARSAL_FAULT": fault, **KNOWS} for fault in faults)
    session = place.run(*GIVEN)
    found = {
        row["check"]: (row["verdict"], row["code"])
        for row in session.cases()
        if row["verdict"] not in ("PASS", "NOT_IMPLEMENTED")
    }
    assert found == expected, session.text[-3000:]
    assert session.process.returncode == 1 and session.verdicts()["teardown"] == "PASS"


def parts(session, verdict=""):
    rows = [row for row in session.rows() if row["part"] and row["check"] == "gsm8k"]
    return {row["part"]: row for row in rows if not verdict or row["verdict"] == verdict}


@needs_gsm8k
def test_a_dead_server_in_the_middle_of_gsm8k_then_resumed(place):
    """Finished questions keep their verdicts, the open ones are ERROR, the rest is BLOCKED, and no accuracy is published; a
    resumed run asks only what has no answer."""
    place.env = ({"REHEARSAL_SPEED": "40", **KNOWS}, {})
    session = place.start(*GIVEN, "-k", "gsm8k or launch or teardown")
    deadline = time.monotonic() + 60
    while not (session.folder.name and len(parts(session)) > 90):
        assert time.monotonic() < deadline and session.process.poll() is None, session.text[-3000:]
        time.sleep(0.02)
    head = next(pid for pid in place.living() if b"--headless" not in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(head, signal.SIGKILL)
    session.end()
    said = Counter(row["verdict"] for row in parts(session).values())
    assert said["PASS"] > 90 and 1 <= said["ERROR"] <= 16 and said["BLOCKED"] > 50 and sum(said.values()) == 250, said
    case = next(row for row in session.cases() if row["check"] == "gsm8k")
    assert (case["verdict"], case["code"]) == ("ERROR", "RANK_EXITED") and "no accuracy" in case["message"]
    finding = case["finding"]
    assert finding["accuracy"] is finding["accuracy_exact"] is finding["alone"]["accuracy"] is None
    assert finding["counts"]["BLOCKED"] == said["BLOCKED"] and finding["dataset"]["sha256"] == GSM8K.sha256

    place.env = ({"REHEARSAL_SPEED": "40", **KNOWS}, {})
    again = place.run(*GIVEN, f"--dspark-resume={session.folder.name}", "-k", "gsm8k or launch or teardown")
    case = next(row for row in again.cases() if row["check"] == "gsm8k")
    assert case["verdict"] == "PASS" and case["finding"]["counts"] == {"PASS": 200}, again.text[-3000:]
    old = {part for part, row in parts(again).items() if row["measured_in"] == session.folder.name}
    assert old == set(parts(session, "PASS")) and len(parts(again)) == 250
    asked = case["finding"]["how"]
    assert asked["alone"]["asked_now"] + asked["beside"]["asked_now"] == 250 - len(old)
    assert case["attempt"] == 2 and asked["beside"]["elapsed_s"] is None, "a part of the set has no time"


@needs_gsm8k
def test_gsm8k_with_every_worker_and_its_figures(place):
    place.env = (dict(KNOWS), {})
    session = place.run(*GIVEN, "-n", "2", "-k", "gsm8k or arithmetic_set or launch or teardown")
    assert session.process.returncode == 0, session.text[-3000:]
    case = next(row for row in session.cases() if row["check"] == "gsm8k")
    finding = case["finding"]
    assert finding["accuracy"] == {"good": 200, "of": 200, "share": 1.0, "low": 0.981155, "high": 1.0}
    assert (
        finding["agreement"]["good"] == finding["agreement"]["of"] == 50 and finding["how"]["beside"]["streams"] == 16
    )
    one = parts(session)["gsm8k-0001"]
    assert (one["finding"]["exact"], one["finding"]["flexible"], one["verdict"]) == ("18", "18", "PASS")
    junit = (session.folder / "junit.xml").read_text()
    assert junit.count("<testcase") == len(session.cases())
