"""`dspark pack RUN1 RUN2`: two runs' packs in one folder, joined only if they are of one build on the same hosts.

The packs are copied as they are, with their statements and signatures. That the hosts are the same is compared in the two
private run folders, since a pack has pseudonyms of its own; a stranger is told that it is claimed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pytest_dspark import option2, pack, provenance
from pytest_dspark.errors import ConfigError
from pytest_dspark.evidence import work_tree, write_whole
from pytest_dspark.option2 import MARKS, Part
from pytest_dspark.pack import OPTION2, STATEMENT, SUMS, PackError

NAME: Final = "composition.json"


def compose(runs: Mapping[str, Path], target: Path) -> Path:
    """Join the published packs of run folders, by mark. Raises USAGE that says why they are not joined."""
    if target.exists() or work_tree(target.parent):
        raise ConfigError("USAGE", f"{target}: must be a new folder outside git work trees")
    parts = {mark: read_part(mark, path / "publish", mark) for mark, path in runs.items()}
    problems = [*option2.disagreements(*(parts[mark] for mark in MARKS)), *_hosts_differ(runs)]
    if problems:
        raise ConfigError("USAGE", f"these runs are not joined: {'; '.join(problems)}")
    target.mkdir(mode=0o700, parents=True)
    for mark, path in runs.items():
        shutil.copytree(path / "publish", target / mark)
    told = {mark: {"run": part.pack.run["run"], "statement": _statement(target / mark)} for mark, part in parts.items()}
    write_whole(target / NAME, json.dumps({"schema": 1, "parts": told, "hosts": "the same"}, indent=1) + "\n")
    write_whole(target / OPTION2, option2.page(*(parts[mark] for mark in MARKS)))
    write_whole(target / SUMS, sums_text(target))
    return target


def read_part(mark: str, folder: Path, name: str) -> Part:
    """A published pack as the part of one mark. Raises USAGE."""
    try:
        found = pack.load(folder)
    except PackError as error:
        raise ConfigError("USAGE", f"{folder}: {error}") from error
    if mark not in found.profiles:
        raise ConfigError("USAGE", f"{folder}: the run is about {', '.join(found.profiles)}, not about {mark}")
    return Part(mark, found, pack.answer(found), name)


def _statement(folder: Path) -> str:
    return provenance.file_sha256(folder / STATEMENT)


def sums_text(target: Path) -> str:
    """SHA256SUMS of the folder, over everything but itself."""
    names = [name for name in pack.files_of(target) if name != SUMS]
    return "".join(f"{provenance.file_sha256(target / name)}  {name}\n" for name in names)


def _hosts_differ(runs: Mapping[str, Path]) -> Iterator[str]:
    """The same names, addresses and machines, by what each run kept for itself."""
    one, other = (_hosts(runs[mark] / mark) for mark in MARKS)
    if not one or one != other:
        yield "the hosts are not the same"


def _hosts(folder: Path) -> list[Any]:
    plan, before = _json(folder / "plan.json"), _json(folder / "preflight.json")
    machines = before.get("hosts", {})
    return [[rank["host"], machines.get(rank["host"])] for rank in plan.get("ranks", ())]


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
