"""The run folder's `publish/`: what a stranger gets. Every file is listed here, and nothing else leaves the run folder.

The order: inputs, evidence, what is derived from them, then a search of all that was written. A planted side file goes
through the same code in every run. If anything private comes out, or a projected finding is judged otherwise than the
private one, the folder is removed and the run says why.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from pytest_dspark import (
    headlines,
    identities,
    junit,
    ledger,
    option2,
    pack,
    page,
    projection,
    provenance,
    report,
    since,
    statement,
    tables,
    verify,
    web,
)
from pytest_dspark.comparison import broken, judge
from pytest_dspark.evidence import RunFolder, sealed, write_whole
from pytest_dspark.pack import CHANGES, OPTION2, PAGE, REPORT, STATEMENT, SUMS, Pack, PackError
from pytest_dspark.plan import Plan, told_names
from pytest_dspark.projection import Projector
from pytest_dspark.sanitize import mask_text
from pytest_dspark.verdict import Finding

FOLDER: Final = "publish"
NONCE: Final = "nonce"
HEAD: Final = 1 << 20
TAIL: Final = 1 << 20
ROW_FIELDS: Final = (
    *(
        "schema",
        "run",
        "measured_in",
        "check",
        "lane",
        "profile",
        "recipe",
        "fingerprint",
        "settings",
        "nodeid",
        "part",
    ),
    *("verdict", "code", "message", "finding", "started", "elapsed_s", "attempt", "written_by"),
)
_VERBATIM: Final = frozenset(
    "schema run measured_in check lane profile recipe settings part verdict code started elapsed_s attempt written_by".split()
)
_RUN_FIELDS: Final = (
    *(
        "schema",
        "run",
        "status",
        "started",
        "ended",
        "exit_status",
        "rehearsal",
        "endpoint",
        "challenge",
        "recipe",
        "narrowed",
    ),
    *("selected", "tampered", "profile_override", "stated", "accepted", "requirements_met", "subset"),
    *("publishable", "reasons", "counts", "resumed", "measured_in", "disclosures"),
)
_PROFILE_FIELDS: Final = (
    "profile",
    "recipe",
    "launched",
    "proven",
    "unpublishable",
    "hosts",
    "error",
    "kv_cache_size_tokens",
)
_FACTS: Final = ("kind", "kernel", "architecture", "docker_version", "api_version", "image_store")
_IDENTITY: Final = (
    "rank",
    "host",
    "image_id",
    "image_id_kind",
    "image_architecture",
    "source_revision",
    "model_revision",
)


@dataclass(frozen=True, slots=True)
class Source:
    """What is published: the run folder, its plans, run.json as it will be, pytest's own report, the evidence root."""

    run: RunFolder
    plans: Mapping[str, Plan]
    about: Mapping[str, Any]
    raw_junit: Path
    root: Path

    @property
    def recipe_names(self) -> Sequence[str]:
        """The recipe's files in the order in which its sha256 is made."""
        names: Sequence[str] = self.about["recipe"]["sources"]
        return names


class Refused(Exception):
    """The run is not published, and why."""


def publish(source: Source, projector: Projector | None = None) -> Path:
    """Write `publish/` whole. Raises Refused, with nothing left of it, and OSError."""
    target = source.run.path / FOLDER
    shutil.rmtree(target, ignore_errors=True)
    try:
        _publish(source, target, projector or projector_of(source))
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, pack.SHAPE):  # a file of the run or its ledger that is damaged
            raise Refused(f"what the run left cannot be read: {type(error).__name__}: {error}") from error
        raise
    return target


def _publish(source: Source, target: Path, made: Projector) -> None:
    target.mkdir(mode=0o700)
    _sanitizer(target, made, source)
    sources = dict(_inputs(source, target, made))
    fingerprints = _plans(source, target, made)
    for mark in source.plans:
        _profile_folder(source, target, mark, made)
    _tell(target / "run.json", _run(source, made, fingerprints))
    _tell(target / "versions.json", _versions(source, made))
    _lines(target / "ledger.jsonl", _ledger(source))
    _rows(source, target, made, fingerprints)
    _lines(target / "begun.jsonl", (made.data(line) for line in _read_lines(source.run.path / "begun.jsonl")))
    _junit(source, target, made)
    _tell(target / "sources.json", {"schema": 1, "files": sources})
    _tell(target / "pseudonyms.json", {"schema": 1, "sha256_of_nonce_and_name": made.map()})
    _tell(target / CHANGES, made.data(since.told(source.root / "runs", _loaded(target))))
    _answers(target, source)
    derive(target, drawn=True)
    _search(target, made)
    _verified(target)


