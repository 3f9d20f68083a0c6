"""What a run says, as titled tables of text: pure functions from rows, for PACK.md and for every other report.

Rows of breakable and of regular graphs, and rows of different methods, never stand in one table. A figure without an
interval says so; what was not measured is a dash with its reason below, never 0. Standard library alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Row = Mapping[str, Any]
VERDICTS: Final = ("PASS", "FAIL", "TOKEN_LIMIT", "ERROR", "CAPACITY", "BLOCKED", "NOT_IMPLEMENTED")
DASH: Final = "–"
SHORT: Final = 300
ESCAPED: Final = "\\`*_[]<>|!"
FAULTS: Final[Mapping[str, str]] = {
    "FAIL": "model or engine",
    "TOKEN_LIMIT": "the budget of the check, or a model that does not stop",
    "CAPACITY": "memory of the engine",
    "BLOCKED": "the first cause",
    "NOT_IMPLEMENTED": "nobody: not available here",
    "ERROR": "infrastructure",
}
FAULT_OF_CODE: Final[Mapping[str, str]] = {
    "HARNESS": "pytest-dspark",
    "RECIPE_INVALID": "the recipe",
    "FOREIGN_TRAFFIC": "another client of the engine",
    "CACHE_WARM": "another client, or a shared prefix",
    "GATE_FAILED": "the engine that runs is not the one that was asked for",
    "DRIFT": "the hosts: clocks, heat or other load",
    "INFRA_RISK": "the hosts: memory or heat",
    "CANCELLED": "whoever interrupted the run",
    "LIMIT_EXCEEDED": "the engine, by a limit that the recipe states",
}


@dataclass(frozen=True, slots=True)
class Table:
    """A title, a header, rows of as many cells, and sentences that belong below."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def of_tests(rows: Iterable[Row]) -> list[Row]:
    """The rows of whole tests, without those of single questions."""
    return [row for row in rows if row.get("part") is None]


def fault_of(row: Row) -> str:
    """Whose fault a row is that did not pass."""
    return FAULT_OF_CODE.get(row.get("code") or "", FAULTS.get(row["verdict"], DASH))


# --- verdicts


def verdicts(rows: Iterable[Row]) -> Table:
    """How many rows of each lane have which verdict."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for row in of_tests(rows):
        counts.setdefault((row["profile"], row["lane"]), Counter())[row["verdict"]] += 1
    body = [(*key, *(str(found[name]) if found[name] else DASH for name in VERDICTS)) for key, found in counts.items()]
    return Table("Verdicts", ("profile", "lane", *VERDICTS), tuple(body))


def not_passed(rows: Iterable[Row]) -> Table:
    """What failed, and whose fault it was."""
    bad = [row for row in of_tests(rows) if row["verdict"] not in ("PASS", "NOT_IMPLEMENTED")]
    body = [
        (f"{row['profile']}/{row['check']}", row["verdict"], row["code"] or DASH, fault_of(row), _short(row["message"]))
        for row in bad
    ]
    return Table(
        "What did not pass, and whose fault it was", ("check", "verdict", "code", "fault", "what"), tuple(body)
    )


def not_available(rows: Iterable[Row]) -> Table:
    """What the recipe names and could not run or be seen here."""
    rows = [row for row in of_tests(rows) if row["verdict"] == "NOT_IMPLEMENTED"]
    body = [(f"{row['profile']}/{row['check']}", _short(row["message"])) for row in rows]
    return Table("Not available here (NOT_IMPLEMENTED)", ("check", "why"), tuple(body))


def not_seen(rows: Iterable[Row]) -> Table:
    """What checks that passed could not see, or recorded without judging it."""
    rows = [row for row in of_tests(rows) if row["verdict"] == "PASS" and row["message"]]
    body = [(f"{row['profile']}/{row['check']}", _short(row["message"])) for row in rows]
    return Table("Passed, with something that could not be seen", ("check", "what"), tuple(body))


# --- identity


def identity(rows: Iterable[Row]) -> Table:
    """What was expected of every rank, and what was found: image, labels, pins, packages, kernel and driver."""
    found: dict[tuple[str, str], dict[int, tuple[str, str]]] = {}
    for row in of_tests(rows):
        if row["check"] in ("gate.image", "gate.pins", "gate.symmetry", "gate.model") and row["finding"]:
            for one in row["finding"]["comparisons"]:
                if _is_short(one):
                    cells = _cell(one["expected"]), _cell(one["found"])
                    found.setdefault((row["profile"], one["what"]), {})[_rank(one)] = cells
    ranks = sorted({rank for cells in found.values() for rank in cells})
    body = [
        (*key, next(iter(cells.values()))[0], *(cells[rank][1] if rank in cells else DASH for rank in ranks))
        for key, cells in found.items()
    ]
    header = ("profile", "what", "expected", *(f"rank {rank}" if rank >= 0 else "API" for rank in ranks))
    return Table("Identity, as read from what ran", header, tuple(body))


def _rank(one: Mapping[str, Any]) -> int:
    return -1 if one["rank"] is None else int(one["rank"])


def _is_short(one: Mapping[str, Any]) -> bool:
    return all(isinstance(one[key], (str, int, float, type(None))) for key in ("expected", "found"))


# --- figures


def timed(rows: Iterable[Row]) -> list[Table]:
    """One table a profile, kind of graphs and method: rates with their 95 % interval by repeats, waits, the client's own error."""
    graphs = graphs_of(rows)
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in of_tests(rows):
        if row["finding"] and "headline" in row["finding"] and "repeats" in row["finding"]:
            key = row["profile"], graphs.get(row["profile"], "unknown"), row["finding"]["method"]
            groups.setdefault(key, []).append(row)
    return [_timed(*key, found) for key, found in groups.items()]


