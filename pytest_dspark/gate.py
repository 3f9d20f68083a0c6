"""The gate: what must be true of a running engine before any check may ask it anything.

Everything the gate finds is a list of comparisons (comparison.py). What a rank cannot print is listed as not observable
with the reason; a requirement for which nothing at all could be compared is never a pass.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_dspark import freeze, identity, manifest, strictjson, weights
from pytest_dspark.answers import equal, judge_code, judge_exact, judge_json, judge_number
from pytest_dspark.behaviour import Observation
from pytest_dspark.comparison import Comparison, Sheet, broken, hold, judge, sentence
from pytest_dspark.errors import DsparkError
from pytest_dspark.garble import garbled
from pytest_dspark.identity import Rank, serve_argv, without_rank
from pytest_dspark.logs import search
from pytest_dspark.plan import Plan, meets
from pytest_dspark.recipe import Canary, Marker
from pytest_dspark.reply import Reply
from pytest_dspark.symmetry import symmetry
from pytest_dspark.verdict import Finding, Status, Verdict

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint

__all__ = [
    "Api",
    "Comparison",
    "GateReport",
    "Rank",
    "Sheet",
    "examine",
    "hold",
    "judge",
    "sentence",
    "serve_argv",
    "without_rank",
]

REQUIREMENTS = (
    "image",
    "pins",
    "labels",
    "argv",
    "symmetry",
    "environment",
    "restarts",
    "container",
    "mounts",
    "model",
    "weights",
    "compilation",
    "markers",
    "forbidden",
    "frozen",
    "behaviour",
    "canaries",
)


def _model(plan: Plan, ranks: Sequence[Rank], api: Api, sheet: Sheet) -> None:
    sheet.add("served model", None, [plan.served_model], api.model_ids)
    sheet.add("max_model_len", None, plan.settings.values.get("MAX_MODEL_LEN"), api.max_model_len)


def _pins(plan: Plan, ranks: Sequence[Rank], api: Api, sheet: Sheet) -> None:
    identity.pins(plan, ranks, api.version, sheet)
    manifest.compare(plan, ranks, sheet)


def _weights(plan: Plan, ranks: Sequence[Rank], api: Api, sheet: Sheet) -> None:
    placed = [weights.Placed(rank.number, rank.host, rank.model) for rank in ranks]
    weights.compare(plan.recipe.weights, weights.sums_of(plan.recipe), placed, sheet)


def _frozen(plan: Plan, ranks: Sequence[Rank], api: Api, sheet: Sheet) -> None:
    freeze.compare(freeze.read(plan.recipe), plan, ranks, sheet)


def _behaviour(plan: Plan, ranks: Sequence[Rank], api: Api, sheet: Sheet) -> None:
    frozen = freeze.read(plan.recipe)
    freeze.compare_behaviour(frozen, plan.mark, api.behaviour, plan.recipe.behaviour, sheet)


def _compilation(plan: Plan, ranks: Sequence[Rank], api: Api, sheet: Sheet) -> None:
    knob = plan.recipe.compilation
    wanted = plan.settings.values.get(knob) if knob else None
    if not wanted:
        sheet.not_observable.append("the profile asks for no compilation configuration")
        return
    for rank in ranks:
        sheet.add(
            "compilation configuration on the command line",
            rank.number,
            dict(wanted),
            _json_flag(rank, "--compilation-config"),
            "superset",
        )
        log = rank.log
        if log.compilation:
            sheet.add(
                "compilation configuration that the engine logged",
                rank.number,
                dict(wanted),
                log.compilation,
                "superset",
            )
        else:
            sheet.not_observable.append(
                f"rank {rank.number} logs no engine configuration; its command line and markers stand for it"
            )
        if "cudagraph_strict" in wanted and log.graph_runtime is not None:
            sheet.add(
                "CUDA_GRAPH_RUNTIME strict",
                rank.number,
                str(wanted["cudagraph_strict"]).lower(),
                log.graph_runtime.get("strict"),
            )
    if not any(rank.log.compilation for rank in ranks):
        sheet.add("engine configuration line", 0, "one in the head's log", None, "present")


def _json_flag(rank: Rank, flag: str) -> Any:
    argv = serve_argv(rank.facts.path, rank.facts.args)
    values = [argv[i + 1] for i, token in enumerate(argv[:-1]) if token == flag]
    try:
        return json.loads(values[0]) if len(values) == 1 else values
    except ValueError:
        return values


def _applicable(plan: Plan, kind: str) -> Iterable[Marker]:
    values = plan.settings.values
    return (m for m in plan.recipe.markers if m.kind == kind and all(meets(c, values) for c in m.when))


def _markers(plan: Plan, ranks: Sequence[Rank], api: Api, sheet: Sheet) -> None:
    for marker in _applicable(plan, "required"):
        for rank in ranks:
            if not marker.applies_to(rank.number):
                sheet.not_observable.append(
                    f"{marker.name} on rank {rank.number}: {marker.unobservable or 'printed by other ranks'}"
                )
            elif not all(meets(condition, rank.environment) for condition in marker.observable):
                sheet.not_observable.append(f"{marker.name} on rank {rank.number}: {marker.unobservable}")
            else:
                hit = search(rank.log_text, marker.pattern)
                sheet.add(
                    f"log marker {marker.name}",
                    rank.number,
                    marker.pattern.pattern,
                    hit and [hit[0], hit[1]],
                    "present",
                )


def _forbidden(plan: Plan, ranks: Sequence[Rank], api: Api, sheet: Sheet) -> None:
    noop = dict(plan.recipe.noop_env)
    for rank in ranks:
        for marker in _applicable(plan, "forbidden"):
            if marker.applies_to(rank.number):
                hit = search(rank.log_text, marker.pattern)
                sheet.add(f"forbidden log line {marker.name}", rank.number, None, hit and [hit[0], hit[1]], "absent")
        unknown = sorted(set(rank.log.unknown_env) - noop.keys())
        sheet.add("environment variables that the engine does not know", rank.number, None, unknown, "absent")


def _canaries(plan: Plan, ranks: Sequence[Rank], api: Api, sheet: Sheet) -> None:
    for canary in plan.recipe.canaries:
        answer = api.canaries.get(canary.name)
        if answer is None:
            sheet.add(f"canary {canary.name}", None, "an answer", None, "present")
        else:
            fault = "model" if answer.get("answered") else "engine"
            why = f": {answer['message']}" if not answer["ok"] else ""
            sheet.add(f"canary {canary.name}{why}", None, True, answer["ok"], fault=fault)
    if not plan.recipe.canaries:
        sheet.not_observable.append("the recipe has no canary")


@dataclass(frozen=True, slots=True)
class Api:
    """What the API said: ids, window, version, and the judged canaries."""

    model_ids: list[str]
    max_model_len: int | None
    version: str
    canaries: Mapping[str, Mapping[str, Any]]
    behaviour: Observation | None = None


@dataclass(frozen=True, slots=True)
class GateReport:
    """A finding a requirement, with its verdict."""

    findings: Mapping[str, Finding]
    verdicts: Mapping[str, Verdict]

    @property
    def first_failure(self) -> tuple[str, Verdict] | None:
        bad = (
            (name, verdict) for name, verdict in self.verdicts.items() if verdict.status in (Status.FAIL, Status.ERROR)
        )
        return next(bad, None)


_Examiner = Callable[[Plan, Sequence[Rank], Api, Sheet], None]


def _of_ranks(examiner: identity.Examiner) -> _Examiner:
    def examined(plan: Plan, ranks: Sequence[Rank], api: Api, sheet: Sheet) -> None:
        examiner(plan, ranks, sheet)

    return examined


_EXAMINERS: dict[str, _Examiner] = {
    **{name: _of_ranks(examiner) for name, examiner in identity.EXAMINERS.items()},
    "pins": _pins,
    "symmetry": _of_ranks(symmetry),
    "model": _model,
    "weights": _weights,
    "compilation": _compilation,
    "markers": _markers,
    "forbidden": _forbidden,
    "frozen": _frozen,
    "behaviour": _behaviour,
    "canaries": _canaries,
}


def examine(plan: Plan, ranks: Sequence[Rank], api: Api) -> GateReport:
    """Compare everything that was read with everything that is expected: pure."""
    findings = {}
    for name in REQUIREMENTS:
        sheet = Sheet()
        _EXAMINERS[name](plan, ranks, api, sheet)
        findings[name] = Finding(f"gate.{name}", sheet.data())
    return GateReport(findings, {name: judge(finding, {}) for name, finding in findings.items()})


def missing_markers(plan: Plan, ranks: Sequence[Rank]) -> bool:
    """Whether a required marker is not there yet: some are printed only after the first decode."""
    sheet = Sheet()
    _markers(plan, ranks, Api([], None, "", {}), sheet)
    return any(not comparison.found for comparison in sheet.comparisons)


# --- canaries


def ask_api(endpoint: Endpoint, canaries: Iterable[Canary]) -> Api:
    """Read the API's identity and ask every canary. A failed canary is data; a dead API raises."""
    cards = endpoint.models()
    card = next((card for card in cards if card.id == endpoint.model), None)
    return Api(
        model_ids=[card.id for card in cards],
        max_model_len=card.max_model_len if card else None,
        version=_version(endpoint),
        canaries={canary.name: ask(endpoint, canary) for canary in canaries},
    )


