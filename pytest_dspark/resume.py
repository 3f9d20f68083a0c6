"""An earlier run whose finished measurements are judged again instead of measured again (`--dspark-resume`).

Nothing of that run is changed, and none of its verdicts is believed: the stored finding goes through the judge. Launch, gate
and teardown are of the present run alone. A run whose rows are not as they were written is refused as a whole.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_dspark.errors import ConfigError
from pytest_dspark.evidence import LOCK, ROW_SCHEMA, Case, RunFolder, sealed_rows, whole
from pytest_dspark.strictjson import loads
from pytest_dspark.verdict import Status

PATIENCE_S = 30.0
LOOK_S = 0.2
FINISHED = frozenset({Status.PASS, Status.FAIL, Status.TOKEN_LIMIT})
OF_THE_PRESENT_RUN = frozenset({"launch", "gate", "teardown"})
Key = tuple[str, str, str]
_TEXTS = ("run", "measured_in", "check", "lane", "profile", "fingerprint", "settings", "nodeid", "verdict", "started")


@dataclass(frozen=True, slots=True)
class Left:
    """The engine that a dead run may have left up: the run id on its labels, and whether that run had proven it."""

    run_id: str
    proven: bool


@dataclass(frozen=True, slots=True)
class Stored:
    """A finished measurement of an earlier run."""

    measured_in: str
    verdict: str
    finding: Mapping[str, Any]
    settings: str
    started: str
    elapsed_s: float
    attempt: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What the resumed run has: finished measurements, and how often each was begun, by profile, check and node id; the
    finished questions of a check by their ids, also of one that has no row of its own."""

    run_id: str
    path: Path
    finished: Mapping[Key, Stored] = field(default_factory=dict)
    attempts: Mapping[Key, int] = field(default_factory=dict)
    questions: Mapping[Key, Mapping[str, Stored]] = field(default_factory=dict)

    def parts(self, case: Case) -> dict[str, Stored]:
        """The finished questions of this case under the same settings."""
        found = self.questions.get((case.profile, case.check, case.nodeid), {})
        return {part: stored for part, stored in found.items() if stored.settings == case.settings}

    def stored(self, case: Case) -> Stored | None:
        """The finished measurement of this case under the same settings. Raises RESUME_REFUSED if the run measured this
        check under another node id of the same file and test: then it would silently be measured twice."""
        found = self.finished.get((case.profile, case.check, case.nodeid))
        if found:
            return found if found.settings == case.settings else None
        for profile, check, nodeid in self.finished:
            if (profile, check) == (case.profile, case.check) and _test(nodeid) == _test(case.nodeid):
                why = f"it measured {check} as {nodeid}, this session calls it {case.nodeid}"
                raise refused(self.run_id, f"{why}; start pytest in the same folder, with the same path")
        return None

    def attempt(self, profile: str, check: str, nodeid: str) -> int:
        """The number of a measurement that begins now."""
        return self.attempts.get((profile, check, nodeid), 0) + 1


def _test(nodeid: str) -> str:
    return nodeid.partition("[")[0].rpartition("/")[2] + nodeid.partition("[")[2]


def refused(run: str, why: str) -> ConfigError:
    return ConfigError("RESUME_REFUSED", f"run {run} cannot be resumed: {why}")


def run_path(name: str, root: Path) -> Path:
    """The folder of a run given by id or by path. Raises RESUME_REFUSED."""
    path = Path(name).absolute() if os.sep in name or Path(name).is_dir() else root / "runs" / name
    if not (path / "run.json").is_file():
        raise refused(name, f"{path} is no run folder")
    return path


