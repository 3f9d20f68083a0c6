"""A built-in set of sums: seeded, exact, graded in five levels, the same on every machine, and no file is needed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pytest_dspark.asking import level_of, needed
from pytest_dspark.audit import prompt_sha256, same
from pytest_dspark.checks import Check
from pytest_dspark.errors import ConfigError
from pytest_dspark.live import Live
from pytest_dspark.parts import Part, Parts
from pytest_dspark.proportion import share, shown
from pytest_dspark.questions import Question
from pytest_dspark.tally import above_floor, ask_set, counted, judge_part, unfinished
from pytest_dspark.verdict import PASS, Finding, Status, Verdict

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint

LEVELS: Final = 5
SEED: Final = 1


def question(level: int, number: int) -> Question:
    """One sum of a level: digits added, tens added or taken away, tens times a digit, a bracket, hundreds times tens."""
    drawn = random.Random(f"{SEED} {level} {number}")
    a, b, c = drawn.randint(10, 99), drawn.randint(10, 99), drawn.randint(2, 9)
    hundreds, taken = drawn.randint(100, 999), drawn.randint(100, 999)
    small, other = drawn.randint(1, 9), drawn.randint(1, 9)
    sums = (
        (f"{small} + {other}", small + other),
        (f"{a} + {b}", a + b) if number % 2 else (f"{max(a, b)} - {min(a, b)}", abs(a - b)),
        (f"{a} * {c}", a * c),
        (f"({a} + {b}) * {c}", (a + b) * c),
        (f"{hundreds} * {b} - {taken}", hundreds * b - taken),
    )
    text, value = sums[level - 1]
    prompt = f"Compute {text}. Reply with only the number."
    sha256 = hashlib.sha256(f"{prompt}\0{value}".encode()).hexdigest()
    return Question(f"arithmetic-{level}-{number:02d}", prompt, str(value), sha256)


def questions(per_level: int) -> tuple[Question, ...]:
    return tuple(question(level, number) for level in range(1, LEVELS + 1) for number in range(1, per_level + 1))


def measure(endpoint: Endpoint, *, settings: Mapping[str, Any], live: Live, parts: Parts) -> Finding:
    """All levels, with the engine kept full."""
    needed(settings, "per_level", "streams")
    asked = questions(settings["per_level"])
    made, how = ask_set(endpoint, settings, asked, parts, level_of(settings, settings["streams"]), live)
    data = {"per_level": settings["per_level"], "asked": len(asked), "how": how, "seed": SEED}
    finding = Finding("arithmetic.graded", recount(data, made))
    live.line(f"arithmetic.graded: {_line(finding.data)}")
    return finding


def recount(data: Mapping[str, Any], parts: Sequence[Part]) -> Mapping[str, Any]:
    told = counted(parts)
    levels = [_level(level, parts) for level in range(1, LEVELS + 1)] if told["accuracy"] else None
    return {**data, **told, "cause": data["how"]["cause"], "levels": levels}


def _level(level: int, parts: Sequence[Part]) -> dict[str, Any]:
    own = [part for part in parts if part.id.startswith(f"arithmetic-{level}-")]
    return share(sum(part.verdict.passed for part in own), len(own)) | {
        "cut": counted(own)["counts"].get("TOKEN_LIMIT", 0)
    }


def _line(data: Mapping[str, Any]) -> str:
    if data["levels"] is None:
        return str(data["accuracy_missing"])
    levels = " ".join(f"{one['good']}/{one['of']}" for one in data["levels"])
    return f"{shown(data['accuracy'])}; by level {levels}"


def judge(finding: Finding, limits: Mapping[str, Any]) -> Verdict:
    """PASS if each level has at least as many right answers as its floor. A floor of 0 records a level and judges nothing;
    floors that are all 0, or absent, leave nothing to judge by."""
    data, floors = finding.data, limits.get("floors", ())
    problem = unfinished(data, data["asked"])
    if problem:
        return problem
    if floors and (len(floors) != LEVELS or any(not 0 <= floor <= data["per_level"] for floor in floors)):
        text = f"checks.arithmetic.floors must be {LEVELS} numbers of 0 to {data['per_level']}, found {list(floors)}"
        raise ConfigError("RECIPE_INVALID", text)
    if not any(floors):
        text = f"measured {_line(data)}; the recipe has no floor to judge it by"
        return Verdict(Status.NOT_IMPLEMENTED, "NOT_IMPLEMENTED", text)
    for level, (told, floor) in enumerate(zip(data["levels"], floors, strict=True), 1):
        verdict = above_floor(told, told["cut"], floor / data["per_level"], f"level {level}")
        if not verdict.passed:
            return verdict
    return PASS


def audit(finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
    """What was asked is what the recipe says."""
    data = finding.data
    asked = {"per_level": settings["per_level"], "asked": LEVELS * settings["per_level"], "seed": SEED}
    yield from same("asked", {name: data[name] for name in asked}, asked)
    yield from same("how.streams", data["how"]["streams"], level_of(settings, settings["streams"]))


def audit_part(part: Part) -> Iterator[str]:
    """The question and its answer are those of this set."""
    _, level, number = part.id.split("-")
    made = question(int(level), int(number))
    if part.data is not None:
        yield from same("sha256", part.data["sha256"], made.sha256)
        yield from same("expect", part.data["expect"], made.expect)
        yield from same("reply.prompt_sha256", part.data["reply"]["prompt_sha256"], prompt_sha256(made.prompt))


CHECKS = {
    "graded": Check(
        measure, judge, exclusive=True, judge_part=judge_part, recount=recount, audit=audit, audit_part=audit_part
    )
}
