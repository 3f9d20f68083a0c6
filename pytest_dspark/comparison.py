"""What was expected beside what was found: the form of everything that is proven of a running engine.

`hold` judges one comparison and nothing else does, so that a stored gate can be judged again. What cannot be seen is
listed with its reason, and a difference that the recipe lets stand is listed as recorded; neither is ever silent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_dspark.verdict import Finding, Status, Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """One thing that was expected of one rank (or of the API: rank None), what was found there, and how it was read. The values
    of a `private` one, which one host alone has, stand in no sentence."""

    what: str
    rank: int | None
    expected: Any
    found: Any
    relation: str = "equal"
    fault: str = "engine"
    host: str = ""
    how: str = ""
    private: bool = False

    def as_json(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        empty = {"host": "", "how": "", "private": False}
        return {name: value for name, value in data.items() if name not in empty or value != empty[name]}


@dataclass(slots=True)
class Sheet:
    """The comparisons of one requirement while they are collected."""

    comparisons: list[Comparison] = field(default_factory=list)
    not_observable: list[str] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)

    def add(
        self,
        what: str,
        rank: int | None,
        expected: Any,
        found: Any,
        relation: str = "equal",
        fault: str = "engine",
        *,
        host: str = "",
        how: str = "",
    ) -> None:
        self.comparisons.append(Comparison(what, rank, expected, found, relation, fault, host, how))

    def add_private(self, what: str, rank: int, expected: Any, found: Any) -> None:
        """Two values of one host alone, which must be equal."""
        self.comparisons.append(Comparison(what, rank, expected, found, private=True))

    def data(self) -> dict[str, Any]:
        return {
            "comparisons": [c.as_json() for c in self.comparisons],
            "not_observable": list(self.not_observable),
            "recorded": list(self.recorded),
        }


def hold(comparison: Mapping[str, Any]) -> bool:
    """Whether what was found is what was expected. Nothing expected is never equal; an unknown relation never holds."""
    expected, found = comparison["expected"], comparison["found"]
    relation = comparison["relation"]
    if relation == "equal":
        return expected is not None and bool(expected == found)
    if relation == "present":
        return bool(found)
    if relation == "absent":
        return not found
    if relation == "among":
        return isinstance(found, (list, tuple)) and expected in found
    if relation == "superset":
        return isinstance(found, Mapping) and all(
            key in found and found[key] == value for key, value in expected.items()
        )
    return False


def judge(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS when every comparison holds and there is at least one; FAIL when the model answered a canary wrongly."""
    comparisons = finding.data["comparisons"]
    wrong = [comparison for comparison in comparisons if not hold(comparison)]
    if wrong:
        model = all(comparison["fault"] == "model" for comparison in wrong)
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return Verdict(
            Status.FAIL if model else Status.ERROR,
            "WRONG_ANSWER" if model else "GATE_FAILED",
            sentence(wrong[0]) + more,
        )
    if not comparisons:
        reasons = "; ".join(finding.data["not_observable"]) or "nothing was compared"
        return Verdict(Status.NOT_IMPLEMENTED, "NOT_IMPLEMENTED", f"not observable: {reasons}")
    notes = [f"not observable: {reason}" for reason in finding.data["not_observable"]]
    notes += [f"recorded: {difference}" for difference in finding.data.get("recorded", ())]
    return Verdict(Status.PASS, "", "; ".join(notes))


def broken(requirements: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for everything that does not hold."""
    return [sentence(one) for data in requirements.values() for one in data["comparisons"] if not hold(one)]


def sentence(comparison: Mapping[str, Any]) -> str:
    """One broken comparison in words."""
    who = "API" if comparison["rank"] is None else f"rank {comparison['rank']}"
    who += f" ({comparison['host']})" if comparison.get("host") else ""
    what = comparison["what"] + (f" (read from {comparison['how']})" if comparison.get("how") else "")
    if comparison.get("private"):
        return f"{who}: {what}: the rank has another value, or several; runtime-gate.json of the run folder tells them"
    expected, found = _short(comparison["expected"]), _short(comparison["found"])
    if comparison["relation"] == "absent":
        return f"{who}: {what}: must not be there, found {found}"
    if comparison["relation"] == "present":
        return f"{who}: {what}: expected {expected}, found nothing"
    return f"{who}: {what}: expected {expected}, found {found}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 300 else f"{text[:300]}… ({len(text)} characters)"
