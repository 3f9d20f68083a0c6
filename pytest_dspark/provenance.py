"""By what a run was made: versions of Python and of every package, sha256 of our own files and of the suites.

Standard library alone, so that whoever verifies compares with the files of their own installation.
"""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

PACKAGE: Final = Path(__file__).parent
DISTRIBUTION: Final = "pytest-dspark"
PARTS: Final = ("pytest_dspark", "suites", "recipe", "profiles", "conftest.py")
"""What a clone must not have changed for a run to be publishable."""
_REQUIREMENT: Final = re.compile(r"[A-Za-z0-9._-]+")


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def version() -> str:
    """Our own version; empty when we run from a folder that was never installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return ""


def suites_folder() -> Path | None:
    """The suites of this installation: of the clone, or inside the package."""
    places = (PACKAGE.parent / "suites", PACKAGE / "suites")
    return next((place for place in places if (place / "__init__.py").is_file()), None)


def own_files() -> dict[str, str]:
    """sha256 of every Python file of the package, by its path below the package."""
    paths = (path for path in PACKAGE.rglob("*.py") if "suites" not in path.relative_to(PACKAGE).parts)
    return {path.relative_to(PACKAGE).as_posix(): file_sha256(path) for path in sorted(paths)}


def own_suites() -> dict[str, str]:
    """sha256 of every suite of this installation, by file name."""
    folder = suites_folder()
    return {path.name: file_sha256(path) for path in sorted(folder.glob("*.py"))} if folder else {}


def suites_of(files: Iterable[str]) -> dict[str, Path]:
    """The files of the cases, by file name."""
    return {Path(file).name: Path(file).resolve() for file in files if Path(file).is_file()}


def foreign_suites(suites: Mapping[str, Path]) -> list[str]:
    """Suites that are not those of this installation."""
    known = own_suites()
    return [
        f"suite {name} is not the one of {DISTRIBUTION}"
        for name, path in suites.items()
        if known.get(name) != file_sha256(path)
    ]


def own_changes() -> list[str]:
    """Files of ours that are not as they were published: changes of a git work tree, or of an installed wheel."""
    tree = PACKAGE.parent
    if (tree / ".git").exists():
        lines = _git(tree, "status", "--porcelain", "--untracked-files=normal", "--", *PARTS)
        return ["git cannot say whether our own files are unchanged"] if lines is None else lines.splitlines()
    return [f"{name} is not as it was installed" for name in _record_differs()]


def shipped() -> frozenset[str]:
    """sha256 of recipes, profiles and suites that everybody has: committed in the clone and unchanged, or installed."""
    tree, parts = PACKAGE.parent, ("recipe", "profiles", "suites")
    if not (tree / ".git").exists():
        return frozenset(file_sha256(path) for part in parts for path in (PACKAGE / part).glob("*.*"))
    listed = _git(tree, "ls-files", "--", *parts)
    changed = {line[3:] for line in own_changes()}
    names = [name for name in (listed or "").splitlines() if name not in changed]
    return frozenset(file_sha256(tree / name) for name in names if (tree / name).is_file())


def commit() -> str | None:
    """The commit of the clone that we run from; None for an installed package."""
    tree = PACKAGE.parent
    found = _git(tree, "rev-parse", "HEAD") if (tree / ".git").exists() else None
    return found.strip() if found else None


def _git(tree: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _record_differs() -> Iterator[str]:
    """Files of the wheel whose sha256 is not that of its RECORD."""
    import base64

    try:
        files = metadata.files(DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:
        return
    for file in files:
        path = Path(str(file.locate()))
        if file.hash and file.hash.mode == "sha256" and path.is_file():
            found = base64.urlsafe_b64encode(bytes.fromhex(file_sha256(path))).rstrip(b"=").decode()
            if found != file.hash.value:
                yield str(file)


def packages() -> dict[str, str]:
    """Version of every installed package, by name."""
    found = ((one.metadata["Name"], one.version) for one in metadata.distributions())
    return dict(sorted((str(name), version) for name, version in found if name))


def needed(name: str = DISTRIBUTION) -> set[str]:
    """Names of the packages that we need, and that they need, in lower case; and those of pytest's plugins."""
    found: set[str] = set()
    waiting = [name, *(entry.dist.name for entry in metadata.entry_points(group="pytest11") if entry.dist)]
    while waiting:
        one = waiting.pop().lower().replace("_", "-")
        if one in found:
            continue
        found.add(one)
        waiting += _requires(one)
    return found


def _requires(name: str) -> list[str]:
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    return [match[0] for line in lines if "extra ==" not in line and (match := _REQUIREMENT.match(line))]


def versions(suites: Mapping[str, Path]) -> dict[str, Any]:
    """What run folders and packs hold as versions.json. `packages` are all that are installed."""
    return {
        "schema": 1,
        "pytest_dspark": version(),
        "commit": commit(),
        "changes": own_changes(),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "system": sys.platform,
        "machine": platform.machine(),
        "packages": packages(),
        "files": own_files(),
        "suites": {name: file_sha256(path) for name, path in sorted(suites.items())},
    }


def public(told: Mapping[str, Any]) -> dict[str, Any]:
    """The same with those packages alone that a run of ours needs: others are nobody's business."""
    wanted = needed()
    kept = {name: one for name, one in told["packages"].items() if name.lower().replace("_", "-") in wanted}
    return {**told, "packages": kept}
