"""statement.json: the run as an in-toto Statement v1 with the predicate test-result v0.1. Pure, standard library alone.

That predicate knows passed, warned and failed tests only: warned is a PASS with something that could not be seen, failed is
FAIL and TOKEN_LIMIT. The other verdicts stand under `dspark`, a field of our own which readers of the predicate leave out.
The result is FAILED unless the run is accepted. The subjects are what the gate proved, so that without a proof there is no
statement.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pytest_dspark.acceptance import Outcome
from pytest_dspark.pack import Pack

TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE: Final = "https://in-toto.io/attestation/test-result/v0.1"
BARE: Final = ("ERROR", "CAPACITY", "BLOCKED", "NOT_IMPLEMENTED", "TOKEN_LIMIT")
_SHA256: Final = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_GATE_BAD: Final = frozenset({"FAIL", "ERROR", "BLOCKED", "CAPACITY", "TOKEN_LIMIT"})


def unproven(pack: Pack) -> str:
    """Why there is no proof of what ran; empty if there is one for every profile."""
    if pack.run["endpoint"]:
        return "nothing proves what answered at --dspark-endpoint"
    for mark in pack.profiles:
        rows = {row["check"]: row["verdict"] for row in pack.tests if row["profile"] == mark}
        bad = [name for name, said in rows.items() if name.startswith("gate.") and said in _GATE_BAD]
        if rows.get("launch") != "PASS" or bad:
            return f"{mark}: {'the launch' if not bad else ', '.join(bad)} did not pass, so nothing proves what ran"
        if rows.get("gate.image") != "PASS" or rows.get("gate.pins") != "PASS":
            return f"{mark}: image and pins were not compared, so nothing proves what ran"
    return "" if pack.profiles else "the run was about no profile"


def subjects(pack: Pack) -> list[dict[str, Any]]:
    """Image, model and runtime manifest, by digest, as they were found on every rank of every profile. Raises ValueError
    if one of them was found in two versions, or if there is no image."""
    found: dict[str, dict[str, str]] = {}
    for name, digests in _found(pack):
        if found.setdefault(name, digests) != digests:
            raise ValueError(f"{name} was found as {found[name]} and as {digests}")
    if "image" not in found:
        raise ValueError("no rank shows the digest of its image")
    return [{"name": name, "digest": digests} for name, digests in found.items()]


def _found(pack: Pack) -> Iterator[tuple[str, dict[str, str]]]:
    for one in _comparisons(pack, "gate.image"):
        digest = _SHA256.fullmatch(str(one["found"]))
        if one["what"] == "running image is the image looked at" and digest:
            yield "image", {"sha256": digest[1]}
    for one in _comparisons(pack, "gate.pins"):
        if one["what"] == "pin model revision":
            yield "model", _of_revision(str(one["found"]))
        digest = _SHA256.fullmatch(str(one["found"]))
        if one["what"] == "pin manifest sha256" and digest:
            yield "runtime manifest", {"sha256": digest[1]}


def _comparisons(pack: Pack, check: str) -> Iterator[Mapping[str, Any]]:
    for row in pack.tests:
        if row["check"] == check and row["finding"]:
            yield from row["finding"]["comparisons"]


def _of_revision(text: str) -> dict[str, str]:
    """A commit as it is; any other name of a revision by the sha256 of its text."""
    if _COMMIT.fullmatch(text):
        return {"gitCommit": text}
    return {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def build(pack: Pack, answer: Outcome, sums: Mapping[str, str]) -> dict[str, Any]:
    """The statement; `sums` are sha256 of every other file of the pack. Raises ValueError without a proof."""
    why = unproven(pack)
    if why:
        raise ValueError(why)
    return {
        "_type": TYPE,
        "subject": subjects(pack),
        "predicateType": PREDICATE,
        "predicate": {
            "result": "PASSED" if answer.accepted else "FAILED",
            "configuration": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(sums.items())],
            "passedTests": _names(pack, lambda row: row["verdict"] == "PASS" and not row["message"]),
            "warnedTests": _names(pack, lambda row: row["verdict"] == "PASS" and bool(row["message"])),
            "failedTests": _names(pack, lambda row: row["verdict"] in ("FAIL", "TOKEN_LIMIT")),
            "dspark": _ours(pack, answer),
        },
    }


def _names(pack: Pack, wanted: Any) -> list[str]:
    return [f"{row['profile']}/{row['check']}" for row in pack.tests if wanted(row)]


def _ours(pack: Pack, answer: Outcome) -> dict[str, Any]:
    return {
        "schema": 1,
        "run": pack.run["run"],
        "made_by": f"pytest-dspark {pack.versions['pytest_dspark']}",
        "accepted": answer.accepted,
        "publishable": answer.publishable,
        "reasons": list(answer.reasons),
        "disclosures": list(answer.disclosures),
        "verdicts": {verdict: _names(pack, lambda row, v=verdict: row["verdict"] == v) for verdict in BARE},
        "challenge": pack.run.get("challenge"),
        "ledger": pack.run["ledger"],
        "counts": dict(answer.counts),
    }