def graphs_of(rows: Iterable[Row]) -> dict[str, str]:
    """The kind of CUDA graphs of each profile (`regular`, `breakable`), as asked on the command line that was found."""
    found: dict[str, str] = {}
    for row in of_tests(rows):
        if row["check"] == "gate.compilation" and row["finding"]:
            for one in row["finding"]["comparisons"]:
                kind = one["found"].get("cudagraph_implementation") if isinstance(one["found"], Mapping) else None
                if kind:
                    found.setdefault(row["profile"], str(kind))
    return found


_TIMED: Final = (
    *("check", "verdict", "in flight", "output tok/s (95 % interval)", "first token, median", "first token, p90"),
    *("TPOT, median", "decode tok/s, client", "decode tok/s, server", "accepted length", "repeats", "streams"),
)


def _timed(profile: str, graphs: str, method: str, rows: Sequence[Row]) -> Table:
    title = f"Speed: profile {profile}, {graphs} graphs, method {method}"
    body = tuple(_timed_cells(row) for row in rows)
    notes = [note for row in rows if (note := _unresolved(row))]
    notes += [
        f"{row['check']} is void or failed, its figures are no result: {_short(row['message'])}"
        for row in rows
        if row["verdict"] != "PASS"
    ]
    return Table(title, _TIMED, body, tuple(notes))


def _unresolved(row: Row) -> str:
    """Which figures of the row are not well above the client's own error; the row has both numbers."""
    names = [line.partition(":")[0] for line in row["finding"]["headline"].get("unresolved", ())]
    return f"{row['check']}: not well above the client's own error: {', '.join(names)}" if names else ""


def _timed_cells(row: Row) -> tuple[str, ...]:
    data, quoted = row["finding"], row["finding"]["headline"]
    repeats = data["repeats"]
    return (
        row["check"],
        row["verdict"],
        str(max((one["concurrency"] for one in repeats), default=0)),
        interval(quoted["output_rate"]),
        seconds(quoted["first_token_s_median"]),
        seconds(quoted["percentiles"]["first_token_s"].get("p90")),
        seconds(quoted["tpot_s_median"]),
        interval(quoted["decode"]["client"]),
        interval(quoted["decode"]["server"]),
        _number(quoted["speculation"]["accepted_length"], 2),
        str(len(repeats)),
        str(sum(len(one["samples"]) for one in repeats)),
    )