# --- the projector of a run


def projector_of(source: Source) -> Projector:
    """The projector that knows the run's private names. Its nonce stays in the run folder."""
    path = source.run.path / NONCE
    if not path.exists():
        write_whole(path, secrets.token_hex(32) + "\n")
    known = identities.of_plans(source.plans.values())
    for mark in source.plans:
        known |= identities.of_folder(source.run.path / mark)
    known |= identities.of_machine(source.run.path, source.root)
    return Projector(
        nonce=bytes.fromhex(path.read_text().strip()),
        known=known,
        secrets=source.run.secrets,
        plain=identities.public(source.run.path, source.plans),
    )


def _sanitizer(target: Path, made: Projector, source: Source) -> None:
    """Pass the planted side file through the same code. Raises Refused if any of it comes out."""
    token = "Q" + secrets.token_hex(8).upper()
    secret, known = f"s3cret-{token}", f"box-{token.lower()}"
    own = Projector(
        made.nonce, {**made.known, known: "host"}, [*made.secrets, secret], made.plain, made.fixed, made.rules
    )
    lines = projection.planted(token, secret, known)
    log = "\n".join(text for _, text, _ in lines)
    side = {"answers": [text for _, text, _ in lines], **_side(token)}
    lines = (*lines, ("environment of a host alone", "", f"{token}ENV"))
    out = json.dumps(_own_environment(own.data(side), own, frozenset()), ensure_ascii=False) + _log_text(
        log.encode(), own
    )
    bad = projection.came_out(out, lines)
    if bad:
        raise Refused(f"the planted side file came out of the sanitizer: {', '.join(bad)}")
    _tell(
        target / "sanitizer.json",
        {"schema": 1, "planted": len(lines), "came_out": 0, "rules": [one[0] for one in lines]},
    )


def _side(token: str) -> dict[str, Any]:
    """An environment comparison as the gate makes it, of a variable that neither recipe nor profile names."""
    values = [f"{token}ENV"]
    return {"comparisons": [{"what": "PID 1 environment SIDE_FILE", "expected": values, "found": values}]}


# --- the inputs


def _inputs(source: Source, target: Path, made: Projector) -> Iterator[tuple[str, dict[str, Any]]]:
    """Recipe, profiles and suites as the run kept them. Those that everybody has stay as they are; what is private in others
    is projected, and then it says so."""
    kept, shipped = source.run.path / "inputs", provenance.shipped()
    for path in sorted((*kept.glob("recipe/*.toml"), *kept.glob("profiles/*.env"), *kept.glob("suites/*.py"))):
        name, raw = f"inputs/{path.relative_to(kept).as_posix()}", path.read_bytes()
        text = raw.decode("utf-8")
        public = text if hashlib.sha256(raw).hexdigest() in shipped else made.source(text)
        _put(target / name, public.encode())
        yield name, {"projected": public != text, "original": projection.commitment(made.nonce, raw)}


def _plans(source: Source, target: Path, made: Projector) -> dict[str, str]:
    """plan.json of every profile; returns the public fingerprint by the private one."""
    fingerprints = {}
    for mark, plan in source.plans.items():
        public_names = told_names(plan)
        data = made.data(_read(source.run.path / mark / "plan.json"))
        for rank in data["ranks"]:
            rank["env"] = {key: _value(key, value, made, public_names) for key, value in rank["env"].items()}
        for key, name in (("profile_sha256", f"inputs/profiles/{plan.profile.name}.env"), ("recipe_sha256", "")):
            data[key] = _sha256(target / name) if name else _recipe_sha256(source, target)
        fingerprints[plan.fingerprint] = data["fingerprint"] = pack.fingerprint(data)
        _tell(target / mark / "plan.json", data)
    made.fix(fingerprints)
    return fingerprints


def _recipe_sha256(source: Source, target: Path) -> str:
    files = [(target / "inputs" / "recipe" / name).read_bytes() for name in source.recipe_names]
    return hashlib.sha256(b"\0".join(files)).hexdigest()


def _value(key: str, value: str, made: Projector, public_names: frozenset[str]) -> str:
    return value if key in public_names or value in ("", "***") else made.name("value", value)


