"""The model folder of every host: revision marker, config.json, shard list and sizes, and on request every byte.

Hashing takes minutes for large weights, so a digest is kept by host, path, size, time of change and inode: a file that was
not touched is not read again.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_dspark.cluster import Host
from pytest_dspark.comparison import Sheet, hold, sentence
from pytest_dspark.errors import ConfigError, DsparkError, HostError, LaunchError
from pytest_dspark.evidence import write_whole
from pytest_dspark.recipe import Recipe, Weights

LOOK_S = 20.0
SLOWEST = 50e6
LONGEST_HEADERS = 64 << 20
MOST_BYTES = 1 << 60
_LISTED = re.compile(r"([^\t\n/]{1,255})\t([0-9]{1,18})\t([^\t\n]{1,100})\t([0-9]{1,20})")


@dataclass(frozen=True, slots=True)
class File:
    """One file as the host lists it: bytes, times of change of content and entry as text, inode."""

    name: str
    size: int
    changed: str
    inode: int


@dataclass(frozen=True, slots=True)
class Model:
    """One host's model folder. `indexed` are the shards that the index names, empty without one; `sums` are the digests
    that were asked for; `problem` says what could not be read."""

    folder: str
    config: Mapping[str, Any] = field(default_factory=dict)
    shards: tuple[File, ...] = ()
    indexed: tuple[str, ...] = ()
    total_size: int | None = None
    sums: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        return {shard.name: shard.size for shard in self.shards}


def look(host: Host, folder: str, weights: Weights) -> Model:
    """Read config, index and listing of the folder. What cannot be read is in `problem`; raises HOST_UNREACHABLE."""
    listed = host.read(
        [
            "find",
            "-L",
            folder,
            "-maxdepth",
            "1",
            "-type",
            "f",
            "-name",
            weights.pattern,
            "-printf",
            r"%f\t%s\t%T@/%C@\t%i\n",
        ],
        timeout=LOOK_S,
    )
    config = _json(host, f"{folder}/config.json")
    if listed.code != 0:
        return Model(folder, problem=f"{folder}: {listed.stderr.decode('utf-8', 'replace').strip()}")
    if config is None:
        return Model(folder, problem=f"{folder}/config.json is not there or is no JSON object")
    try:
        shards = tuple(sorted(map(_file, listed.text.split("\n")[:-1]), key=lambda file: file.name))
        names, total = _index(host, f"{folder}/{weights.index}")
    except ValueError as error:
        return Model(folder, problem=f"{folder}: {error}")
    return Model(folder, config, shards, names, total)


def _file(line: str) -> File:
    """Raises ValueError for the line of a file whose name holds a tab or a line end."""
    found = _LISTED.fullmatch(line)
    if not found:
        raise ValueError(f"expected shards with plain names, found {line!r}")
    return File(found[1], int(found[2]), found[3], int(found[4]))


def _index(host: Host, path: str) -> tuple[tuple[str, ...], int | None]:
    """The shards that the index names and the bytes that it tells; nothing if there is no index. Raises ValueError for a
    file that is there and is none."""
    done = host.read(["cat", path], timeout=LOOK_S)
    if done.code != 0:
        return (), None
    try:
        index = json.loads(done.text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    table = index if isinstance(index, dict) else {}
    names, about = table.get("weight_map"), table.get("metadata") or {}
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{path} has no weight_map of names")
    total = about.get("total_size") if isinstance(about, dict) else about
    if total is not None and not (type(total) in (int, float) and 0 <= total < MOST_BYTES):
        raise ValueError(f"{path}: total_size is {str(total)[:60]!r}, expected bytes")
    return tuple(sorted(set(names.values()))), None if total is None else int(total)


def _json(host: Host, path: str) -> dict[str, Any] | None:
    done = host.read(["cat", path], timeout=LOOK_S)
    try:
        data = json.loads(done.text) if done.code == 0 else None
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


# --- the comparisons


@dataclass(frozen=True, slots=True)
class Placed:
    """The model folder of one rank, or the reason why the rank has none to show."""

    rank: int
    host: str
    model: Model | None


def compare(weights: Weights, sums: Mapping[str, str], placed: Sequence[Placed], sheet: Sheet) -> None:
    """Each folder against the recipe and against rank 0's."""
    for place in placed:
        if place.model is None:
            sheet.not_observable.append(f"rank {place.rank} ({place.host}): the cluster file names no model folder")
        elif place.model.problem:
            sheet.add("model folder", place.rank, "config.json and shards", None, "present", host=place.host)
            sheet.not_observable.append(f"rank {place.rank} ({place.host}): {place.model.problem}")
        else:
            _of_recipe(weights, sums, place, place.model, sheet)
    seen = [place for place in placed if place.model and not place.model.problem]
    for place in seen[1:]:
        _alike(seen[0], place, sheet)
    if seen and not any(place.model and place.model.sums for place in seen):
        sheet.not_observable.append("bytes of the weights: not hashed in this run (--dspark-weights sha256 does)")


