"""changes.json: how a run differs from the last accepted one with the same profile and recipe under the same evidence root.

Told from both published packs, so that nothing private is in it. Standard library alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_dspark import changes, compare
from pytest_dspark.differing import differences
from pytest_dspark.pack import SHAPE, Pack, PackError, load

MOST: int = 60


def told(runs: Path, now: Pack) -> dict[str, Any]:
    """What changes.json holds: the other run, what runs differently, the figures then and now; or why there is nothing."""
    before, why = _last(runs, now)
    if before is None:
        return {"schema": 1, "since": None, "reason": why, "identity": [], "speed": []}
    found = differences(before, now)
    more = f"and {len(found) - MOST} more differences" if len(found) > MOST else ""
    answer = compare.compare(before, now)
    refused = [f"speed is not compared: {answer.refused[0]}"] if answer.refused else []
    return {
        "schema": 1,
        "since": before.run["run"],
        "reason": "; ".join([*refused, *([more] if more else [])]) or None,
        "identity": [{"what": one.what, "was": one.was, "now": one.now} for one in found[:MOST]],
        "speed": [
            dict(zip(("row", "figure", "was", "is", "change", "says"), cells, strict=True)) for cells in _speed(answer)
        ],
    }


def _speed(answer: compare.Answer) -> list[tuple[str, ...]]:
    rows = [table for table in compare.as_tables(answer) if table.title == "Figures"]
    return [(*cells[:5], cells[6]) for cells in rows[0].rows] if rows else []


def _last(runs: Path, now: Pack) -> tuple[Pack | None, str]:
    """The newest other run of this recipe that met every requirement with the same profiles, and has a pack that can be read."""
    mine = {mark: profile.name for mark, profile in now.profiles.items()}
    for mark, profile in mine.items():
        folder = changes.last_accepted(runs, str(now.run["run"]), mark, profile, recipe=now.recipe.name)
        if folder is None:
            return (
                None,
                f"{mark}: no earlier accepted run of {profile} with recipe {now.recipe.name} is here to compare with",
            )
        try:
            return load(folder / "publish"), ""
        except (PackError, *SHAPE) as error:
            return None, f"the pack of the last accepted run {folder.name} cannot be read: {error}"
    return None, "the run was about no profile"
