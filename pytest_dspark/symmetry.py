"""Whether all ranks are one engine: each of them against rank 0.

Two builds of one version string are told apart by the hash of the library file, not by its version. Whether a difference
refuses the engine or is only recorded is the recipe's word, by kind (`[asymmetry]`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_dspark.comparison import Sheet
from pytest_dspark.identity import Rank, serve_argv, without_rank
from pytest_dspark.plan import Plan
from pytest_dspark.recipe import Asymmetry
from pytest_dspark.sanitize import is_secret_key, mask_argv

OWN_ENV = ("HOSTNAME", "PWD", "SHLVL", "OLDPWD", "_", "DSPARK_")
LONG = 40


@dataclass(frozen=True, slots=True)
class Trait:
    """One thing in which ranks are compared; `read` gives None where the rank cannot show it."""

    kind: str
    what: str
    read: Callable[[Rank], Any]


def _library(rank: Rank) -> Any:
    """Hashes of the libraries in memory, whatever their path; else of the files that lie there."""
    found = rank.inventory.mapped or rank.inventory.installed
    return sorted({str(digest) for digest in found.values()}) or None


def _of_machine(name: str) -> Callable[[Rank], Any]:
    return lambda rank: (getattr(rank.machine, name) or None) if rank.machine else None


TRAITS = (
    Trait("packages", "package versions", lambda rank: dict(rank.inventory.packages) or None),
    Trait("packages", "python", lambda rank: rank.inventory.python or None),
    Trait("library", "sha256 of the communication library", _library),
    Trait(
        "library", "sha256 of the installed communication library", lambda rank: dict(rank.inventory.installed) or None
    ),
    Trait("files", "files", lambda rank: dict(rank.inventory.files) or None),
    Trait("files", "files of packages", lambda rank: dict(rank.inventory.extra) or None),
    Trait("kernel", "kernel", lambda rank: rank.inventory.kernel or None),
    Trait("kernel", "kernel of the host", _of_machine("kernel")),
    Trait("driver", "GPU driver", lambda rank: rank.inventory.driver),
    Trait("docker", "Docker version", _of_machine("docker_version")),
    Trait("docker", "Docker API version", _of_machine("api_version")),
    Trait("docker", "image store", _of_machine("image_store")),
    Trait("host", "kind of host", _of_machine("kind")),
    Trait("host", "architecture of the host", _of_machine("architecture")),
)


def symmetry(plan: Plan, ranks: Sequence[Rank], sheet: Sheet) -> None:
    """Every rank against rank 0: command line, environment, image, and what lies inside."""
    words = [_alike(entry.model, rank) for entry, rank in zip(plan.cluster.hosts, ranks, strict=True)]
    for rank, theirs in zip(ranks[1:], words[1:], strict=True):
        what = "command line equal to rank 0 but for rank, headless and addresses"
        sheet.add(what, rank.number, list(words[0]), list(theirs))
        _launch_alike(plan, ranks[0], rank, sheet)
    for rank in ranks:
        if plan.recipe.inside.required:
            sheet.add("inventory inside the rank", rank.number, "packages", dict(rank.inventory.packages), "present")
        if rank.inventory.missing:
            sheet.not_observable.append(f"rank {rank.number} ({rank.host}): {rank.inventory.missing}")
    if len(ranks) == 1:
        sheet.not_observable.append("one rank has no peer")
        return
    for trait in TRAITS:
        _compare(plan.recipe.asymmetry, trait, ranks, sheet)


def _launch_alike(plan: Plan, first: Rank, rank: Rank, sheet: Sheet) -> None:
    sheet.add("environment equal to rank 0 but for declared keys", rank.number, {}, _differences(plan, first, rank))
    sheet.add("image equal to rank 0", rank.number, first.facts.image_id, rank.facts.image_id)


def _alike(model: str, rank: Rank) -> tuple[str, ...]:
    """The command line without what is the rank's own; a process names its host's model folder, a container the mount."""
    folder = model if rank.process else ""
    words = without_rank(serve_argv(rank.facts.path, rank.facts.args))
    return mask_argv(["(model folder)" if folder and word == folder else word for word in words])


def _differences(plan: Plan, first: Rank, rank: Rank) -> dict[str, Any]:
    """Environment keys that differ although neither recipe nor cluster file says they may; secret values masked."""
    a, b = first.environment, rank.environment
    keys = sorted(key for key in a.keys() | b.keys() if key not in plan.rank_env and not key.startswith(OWN_ENV))
    return {key: [_masked(key, a.get(key)), _masked(key, b.get(key))] for key in keys if a.get(key) != b.get(key)}


def _masked(key: str, value: str | None) -> str | None:
    return "***" if value is not None and is_secret_key(key) else value


def _compare(asymmetry: Asymmetry, trait: Trait, ranks: Sequence[Rank], sheet: Sheet) -> None:
    """One trait: an error where ranks differ, or a recorded difference where the recipe says so."""
    values = [trait.read(rank) for rank in ranks]
    if all(value is None for value in values):
        sheet.not_observable.append(f"{trait.what}: no rank shows it")
        return
    for rank, value in zip(ranks[1:], values[1:], strict=True):
        mine, theirs = _apart(values[0], value)
        if values[0] == value or getattr(asymmetry, trait.kind) == "error":
            what = f"{trait.what} equal to rank 0"
            sheet.add(what, rank.number, _brief(mine), _brief(theirs), host=rank.host)
        else:
            sheet.recorded.append(f"rank {rank.number} ({rank.host}): {trait.what} {theirs}, rank 0 has {mine}")


def _apart(first: Any, other: Any) -> tuple[Any, Any]:
    """Of two tables that differ only the entries that do; a missing one is told from an equal one."""
    if first == other or not (isinstance(first, Mapping) and isinstance(other, Mapping)):
        return first, other
    keys = [key for key in sorted(first.keys() | other.keys()) if first.get(key) != other.get(key)]
    return {key: first.get(key, "not there") for key in keys}, {key: other.get(key, "not there") for key in keys}


def _brief(value: Any) -> Any:
    """A long table by its size and hash, so that evidence stays readable."""
    if not isinstance(value, Mapping) or len(value) <= LONG:
        return value
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return f"{len(value)} entries, sha256 {digest}"
