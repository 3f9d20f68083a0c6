"""One venv a peer, made once in the cache folder from PyPI alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers import TORCH, Client


class NotInstalled(Exception):
    """A peer that this machine does not get; the text says why."""


def folder(cache: Path, peer: Client) -> Path:
    return cache / f"{peer.name.replace(' ', '-')}-{peer.version}"


def ready(cache: Path, peer: Client) -> bool:
    return (folder(cache, peer) / ".complete").is_file()


def install(cache: Path, peer: Client, *, index: str, say: Callable[[str], None]) -> Path:
    """The peer's venv, made if it is not there. `index` is where torch's CPU build comes from, if not by pip's settings."""
    venv = folder(cache, peer)
    if ready(cache, peer):
        return venv
    say(f"{peer.title}: installing into {venv}")
    shutil.rmtree(venv, ignore_errors=True)
    _call([sys.executable, "-m", "venv", str(venv)])
    try:
        if peer.torch:
            refuse_cuda(venv, index)
        for packages in peer.pip:
            extra = ["--extra-index-url", index] if index and TORCH in packages else []
            _call([*_pip(venv), "install", "-q", *extra, *packages])
    except NotInstalled:
        shutil.rmtree(venv, ignore_errors=True)
        raise
    (venv / ".complete").touch()
    return venv


def refuse_cuda(venv: Path, index: str) -> None:
    """Raise NotInstalled where pip would fetch torch's CUDA build: gigabytes that no client needs. Downloads nothing of it."""
    with tempfile.TemporaryDirectory() as work:
        report = Path(work, "report.json")
        extra = ["--extra-index-url", index] if index else []
        _call([*_pip(venv), "install", "-q", "--dry-run", "--no-deps", "--report", str(report), *extra, TORCH])
        if cuda(json.loads(report.read_text("utf-8"))):
            raise NotInstalled(
                "it needs torch, whose build here is CUDA's, several GB; name a CPU index with --torch-index"
            )


def cuda(report: dict[str, Any]) -> bool:
    """Whether pip's report names a build that wants CUDA's libraries. A build that says +cpu does not."""
    (torch,) = report["install"]
    wants = torch["metadata"].get("requires_dist", [])
    if "+cpu" in torch["metadata"]["version"]:
        return False
    return any(re.match(r"(nvidia|cuda)-", want) and "darwin" not in want.lower() for want in wants)


def _pip(venv: Path) -> list[str]:
    return [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def _call(argv: list[str]) -> None:
    """Raises NotInstalled with the last line that pip said."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit {done.returncode}"]
        raise NotInstalled(lines[-1][:200])
