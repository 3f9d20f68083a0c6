"""A pack as an entry of r0b0bench's results ledger, and the check of its published schema, version 1 (r0b0bench-results-entry-v1).

Every score is made again from the stored streams of rows that are judged anew; a lane that was not measured is not there. What
our lanes measure is not always what r0b0bench's lanes of that name do, so each says how, and the harness is our own name.
Standard library alone.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from pytest_dspark.load import output_rate
from pytest_dspark.pack import SHAPE, Pack, answer, judged
from pytest_dspark.tables import Row, graphs_of

SYSTEMS: Final = ("canary", "bfcl_mt", "bfcl_ast", "latency", "concurrency", "throughput", "niah")
"""The lanes of r0b0bench's profile `systems`; an entry that lacks one is not valid for publishing there."""
_BAD: Final = ("ERROR", "FAIL", "TOKEN_LIMIT", "CAPACITY", "BLOCKED")
_INFRASTRUCTURE: Final = frozenset({"ERROR", "BLOCKED", "CAPACITY"})
_ENTRY_ID: Final = re.compile(r"[a-z0-9][a-z0-9._-]{2,127}")
_METHODS: Final = {
    "canary": "canary questions of the gate, asked before anything else",
    "latency": "one stream through the chat template, forced length, every repeat counted, cold cache; the gap is between events",
    "concurrency": "all streams at once, forced length, unique prompts; all output tokens / (last token - first byte sent)",
    "throughput": "one stream, forced length; decode (prose; by prompt class beside it) = (tokens - 1) / (last - first token time)",
    "niah": "one POST a cell, prompt exact to the token as the server counts, cold",
}


def entry(pack: Pack) -> dict[str, Any]:
    """The entry. Raises ValueError for a pack of which none can be made, with the reason."""
    if pack.run["endpoint"]:
        raise ValueError("nothing proves what answered at --dspark-endpoint, so there is no model to enter")
    found = answer(pack)
    scores = dict(_scores(pack))
    missing = [lane for lane in SYSTEMS if lane not in scores]
    good = found.publishable and not missing and all(one["status"] == "PASS" for one in scores.values())
    texts = next(iter(pack.settings.values())).texts
    made = {
        "schema_version": 1,
        "entry_id": _entry_id(pack, texts),
        "recorded_utc": pack.run["ended"],
        "model": _model(pack, texts),
        "runtime": _runtime(pack),
        "harness": {"name": "pytest-dspark", "version": str(pack.versions["pytest_dspark"]), "profile": "systems"},
        "scores": scores,
        "infra_errors_total": sum(1 for row in pack.tests if _verdict(pack, row) in _INFRASTRUCTURE),
        "invalid_for_publish": not good,
        "disclosures": [*found.reasons, *found.disclosures, *_disclosed(missing)],
        "artifact_roots_private": [],
    }
    wrong = list(problems(made))
    if wrong:
        raise ValueError(f"the entry does not keep the schema: {wrong[0]}")
    return made


def _entry_id(pack: Pack, texts: Mapping[str, str]) -> str:
    name = re.sub(r"[^a-z0-9._-]+", "-", texts.get("SERVED_MODEL_NAME", "model").lower()).strip("-._") or "model"
    return f"{name[:60]}-{'-'.join(pack.profiles)[:40].replace('_', '-')}-{pack.run['run'].lower()}"


def _model(pack: Pack, texts: Mapping[str, str]) -> dict[str, Any]:
    name = texts.get("SERVED_MODEL_NAME", "unknown")
    told: dict[str, Any] = {
        "id": name,
        "display_name": f"{name} ({', '.join(one.name for one in pack.profiles.values())})",
    }
    revision = _found(pack, "gate.pins", "pin model revision")
    return told | ({"revision": revision} if revision else {})