def take(path: Path, *, say: Callable[[str], None], patience_s: float = PATIENCE_S) -> int:
    """Make sure that nobody works for the run and that nobody else resumes it; held until this process dies.

    Workers of a killed pytest may need some seconds to die. Raises RESUME_REFUSED.
    """
    try:
        handle = os.open(path / LOCK, os.O_RDWR)
    except OSError as error:
        raise refused(path.name, f"{path / LOCK}: {error.strerror}") from error
    deadline, said = time.monotonic() + patience_s, False
    while not _try_lock(handle):
        if time.monotonic() > deadline:
            os.close(handle)
            raise refused(path.name, "it is still running, or another session resumes it")
        if not said:
            said = True
            say(f"waiting up to {patience_s:g} s for what still works for run {path.name}")
        time.sleep(LOOK_S)
    return handle


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def about(path: Path) -> Mapping[str, Any]:
    """The run's own run.json. Raises RESUME_REFUSED."""
    try:
        data = loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refused(path.name, f"{path / 'run.json'}: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != 1 or not isinstance(data.get("profiles"), dict):
        raise refused(path.name, f"{path / 'run.json'} does not say which profiles it was about")
    return data


def check_same(told: Mapping[str, Any], fingerprints: Mapping[str, str], *, rehearsal: bool) -> None:
    """The run was of the same kind and of the same plans. Raises RESUME_REFUSED."""
    run = str(told.get("run"))
    if told.get("endpoint"):
        raise refused(run, "nothing proves what answered it at --dspark-endpoint")
    if bool(told.get("rehearsal")) != rehearsal:
        kinds = ("a real engine", "a rehearsal")
        raise refused(run, f"it was of {kinds[not rehearsal]}, this session is of {kinds[rehearsal]}")
    known = {mark: str(entry.get("fingerprint")) for mark, entry in told["profiles"].items()}
    if not known.keys() & fingerprints.keys():
        raise refused(run, f"it was about {', '.join(known)}, this session is about {', '.join(fingerprints)}")
    for mark, fingerprint in fingerprints.items():
        if known.get(mark, fingerprint) != fingerprint:
            raise refused(
                run,
                f"fingerprint of {mark} is {fingerprint} now, it was {known[mark]}: profile, recipe, hosts and their "
                "environment must be the same",
            )


def read(path: Path) -> Replay:
    """The run's rows, each as it was written. Raises RESUME_REFUSED that names file and line."""
    told = about(path)
    run = str(told.get("run"))
    known = {mark: str(entry.get("fingerprint")) for mark, entry in told["profiles"].items()}
    rows_path = RunFolder(path, run).rows
    rows: dict[Key, list[Mapping[str, Any]]] = {}
    parts: dict[Key, dict[str, list[Mapping[str, Any]]]] = {}
    try:
        for number, row in sealed_rows(rows_path, run):
            _check_row(row, run, known, number)
            if row["lane"] in OF_THE_PRESENT_RUN:
                continue
            if whole(row):
                rows.setdefault(_key(row), []).append(row)
            else:
                parts.setdefault(_key(row), {}).setdefault(row["part"], []).append(row)
        begun = dict(_begun(path / "begun.jsonl"))
    except (OSError, ValueError) as error:
        raise refused(run, f"{rows_path}: {error}") from error
    finished = {key: _stored(found[0]) for key, found in rows.items() if _is_finished(found)}
    tried = {key: max(_tries(row) for row in found) for key, found in rows.items()}
    attempts = {key: max(tried.get(key, 0), begun.get(key, 0)) for key in tried.keys() | begun.keys()}
    questions = {key: _finished_parts(found) for key, found in parts.items()}
    return Replay(run, path, finished, attempts, questions)


def _finished_parts(parts: Mapping[str, list[Mapping[str, Any]]]) -> dict[str, Stored]:
    return {part: _stored(found[0]) for part, found in parts.items() if _is_finished(found)}


def _key(row: Mapping[str, Any]) -> Key:
    return row["profile"], row["check"], row["nodeid"]


def _check_row(row: Mapping[str, Any], run: str, known: Mapping[str, str], number: int) -> None:
    if row.get("schema") != ROW_SCHEMA:
        raise ValueError(f"line {number}: schema is {row.get('schema')!r}, expected {ROW_SCHEMA}")
    for name in _TEXTS:
        if not isinstance(row.get(name), str):
            raise ValueError(f"line {number}: {name} is {row.get(name)!r}, expected a text")
    if row["run"] != run:
        raise ValueError(f"line {number} is a row of run {row['run']}")
    if row["verdict"] not in set(Status):
        raise ValueError(f"line {number}: verdict is {row['verdict']!r}, which is none")
    if known.get(row["profile"]) != row["fingerprint"]:
        raise ValueError(
            f"line {number}: fingerprint is {row['fingerprint']}, run.json has {known.get(row['profile'])}"
        )
    if type(row.get("attempt")) is not int or type(row.get("elapsed_s")) not in (int, float):
        raise ValueError(f"line {number}: attempt and elapsed_s must be numbers")
    if not isinstance(row.get("part"), (str, type(None))):
        raise ValueError(f"line {number}: part is {row.get('part')!r}, expected a text or null")
    if not isinstance(row.get("finding"), (dict, type(None))):
        raise ValueError(f"line {number}: finding is neither a table nor null")


def _is_finished(rows: list[Mapping[str, Any]]) -> bool:
    """Measured and judged: every row of the case says so (a lost worker adds an ERROR to what it had written)."""
    return all(row["verdict"] in FINISHED and row["finding"] is not None for row in rows)


def _tries(row: Mapping[str, Any]) -> int:
    """How often a case was tried by then; one that was BLOCKED, or cannot run here, was not."""
    untried = row["verdict"] in (Status.BLOCKED, Status.NOT_IMPLEMENTED)
    return int(row["attempt"]) - untried


def _stored(row: Mapping[str, Any]) -> Stored:
    return Stored(
        measured_in=row["measured_in"],
        verdict=row["verdict"],
        finding=row["finding"],
        settings=row["settings"],
        started=row["started"],
        elapsed_s=float(row["elapsed_s"]),
        attempt=row["attempt"],
    )


def _begun(path: Path) -> Iterator[tuple[Key, int]]:
    """The last attempt that was begun of every case; a half last line is left out. Raises ValueError."""
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], 1):
        try:
            told = loads(line.decode("utf-8"))
            yield (str(told["profile"]), str(told["check"]), str(told["nodeid"])), int(told["attempt"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from error


def left(path: Path, marks: Mapping[str, str]) -> dict[str, Left]:
    """The engine that the run may have left up, by profile mark: its own, or the one that it had taken over itself."""
    told = about(path)
    return {mark: found for mark in marks if (found := _left(path / mark, str(told.get("run"))))}


def _left(folder: Path, run: str) -> Left | None:
    """None for an engine that was attached: it was never the run's to give away."""
    engine, gate = _json(folder / "engine.json"), _json(folder / "runtime-gate.json")
    if engine.get("owned") is False:
        return None
    return Left(str(engine.get("run") or run), gate.get("status") == "PASS")


def _json(path: Path) -> Mapping[str, Any]:
    try:
        data = loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