def needles(rows: Iterable[Row]) -> Table:
    """The needle lane: how large, whether it fitted, whether it was found, how long it took."""
    cells = [row for row in of_tests(rows) if row["check"].startswith("needle.") and row["finding"]]
    body = tuple(_needle_cells(row) for row in cells)
    header = ("cell", "verdict", "prompt tokens", "window", "KV pool, tokens", "by", "cache", "first token", "end")
    small = [
        row for row in cells if (row["finding"]["pool_tokens"] or row["finding"]["window"]) < row["finding"]["window"]
    ]
    notes = tuple(f"{row['check']}: the pool holds fewer tokens than the window that is advertised" for row in small)
    return Table("Needle in a haystack", header, body, notes)


def _needle_cells(row: Row) -> tuple[str, ...]:
    data, times = row["finding"], row["finding"].get("timing") or {}
    return (
        f"{row['profile']}/{row['check']}",
        row["verdict"],
        f"{data['planned_tokens']:,}",
        f"{data['window']:,}",
        DASH if data["pool_tokens"] is None else f"{data['pool_tokens']:,}",
        data["pool_source"],
        (data.get("cache") or {}).get("state", DASH),
        seconds(times.get("first_token_s")),
        seconds(times.get("end_s")),
    )


def launches(rows: Iterable[Row]) -> Table:
    """How long each phase of the launch took."""
    body = [
        (row["profile"], one["phase"], "done" if one["ok"] else "failed", seconds(one["elapsed_s"]))
        for row in of_tests(rows)
        if row["check"] == "launch" and row["finding"]
        for one in row["finding"]["phases"]
    ]
    return Table("Launch", ("profile", "phase", "", "took"), tuple(body))


def all_rows(rows: Iterable[Row]) -> Table:
    """Every row."""
    body = [
        (
            row["profile"],
            row["check"],
            row["verdict"],
            row["code"] or DASH,
            str(row["attempt"]),
            seconds(row["elapsed_s"]),
        )
        for row in of_tests(rows)
    ]
    return Table("Every row", ("profile", "check", "verdict", "code", "attempt", "took"), tuple(body))


def every(rows: Sequence[Row]) -> list[Table]:
    """All tables that have a row, in the order in which a reader asks."""
    tables = [
        *(not_passed(rows), *timed(rows), needles(rows), launches(rows), identity(rows)),
        *(not_seen(rows), not_available(rows), all_rows(rows)),
    ]
    return [table for table in tables if table.rows]


# --- cells


def interval(found: Mapping[str, Any]) -> str:
    """`12.3 (11.9 – 12.7)`, or the mean alone with "no interval"."""
    if found["mean"] is None:
        return DASH
    if found["low"] is None:
        return f"{_number(found['mean'], 1)} (no interval)"
    return f"{_number(found['mean'], 1)} ({_number(found['low'], 1)} – {_number(found['high'], 1)})"


def seconds(value: float | None) -> str:
    """A time in the unit in which it is read."""
    if value is None:
        return DASH
    if value < 0.9995:
        return f"{value * 1000:.3g} ms"
    return f"{value:.1f} s" if value < 120 else f"{int(value // 60):,} min {value % 60:.0f} s"


def _number(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"


def _cell(value: Any) -> str:
    return DASH if value is None else _short(str(value))


def _short(text: str) -> str:
    return text if len(text) <= SHORT else f"{text[:SHORT]}…"


# --- as Markdown


def markdown(table: Table) -> Iterator[str]:
    """Lines of GitHub's Markdown; cells cannot break out of their place."""
    yield f"## {table.title}"
    yield ""
    yield f"| {' | '.join(table.header)} |"
    yield f"|{'---|' * len(table.header)}"
    for row in table.rows:
        yield f"| {' | '.join(map(escaped, row))} |"
    yield ""
    for note in table.notes:
        yield f"- {escaped(note)}"
    if table.notes:
        yield ""


def escaped(text: str) -> str:
    """Text of a stranger (a model's answer, a log line) that neither ends a cell nor becomes a link, an image or HTML."""
    for char in ESCAPED:
        text = text.replace(char, f"\\{char}")
    return " ".join(text.split())


def unescaped(text: str) -> str:
    """The text as a reader of the page sees it."""
    return re.sub(rf"\\([{re.escape(ESCAPED)}])", r"\1", text)
