"""A published pack as it lies on the disk: read whole and strictly, by whoever made it and by a stranger alike.

Everything that is derived (answer of the run, statement, PACK.md) is made from what is read here, so that it can be made
again and compared. Standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_dspark import acceptance, junit
from pytest_dspark.acceptance import Outcome, outcome
from pytest_dspark.checks import resolve
from pytest_dspark.errors import ConfigError
from pytest_dspark.evidence import digest, sealed_rows
from pytest_dspark.plan import Settings, settle
from pytest_dspark.profile import Profile, load_profile
from pytest_dspark.recipe import Recipe, load_recipe
from pytest_dspark.strictjson import loads
from pytest_dspark.verdict import Finding, Verdict

SCHEMA: Final = 1
SUMS: Final = "SHA256SUMS"
STATEMENT: Final = "statement.json"
PAGE: Final = "PACK.md"
REPORT: Final = "report.html"
CHANGES: Final = "changes.json"
OPTION2: Final = "OPTION2_PACK.md"
SIGNATURE: Final = re.compile(r"statement\.json(\.[A-Za-z0-9_-]{1,64})?\.sig")
_MARK: Final = r"[a-z0-9_]{1,40}"
LAYOUT: Final = re.compile(
    r"PACK\.md|SHA256SUMS|statement\.json|run\.json|rows\.jsonl|begun\.jsonl|junit\.xml|versions\.json|ledger\.jsonl"
    r"|report\.html|changes\.json|sources\.json|sanitizer\.json|pseudonyms\.json|logs\.json|OPTION2_PACK\.md"
    r"|inputs/recipe/[A-Za-z0-9._-]{1,100}\.toml|inputs/profiles/[A-Za-z0-9._-]{1,100}\.env|inputs/suites/[A-Za-z0-9_]{1,100}\.py"
    rf"|{_MARK}/(?:plan|preflight|runtime-gate|teardown|behaviour|brake|left-stopped)\.json|{_MARK}/readings\.jsonl"
    rf"|{_MARK}/(?:left-)?rank\d{{1,4}}\.log|" + SIGNATURE.pattern
)
"""Every file that a pack may hold."""
SHAPE: Final = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What data raises that has not the shape that we give it."""


class PackError(ValueError):
    """A file of the pack cannot be read: its name and why."""


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack's files as data. `recipe` and `profiles` are read from the pack's own inputs; `settings` are the knobs a mark."""

    path: Path
    run: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    begun: tuple[Mapping[str, Any], ...]
    versions: Mapping[str, Any]
    ledger: tuple[Mapping[str, Any], ...]
    plans: Mapping[str, Mapping[str, Any]]
    recipe: Recipe
    profiles: Mapping[str, Profile]
    settings: Mapping[str, Settings]
    junit: bytes

    def lane(self, profile: str, lane: str) -> dict[str, Any]:
        """What a check of the lane was given of recipe, profile and run."""
        return lane_settings(self.recipe, self.settings[profile], lane, self.run.get("challenge") or "")

    @property
    def tests(self) -> list[Mapping[str, Any]]:
        """The rows of whole tests."""
        return [row for row in self.rows if row.get("part") is None]


def lane_settings(recipe: Recipe, settings: Settings, lane: str, challenge: str) -> dict[str, Any]:
    """What the recipe says for a lane, the profile's knobs, and the challenge, if the run was given one."""
    told = {**recipe.checks.get(lane, {}), "knobs": dict(settings.values)}
    return told | ({"challenge": challenge} if challenge else {})


def load(path: Path) -> Pack:
    """Read a pack. Raises PackError that names the file."""
    run = table(path / "run.json")
    recipe = _recipe(path, run)
    marks = {str(mark): str(one.get("profile")) for mark, one in _object(run, "profiles", path).items()}
    profiles = {mark: _profile(path, name) for mark, name in marks.items()}
    return Pack(
        path=path,
        run=run,
        rows=_rows(path, str(run.get("run"))),
        begun=tuple(lines(path / "begun.jsonl")),
        versions=table(path / "versions.json"),
        ledger=tuple(lines(path / "ledger.jsonl")),
        plans={mark: table(path / mark / "plan.json") for mark in marks},
        recipe=recipe,
        profiles=profiles,
        settings={mark: _settled(path, profile, recipe) for mark, profile in profiles.items()},
        junit=raw(path / "junit.xml"),
    )


