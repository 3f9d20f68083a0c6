"""A run as a GitHub step summary: Markdown that stands by itself on a CI page. Pure, from a pack; standard library alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pytest_dspark import page, tables
from pytest_dspark.headlines import headlines
from pytest_dspark.pack import Pack
from pytest_dspark.pack import answer as answer_of
from pytest_dspark.tables import Table, escaped

MOST_BYTES: Final = 1 << 20
"""GitHub refuses a longer summary of one step, whole."""
_CUT: Final = "\n\n*Cut here: a summary of a step holds 1 MiB. PACK.md has the rest.*\n"


def summary(pack: Pack) -> str:
    """The verdict first, then what failed, the figures, and the reasons against publishing; at most 1 MiB."""
    text = "\n".join(_lines(pack)) + "\n"
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) <= MOST_BYTES:
        return text
    return raw[: MOST_BYTES - len(_CUT.encode())].rpartition(b"\n")[0].decode("utf-8", "ignore") + _CUT


def _lines(pack: Pack) -> Iterator[str]:
    answer = answer_of(pack)
    yield f"## {escaped(page.accepted_words(pack, answer))}"
    yield ""
    yield f"**{escaped(page.publishable_words(answer))}.** Run `{pack.run['run']}`, {escaped(pack.recipe.about)}"
    yield ""
    yield from (f"- {escaped(reason)}" for reason in answer.reasons[:10])
    yield ""
    for table in _tables(pack):
        yield from (
            line.replace("## ", "### ", 1) if line.startswith("## ") else line for line in tables.markdown(table)
        )


def _tables(pack: Pack) -> list[Table]:
    quoted = Table("In short", ("what", "value"), tuple(headlines(pack.rows)))
    found = [tables.not_passed(pack.rows), quoted, tables.verdicts(pack.rows), *tables.timed(pack.rows)]
    return [table for table in (*found, tables.needle_grid(pack.rows)) if table.rows]
