"""Looks at every host of a live engine again and again, and says when one must be braked before it dies.

A brake works on what was read alone: a host that cannot be read is said once and braked never.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pytest_dspark.cluster import Host, Readings
from pytest_dspark.recipe import Brakes

EVERY_S = 5.0
STALE_S = 30.0
UNREAD = Readings(None, None, unreadable=("not read yet",))


def crossed(brakes: Brakes, now: Readings, before: Readings) -> str:
    """Why the host must be braked, with the figure and the limit; empty if nothing was crossed.

    Free memory counts at once. A temperature counts when two readings in a row are above the limit: sensors jump.
    """
    least, most = brakes.least_free_memory_gib, brakes.most_temperature_c
    if least is not None and now.free_memory_gib is not None and now.free_memory_gib < least:
        return f"free memory is {now.free_memory_gib:g} GiB, the recipe brakes below {least:g} GiB"
    if most is None or now.temperature_c is None or before.temperature_c is None:
        return ""
    if min(now.temperature_c, before.temperature_c) > most:
        return f"{now.sensor} is at {now.temperature_c:g} °C, the recipe brakes above {most:g} °C"
    return ""


def blind(brakes: Brakes, now: Readings) -> str:
    """Which brake cannot work because its reading is missing, and why; empty if all that are set can."""
    pairs = (
        ("free memory", brakes.least_free_memory_gib, now.free_memory_gib),
        ("temperature", brakes.most_temperature_c, now.temperature_c),
    )
    missing = " and ".join(name for name, limit, value in pairs if limit is not None and value is None)
    return f"{missing} cannot be read, so nothing brakes on it: {'; '.join(now.unreadable)}" if missing else ""


@dataclass(slots=True)
class _Seen:
    """What was read of one host: the last reading with its time, and the extremes."""

    last: Readings = UNREAD
    at: float = 0.0
    count: int = 0
    memory: float | None = None
    temperature: float | None = None

    def add(self, found: Readings, at: float) -> None:
        self.last, self.at, self.count = found, at, self.count + 1
        if found.free_memory_gib is not None:
            self.memory = found.free_memory_gib if self.memory is None else min(self.memory, found.free_memory_gib)
        if found.temperature_c is not None:
            self.temperature = (
                found.temperature_c if self.temperature is None else max(self.temperature, found.temperature_c)
            )


class Vitals:
    """One thread a host, so that a host that hangs hides no other. `on_crossing` gets host, reason and reading, once;
    `record` gets host and every reading."""

    def __init__(
        self,
        hosts: Mapping[str, Host],
        brakes: Brakes,
        *,
        on_crossing: Callable[[str, str, Readings], None],
        say: Callable[[str], None],
        record: Callable[[str, Readings], None] = lambda host, found: None,  # noqa: ARG005
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hosts, self._brakes, self._on_crossing, self._say = hosts, brakes, on_crossing, say
        self._record = record
        self._every_s, self._clock = every_s, clock
        self._seen = {name: _Seen() for name in hosts}
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        for name, host in self._hosts.items():
            threading.Thread(target=partial(self._look, name, host), name=f"dspark-vitals-{name}", daemon=True).start()

    def stop(self) -> None:
        """No crossing is told after this returns."""
        with self._lock:
            self._stop.set()

    def _look(self, name: str, host: Host) -> None:
        said = ""
        while not self._stop.is_set():
            found = host.readings()
            self._record(name, found)
            before = self._seen[name].last
            with self._lock:
                self._seen[name].add(found, self._clock())
                if not self._stop.is_set():
                    self._tell(name, found, before)
            problem = blind(self._brakes, found)
            if problem and not said:
                said = problem
                self._say(f"{name}: {problem}")
            self._stop.wait(self._every_s)

    def _tell(self, name: str, found: Readings, before: Readings) -> None:
        why = crossed(self._brakes, found, before)
        if why:
            self._stop.set()
            self._on_crossing(name, why, found)

    def now(self) -> dict[str, dict[str, Any]]:
        """The last reading of every host with its age in seconds; one that is too old is null with that reason."""
        with self._lock:
            return {name: _shown(seen, self._clock()) for name, seen in self._seen.items()}

    def summary(self) -> dict[str, dict[str, Any]]:
        """Of every host: how often it was read, the least free memory, the highest temperature, what could not be read."""
        with self._lock:
            return {
                name: {
                    "readings": seen.count,
                    "least_free_memory_gib": seen.memory,
                    "most_temperature_c": seen.temperature,
                    "unreadable": list(seen.last.unreadable),
                }
                for name, seen in self._seen.items()
            }


def _shown(seen: _Seen, now: float) -> dict[str, Any]:
    age = round(now - seen.at, 1)
    if seen.count and age > STALE_S:
        return Readings(None, None, unreadable=(f"the last reading is {age:g} s old",)).as_json() | {"age_s": age}
    return seen.last.as_json() | {"age_s": age if seen.count else None}
