"""Who is provably dead: only what was of this boot and this process table, and is not in it any more."""

import subprocess
import sys

import pytest

from pytest_dspark import owner
from pytest_dspark.cluster import OWNER_LABEL, RUN_LABEL, RankState


def of(text, run="r1"):
    return RankState("id", "n", "running", labels={OWNER_LABEL: text, RUN_LABEL: run})


@pytest.fixture
def gone():
    """An owner that has ended."""
    code = "from pytest_dspark.owner import owner; print(owner())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_this_process_lives():
    assert len(owner.owner().split("/")) == 4
    assert not owner.dead(owner.owner()) and not owner.orphaned(of(owner.owner()))


def test_an_owner_that_ended_is_dead(gone):
    assert owner.dead(gone) and owner.orphaned(of(gone))


def test_a_recycled_pid_is_not_the_owner():
    boot, table, pid, started = owner.owner().split("/")
    assert owner.dead(f"{boot}/{table}/{pid}/{int(started) - 1}")


@pytest.mark.parametrize("part", [0, 1])
def test_another_boot_or_another_process_table_proves_nothing(gone, part):
    parts = gone.split("/")
    parts[part] = "1" + parts[part][1:] if parts[part][0] != "1" else "2" + parts[part][1:]
    assert not owner.dead("/".join(parts))


@pytest.mark.parametrize("text", ["", "x", "a/b/c/d", "///", "../../1/1", "1"])
def test_what_cannot_be_read_proves_nothing(text):
    assert not owner.dead(text) and not owner.orphaned(of(text))


def test_an_engine_that_was_taken_over_is_nobodys_leftover(gone):
    claim = owner.take_over("r2")
    assert claim is not None and owner.take_over("r2") is None
    assert not owner.orphaned(of(gone, "r2")) and owner.orphaned(of(gone, "r3"))
    claim.close()
    assert owner.orphaned(of(gone, "r2"))
