"""A folder that stands for the image of a process rank: its digest is its identity, `labels.json` its labels."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path

from pytest_dspark.cluster import ImageFacts
from pytest_dspark.errors import HostError

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
LABELS = "labels.json"


def architecture() -> str:
    """This machine's architecture by Docker's name."""
    return docker_architecture(platform.machine())


def docker_architecture(machine: str) -> str:
    """`x86_64` and `aarch64` by the names that images have."""
    return _ARCHITECTURES.get(machine, machine)


def bundle_facts(host: str, folder: str) -> ImageFacts:
    """The bundle as an image; an empty folder name is a rank without one. Raises IMAGE_MISSING if it cannot be read."""
    if not folder:
        return ImageFacts("", "", "none", architecture(), {})
    path = Path(folder)
    if not path.is_dir():
        raise HostError("IMAGE_MISSING", f"{host}: bundle folder {folder} is not there")
    try:
        return ImageFacts(folder, bundle_digest(path), "bundle", architecture(), _labels(host, path))
    except OSError as error:
        raise HostError("IMAGE_MISSING", f"{host}: bundle {folder} cannot be read: {error}") from error


def bundle_digest(folder: Path) -> str:
    """`sha256:` over the sorted relative paths and contents of the files; `__pycache__` is no part of it."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda item: item.relative_to(folder).as_posix()):
        relative = path.relative_to(folder)
        if path.is_file() and "__pycache__" not in relative.parts:
            total.update(relative.as_posix().encode() + b"\0")
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return f"sha256:{total.hexdigest()}"


def _labels(host: str, folder: Path) -> Mapping[str, str]:
    path = folder / LABELS
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HostError("IMAGE_MISSING", f"{host}: {path} is not JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise HostError("IMAGE_MISSING", f"{host}: {path} must be an object of strings")
    return found
