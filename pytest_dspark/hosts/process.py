"""A rank as a local process group, with the same life as a container: named, labelled, logged, stopped and removed.

A rank's id is `pid:starttime` of its first process. Whatever it starts belongs to it: by the process tree, by group and
session, and by the environment marks that outlive all of these.
"""

from __future__ import annotations

import fcntl
import os
import platform
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pytest_dspark.cluster import (
    RUN_LABEL,
    HostEntry,
    HostFacts,
    ImageFacts,
    Output,
    RankFacts,
    RankSpec,
    RankState,
    Readings,
)
from pytest_dspark.errors import HostError
from pytest_dspark.hosts import proctable
from pytest_dspark.hosts.bundle import architecture, bundle_facts
from pytest_dspark.hosts.command import run_here
from pytest_dspark.hosts.listeners import TABLES, listening_inodes, local_owner
from pytest_dspark.hosts.logfile import copy_growing, link_or_none, save_longer
from pytest_dspark.hosts.marks import Marks, marks_for, marks_in
from pytest_dspark.hosts.proctable import Process
from pytest_dspark.hosts.readings import Reader
from pytest_dspark.strictjson import loads

# The file whose JSON stands for this host's readings: only a process host is given such words, to try the brakes.
PRETENDED = "REHEARSAL_READINGS"
ESSENTIALS = ("PATH", "HOME", "LANG", "LC_ALL", "USER", "TMPDIR", "TZ", "LD_LIBRARY_PATH")
LOCK_S = 10.0
KILL_S = 5.0
LOOK_S = 0.05
# A member this old when the rank is proven stands for the rank; a compiler that runs for a moment does not.
STANDING_S = 2.0
# Programs that write their title over their arguments would write over the environment, and so over our marks, too.
KEEP_MARKS = {"SPT_NOENV": "1"}


@dataclass(slots=True)
class _Rank:
    """A rank that this object started (`child`) or found. `kin` is every process that was ever seen to be of it.

    `standing` are the processes that it consisted of when it was proven, each with its title.
    """

    first: Process
    marks: Marks
    child: subprocess.Popen[bytes] | None = None
    kin: set[Process] = field(default_factory=set)
    standing: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    finished_at: str = ""
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def adopt(self, found: set[Process]) -> frozenset[Process]:
        """Remember more of its processes; returns all that were ever seen."""
        with self.lock:
            self.kin |= found
            return frozenset(self.kin)

    @property
    def rank_id(self) -> str:
        return self.first.ident

    @property
    def log(self) -> Path:
        return Path(self.marks.log)