def _own_environment(value: Any, made: Projector, public_names: frozenset[str]) -> Any:
    """A finding in which values of a host's own environment are pseudonyms too."""
    if isinstance(value, list):
        return [_own_environment(item, made, public_names) for item in value]
    if not isinstance(value, dict):
        return value
    what = str(value.get("what", ""))
    if what.startswith("PID 1 environment ") and "found" in value:
        key = what.rpartition(" ")[2]
        sides = {side: value.get(side) for side in ("expected", "found")}
        told = {side: _values(key, found, made, public_names) for side, found in sides.items()}
        return value | told
    return {key: _own_environment(item, made, public_names) for key, item in value.items()}


def _values(key: str, found: Any, made: Projector, public_names: frozenset[str]) -> Any:
    if isinstance(found, list):
        return [_value(key, str(item), made, public_names) for item in found]
    return found


# --- one folder a profile


def _profile_folder(source: Source, target: Path, mark: str, made: Projector) -> None:
    own, public_names = source.run.path / mark, told_names(source.plans[mark])
    for name, kept in (
        ("preflight", _preflight),
        ("runtime-gate", _gate),
        ("teardown", dict),
        ("behaviour", dict),
        ("brake", dict),
    ):
        data = _read(own / f"{name}.json")
        if data:
            told = _own_environment(made.data(kept(data)), made, public_names)
            _tell(target / mark / f"{name}.json", told if name != "runtime-gate" else _sentences_anew(told))
    if (own / "readings.jsonl").exists():
        _lines(target / mark / "readings.jsonl", (made.data(line) for line in _read_lines(own / "readings.jsonl")))
    logs = {log.name: _log(log, target / mark / log.name, made) for log in sorted(own.glob("*rank*.log"))}
    known = _read(target / "logs.json") or {"schema": 1, "logs": {}}
    known["logs"] |= {f"{mark}/{name}": told for name, told in logs.items()}
    _tell(target / "logs.json", known)


def _preflight(data: Mapping[str, Any]) -> dict[str, Any]:
    facts = {host: {key: one.get(key) for key in _FACTS} for host, one in data["hosts"].items()}
    wrapper = {key: (data.get("wrapper") or {}).get(key) for key in ("head", "changes")}
    kept = {key: data[key] for key in ("images", "looks", "gpus", "models") if key in data}
    return {"hosts": facts, "wrapper": wrapper, **kept}


def _gate(data: Mapping[str, Any]) -> dict[str, Any]:
    """The gate without what each host keeps for itself: environment, mounts, ids of containers, and plain hashes of what
    could be guessed."""
    evidence = data["evidence"]
    kept = {key: value for key, value in evidence.items() if key not in ("identity", "runtime_identity")}
    hidden = ("container_id", "command_sha256")
    kept["runtime_identity"] = {
        role: {key: value for key, value in one.items() if key not in hidden}
        for role, one in evidence["runtime_identity"].items()
    }
    kept["inventory"] = {role: one["inventory"] for role, one in evidence["identity"].items()}
    return {key: data[key] for key in ("schema_version", "status", "errors", "requirements")} | {"evidence": kept}


def _sentences_anew(gate: dict[str, Any]) -> dict[str, Any]:
    """The gate with the sentences that its projected comparisons give: none holds what these do not."""
    requirements = {}
    for name, data in gate["requirements"].items():
        verdict = judge(Finding(f"gate.{name}", data), {})
        requirements[name] = data | {"verdict": str(verdict.status), "message": verdict.message}
    return gate | {"errors": broken(requirements), "requirements": requirements}


def _log(log: Path, target: Path, made: Projector) -> dict[str, Any]:
    """The first and the last part of a log, projected line by line; returns what the whole is."""
    raw = log.read_bytes()
    cut = len(raw) > HEAD + TAIL
    head = raw if not cut else raw[: raw.rfind(b"\n", 0, HEAD) + 1]
    tail = raw[raw.find(b"\n", len(raw) - TAIL) + 1 :] if cut else b""
    gap = f"[dspark] {len(raw) - len(head) - len(tail)} bytes are left out here\n" if cut else ""
    text = _log_text(head, made) + gap + _log_text(tail, made)
    _put(target, text.encode("utf-8", "replace"))
    return {"bytes": len(raw), "lines": raw.count(b"\n"), "sha256": hashlib.sha256(raw).hexdigest(), "whole": not cut}


