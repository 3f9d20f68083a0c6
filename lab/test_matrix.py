"""The fault matrix, executed: `make faults` (rehearsal and emulated) and `make lab-full` (real vLLM). Run as root, not inside a host.

Results go to the file named by DSPARK_MATRIX_RESULTS, a line a row.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import matrix
import pytest

CASES = [
    pytest.param(row, where, id=f"{where}-{row.name}")
    for where in matrix.PLACES
    for row in matrix.rows()
    if where in row.where
]


def _needs_lab(where: str) -> None:
    if where != "rehearsal" and not (matrix.STATE / "gb-head" / "init.pid").exists():
        pytest.fail("the lab is not up: run `make lab` first", pytrace=False)


@pytest.mark.parametrize(("row", "where"), CASES)
def test_fault(row: matrix.Row, where: str, tmp_path: Path) -> None:
    """The right code within its time, no model blamed, earlier rows whole, both hosts empty."""
    _needs_lab(where)
    result = matrix.Result(where, row.name, row.code)
    try:
        result = matrix.execute(row, where, tmp_path / "row")
    except (AssertionError, RuntimeError) as error:
        result.problem = str(error).splitlines()[0][:200]
        raise
    finally:
        path = os.environ.get("DSPARK_MATRIX_RESULTS", "")
        if path:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(result.as_json()) + "\n")
