"""What is seen of an engine and what it means: two signs for a death, and which of several is the cause."""

from dataclasses import replace

import pytest

from pytest_dspark.cluster import RankState
from pytest_dspark.signs import ApiSigns, Patience, RankSigns, judge

PATIENCE = Patience(gone_s=8.0, api_s=5.0, wedge_s=120.0)
QUIET = ApiSigns()
STILL = ApiSigns(still_s=10_000.0, running=1.0)


def rank(number, status="running", code=None, **more):
    state = RankState(f"id{number}", "n", status, exit_code=code, oom_killed=more.pop("oom", False))
    down = more.pop("down_s", 60.0) if status != "running" else None
    return RankSigns(number, f"host-{number}", state, seen_s=0.2, down_s=down, **more)


def code(*ranks, api=QUIET, loading=False):
    error = judge(ranks, api, PATIENCE, loading=loading)
    return error.code if error else ""


def test_all_runs():
    assert code(rank(0), rank(1)) == ""


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((rank(0), rank(1, "exited", 137, down_s=0.0)), "RANK_EXITED"),
        ((rank(0), rank(1, "exited", 137, oom=True, down_s=0.0)), "OOM_KILLED"),
        ((rank(0), rank(1, "gone", None, down_s=0.0)), "RANK_EXITED"),
        ((rank(0), rank(1, restarted="was restarted 1 times")), "RANK_RESTARTED"),
        ((rank(0, "exited", 1, down_s=0.0), rank(1)), "RANK_EXITED"),
    ],
)
def test_facts_count_at_once(ranks, expected):
    assert code(*ranks) == expected


def test_a_head_that_ended_in_order_after_its_worker_was_killed_is_not_the_cause():
    error = judge((rank(0, "exited", 0), rank(1, "exited", 137)), QUIET, PATIENCE)
    assert error.message.startswith("rank 1 (host-1) is exited with exit code 137")


def test_a_head_that_ended_in_order_waits_for_the_others_to_tell():
    stale = replace(rank(1), seen_s=3.0)
    assert code(rank(0, "exited", 0, down_s=0.5), rank(1)) == ""
    assert code(rank(0, "exited", 0, down_s=2.5), stale) == ""
    assert code(rank(0, "exited", 0, down_s=2.5), rank(1)) == "RANK_EXITED"
    assert code(rank(0, "exited", 0, down_s=2.5, death="EngineDeadError"), rank(1)) == "ENGINE_DEAD"


def test_a_worker_that_was_stopped_in_order_is_the_cause_and_not_the_engine_that_followed():
    error = judge((rank(0, "exited", 0, death="EngineDeadError"), rank(1, "exited", 0)), QUIET, PATIENCE)
    assert (error.code, error.message[:6]) == ("RANK_EXITED", "rank 1")


# --- silence is one sign


@pytest.mark.parametrize(
    "more",
    [
        {"silent_s": 500.0},
        {"link_s": 500.0},
        {"peer_s": 500.0},
        {"idle_s": 500.0},
        {"hang": "No available shared memory broadcast block found in 60 seconds"},
        {"death": "EngineDeadError"},
    ],
)
def test_one_sign_alone_condemns_nothing(more):
    assert code(rank(0), rank(1, **more)) == ""
    assert code(rank(0, **more), rank(1)) == ""


@pytest.mark.parametrize(
    "api", [STILL, ApiSigns(silent_s=500.0, why="x"), ApiSigns(sick_s=500.0), ApiSigns(listening=False)]
)
def test_one_sign_of_the_api_alone_condemns_nothing(api):
    assert code(rank(0), rank(1), api=api) == ""


def test_a_prefill_of_hours_with_still_counters_is_alive_as_long_as_its_ranks_work():
    still = ApiSigns(still_s=3.5 * 3600, running=1.0)
    hang = "No available shared memory broadcast block found in 12600 seconds"
    assert code(rank(0, hang=hang), rank(1), api=still) == ""
    assert code(rank(0, idle_s=50.0), rank(1), api=still) == "", "idle for less than half of the patience"


def test_a_docker_engine_that_starts_again_is_waited_for_and_tells_what_became_of_its_rank():
    gone = rank(0, "exited", 0, down_s=9.0)
    assert code(gone, rank(1, silent_s=11.0, docker_only=True)) == ""
    assert code(gone, rank(1, silent_s=11.0)) == "HOST_UNREACHABLE"
    assert code(gone, rank(1, "exited", 137, down_s=0.0)) == "RANK_EXITED"
    found = judge((gone, rank(1, silent_s=24.0, docker_only=True, why="refused")), QUIET, PATIENCE)
    assert found.code == "HOST_UNREACHABLE"
    assert "the Docker engine of" in found.message and "has not answered for 24 s (refused)" in found.message


