"""The kernel's process table as plain data: who lives, who descends from whom, who carries which environment.

A process is a pid *and* its start time, so that a recycled pid is never taken for the process that had it before.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the table; `started` is in clock ticks since boot, `zombie` means ended but not yet reaped."""

    pid: int
    started: int
    parent: int
    group: int
    session: int
    zombie: bool

    @property
    def ident(self) -> str:
        """`pid:starttime`, which names this process for ever."""
        return f"{self.pid}:{self.started}"


def process(pid: int) -> Process | None:
    """The process of this pid now; None if there is none."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    words = text[text.rindex(")") + 2 :].split()
    return Process(pid, int(words[19]), int(words[1]), int(words[2]), int(words[3]), words[0] in "ZX")


def by_ident(ident: str) -> Process | None:
    """The process `pid:starttime` if it still lives and is the same one; a zombie does not live."""
    pid, _, started = ident.partition(":")
    found = process(int(pid)) if pid.isdigit() else None
    return found if found and str(found.started) == started and not found.zombie else None


def table() -> dict[int, Process]:
    """Every process that has not ended."""
    found = (process(int(name)) for name in os.listdir(PROC) if name.isdigit())
    return {entry.pid: entry for entry in found if entry and not entry.zombie}


def environment(pid: int) -> tuple[str, ...] | None:
    """The environment that the process was started with, `KEY=value` each; None if it may not or cannot be read."""
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    return tuple(entry.decode("utf-8", "surrogateescape") for entry in raw.split(b"\0") if entry)


def worked_s(pid: int) -> float | None:
    """Processor time of all its threads so far, in seconds; None if it cannot be read. The scheduler counts nanoseconds."""
    total, found = 0, False
    for path in (PROC / str(pid) / "task").glob("*/schedstat"):
        try:
            total, found = total + int(path.read_text(encoding="ascii").split()[0]), True
        except (OSError, ValueError, IndexError):
            continue
    return total / 1e9 if found else None


def command_line(pid: int) -> tuple[str, ...]:
    """argv of the process; empty if it cannot be read."""
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(word.decode("utf-8", "surrogateescape") for word in raw.split(b"\0")[:-1])


def title(pid: int) -> str:
    """How the process calls itself, as a person would know it: its pid and the start of its command line."""
    words = " ".join(word for word in command_line(pid) if word)
    return f"{pid} ({words[:60]})" if words else str(pid)


def age_s(entry: Process) -> float:
    """Seconds since the process was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - entry.started / _TICKS


def family(processes: Mapping[int, Process], roots: Iterable[Process]) -> set[Process]:
    """The roots that still live, with all their descendants."""
    found = {processes[root.pid] for root in roots if _same(processes.get(root.pid), root)}
    while True:
        pids = {entry.pid for entry in found}
        more = {entry for entry in processes.values() if entry.parent in pids} - found
        if not more:
            return found
        found |= more


def _same(now: Process | None, then: Process) -> bool:
    return now is not None and now.started == then.started


def send(target: Process, number: signal.Signals) -> None:
    """Signal exactly this process: the pid is held by a descriptor while its start time is compared. Gone is no error."""
    try:
        handle = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return
    try:
        if _same(process(target.pid), target):
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def started_at(entry: Process) -> str:
    """The moment of the start, as an ISO stamp of this machine's clock."""
    return datetime.fromtimestamp(time.time() - age_s(entry), UTC).isoformat(timespec="seconds")
