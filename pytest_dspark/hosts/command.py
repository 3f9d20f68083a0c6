"""One command on this machine: no shell, no terminal, a time-out that ends all it started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

from pytest_dspark.cluster import Output
from pytest_dspark.errors import HostError


def run_here(host: str, argv: Sequence[str], *, timeout: float) -> Output:
    """Run it; one that is not there ends with code 127. Raises HOST_UNREACHABLE after `timeout` seconds."""
    try:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return Output(127, b"", f"{argv[0]}: {error.strerror}".encode())
    try:
        stdout, stderr = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        raise HostError("HOST_UNREACHABLE", f"{host}: {argv[0]} did not end within {timeout:g} s") from error
    return Output(child.returncode, stdout, stderr)