def spinning(number, seconds):
    return rank(number, spin_s=seconds, spin="a GPU is busy at 96 % and draws 19 W")


def test_gpus_that_all_spin_are_wedged_though_processors_work():
    api = ApiSigns(still_s=130.0, running=2.0)
    wedged = judge((spinning(0, 61.0), spinning(1, 62.0)), api, PATIENCE)
    assert wedged.code == "ENGINE_WEDGED"
    assert "rank 1" in wedged.message and "busy at 96 % and draws 19 W for 62 s" in wedged.message


def test_one_rank_that_spins_waits_for_one_that_may_work():
    api = ApiSigns(still_s=3 * 3600.0, running=2.0)
    assert judge((spinning(0, 9000.0), rank(1)), api, PATIENCE) is None
    assert judge((spinning(0, 9000.0), spinning(1, 59.0)), api, PATIENCE) is None
    assert judge((spinning(0, 9000.0), spinning(1, 9000.0)), ApiSigns(still_s=119.0, running=2.0), PATIENCE) is None


def test_wedged_needs_still_counters_and_a_rank_that_does_nothing():
    wedged = judge((rank(0, hang="No available"), rank(1, idle_s=70.0)), ApiSigns(still_s=130.0, running=2.0), PATIENCE)
    assert wedged.code == "ENGINE_WEDGED"
    assert "2 requests run and no counter has moved for 130 s" in wedged.message and "No available" in wedged.message
    assert code(rank(0), rank(1, idle_s=70.0), api=ApiSigns(still_s=100.0, running=2.0)) == ""


@pytest.mark.parametrize(
    ("ranks", "api", "expected"),
    [
        ((rank(0, link_s=9.0, link="eth is down"), rank(1, silent_s=9.0)), QUIET, "FABRIC_LOST"),
        ((rank(0, link_s=9.0), rank(1)), ApiSigns(still_s=9.0, running=1.0), "FABRIC_LOST"),
        ((rank(0, link_s=9.0), rank(1, link_s=9.0)), QUIET, "FABRIC_LOST"),
        ((rank(0, peer_s=9.0), rank(1)), ApiSigns(still_s=9.0, running=1.0), "FABRIC_LOST"),
        ((rank(0, link_s=5.0), rank(1, silent_s=5.0)), ApiSigns(still_s=5.0, running=1.0), ""),
        ((rank(0), rank(1, silent_s=9.0)), ApiSigns(still_s=9.0, running=1.0), "HOST_UNREACHABLE"),
        ((rank(0), rank(1, silent_s=9.0)), QUIET, ""),
        ((rank(0, silent_s=9.0), rank(1)), ApiSigns(silent_s=6.0, why="refused"), "HOST_UNREACHABLE"),
        ((rank(0, "exited", 0, down_s=2.0), rank(1, silent_s=3.0)), QUIET, "HOST_UNREACHABLE"),
        ((rank(0, "exited", 1, down_s=2.0), rank(1, silent_s=3.0)), QUIET, "HOST_UNREACHABLE"),
        ((rank(0, "exited", 137, down_s=0.0), rank(1, silent_s=3.0)), QUIET, "RANK_EXITED"),
        ((rank(0, peer_s=9.0), rank(1, silent_s=9.0)), QUIET, "HOST_UNREACHABLE"),
    ],
)
def test_hosts_and_fabrics(ranks, api, expected):
    assert code(*ranks, api=api) == expected


def test_a_host_that_is_silent_while_the_engine_is_loaded_is_given_up_later():
    assert code(rank(0), rank(1, silent_s=20.0), loading=True) == ""
    assert code(rank(0), rank(1, silent_s=25.0), loading=True) == "HOST_UNREACHABLE"


def test_the_api_is_down_if_nobody_listens_and_its_rank_runs():
    down = ApiSigns(silent_s=6.0, why="refused", listening=False)
    assert code(rank(0), rank(1), api=down) == "API_DOWN"
    assert code(rank(0), rank(1), api=replace(down, listening=True)) == ""
    assert code(rank(0), rank(1), api=replace(down, listening=None)) == ""
    assert code(rank(0), rank(1), api=replace(down, silent_s=3.0)) == ""


def test_the_engine_is_dead_if_its_log_and_its_api_say_so():
    sick = ApiSigns(sick_s=6.0, sick="/health: HTTP 503")
    assert code(rank(0, death="EngineDeadError"), rank(1), api=sick) == "ENGINE_DEAD"
    assert code(rank(0), rank(1), api=sick) == ""
