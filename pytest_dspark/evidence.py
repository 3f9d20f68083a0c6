"""The run folder and its rows: written at once, flushed to disk, valid at every moment.

A run folder lies outside every git work tree, with mode 0700 and files of mode 0600. It is marked incomplete from its
birth until the run has ended in order, so that what a SIGKILL leaves behind says so itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pytest_dspark.errors import ConfigError
from pytest_dspark.sanitize import mask_text
from pytest_dspark.strictjson import loads
from pytest_dspark.verdict import Finding, Verdict

ROW_SCHEMA = 1
LOCK = "run.lock"
_SEALED = re.compile(rb'(\{.*), "seal": "([0-9a-f]{64})"\}')


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's evidence. Safe to use from several processes: each line is one locked, fsynced append.

    `secrets` are values that are masked in every text that is written, and so is whatever has the shape of a secret.
    """

    path: Path
    run_id: str
    secrets: tuple[str, ...] = field(default=(), repr=False)

    @property
    def rows(self) -> Path:
        return self.path / "rows.jsonl"

    def profile(self, mark: str) -> Path:
        """The folder of one profile: plan.json, runtime-gate.json and a log a rank."""
        folder = self.path / mark
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def keep_spare(self) -> None:
        """Take the room for the end of the run now. Raises USAGE if there is none."""
        try:
            write_whole(self.path / "spare", "\0" * SPARE_BYTES)
        except OSError as error:
            raise ConfigError("USAGE", f"{self.path}: {error}") from error

    def give_spare(self) -> None:
        """The end has come: its room is free."""
        (self.path / "spare").unlink(missing_ok=True)

    def write(self, name: str, data: Mapping[str, Any]) -> Path:
        """Write a JSON file whole or not at all; `name` may lie in a profile's folder."""
        (self.path / name).parent.mkdir(mode=0o700, exist_ok=True)
        return write_whole(
            self.path / name, json.dumps(self.masked(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        )

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one row, sealed to the one before it, and bring it to the disk before returning."""
        body = self._encoded(row)
        with locked(self.rows) as handle:
            append_to(handle, sealed(body, _last_seal(handle) or self.run_id.encode()))

    def begin(self, case: Case) -> None:
        """Say that a measurement begins: what a SIGKILL cuts off has no row, and yet was an attempt."""
        body = {"profile": case.profile, "check": case.check, "nodeid": case.nodeid, "attempt": case.attempt}
        with locked(self.path / "begun.jsonl") as handle:
            append_to(handle, self._encoded(body | {"began": utc_now()}) + b"\n")

    def _encoded(self, data: Mapping[str, Any]) -> bytes:
        return json.dumps(self.masked(data), ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")

    def hold(self) -> int:
        """Say that this process works for the run, until it dies; returns the handle that the kernel then gives back."""
        handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        return handle

    def masked(self, value: Any) -> Any:
        """The same data with secrets replaced in every text of it."""
        if isinstance(value, str):
            return mask_text(value, self.secrets)
        if isinstance(value, Mapping):
            return {key: self.masked(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.masked(item) for item in value]
        return value

    def about(self) -> dict[str, Any]:
        """run.json as it is now."""
        data: dict[str, Any] = json.loads((self.path / "run.json").read_bytes())
        return data

    def note(self, name: str, data: Mapping[str, Any]) -> None:
        """Append one line to a file of readings: many and small, so they are not forced to the disk one by one."""
        handle = os.open(self.path / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(self._encoded(data) + b"\n")

    def read(self) -> Iterator[dict[str, Any]]:
        """The rows that were written whole; a torn last line (power cut) is left out."""
        if not self.rows.exists():
            return
        for line in self.rows.read_bytes().split(b"\n"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row

    def known_of(self, mark: str, lane: str) -> dict[str, Any]:
        """What this run has found so far of a profile, for a check that is about to begin: `log_pool` is the KV pool in
        tokens as the head's log says it (None: it does not), `earlier` the findings of the lane."""
        ours = [row for row in self.read() if (row.get("profile"), row.get("lane")) == (mark, lane)]
        rows = [row for row in ours if whole(row)]
        return {"log_pool": self._log_pool(mark), "earlier": [row["finding"] for row in rows if row.get("finding")]}

    def _log_pool(self, mark: str) -> int | None:
        try:
            gate = json.loads((self.path / mark / "runtime-gate.json").read_bytes())
        except (OSError, ValueError):
            return None
        pools = [found.get("kv_cache_size_tokens") for found in gate["evidence"]["runtime_logs"].values()]
        return min((pool for pool in pools if pool), default=None)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """The file, open and locked; what a killed writer left of a half line is cut off."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.ftruncate(handle, os.fstat(handle).st_size - len(tail_of(handle, b"\n")))
        yield handle
    finally:
        os.close(handle)


def append_to(handle: int, line: bytes) -> None:
    """At the end of an open, locked file: the whole line on the disk, or none of it (a full disk). Raises OSError."""
    size = os.fstat(handle).st_size
    try:
        while line:
            line = line[os.write(handle, line) :]
        os.fsync(handle)
    except OSError:
        os.ftruncate(handle, size)
        raise


def tail_of(handle: int, mark: bytes, *, skip: int = 0) -> bytes:
    """What stands after the last `mark` of a file whose last `skip` bytes do not count; all of it without one."""
    end, step = os.fstat(handle).st_size - skip, 1 << 16
    while True:
        begin = max(0, end - step)
        data = os.pread(handle, end - begin, begin)
        if mark in data or not begin:
            return data.rpartition(mark)[2]
        step *= 2


def _last_seal(handle: int) -> bytes:
    """The seal of the last line; empty for a file without lines, and for a last line without one."""
    found = _SEALED.fullmatch(tail_of(handle, b"\n", skip=1)) if os.fstat(handle).st_size else None
    return found[2] if found else b""


def sealed(body: bytes, before: bytes) -> bytes:
    """The line of a row: its JSON with the field `seal`, the sha256 of the seal before it (the first: of the run id), a
    line feed and the JSON without that field."""
    seal = hashlib.sha256(before + b"\n" + body).hexdigest().encode()
    return body[:-1] + b', "seal": "' + seal + b'"}\n'


def sealed_rows(path: Path, run_id: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and row of every line, each proven to be as it was written and where it was written. A half last line,
    which a killed writer leaves, is left out. Raises ValueError that names the line."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    before = run_id.encode()
    for number, line in enumerate(lines, 1):
        found = _SEALED.fullmatch(line)
        if not found:
            raise ValueError(f"line {number} is no sealed row")
        if sealed(found[1] + b"}", before) != line + b"\n":
            raise ValueError(f"line {number} was changed, moved or put in, or the one before it was taken out")
        try:
            row = loads(line.decode("utf-8"))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        before = found[2]
        yield number, row


def write_whole(path: Path, text: str) -> Path:
    """Write a file of mode 0600 by rename, so that a reader sees the old or the new one and never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


def default_root() -> Path:
    """Where runs are kept unless told otherwise: the user's data folder."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "pytest-dspark"


def work_tree(path: Path) -> Path | None:
    """The git work tree that holds the path, if any."""
    here = path.resolve()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), None)


SPARE_BYTES = 1 << 18
"""Room that a run keeps for its own end: the JUnit report and run.json are written on a disk that has become full, too."""


def new_run(
    root: Path,
    *,
    secrets_known: tuple[str, ...] = (),
    now: datetime | None = None,
    about: Mapping[str, Any] | None = None,
) -> RunFolder:
    """Create a run folder, exclusively; `about` goes into its first run.json. Raises USAGE if it would lie inside a git work tree or cannot be created."""
    tree = work_tree(root)
    if tree:
        raise ConfigError(
            "USAGE", f"--dspark-out {root}: evidence must lie outside git work trees, this one is inside {tree}"
        )
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    run_id = f"{stamp}-{secrets.token_hex(4)}"
    path = root / "runs" / run_id
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError("USAGE", f"--dspark-out {root}: {error}") from error
    run = RunFolder(path, run_id, secrets_known)
    run.write("run.json", {"schema": 1, "run": run_id, "status": "incomplete", "started": utc_now(), **(about or {})})
    run.keep_spare()
    return run


def digest(data: Mapping[str, Any]) -> str:
    """16 hex digits that are equal for equal settings."""
    text = json.dumps(data, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Case:
    """What every row of one test case says of where it belongs. `part` is the question that a row is about, None for the row
    of the test case itself."""

    run: str
    nodeid: str
    check: str
    lane: str
    profile: str
    recipe: str
    fingerprint: str
    settings: str = ""
    attempt: int = 1
    part: str | None = None


def whole(row: Mapping[str, Any]) -> bool:
    """Whether a row is the row of a test case, and not of one of its questions."""
    return row.get("part") is None


def row(
    case: Case,
    verdict: Verdict,
    finding: Finding | None,
    *,
    started: str,
    elapsed_s: float,
    measured_in: str = "",
) -> dict[str, Any]:
    """One row of rows.jsonl. `finding` is null when nothing could be measured; the code and message say why.
    `measured_in` is the run that measured, when it was an earlier one."""
    return {
        "schema": ROW_SCHEMA,
        "run": case.run,
        "measured_in": measured_in or case.run,
        "check": case.check,
        "part": case.part,
        "lane": case.lane,
        "profile": case.profile,
        "recipe": case.recipe,
        "fingerprint": case.fingerprint,
        "settings": case.settings,
        "nodeid": case.nodeid,
        "verdict": str(verdict.status),
        "code": verdict.code or None,
        "message": verdict.message,
        "finding": dict(finding.data) if finding else None,
        "started": started,
        "elapsed_s": round(elapsed_s, 6),
        "attempt": case.attempt,
        "written_by": os.environ.get("PYTEST_XDIST_WORKER", "controller"),
    }


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """A wall stamp for reading and a monotonic start for measuring."""

    wall: str
    start: float

    @classmethod
    def started(cls) -> Stopwatch:
        return cls(utc_now(), time.monotonic())

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.start
