"""Other people's clients as programs: started, watched, ended, and never believed by their exit code.

What they print goes to a file of the run folder with secrets masked; their own files lie there too, mode 0600.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytest_dspark.errors import DsparkError
from pytest_dspark.sanitize import mask_text

LOOK_S: Final = 0.5
GRACE_S: Final = 10.0
EXCERPT: Final = 600
_KEPT: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "XDG_CACHE_HOME")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended; `code` is recorded and decides nothing. `tail` is the end of what it printed."""

    code: int
    elapsed_s: float
    tail: str


def environment(more: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """A small environment: no proxy, no key and no setting of the caller reaches the program but those named here."""
    return {key: environ[key] for key in _KEPT if key in environ} | {"NO_PROXY": "*", "no_proxy": "*"} | dict(more)


def run(
    command: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str],
    deadline_s: float,
    alive: Callable[[], None] = lambda: None,
    tick: Callable[[], None] = lambda: None,
    secrets: tuple[str, ...] = (),
) -> Ended:
    """Run a program to its end, with its children in a group of its own.

    Raises what `alive` raises when the engine is lost, DEADLINE, or NOT_IMPLEMENTED if it cannot be started; the whole group is
    ended then, and on any other way out.
    """
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    begin = time.monotonic()
    with os.fdopen(os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=log.parent,
                start_new_session=True,
                umask=0o077,
            )
        except OSError as error:
            raise DsparkError("NOT_IMPLEMENTED", f"{command[0]}: {error.strerror}") from error
        try:
            _wait(process, begin + deadline_s, alive, tick, command[0])
        finally:
            _end(process)
            _mask(log, secrets)
    return Ended(process.returncode, time.monotonic() - begin, tail(log))


def _wait(
    process: subprocess.Popen[bytes], until: float, alive: Callable[[], None], tick: Callable[[], None], name: str
) -> None:
    while True:
        try:
            process.wait(LOOK_S)
            return
        except subprocess.TimeoutExpired:
            alive()
            tick()
        if time.monotonic() > until:
            raise DsparkError("DEADLINE", f"{name} had not ended by its deadline")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the group, gently and then not."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        if process.poll() is not None:
            break
        os.killpg(process.pid, number)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    try:
        os.killpg(process.pid, signal.SIGKILL)  # children that outlived it
    except (ProcessLookupError, PermissionError):
        return


def _mask(log: Path, secrets: tuple[str, ...]) -> None:
    text = log.read_text(encoding="utf-8", errors="replace")
    masked = mask_text(text, secrets)
    if masked != text:
        log.write_text(masked, encoding="utf-8")


def tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-4:])[-EXCERPT:]


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file under a folder, by its path in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
