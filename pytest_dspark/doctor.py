"""`dspark doctor`: would a launch be allowed? The looks of preflight as a table and as JSON. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pytest_dspark.conditions import Row

ORDER = {"red": 0, "amber": 1, "not observable": 2, "green": 3}


def allowed(rows: Iterable[Row]) -> bool:
    """Whether nothing is red; nothing looked at is nothing allowed."""
    rows = list(rows)
    return bool(rows) and not any(row.state == "red" for row in rows)


def table(rows: Sequence[Row]) -> str:
    """One line a look, the bad ones first, each with what to do about it."""
    ordered = sorted(rows, key=lambda row: ORDER[row.state])
    width = {name: max(len(getattr(row, name)) for row in rows) for name in ("host", "check", "state")}
    lines = []
    for row in ordered:
        cells = (getattr(row, name).ljust(width[name]) for name in ("state", "host", "check"))
        code = f"{row.code}: " if row.code else ""
        lines.append("  ".join([*cells, code + row.message]))
        lines += [" " * (sum(width.values()) + 6) + f"-> {row.remedy}"] if row.remedy else []
    return "\n".join([*lines, verdict(rows)])


def verdict(rows: Sequence[Row]) -> str:
    red = sum(row.state == "red" for row in rows)
    return (
        "a launch would be allowed"
        if allowed(rows)
        else f"a launch would be refused: {red} of {len(rows)} looks are red"
    )


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    return {"schema": 1, "allowed": allowed(rows), "rows": [row.as_json() for row in rows]}
