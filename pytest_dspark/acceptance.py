"""From rows to the answer of the whole run: accepted, publishable, and why not. Pure, standard library alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

INTERRUPTED = "the run was interrupted"
BAD = ("FAIL", "TOKEN_LIMIT", "ERROR", "CAPACITY", "BLOCKED")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run says. `accepted` is None where it has no meaning: rehearsal, subset, foreign endpoint.

    `reasons` stand against publishing; `disclosures` must be published with the run. `resumed` is the run that this one
    resumed, and `measured_in` counts the measured rows a run.
    """

    accepted: bool | None
    met: bool
    subset: bool
    publishable: bool
    reasons: tuple[str, ...]
    counts: Mapping[str, int]
    resumed: str = ""
    measured_in: Mapping[str, int] = field(default_factory=dict)
    disclosures: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "accepted": self.accepted,
            "requirements_met": self.met,
            "subset": self.subset,
            "publishable": self.publishable,
            "reasons": list(self.reasons),
            "counts": dict(self.counts),
            "resumed": self.resumed or None,
            "measured_in": dict(self.measured_in),
            "disclosures": list(self.disclosures),
        }


def outcome(
    rows: Iterable[Mapping[str, Any]],
    required: Mapping[str, Sequence[str]],
    *,
    selected: Mapping[str, frozenset[str]],
    narrowed: bool,
    rehearsal: bool,
    against_publishing: Sequence[str],
    interrupted: bool,
    foreign: bool = False,
    resumed: str = "",
) -> Outcome:
    """Judge the run.

    `required` are the checks that the recipe requires of each profile of this run, `selected` those that were collected
    for it. A required check that was not selected makes a run that was `narrowed` on purpose a subset; every other one that
    is not PASS exactly once makes it not accepted.
    """
    rows = list(rows)
    absent = [
        (mark, check) for mark, checks in required.items() for check in checks if check not in selected.get(mark, ())
    ]
    missing = absent if narrowed else []
    unmet = _unmet(rows, required, missing)
    bad = [f"{row['profile']}: {row['check']} is {row['verdict']}" for row in rows if row["verdict"] in BAD]
    reasons = [*unmet, *unrun(rows, selected), *_no_requirement(required), *bad, *_again(rows)]
    measured_in = Counter(str(row.get("measured_in")) for row in rows if row.get("finding") is not None)
    met = not unmet and not missing and bool(required) and all(required.values()) and not interrupted
    subset = bool(missing)
    accepted = None if rehearsal or subset or foreign else met
    notes = _notes(rehearsal, subset, interrupted, foreign)
    return Outcome(
        accepted=accepted,
        met=met,
        subset=subset,
        publishable=accepted is True and not reasons and not against_publishing,
        reasons=tuple(dict.fromkeys([*notes, *reasons, *against_publishing])),
        counts=dict(Counter(row["verdict"] for row in rows)),
        resumed=resumed,
        measured_in=dict(measured_in),
        disclosures=_disclosures(rows, resumed),
    )


def against_publishing(
    recipe: str,
    wrapper: str,
    unpublishable: Mapping[str, Sequence[str]],
    *,
    tampered: Sequence[str] = (),
    overrides: Sequence[str] = (),
    stated: Sequence[str] = (),
) -> list[str]:
    """What stands against publishing beside the rows: suites that were bent (`tampered`), a recipe that accepts any wrapper
    tree, profiles that the recipe calls `unpublishable` by mark, profiles that were given instead of the recipe's own, and
    what the run `stated` of itself (ledger, own files)."""
    reasons = list(tampered)
    if wrapper == "any":
        reasons.append(f"recipe {recipe} accepts any wrapper tree")
    for mark, found in unpublishable.items():
        reasons += [f"{mark}: {reason}" for reason in found]
    reasons += [f"--dspark-profile {name} was given" for name in overrides]
    return [*reasons, *stated]


def _again(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """One attempt each: what was begun twice may be published as what it is, and never as a first measurement."""
    return [
        f"{row['profile']}: {row['check']} was tried {row['attempt']} times"
        for row in rows
        if row.get("attempt", 1) > 1
    ]


def _disclosures(rows: Sequence[Mapping[str, Any]], resumed: str) -> tuple[str, ...]:
    """What an outside client's own report says against publishing, and which earlier run measured what of a resumed one."""
    invalid = tuple(
        f"{row['profile']}: {row['check']} is invalid_for_publish by its own report"
        for row in rows
        if (row.get("finding") or {}).get("invalid_for_publish") is True
    )
    if not resumed:
        return invalid
    earlier: dict[str, list[str]] = {}
    for row in rows:
        if row["measured_in"] != row["run"]:
            earlier.setdefault(row["measured_in"], []).append(f"{row['profile']}/{row['check']}")
    told = [f"measured in run {run}: {', '.join(sorted(checks))}" for run, checks in sorted(earlier.items())]
    return (f"resumed from run {resumed}", *told, *invalid)


def _unmet(
    rows: Iterable[Mapping[str, Any]], required: Mapping[str, Sequence[str]], missing: Sequence[tuple[str, str]]
) -> list[str]:
    """Required checks that were selected and are not PASS, once and only."""
    verdicts: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        verdicts.setdefault((row["profile"], row["check"]), []).append(row["verdict"])
    wanted = [(mark, check) for mark, checks in required.items() for check in checks if (mark, check) not in missing]
    found = {key: verdicts.get(key, ["missing"]) for key in wanted}
    return [f"{mark}: {check} is {' and '.join(said)}" for (mark, check), said in found.items() if said != ["PASS"]]


def unrun(rows: Iterable[Mapping[str, Any]], selected: Mapping[str, Iterable[str]]) -> list[str]:
    """Checks that were selected and have no row: whatever kept them from running, nothing is known of them."""
    known = {(row["profile"], row["check"]) for row in rows}
    cases = [(mark, check) for mark, checks in selected.items() for check in sorted(checks) if check]
    return [f"{mark}: {check} is missing" for mark, check in cases if (mark, check) not in known]


def _no_requirement(required: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{mark}: the recipe requires nothing of this profile" for mark, checks in required.items() if not checks]


def _notes(rehearsal: bool, subset: bool, interrupted: bool, foreign: bool) -> list[str]:
    notes = {
        "a rehearsal proves the harness and never an engine": rehearsal,
        "subset: not an acceptance": subset,
        INTERRUPTED: interrupted,
        "nothing proves what answered at --dspark-endpoint": foreign,
    }
    return [text for text, true in notes.items() if true]
