"""The frozen manifest: what one proven engine was made of, file by file, and how it answered. Later launches must be it.

`dspark freeze` writes `NAME.freeze.json` beside the recipe and pins its sha256 in the recipe's overlay. Every later gate
reads the same things inside each rank and compares them.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_dspark import behaviour
from pytest_dspark.comparison import Sheet
from pytest_dspark.errors import ConfigError
from pytest_dspark.evidence import utc_now, write_whole
from pytest_dspark.identity import Rank
from pytest_dspark.plan import Plan
from pytest_dspark.recipe import Recipe

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen manifest as it was read: `inside` is true of every rank and profile, `profiles` holds what is of one mark."""

    inside: Mapping[str, Any]
    profiles: Mapping[str, Mapping[str, Any]]

    def reference(self, mark: str) -> behaviour.Reference | None:
        """How the engine of this mark answered; None if it was not frozen, or refused log probabilities."""
        data = self.profiles.get(mark, {}).get("behaviour")
        return behaviour.reference_from(data) if data and not data.get("missing") else None


def read(recipe: Recipe) -> Frozen | None:
    """The manifest that the recipe pins; None if it pins none. Raises RECIPE_INVALID if it is not that file."""
    if not recipe.pins.freeze:
        return None
    path = recipe.folder / recipe.pins.freeze
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError("RECIPE_INVALID", f"{path}: {error}") from error
    digest = hashlib.sha256(raw).hexdigest()
    if digest != recipe.pins.freeze_sha256:
        text = f"{path}: sha256 is {digest}, recipe {recipe.name} pins {recipe.pins.freeze_sha256}"
        raise ConfigError("RECIPE_INVALID", text)
    return parse(raw, str(path))


def parse(raw: bytes, where: str) -> Frozen:
    try:
        data = json.loads(raw)
        frozen = Frozen(data["inside"], data["profiles"])
        if data["schema"] != SCHEMA or not frozen.inside["packages"]:
            raise ValueError(f"schema {data['schema']}, expected {SCHEMA} with packages")
        for mark in frozen.profiles:
            frozen.reference(mark)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("RECIPE_INVALID", f"{where}: not a frozen manifest: {error!r}") from error
    return frozen


# --- what a rank is compared by


def inside(rank: Rank) -> dict[str, Any]:
    """What must be the same on every rank and in every later launch."""
    inventory = rank.inventory
    libraries = {**inventory.installed, **inventory.mapped}
    return {
        "python": inventory.python,
        "packages": dict(inventory.packages),
        "libraries": {path.rpartition("/")[2]: digest for path, digest in libraries.items()},
        "hashes": {name: dict(files) if files is not None else None for name, files in inventory.hashes.items()},
        "labels": dict(rank.image.labels),
    }


def config(rank: Rank) -> Any:
    """The engine's own configuration as it logged it; None where a rank logs none."""
    log = rank.log
    return json.loads(json.dumps([log.engine_version, log.engine_config], default=str)) if log.engine_config else None


def compare(frozen: Frozen | None, plan: Plan, ranks: Sequence[Rank], sheet: Sheet) -> None:
    """Every rank against the frozen manifest; each file that differs is named."""
    if frozen is None:
        sheet.not_observable.append("the recipe pins no frozen manifest (dspark freeze writes one)")
        return
    for rank in ranks:
        found = inside(rank)
        for name, wanted in frozen.inside.items():
            if name == "hashes":
                _files(wanted, found["hashes"], rank, sheet)
            else:
                sheet.add(f"frozen {name}", rank.number, *_apart(wanted, found.get(name)), host=rank.host)
    mark = frozen.profiles.get(plan.mark)
    if mark is None:
        sheet.not_observable.append(f"{plan.mark}: the engine configuration of this profile was not frozen")
    else:
        sheet.add("frozen engine configuration", 0, mark["config"], config(ranks[0]), host=ranks[0].host)


def _files(wanted: Mapping[str, Any], found: Mapping[str, Any], rank: Rank, sheet: Sheet) -> None:
    for package, files in wanted.items():
        mine, theirs = _apart(files or {}, found.get(package) or {})
        if mine == theirs:
            mine = theirs = f"{len(files or {})} files"
        how = "sha256 inside the rank"
        sheet.add(f"frozen files of {package}", rank.number, mine, theirs, host=rank.host, how=how)


def _apart(mine: Any, theirs: Any) -> tuple[Any, Any]:
    if mine == theirs or not (isinstance(mine, Mapping) and isinstance(theirs, Mapping)):
        return mine, theirs
    keys = [key for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]
    return {key: mine.get(key, "not there") for key in keys}, {key: theirs.get(key, "not there") for key in keys}


