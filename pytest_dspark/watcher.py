"""Looks at every rank, its host, its fabric and the API again and again, and remembers the first cause of an end.

One thread a host and one for the API, so that whoever hangs hides no other; one judges. What they see is in `signs.py`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pytest_dspark import gpus, logs
from pytest_dspark.cluster import Host, HostEntry, RankState
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import HostError, LaunchError
from pytest_dspark.metrics import Metrics
from pytest_dspark.signs import ApiSigns, Patience, RankSigns, judge

LOOK_S = 0.5
LINK_S = 2.0
API_S = 2.0
METRICS_S = 5.0
# While something is timed the server is asked seldom: its counters are 56 kB, which take some of its time.
TIMED_API_S = 10.0
TIMED_S = 30.0
STOOD_STILL_S = 2.0
# A call that takes longer than this is a silence that began with the call.
SLOW_S = 1.5
PING = ("ping", "-c", "1", "-W", "1", "-n")
NO_CARRIER = frozenset({"DOWN", "LOWERLAYERDOWN", "NOTPRESENT"})
_OPERSTATE = re.compile(r" state ([A-Z]{2,20})\b")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,14}")
_STILL = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_COUNTERS = (*_STILL, "vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_DEATHS = ("engine_fatal", "engine_dead")


class Waking:
    """A monotonic clock without the time in which this process stood still (Ctrl-Z, a sleeping machine, a frozen container):
    nothing was looked at then, so no silence may be counted from it. The judge reads it several times a second; whatever
    passes STOOD_STILL_S between two readings was such a time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._last, self._lost = clock(), 0.0

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            gap, self._last = now - self._last, now
            self._lost += gap if gap > STOOD_STILL_S else 0.0
            return now - self._lost


@dataclass(slots=True)
class _Since:
    """Since when something is so, on the watcher's clock; None while it is not."""

    at: float | None = None

    def put(self, so: bool, now: float) -> None:
        self.at = (now if self.at is None else self.at) if so else None

    def age(self, now: float) -> float | None:
        return None if self.at is None else now - self.at


@dataclass(slots=True)
class _Rank:
    """What was seen of one rank; written by its thread and read by the judge."""

    number: int
    entry: HostEntry
    host: Host
    log: Path
    state: RankState | None = None
    read_at: float | None = None
    asked_at: float | None = None
    why: str = ""
    silent: _Since = field(default_factory=_Since)
    docker_only: bool = False
    down: _Since = field(default_factory=_Since)
    cut: _Since = field(default_factory=_Since)
    link: str = ""
    unheard: _Since = field(default_factory=_Since)
    peer: str = ""
    heard: bool = False
    first_start: str = ""
    restarted: str = ""
    worked: float | None = None
    idle: _Since = field(default_factory=_Since)
    spinning: _Since = field(default_factory=_Since)
    spin: str = ""
    offset: int = 0
    death: str = ""
    hang: str = ""

    def signs(self, now: float) -> RankSigns:
        pending = None if self.asked_at is None or now - self.asked_at < SLOW_S else now - self.asked_at
        silent = max((age for age in (self.silent.age(now), pending) if age is not None), default=None)
        return RankSigns(
            rank=self.number,
            host=self.entry.name,
            state=self.state,
            silent_s=silent,
            docker_only=self.docker_only,
            why=self.why or "no answer yet",
            link_s=self.cut.age(now),
            link=self.link,
            peer_s=self.unheard.age(now),
            peer=self.peer,
            down_s=self.down.age(now),
            seen_s=None if self.read_at is None else now - self.read_at,
            restarted=self.restarted,
            death=self.death,
            hang=self.hang,
            idle_s=self.idle.age(now),
            spin_s=self.spinning.age(now),
            spin=self.spin,
            tail=_tail(self.log),
        )


def _tail(path: Path, count: int = 3) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8000))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return "(nothing)"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(line[-240:] for line in lines[-count:]) or "(nothing)"


@dataclass(slots=True)
class _Api:
    """What was seen of the API."""

    silent: _Since = field(default_factory=_Since)
    sick: _Since = field(default_factory=_Since)
    still: _Since = field(default_factory=_Since)
    why: str = ""
    said: str = ""
    listening: bool | None = None
    running: float = 0.0
    counters: tuple[float | None, ...] = ()
    asked_for: float = 0.0

    def signs(self, now: float) -> ApiSigns:
        return ApiSigns(
            silent_s=self.silent.age(now),
            why=self.why,
            sick_s=self.sick.age(now),
            sick=self.said,
            listening=self.listening,
            still_s=self.still.age(now),
            running=self.running,
        )


