"""What several files of tests have in common."""

import os
import signal

import pytest
from rehearsed import Place


@pytest.fixture
def place(tmp_path):
    """Where a test's sessions take place; whatever they leave running ends with it."""
    made = Place(tmp_path)
    yield made
    for pid in made.living():
        os.kill(pid, signal.SIGKILL)
