"""The last section in the terminal: at most 20 lines that say what happened and what to do next. Pure; standard library alone."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pytest_dspark.acceptance import BAD, INTERRUPTED, Outcome
from pytest_dspark.headlines import headlines
from pytest_dspark.tables import VERDICTS, Row, fault_of, of_tests

MOST: Final = 20
WIDTH: Final = 160
_REASONS: Final = 4
_FAILED: Final = 4


def closing(
    rows: Iterable[Row],
    outcome: Outcome,
    *,
    word: str,
    profiles: Mapping[str, str],
    run: Path,
    refused: str,
    self_test: str = "",
) -> list[str]:
    """Verdict, counts, profiles, what failed and whose fault it was, figures, why it is not published, the pack, what is next."""
    rows = list(rows)
    counts = ", ".join(f"{outcome.counts[name]} {name}" for name in VERDICTS if outcome.counts.get(name)) or "no case"
    lines = [
        f"verdicts: {counts}",
        f"answer: {word}; {'may be published' if outcome.publishable else 'NOT to be published'}",
    ]
    lines += [f"self-test: {self_test}"] if self_test else []
    lines += [f"{mark}: {told}" for mark, told in list(profiles.items())[:3]]
    lines += _failed(rows)
    lines += [f"{what}: {value}" for what, value in headlines(rows)[:4]]
    reasons = [*([f"not published: {refused}"] if refused else []), *outcome.reasons, *outcome.disclosures]
    lines += _some([f"  - {reason}" for reason in reasons], _REASONS, "in run.json")
    return [line[:WIDTH] for line in lines][: MOST - 2] + _next(rows, outcome, run, refused)


def _some(lines: Sequence[str], most: int, where: str) -> list[str]:
    more = [f"  … and {len(lines) - most} more {where}"] if len(lines) > most else []
    return [*lines[:most], *more]


def _failed(rows: Sequence[Row]) -> list[str]:
    bad = [row for row in of_tests(rows) if row["verdict"] in BAD]
    first = [row for row in bad if row["verdict"] != "BLOCKED"] or bad
    told = [
        f"{row['verdict']} {row['profile']}/{row['check']} (fault: {fault_of(row)}): {row['message']}" for row in first
    ]
    return [" ".join(line.split()) for line in _some(told, _FAILED, "in rows.jsonl")]


def _next(rows: Sequence[Row], outcome: Outcome, run: Path, refused: str) -> list[str]:
    """Where the pack is, and the next command."""
    pack = run / "publish"
    lines = [f"evidence: {run}"] if refused else [f"pack: {pack} (report.html, PACK.md)"]
    if INTERRUPTED in outcome.reasons or any(row["verdict"] in ("ERROR", "BLOCKED") for row in rows):
        return [*lines, f"next: pytest … --dspark-resume {run.name} measures only what is missing"]
    if refused:
        return [*lines, f"next: look at {shlex.quote(str(run / 'run.json'))}"]
    return [*lines, f"next: dspark verify {shlex.quote(str(pack))}"]
