"""How long things take: believable durations of two GB10, times the factors of the rehearsal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_FACTOR = 0.005
PREFILL_TOKENS_S = 1000.0
STEP_S = 0.0534
"""One decode step of one sequence: 4.27 tokens in 53 ms are 80 tokens/s."""
STEP_GROWTH = 0.147
"""How much longer a step takes with each further sequence: 16 sequences give about 400 tokens/s together."""
LEAST_STEP_S = 0.001
SLOW_STOP_S = 12.0
MOST_STOP_S = 2.0


@dataclass(frozen=True, slots=True)
class Pace:
    """`factor` scales everything, `speed` also the steps of generation (prefill and decode)."""

    factor: float = DEFAULT_FACTOR
    speed: float = 1.0

    def seconds(self, real: float) -> float:
        return real * self.factor

    def step(self, prefill_tokens: int, decoding: int) -> float:
        """Seconds of one engine step."""
        decode = STEP_S * (1 + STEP_GROWTH * (decoding - 1)) if decoding else 0.0
        return max((prefill_tokens / PREFILL_TOKENS_S + decode) * self.factor * self.speed, LEAST_STEP_S)

    def stop(self) -> float:
        """Seconds that a stop takes while loading, and of a worker."""
        return min(self.seconds(SLOW_STOP_S), MOST_STOP_S)

    def patience(self, real: float) -> float:
        """A time-out of the engine: never shorter than a tenth of the real one, or a busy machine would trip it."""
        return real * max(self.factor, 0.1)


def read(environ: Mapping[str, str]) -> Pace:
    """Raises ValueError if REHEARSAL_TIME or REHEARSAL_SPEED is not a positive number."""
    factor = float(environ.get("REHEARSAL_TIME") or DEFAULT_FACTOR)
    speed = float(environ.get("REHEARSAL_SPEED") or 1.0)
    if not (0 < factor < 1000 and 0 < speed < 1000):
        raise ValueError(
            f"REHEARSAL_TIME={factor:g} REHEARSAL_SPEED={speed:g}: expected numbers above 0 and below 1000"
        )
    return Pace(factor, speed)
