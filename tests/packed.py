"""Packs for tests: two rehearsals a session, shared by all workers, and the edits of a forger."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rehearsed import Place

from pytest_dspark import pack, publish, statement
from pytest_dspark.evidence import sealed


@dataclass(frozen=True)
class Made:
    """The run folders of long1m and of production, and the evidence root."""

    long1m: Path
    production: Path
    root: Path
    text: str


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two finished rehearsals, made once for all workers."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if base.name.startswith("popen-") else base
    folder = base / "packed"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = folder / "made.json"
        if not told.exists():
            told.write_text(json.dumps(_run(folder)))
        return Made(
            **{key: value if key == "text" else Path(value) for key, value in json.loads(told.read_text()).items()}
        )


def _run(folder: Path) -> dict[str, str]:
    place = Place(folder)
    long1m = place.run("--dspark-challenge=drawn on a Monday", mark="long1m")
    production = place.run(timed=True)
    for session in (long1m, production):
        assert session.process.returncode == 0, session.text[-3000:]
    return {
        "long1m": str(long1m.folder),
        "production": str(production.folder),
        "root": str(place.out),
        "text": production.text,
    }


def copied(run: Path, target: Path) -> Path:
    shutil.copytree(run / "publish", target)
    return target


# --- a forger, who writes everything derived anew


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    before, lines = json.loads((folder / "run.json").read_text())["run"].encode(), []
    for row in rows:
        body = {key: value for key, value in row.items() if key != "seal"}
        lines.append(sealed(json.dumps(body, ensure_ascii=False).encode(), before))
        before = lines[-1][-67:-3]
    (folder / "rows.jsonl").write_bytes(b"".join(lines))


def forge(folder: Path) -> None:
    """Seals, page, checksums and statement made anew from what lies in the folder, by our own code."""
    for name in ("PACK.md", "SHA256SUMS", "statement.json"):
        (folder / name).unlink(missing_ok=True)
    publish.derive(folder)


def sum_up(folder: Path) -> None:
    """Checksums and statement made anew, the pages left as they are."""
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    (folder / "statement.json").unlink(missing_ok=True)
    sums = publish.sums_of(folder)
    (folder / "SHA256SUMS").write_text("".join(f"{value}  {name}\n" for name, value in sorted(sums.items())))
    found = pack.load(folder)
    told = statement.build(found, pack.answer(found), sums)
    (folder / "statement.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps(change(data) or data, indent=1, ensure_ascii=False) + "\n")


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every number; of lists the first and the last entry stand for all."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from numbers(item, (*path, key))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else ()):
            yield from numbers(value[index], (*path, index))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path


def changed(value: Any, path: tuple[Any, ...], by: Callable[[Any], Any]) -> Any:
    """A copy with one leaf changed."""
    if not path:
        return by(value)
    result = dict(value) if isinstance(value, Mapping) else list(value)
    result[path[0]] = changed(value[path[0]], path[1:], by)
    return result


def leaf(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path if not isinstance(part, int))
