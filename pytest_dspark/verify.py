"""`dspark verify`: is a pack what it says? Offline, standard library alone, by somebody who trusts nobody.

Every verdict is judged again from its finding, every derived figure made again, the answer of the run, PACK.md and the
statement made again and compared. What nothing in the pack can show is listed as claimed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

from pytest_dspark import composition, ledger, option2, pack, packfile, page, provenance, report, signing, statement
from pytest_dspark.acceptance import Outcome
from pytest_dspark.audit import SLACK_S, same
from pytest_dspark.checks import Check, resolve
from pytest_dspark.checks.timed import seconds_of
from pytest_dspark.comparison import broken, judge
from pytest_dspark.errors import ConfigError, DsparkError, printable
from pytest_dspark.evidence import ROW_SCHEMA
from pytest_dspark.pack import OPTION2, PAGE, REPORT, SHAPE, STATEMENT, SUMS, Pack, PackError
from pytest_dspark.parts import Part
from pytest_dspark.verdict import Finding, Status, Verdict

UNMEASURED: Final = frozenset({"ERROR", "BLOCKED", "CAPACITY", "NOT_IMPLEMENTED"})
CLAIMED: Final = (
    (
        r"repeats\.samples\.(at_s|wait_s|end_s|read_lag_s)|timing\.end_s",
        "when single streams were sent and ended, within what other figures allow",
    ),
    (
        r"(cases\.)?(reply|whole|streamed|plain|on|off|alone|beside|rounds|streams)\.(prompt_tokens|completion_tokens)",
        "the tokens that the server counted of untimed answers",
    ),
    (
        r"(needles|decoys)\.(offset|tokens)",
        "the exact place of a needle beside the share of the prompt that was asked for",
    ),
    (
        r"calibration\.(server_lateness_s\.p99|stamp_error_s\.max|row_gap_s)",
        "the extremes of the client's calibration and the gap it was made for",
    ),
    (r"(canary\.(before|after)|steps)\.(events|tokens)", "events and tokens of a canary step"),
    (r"warm_up\.(rates|seconds)", "how a row was warmed up"),
    (r"repeats\.server\.preemptions\.value", "preemptions that the server counted"),
    (r"phases\.elapsed_s", "how long each phase of the launch took"),
    (r"progress\.looks", "how often a prefill was looked at"),
    (r"(alone|beside)\.tokens", "log probabilities of answers"),
    (r"churn\.answers|beside\.others", "how much was asked beside a text under load"),
    (r"how\.(\w+\.)?(elapsed_s|asked_now)", "how long a set of questions took"),
)
"""Numbers of a finding that nothing else in a pack shows: pattern of the leaf, and what it is."""
_TEXTS: Final = (
    "run",
    "measured_in",
    "check",
    "lane",
    "profile",
    "recipe",
    "fingerprint",
    "settings",
    "nodeid",
    "verdict",
    "message",
    "started",
    "written_by",
)
_STAMP: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
_TIME_SLACK_S: Final = 0.01
_CUT: Final = 480
"""From this length on a quoted log line may be cut, and its ends projected otherwise than the whole line's."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and in which file of the pack."""

    file: str
    text: str

    def __str__(self) -> str:
        return printable(f"{self.file}: {self.text}").replace("\n", "\\n")


@dataclass(frozen=True, slots=True)
class Report:
    """What a verification found. `claimed` is what the pack says and nothing in it shows; `maker` is who made it, if others
    verify it: a figure that they derive otherwise is a problem too."""

    problems: tuple[Problem, ...]
    claimed: tuple[str, ...] = ()
    signers: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    accepted: bool | None = None
    publishable: bool = False
    maker: str = ""

    @property
    def verified(self) -> bool:
        return not self.problems

    @property
    def line(self) -> str:
        """What is proven and what is only claimed, in one line."""
        if self.problems:
            other = f"; {printable(self.maker)} made it, so verify it with that code too" if self.maker else ""
            return f"NOT verified: {len(self.problems)} problems, the first: {self.problems[0]}{other}"
        rows, leaves = self.counts.get("rows", 0), self.counts.get("files", 0)
        pages = "PACK.md, the report and " if self.counts.get("pages") else ""
        by = f"signed by {', '.join(self.signers)}" if self.signers else "not signed by a key that was given"
        return (
            f"verified, {by}. Proven: {leaves} files unchanged, {rows} rows judged again with the same verdicts, every derived "
            f"figure, the answer, {pages}the statement made again. Only claimed: {printable('; '.join(self.claimed))}"
        )


def verify(path: Path, *, allowed_signers: Path | None = None) -> Report:
    """Verify a pack: a folder, a run folder or an archive. Raises USAGE for what is no pack."""
    try:
        with packfile.opened(path) as folder:
            one = composed if (folder / composition.NAME).is_file() else examine
            return one(folder, allowed_signers=allowed_signers)
    except ValueError as error:
        return Report((Problem(path.name, str(error)),))