def _log_text(raw: bytes, made: Projector) -> str:
    """A private key may go over several lines; everything else stands in one."""
    lines = raw.decode("utf-8", "replace").split("\n")
    if "PRIVATE KEY" in "".join(lines):
        lines = mask_text("\n".join(lines), made.secrets).split("\n")
    return "\n".join(map(made.text, lines))


# --- the run


def _run(source: Source, made: Projector, fingerprints: Mapping[str, str]) -> dict[str, Any]:
    about = source.about
    told = {key: made.data(about.get(key)) for key in _RUN_FIELDS if key not in _VERBATIM} | {
        key: about.get(key) for key in _RUN_FIELDS if key in _VERBATIM
    }
    profiles = {}
    for mark, one in about["profiles"].items():
        wrapper = {key: (one.get("wrapper") or {}).get(key) for key in ("head", "changes")}
        kept = {key: one.get(key) for key in _PROFILE_FIELDS} | {"wrapper": wrapper}
        kept["kv_cache_size_tokens"] = source.run.known_of(mark, "")["log_pool"]
        profiles[mark] = made.data(kept) | {"fingerprint": fingerprints[source.plans[mark].fingerprint]}
    found = ledger.standing(ledger.read(source.root / ledger.NAME), source.run.run_id)
    recipe = {**about["recipe"], "sha256": _recipe_sha256(source, source.run.path / FOLDER)}
    return {**told, "recipe": recipe, "profiles": profiles, "ledger": found.as_json() if found else None}


def _versions(source: Source, made: Projector) -> dict[str, Any]:
    told = provenance.public(_read(source.run.path / "versions.json"))
    return told | {"changes": made.data(told["changes"])}


def _ledger(source: Source) -> list[dict[str, Any]]:
    return ledger.extract(ledger.read(source.root / ledger.NAME), source.run.run_id)


def _rows(source: Source, target: Path, made: Projector, fingerprints: Mapping[str, str]) -> None:
    """Every row projected, judged again, and sealed anew. Raises Refused if a verdict does not survive."""
    names = {mark: told_names(plan) for mark, plan in source.plans.items()}
    rows = [_row(row, made, names.get(row["profile"], frozenset())) for row in source.run.read()]
    _seal(target / "rows.jsonl", source.run.run_id, rows)
    stub = dict.fromkeys(("junit.xml",), b"<testsuites/>") | {"begun.jsonl": b""}
    for name, data in stub.items():
        _put(target / name, data)
    made_pack = _loaded(target)
    for row in rows:
        _judged_anew(made_pack, row)
    _seal(target / "rows.jsonl", source.run.run_id, rows)


def _row(row: Mapping[str, Any], made: Projector, public_names: frozenset[str]) -> dict[str, Any]:
    told = {key: row.get(key) if key in _VERBATIM else made.data(row.get(key)) for key in ROW_FIELDS if key in row}
    return _own_environment(told, made, public_names) | {"part": row.get("part")}  # type: ignore[no-any-return]


def _judged_anew(made: Pack, row: dict[str, Any]) -> None:
    """The message and the settings of a public row are those of its projected finding."""
    row["settings"] = pack.settings_digest(made, row)
    try:
        verdict = pack.judged(made, row)
    except pack.SHAPE as error:
        raise Refused(f"{row['profile']}/{row['check']}: the projected finding cannot be judged: {error}") from error
    if verdict is None:
        return
    if str(verdict.status) != row["verdict"] and row["code"] != "HARNESS":
        told = f"{row['verdict']} became {verdict.status}"
        raise Refused(f"{row['profile']}/{row['check']}: its verdict does not survive the projection: {told}")
    note = row["message"].rpartition("; run ")
    row["message"] = verdict.message + (f"; run {note[2]}" if "had called this" in note[2] else "")
    row["code"] = verdict.code or None


