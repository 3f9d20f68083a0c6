"""The evidence root's list of all its runs, each line bound to the one before it: nobody publishes the best of nine unseen.

A line is `n`, `body`, `body_sha256` and `seal`, the sha256 of the seal before it, a line feed and `body_sha256`. Since the
seal needs only the hash of a body, a pack holds the whole chain and tells the bodies of its own configuration alone. A
configuration's key is sha256 of the root's private key and the fingerprint, which a stranger could otherwise guess
addresses from. Standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_dspark.evidence import append_to, locked, tail_of, utc_now
from pytest_dspark.strictjson import loads

NAME: Final = "ledger.jsonl"
KEY: Final = "ledger.key"
GENESIS: Final = "dspark-ledger"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run stands among those of the same configuration: `number` of `of`, and how the others ended."""

    number: int
    of: int
    others: tuple[Mapping[str, Any], ...]

    def as_json(self) -> dict[str, Any]:
        return {"number": self.number, "of": self.of, "others": [dict(other) for other in self.others]}


def key_of(root: Path, fingerprint: str) -> str:
    """16 hex digits that are equal for equal fingerprints under this root, and tell nothing elsewhere."""
    path = root / KEY
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    else:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))
    return hashlib.sha256(f"{path.read_text()}\n{fingerprint}".encode()).hexdigest()[:16]


def began(root: Path, run: str, fingerprints: Mapping[str, str], *, rehearsal: bool) -> int:
    """Say that a run begins; returns the number of its line."""
    configurations = {mark: key_of(root, fingerprint) for mark, fingerprint in fingerprints.items()}
    body = {"event": "began", "run": run, "at": utc_now(), "configurations": configurations, "rehearsal": rehearsal}
    return append(root, body)


def ended(root: Path, run: str, told: Mapping[str, Any]) -> int:
    """Say how a run ended: status, accepted, publishable, the number of each verdict."""
    return append(root, {"event": "ended", "run": run, "at": utc_now(), **told})


def append(root: Path, body: Mapping[str, Any]) -> int:
    """Add a line under a lock and bring it to the disk; returns its number."""
    with locked(root / NAME) as handle:
        last = tail_of(handle, b"\n", skip=1) if os.fstat(handle).st_size else b""
        number, before = _end(last)
        append_to(handle, json.dumps(line_of(number + 1, before, body), ensure_ascii=False).encode() + b"\n")
    return number + 1


def _end(last: bytes) -> tuple[int, str]:
    try:
        told: dict[str, Any] = json.loads(last) if last else {"n": 0, "seal": GENESIS}
        return int(told["n"]), str(told["seal"])
    except (ValueError, KeyError, TypeError):
        return 0, "a broken line"  # what follows is sealed to it, and `problems` names it


def line_of(number: int, before: str, body: Mapping[str, Any]) -> dict[str, Any]:
    digest = body_digest(body)
    return {"n": number, "body": dict(body), "body_sha256": digest, "seal": sealed(before, digest)}


def body_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sealed(before: str, digest: str) -> str:
    return hashlib.sha256(f"{before}\n{digest}".encode()).hexdigest()


# --- reading


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a ledger. Raises ValueError that names the line."""
    lines = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], 1):
        try:
            told = loads(line.decode("utf-8"))
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from error
        if not isinstance(told, dict):
            raise ValueError(f"{path.name}, line {number}: no object")
        lines.append(told)
    return lines


def problems(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is wrong with the chain: a line that was changed, moved, put in or taken out."""
    before = GENESIS
    for number, line in enumerate(lines, 1):
        body = line.get("body")
        if line.get("n") != number:
            yield f"ledger: line {number} says that it is line {line.get('n')}"
        if body is not None and (not isinstance(body, dict) or body_digest(body) != line.get("body_sha256")):
            yield f"ledger: line {number} was changed"
        if line.get("seal") != sealed(before, str(line.get("body_sha256"))):
            yield f"ledger: line {number} was changed, moved or put in, or the one before it was taken out"
        before = str(line.get("seal"))


def root_problems(root: Path) -> list[str]:
    """What is wrong with the ledger of an evidence root, also beside what its run folders say of their lines."""
    try:
        lines = read(root / NAME)
    except ValueError as error:
        return [str(error)]
    runs = [(line.get("body") or {}).get("run") for line in lines]
    return [*problems(lines), *_unlisted(root, runs)]


def _unlisted(root: Path, runs: Sequence[str | None]) -> Iterator[str]:
    """Run folders whose line is not where they say: the end of the ledger was cut off."""
    for path in sorted((root / "runs").glob("*/run.json")):
        try:
            number = json.loads(path.read_bytes()).get("ledger", {}).get("began")
        except (OSError, ValueError, AttributeError):
            continue
        if number is not None and (number > len(runs) or runs[number - 1] != path.parent.name):
            yield f"ledger: line {number} of run {path.parent.name} is not there"


def standing(lines: Iterable[Mapping[str, Any]], run: str) -> Standing | None:
    """The run among those with one of its configurations; None if the ledger does not know it."""
    bodies = [body for line in lines if (body := line.get("body"))]
    starts = [body for body in bodies if body["event"] == "began"]
    own = next((body for body in starts if body["run"] == run), None)
    if own is None:
        return None
    mine = set(own["configurations"].values())
    same = [body["run"] for body in starts if mine & set(body["configurations"].values())]
    ends = {body["run"]: body for body in bodies if body["event"] == "ended"}
    others = tuple(_end_of(other, ends.get(other)) for other in same if other != run)
    return Standing(same.index(run) + 1, len(same), others)


def _end_of(run: str, end: Mapping[str, Any] | None) -> dict[str, Any]:
    if end is None:
        return {"run": run, "status": "never ended", "accepted": None, "verdicts": {}}
    return {"run": run, **{key: end.get(key) for key in ("status", "accepted", "verdicts")}}


def extract(lines: Sequence[Mapping[str, Any]], run: str) -> list[dict[str, Any]]:
    """The whole chain, with the bodies of the runs that share a configuration with this one and the hashes of the rest."""
    found = standing(lines, run)
    told = {run, *(str(other["run"]) for other in found.others)} if found else set()
    return [dict(line) if (line.get("body") or {}).get("run") in told else _hidden(line) for line in lines]


def _hidden(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "body"}