def composed(folder: Path, *, allowed_signers: Path | None = None) -> Report:
    """Verify a folder of two packs: each by itself, that they belong together, and the page that joins them."""
    reports = {mark: examine(folder / mark, allowed_signers=allowed_signers) for mark in option2.MARKS}
    problems = [Problem(f"{mark}/{one.file}", one.text) for mark, found in reports.items() for one in found.problems]
    problems += _joined(folder) if not problems else ()
    claimed = dict.fromkeys(
        ("that both ran on the same hosts", *(one for found in reports.values() for one in found.claimed))
    )
    signers = dict.fromkeys(one for found in reports.values() for one in found.signers)
    counts = Counter[str]()
    for found in reports.values():
        counts.update(found.counts)
    publishable = all(found.publishable for found in reports.values())
    accepted = all(found.accepted for found in reports.values())
    return Report(tuple(problems), tuple(claimed), tuple(signers), dict(counts), accepted, publishable)


def _joined(folder: Path) -> Iterator[Problem]:
    parts = [composition.read_part(mark, folder / mark, mark) for mark in option2.MARKS]
    yield from (Problem(composition.NAME, why) for why in option2.disagreements(*parts))
    if pack.raw(folder / OPTION2) != option2.page(*parts).encode("utf-8", "backslashreplace"):
        yield Problem(OPTION2, "is not the page that the packs make")
    told = {
        part.mark: {"run": part.pack.run["run"], "statement": provenance.file_sha256(folder / part.mark / STATEMENT)}
        for part in parts
    }
    yield from _told(
        composition.NAME,
        "composition",
        pack.table(folder / composition.NAME),
        {"schema": 1, "parts": told, "hosts": "the same"},
    )
    if pack.raw(folder / SUMS) != composition.sums_text(folder).encode():
        yield Problem(SUMS, "does not list every file as it is")
    for name in pack.files_of(folder):
        if name.partition("/")[0] not in (*option2.MARKS, composition.NAME, OPTION2, SUMS):
            yield Problem(name, "is no file of a pack")


def examine(folder: Path, *, allowed_signers: Path | None = None, pages: bool = False) -> Report:
    """Verify the folder of a pack. `pages`: its pages are this code's, whatever versions.json says."""
    problems = [Problem(name, why) for name, why in packfile.strange(folder)]
    if problems:
        return Report(tuple(problems))
    sums = sums_of(folder)
    problems += _sums(folder, sums)
    if problems:
        return Report(tuple(problems))
    signed, signers, unsigned = _signatures(folder, allowed_signers)
    problems += signed
    try:
        found = pack.load(folder)
        problems += contents(found)
        problems += _derived(found, sums, pages=pages)
        answer, claimed = pack.answer(found), tuple(claims(found))
    except PackError as error:
        return Report(
            (
                *problems,
                Problem(str(error).partition(":")[0].partition(",")[0], str(error).partition(": ")[2] or str(error)),
            )
        )
    except SHAPE as error:
        return Report((*problems, Problem("run.json", f"has not the shape of a run: {type(error).__name__}: {error}")))
    ours = _comparable(found)
    counts = {"files": len(sums), "rows": len(found.rows), "pages": int(ours)}
    maker = "" if ours else _maker(found)
    return Report(
        tuple(dict.fromkeys(problems)),
        (*unsigned, *claimed),
        signers,
        counts,
        answer.accepted,
        answer.publishable,
        maker,
    )


def contents(found: Pack) -> list[Problem]:
    """What of a pack's contents does not follow from the rest of it."""
    return [problem for examiner in EXAMINERS for problem in _examined(examiner, found)]


def _examined(examiner: Examiner, found: Pack) -> Iterator[Problem]:
    """What an examiner finds; data without the shape that we give it is a finding, too."""
    try:
        yield from examiner(found)
    except PackError as error:
        yield Problem(str(error).partition(":")[0], str(error).partition(": ")[2])
    except DsparkError as error:
        yield Problem("rows.jsonl", error.message)
    except SHAPE as error:
        yield Problem(
            "run.json", f"{examiner.__name__.strip('_')}: has not the shape of a run: {type(error).__name__}: {error}"
        )


# --- files


def sums_of(folder: Path) -> dict[str, str]:
    """sha256 of every file that is summed, each read once."""
    return {name: provenance.file_sha256(folder / name) for name in pack.files_of(folder) if pack.summed(name)}


