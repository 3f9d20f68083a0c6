"""What the table decides. Pure: rows in, sentences and an exit code out.

0: ours is at least as true as the best peer of this run and inside every bound. 1: it is not. 2: not all was measured, or a
row that must decide is inconclusive. A failure outweighs what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.figures import Row
from benchmarks.scenarios import Level

OURS, REFERENCE = "ours", "reference"
LATE_MS = 0.5  # a server later than this at p99 kept no schedule
TOLERANCE = 0.0  # how much worse than the best peer ours may be
DIGITS = 2  # errors are compared as they are printed: 0.01 ms
CPU_RATIO = 1.5
MEMORY_MB = 220.0
COMPARED = {
    "ttft_ms": "TTFT error",
    "ttft_p99_ms": "TTFT p99 error",
    "answer_ms": "first-answer error",
    "tpot_ms": "TPOT error",
}
COMPARED |= {"tokens": "token count error"}

Rows = Mapping[Level, Mapping[str, Row | str]]  # by client; a text says why there is no row


@dataclass(frozen=True, slots=True)
class Verdict:
    failures: tuple[str, ...]
    open: tuple[str, ...]

    @property
    def code(self) -> int:
        return 1 if self.failures else 2 if self.open else 0


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit of ours at one level: what, the figure's name, and its largest absolute value."""

    says: str
    name: str
    limit: float


def judge(rows: Rows, *, levels: Sequence[Level], clients: Sequence[str]) -> Verdict:
    """All that the run decides. `levels` and `clients` are those of a whole run; what has no row leaves it open."""
    failures: list[str] = []
    left_open = absent(rows, levels, clients)
    for level, found in rows.items():
        left_open += [f"{level.name}: {client}: {why}" for client, row in found.items() if (why := unfit(row))]
        fit = {client: row for client, row in found.items() if isinstance(row, Row) and not unfit(row)}
        if OURS in fit:
            failures += [f"{level.name}: {text}" for text in failed(level, fit)]
            left_open += [
                f"{level.name}: ours: no {bound.says}" for bound in bounds(level) if _silent(fit[OURS], bound)
            ]
    failures += growth(rows)
    return Verdict(tuple(failures), tuple(left_open))


def absent(rows: Rows, levels: Sequence[Level], clients: Sequence[str]) -> list[str]:
    """What a whole run has and this one has not."""
    found = []
    for client in clients:
        lacking = [level.name for level in levels if client not in rows.get(level, {})]
        if lacking:
            found.append(f"not run: {client} at {', '.join(lacking)}")
    return found


def unfit(row: Row | str) -> str:
    """Why a row decides nothing; empty if it decides."""
    if isinstance(row, str):
        return row
    late = row.lateness_p99_ms
    if late is None or late > LATE_MS:
        return f"inconclusive: the server was late by {'?' if late is None else f'{late:.2f}'} ms at p99"
    return ""


def failed(level: Level, fit: Mapping[str, Row]) -> list[str]:
    """What is wrong with ours at one level."""
    ours, found = fit[OURS], []
    for name, says in COMPARED.items():
        best = best_peer(fit, name)
        mine = size(ours, name)
        if best is not None and (mine is None or mine > best[1] + TOLERANCE):
            found.append(f"{says} {_number(mine)} is worse than {best[0]}'s {best[1]:.{DIGITS}f}")
    for bound in bounds(level):
        mine = size(ours, bound.name)
        if mine is not None and mine > bound.limit:
            found.append(f"{bound.says} {mine:.{DIGITS}f} is over {bound.limit:g}")
    floor = fit[REFERENCE].cpu_s if REFERENCE in fit else None
    if floor and ours.cpu_s is not None and ours.cpu_s > CPU_RATIO * floor:
        found.append(f"{ours.cpu_s:.3f} CPU s per 1,000 events are over {CPU_RATIO:g} x the reference's {floor:.3f}")
    return found


def best_peer(fit: Mapping[str, Row], name: str) -> tuple[str, float] | None:
    """The peer with the smallest absolute error, of those that tell it."""
    sizes = [(client, size(row, name)) for client, row in fit.items() if client not in (OURS, REFERENCE)]
    told = [(client, value) for client, value in sizes if value is not None]
    return min(told, key=lambda one: one[1]) if told else None


def size(row: Row, name: str) -> float | None:
    """A figure without its sign, as it is printed."""
    value: float | None = getattr(row, name)
    return None if value is None else round(abs(value), DIGITS)


def bounds(level: Level) -> list[Bound]:
    """The limits of ours at this level."""
    wide = level.concurrency > 64
    found = [Bound("TTFT error in ms", "ttft_ms", 5.0 if wide else 1.0)]
    if level.concurrency <= 16:
        found.append(Bound("p99 stamp error in ms", "stamp_p99_ms", 1.0))
    if wide:
        found += [
            Bound("p99 stamp error in ms", "stamp_p99_ms", 10.0),
            Bound("peak memory in MB", "peak_mb", MEMORY_MB),
        ]
    return found


def growth(rows: Rows) -> list[str]:
    """Our cost per event must not rise from C16 to C256 of scenario A."""
    ratio = grown(rows, OURS)
    return [f"cost per event rises by {ratio:.2f} from A C16 to A C256"] if ratio is not None and ratio > 1 else []


def grown(rows: Rows, client: str) -> float | None:
    """CPU per event at A C256 over that at A C16; None where one of them decides nothing."""
    costs = [_cost(rows, client, 256), _cost(rows, client, 16)]
    return costs[0] / costs[1] if costs[0] is not None and costs[1] else None


def _cost(rows: Rows, client: str, concurrency: int) -> float | None:
    for level, found in rows.items():
        row = found.get(client)
        if (level.scenario.name, level.concurrency) == ("A", concurrency) and isinstance(row, Row) and not unfit(row):
            return row.cpu_s
    return None


def _silent(row: Row, bound: Bound) -> bool:
    return getattr(row, bound.name) is None


def _number(value: float | None) -> str:
    return "(not told)" if value is None else f"{value:.{DIGITS}f}"
