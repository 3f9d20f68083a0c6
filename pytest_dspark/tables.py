"""What a run says, as titled tables of text: pure functions from rows, for PACK.md and for every other report.

Rows of breakable and of regular graphs, and rows of different methods, never stand in one table. A figure without an
interval says so; what was not measured is a dash with its reason below, never 0. Standard library alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pytest_dspark.calibration import bound
from pytest_dspark.comparison import hold

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
    "CROSS_TALK": "the engine: one stream's text in another's answer",
    "LOSSY": "the engine: what chose the tokens was not the model",
    "DIVERGED": "the engine: its answers change with its load",
    "FABRIC_LOST": "the cable between the hosts",
    "HOST_UNREACHABLE": "a host, or the way to it",
    "NAME_TAKEN": "another run or another engine on a host",
    "PORT_TAKEN": "another program on a host",
    "LEFT_BEHIND": "a host on which something could not be stopped",
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

STAMP: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_ALIKE: Final = re.compile(r" equal to (?:rank 0|host-1)(?P<rest> but for .*)?$")
_IDENTITY: Final = ("gate.image", "gate.pins", "gate.labels", "gate.symmetry", "gate.model", "gate.weights")


def identity(rows: Iterable[Row]) -> Table:
    """What was pinned and what was found on every rank; `= pin` and `= rank 0` are equal to the byte, the rest is marked."""
    found: dict[tuple[str, str], dict[int, list[Mapping[str, Any]]]] = {}
    for row in of_tests(rows):
        for one in row["finding"]["comparisons"] if row["check"].startswith("gate.") and row["finding"] else ():
            if not hold(one) or (row["check"] in _IDENTITY and _is_short(one)):
                what = _ALIKE.sub("", one["what"])
                found.setdefault((row["profile"], what), {}).setdefault(_rank(one), []).append(one)
    ranks = sorted({rank for cells in found.values() for rank in cells})
    body = [(*key, _pin(cells), *(_rank_cell(cells, rank) for rank in ranks)) for key, cells in found.items()]
    header = ("profile", "what", "pin", *map(_rank_name, ranks))
    return Table("Identity, as read from what ran", header, tuple(body))


def _rank_name(rank: int) -> str:
    return "API" if rank < 0 else f"rank {rank} ({'worker' if rank else 'head'})"


def _symmetric(one: Mapping[str, Any]) -> bool:
    return _ALIKE.search(one["what"]) is not None


def _pin(cells: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """What was expected; of what ranks only share, that they do."""
    pinned = [one for told in cells.values() for one in told if not _symmetric(one)]
    if not pinned:
        return "not pinned; must equal rank 0"
    words = {"present": "something", "absent": "nothing"}
    told = [words.get(one["relation"], _cell(one["expected"])) for one in pinned]
    return " / ".join(dict.fromkeys(told))


def _rank_cell(cells: Mapping[int, Sequence[Mapping[str, Any]]], rank: int) -> str:
    told = cells.get(rank, ())
    if not told:
        shared = [one for others in cells.values() for one in others if _symmetric(one)]
        return _cell(shared[0]["expected"]) if rank == 0 and shared else DASH
    return " / ".join(dict.fromkeys(_found(one, rank) for one in told))


def _found(one: Mapping[str, Any], rank: int) -> str:
    if not hold(one):
        return f"DIFFERS: {_cell(one['found'])}"
    if _symmetric(one):
        return "= rank 0" if rank > 0 else _cell(one["found"])
    return "= pin" if one["relation"] == "equal" else _cell(one["found"])


def _rank(one: Mapping[str, Any]) -> int:
    return -1 if one["rank"] is None else int(one["rank"])


def _is_short(one: Mapping[str, Any]) -> bool:
    return all(isinstance(_alone(one[key]), (str, int, float, type(None))) for key in ("expected", "found"))


def _alone(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


# --- figures


def timed(rows: Iterable[Row]) -> list[Table]:
    """One table a profile, kind of graphs and method: rates with their 95 % interval by repeats, waits, the client's own error."""
    return [_timed(*key, found) for key, found in timed_groups(rows).items()]


