"""The stage with hosts of its own making: turns, sharing, and waits that a signal can end."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from pytest_dspark.errors import BlockedError, LaunchError
from pytest_dspark.evidence import new_run
from pytest_dspark.kept import KeptStore
from pytest_dspark.stage import Session, Stage, StageOptions


@pytest.fixture
def stage(tmp_path):
    made = Stage(
        {}, new_run(tmp_path), StageOptions(), open_host=None, say=print, kept_store=KeptStore(tmp_path / "kept")
    )
    yield made
    made.close(interrupted=False)


def test_an_unplanned_profile_is_blocked(stage):
    with pytest.raises(BlockedError, match="was not planned"):
        stage.acquire("production")


def test_the_engine_of_a_profile_that_was_stopped_is_not_asked(stage):
    """Every profile's engine answers at the same address: another's would answer in its place."""
    first, second = (Session(mark, plan=None) for mark in ("long1m", "production"))
    stage._sessions = {"long1m": first, "production": second}
    stage._live = second
    stage.enter("production", False)
    with pytest.raises(BlockedError, match="the engine of long1m was stopped before this case was done"):
        stage.enter("long1m", False)
    with pytest.raises(LaunchError, match="was stopped"):
        stage.alive("long1m")
    stage._live = None


def test_what_ends_while_the_run_is_stopped_is_cancelled_and_nothing_is_called_kept(tmp_path):
    store = KeptStore(tmp_path / "kept")
    made = Stage({}, new_run(tmp_path), StageOptions(keep=True), open_host=None, say=print, kept_store=store)
    made._sessions = {"production": Session("production", plan=None)}
    assert made.diagnose("production") is None and made.teardown_finding("production").data["kept"]
    made.cancel()
    assert made.diagnose("production").code == "CANCELLED"
    assert not made.teardown_finding("production").data["kept"], "an interrupted run keeps no engine"
    made.close(interrupted=True)


def test_sharers_share_and_one_alone_is_alone(stage, monkeypatch):
    monkeypatch.setattr(stage, "alive", lambda _mark: None)
    order = []

    def alone():
        stage.enter("m", True)
        order.append("alone")
        time.sleep(0.2)
        stage.leave(True)

    def late_sharer():
        time.sleep(0.1)
        stage.enter("m", False)
        order.append("late")
        stage.leave(False)

    stage.enter("m", False)
    stage.enter("m", False)
    threads = [threading.Thread(target=alone), threading.Thread(target=late_sharer)]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    assert order == [], "somebody came in while two shared it and one waited to have it alone"
    stage.leave(False)
    stage.leave(False)
    for thread in threads:
        thread.join(5)
    assert order == ["alone", "late"]


def test_profiles_take_turns_in_the_order_of_collection(stage):
    stage.expect([("a", "long1m", "x"), ("b", "long1m", "teardown"), ("c", "production", "x")])
    released = threading.Event()
    threading.Thread(target=lambda: (stage._wait_for_earlier("production"), released.set()), daemon=True).start()
    stage.done("a")
    assert not released.wait(0.5)
    stage.done("b")
    assert released.wait(2)


def test_cancelling_releases_whoever_waits(stage):
    stage.expect([("a", "long1m", "x"), ("c", "production", "x")])
    released = threading.Event()
    threading.Thread(target=lambda: (stage._wait_for_earlier("production"), released.set()), daemon=True).start()
    stage.cancel()
    assert released.wait(2)


def test_a_signal_taken_by_another_thread_still_wakes_the_main_one(tmp_path):
    """The kernel may hand a signal to any thread; here the main thread blocks it, so another one takes it."""
    script = """
        import signal, sys, threading, time
        from concurrent.futures import ThreadPoolExecutor
        from pytest_dspark.stage import _await
        def handler(number, frame):
            raise KeyboardInterrupt
        signal.signal(signal.SIGTERM, handler)
        pool = ThreadPoolExecutor(1)
        job = pool.submit(time.sleep, 8)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        start = time.monotonic()
        print("waiting", flush=True)
        try:
            _await(job)
        except KeyboardInterrupt:
            print("woke", time.monotonic() - start < 4, flush=True)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "woke True\n"
        process.kill()


@pytest.mark.timeout(20)
def test_who_waited_while_the_engine_was_lost_is_blocked_and_holds_nothing(stage, monkeypatch):
    lost = LaunchError("RANK_EXITED", "rank 1 is gone")

    def dead(_mark):
        raise lost

    monkeypatch.setattr(stage, "alive", dead)
    for exclusive in (True, False):
        with pytest.raises(BlockedError, match="first cause: RANK_EXITED: rank 1 is gone"):
            stage.enter("m", exclusive)
    monkeypatch.setattr(stage, "alive", lambda _mark: None)
    entered = threading.Event()
    threading.Thread(target=lambda: (stage.enter("m", True), entered.set()), daemon=True).start()
    assert entered.wait(2), "the engine is still held by a check that was refused"