class ProcessHost:
    """This machine as a host of process ranks. Several hosts of one cluster may be this machine: each has its own names."""

    def __init__(self, entry: HostEntry, *, cluster: str, state: Path) -> None:
        self._entry, self._cluster, self._folder = entry, cluster, state.absolute()
        self._ranks: dict[str, _Rank] = {}
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._reader = Reader()

    @property
    def name(self) -> str:
        return self._entry.name

    def facts(self) -> HostFacts:
        """This machine."""
        uname = platform.uname()
        return HostFacts("process", uname.node, uname.release, architecture(), address=self._entry.address)

    def read(self, argv: Sequence[str], *, timeout: float = 10.0) -> Output:
        """Run one command here; one that is not there ends with code 127. Raises HOST_UNREACHABLE on time-out."""
        return run_here(self.name, argv, timeout=timeout)

    def read_in(self, rank_id: str, argv: Sequence[str], *, timeout: float = 30.0) -> Output:
        """A process rank lives on the host itself."""
        return self.read(argv, timeout=timeout)

    def image(self, reference: str) -> ImageFacts:
        """The bundle that stands for the image: the host's own, else the one referred to. Raises IMAGE_MISSING."""
        return bundle_facts(self.name, self._entry.bundle or reference)

    # --- who is there

    def find(self, name: str) -> RankState | None:
        return next((self._state_of(rank) for rank in self._present() if rank.marks.name == name), None)

    def owned(self, label: str, value: str = "") -> tuple[RankState, ...]:
        carried = ((rank, dict(rank.marks.labels)) for rank in self._present())
        return tuple(
            self._state_of(rank)
            for rank, labels in carried
            if label in labels and (not value or labels[label] == value)
        )

    def state(self, rank_id: str) -> RankState:
        rank = self._known(rank_id)
        return self._state_of(rank) if rank else RankState(rank_id, "", "gone")

    def inspect(self, rank_id: str) -> RankFacts:
        """The rank's first process as the kernel shows it. Raises RANK_EXITED if it cannot be read any more.

        From now on every process that it consists of must live (`RankState.lost`).
        """
        rank = self._known(rank_id)
        alive = rank and proctable.by_ident(rank_id)
        environment = proctable.environment(alive.pid) if alive else None
        argv = proctable.command_line(alive.pid) if alive else ()
        if not rank or not environment or not argv:
            raise HostError("RANK_EXITED", f"{self.name}: process {rank_id} cannot be read, expected it to be running")
        self._settle(rank)
        return RankFacts(
            rank_id=rank_id,
            image_id=rank.marks.image_id,
            path=argv[0],
            args=argv[1:],
            environment=environment,
            mounts=(),
            labels=self._labels_of(rank),
            restart_policy="no",
            restart_count=0,
            started_at=proctable.started_at(rank.first),
            name=rank.marks.name,
        )

    def _settle(self, rank: _Rank) -> None:
        for entry in self._members(rank):
            if entry == rank.first or proctable.age_s(entry) >= STANDING_S:
                rank.standing.setdefault(entry.ident, proctable.title(entry.pid))

    def _labels_of(self, rank: _Rank) -> Mapping[str, str]:
        bundle = bundle_facts(self.name, self._entry.bundle).labels if self._entry.bundle else {}
        return {**bundle, **dict(rank.marks.labels)}

    def _state_of(self, rank: _Rank) -> RankState:
        alive = proctable.by_ident(rank.rank_id) is not None
        if rank.child and not alive:
            rank.ended.wait(KILL_S)
        living = {ident for ident in rank.standing if proctable.by_ident(ident)}
        return RankState(
            rank_id=rank.rank_id,
            name=rank.marks.name,
            status="running" if alive else "exited",
            exit_code=rank.exit_code,
            started_at=proctable.started_at(rank.first),
            finished_at=rank.finished_at,
            labels=dict(rank.marks.labels),
            lost=tuple(title for ident, title in rank.standing.items() if ident not in living),
            remaining=() if alive else tuple(title for ident, title in rank.standing.items() if ident in living),
        )

    def _known(self, rank_id: str) -> _Rank | None:
        if rank_id not in self._ranks:
            self._present()
        return self._ranks.get(rank_id)

    def _present(self) -> list[_Rank]:
        """Every rank of this host: started here and not removed, or found alive, whoever started it."""
        with self._lock:
            known = {rank.marks.token: rank for rank in self._ranks.values()}
            living = self._living()
            for token, group in living.items():
                if token not in known:
                    first, marks = min(group, key=lambda item: (item[0].started, item[0].pid))
                    known[token] = self._ranks[first.ident] = _Rank(first, marks)
                known[token].adopt({entry for entry, _ in group})
            return [rank for token, rank in known.items() if rank.child or token in living]

    def _living(self) -> dict[str, list[tuple[Process, Marks]]]:
        """Living processes that carry this host's marks, by the token of their start."""
        found: dict[str, list[tuple[Process, Marks]]] = {}
        for entry in proctable.table().values():
            marks = marks_in(proctable.environment(entry.pid))
            if marks and (marks.cluster, marks.host) == (self._cluster, self.name):
                found.setdefault(marks.token, []).append((entry, marks))
        return found

    # --- start

    def start(self, spec: RankSpec) -> str:
        """Start the rank's first process in a session of its own. Raises NAME_TAKEN, IMAGE_MISSING, LAUNCH_FAILED."""
        if spec.options or spec.mounts:
            extra = ", ".join([*(key for key, _ in spec.options), *(mount.target for mount in spec.mounts)])
            raise HostError("LAUNCH_FAILED", f"{self.name}: a process rank has no container options, found {extra}")
        image_id = bundle_facts(self.name, self._entry.bundle or spec.bundle).image_id
        with self._lock, self._names_locked():
            self._refuse_taken(spec)
            rank = self._spawn(spec, image_id)
            self._ranks[rank.rank_id] = rank
        threading.Thread(target=_reap, args=(rank,), name=f"dspark-reap-{spec.name}", daemon=True).start()
        self._yield_to_older(rank)
        return rank.rank_id

    def _refuse_taken(self, spec: RankSpec) -> None:
        holder = self.find(spec.name)
        if holder:
            run = holder.labels.get(RUN_LABEL, "unknown")
            raise HostError(
                "NAME_TAKEN", f"{self.name}: {spec.name} is process {holder.rank_id} ({holder.status}) of run {run}"
            )

    def _spawn(self, spec: RankSpec, image_id: str) -> _Rank:
        token = secrets.token_hex(8)
        log = self._folder / f"{spec.name}.{token}.log"
        marks = marks_for(spec, cluster=self._cluster, token=token, log=str(log), image_id=image_id)
        essentials = {key: os.environ[key] for key in ESSENTIALS if key in os.environ}
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            child = subprocess.Popen(
                list(spec.argv),
                env=essentials | KEEP_MARKS | dict(spec.env) | marks.environment(),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            log.unlink()
            raise HostError("LAUNCH_FAILED", f"{self.name}: {spec.argv[0]} cannot be started: {error}") from error
        finally:
            os.close(sink)
        first = proctable.process(child.pid)
        assert first is not None, "a child that nobody has reaped is always in the table"
        _await_marks(first, token)
        return _Rank(first, marks, child, {first})

    def _yield_to_older(self, rank: _Rank) -> None:
        """Two owners with different state folders share no lock: then the younger of two ranks of one name gives way."""
        for other in self._present():
            same = other.marks.name == rank.marks.name and other is not rank
            if same and (other.first.started, other.first.pid) < (rank.first.started, rank.first.pid):
                self.stop(rank.rank_id, grace_s=0)
                self.remove(rank.rank_id)
                raise HostError(
                    "NAME_TAKEN", f"{self.name}: {rank.marks.name} is process {other.rank_id}, started first"
                )

    @contextmanager
    def _names_locked(self) -> Iterator[None]:
        """One start at a time among all processes with this state folder; given back by the kernel if the holder dies."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._folder / "start.lock").open("w") as lock:
            deadline = time.monotonic() + LOCK_S
            while not _try_lock(lock.fileno()):
                if time.monotonic() > deadline:
                    raise HostError("NAME_TAKEN", f"{self.name}: {lock.name} is held by another start for {LOCK_S:g} s")
                time.sleep(LOOK_S)
            yield

    # --- the log

    def follow(self, rank_id: str, sink: Path) -> None:
        """The log file itself gets a second name; on another file system a thread copies what grows."""
        rank = self._needed(rank_id)
        if not link_or_none(rank.log, sink):
            over = lambda: self._closing.is_set() or proctable.by_ident(rank_id) is None  # noqa: E731
            target, args = copy_growing, (rank.log, sink, over)
            threading.Thread(target=target, args=args, name=f"dspark-log-{rank.marks.name}", daemon=True).start()

    def save_log(self, rank_id: str, sink: Path) -> None:
        """Raises RANK_EXITED if neither the rank nor its log is there any more."""
        rank = self._needed(rank_id)
        try:
            save_longer(rank.log, sink)
        except OSError as error:
            raise HostError("RANK_EXITED", f"{self.name}: log of process {rank_id} cannot be saved: {error}") from error

    def _needed(self, rank_id: str) -> _Rank:
        rank = self._known(rank_id)
        if rank is None:
            raise HostError("RANK_EXITED", f"{self.name}: process {rank_id} is gone, and its log with it")
        return rank

    # --- stop

    def stop(self, rank_id: str, *, grace_s: float) -> RankState:
        """SIGTERM to all that is the rank's, `grace_s` seconds to end, then SIGKILL. Raises LEFT_BEHIND if any survives."""
        rank = self._known(rank_id)
        if rank is None:
            return RankState(rank_id, "", "gone")
        for entry in self._members(rank):
            proctable.send(entry, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self._members(rank) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self._kill(rank)
        return self._state_of(rank)

    def _kill(self, rank: _Rank) -> None:
        deadline = time.monotonic() + KILL_S
        while members := self._members(rank):
            if time.monotonic() > deadline:
                left = ", ".join(str(entry.pid) for entry in members)
                raise HostError("LEFT_BEHIND", f"{self.name}: {rank.marks.name}: processes {left} survived SIGKILL")
            for entry in members:
                proctable.send(entry, signal.SIGKILL)
            time.sleep(LOOK_S / 5)

    def _members(self, rank: _Rank) -> set[Process]:
        """All living processes of the rank: marked, of its session or group, once seen to be its own, and descendants."""
        marked = {entry for entry, _ in self._living().get(rank.marks.token, ())}
        roots = rank.adopt(marked | _session(rank.first))
        found = proctable.family(proctable.table(), roots)
        rank.adopt(found)
        return found

    def remove(self, rank_id: str) -> None:
        """Forget the rank and delete its log file. Raises LEFT_BEHIND if it still runs."""
        rank = self._known(rank_id)
        if rank is None:
            return
        if left := self._members(rank):
            pids = ", ".join(str(entry.pid) for entry in left)
            raise HostError(
                "LEFT_BEHIND",
                f"{self.name}: {rank.marks.name} ({rank_id}) still runs (processes {pids}), expected it stopped",
            )
        if rank.log.name.endswith(f".{rank.marks.token}.log"):
            rank.log.unlink(missing_ok=True)
        self._ranks.pop(rank_id, None)

    # --- the rest

    def listener(self, port: int) -> str:
        text = ""
        for table in TABLES:
            with suppress(OSError):
                text += Path(table).read_text(encoding="ascii")
        inodes = listening_inodes(text, port)
        return local_owner(inodes) if inodes else ""

    def worked_s(self, rank_id: str) -> float | None:
        rank = self._known(rank_id)
        used = [proctable.worked_s(entry.pid) for entry in self._members(rank)] if rank else []
        return sum(one for one in used if one is not None) if any(one is not None for one in used) else None

    def readings(self) -> Readings:
        """This machine's, or what the file named by REHEARSAL_READINGS in this host's environment says."""
        pretended = dict(self._entry.env).get(PRETENDED)
        return pretended_readings(Path(pretended)) if pretended else self._reader.read(self.read)

    def close(self) -> None:
        """End the copying of logs. Ranks that run go on; their log files go on with them."""
        self._closing.set()


def pretended_readings(path: Path) -> Readings:
    """`{"free_memory_gib": 1.5, "temperature_c": 60}` as readings; a file or a key that is not there is unreadable."""
    try:
        told = loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Readings(None, None, unreadable=(f"{path}: {error}",))
    table = told if isinstance(told, dict) else {}
    memory, temperature = _number(table.get("free_memory_gib")), _number(table.get("temperature_c"))
    pairs = (("free_memory_gib", memory), ("temperature_c", temperature))
    reasons = tuple(f"{path}: {name} is not a number" for name, value in pairs if value is None)
    return Readings(memory, temperature, "pretended" if temperature is not None else "", reasons)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _session(first: Process) -> set[Process]:
    """Processes in the session or group of the rank's first process, while it certainly holds its pid."""
    now = proctable.process(first.pid)
    if now is None or now.started != first.started:
        return set()
    return {entry for entry in proctable.table().values() if first.pid in (entry.session, entry.group, entry.pid)}


def _await_marks(first: Process, token: str) -> None:
    """Popen returns when the new program is certain; for some microseconds more the kernel shows no environment of it."""
    deadline = time.monotonic() + KILL_S
    while proctable.by_ident(first.ident) and time.monotonic() < deadline:
        marks = marks_in(proctable.environment(first.pid))
        if marks and marks.token == token and proctable.command_line(first.pid):
            return
        time.sleep(0.001)


def _reap(rank: _Rank) -> None:
    """Wait for our child; while it is still a zombie its pid cannot be given away, so its session is surely its own."""
    assert rank.child is not None
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, rank.child.pid, os.WEXITED | os.WNOWAIT)
    rank.adopt(_session(rank.first))
    code = rank.child.wait()
    rank.exit_code = 128 - code if code < 0 else code
    rank.finished_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    rank.ended.set()


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
