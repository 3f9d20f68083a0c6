"""The concurrency ladder: C streams at once, each level a row; aggregate rate, fairness and gaps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pytest_dspark.checks import Check
from pytest_dspark.checks.timed import judge_row, measure_row
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import DsparkError
from pytest_dspark.load import Shape
from pytest_dspark.verdict import Finding

LEVELS = (1, 2, 4, 6, 8, 12, 16)


def _measure(level: int) -> Callable[..., Finding]:
    def measure(endpoint: Endpoint, *, settings: Mapping[str, Any]) -> Finding:
        most = min(int(settings["knobs"].get("MAX_NUM_SEQS") or level), int(settings.get("max_level", level)))
        if level > most:
            raise DsparkError(
                "NOT_IMPLEMENTED", f"level {level} is above what this profile and recipe measure ({most})"
            )
        shape = Shape(
            tokens=settings["tokens"], prompt_class=settings["prompt_class"], deadline_s=settings["deadline_s"]
        )
        return measure_row(f"concurrency.c{level}", endpoint, shape, level, settings["repeats"])

    return measure


CHECKS = {f"c{level}": Check(_measure(level), judge_row, exclusive=True) for level in LEVELS}
