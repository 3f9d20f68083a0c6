"""The few figures of a run by which people remember it, each with its interval. Pure, from rows; standard library alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from pytest_dspark.tables import DASH, Row, interval, needles, of_tests, seconds, timed_groups

MOST: Final = 6


def headlines(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """(what, value): one stream, the most streams, the first token of a chat, and every needle. Only rows that passed."""
    rows = of_tests(rows)
    return [*_speeds(rows), *_needles(rows)][:MOST]


def _speeds(rows: Iterable[Row]) -> Iterator[tuple[str, str]]:
    for (profile, graphs, _), found in timed_groups(rows).items():
        good = [row for row in found if row["verdict"] == "PASS"]
        ladder = [row for row in good if row["check"].removeprefix("concurrency.c").isdigit()]
        where = f"{profile}, {graphs} graphs"
        for row in ladder[:1] + ladder[1:][-1:]:
            count = max(one["concurrency"] for one in row["finding"]["repeats"])
            many = f"{count} streams" if count > 1 else "1 stream"
            yield f"{where}, {many}", f"{interval(row['finding']['headline']['output_rate'])} tok/s"
        yield from (
            (f"{where}, first token of a chat", first_token(row))
            for row in good
            if row["check"] == "performance.latency"
        )


def first_token(row: Row) -> str:
    """`222 ms (median of 5 streams)`; where it is not well above the client's own error, that is said."""
    quoted = row["finding"]["headline"]
    near = any(line.startswith("first_token") for line in quoted.get("unresolved", ()))
    count = sum(len(one["samples"]) for one in row["finding"]["repeats"])
    value = seconds(quoted["first_token_s_median"])
    return (
        f"{value} (median of {count} streams{'; near the error of the client' if near else ''})"
        if value != DASH
        else DASH
    )


def _needles(rows: Iterable[Row]) -> Iterator[tuple[str, str]]:
    for cells in needles(rows).rows:
        yield f"{cells[0]}, {cells[2]} tokens", f"{cells[1]}, first token {cells[7]}, end {cells[8]}"


def story(row: Row) -> str:
    """One row in a line: verdict first."""
    told = row["message"] or _figures(row)
    return f"{row['verdict']}: {told}" if told else str(row["verdict"])


def _figures(row: Row) -> str:
    data = row["finding"] or {}
    if "headline" in data and "repeats" in data:
        quoted = data["headline"]
        return f"{interval(quoted['output_rate'])} output tok/s, first token {seconds(quoted['first_token_s_median'])}"
    if "planned_tokens" in data:
        return f"{data['planned_tokens']:,} prompt tokens, end {seconds((data.get('timing') or {}).get('end_s'))}"
    return f"{len(data['comparisons'])} comparisons hold" if "comparisons" in data else ""
