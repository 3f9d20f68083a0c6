"""The checks: each module measures one lane and judges it. `NAME` or `MODULE.NAME` is the id of a check.

`measure` gets the endpoint, the recipe's table for its lane and the live line (or the stage alone) and returns a Finding;
it never asserts, skips, prints or retries. `judge` is pure, and gives the same verdict again from a stored finding.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_dspark.audit import Audit, nothing
from pytest_dspark.errors import ConfigError
from pytest_dspark.parts import Judge, Part
from pytest_dspark.verdict import Finding, Verdict


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `source` is `endpoint` for what asks the engine, `stage` for what looks at its launch, gate or end.

    `exclusive` checks time something and hold the engine alone; the others share it. A check with `judge_part` gives each of
    its questions a row: `measure` also gets `parts`, and `recount` makes its finding's counts anew from the judged
    questions; `audit_part` says what of one stored question does not follow. `audit` makes again what a stored finding derives
    from itself and from the recipe.
    """

    measure: Callable[..., Finding]
    judge: Callable[[Finding, Mapping[str, Any]], Verdict]
    source: str = "endpoint"
    exclusive: bool = False
    judge_part: Judge | None = None
    recount: Callable[[Mapping[str, Any], Sequence[Part]], Mapping[str, Any]] | None = None
    audit: Audit = nothing
    audit_part: Callable[[Part], Iterator[str]] | None = None


def resolve(check_id: str) -> Check:
    """The check of this id. Raises USAGE for an id that no module has."""
    module_name, _, name = check_id.partition(".")
    path = f"pytest_dspark.checks.{module_name}"
    if not module_name.isidentifier() or importlib.util.find_spec(path) is None:
        raise ConfigError("USAGE", f"check {check_id!r}: there is no pytest_dspark/checks/{module_name}.py")
    checks: Mapping[str, Check] = importlib.import_module(path).CHECKS
    if name not in checks:
        raise ConfigError("USAGE", f"check {check_id!r}: {module_name} has {', '.join(sorted(checks)) or 'no checks'}")
    return checks[name]


def lane_of(check_id: str) -> str:
    return check_id.partition(".")[0]