def _version(endpoint: Endpoint) -> str:
    try:
        return endpoint.version()
    except DsparkError:
        return ""


def ask(endpoint: Endpoint, canary: Canary) -> dict[str, Any]:
    """One canary: `ok`, what was answered, and whether the engine answered at all."""
    try:
        reply = endpoint.chat(
            [{"role": "user", "content": canary_prompt(canary)}],
            max_tokens=canary.max_tokens,
            thinking=canary.thinking,
            tools=[weather_tool(canary.tool)] if canary.kind == "tool" else None,
            tool_choice={"type": "function", "function": {"name": canary.tool}} if canary.kind == "tool" else None,
            response_format={"type": "json_object"} if canary.kind == "json" else None,
            deadline_s=canary.deadline_s,
        )
    except DsparkError as error:
        return {"ok": False, "answered": False, "text": "", "finish_reason": None, "message": str(error)}
    ok, message = judge_canary(canary, reply)
    return {
        "ok": ok,
        "answered": True,
        "text": reply.text[:500],
        "tool_calls": [[call.name, call.arguments[:500]] for call in reply.tool_calls],
        "finish_reason": reply.finish_reason,
        "usage": {"prompt_tokens": reply.usage.prompt_tokens, "completion_tokens": reply.usage.completion_tokens}
        if reply.usage
        else None,
        "message": message,
    }