def _runtime(pack: Pack) -> dict[str, Any]:
    """What ran, as it was found and never as it was asked for; what was not seen is not there."""
    told = {
        "image_id": _found(pack, "gate.image", "running image is the image looked at"),
        "package": _found(pack, "gate.pins", "pin package"),
        "integrated_vllm": _found(pack, "gate.pins", "pin integrated vllm"),
    }
    plans = {mark: f"{len(plan['ranks'])} ranks" for mark, plan in pack.plans.items()}
    pools = {mark: one.get("kv_cache_size_tokens") for mark, one in pack.run["profiles"].items()}
    return {
        **{key: value for key, value in told.items() if value},
        "base_url_omitted": True,
        "cudagraph": graphs_of(pack.rows),
        "kv_cache_size_tokens": {mark: pool for mark, pool in pools.items() if pool is not None},
        "ranks": plans,
        "profiles": {mark: dict(settings.texts) for mark, settings in pack.settings.items()},
    }


def _found(pack: Pack, check: str, what: str) -> str:
    for row in pack.tests:
        for one in row["finding"]["comparisons"] if row["check"] == check and row["finding"] else ():
            if one["what"] == what and one["found"]:
                return str(one["found"])
    return ""


def _disclosed(missing: Sequence[str]) -> Iterator[str]:
    yield "measured by pytest-dspark, whose lanes are not r0b0bench's: `method` of each lane says how"
    if missing:
        yield f"not measured: {', '.join(missing)}"


# --- scores


def _verdict(pack: Pack, row: Row) -> str:
    """The verdict of a row as it is judged now; of a row without a finding the stored one, which never is PASS."""
    try:
        found = judged(pack, row)
    except SHAPE:
        return "ERROR"
    return str(found.status) if found else str(row["verdict"])


def _scores(pack: Pack) -> Iterator[tuple[str, dict[str, Any]]]:
    lanes: tuple[tuple[str, Callable[[Row], bool], Callable[[Sequence[Row]], dict[str, Any]]], ...] = (
        ("canary", lambda row: row["check"] == "gate.canaries", _canary),
        ("latency", lambda row: row["check"] == "performance.latency", _latency),
        ("concurrency", lambda row: row["check"].removeprefix("concurrency.c").isdigit(), _ladder),
        (
            "throughput",
            lambda row: row["check"].startswith(("performance.decode-", "performance.prefill")),
            _throughput,
        ),
        ("niah", lambda row: row["check"].startswith("needle."), _needles),
    )
    for lane, mine, made in lanes:
        told = [(row, _verdict(pack, row)) for row in pack.tests if mine(row)]
        wanted = [(row, verdict) for row, verdict in told if verdict != "NOT_IMPLEMENTED"]
        if any(row["finding"] for row, _ in wanted):
            status = next((bad for bad in _BAD if bad in {verdict for _, verdict in wanted}), "PASS")
            yield lane, {"status": status, "method": _METHODS[lane], **made(_counted(lane, wanted))}


def _counted(lane: str, rows: Sequence[tuple[Row, str]]) -> list[Row]:
    """Rows whose figures count: those that pass; of the needle every cell with its verdict as it is judged now."""
    found: list[Row] = [{**row, "verdict": verdict} for row, verdict in rows if row["finding"]]
    return found if lane == "niah" else [row for row in found if row["verdict"] == "PASS"]


def _streams(row: Row) -> list[Mapping[str, Any]]:
    return [stream for one in row["finding"]["repeats"] for stream in one["samples"]]


def _mean_ms(row: Row, key: str) -> float | None:
    values = [stream[key] for stream in _streams(row)]
    return 1000 * statistics.fmean(values) if values and all(value is not None for value in values) else None


def _canary(rows: Sequence[Row]) -> dict[str, Any]:
    cases = [one for row in rows for one in row["finding"]["comparisons"]]
    return {"n": len(cases), "checks_passed": len(cases)}


def _latency(rows: Sequence[Row]) -> dict[str, Any]:
    names = {"ttft_ms_mean": "first_token_s", "itl_ms_mean": "mean_gap_s", "e2el_ms_mean": "end_s"}
    return {name: _mean_ms(row, key) for row in rows[:1] for name, key in names.items()}


def _ladder(rows: Sequence[Row]) -> dict[str, Any]:
    rates = {row["check"].removeprefix("concurrency.c"): _rate(row) for row in rows}
    return {"output_tokens": rows[0]["finding"]["tokens"] if rows else None, "ladder_aggregate_tok_s": rates}