@dataclass(frozen=True, slots=True)
class Watched:
    """What is watched: entries and hosts in rank order, the ids as they come to life, the logs, and who wants to know."""

    entries: Sequence[HostEntry]
    hosts: Mapping[str, Host]
    ids: Callable[[], Mapping[int, str]]
    log: Callable[[int], Path]
    port: int
    timed: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = print
    on_lost: Callable[[LaunchError], None] = lambda _error: None


class Watcher:
    """`found` is the first cause, and stays. `serve` is told when the API may be asked too."""

    def __init__(
        self,
        watched: Watched,
        patience: Patience,
        *,
        clock: Callable[[], float] | None = None,
        every_s: float = LOOK_S,
        spin_w: float = 0.0,
    ) -> None:
        self._watched, self._patience, self._clock, self._every_s = watched, patience, clock or Waking(), every_s
        self._spin_w = spin_w
        self._ranks = [
            _Rank(number, entry, watched.hosts[entry.name], watched.log(number))
            for number, entry in enumerate(watched.entries)
        ]
        self._api = _Api()
        self._endpoint: Endpoint | None = None
        self._over = threading.Event()
        self._blind: set[int] = set()
        self._lock = threading.Lock()
        self.found: LaunchError | None = None

    def start(self) -> None:
        for rank in self._ranks:
            self._thread(f"rank{rank.number}", partial(self._watch_rank, rank))
        self._thread("judge", self._watch_all)

    def serve(self, endpoint: Endpoint) -> None:
        """The engine has generated a token: from now on its API is watched too, and its counters."""
        self._endpoint = endpoint
        self._thread("api", self._watch_api)

    def stop(self) -> None:
        """Nothing is told after this returns."""
        with self._lock:
            self._over.set()

    def _thread(self, name: str, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=f"dspark-watch-{name}", daemon=True).start()

    # --- a rank and its host

    def _watch_rank(self, rank: _Rank) -> None:
        next_link = 0.0
        while not self._over.wait(self._every_s):
            self._look(rank, self._look_state)
            if self._clock() >= next_link:
                next_link = self._clock() + LINK_S
                self._look(rank, self._look_link)
                if self._suspicious():
                    self._look(rank, self._look_closer)

    def _look(self, rank: _Rank, look: Callable[[_Rank], None]) -> None:
        """One call to the host; that it does not answer is a sign, since the moment at which it was asked."""
        rank.asked_at = asked = self._clock()
        try:
            look(rank)
        except HostError as error:
            rank.why, rank.docker_only = error.message, error.docker_only
            rank.silent.put(True, asked)
        else:
            rank.silent.put(False, asked)
        finally:
            rank.asked_at = None

    def _look_state(self, rank: _Rank) -> None:
        rank_id = self._watched.ids().get(rank.number)
        if rank_id is None:
            return
        state = rank.host.state(rank_id)
        now = self._clock()
        rank.first_start = rank.first_start or state.started_at
        if state.status == "running" and state.restart_count:
            rank.restarted = f"was restarted {state.restart_count} times"
        elif state.status == "running" and not rank.entry.process and state.started_at not in ("", rank.first_start):
            rank.restarted = f"was started again at {state.started_at}, it was proven as started at {rank.first_start}"
        rank.state, rank.read_at, rank.docker_only = state, now, False
        rank.down.put(state.status != "running", now)
        self._read_log(rank)

    def _read_log(self, rank: _Rank) -> None:
        """What its log says of an end, in the part that is new."""
        try:
            with rank.log.open("rb") as file:
                file.seek(rank.offset)
                fresh = file.read()
        except OSError:
            return
        whole = fresh.rpartition(b"\n")[0]
        if not whole:
            return
        rank.offset += len(whole) + 1
        for fault in logs.read_log(whole.decode("utf-8", "replace")).faults:
            if fault.kind in _DEATHS:
                rank.death = rank.death or fault.text[:240]
            elif fault.kind == "hang":
                rank.hang = fault.text[:240]

    def _look_link(self, rank: _Rank) -> None:
        name = rank.entry.interface
        if rank.entry.process or not _INTERFACE.fullmatch(name):
            return
        done = rank.host.read(["ip", "-o", "link", "show", "dev", name])
        found = _OPERSTATE.search(done.text) if done.code == 0 else None
        word = found[1] if found else ""
        rank.link = f"interface {name} is {word}"
        rank.cut.put(word in NO_CARRIER, self._clock())

    def _suspicious(self) -> bool:
        return self._api.still.at is not None or any(r.cut.at or r.silent.at or r.asked_at for r in self._ranks)

    def _look_closer(self, rank: _Rank) -> None:
        """What costs something is asked only when something else looks wrong: the peers, and what processors and GPUs did."""
        self._look_peers(rank)
        self._look_gpus(rank)
        rank_id = self._watched.ids().get(rank.number)
        used = rank.host.worked_s(rank_id) if rank_id and rank.state and rank.state.status == "running" else None
        still = used is not None and used == rank.worked
        rank.worked = used
        rank.idle.put(still, self._clock())

    def _look_gpus(self, rank: _Rank) -> None:
        """While counters stand still. A GPU that does not say what it draws is no sign."""
        asked = self._spin_w > 0 and self._api.still.at is not None
        draws = gpus.read_draws(rank.host, rank.entry) if asked else ()
        rank.spin = ", ".join(f"a GPU is busy at {one.busy:g} % and draws {one.watts:g} W" for one in draws)
        rank.spinning.put(gpus.spinning(draws, self._spin_w), self._clock())

    def _look_peers(self, rank: _Rank) -> None:
        """A peer that never answered tells nothing by being silent: pings may be forbidden."""
        if rank.entry.process:
            return
        others = [other.entry.address for other in self._ranks if other is not rank]
        lost = [address for address in others if rank.host.read([*PING, address]).code == 1]
        rank.heard = rank.heard or not lost
        rank.peer = f"{', '.join(lost)} on the fabric"
        rank.unheard.put(bool(lost) and rank.heard, self._clock())

    # --- the API

    def _watch_api(self) -> None:
        next_metrics = 0.0
        while not self._over.wait(TIMED_API_S if self._watched.timed() else API_S):
            assert self._endpoint is not None
            status, said = self._endpoint.health_status()
            now = self._clock()
            self._api.why = self._api.said = said
            self._api.silent.put(status is None, now)
            self._api.sick.put(status is not None and status >= 500, now)
            self._api.listening = self._listening() if status is None else None
            if status is not None and now >= next_metrics:
                next_metrics = now + (TIMED_S if self._watched.timed() else METRICS_S)
                self._count(self._endpoint.metrics())

    def _listening(self) -> bool | None:
        try:
            return bool(self._ranks[0].host.listener(self._watched.port))
        except HostError:
            return None

    def _count(self, metrics: Metrics) -> None:
        now, counters = self._clock(), tuple(metrics.value(name) for name in _COUNTERS)
        same = counters == self._api.counters and counters[0] is not None
        self._api.counters = counters
        self._api.running = counters[0] or 0.0
        self._api.still.put(same and self._api.running > 0, now)
        if not same:
            for rank in self._ranks:
                rank.hang = ""

    # --- all of it

    def _watch_all(self) -> None:
        while not self._over.wait(self._every_s / 2):
            now = self._clock()
            signs = [rank.signs(now) for rank in self._ranks]
            self._tell(signs)
            error = judge(signs, self._api.signs(now), self._patience, loading=self._endpoint is None)
            if error and self._lost(error):
                self._watched.on_lost(error)

    def _lost(self, error: LaunchError) -> bool:
        """Whether this is the first cause; not after `stop`."""
        with self._lock:
            if self._over.is_set():
                return False
            self.found = error
            self._over.set()
            return True

    def _tell(self, signs: Sequence[RankSigns]) -> None:
        """A host that cannot be looked at is said once, and again when it answers."""
        for one in signs:
            silent = one.silent_s is not None and one.silent_s >= self._patience.gone_s
            if silent and one.rank not in self._blind:
                self._blind.add(one.rank)
                self._watched.say(f"{one.host} does not answer, {one.named} cannot be watched: {one.why}")
            elif not silent and one.silent_s is None and one.rank in self._blind:
                self._blind.remove(one.rank)
                self._watched.say(f"{one.host} answers again")

    def check(self) -> None:
        """Raise the first cause, if there is one."""
        if self.found:
            raise self.found

    def settled(self, seconds: float, cancelled: Callable[[], bool]) -> LaunchError | None:
        """After a request failed: the first cause, waited for a moment, since a rank's end may come just after its silence;
        and for longer while something looks wrong."""
        begin = self._clock()
        while self.found is None and not self._over.is_set() and not cancelled():
            suspicious = self._suspicious() or self._api.silent.at is not None or any(r.down.at for r in self._ranks)
            if self._clock() - begin > seconds + (2 * self._patience.gone_s if suspicious else 0.0):
                break
            time.sleep(0.1)
        return self.found
