"""A pytest plugin of the fault matrix: it stops a session before its stream check, while the engine is idle, until told.

`DSPARK_PAUSE` names a folder: the file `idle` says that the session waits, the file `go` lets it go on, `exit` ends it there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    folder = Path(os.environ["DSPARK_PAUSE"])
    if "test_stream" in item.nodeid:
        (folder / "worker").write_text(str(os.getpid()))
        (folder / "idle").touch()
        while not (folder / "go").exists():
            time.sleep(0.05)
        if (folder / "exit").exists():
            pytest.exit("asked to", returncode=3)
