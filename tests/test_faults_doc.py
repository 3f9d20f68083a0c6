"""The table of faults is generated from the data that is executed."""

import sys
from pathlib import Path

import pytest

from pytest_dspark.errors import REMEDIES

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "lab"))
import matrix  # noqa: E402

ROWS = matrix.rows()


def test_the_document_is_what_the_data_says():
    assert (ROOT / "docs" / "faults.md").read_text() == matrix.document(), "run: python lab/matrix.py doc"


def test_there_are_enough_rows_and_every_code_is_known():
    assert len(ROWS) >= 40
    assert {row.code for row in ROWS} - {""} <= set(REMEDIES)
    assert {where for row in ROWS for where in row.where} == set(matrix.PLACES)


@pytest.mark.parametrize(
    "code",
    [
        "RANK_EXITED",
        "RANK_RESTARTED",
        "OOM_KILLED",
        "ENGINE_DEAD",
        "ENGINE_WEDGED",
        "HOST_UNREACHABLE",
        "FABRIC_LOST",
        "API_DOWN",
    ],
)
def test_every_code_of_the_watcher_has_a_row(code):
    assert any(row.code == code for row in ROWS)


@pytest.mark.parametrize(
    "name",
    [
        "kill-rank0-loading",
        "kill-rank1-loading",
        "kill-rank0-idle",
        "kill-rank1-idle",
        "kill-rank0-stream",
        "kill-rank1-stream",
        "stop-rank1-stream",
        "cut-worker-stream",
        "dockerd-worker-restarted",
        "sshd-killed",
        "link-5s",
        "link-stream",
        "alone-rank0-real",
        "alone-rank1-real",
    ],
)
def test_what_only_the_engine_can_show_runs_on_the_real_one(name):
    assert any(row.name == name and "real" in row.where for row in ROWS)


def test_a_row_that_says_what_is_not_known_is_refused(tmp_path):
    path = tmp_path / "faults.toml"
    path.write_text('[[row]]\nname = "x"\nfault = "f"\nphase = "sometime"\nwhere = ["real"]\ncode = ""\n')
    with pytest.raises(ValueError, match="phase"):
        matrix.rows(path)