def timed_groups(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Rows with repeats by profile, kind of graphs and method: what may stand in one table and in one drawing; the largest
    first."""
    rows = list(rows)
    graphs = graphs_of(rows)
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in of_tests(rows):
        if row["finding"] and "headline" in row["finding"] and "repeats" in row["finding"]:
            key = row["profile"], graphs.get(row["profile"], "unknown"), row["finding"]["method"]
            groups.setdefault(key, []).append(row)
    return dict(sorted(groups.items(), key=lambda one: -len(one[1])))


def _group(profile: str, graphs: str, method: str) -> str:
    return f"profile {profile}, {graphs} graphs, method {method}"


def graphs_of(rows: Iterable[Row]) -> dict[str, str]:
    """The kind of CUDA graphs of each profile (`regular`, `breakable`; of stock vLLM the mode), as asked on the command line
    that was found."""
    found: dict[str, str] = {}
    for row in of_tests(rows):
        if row["check"] == "gate.compilation" and row["finding"]:
            for one in row["finding"]["comparisons"]:
                asked = one["found"] if isinstance(one["found"], Mapping) else {}
                kind = asked.get("cudagraph_implementation") or asked.get("cudagraph_mode")
                if kind:
                    found.setdefault(row["profile"], str(kind))
    return found


_TIMED: Final = (
    *("check", "verdict", "in flight", "output tok/s (95 % interval)", "first token, median", "first token, p90"),
    *("TPOT, median", "decode tok/s, client", "decode tok/s, server", "accepted length", "repeats, streams"),
)


def _timed(profile: str, graphs: str, method: str, rows: Sequence[Row]) -> Table:
    title = f"Speed: {_group(profile, graphs, method)}"
    body = tuple(_timed_cells(row) for row in rows)
    notes = [
        f"{row['check']} is void or failed, its figures are no result: {_short(row['message'])}"
        for row in rows
        if row["verdict"] != "PASS"
    ]
    return Table(title, _TIMED, body, tuple(notes))


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
        f"{len(repeats)}, {sum(len(one['samples']) for one in repeats)}",
    )


_SPREADS: Final = (
    *("check", "streams", "first token: least, median, most", "client's own error", "gap, mean a stream: median"),
    *("longest gap", "client's own error of a gap", "not well above the client's own error"),
)


def spreads(rows: Iterable[Row]) -> list[Table]:
    """One table a profile, kind of graphs and method: waits and gaps over all streams beside the client's own error."""
    return [
        Table(f"Waits: {_group(*key)}", _SPREADS, tuple(_spread_cells(row) for row in found))
        for key, found in timed_groups(rows).items()
    ]


def _spread_cells(row: Row) -> tuple[str, ...]:
    data, quoted = row["finding"], row["finding"]["headline"]
    first = [stream["first_token_s"] for one in data["repeats"] for stream in one["samples"]]
    known = sorted(value for value in first if value is not None)
    error = data["calibration"]
    near = [line.partition(":")[0].removesuffix("_median") for line in quoted.get("unresolved", ())]
    return (
        row["check"],
        f"{len(first)}",
        ", ".join(map(seconds, (known[0], quoted["first_token_s_median"], known[-1]))) if known else DASH,
        f"± {seconds(bound(error['first_token_error_s']))}" if error else "not measured",
        seconds(quoted["mean_gap_s_median"]),
        seconds(quoted["longest_gap_s"]),
        f"± {seconds(2 * bound(error['stamp_error_s']))}" if error else "not measured",
        ", ".join(near) or "all are",
    )


def needle_grid(rows: Iterable[Row]) -> Table:
    """Length by position of the needle: verdict and seconds."""
    cells = [row for row in of_tests(rows) if row["check"].startswith("needle.") and row["finding"]]
    places = {row["check"]: _places(row) for row in cells}
    columns = sorted({place for found in places.values() for place in found})
    body = tuple(
        (
            f"{row['profile']}/{row['check']}: {row['finding']['planned_tokens']:,} tokens",
            *(_grid_cell(row) if place in places[row["check"]] else DASH for place in columns),
        )
        for row in cells
    )
    header = ("length", *(f"needle at {place:.0%}" if place >= 0 else "not built" for place in columns))
    return Table("Needle grid: length and position", header, body)


def _places(row: Row) -> list[float]:
    return [float(one["share"]) for one in row["finding"].get("needles") or ()] or [-1.0]


def _grid_cell(row: Row) -> str:
    times = row["finding"].get("timing") or {}
    took = (
        seconds(times["end_s"])
        if times.get("end_s") is not None
        else "not sent"
        if not row["finding"].get("sent")
        else ""
    )
    return f"{row['verdict']}{f', {took}' if took else ''}"


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


def session(rows: Iterable[Row]) -> Table:
    """When each lane ran, and what of it did not pass."""
    lanes: dict[tuple[str, str], list[Row]] = {}
    known = placed(rows)
    for row in known:
        lanes.setdefault((row["profile"], row["lane"]), []).append(row)
    begin = min((moment(row["started"]) for row in known), default=0.0)
    body = []
    for key, found in lanes.items():
        starts = [moment(row["started"]) for row in found]
        end = max(at + row["elapsed_s"] for at, row in zip(starts, found, strict=True))
        bad = [f"{row['check']} {row['verdict']}" for row in found if row["verdict"] not in ("PASS", "NOT_IMPLEMENTED")]
        body.append(
            (*key, seconds(min(starts) - begin), seconds(end - begin), str(len(found)), ", ".join(bad) or "nothing")
        )
    return Table("Timeline", ("profile", "lane", "began after", "ended after", "rows", "did not pass"), tuple(body))


def placed(rows: Iterable[Row]) -> list[Row]:
    """The rows that this run measured itself, and that say when: what belongs on its axis of time."""
    mine = [row for row in of_tests(rows) if row.get("measured_in") == row.get("run")]
    return [row for row in mine if STAMP.fullmatch(row["started"])]


def moment(stamp: str) -> float:
    """A stamp of a row as seconds, to place rows beside each other; durations never come from it."""
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def hosts(run: Mapping[str, Any]) -> Table:
    """Memory and heat of every host while an engine was up; what could not be read has its reason."""
    body = [
        (
            mark,
            host,
            str(one["readings"]),
            f"{one['least_free_memory_gib']:g} GiB" if one["least_free_memory_gib"] is not None else "not read",
            f"{one['most_temperature_c']:g} °C" if one["most_temperature_c"] is not None else "not read",
            _short("; ".join(one.get("unreadable") or ())) or DASH,
        )
        for mark, profile in run["profiles"].items()
        for host, one in (profile.get("hosts") or {}).items()
    ]
    header = ("profile", "host", "readings", "least free memory", "highest temperature", "what could not be read")
    return Table("Hosts while the engine was up", header, tuple(body))


def parts(rows: Iterable[Row]) -> Table:
    """Single questions of a check: how many have which verdict."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        if row.get("part") is not None:
            counts.setdefault((row["profile"], row["check"]), Counter())[row["verdict"]] += 1
    body = [(*key, str(sum(found.values())), _counted(found)) for key, found in counts.items()]
    return Table("Single questions", ("profile", "check", "questions", "verdicts"), tuple(body))


def _counted(found: Mapping[str, int]) -> str:
    return ", ".join(f"{found[name]} {name}" for name in VERDICTS if found.get(name))


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
        *(
            not_passed(rows),
            *timed(rows),
            *spreads(rows),
            needle_grid(rows),
            needles(rows),
            launches(rows),
            session(rows),
        ),
        *(identity(rows), not_seen(rows), not_available(rows), parts(rows), all_rows(rows)),
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
    value = _alone(value)
    return DASH if value is None else _short(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


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
