"""One command on this machine: no shell, no terminal, a time-out that ends all it started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

from pytest_dspark.cluster import Output
from pytest_dspark.errors import HostError

KILLED_S = 2.0


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
        _let_go(child)
        raise HostError("HOST_UNREACHABLE", f"{host}: {argv[0]} did not end within {timeout:g} s") from error
    return Output(child.returncode, stdout, stderr)


def _let_go(child: subprocess.Popen[bytes]) -> None:
    """A process that a wedged driver holds in the kernel outlives SIGKILL, and one with a session of its own never got it:
    either may hold our pipes for ever."""
    try:
        child.communicate(timeout=KILLED_S)
    except subprocess.TimeoutExpired:
        for pipe in (child.stdout, child.stderr):
            if pipe:
                pipe.close()
        child.poll()
