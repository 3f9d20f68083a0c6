"""JSON with one meaning: no key twice, no NaN or Infinity, no number out of range."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def loads(text: str) -> Any:
    """The value. Raises ValueError (JSONDecodeError where the grammar is broken), RecursionError if nested too deeply."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            shown = name if len(name) <= 40 else name[:40] + "…"
            raise ValueError(f"the key {shown!r} twice")
        table[name] = value
    return table


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text}, which is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number out of range")
    return number
