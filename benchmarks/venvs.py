"""One venv a peer, made once in the cache folder from PyPI alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers import STANDINS, Client


class NotInstalled(Exception):
    """A peer that this machine does not get; the text says why."""


def folder(cache: Path, peer: Client) -> Path:
    return cache / f"{peer.name.replace(' ', '-')}-{peer.version}"


def ready(cache: Path, peer: Client) -> bool:
    return (folder(cache, peer) / ".complete").is_file()


def install(cache: Path, peer: Client, *, say: Callable[[str], None]) -> Path:
    """The peer's venv, made if it is not there. Raises NotInstalled."""
    venv = folder(cache, peer)
    if ready(cache, peer):
        return venv
    say(f"{peer.title}: installing into {venv}")
    shutil.rmtree(venv, ignore_errors=True)
    _call([sys.executable, "-m", "venv", str(venv)])
    try:
        for packages in peer.pip:
            _call([*_pip(venv), "install", "-q", *packages])
    except NotInstalled:
        shutil.rmtree(venv, ignore_errors=True)
        raise
    if peer.torch_loader:
        (site,) = venv.glob("lib/python*/site-packages")
        shutil.copy(STANDINS / "torch_loader.py", site / "torch.py")
    (venv / ".complete").touch()
    return venv


def _pip(venv: Path) -> list[str]:
    return [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def _call(argv: list[str]) -> None:
    """Raises NotInstalled with the last line that pip said."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit {done.returncode}"]
        raise NotInstalled(lines[-1][:200])
