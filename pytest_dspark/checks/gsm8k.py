"""GSM8K: the official test set, a row a question; some of them also asked alone, to see whether company changes answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_dspark import datasets
from pytest_dspark.asking import level_of, needed
from pytest_dspark.audit import same
from pytest_dspark.checks import Check
from pytest_dspark.live import Live
from pytest_dspark.parts import Part, Parts
from pytest_dspark.proportion import shown
from pytest_dspark.tally import ALONE, above_floor, agreement, ask_set, counted, judge_part, unfinished
from pytest_dspark.verdict import PASS, Finding, Status, Verdict

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint


def measure(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live, parts: Parts) -> Finding:
    """The first `alone` questions with nothing beside them, then all of the subset with the engine kept full."""
    needed(settings, "subset", "alone", "streams")
    questions = datasets.gsm8k(Path(settings["data"]), settings["subset"])
    single = [replace(one, id=one.id + ALONE) for one in questions[: settings["alone"]]]
    lonely, how_alone = ask_set(endpoint, settings, single, parts, 1, live)
    streams = level_of(settings, settings["streams"])
    rest, how = ask_set(endpoint, settings, questions, parts, streams, live, how_alone["cause"])
    data = {
        "dataset": {"name": "gsm8k", "sha256": datasets.GSM8K.sha256, "questions": datasets.GSM8K.questions},
        "asked": {"beside": len(questions), "alone": len(single)},
        "how": {"alone": how_alone, "beside": how},
        "max_tokens": settings["max_tokens"],
    }
    finding = Finding("gsm8k", recount(data, [*lonely, *rest]))
    live.line(f"gsm8k: {_line(finding.data)}")
    return finding


def _line(data: Mapping[str, Any]) -> str:
    told = data["accuracy"]
    return f"{shown(told)}, agreement {shown(data['agreement'])}" if told else str(data["accuracy_missing"])


def recount(data: Mapping[str, Any], parts: Sequence[Part]) -> Mapping[str, Any]:
    """The finding with its counts made anew from the questions."""
    alone = [part for part in parts if part.id.endswith(ALONE)]
    beside = [part for part in parts if not part.id.endswith(ALONE)]
    cause = data["how"]["beside"]["cause"]
    lonely, together = counted(alone), counted(beside)
    if together["accuracy_missing"]:  # half a lane publishes nothing
        lonely |= {"accuracy": None, "accuracy_exact": None, "accuracy_missing": together["accuracy_missing"]}
    return {
        **data,
        **together,
        "cause": cause,
        "alone": lonely | {"cause": cause},
        "agreement": agreement(alone, beside),
    }


def judge(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """ERROR while an answer is missing; then the floors of the recipe decide. Without a floor there is nothing to judge by."""
    data = finding.data
    problem = unfinished(data, data["asked"]["beside"])
    if problem is None and data["asked"]["alone"]:
        problem = unfinished(data["alone"], data["asked"]["alone"])
    if problem:
        return problem
    if not limits.get("floor"):
        text = f"measured {_line(data)}; the recipe has no floor to judge it by"
        return Verdict(Status.NOT_IMPLEMENTED, "NOT_IMPLEMENTED", text)
    verdict = above_floor(data["accuracy"], data["counts"].get("TOKEN_LIMIT", 0), limits["floor"], "gsm8k")
    if not verdict.passed:
        return verdict
    return _agreed(data, limits)


def _agreed(data: Mapping[str, Any], limits: Mapping[str, Any]) -> Verdict:
    told, floor = data["agreement"], limits.get("agreement_floor")
    if floor is None or not data["asked"]["alone"] or told["good"] >= floor * told["of"] - 1e-9:
        return PASS
    text = f"alone and beside others the same number in {shown(told)}, expected at least {floor:g}"
    return Verdict(Status.FAIL, "LIMIT_EXCEEDED", text)


def audit(finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
    """What was asked is what the recipe says, of the official file."""
    data, whole = finding.data, datasets.GSM8K.questions
    subset = whole if settings["subset"] == "all" else settings["subset"]
    official = {"name": "gsm8k", "sha256": datasets.GSM8K.sha256, "questions": whole}
    yield from same("dataset", data["dataset"], official)
    yield from same("asked", data["asked"], {"beside": subset, "alone": min(settings["alone"], subset)})
    yield from same("max_tokens", data["max_tokens"], settings["max_tokens"])
    streams = {name: told["streams"] for name, told in data["how"].items()}
    yield from same("how.streams", streams, {"alone": 1, "beside": level_of(settings, settings["streams"])})


CHECKS = {"": Check(measure, judge, exclusive=True, judge_part=judge_part, recount=recount, audit=audit)}
