"""Old evidence under new limits: every stored finding of a pack through the judge, with another recipe's table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pytest_dspark import pack
from pytest_dspark.errors import ConfigError
from pytest_dspark.pack import SHAPE, PackError, lane_settings
from pytest_dspark.plan import settle
from pytest_dspark.recipe import load_recipe


def rejudge(folder: Path, recipe_file: Path) -> Iterator[str]:
    """A sentence for every row whose verdict is another under the recipe, and one for what it requires and is not there.

    Raises ConfigError for a recipe or a pack that cannot be read.
    """
    recipe = load_recipe(recipe_file)
    try:
        found = pack.load(folder)
    except PackError as error:
        raise ConfigError("USAGE", f"{folder}: {error}") from error
    settings = {mark: settle(profile, recipe) for mark, profile in found.profiles.items()}
    for row in found.tests:
        given = lane_settings(recipe, settings[row["profile"]], row["lane"], found.run.get("challenge") or "")
        try:
            verdict = pack.judged(found, row, given)
        except SHAPE as error:
            yield f"{row['profile']}/{row['check']}: {row['verdict']}; the recipe has no limits for it ({error})"
            continue
        if verdict and (str(verdict.status), verdict.code or None) != (row["verdict"], row["code"]):
            yield f"{row['profile']}/{row['check']}: {row['verdict']}, now {verdict}"
    for mark in found.profiles:
        there = {row["check"] for row in found.tests if row["profile"] == mark}
        for check in recipe.required(mark):
            if check not in there:
                yield f"{mark}/{check}: the recipe requires it, and it was not measured"