def _of_recipe(weights: Weights, sums: Mapping[str, str], place: Placed, model: Model, sheet: Sheet) -> None:
    for key, value in weights.config:
        found = model.config.get(key)
        sheet.add(f"config.json {key}", place.rank, value, found, host=place.host, how=f"{model.folder}/config.json")
    names, empty = sorted(model.sizes), [name for name, size in model.sizes.items() if not size]
    sheet.add("shards", place.rank, "at least one", names, "present", host=place.host)
    sheet.add("empty shards", place.rank, None, empty, "absent", host=place.host)
    if model.indexed:
        sheet.add("shards that the index names", place.rank, list(model.indexed), names, host=place.host)
    if weights.shards:
        sheet.add("number of shards", place.rank, weights.shards, len(names), host=place.host)
    if weights.total_size:
        sheet.add("total size in the index", place.rank, weights.total_size, model.total_size, host=place.host)
    if model.total_size is not None:
        size, least = sum(model.sizes.values()), model.total_size
        right = least <= size <= least + LONGEST_HEADERS * len(names)
        found = "as the index says" if right else f"{size} bytes"
        sheet.add("bytes of all shards", place.rank, "as the index says", found, host=place.host, how=f"{least} bytes")
    for name, digest in sums.items():
        if model.sums:
            sheet.add(f"sha256 of {name}", place.rank, digest, model.sums.get(name), host=place.host, how="sha256sum")


def _alike(first: Placed, place: Placed, sheet: Sheet) -> None:
    mine, theirs = first.model or Model(""), place.model or Model("")
    where = f"equal to {first.host}"
    indexes = [[sorted(model.indexed), model.total_size] for model in (mine, theirs)]
    sheet.add(f"index {where}", place.rank, indexes[0], indexes[1], host=place.host)
    sheet.add(f"config.json {where}", place.rank, *_apart(mine.config, theirs.config), host=place.host)
    sheet.add(f"shards and sizes {where}", place.rank, *_apart(mine.sizes, theirs.sizes), host=place.host)
    if mine.sums or theirs.sums:
        sheet.add(f"sha256 of shards {where}", place.rank, *_apart(mine.sums, theirs.sums), host=place.host)


def _apart(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Only what differs, so that one shard among many is named; equal tables stay whole."""
    keys = [key for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]
    if not keys:
        return dict(mine), dict(theirs)
    return {key: mine.get(key, "not there") for key in keys}, {key: theirs.get(key, "not there") for key in keys}


def problems(weights: Weights, sums: Mapping[str, str], placed: Sequence[Placed]) -> Iterator[tuple[str, DsparkError]]:
    """What refuses a launch before anything is created, with the host of each."""
    sheet = Sheet()
    compare(weights, sums, placed, sheet)
    unread = {place.host: place.model.problem for place in placed if place.model and place.model.problem}
    for comparison in sheet.comparisons:
        if hold(comparison.as_json()):
            continue
        host, said = comparison.host, sentence(comparison.as_json()).partition("): ")[2]
        code, text = ("MODEL_MISSING", unread[host]) if host in unread else ("IDENTITY_MISMATCH", said)
        yield host, LaunchError(code, f"{host}: {text}")


# --- every byte


@dataclass(frozen=True, slots=True)
class Hasher:
    """Digests of shards, read on their own host and kept in `store` (a JSON file on this machine)."""

    store: Path
    say: Callable[[str], None]
    cancelled: Callable[[], bool]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def sums(self, host: Host, model: Model) -> dict[str, str]:
        """The digest of every shard. Raises CANCELLED, MODEL_MISSING or HOST_UNREACHABLE."""
        total, done, result = sum(model.sizes.values()), 0, {}
        for number, shard in enumerate(model.shards, 1):
            if self.cancelled():
                raise LaunchError("CANCELLED", "the run was interrupted while weights were hashed")
            done += shard.size
            part = f"{number} of {len(model.shards)}, {done / 1e9:.1f} of {total / 1e9:.1f} GB"
            result[shard.name] = self._one(host, model.folder, shard, part)
        return result

    def _one(self, host: Host, folder: str, shard: File, part: str) -> str:
        key = json.dumps([host.name, f"{folder}/{shard.name}", shard.size, shard.changed, shard.inode])
        known = self._known().get(key)
        if known:
            return known
        self.say(f"hashing {shard.name} on {host.name} ({part})")
        digest = _sha256(host, f"{folder}/{shard.name}", shard.size)
        with self.lock:
            self.store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self.store, json.dumps(self._known() | {key: digest}, indent=1) + "\n")
        return digest

    def _known(self) -> dict[str, str]:
        try:
            data = json.loads(self.store.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(key): str(value) for key, value in data.items()} if isinstance(data, dict) else {}


def _sha256(host: Host, path: str, size: int) -> str:
    done = host.read(["sha256sum", path], timeout=60.0 + size / SLOWEST)
    if done.code != 0 or not done.text.strip():
        said = done.stderr.decode("utf-8", "replace").strip()
        raise HostError("MODEL_MISSING", f"{host.name}: {path} cannot be hashed: {said}")
    return done.text.split()[0].lstrip("\\")


def read_sums(path: Path) -> dict[str, str]:
    """A list as sha256sum writes it: `digest  name` a line. Raises RECIPE_INVALID with file and line."""
    result: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("RECIPE_INVALID", f"{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        digest, _, name = line.strip().partition(" ")
        name = name.strip().lstrip("*")
        if line.strip() and (len(digest) != 64 or not name or set(digest) - set("0123456789abcdef")):
            raise ConfigError("RECIPE_INVALID", f"{path}:{number}: expected a sha256 and a file name, found {line!r}")
        if line.strip():
            result[name.rpartition("/")[2]] = digest
    return result


def sums_of(recipe: Recipe) -> dict[str, str]:
    """The recipe's own list of digests; empty if it names none."""
    return read_sums(recipe.folder / recipe.weights.sums) if recipe.weights.sums else {}
