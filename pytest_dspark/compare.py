"""`dspark compare A B`: is B slower than A? Of one method and one class only, and with an interval by repeats.

What would this say if nothing worked? Rows that are not both measured and valid are not compared, and then the answer is
not "no regression". Every verdict is judged again and every figure is made again from the streams. Standard library alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from pytest_dspark import tables, welch
from pytest_dspark.calibration import CLEARLY_ABOVE, bound
from pytest_dspark.differing import Change, differences
from pytest_dspark.load import cache_state, decode_rate, output_rate
from pytest_dspark.pack import SHAPE, Pack, judged
from pytest_dspark.tables import DASH, Row

LIMIT: Final = 2.5
"""Percent: a smaller slowdown is no regression."""
ALPHA: Final = 0.025
"""The chance of any false alarm in a whole comparison, one-sided: what is outside a 95 % interval on the worse side."""
LEAST_BLIND: Final = 5.0
"""Percent: where a slowdown of twice the limit, and of at least this, cannot be excluded, nothing is decided."""
WIDEST: Final = 64
_ALIKE: Final = ("method", "arrivals", "tokens", "prompt_class", "reader")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of one row in both packs: means, the change of B against A with its interval, and what follows.

    `worse` is the change in the direction that is worse (a share above 0 is worse). `said` is one of `slower`, `faster`,
    `no difference seen`, `cannot tell`. `decides` figures make the exit code.
    """

    check: str
    name: str
    was: float
    now: float
    repeats: tuple[int, int]
    found: welch.Change
    worse: float
    said: str
    decides: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a comparison says. `refused` stands against comparing at all, `left` names rows that were not compared."""

    was: str
    now: str
    limit: float
    refused: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    left: tuple[tuple[str, str], ...] = ()
    identity: tuple[Change, ...] = ()
    of: str = ""

    @property
    def slower(self) -> tuple[Figure, ...]:
        return tuple(one for one in self.figures if one.decides and one.said == "slower")

    @property
    def unclear(self) -> tuple[Figure, ...]:
        return tuple(one for one in self.figures if one.decides and one.said == "cannot tell")

    @property
    def exit_code(self) -> int:
        """0 no regression beyond the limit, 1 a regression, 2 refused, or nothing that can be decided."""
        if self.refused or not self.figures:
            return 2
        return 1 if self.slower else 2 if self.unclear or self.left else 0

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        if self.refused:
            return f"REFUSED: {self.refused[0]}"
        if self.slower:
            worst = max(self.slower, key=lambda one: one.worse)
            return f"REGRESSION beyond {self.limit:g} %: {worst.check}, {worst.name} {percent(worst)}"
        if self.exit_code == 2:
            count = len({one.check for one in self.unclear} | {check for check, _ in self.left})
            return (
                f"DECIDES NOTHING: {count} rows could not be compared or are too noisy, and no other shows a regression"
            )
        return f"no regression beyond {self.limit:g} %"


def compare(was: Pack, now: Pack, *, limit: float = LIMIT, only: Sequence[str] = ()) -> Answer:
    """Compare two packs. `limit` in percent; `only` are shell patterns of check names."""
    names = str(was.run["run"]), str(now.run["run"])
    refused = [*_class(was, now)]
    if refused:
        return Answer(*names, limit, tuple(refused))
    old, new = _timed(was, only), _timed(now, only)
    pairs = [(key, old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new])]
    left = [(_name(key), why) for key, mine, theirs in pairs if (why := _against((was, mine), (now, theirs)))]
    hard = [f"{name}: {why}" for name, why in left if why.startswith("differs:")]
    taken = [(mine, theirs) for key, mine, theirs in pairs if mine and theirs and _name(key) not in dict(left)]
    if hard or not taken:
        reasons = hard or [f"no row can be compared: {'; '.join(': '.join(one) for one in left[:3]) or 'no timed row'}"]
        return Answer(*names, limit, tuple(reasons), left=tuple(left), identity=tuple(differences(was, now)))
    figures = [figure for mine, theirs in taken for figure in _figures(mine, theirs)]
    return Answer(
        *names,
        limit,
        figures=tuple(_decided(figures, limit)),
        left=tuple(left),
        identity=tuple(differences(was, now)),
        of=", ".join(f"{mark}: {_graphs(was)[mark]} graphs" for mark in was.profiles if mark in now.profiles),
    )


def _name(key: tuple[str, str]) -> str:
    return "/".join(key)


# --- what may be compared


def _class(was: Pack, now: Pack) -> Iterator[str]:
    """Why the packs are not of one class."""
    if was.recipe.rehearsal != now.recipe.rehearsal:
        yield "one is a rehearsal, which says nothing of an engine"
    if bool(was.run["endpoint"]) != bool(now.run["endpoint"]):
        yield "of one nothing proves what answered (--dspark-endpoint)"
    marks = [mark for mark in was.profiles if mark in now.profiles]
    if not marks:
        yield f"no profile in common: A is of {_marks(was)}, B of {_marks(now)}"
    for mark in marks:
        yield from _one_class(was, now, mark)


def _marks(pack: Pack) -> str:
    graphs = _graphs(pack)
    return ", ".join(f"{mark} ({graphs[mark]} graphs)" for mark in pack.profiles)


def _graphs(pack: Pack) -> dict[str, str]:
    found = tables.graphs_of(pack.rows)
    return {mark: found.get(mark, "unknown") for mark in pack.profiles}


def _one_class(was: Pack, now: Pack, mark: str) -> Iterator[str]:
    pairs = {
        "kind of CUDA graphs": (_graphs(was)[mark], _graphs(now)[mark]),
        "number of ranks": (len(was.plans[mark]["ranks"]), len(now.plans[mark]["ranks"])),
        "model": tuple(one.settings[mark].texts.get("SERVED_MODEL_NAME") for one in (was, now)),
    }
    for name, (mine, theirs) in pairs.items():
        if mine != theirs:
            yield f"{mark}: the {name} differs: A {mine}, B {theirs}"


def _timed(pack: Pack, only: Sequence[str]) -> dict[tuple[str, str], tuple[Row, Mapping[str, Any]]]:
    """Rows of timed lanes that were meant to be measured, with the settings of their lane but for the knobs."""
    found: dict[tuple[str, str], tuple[Row, Mapping[str, Any]]] = {}
    for row in pack.tests:
        wanted = not only or any(fnmatchcase(row["check"], pattern) for pattern in only)
        timed = row["lane"] in ("concurrency", "performance") and row["check"] != "performance.canary"
        if wanted and timed and row["verdict"] != "NOT_IMPLEMENTED":
            settings = pack.lane(row["profile"], row["lane"])
            found[row["profile"], row["check"]] = row, {key: settings[key] for key in settings if key != "knobs"}
    return found


_Side = tuple[Pack, tuple[Row, Mapping[str, Any]] | None]


def _against(was: _Side, now: _Side) -> str:
    """Why a row is not compared; `differs:` first where the two were not measured alike."""
    if was[1] is None or now[1] is None:
        return f"was not measured in {'A' if was[1] is None else 'B'}"
    mine, theirs = was[1][0]["finding"], now[1][0]["finding"]
    if mine and theirs and all("repeats" in one and "headline" in one for one in (mine, theirs)):
        unlike = _unlike(mine, theirs) or _unlike_settings(was[1][1], now[1][1])
        if unlike:
            return f"differs: {unlike}"
    return _invalid("A", was[0], was[1][0]) or _invalid("B", now[0], now[1][0])


def _unlike(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    for key in _ALIKE:
        if mine[key] != theirs[key]:
            return f"{key.replace('_', ' ')} is {mine[key]} in A and {theirs[key]} in B"
    states = [sorted({cache_state(one) for one in side["repeats"]}) for side in (mine, theirs)]
    if states[0] != states[1]:
        return f"the prompt cache is {'/'.join(states[0])} in A and {'/'.join(states[1])} in B"
    missing = [name for name, side in (("A", mine), ("B", theirs)) if not side["calibration"]]
    return f"the client was not calibrated in {' and '.join(missing)}" if missing else ""


def _unlike_settings(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    keys = sorted(key for key in mine.keys() | theirs.keys() if key != "repeats" and mine.get(key) != theirs.get(key))
    return f"setting {keys[0]} is {mine.get(keys[0])} in A and {theirs.get(keys[0])} in B" if keys else ""


def _invalid(name: str, pack: Pack, row: Row) -> str:
    """Why the row of one pack is no result, judged now."""
    try:
        verdict = judged(pack, row)
    except SHAPE as error:
        return f"the finding of {name} cannot be judged: {error}"
    if verdict is None or str(verdict.status) != "PASS":
        told = row["message"] if verdict is None else verdict.message
        return f"{row['verdict']} in {name}: {told}"
    return ""


# --- figures


def _first_token(one: Mapping[str, Any]) -> float | None:
    values = [stream["first_token_s"] for stream in one["samples"]]
    return statistics.median(values) if values and all(value is not None for value in values) else None


_MADE: Final[tuple[tuple[str, Callable[[Mapping[str, Any]], float | None], bool], ...]] = (
    ("output tok/s", lambda one: output_rate(one["samples"]), True),
    ("decode tok/s of a stream", lambda one: decode_rate(one["samples"]), True),
    ("first token, s", _first_token, False),
)


def _figures(was: tuple[Row, Any], now: tuple[Row, Any]) -> Iterator[Figure]:
    """The figures of a row. Arrivals at stated times hold the output rate up, so there the decode rate decides."""
    mine, theirs = was[0]["finding"], now[0]["finding"]
    opened = any(stream["due_s"] for one in mine["repeats"] for stream in one["samples"])
    for name, made, higher in _MADE:
        sides = [[made(one) for one in side["repeats"]] for side in (mine, theirs)]
        values = [[value for value in side if value is not None] for side in sides]
        if any(len(value) < len(side) for value, side in zip(values, sides, strict=True)):
            continue
        found = welch.change(*values)
        note = "" if higher else _near_error(mine, theirs, [statistics.fmean(value) for value in values])
        decides = not note and name != ("output tok/s" if opened else "decode tok/s of a stream")
        yield Figure(
            f"{was[0]['profile']}/{was[0]['check']}",
            name,
            statistics.geometric_mean(values[0]),
            statistics.geometric_mean(values[1]),
            (len(values[0]), len(values[1])),
            found,
            -found.change if higher else found.change,
            "",
            decides,
            note,
        )


def _near_error(mine: Mapping[str, Any], theirs: Mapping[str, Any], means: Sequence[float]) -> str:
    errors = [bound(side["calibration"]["first_token_error_s"]) for side in (mine, theirs)]
    near = any(value < CLEARLY_ABOVE * error for value, error in zip(means, errors, strict=True))
    return "not well above the client's own error" if near else ""


def _decided(figures: Sequence[Figure], limit: float) -> Iterator[Figure]:
    """What each figure says. p values are adjusted over all that decide."""
    from dataclasses import replace

    chances = {id(one): _p_worse(one) for one in figures if one.decides}
    adjusted = dict(zip(chances, welch.holm(list(chances.values())), strict=True))
    for one in figures:
        yield replace(one, said=_said(one, adjusted.get(id(one), 1.0), limit))


def _higher(one: Figure) -> bool:
    return one.name != "first token, s"


def _p_worse(one: Figure) -> float:
    return one.found.p_lower if _higher(one) else one.found.p_higher


def _said(one: Figure, p: float, limit: float) -> str:
    low, high = (one.found.low, one.found.high) if _higher(one) else (-one.found.high, -one.found.low)
    if one.decides and p < ALPHA and one.worse * 100 > limit:
        return "slower"
    if _higher(one) and low * 100 < -max(2 * limit, LEAST_BLIND):
        return "cannot tell"
    if low > 0:
        return "faster"
    return "slower, within the limit" if high < 0 and one.worse * 100 <= limit else "no difference seen"


# --- as text


def percent(one: Figure) -> str:
    """`-5.1 % (-6.0 to -4.2)`."""
    return f"{one.found.change:+.1%} ({one.found.low:+.1%} to {one.found.high:+.1%})".replace("%", " %")


def as_tables(answer: Answer) -> list[tables.Table]:
    """The comparison for people."""
    rows = tuple(
        (
            one.check,
            one.name,
            _value(one.was),
            _value(one.now),
            percent(one),
            "{} / {}".format(*one.repeats),
            _word(one),
        )
        for one in answer.figures
    )
    header = ("row", "figure", "A", "B", "change (95 % interval)", "repeats A / B", "says")
    notes = (
        f"a regression: slower by more than {answer.limit:g} %, at {1 - ALPHA:.1%} over all figures that decide (Holm)",
        f"cannot tell: a slowdown of {max(2 * answer.limit, LEAST_BLIND):g} % is not excluded",
    )
    return [
        table
        for table in (
            tables.Table("Figures", header, rows, notes),
            tables.Table("Not compared", ("row", "why"), answer.left),
            tables.Table(
                "What runs differently", ("what", "A", "B"), tuple((c.what, c.was, c.now) for c in answer.identity)
            ),
        )
        if table.rows
    ]


def _word(one: Figure) -> str:
    return f"{one.said}{'' if one.decides else ' (does not decide' + (f': {one.note}' if one.note else '') + ')'}"


def _value(value: float) -> str:
    return f"{value:,.4g}" if value else DASH


def text(answer: Answer) -> str:
    """The comparison for a terminal: the answer is the last line."""
    parts = [f"A: run {answer.was}", f"B: run {answer.now}"]
    parts += [f"class: {answer.of}"] if answer.of else []
    for table in as_tables(answer):
        parts += ["", table.title, *_columns(table), *(f"  {note}" for note in table.notes)]
    if not answer.identity and not answer.refused:
        parts += ["", "nothing of what runs differs"]
    parts += ["", *(f"refused: {why}" for why in answer.refused[1:]), answer.sentence]
    return "\n".join(parts)


def _columns(table: tables.Table) -> Iterator[str]:
    """Aligned columns; long cells are cut."""
    lines = [
        [cell if len(cell) <= WIDEST else f"{cell[: WIDEST - 1]}…" for cell in line]
        for line in (table.header, *table.rows)
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
