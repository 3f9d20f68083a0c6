"""BFCL through the official bfcl-eval package, in an environment of its own: its questions, its scorer, its files as evidence.

The package writes an error of the server into the field of the model's answer and counts it as wrong. Here such a question is
ERROR, and a category with one has no accuracy.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_dspark import outside
from pytest_dspark.asking import needed
from pytest_dspark.checks import Check
from pytest_dspark.errors import DsparkError
from pytest_dspark.evidence import Stopwatch, write_whole
from pytest_dspark.live import Live
from pytest_dspark.parts import Part, Parts, counts
from pytest_dspark.proportion import share, shown
from pytest_dspark.tally import INFRASTRUCTURE, above_floor, unfinished
from pytest_dspark.verdict import PASS, Finding, Status, Verdict

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint

CATEGORIES: Final = ("multi_turn_base", "multiple", "parallel", "parallel_multiple")
DRIVER: Final = Path(__file__).parents[1] / "bfcl_driver.py"
ERROR_MARK: Final = "Error during inference:"
"""How the package's answer begins when the server or the connection failed."""
IDS_S: Final = 300.0
HOW: Final = "make an environment with bfcl-eval (`dspark data bfcl` says how) and name its python with --dspark-bfcl"


@dataclass(frozen=True, slots=True)
class Client:
    """The package's python, the folder of one category, and what watches over it."""

    python: str
    folder: Path
    env: Mapping[str, str]
    alive: Callable[[], None]
    secrets: tuple[str, ...]

    def call(self, mode: str, asked: Mapping[str, Any], deadline_s: float) -> tuple[dict[str, Any], outside.Ended]:
        """One call of the driver; what it wrote, empty if it wrote nothing. Its exit code is recorded and not believed."""
        out, request = self.folder / f"{mode}-out.json", self.folder / f"{mode}.json"
        out.unlink(missing_ok=True)
        write_whole(request, json.dumps({**asked, "out": str(out)}))
        command = [self.python, str(DRIVER), mode, str(request)]
        log = self.folder / f"{mode}.log"
        ended = outside.run(command, log, env=self.env, deadline_s=deadline_s, alive=self.alive, secrets=self.secrets)
        shutil.rmtree(self.folder / ".file_locks", ignore_errors=True)
        return _table(out), ended