def compare_behaviour(
    frozen: Frozen | None, mark: str, found: behaviour.Observation | None, limits: Mapping[str, float], sheet: Sheet
) -> None:
    """How the engine answers, against how it answered when it was frozen."""
    reference = frozen.reference(mark) if frozen else None
    if reference is None:
        sheet.not_observable.append(
            "no reference of this profile was frozen, or the server refused log probabilities then"
        )
        return
    tolerance = limits.get("mean") or reference.tolerance[0], limits.get("single") or reference.tolerance[1]
    if found is None or found.missing:
        sheet.add("behaviour of the model", None, "log probabilities", None, "present")
        sheet.not_observable.append(found.missing if found else "the server was not asked")
        return
    try:
        apart = behaviour.distance(reference.observation, found)
    except ValueError as error:
        sheet.add("behaviour of the model", None, "comparable log probabilities", str(error))
        return
    near = behaviour.within(apart, tolerance)
    said = "within the tolerance" if near else behaviour.sentence(apart, tolerance)
    sheet.add(
        "behaviour of the model",
        None,
        "within the tolerance",
        said,
        how=f"mean {apart.mean:.6g}, largest {apart.single:.6g}",
    )


def reading(path: Path, mark: str) -> behaviour.Reference:
    """How an engine answered: of a frozen manifest, or of the folder of a run or pack (then without a spread).

    Raises USAGE if it is neither, or if nothing was observed there.
    """
    try:
        if path.is_dir():
            (found,) = {p.parent.name: p for p in path.rglob("behaviour.json") if p.parent.name == mark}.values()
            reference = behaviour.Reference(behaviour.from_json(json.loads(found.read_bytes())), 0, 0.0, 0.0)
        else:
            read_reference = parse(path.read_bytes(), str(path)).reference(mark)
            reference = read_reference or behaviour.Reference(behaviour.Observation(missing="not frozen"), 0, 0.0, 0.0)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("USAGE", f"{path}: no behaviour of {mark} can be read: {error}") from error
    if not reference.observation.answers:
        raise ConfigError("USAGE", f"{path}: behaviour of {mark}: {reference.observation.missing or 'nothing'}")
    return reference


# --- writing one


def alike(ranks: Sequence[Rank]) -> None:
    """Raises USAGE naming rank and file unless every rank is made of the same, and shows what is to be frozen."""
    first = inside(ranks[0])
    for rank in ranks:
        if rank.inventory.missing or not rank.inventory.packages:
            why = rank.inventory.missing or "no package was found"
            raise ConfigError("USAGE", f"rank {rank.number} ({rank.host}) cannot be frozen: {why}")
        absent = [name for name, files in rank.inventory.hashes.items() if not files]
        if absent:
            raise ConfigError("USAGE", f"rank {rank.number} ({rank.host}) has no package {', '.join(absent)} to freeze")
        unread = [
            path for files in rank.inventory.hashes.values() for path, digest in (files or {}).items() if not digest
        ]
        if unread:
            text = f"rank {rank.number} ({rank.host}): {unread[0]} cannot be read ({len(unread)} such files)"
            raise ConfigError("USAGE", f"{text}; what was not hashed is not frozen")
        for key, value in inside(rank).items():
            if value != first[key]:
                mine, theirs = _apart(first[key], value)
                text = f"rank {rank.number} ({rank.host}) differs from rank 0 in {key}: {theirs}, rank 0 has {mine}"
                raise ConfigError("USAGE", f"{text}; ranks that differ are not frozen")


def manifest(plan: Plan, ranks: Sequence[Rank], answers: Mapping[str, Any], before: Frozen | None) -> dict[str, Any]:
    """The file's content. Other profiles that were frozen from the same build are kept."""
    same = before is not None and before.inside == inside(ranks[0])
    profiles = dict(before.profiles) if before and same else {}
    profiles[plan.mark] = {"fingerprint": plan.fingerprint, "config": config(ranks[0]), "behaviour": dict(answers)}
    return {
        "schema": SCHEMA,
        "recipe": plan.recipe.name,
        "frozen": utc_now(),
        "inside": inside(ranks[0]),
        "profiles": profiles,
    }


def write(recipe: Recipe, data: Mapping[str, Any], folder: Path) -> tuple[Path, Path, str]:
    """Write manifest and overlay into the folder; returns both and the manifest's sha256. Raises RECIPE_INVALID, USAGE."""
    path, overlay = folder / f"{recipe.name}.freeze.json", folder / f"{recipe.name}.overlay.toml"
    text = json.dumps(data, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    sections = _sections(overlay)
    sections.setdefault("pins", {}).update({"freeze": path.name, "freeze_sha256": digest})
    try:
        write_whole(path, text)
        write_whole(overlay, _toml(sections))
    except OSError as error:
        raise ConfigError("USAGE", f"{folder}: {error}; --to DIR writes elsewhere") from error
    return path, overlay, digest


def _sections(overlay: Path) -> dict[str, dict[str, str]]:
    """What the overlay holds already: tables of texts alone."""
    if not overlay.is_file():
        return {}
    try:
        data = tomllib.loads(overlay.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("RECIPE_INVALID", f"{overlay}: {error}") from error
    for name, table in data.items():
        if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
            raise ConfigError(
                "RECIPE_INVALID", f"{overlay}: {name} must be a table of texts, so that it can be written again"
            )
    return data


def _toml(sections: Mapping[str, Mapping[str, str]]) -> str:
    lines = ["# Measured, and not committed: pins and labels that add to the recipe and never change it."]
    for name, table in sections.items():
        lines += [f"[{name}]", *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)
