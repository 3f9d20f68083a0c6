"""Latency and throughput of one stream: first token, time per token, gaps, decode and prefill rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pytest_dspark.checks import Check
from pytest_dspark.checks.timed import judge_row, measure_row
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.load import PROMPT_CLASSES, Shape
from pytest_dspark.verdict import Finding


def _measure(name: str, prompt_class: str) -> Callable[..., Finding]:
    def measure(endpoint: Endpoint, *, settings: Mapping[str, Any]) -> Finding:
        filler = settings["prefill_words"] if name == "prefill" else 0
        tokens = settings["prefill_tokens"] if name == "prefill" else settings["tokens"]
        shape = Shape(tokens=tokens, prompt_class=prompt_class, filler=filler, deadline_s=settings["deadline_s"])
        return measure_row(f"performance.{name}", endpoint, shape, 1, settings["repeats"])

    return measure


CHECKS = {
    f"decode-{name}": Check(_measure(f"decode-{name}", name), judge_row, exclusive=True) for name in PROMPT_CLASSES
}
CHECKS["prefill"] = Check(_measure("prefill", "prose"), judge_row, exclusive=True)