def _sums(folder: Path, sums: Mapping[str, str]) -> Iterator[Problem]:
    """SHA256SUMS and the statement list every file, no other, as they are."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        yield Problem(SUMS, f"cannot be read: {error}")
        return
    listed = {line[66:]: line[:64] for line in lines[:-1]}
    stated = _configuration(folder) if (folder / STATEMENT).is_file() else listed
    yield from _listed(listed, stated, sums)
    if lines != [*(f"{value}  {name}" for name, value in sorted(listed.items())), ""]:
        yield Problem(SUMS, "is not written as we write it")


def _configuration(folder: Path) -> dict[str, str]:
    try:
        entries = pack.table(folder / STATEMENT)["predicate"]["configuration"]
        return {one["name"]: one["digest"]["sha256"] for one in entries}
    except SHAPE:
        return {}


def _listed(listed: Mapping[str, str], stated: Mapping[str, str], sums: Mapping[str, str]) -> Iterator[Problem]:
    """Of three that must agree the one that does not is named: the file, SHA256SUMS or the statement."""
    for name in sorted(listed.keys() | stated.keys() | sums.keys()):
        one, other, found = listed.get(name), stated.get(name), sums.get(name)
        if found == other != one:
            yield Problem(SUMS, f"does not list {name} as it is")
        elif found == one != other:
            yield Problem(STATEMENT, f"does not list {name} as it is")
        elif found is None:
            yield Problem(name, "is not there, although it is listed")
        elif one is None:
            yield Problem(name, "is not listed")
        elif found != one:
            yield Problem(name, "was changed: its sha256 is another")


def _signatures(folder: Path, allowed: Path | None) -> tuple[list[Problem], tuple[str, ...], tuple[str, ...]]:
    """Problems, signers, and what is only claimed of the signatures."""
    names = signing.signatures(folder)
    if not names:
        missing = [Problem(STATEMENT, "no signature, and keys to check one were given")] if allowed else []
        return missing, (), ("everything that a whole forger writes anew, since nobody signed it",)
    try:
        found = signing.check(folder, allowed)
    except DsparkError as error:
        return (
            ([Problem(names[0], error.message)] if allowed else []),
            (),
            (f"signatures were not checked: {error.message}",),
        )
    problems = [Problem(one.name, one.problem) for one in found if one.problem]
    signers = tuple(one.signer for one in found if one.signer)
    if allowed and not signers and not problems:
        problems.append(Problem(names[0], "is by none of the keys that were given"))
    return problems, signers, () if signers else ("who signed it, since no keys were given",)


# --- rows


def _schema(found: Pack) -> Iterator[Problem]:
    """Every row has the fields of a row, of their types, and belongs to this run."""
    fingerprints = {mark: pack.fingerprint(plan) for mark, plan in found.plans.items()}
    for number, row in enumerate(found.rows, 1):
        for why in _row_schema(found, row, fingerprints):
            yield Problem("rows.jsonl", f"line {number}: {why}")


def _row_schema(found: Pack, row: Mapping[str, Any], fingerprints: Mapping[str, str]) -> Iterator[str]:
    if type(row.get("schema")) is not int or row["schema"] != ROW_SCHEMA:
        yield f"schema is {row.get('schema')!r}, expected {ROW_SCHEMA}"
    yield from (
        f"{name} is {row.get(name)!r}, expected a text" for name in _TEXTS if not isinstance(row.get(name), str)
    )
    for name, kinds in (("code", (str, type(None))), ("part", (str, type(None))), ("finding", (dict, type(None)))):
        if not isinstance(row.get(name), kinds):
            yield f"{name} is {row.get(name)!r}"
    if type(row.get("attempt")) is not int or row["attempt"] < 1:
        yield f"attempt is {row.get('attempt')!r}, expected a number from 1"
    if type(row.get("elapsed_s")) not in (int, float) or row["elapsed_s"] < 0:
        yield f"elapsed_s is {row.get('elapsed_s')!r}, expected seconds"
    if (
        row.get("run") != found.run["run"]
        or row.get("recipe") != found.recipe.name
        or row.get("profile") not in found.plans
    ):
        yield "it is of another run, recipe or profile"
    elif row["fingerprint"] != fingerprints[row["profile"]]:
        yield f"fingerprint is {row['fingerprint']}, plan.json gives {fingerprints[row['profile']]}"
    if row.get("verdict") not in set(Status) or not _STAMP.fullmatch(str(row.get("started"))):
        yield f"verdict is {row.get('verdict')!r}, started {row.get('started')!r}"


@dataclass(slots=True)
class _Known:
    """Checks and settings by name, found once: a pack may have tens of thousands of rows."""

    pack: Pack
    checks: dict[str, Check] = field(default_factory=dict)
    settings: dict[tuple[str, str], tuple[dict[str, Any], str]] = field(default_factory=dict)
    families: dict[tuple[str, str], tuple[Mapping[str, Any] | None, list[Mapping[str, Any]]]] = field(
        default_factory=dict
    )

    def check(self, name: str) -> Check:
        if name not in self.checks:
            self.checks[name] = resolve(name)
        return self.checks[name]

    def parts(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The rows of the questions of a case, in their order."""
        return self._families()[_case_of(row)][1]

    def whole(self, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The row of the case to which a question belongs; None if there is none yet."""
        return self._families()[_case_of(row)][0]

    def _families(self) -> dict[tuple[str, str], tuple[Mapping[str, Any] | None, list[Mapping[str, Any]]]]:
        if not self.families:
            for row in self.pack.rows:
                _, parts = self.families.setdefault(_case_of(row), (None, []))
                if row.get("part") is None:
                    self.families[_case_of(row)] = row, parts
                else:
                    parts.append(row)
        return self.families

    def lane(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        key = row["profile"], row["lane"]
        if key not in self.settings:
            self.settings[key] = self.pack.lane(*key), pack.settings_digest(self.pack, row)
        return self.settings[key]


def _case_of(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["profile"], row["check"]


def _verdicts(found: Pack) -> Iterator[Problem]:
    """Every verdict follows from its finding, and the finding from itself and from the recipe."""
    known = _Known(found)
    for number, row in enumerate(found.rows, 1):
        try:
            for why in row_problems(found, row, known):
                yield Problem("rows.jsonl", f"line {number}, {row['profile']}/{row['check']}: {why}")
        except ConfigError as error:
            yield Problem("rows.jsonl", f"line {number}: {error.message}")
        except SHAPE as error:
            what = f"the finding cannot be judged: {type(error).__name__}: {error}"
            yield Problem("rows.jsonl", f"line {number}, {row.get('check')}: {what}")


def row_problems(found: Pack, row: Mapping[str, Any], known: _Known | None = None) -> Iterator[str]:
    """What is wrong with one row. Raises what SHAPE lists for a finding that no measurement gives."""
    known = known or _Known(found)
    check = known.check(row["check"])
    settings, digest = known.lane(row)
    if row["settings"] != digest:
        yield f"settings are {row['settings']}, recipe and profile give {digest}"
    if row["lane"] != row["check"].partition(".")[0]:
        yield f"lane is {row['lane']}"
    if row["finding"] is None:
        if row["verdict"] not in UNMEASURED or not row["code"]:
            yield f"it has no finding, and its verdict is {row['verdict']} {row['code']}"
        return
    verdict = pack.judged(found, row, settings)
    if verdict is None:
        return  # a question of a check that judges the whole alone
    yield from _same_verdict(row, str(verdict.status), verdict.code or None, verdict.message)
    if row.get("part") is None:
        yield from check.audit(Finding(row["check"], row["finding"]), settings)
        yield from _counted(check, row, known.parts(row))
        yield from _in_time(row)
    else:
        yield from _question(check, row, known.whole(row))


def _counted(check: Check, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The counts of a check that writes a row a question, made again from these rows."""
    if check.recount is not None:
        data = row["finding"]
        yield from same("finding", data, check.recount(data, [_part(one) for one in rows]))


def _part(row: Mapping[str, Any]) -> Part:
    return Part(row["part"], Verdict(Status(row["verdict"]), row["code"] or "", row["message"]), row["finding"])


def _question(check: Check, row: Mapping[str, Any], whole: Mapping[str, Any] | None) -> Iterator[str]:
    """A question's row belongs to that of its case: the same attempt or an earlier one, and over before it is over."""
    if check.audit_part is not None:
        yield from check.audit_part(_part(row))
    if whole is None:
        return  # a run that was killed: the case has no row yet
    if row["attempt"] > whole["attempt"]:
        yield f"attempt is {row['attempt']} of a case with attempt {whole['attempt']}"
    if row["measured_in"] == whole["measured_in"] and _end(row) > _end(whole) + SLACK_S:
        yield f"elapsed_s is {row['elapsed_s']!r}: it ended after its case"


def _end(row: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(row["started"]).timestamp() + float(row["elapsed_s"])


def _same_verdict(row: Mapping[str, Any], status: str, code: str | None, message: str) -> Iterator[str]:
    if row["code"] == "HARNESS" and row["verdict"] == "ERROR" and status == "ERROR":
        return
    if (row["verdict"], row["code"]) != (status, code):
        yield f"it says {row['verdict']} {row['code'] or ''}, its finding is judged {status} {code or ''}: {message}"
    rest = row["message"].removeprefix(message)
    if not row["message"].startswith(message) or (rest and "had called this" not in rest):
        yield f"its message is {row['message']!r}, its finding says {message!r}"


def _in_time(row: Mapping[str, Any]) -> Iterator[str]:
    """A row took at least as long as what it holds."""
    data = row["finding"]
    if "repeats" in data and "headline" in data:
        least = seconds_of(data)
    elif isinstance(data.get("timing"), dict):
        least = data["timing"].get("end_s") or 0.0
    else:
        return
    if least > row["elapsed_s"] + SLACK_S:
        yield f"elapsed_s is {row['elapsed_s']!r}, what it holds took at least {least!r} s"


# --- rows and their neighbours


def _gate(found: Pack) -> Iterator[Problem]:
    """Rows of gate and teardown say what the files of the gate and of the stop say."""
    for mark in found.plans:
        rows = {row["check"]: row for row in found.tests if row["profile"] == mark and row["finding"]}
        gate = _optional(found.path / mark / "runtime-gate.json")
        told = gate["requirements"] if gate else {}
        for name in {check.partition(".")[2] for check in rows if check.startswith("gate.")} | told.keys():
            data = {key: value for key, value in told.get(name, {}).items() if key not in ("verdict", "message")}
            row = rows.get(f"gate.{name}")
            if row is not None:
                yield from _told(f"{mark}/runtime-gate.json", f"requirements.{name}", data, row["finding"])
        if gate:
            yield from _gate_itself(found, mark, gate)
        stop, row = _optional(found.path / mark / "teardown.json"), rows.get("teardown")
        if row is not None:
            yield from _told(f"{mark}/teardown.json", "result", stop, row["finding"]["result"])


def _gate_itself(found: Pack, mark: str, gate: Mapping[str, Any]) -> Iterator[Problem]:
    """The file by itself: status and errors follow from its requirements, and it is of this profile."""
    name = f"{mark}/runtime-gate.json"
    errors = broken(gate["requirements"])
    yield from _told(name, "status", gate["status"], "FAIL" if errors else "PASS")
    yield from _told(name, "errors", gate["errors"], errors)
    for one, data in gate["requirements"].items():
        verdict = judge(Finding(f"gate.{one}", data), {})
        told = {"verdict": str(verdict.status), "message": verdict.message}
        yield from _told(name, f"requirements.{one}", {key: data[key] for key in told}, told)
    yield from _told(name, "schema_version", gate["schema_version"], 3)
    yield from _told(name, "evidence.profile", gate["evidence"]["profile"], found.profiles[mark].name)
    sizes = [one.get("kv_cache_size_tokens") for one in gate["evidence"]["runtime_logs"].values()]
    pool = min((size for size in sizes if size), default=None)
    yield from _told(
        "run.json",
        f"profiles.{mark}.kv_cache_size_tokens",
        found.run["profiles"][mark].get("kv_cache_size_tokens"),
        pool,
    )
    hidden = found.run["profiles"][mark].get("proven")
    yield from _told("run.json", f"profiles.{mark}.proven", hidden, not errors)


def _markers(found: Pack) -> Iterator[Problem]:
    """A log line that the gate quotes stands in the rank's log where it says."""
    told = (_optional(found.path / "logs.json") or {"logs": {}})["logs"]
    quoted: dict[str, list[tuple[int, str, str]]] = {}
    for row in found.tests:
        if row["check"] in ("gate.markers", "gate.forbidden") and row["finding"]:
            for one in row["finding"]["comparisons"]:
                if isinstance(one["found"], list) and len(one["found"]) == 2 and type(one["found"][0]) is int:
                    name = f"{row['profile']}/rank{one['rank']}.log"
                    quoted.setdefault(name, []).append((*one["found"], one["what"]))
    for name, lines in quoted.items():
        if name in told:
            yield from _quoted(found.path, name, lines, whole=told[name]["whole"])


def _quoted(folder: Path, name: str, quoted: Sequence[tuple[int, str, str]], *, whole: bool) -> Iterator[Problem]:
    with (folder / name).open(encoding="utf-8", errors="replace", newline="\n") as file:
        lines = list(islice(file, max(number for number, _, _ in quoted)))
    for number, text, what in quoted:
        if number <= len(lines) and len(text) < _CUT and text.strip() not in lines[number - 1]:
            yield Problem(name, f"line {number} is not the line that {what} quotes")
        if number > len(lines) and whole:
            yield Problem(name, f"has no line {number}, which {what} quotes")


def _logs(found: Pack) -> Iterator[Problem]:
    """logs.json lists every log, and a log that is said to be whole has as many lines."""
    told = pack.table(found.path / "logs.json")
    names = [name for name in pack.files_of(found.path) if name.endswith(".log")]
    yield from _told("logs.json", "logs", sorted(told["logs"]), names)
    for name, one in told["logs"].items():
        count = pack.raw(found.path / name).count(b"\n") if name in names else None
        if one["whole"] and count != one["lines"] and b"***" not in pack.raw(found.path / name):
            yield Problem("logs.json", f"{name}: lines is {one['lines']}, there are {count}")
        if not re.fullmatch(r"[0-9a-f]{64}", str(one["sha256"])) or one["bytes"] < one["lines"]:
            yield Problem("logs.json", f"{name}: bytes or sha256 cannot be right")


def _optional(path: Path) -> Any:
    return pack.table(path) if path.is_file() else None


def _needles(found: Pack) -> Iterator[Problem]:
    """All cells of a profile were asked of one engine: one window, one pool, one template."""
    for mark in found.plans:
        cells = [
            row["finding"]
            for row in found.tests
            if row["profile"] == mark and row["lane"] == "needle" and row["finding"]
        ]
        for cell in cells[1:]:
            keys = [
                key for key in ("window", "pool_tokens", "pool_source", "template") if key in cell and key in cells[0]
            ]
            yield from _told(
                "rows.jsonl", f"{mark}/needle", {key: cell[key] for key in keys}, {key: cells[0][key] for key in keys}
            )
        pool = found.run["profiles"][mark].get("kv_cache_size_tokens")
        windows = [one["found"] for one in _of_gate(found, mark, "gate.model") if one["what"] == "max_model_len"]
        for cell in cells:
            yield from _told("rows.jsonl", f"{mark}/needle: window", [cell["window"]] * len(windows), windows)
            if cell["pool_source"] == "engine log" and cell["pool_tokens"] != pool:
                yield Problem("rows.jsonl", f"{mark}/needle: pool_tokens is {cell['pool_tokens']}, the logs say {pool}")


def _of_gate(found: Pack, mark: str, check: str) -> Iterator[Mapping[str, Any]]:
    """The comparisons of a requirement of the gate."""
    for row in found.tests:
        if (row["profile"], row["check"]) == (mark, check) and row["finding"]:
            yield from row["finding"]["comparisons"]


def _told(file: str, name: str, value: Any, expected: Any) -> Iterator[Problem]:
    yield from (Problem(file, why) for why in same(name, value, expected))


def _cases(found: Pack) -> Iterator[Problem]:
    """The cases of junit.xml and the rows of tests, one to one."""
    rows = Counter(f"{row['profile']}/{row['check']}" for row in found.tests)
    cases = pack.cases(found)
    counted = Counter(name for name, _ in cases)
    lost = {
        f"{row['profile']}/{row['check']}" for row in found.tests if row["code"] == "HARNESS" and not row["finding"]
    }
    cut = found.run["status"] != "complete"  # what was running when somebody interrupted, or a worker died, has no case
    for name in sorted(rows.keys() | counted.keys()):
        least = 0 if cut or name in lost else rows[name]
        if not least <= counted[name] <= rows[name]:
            yield Problem("junit.xml", f"{name}: {counted[name]} cases, {rows[name]} rows")
    known = {f"{row['profile']}/{row['check']}": row for row in found.tests}
    for name, case in cases:
        if name in known:
            yield from (Problem("junit.xml", f"{name}: {why}") for why in _case(case, known[name]))


def _case(case: Mapping[str, str], row: Mapping[str, Any]) -> Iterator[str]:
    if case["verdict"] != row["verdict"]:
        yield f"it says {case['verdict']}, the row {row['verdict']}"
    tags = {"FAIL": "failure", "TOKEN_LIMIT": "failure", "NOT_IMPLEMENTED": "skipped", "PASS": ""}
    ended_badly = row["verdict"] == "PASS" and case["tag"] == "error"  # in its teardown, which has no verdict
    if case["tag"] != tags.get(row["verdict"], "error") and case["problems"] == "1" and not ended_badly:
        yield f"it is a <{case['tag'] or 'pass'}>, the row says {row['verdict']}"
    if case["tag"] and case["text"] != case["message"]:
        yield "its text is not its message"
    wanted = f"{row['verdict']}: {row['message'].removeprefix(row['verdict']).lstrip(' :')}"[:2000]
    if case["tag"] and case["message"] != wanted:
        yield f"its message is {case['message'][:200]!r}, the row gives {wanted[:200]!r}"
    if not row["nodeid"].endswith(f"::{case['name']}"):
        yield f"it is called {case['name']}, the row is of {row['nodeid']}"
    for key in ("run", "measured_in", "profile", "recipe", "fingerprint"):
        if case.get(f"dspark_{key}") != row[key]:
            yield f"its {key} is {case.get(f'dspark_{key}')}, the row's {row[key]}"
    if row["measured_in"] == row["run"] and row["elapsed_s"] > float(case["time"]) + _TIME_SLACK_S:
        yield f"elapsed_s of the row is {row['elapsed_s']}, the case took {case['time']} s"


def _attempts(found: Pack) -> Iterator[Problem]:
    """Every measurement that was begun has its row, and every measured row was begun as often as it says."""
    begun = Counter((one["profile"], one["check"], one["nodeid"]) for one in found.begun)
    last = {(one["profile"], one["check"], one["nodeid"]): one["attempt"] for one in found.begun}
    rows = Counter((row["profile"], row["check"], row["nodeid"]) for row in found.tests)
    for key, count in begun.items():
        if count > rows[key] and found.run["status"] == "complete":
            yield Problem("begun.jsonl", f"{key[0]}/{key[1]} was begun {count} times, there are {rows[key]} rows of it")
    for row in found.tests:
        key = row["profile"], row["check"], row["nodeid"]
        here = row["measured_in"] == row["run"] and row["finding"] is not None
        if here and resolve(row["check"]).source == "endpoint" and last.get(key) != row["attempt"]:
            yield Problem("begun.jsonl", f"{key[0]}/{key[1]}: attempt {row['attempt']} of the row was never begun")
        if here and resolve(row["check"]).source != "endpoint" and row["attempt"] != 1:
            yield Problem("rows.jsonl", f"{key[0]}/{key[1]}: attempt {row['attempt']} of what is never tried again")
    for one in found.begun:
        if not _STAMP.fullmatch(str(one["began"])) or set(one) != {"profile", "check", "nodeid", "attempt", "began"}:
            yield Problem("begun.jsonl", "has another shape")


def _parts(found: Pack) -> Iterator[Problem]:
    """Rows of single questions belong to the row of a test, and no question has two."""
    tests = {(row["profile"], row["check"]) for row in found.tests}
    seen = Counter((row["profile"], row["check"], row["part"]) for row in found.rows if row.get("part") is not None)
    for (profile, check, part), count in seen.items():
        if count > 1:
            yield Problem("rows.jsonl", f"{profile}/{check}: {part} is there {count} times")
        if (profile, check) not in tests:
            yield Problem("rows.jsonl", f"{profile}/{check}: there is no row of the whole, only {part}")


# --- the run


def _plans(found: Pack) -> Iterator[Problem]:
    """Plans, profiles and recipe are those that the pack holds."""
    for mark, plan in found.plans.items():
        name = f"{mark}/plan.json"
        told: dict[str, Any] = {"mark": mark, "profile": found.profiles[mark].name, "recipe": found.recipe.name}
        told |= {"profile_sha256": found.profiles[mark].sha256, "recipe_sha256": found.recipe.sha256}
        told["fingerprint"] = pack.fingerprint(plan)
        told |= {
            "warnings": list(found.settings[mark].warnings),
            "unpublishable": list(found.settings[mark].unpublishable),
        }
        yield from _told(name, "plan", {key: plan[key] for key in told}, told)
        one = found.run["profiles"][mark]
        named = {"profile": told["profile"], "recipe": told["recipe"], "fingerprint": told["fingerprint"]}
        yield from _told("run.json", f"profiles.{mark}", {key: one[key] for key in named}, named)
        yield from _told("run.json", f"profiles.{mark}.unpublishable", one["unpublishable"], told["unpublishable"])
        yield from _ranks(found, mark, plan)
    yield from _told("run.json", "recipe.name", found.run["recipe"]["name"], found.recipe.name)
    yield from _told("run.json", "recipe.sha256", found.run["recipe"]["sha256"], found.recipe.sha256)
    yield from _told("run.json", "recipe.sources", found.run["recipe"]["sources"], list(found.recipe.sources))
    yield from _told("run.json", "rehearsal", found.run["rehearsal"], found.recipe.rehearsal)


def _ranks(found: Pack, mark: str, plan: Mapping[str, Any]) -> Iterator[Problem]:
    """The launch was of the planned ranks."""
    ranks = [(rank["rank"], rank["host"]) for rank in plan["ranks"]]
    yield from _told(f"{mark}/plan.json", "ranks", [rank for rank, _ in ranks], list(range(len(ranks))))
    for row in found.tests:
        if row["profile"] == mark and row["check"] == "launch" and row["finding"]:
            told = [[one["rank"], one["host"]] for one in row["finding"]["ranks"]]
            yield from _told("rows.jsonl", f"{mark}/launch: ranks", told, [list(one) for one in ranks])
    before = _optional(found.path / mark / "preflight.json")
    if before:
        yield from _told(
            "run.json", f"profiles.{mark}.wrapper", found.run["profiles"][mark]["wrapper"], before["wrapper"]
        )


def _answer(found: Pack) -> Iterator[Problem]:
    """run.json says what follows from rows, recipe and profiles."""
    told = pack.answer(found).as_json()
    yield from _told("run.json", "run", {key: found.run.get(key) for key in told}, told)
    for mark, checks in found.run["selected"].items():
        there = sorted({row["check"] for row in found.tests if row["profile"] == mark})
        missing = sorted(set(there) - set(checks))
        if missing:
            yield Problem("run.json", f"selected.{mark} lacks {', '.join(missing)}, of which there are rows")
    if (
        not (_STAMP.fullmatch(found.run["started"]) and _STAMP.fullmatch(found.run["ended"]))
        or found.run["ended"] < found.run["started"]
    ):
        yield Problem("run.json", f"it began at {found.run['started']} and ended at {found.run['ended']}")
    if found.run["schema"] != pack.SCHEMA or found.run["exit_status"] not in range(6):
        yield Problem("run.json", f"schema is {found.run['schema']!r}, exit_status {found.run['exit_status']!r}")
    for row in found.tests:
        if row["measured_in"] == row["run"] and not found.run["started"] <= row["started"] <= found.run["ended"]:
            yield Problem("rows.jsonl", f"{row['check']} began at {row['started']}, outside the run")


def _readings(found: Pack) -> Iterator[Problem]:
    """What run.json says of the hosts' memory and heat is in the readings."""
    for mark in found.plans:
        path, hosts = found.path / mark / "readings.jsonl", found.run["profiles"][mark].get("hosts") or {}
        lines = list(pack.lines(path)) if path.is_file() else []
        for host, told in hosts.items():
            mine = [line for line in lines if line["host"] == host]
            name = f"profiles.{mark}.hosts.{host}"
            if told["readings"] > len(mine):
                yield Problem("run.json", f"{name}.readings is {told['readings']}, there are {len(mine)} lines")
            for key, one in (("least_free_memory_gib", "free_memory_gib"), ("most_temperature_c", "temperature_c")):
                if told[key] is not None and told[key] not in [line[one] for line in mine]:
                    yield Problem("run.json", f"{name}.{key} is {told[key]}, which was never read")


def _ledger(found: Pack) -> Iterator[Problem]:
    """The chain holds, this run stands in it with its own end, and the others of its configuration are told."""
    yield from (Problem("ledger.jsonl", why) for why in ledger.problems(found.ledger))
    standing = ledger.standing(found.ledger, found.run["run"])
    if standing is None:
        yield Problem("ledger.jsonl", f"run {found.run['run']} never began")
        return
    yield from _told("run.json", "ledger", found.run["ledger"], standing.as_json())
    bodies = [line["body"] for line in found.ledger if line.get("body")]
    end = [body for body in bodies if body["event"] == "ended" and body["run"] == found.run["run"]]
    if len(end) != 1:
        yield Problem("ledger.jsonl", f"run {found.run['run']} ended {len(end)} times")
        return
    yield from _told(
        "ledger.jsonl", "verdicts", end[0]["verdicts"], dict(Counter(row["verdict"] for row in found.tests))
    )
    yield from _told("ledger.jsonl", "accepted", end[0]["accepted"], pack.answer(found).accepted)
    yield from _told("ledger.jsonl", "status", end[0]["status"], found.run["status"])
    yield from _told("ledger.jsonl", "publishable", end[0]["publishable"], pack.answer(found).publishable)
    for body in bodies:
        if body["run"] != found.run["run"] and body["run"] not in [one["run"] for one in standing.others]:
            yield Problem("ledger.jsonl", f"run {body['run']} has another configuration, and is told")


def _suites(found: Pack) -> Iterator[Problem]:
    """The suites are those that the run used, and those that we have ourselves."""
    sources = pack.table(found.path / "sources.json")["files"]
    names = [name for name in pack.files_of(found.path) if name.startswith("inputs/")]
    yield from _told("sources.json", "files", sorted(sources), names)
    suites = {name.rpartition("/")[2]: name for name in names if name.startswith("inputs/suites/")}
    yield from _told("versions.json", "suites", sorted(found.versions["suites"]), sorted(suites))
    used = {row["nodeid"].partition("::")[0].rpartition("/")[2] for row in found.tests}
    for name in sorted(used - suites.keys()):
        yield Problem("versions.json", f"the suite {name} of a row is not there")
    for name, path in suites.items():
        if not sources[path]["projected"] and provenance.file_sha256(found.path / path) != found.versions["suites"].get(
            name
        ):
            yield Problem(path, "is not the suite whose sha256 versions.json says")
    if found.versions["changes"] and not any("own files are changed" in str(one) for one in found.run["stated"]):
        yield Problem(
            "run.json", "stated does not say that pytest-dspark's own files are changed, as versions.json does"
        )
    if _comparable(found):
        yield from _like_ours(found)


def _comparable(found: Pack) -> bool:
    """Whether our own installation is of the version, and of the commit if both are known, that made the pack."""
    mine, theirs = provenance.commit(), found.versions["commit"]
    return found.versions["pytest_dspark"] == provenance.version() and not (mine and theirs and mine != theirs)


def _maker(found: Pack) -> str:
    version, commit = found.versions["pytest_dspark"] or "of no version", found.versions["commit"]
    return f"{provenance.DISTRIBUTION} {version}, commit {commit or 'unknown'}"


def _like_ours(found: Pack) -> Iterator[Problem]:
    mine = provenance.own_suites()
    for name, digest in found.versions["suites"].items():
        disclosed = f"suite {name} is not the one of {provenance.DISTRIBUTION}" in found.run["stated"]
        if mine.get(name) != digest and not disclosed:
            yield Problem(f"inputs/suites/{name}", "is not the suite of the pytest-dspark that verifies")
    files = provenance.own_files()
    differ = sorted(
        name
        for name in files.keys() | found.versions["files"].keys()
        if files.get(name) != found.versions["files"].get(name)
    )
    if differ and not found.versions["changes"]:
        yield Problem("versions.json", f"files differ from the pytest-dspark that verifies: {', '.join(differ[:3])}")


def _sanitizer(found: Pack) -> Iterator[Problem]:
    """The planted side file went through, and nothing of it came out."""
    told = pack.table(found.path / "sanitizer.json")
    if told["came_out"] != 0 or told["planted"] != len(told["rules"]) or not told["rules"] or told["schema"] != 1:
        yield Problem(
            "sanitizer.json", f"planted {told['planted']}, came out {told['came_out']}, rules {len(told['rules'])}"
        )
    names = pack.table(found.path / "pseudonyms.json")["sha256_of_nonce_and_name"]
    if not all(re.fullmatch(r"[0-9a-f]{64}", str(value)) for value in names.values()):
        yield Problem("pseudonyms.json", "holds what is no sha256")


Examiner = Callable[[Pack], Iterator[Problem]]
EXAMINERS: Final[Sequence[Examiner]] = (
    _needles,
    *(
        _schema,
        _verdicts,
        _parts,
        _gate,
        _markers,
        _logs,
        _cases,
        _attempts,
        _plans,
        _answer,
        _readings,
        _ledger,
        _suites,
    ),
    _sanitizer,
)


def _derived(found: Pack, sums: Mapping[str, str], *, pages: bool) -> Iterator[Problem]:
    """PACK.md, the report and the statement, made again. The pages of another version may be laid out otherwise: then they
    are claimed, and who verifies makes pages of their own."""
    answer = pack.answer(found)
    if pages or _comparable(found):
        yield from _pages(found, answer, sums)
    why = statement.unproven(found)
    yield from _option2(found, answer, proven=not why)
    there = (found.path / STATEMENT).is_file()
    if why:
        yield Problem(STATEMENT, f"there is a statement, and {why}" if there else f"there is no statement: {why}")
    elif not there:
        yield Problem(STATEMENT, "is not there, although what ran is proven")
    else:
        made = json.dumps(statement.build(found, answer, sums), indent=1, ensure_ascii=False) + "\n"
        if pack.raw(found.path / STATEMENT) != made.encode("utf-8", "backslashreplace"):
            yield Problem(STATEMENT, "is not the statement that the pack's files make")


def _pages(found: Pack, answer: Outcome, sums: Mapping[str, str]) -> Iterator[Problem]:
    without = {name: value for name, value in sums.items() if name != PAGE}
    if pack.raw(found.path / PAGE) != page.page(found, answer, without).encode("utf-8", "backslashreplace"):
        yield Problem(PAGE, "is not the page that the pack's files make")
    yield from (Problem(REPORT, why) for why in report.problems(found))


def _option2(found: Pack, answer: Outcome, *, proven: bool) -> Iterator[Problem]:
    """The report of both profiles, where one run has both."""
    there = (found.path / OPTION2).is_file()
    if not (proven and set(option2.MARKS) <= set(found.profiles)):
        if there:
            yield Problem(OPTION2, "is there, although the run has not proven both profiles")
        return
    parts = [option2.Part(mark, found, answer) for mark in option2.MARKS]
    if not there or (
        _comparable(found)
        and pack.raw(found.path / OPTION2) != option2.page(*parts).encode("utf-8", "backslashreplace")
    ):
        yield Problem(OPTION2, "is not the page that the pack's files make")


def claims(found: Pack) -> Iterator[str]:
    """What the pack says and nothing in it shows."""
    yield "that the engine answered what the findings hold, in the times that they hold"
    yield f"numbers that stand alone ({', '.join(what for _, what in CLAIMED)})"
    yield "that no run was made under another evidence root, or taken out of the ledger with all that came after it written anew"
    if not _comparable(found):
        yield f"the suites and the code of {_maker(found)}, since others verify"
        yield f"every sentence of {PAGE} and {REPORT}, which that code laid out (dspark report makes the report anew from the rows)"
    elif found.versions["changes"]:
        yield "the code of pytest-dspark, which was changed when it ran"
    yield "what changed since an earlier run, which is another pack, and the drawings of report.html, whose numbers are in its tables"
    sources = pack.table(found.path / "sources.json")["files"]
    changed = [name for name, one in sources.items() if one["projected"]]
    if changed:
        yield f"that {', '.join(changed)} differ from the originals by pseudonyms alone"
