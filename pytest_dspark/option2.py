"""The long window and production in one report: the largest context and the speed of one build on the same hosts.

Both come from one run (`pytest -m "long1m or production"`) or from two. Two are joined only if recipe, image, model,
manifest, wrapper and our own suites are the same, each profile is the one that the recipe declares, and the long window came
first. Standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_dspark import tables
from pytest_dspark.acceptance import Outcome
from pytest_dspark.pack import Pack, fingerprint
from pytest_dspark.page import accepted_words, disclosures, publishable_words
from pytest_dspark.statement import subjects, unproven
from pytest_dspark.tables import Table, escaped

MARKS: Final = ("long1m", "production")


@dataclass(frozen=True, slots=True)
class Part:
    """One profile of the report: its mark, the pack that holds it, and what that pack's run says."""

    mark: str
    pack: Pack
    answer: Outcome
    folder: str = "."

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        return [row for row in self.pack.rows if row["profile"] == self.mark]


def disagreements(long: Part, production: Part) -> Iterator[str]:
    """Why the two do not belong into one report; nothing if they do."""
    for part in (long, production):
        yield from _alone(part)
    one, other = _compared(long), _compared(production)
    for name, value in one.items():
        if value != other[name]:
            yield f"{name} of {long.mark} is {value}, of {production.mark} {other[name]}"
    first, second = _times(long), _times(production)
    if not first or not second or max(first) > min(second):
        yield f"{long.mark} must come first: it went on until {max(first, default='never')}, {production.mark} began at {min(second, default='never')}"


def _alone(part: Part) -> Iterator[str]:
    if part.pack.run["status"] != "complete":
        yield f"run {part.pack.run['run']} of {part.mark} is {part.pack.run['status']}"
    declared = part.pack.recipe.profile_of(part.mark)
    if part.pack.profiles[part.mark].name != declared:
        yield f"{part.mark} was served with profile {part.pack.profiles[part.mark].name}, the recipe declares {declared}"
    why = unproven(part.pack)
    if why:
        yield f"{part.mark}: {why}"


def _compared(part: Part) -> dict[str, Any]:
    """What must be the same of both."""
    found = part.pack
    wrapper = found.run["profiles"][part.mark].get("wrapper") or {}
    digests = {} if unproven(found) else {one["name"]: one["digest"] for one in subjects(found)}
    made = {name: found.versions[name] for name in ("pytest_dspark", "commit")}
    return {
        "recipe": f"{found.recipe.name} {found.recipe.sha256}",
        "image, model and manifest": digests,
        "number of ranks": len(found.plans[part.mark]["ranks"]),
        "wrapper": {key: wrapper.get(key) for key in ("head", "changes")},
        "pytest-dspark": made,
    }


def _times(part: Part) -> list[str]:
    return [row["started"] for row in part.rows if row["finding"] is not None]


def page(long: Part, production: Part) -> str:
    """OPTION2_PACK.md."""
    lines = ["# Long window and production, one build", ""]
    for part in (long, production):
        lines += _of_part(part)
    lines += ["## invalid_for_publish", ""]
    bad = [reason for part in _runs(long, production) for reason in part.answer.reasons]
    lines += [f"invalid_for_publish: **{'true' if bad else 'false'}**", ""]
    lines += [f"- {escaped(reason)}" for reason in dict.fromkeys(bad)] or ["- nothing stands against publishing"]
    lines += ["", "## Disclosures", ""]
    told = [line for part in _runs(long, production) for line in (*part.answer.disclosures, *disclosures(part.pack))]
    lines += [f"- {escaped(line)}" for line in dict.fromkeys(told)]
    lines.append("")
    for table in _tables(long, production):
        lines += tables.markdown(table) if table.rows else ()
    return "\n".join(lines) + "\n"


def _runs(long: Part, production: Part) -> Sequence[Part]:
    """Each run once."""
    return (long,) if long.pack is production.pack else (long, production)


def _of_part(part: Part) -> list[str]:
    plan = part.pack.plans[part.mark]
    hosts = ", ".join(f"rank {rank['rank']} on {escaped(rank['host'])}" for rank in plan["ranks"])
    words = f"{accepted_words(part.pack, part.answer)}. {publishable_words(part.answer)}."
    return [
        f"- **{part.mark}**: profile `{part.pack.profiles[part.mark].name}`, {hosts}, fingerprint `{fingerprint(plan)}`, "
        f"run {part.pack.run['run']} in `{part.folder}`. {words}",
        "",
    ]


def _tables(long: Part, production: Part) -> Iterator[Table]:
    rows = [*long.rows, *production.rows]
    yield tables.verdicts(rows)
    yield tables.not_passed(rows)
    yield tables.needles(long.rows)
    yield from tables.timed(production.rows)
    digests = [(one["name"], kind, value) for one in subjects(long.pack) for kind, value in one["digest"].items()]
    yield Table("What both are about", ("what", "kind of digest", "digest"), tuple(digests))
    yield tables.not_available(rows)
