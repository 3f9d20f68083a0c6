"""One stream: the canary, latency through the chat template, decode and prefill throughput."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_dspark.audit import same
from pytest_dspark.checks import Check
from pytest_dspark.checks.timed import Row, audit_row, canary_step, judge_row, measure_row, shape_of
from pytest_dspark.live import Live
from pytest_dspark.load import PROMPT_CLASSES, Shape, together
from pytest_dspark.verdict import PASS, Finding, Status, Verdict

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint

CANARIES = 5


def _row(name: str, shape: Callable[[Mapping[str, Any]], Shape]) -> Check:
    def measure(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
        row = Row(f"performance.{name}", shape(settings), lambda _: together(1), "one stream")
        return measure_row(row, endpoint, settings, live)

    return Check(measure, judge_row, exclusive=True, audit=audit_row(shape, lambda _, __: together(1)))


def _canaries(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live) -> Finding:
    """The canary step of every timed row, several times in a row: the engine's step time, and how steady it is."""
    canary_step(endpoint, settings)
    steps = [canary_step(endpoint, settings) for _ in range(CANARIES)]
    told = [step["step_s"] for step in steps if step["step_s"]]
    spread = max(told) / min(told) - 1 if len(told) == CANARIES else None
    live.line(f"performance.canary: a step of {' '.join(f'{step * 1000:.1f}' for step in told) or 'no'} ms")
    return Finding("performance.canary", {"asked": settings["canary_tokens"], "steps": steps, "spread": spread})


def _judge_canaries(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS if every step was ours alone and of the asked length, and they differ by no more than the recipe's drift."""
    asked, spread = finding.data["asked"], finding.data["spread"]
    for number, step in enumerate(finding.data["steps"], 1):
        if step["foreign"]:
            return Verdict(Status.ERROR, "FOREIGN_TRAFFIC", f"void, step {number}: {step['foreign']}")
        if step["tokens"] != asked:
            return Verdict(Status.FAIL, "WRONG_ANSWER", f"asked for exactly {asked} tokens, got {step['tokens']}")
    limit = limits.get("max_drift", math.inf)
    if len(finding.data["steps"]) < CANARIES or (spread is None and not math.isinf(limit)):
        return Verdict(
            Status.ERROR, "DRIFT", f"expected the time of {CANARIES} steps, found {len(finding.data['steps'])}"
        )
    if spread is not None and spread > limit:
        text = f"step times differ by {spread:.0%} within seconds, limit {limit:.0%}"
        return Verdict(Status.ERROR, "DRIFT", text)
    return PASS


def _audit_canaries(finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
    told = [step["step_s"] for step in finding.data["steps"] if step["step_s"]]
    yield from same("asked", finding.data["asked"], settings["canary_tokens"])
    yield from same("steps", len(finding.data["steps"]), CANARIES)
    yield from same("spread", finding.data["spread"], max(told) / min(told) - 1 if len(told) == CANARIES else None)


def _decode(prompt_class: str) -> Callable[[Mapping[str, Any]], Shape]:
    return lambda settings: shape_of(settings, prompt_class=prompt_class)


def _prefill(settings: Mapping[str, Any]) -> Shape:
    return shape_of(settings, tokens=settings["prefill_tokens"], filler=settings["prefill_words"])


CHECKS = {
    "canary": Check(_canaries, _judge_canaries, exclusive=True, audit=_audit_canaries),
    "latency": _row("latency", lambda settings: shape_of(settings, tokens=settings["latency_tokens"], chat=True)),
    **{f"decode-{name}": _row(f"decode-{name}", _decode(name)) for name in PROMPT_CLASSES},
    "prefill": _row("prefill", _prefill),
}
