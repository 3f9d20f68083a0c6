"""The table and the JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.figures import Row
from benchmarks.scenarios import Level
from benchmarks.verdict import OURS, REFERENCE, Rows, Verdict, grown, unfit

COLUMNS = (
    ("TTFT", "ttft_ms", "+.2f"),
    ("TTFT p99", "ttft_p99_ms", "+.2f"),
    ("answer", "answer_ms", "+.2f"),
    ("TPOT", "tpot_ms", "+.2f"),
    ("tokens", "tokens", "+.2f"),
    ("stamp p50", "stamp_p50_ms", ".3f"),
    ("stamp p99", "stamp_p99_ms", ".3f"),
    ("CPU s/1k", "cpu_s", ".3f"),
    ("MB", "peak_mb", ".0f"),
    ("late p99", "lateness_p99_ms", ".2f"),
)
NAMES = 22
WIDTH = 10


def level_text(level: Level, found: Mapping[str, Row | str]) -> str:
    """One level: its clients below one another. The first five figures are errors in ms or tokens."""
    head = f"{level.name}: {level.requests} requests, {level.scenario.says}"
    return "\n".join([head, titles(), *(line(client, row) for client, row in found.items())])


def titles() -> str:
    return " " * NAMES + "".join(title.rjust(WIDTH) for title, _, _ in COLUMNS)


def line(client: str, row: Row | str) -> str:
    if isinstance(row, str):
        return f"{client:{NAMES}}{row}"[:140]
    cells = "".join(cell(getattr(row, name), style).rjust(WIDTH) for _, name, style in COLUMNS)
    return f"{client:{NAMES}}{cells}" + (" inconclusive" if unfit(row) else "")


def cell(value: float | None, style: str) -> str:
    """A figure, or a dash where the client does not tell it."""
    return "-" if value is None else format(value, style)


def growth_text(rows: Rows, clients: Sequence[str]) -> str:
    """CPU per event at A C256 over A C16, by client."""
    parts = [f"{client} {cell(grown(rows, client), '.2f')}" for client in clients]
    return "growth (CPU per event, A C256 / A C16): " + ", ".join(parts)


def verdict_text(verdict: Verdict) -> str:
    lines = [f"WORSE  {text}" for text in verdict.failures] + [f"OPEN   {text}" for text in verdict.open]
    word = {0: "as true as the best peer, and inside every bound", 1: "worse", 2: "incomplete: it decides nothing"}
    return "\n".join([*lines, f"{OURS}: {word[verdict.code]} (exit {verdict.code})"])


def as_json(rows: Rows, rounds: Mapping[Level, Mapping[str, Sequence[Row | str]]], verdict: Verdict) -> dict[str, Any]:
    """Medians and every round. A text where a row was expected says why there is none."""
    return {
        "levels": [
            {
                "level": level.name,
                "requests": level.requests,
                "medians": {client: _plain(row) for client, row in found.items()},
                "rounds": {client: [_plain(row) for row in rounds[level][client]] for client in found},
            }
            for level, found in rows.items()
        ],
        "growth": {client: grown(rows, client) for client in {client for found in rows.values() for client in found}},
        "failures": list(verdict.failures),
        "open": list(verdict.open),
        "exit": verdict.code,
        "reference": REFERENCE,
    }


def _plain(row: Row | str) -> dict[str, Any] | str:
    return row if isinstance(row, str) else asdict(row)
