"""A client's processor time and memory, seen from outside: one child with all that it starts. Linux.

Processor time is read every 10 ms from each process' own clock, to the nanosecond, and the child's total from wait4 at its
end, so that what was spent before its first request is known and can be left out. Memory is read every 50 ms.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
TICK_S = 0.01
LOOK_EVERY = 5  # ticks between two looks at memory and for new processes
BUSY_CLOCK = 2  # CPUCLOCK_SCHED: what a process' own threads have run


@dataclass(frozen=True, slots=True)
class Usage:
    """One child from start to end. `cpu` are (monotonic moment, processor seconds until then), rising; `peak_mb` of the tree."""

    status: int
    cpu: tuple[tuple[float, float], ...]
    peak_mb: float
    processes: int

    @property
    def total_s(self) -> float:
        return self.cpu[-1][1]

    def since(self, moment: float) -> float:
        """Processor seconds from the moment to the end; between two readings by a straight line."""
        return self.total_s - at(self.cpu, moment)


def at(readings: Sequence[tuple[float, float]], moment: float) -> float:
    """The value at a moment, by a straight line between readings; before the first and after the last: theirs."""
    before = readings[0]
    for reading in readings:
        if reading[0] >= moment:
            span = reading[0] - before[0]
            share = (moment - before[0]) / span if span > 0 else 0.0
            return before[1] + (reading[1] - before[1]) * max(0.0, share)
        before = reading
    return readings[-1][1]


@dataclass(slots=True)
class Watcher:
    """What is known of a tree so far: processor seconds by process, also of those that have ended."""

    root: int
    seconds: dict[int, float] = field(default_factory=dict)
    peak: float = 0.0

    def look(self) -> None:
        """Find the processes and their memory."""
        found = tree(self.root)
        for pid in found:
            self.seconds.setdefault(pid, 0.0)
        self.peak = max(self.peak, resident(found))

    def cpu(self) -> float:
        for pid in self.seconds:
            self.seconds[pid] = max(self.seconds[pid], spent(pid))
        return sum(self.seconds.values())


def spent(pid: int) -> float:
    """Processor seconds of a process with all its threads, ended ones included; 0 if it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | BUSY_CLOCK)
    except OSError:
        return 0.0


def tree(root: int) -> list[int]:
    """The process and all below it that live."""
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            todo += [int(child) for child in _text(listed).split()]
    return found


def resident(pids: Sequence[int]) -> float:
    """MB: memory of their own of all, and the largest part that one of them may share with the others."""
    pages = [[int(number) for number in _text(Path(f"/proc/{pid}/statm")).split()] for pid in pids]
    known = [one for one in pages if len(one) > 2]
    own = sum(one[1] - one[2] for one in known)
    return (own + max((one[2] for one in known), default=0)) * PAGE / 1e6


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:
        return ""


def watched(argv: Sequence[str], *, env: Mapping[str, str], folder: Path, limit_s: float) -> Usage:
    """Run the command in a folder, its output to `out` and `err` there. Past the limit its whole group is killed."""
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(env), cwd=folder, start_new_session=True
        )
        return _watch(child, time.monotonic() + limit_s)


def _watch(child: subprocess.Popen[bytes], end: float) -> Usage:
    watcher, readings, ticks = Watcher(child.pid), [(time.monotonic(), 0.0)], 0
    while True:
        if ticks % LOOK_EVERY == 0:
            watcher.look()
        readings.append((time.monotonic(), watcher.cpu()))
        pid, status, rusage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > end:
            os.killpg(child.pid, signal.SIGKILL)
        ticks += 1
        time.sleep(TICK_S)
    child.returncode = os.waitstatus_to_exitcode(status)
    total = max(readings[-1][1], rusage.ru_utime + rusage.ru_stime)
    readings.append((time.monotonic(), total))
    return Usage(child.returncode, tuple(readings), watcher.peak, len(watcher.seconds))
