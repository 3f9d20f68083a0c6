"""Timed rows against real vLLM on two hosts: both sides' rates, and what makes a row void. Runs inside the head host.

One engine is launched and kept for all cases; speed is no verdict here, since the hosts share one machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from test_faults import CLUSTER, ROOT, Session, assert_both_empty

from pytest_dspark.checks import timed
from pytest_dspark.checks.concurrency import CHECKS
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import EndpointError
from pytest_dspark.live import Live

pytestmark = pytest.mark.skipif(not CLUSTER.exists(), reason="lab/cluster.toml is not there: run `make lab` first")
SETTINGS = {
    "tokens": 24,
    "canary_tokens": 12,
    "deadline_s": 180.0,
    "repeats": 5,
    "knobs": {"MAX_NUM_SEQS": 4},
    "max_drift": 2.0,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    session = Session(tmp_path_factory.mktemp("kept"), "--dspark-keep", mark="production and gate")
    session.end(600)
    assert "left running as asked" in session.text, session.text[-3000:]
    yield Endpoint("http://10.77.0.1:8888", "smollm2")
    stop = [sys.executable, "-m", "pytest_dspark.cli", "stop", "--cluster", str(CLUSTER), "--run", session.folder.name]
    subprocess.run([*stop, "--out", str(session.out)], cwd=ROOT, check=True)
    assert_both_empty()


def measured(engine: Endpoint, level: str, **changes: object) -> timed.Finding:
    return CHECKS[level].measure(engine, settings=SETTINGS | changes, live=Live(sys.stderr))


@pytest.mark.parametrize("level", ["c1", "c2", "c4"])
def test_the_clients_and_the_servers_decode_rate_agree(engine: Endpoint, level: str, record_property) -> None:
    finding = measured(engine, level)
    verdict = CHECKS[level].judge(finding, SETTINGS)
    assert verdict.passed, verdict
    decode = finding.data["headline"]["decode"]
    print(level, json.dumps(decode), json.dumps(finding.data["calibration"]["stamp_error_s"]))
    record_property("decode", json.dumps(decode))
    assert decode["agree"] is True, decode
    difference = decode["client"]["mean"] / decode["server"]["mean"] - 1
    assert abs(difference) < 0.05, decode
    assert decode["server_uncorrected"]["mean"] > decode["server"]["mean"]


def test_a_second_client_during_a_row_voids_it(engine: Endpoint) -> None:
    over, theirs = threading.Event(), Endpoint(engine.base_url, engine.model)

    def intrude() -> None:
        while not over.wait(0.3):
            try:
                theirs.complete("Tell me of the sea.", max_tokens=4)
            except EndpointError:
                return

    intruder = threading.Thread(target=intrude)
    intruder.start()
    try:
        finding = measured(engine, "c1", repeats=3)
    finally:
        over.set()
        intruder.join()
    verdict = CHECKS["c1"].judge(finding, SETTINGS)
    assert (str(verdict.status), verdict.code) == ("ERROR", "FOREIGN_TRAFFIC"), verdict
    assert finding.data["repeats"][0]["samples"], "a void row keeps its figures"


def test_a_repeated_prompt_makes_the_row_warm(engine: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "nonce", lambda: "the same words again and again, " * 12)
    finding = measured(engine, "c1", repeats=3)
    verdict = CHECKS["c1"].judge(finding, SETTINGS)
    assert (str(verdict.status), verdict.code) == ("ERROR", "CACHE_WARM"), verdict
    assert finding.data["cache"] == ["warm"] * 3