def _table(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _client(endpoint: Endpoint, settings: Mapping[str, Any], category: str) -> Client:
    if not settings.get("bfcl"):
        raise DsparkError("NOT_IMPLEMENTED", f"no environment with bfcl-eval is named; {HOW}")
    folder = Path(settings["artifacts"]) / "bfcl" / category
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    env = outside.environment({"BFCL_PROJECT_ROOT": str(folder), "OPENAI_API_KEY": endpoint.api_key})
    secrets = (endpoint.api_key,) if endpoint.api_key else ()
    return Client(settings["bfcl"], folder, env, endpoint.check_alive, secrets)


def _measure(category: str) -> Callable[..., Finding]:
    def measure(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live, parts: Parts) -> Finding:
        """The category's questions that have no answer yet, by the package's own generation and evaluation."""
        needed(settings, "threads", "timeout_s", "max_tokens", "retries", "temperature", "deadline_s")
        client = _client(endpoint, settings, category)
        version, chosen = _chosen(client, category, settings)
        stored = {name: parts.replayed(name, sha256) for name, sha256 in chosen.items()}
        missing = [name for name, part in stored.items() if part is None]
        asked = _request(endpoint, settings, category, missing)
        cause, ended = _generate(client, asked, settings) if missing else (None, None)
        made = list(_read(client.folder, missing, chosen, parts, cause))
        found = {part.id: part for part in (*filter(None, stored.values()), *made)}
        data = {
            "category": category,
            "package": f"bfcl-eval {version}",
            "asked": len(chosen),
            "settings": {key: value for key, value in asked.items() if key not in ("ids", "base_url")},
            "exit_code": ended.code if ended else None,
            "elapsed_s": round(ended.elapsed_s, 1) if ended else None,
            "files": {f"bfcl/{category}/{name}": sha256 for name, sha256 in outside.hashes(client.folder).items()},
            "cause": {"code": cause.code, "message": cause.message} if cause else None,
        }
        finding = Finding(f"bfcl.{category}", recount(data, [found[name] for name in chosen]))
        live.line(f"bfcl.{category}: {_line(finding.data)}")
        return finding

    return measure


def _chosen(client: Client, category: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The package's version, and the ids of the category with their hashes: all, the first `limit`, or those of `ids`."""
    told, ended = client.call("ids", {"category": category}, IDS_S)
    entries: dict[str, str] = told.get("entries") or {}
    if not entries:
        raise DsparkError(
            "NOT_IMPLEMENTED", f"{client.python} has no usable bfcl-eval: {ended.tail or 'it said nothing'}; {HOW}"
        )
    wanted = settings.get("ids", {}).get(category) or list(entries)[: settings.get("limit") or None]
    strange = [name for name in wanted if name not in entries]
    if strange:
        raise DsparkError("RECIPE_INVALID", f"checks.bfcl.ids.{category}: the package has no {strange[0]!r}")
    return str(told["version"]), {name: entries[name] for name in wanted}


def _request(endpoint: Endpoint, settings: Mapping[str, Any], category: str, ids: Sequence[str]) -> dict[str, Any]:
    knobs = {key: settings[key] for key in ("threads", "timeout_s", "max_tokens", "retries", "temperature")}
    where = {"base_url": f"{endpoint.base_url}/v1", "model": endpoint.model}
    return {"category": category, "ids": list(ids), "thinking": settings.get("thinking"), **where, **knobs}


def _generate(
    client: Client, asked: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[DsparkError | None, outside.Ended | None]:
    """Run the package. What ends it before its end is the cause for all questions that have no answer then."""
    try:
        told, ended = client.call("run", asked, settings["deadline_s"])
    except DsparkError as error:
        return error, None
    if told:
        return None, ended
    text = f"bfcl-eval did not come to its end (exit code {ended.code}): {ended.tail or 'it said nothing'}"
    return DsparkError("HARNESS", text), ended


# --- the package's files


def _read(
    folder: Path, ids: Sequence[str], chosen: Mapping[str, str], parts: Parts, cause: DsparkError | None
) -> Iterator[Part]:
    """The questions as the package's result and score files have them."""
    results = {str(entry["id"]): entry for entry in lines_of(folder / "result") if "id" in entry}
    heads = [entry for entry in lines_of(folder / "score") if "total_count" in entry and "id" not in entry]
    failing = {str(entry["id"]): entry for entry in lines_of(folder / "score") if "id" in entry}
    scored = bool(heads) and sum(_count(head, "total_count") for head in heads) == len(results)
    for name in ids:
        entry, watch = results.get(name), Stopwatch.started()
        problem = _problem(entry, scored=scored, cause=cause)
        if problem:
            yield parts.unanswered(name, problem, watch, tried=entry is not None or cause is None)
        elif entry is not None:
            yield parts.answered(name, part_data(entry, failing.get(name), chosen[name]), watch)


def _count(table: Mapping[str, Any], key: str) -> int:
    value = table.get(key)
    return value if type(value) is int else -1


def _problem(entry: Mapping[str, Any] | None, *, scored: bool, cause: DsparkError | None) -> DsparkError | None:
    """Why a question has no answer of the model."""
    if entry is None:
        return cause or DsparkError("PROTOCOL", "the package left no result of this question")
    said = entry.get("result")
    if isinstance(said, str) and said.startswith(ERROR_MARK):
        return DsparkError("SERVER_ERROR", said[:300])
    if "traceback" in entry:
        return DsparkError("SERVER_ERROR", f"the package recorded an error: {str(entry['traceback'])[-200:]}")
    return None if scored else cause or DsparkError("PROTOCOL", "the package left no score of all its results")


def part_data(entry: Mapping[str, Any], failed: Mapping[str, Any] | None, sha256: str) -> dict[str, Any]:
    """One question as data. `error` is the scorer's own word, empty if the answer is right."""
    text = json.dumps(entry, sort_keys=True, ensure_ascii=False)
    error = (
        ""
        if failed is None
        else json.dumps(failed.get("error") or failed.get("error_type") or "wrong", ensure_ascii=False)
    )
    result_sha256 = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
    return {"sha256": sha256, "right": failed is None, "error": error[:500], "result_sha256": result_sha256}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Every JSON object of the package's files under a folder, a line each; what is no object is left out."""
    found = []
    for path in sorted(folder.rglob("*.json")) if folder.is_dir() else ():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            found += [value] if isinstance(value, dict) else []
    return found


# --- figures and verdict


def judge_part(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    if finding.data["right"] is True:
        return PASS
    return Verdict(Status.FAIL, "WRONG_ANSWER", f"the official scorer: {finding.data['error']}")


def recount(data: Mapping[str, Any], parts: Sequence[Part]) -> Mapping[str, Any]:
    open_ones = sum(part.verdict.status in INFRASTRUCTURE for part in parts)
    missing = f"{open_ones} of {len(parts)} questions have no answer of the model" if open_ones else ""
    right = sum(part.verdict.passed for part in parts)
    return {
        **data,
        "counts": counts(parts),
        "infrastructure": share(open_ones, len(parts)),
        "accuracy": None if missing else share(right, len(parts)),
        "accuracy_missing": missing or None,
        "invalid_for_publish": bool(missing),
    }


def _line(data: Mapping[str, Any]) -> str:
    return shown(data["accuracy"]) if data["accuracy"] else str(data["accuracy_missing"])


def judge(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """ERROR while an answer is missing; then the category's floor decides. Without a floor there is nothing to judge by."""
    data = finding.data
    problem = unfinished(data, data["asked"])
    if problem:
        return problem
    floor = limits.get("floors", {}).get(data["category"])
    if not floor:
        text = f"measured {_line(data)}; the recipe has no floor for {data['category']} to judge it by"
        return Verdict(Status.NOT_IMPLEMENTED, "NOT_IMPLEMENTED", text)
    return above_floor(data["accuracy"], 0, floor, data["category"])


CHECKS = {
    category: Check(_measure(category), judge, exclusive=True, judge_part=judge_part, recount=recount)
    for category in CATEGORIES
}