def _seal(path: Path, run: str, rows: Iterable[Mapping[str, Any]]) -> None:
    before, parts = run.encode(), []
    for row in rows:
        line = sealed(json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace"), before)
        parts.append(line)
        before = line[-67:-3]
    _put(path, b"".join(parts))


def _junit(source: Source, target: Path, made: Projector) -> None:
    rows = _loaded(target).tests
    verdicts = {f"{row['profile']}/{row['check']}": (row["verdict"], row["message"]) for row in rows}
    try:
        stories = {f"{row['profile']}/{row['check']}": headlines.story(row) for row in rows}
        found = junit.derive(source.raw_junit, verdicts, made.text, stories)
        if set(junit.case_ids(source.raw_junit.read_bytes())) != set(junit.case_ids(found)):
            raise Refused("the public junit.xml would not hold the cases of pytest's own")
    except (ValueError, OSError, ElementTree.ParseError) as error:
        raise Refused(f"pytest's report cannot be read: {error}") from error
    _put(target / "junit.xml", found + b"\n")


def derive(target: Path, *, drawn: bool = False) -> None:
    """report.html, PACK.md, SHA256SUMS and the statement, all from what lies in the folder."""
    made = _loaded(target)
    answer = pack.answer(made)
    if set(option2.MARKS) <= set(made.profiles) and not statement.unproven(made):
        parts = [option2.Part(mark, made, answer) for mark in option2.MARKS]
        _put(target / OPTION2, option2.page(*parts).encode("utf-8", "backslashreplace"))
    _put(target / REPORT, report.report(made, drawn=drawn).encode("utf-8", "backslashreplace"))
    sums = {name: value for name, value in sums_of(target).items() if name != PAGE}
    _put(target / PAGE, page.page(made, answer, sums).encode("utf-8", "backslashreplace"))
    sums = sums_of(target)
    _put(target / SUMS, "".join(f"{value}  {name}\n" for name, value in sorted(sums.items())).encode())
    if not statement.unproven(made):
        _tell(target / STATEMENT, statement.build(made, answer, sums))


def _answers(target: Path, source: Source) -> None:
    """run.json with the answer that the published rows give. Raises Refused if that is not the run's own."""
    made = _loaded(target)
    told = {**made.run, **pack.answer(made).as_json()}
    _tell(target / "run.json", told)
    for key in ("accepted", "requirements_met", "publishable", "counts"):
        if told[key] != source.about[key]:
            raise Refused(f"{key} would be {told[key]}, the run says {source.about[key]}")


def _verified(target: Path) -> None:
    """What is published can be verified, but for a statement that there cannot be. Raises Refused."""
    problems = [one for one in verify.examine(target).problems if not one.text.startswith("there is no statement")]
    if problems:
        raise Refused(f"what would be published does not verify: {problems[0]}")


def sums_of(target: Path) -> dict[str, str]:
    return {name: _sha256(target / name) for name in pack.files_of(target) if pack.summed(name)}


def _loaded(target: Path) -> Pack:
    try:
        return pack.load(target)
    except PackError as error:
        raise Refused(f"what would be published cannot be read: {error}") from error


def _search(target: Path, made: Projector) -> None:
    """Raises Refused if anything private lies in what was written."""
    shipped = provenance.shipped()
    for name in pack.files_of(target):
        if _sha256(target / name) in shipped:
            continue
        source, text = name.startswith("inputs/"), (target / name).read_text(encoding="utf-8")
        parts = _parts(name, text)
        found = next((hit for part in parts for hit in made.left(part, source=source)), None)
        if found:
            raise Refused(f"{name}: something private would come out ({found[0]}: {found[1]})")


def _parts(name: str, text: str) -> Iterable[str]:
    """The texts of a file as its reader sees them, without what its format puts before quotes and stars."""
    if name.endswith((".json", ".jsonl")):
        return _leaves(name, text)
    if name.endswith(".xml"):
        return (part for one in ElementTree.fromstring(text).iter() for part in (one.text or "", *one.attrib.values()))
    if name.endswith(".html"):
        return web.plain(text)
    return (tables.unescaped(text) if name.endswith(".md") else text).split("\n")


def _leaves(name: str, text: str) -> Iterator[str]:
    for line in text.split("\n") if name.endswith(".jsonl") else [text]:
        if line:
            yield from _texts(json.loads(line))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (key for key in value if not key.isidentifier())
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


# --- files


def _read(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_bytes()) if path.exists() else {}
    return data if isinstance(data, dict) else {}


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        yield json.loads(line)


def _tell(path: Path, data: Mapping[str, Any]) -> None:
    _put(
        path,
        (json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace"),
    )


def _lines(path: Path, data: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in data)
    _put(path, text.encode("utf-8", "backslashreplace"))


def _put(path: Path, data: bytes) -> None:
    missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _sha256(path: Path) -> str:
    return provenance.file_sha256(path)
