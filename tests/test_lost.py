"""Which rank is named when something of the engine ended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_dspark.cluster import RankState
from pytest_dspark.launch import lost


@pytest.fixture
def site(tmp_path):
    specs = [SimpleNamespace(host="gpu-0"), SimpleNamespace(host="gpu-1")]
    return SimpleNamespace(plan=SimpleNamespace(specs=specs), log_path=lambda rank: tmp_path / f"rank{rank}.log")


def state(status="running", **more) -> RankState:
    return RankState("1:1", "engine", status, **more)


WORKER = "77 (VLLM::Worker_TP1)"


def test_nothing_is_lost_while_all_runs(site):
    assert lost(site, {0: state(), 1: state()}) is None


def test_a_lost_worker_names_its_rank(site):
    error = lost(site, {0: state(), 1: state(lost=(WORKER,))})
    assert error.code == "PROCESS_LOST"
    assert f"rank 1 (gpu-1) lost process {WORKER} while its first process lives" in error.message


def test_a_lost_parent_names_what_lived_on(site):
    error = lost(site, {0: state(), 1: state("exited", exit_code=137, lost=("76",), remaining=(WORKER,))})
    assert error.code == "RANK_EXITED"
    assert "rank 1 (gpu-1) is exited with exit code 137" in error.message
    assert f"of its processes {WORKER} lived on" in error.message


def test_a_lost_worker_is_the_cause_of_a_head_that_ended_in_order(site):
    error = lost(site, {0: state("exited", exit_code=0), 1: state(lost=(WORKER,))})
    assert (error.code, "rank 1" in error.message) == ("PROCESS_LOST", True)


def test_a_rank_that_failed_is_the_cause_of_a_worker_that_followed(site):
    error = lost(site, {0: state("exited", exit_code=137), 1: state(lost=(WORKER,))})
    assert error.code == "RANK_EXITED" and "rank 0" in error.message