def raw(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PackError(f"{path.name}: {error.strerror}") from error


def table(path: Path) -> dict[str, Any]:
    """A JSON object. Raises PackError."""
    try:
        data = loads(raw(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise PackError(f"{path.name}: {error}") from error
    if not isinstance(data, dict):
        raise PackError(f"{path.name}: expected an object")
    return data


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of one JSON object a line. Raises PackError."""
    for number, line in enumerate(raw(path).split(b"\n")[:-1], 1):
        try:
            data = loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise PackError(f"{path.name}, line {number}: {error}") from error
        if not isinstance(data, dict):
            raise PackError(f"{path.name}, line {number}: expected an object")
        yield data


def _object(data: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    found = data.get(key)
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise PackError(f"run.json: {key} is no table of tables")
    return found


def _rows(path: Path, run: str) -> tuple[Mapping[str, Any], ...]:
    try:
        return tuple(row for _, row in sealed_rows(path / "rows.jsonl", run))
    except (OSError, ValueError, RecursionError) as error:
        raise PackError(f"rows.jsonl: {error}") from error


def _recipe(path: Path, run: Mapping[str, Any]) -> Recipe:
    told = run.get("recipe")
    sources = told.get("sources") if isinstance(told, dict) else None
    names = [name for name in sources or () if isinstance(name, str) and not name.endswith(".overlay.toml")]
    if not names or not all(LAYOUT.fullmatch(f"inputs/recipe/{name}") for name in names):
        raise PackError(f"run.json: recipe.sources is {sources!r}, expected names of files")
    try:
        return load_recipe(path / "inputs" / "recipe" / names[-1])
    except ConfigError as error:
        raise PackError(f"inputs/recipe/{names[-1]}: {error.message}") from error


def _profile(path: Path, name: str) -> Profile:
    if not LAYOUT.fullmatch(f"inputs/profiles/{name}.env"):
        raise PackError(f"run.json: {name!r} is no name of a profile")
    try:
        return load_profile(path / "inputs" / "profiles" / f"{name}.env")
    except ConfigError as error:
        raise PackError(f"inputs/profiles/{name}.env: {error.message}") from error


def _settled(path: Path, profile: Profile, recipe: Recipe) -> Settings:
    try:
        return settle(profile, recipe)
    except ConfigError as error:
        raise PackError(f"inputs/profiles/{profile.name}.env: {error.message}") from error


# --- what follows from it


def judged(pack: Pack, row: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> Verdict | None:
    """The verdict that the judge gives a stored row now; None for a row without a finding. Raises what SHAPE lists for a
    finding that no measurement gives."""
    if row["finding"] is None:
        return None
    try:
        check = resolve(row["check"])
    except ConfigError as error:
        raise ValueError(error.message) from error
    finding = Finding(row["check"], row["finding"])
    given = pack.lane(row["profile"], row["lane"]) if settings is None else settings
    if row.get("part") is None:
        return check.judge(finding, given)
    judge_part = getattr(check, "judge_part", None)  # checks that write rows of single questions have one
    return judge_part(finding, given) if judge_part else None


def answer(pack: Pack) -> Outcome:
    """What the run says, by its rows and by the recipe and profiles in the pack; never by what run.json says of it."""
    run = pack.run
    return outcome(
        pack.tests,
        {mark: pack.recipe.required(mark) for mark in pack.profiles},
        selected={mark: frozenset(run["selected"].get(mark, ())) for mark in pack.profiles},
        narrowed=bool(run["narrowed"]),
        rehearsal=pack.recipe.rehearsal,
        against_publishing=against(pack),
        interrupted=run["status"] != "complete",
        foreign=bool(run["endpoint"]),
        resumed=run.get("resumed") or "",
    )


def against(pack: Pack) -> list[str]:
    """What stands against publishing beside the rows."""
    overrides = [name for name in (pack.run.get("profile_override"),) if name]
    for mark, profile in pack.profiles.items():
        if pack.recipe.profile_of(mark) != profile.name and profile.name not in overrides:
            overrides.append(profile.name)
    return acceptance.against_publishing(
        pack.recipe.name,
        pack.recipe.wrapper,
        {mark: settings.unpublishable for mark, settings in pack.settings.items()},
        tampered=pack.run["tampered"],
        overrides=overrides,
        stated=pack.run["stated"],
    )


def settings_digest(pack: Pack, row: Mapping[str, Any]) -> str:
    return digest(pack.lane(row["profile"], row["lane"]))


def fingerprint(plan: Mapping[str, Any]) -> str:
    """The public fingerprint: as the private one, over the projected plan, so that anyone can make it again."""
    body = {"profile": plan["profile_sha256"], "recipe": plan["recipe_sha256"], "ranks": plan["ranks"]}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def files_of(path: Path) -> list[str]:
    """Every file below the folder by its name, sorted; links and what is no file are listed too."""
    return sorted(one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_symlink() or not one.is_dir())


def summed(name: str) -> bool:
    """Whether a file stands in SHA256SUMS and in the statement: all but these two and signatures."""
    return name not in (SUMS, STATEMENT) and not SIGNATURE.fullmatch(name)


def cases(pack: Pack) -> list[tuple[str, dict[str, str]]]:
    """(`profile/check`, verdict, message, type, time, …) of every case of junit.xml that is ours. Raises PackError."""
    try:
        return junit.read_cases(pack.junit)
    except ValueError as error:
        raise PackError(f"junit.xml: {error}") from error
