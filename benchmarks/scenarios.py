"""What is asked: three schedules of the package's schedule server, and the levels that each is run at."""

from __future__ import annotations

from dataclasses import dataclass

PROMPT_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Scenario:
    """One schedule: its path on the server, its events that carry text, its tokens; `says` is for people."""

    name: str
    path: str
    events: int
    tokens: int
    says: str
    thinks: bool = False


SCENARIOS = (
    Scenario("A", "/s/0.02/0.02/200/1", 200, 200, "200 events of 1 token, 20 ms apart, the first at 20 ms"),
    Scenario("B", "/s/0.5/0.1/10/6", 10, 60, "10 events of 6 tokens, 100 ms apart, the first at 500 ms"),
    Scenario(
        "C", "/thinking", 52, 52, "role 5 ms, empty 10 ms, reasoning 1000 ms, answer 1500 ms + 50 x 20 ms", thinks=True
    ),
)


@dataclass(frozen=True, slots=True)
class Level:
    """One scenario at one concurrency; `waves` times the concurrency is the number of requests."""

    scenario: Scenario
    concurrency: int
    waves: int = 2

    @property
    def requests(self) -> int:
        return self.concurrency * self.waves

    @property
    def name(self) -> str:
        return f"{self.scenario.name} C{self.concurrency}"


A, B, C = SCENARIOS
LEVELS = (
    Level(A, 1, 3),
    Level(A, 16),
    Level(A, 64),
    Level(A, 256),
    Level(B, 64),
    Level(B, 256),
    Level(C, 64),
    Level(C, 256),
)
QUICK = (Level(A, 1, 3), Level(A, 16))
