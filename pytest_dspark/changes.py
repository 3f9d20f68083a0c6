"""What changed since the last accepted run of the same profile: the first question after a refusal. Standard library alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MOST = 12
# What every launch has for itself, and what is only where a known digest is found again.
OWN = re.compile(
    r"\.facts\.(rank_id|started_at)|\.run_id|\.facts\.labels\.io\.dspark\.run|\.environment\.(HOSTNAME|DSPARK_\w+)"
    r"|\.model\.shards\.\d+\.(changed|inode)|\.wrapper\..*|\.looks\..*"
)


def said(runs: Path, run_id: str, mark: str, profile: str) -> Iterator[str]:
    """Lines for a person: how this run's identity differs, rank by rank, from the last accepted one's; or that it does not."""
    before = last_accepted(runs, run_id, mark, profile)
    if before is None:
        yield f"{mark}: no earlier accepted run of {profile} is here to compare with"
        return
    found = list(differences(before / mark, runs / run_id / mark))
    if not found:
        yield f"{mark}: nothing of what was read differs from the last accepted run {before.name}"
    for line in found[:MOST]:
        yield f"{mark}: since {before.name}: {line}"
    if len(found) > MOST:
        yield f"{mark}: and {len(found) - MOST} more differences"


def last_accepted(runs: Path, run_id: str, mark: str, profile: str, recipe: str = "") -> Path | None:
    """The newest other run that met every requirement with this profile under this mark, and with this recipe if one is given."""
    folders = sorted((path for path in runs.glob("*") if path.name != run_id), key=lambda path: path.name, reverse=True)
    told = ((folder, _read(folder / "run.json")) for folder in folders)
    return next((folder for folder, run in told if _accepted(run, mark, profile) and _made_by(run, recipe)), None)


def _made_by(run: Mapping[str, Any], recipe: str) -> bool:
    return not recipe or (run.get("recipe") or {}).get("name") == recipe


def _accepted(run: Mapping[str, Any], mark: str, profile: str) -> bool:
    one = (run.get("profiles") or {}).get(mark) or {}
    return bool(run.get("requirements_met") and one.get("proven") and one.get("profile") == profile)


def differences(before: Path, now: Path) -> Iterator[str]:
    """Every leaf of the recorded identity and of preflight that is another; what only one run recorded is left out."""
    for name, part in (("preflight.json", ()), ("runtime-gate.json", ("evidence", "identity"))):
        old, new = _part(_read(before / name), part), _part(_read(now / name), part)
        if not (old and new):
            continue
        mine, theirs = dict(leaves(old)), dict(leaves(new))
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key) and not OWN.search(key):
                yield f"{key.lstrip('.')} is {_short(theirs.get(key, 'not there'))}, it was {_short(mine.get(key, 'not there'))}"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of JSON by its path; an environment entry by its name."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if path.endswith(".environment") and isinstance(item, str):
                yield f"{path}.{item.partition('=')[0]}", item.partition("=")[2]
            else:
                yield from leaves(item, f"{path}.{index}")
    else:
        yield path, value


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _part(data: Mapping[str, Any], part: tuple[str, ...]) -> Any:
    inner: Any = data
    for key in part:
        inner = inner.get(key) if isinstance(inner, dict) else None
    return inner


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:120]}…"
