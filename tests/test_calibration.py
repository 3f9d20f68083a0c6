"""The client's own error: against the server's record, one to one; figures that are not well above it are marked."""

import pytest

from pytest_dspark import calibration
from pytest_dspark.calibration import bound, calibrate, errors, unresolved
from pytest_dspark.errors import DsparkError
from pytest_dspark.reply import Reply, RequestError
from pytest_dspark.timing import Timing


def reply(at_s, *stamps):
    timing = Timing(
        first_token_s=stamps[0], first_answer_s=stamps[0], last_token_s=stamps[-1], end_s=9.0, at_s=at_s, stamps=stamps
    )
    return Reply("x", "", (), "length", None, "", "m", 200, True, timing, None, "", {})


def log(*records):
    requests = [
        {"user": str(n), "arrival": arrival, "stamps": list(stamps)} for n, (arrival, *stamps) in enumerate(records)
    ]
    return {"requests": requests, "lateness_p50_ms": 0.1, "lateness_p99_ms": 0.4}


def test_errors_are_what_is_reported_less_what_was_true():
    found = errors([reply(100.0, 0.5, 0.61)], log((100.01, 100.5, 100.6)))
    assert found["events"] == 2
    assert found["stamp_error_s"]["max"] == pytest.approx(0.01)
    assert found["first_token_error_s"]["max"] == pytest.approx(0.01)
    assert found["server_lateness_s"] == {"p50": pytest.approx(1e-4), "p99": pytest.approx(4e-4)}
    assert (found["stamp_error_s"]["p99"], bound(found["stamp_error_s"])) == (None, pytest.approx(0.01))


def test_early_and_late_do_not_cancel():
    found = errors([reply(100.0, 0.49, 0.61)], log((100.0, 100.5, 100.6)))
    assert found["stamp_error_s"]["p50"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("outcomes", "record", "message"),
    [
        ([reply(100.0, 0.5)], log((100.0, 100.5, 100.6)), "2 events were sent, 1 were read"),
        ([reply(100.0, 0.5), reply(100.0, 0.5)], log((100.0, 100.5)), "stream 1 did not come through"),
        ([RequestError("TRUNCATED", "cut")], log((100.0, 100.5)), "TRUNCATED"),
        ([reply(100.0, 0.5)], log((100.0,)), "0 events were sent"),
    ],
)
def test_what_does_not_match_one_to_one_is_no_calibration(outcomes, record, message):
    with pytest.raises(DsparkError, match=message) as caught:
        errors(outcomes, record)
    assert caught.value.code == "HARNESS"


def test_a_real_calibration(monkeypatch):
    monkeypatch.setattr(calibration, "MOST_S", 0.5)
    found = calibrate(4, 0.07)
    assert (found["concurrency"], found["reader"], found["row_gap_s"]) == (4, "loop", 0.07)
    assert found["gap_s"] == pytest.approx(0.5 / 115)
    assert found["events"] == 460
    assert 0 < found["stamp_error_s"]["p50"] <= found["stamp_error_s"]["p99"] < 0.5


def test_threads_are_calibrated_as_threads(monkeypatch):
    monkeypatch.setattr(calibration, "MOST_S", 0.2)
    assert calibrate(2, 0.02, reader="threads")["reader"] == "threads"


def test_a_schedule_server_that_does_not_start_is_said(monkeypatch):
    monkeypatch.setattr(calibration.sys, "executable", "/bin/true")
    with pytest.raises(DsparkError, match="ended at once"):
        calibrate(1, 0.1)


def test_figures_near_the_clients_own_error_are_marked():
    spread = {"p50": 0.0001, "p99": 0.0005, "max": 0.001}
    one = {"stamp_error_s": spread, "first_token_error_s": {**spread, "p99": None}}
    clear = {"first_token_s_median": 0.02, "mean_gap_s_median": 0.02, "longest_gap_s": 0.02, "tpot_s_median": 0.001}
    assert unresolved(clear, one, 101) == []
    near = {
        "first_token_s_median": 0.0099,
        "mean_gap_s_median": 0.0099,
        "tpot_s_median": 0.00009,
        "longest_gap_s": None,
    }
    assert [text.partition(":")[0] for text in unresolved(near, one, 101)] == [
        "first_token_s_median",
        "mean_gap_s_median",
        "tpot_s_median",
    ]