def _rate(row: Row) -> float | None:
    rates = [output_rate(one["samples"]) for one in row["finding"]["repeats"]]
    known = [rate for rate in rates if rate is not None]
    return statistics.fmean(known) if known and len(known) == len(rates) else None


def _throughput(rows: Sequence[Row]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for row in rows:
        name, streams = row["check"].partition(".")[2], _streams(row)
        if name == "prefill":
            rates = [
                one["prompt_tokens"] / one["first_token_s"]
                for one in streams
                if one["prompt_tokens"] and one["first_token_s"]
            ]
            told |= {"prefill_median_prompt_tok_s_proxy": statistics.median(rates) if rates else None}
            told |= {"prefill_median_prompt_tokens": statistics.median(one["prompt_tokens"] for one in streams)}
        else:
            rates = [one["decode_rate"] for one in streams if one["decode_rate"] is not None]
            known = name.replace("decode-prose", "decode").replace("-", "_")
            told[f"{known}_median_client_tok_s"] = statistics.median(rates) if rates else None
    return told


def _needles(rows: Sequence[Row]) -> dict[str, Any]:
    cells = rows
    windows = {row["finding"]["window"] for row in cells}
    depths = [
        {
            "depth": row["finding"]["planned_tokens"],
            "fraction": row["finding"]["percent"] / 100,
            "status": row["verdict"],
            "elapsed_s": (row["finding"].get("timing") or {}).get("end_s"),
        }
        for row in cells
    ]
    reserves = {row["finding"]["reserve"] for row in cells}
    return {
        "max_model_len": max(windows, default=None),
        "generation_reserve": max(reserves, default=None),
        "depths": depths,
    }


# --- the schema


_FIELDS: Final[tuple[tuple[str, type | tuple[type, ...], bool], ...]] = (
    ("schema_version", int, True),
    ("entry_id", str, True),
    ("recorded_utc", str, False),
    ("model", dict, True),
    ("model.id", str, True),
    ("model.display_name", str, True),
    ("model.family", str, False),
    ("model.revision", str, False),
    ("model.quantization", str, False),
    ("runtime", dict, False),
    ("harness", dict, True),
    ("harness.name", str, True),
    ("harness.version", str, False),
    ("harness.profile", str, True),
    ("scores", dict, True),
    ("infra_errors_total", int, True),
    ("invalid_for_publish", bool, True),
    ("disclosures", list, False),
    ("artifact_roots_private", list, False),
)


def problems(made: Any) -> Iterator[str]:
    """Where an entry does not keep the schema, version 1."""
    if not isinstance(made, dict):
        yield f"is {type(made).__name__}, expected an object"
        return
    for name, kind, required in _FIELDS:
        yield from _field(made, name, kind, required=required)
    for name in ("disclosures", "artifact_roots_private"):
        if isinstance(made.get(name), list) and not all(isinstance(one, str) for one in made[name]):
            yield f"{name} holds what is no text"
    yield from _values(made)


def _field(made: Mapping[str, Any], name: str, kind: Any, *, required: bool) -> Iterator[str]:
    outer, _, inner = name.partition(".")
    table = made if not inner else made.get(outer)
    if not isinstance(table, dict):
        return
    key = inner or outer
    if key not in table:
        yield from (f"{name} is missing",) if required else ()
        return
    value = table[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"{name} is {value!r}, expected {kind.__name__}"


def _values(made: Mapping[str, Any]) -> Iterator[str]:
    if made.get("schema_version") != 1:
        yield f"schema_version is {made.get('schema_version')!r}, expected 1"
    if not _ENTRY_ID.fullmatch(str(made.get("entry_id"))):
        yield f"entry_id is {made.get('entry_id')!r}, expected 3 to 128 of a-z 0-9 . _ -"
    harness = made.get("harness")
    if isinstance(harness, dict) and harness.get("profile") not in ("core", "core-subset", "systems"):
        yield f"harness.profile is {harness.get('profile')!r}, expected core, core-subset or systems"
    total = made.get("infra_errors_total")
    if isinstance(total, int) and total < 0:
        yield f"infra_errors_total is {total}, expected 0 or more"