def canary_prompt(canary: Canary) -> str:
    """The question; a retrieval canary stands between two halves of filler with the needle in the middle."""
    if not canary.filler:
        return canary.prompt
    sentences = [
        f"Note {n}: the lamp by the gate was lit at dusk and put out at dawn." for n in range(1, 2 * canary.filler + 1)
    ]
    half = canary.filler
    return "\n".join([*sentences[:half], canary.needle, *sentences[half:], "", canary.prompt])


def weather_tool(name: str) -> dict[str, Any]:
    """The one tool that canaries and the tool check offer: a city in, nothing else."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "Get the current weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "name of the city"}},
                "required": ["city"],
            },
        },
    }


def judge_canary(canary: Canary, reply: Reply) -> tuple[bool, str]:
    """Whether the answer is right, and if not, why."""
    if canary.kind == "tool":
        calls = [(call.name, call.arguments) for call in reply.tool_calls]
        return judge_tool(calls, canary.tool, canary.expect or dict(canary.expect_json))
    if reply.finish_reason != "stop":
        return False, f"finish_reason is {reply.finish_reason!r}, expected 'stop'"
    if reply.text.strip() and (problem := garbled(reply.text)):
        return False, f"garbled: {problem}, in {reply.text[:80]!r}"
    if canary.kind == "json":
        result = judge_json(reply.text, reply.reasoning, dict(canary.expect_json))
    elif canary.kind == "code":
        result = judge_code(reply.text, reply.reasoning, canary.expect)
    elif canary.kind == "number":
        result = judge_number(reply.text, reply.reasoning, canary.expect)
    else:
        result = judge_exact(reply.text, reply.reasoning, canary.expect)
    return result.ok, result.message


def judge_tool(calls: Sequence[tuple[str, str]], tool: str, wanted: Any) -> tuple[bool, str]:
    """Exactly one call of the tool; `calls` are (name, raw argument text).

    `wanted` is an object, of which every key must be there with its value, or any other JSON value, which must be equal.
    """
    names = [name for name, _ in calls]
    if names != [tool]:
        return False, f"tool calls are {names}, expected exactly one of {tool}"
    try:
        arguments = strictjson.loads(calls[0][1])
    except (ValueError, RecursionError) as error:
        return False, f"tool arguments are no JSON ({error}): {calls[0][1][:200]!r}"
    if isinstance(wanted, Mapping):
        given = arguments if isinstance(arguments, dict) else {}
        good = all(key in given and equal(given[key], value) for key, value in wanted.items())
    else:
        good = equal(arguments, wanted)
    if not good:
        return False, f"tool arguments are {arguments!r}, expected {wanted!r}"
    return True, ""


# --- the file that readers of the original gate know (schema 3)


def as_file(plan: Plan, ranks: Sequence[Rank], api: Api, report: GateReport) -> dict[str, Any]:
    """runtime-gate.json: schema_version 3, status, evidence a rank, errors[]; and our requirements beside it."""
    errors = broken({name: finding.data for name, finding in report.findings.items()})
    return {
        "schema_version": 3,
        "status": "FAIL" if errors else "PASS",
        "evidence": {
            "profile": plan.profile.name,
            "expected_cudagraph_implementation": (plan.settings.values.get(plan.recipe.compilation) or {}).get(
                "cudagraph_implementation"
            ),
            "runtime_identity": {_role(rank): _identity(plan, rank) for rank in ranks},
            "identity": {_role(rank): identity.record(rank) for rank in ranks},
            "models": {"ids": api.model_ids, "max_model_len": api.max_model_len, "version": api.version or None},
            **_canary_sections(plan, api),
            "runtime_logs": {_role(rank): _log_section(plan, rank, report) for rank in ranks},
        },
        "errors": errors,
        "requirements": {
            name: {
                "verdict": str(report.verdicts[name].status),
                "message": report.verdicts[name].message,
                **finding.data,
            }
            for name, finding in report.findings.items()
        },
    }


def _role(rank: Rank) -> str:
    return "head" if rank.number == 0 else "worker" if rank.number == 1 else f"worker{rank.number}"


def _canary_sections(plan: Plan, api: Api) -> dict[str, Any]:
    """The three sections by their known names, and all canaries under theirs."""
    answers = {name: dict(answer) for name, answer in api.canaries.items()}
    tool = next((c.name for c in plan.recipe.canaries if c.kind == "tool"), "")
    sections = {
        "semantic": answers.get("semantic"),
        "tool_call": answers.get(tool),
        "retrieval": answers.get("retrieval"),
    }
    known: dict[str, Any] = {
        key: {
            "content": value["text"],
            "finish_reason": value["finish_reason"],
            "usage": value.get("usage"),
            "pass": value["ok"],
        }
        if value
        else None
        for key, value in sections.items()
    }
    if known["tool_call"] is not None:
        known["tool_call"]["names"] = [call[0] for call in answers[tool].get("tool_calls", [])]
    return {**known, "canaries": answers}


def _identity(plan: Plan, rank: Rank) -> dict[str, Any]:
    """One rank under the names that readers of the original file know; a value that is not there is null."""
    labels, argv = rank.image.labels, serve_argv(rank.facts.path, rank.facts.args)
    graph, wanted = rank.log.graph_runtime or {}, dict(plan.recipe.labels)
    asked = plan.settings.values.get(plan.recipe.compilation) or {}
    return {
        "rank": rank.number,
        "host": rank.host,
        "container_id": rank.facts.rank_id,
        "image_id": rank.facts.image_id,
        "image_id_kind": rank.image.id_kind,
        "image_architecture": rank.image.architecture,
        "source_revision": labels.get("org.opencontainers.image.revision"),
        "model_revision": labels.get("io.r0b0tlab.model.revision"),
        "vllm_version": labels.get("io.r0b0tlab.vllm.package.version"),
        "integrated_vllm_commit": labels.get("io.r0b0tlab.vllm.integrated.commit"),
        "cudagraph_implementation": graph.get("resolved"),
        "cudagraph_mode_expected": asked.get("cudagraph_mode"),
        "cudagraph_mode": graph.get("mode"),
        "cudagraph_strict": graph.get("strict"),
        "enforce_eager": graph.get("enforce_eager"),
        "serialized_compilation_config": _json_flag(rank, "--compilation-config"),
        "command_sha256": hashlib.sha256(json.dumps(list(argv)).encode()).hexdigest(),
        **_presence(argv),
        "legacy_selector_pid1_entries": _entries(rank, "VLLM_USE_BREAKABLE_CUDAGRAPH"),
        "dsv4_multi_stream_pid1_entries": _entries(rank, "VLLM_DSV4_ENABLE_MULTI_STREAM"),
        "runtime_audit_manifest_sha256": rank.manifest_sha256,
        "runtime_audit_manifest_read_only": _read_only(plan, rank),
        "restart_count": rank.facts.restart_count,
        "started_at": rank.facts.started_at,
        "label_mismatches": {
            key: {"expected": value, "actual": labels.get(key)}
            for key, value in wanted.items()
            if labels.get(key) != value
        },
    }


def _presence(argv: Sequence[str]) -> dict[str, Any]:
    """Flags of the command line that the original file lists with their values."""
    values = dict(itertools.pairwise(argv))
    names = {"optimization_level": "--optimization-level", "performance_mode": "--performance-mode"}
    found: dict[str, Any] = {name: values.get(flag) for name, flag in names.items()}
    found |= {f"{name}_present": flag in argv for name, flag in names.items()}
    return found | {"compilation_config_present": "--compilation-config" in argv}


def _entries(rank: Rank, key: str) -> list[str]:
    return [entry for entry in rank.facts.environment if entry.startswith(f"{key}=")]


def _read_only(plan: Plan, rank: Rank) -> bool | None:
    """Whether the runtime manifest is exactly one read-only mount; None where the recipe pins none."""
    target = plan.recipe.pins.manifest_target
    mounts = [mount for mount in rank.facts.mounts if mount.get("Destination") == target]
    return (len(mounts) == 1 and mounts[0].get("RW") is False) if target else None


def _log_section(plan: Plan, rank: Rank, report: GateReport) -> dict[str, Any]:
    def of(name: str, prefix: str) -> dict[str, Any]:
        rows = report.findings[name].data["comparisons"]
        return {r["what"].removeprefix(prefix): bool(r["found"]) for r in rows if r["rank"] == rank.number}

    body = rank.log_text.encode("utf-8", "replace")
    return {
        "required": of("markers", "log marker "),
        "forbidden": of("forbidden", "forbidden log line "),
        "authoritative_cuda_graph_runtime": rank.log.graph_runtime,
        "kv_cache_size_tokens": rank.log.kv_pool_tokens,
        "log_bytes": len(body),
        "log_sha256": hashlib.sha256(body).hexdigest(),
    }
