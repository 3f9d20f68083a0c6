"""Which weights, quantisation and kernels answer: log probabilities of fixed prompts, beside a measured reference.

Labels say which image was started; this says what answered. Each prompt is continued greedily for a few tokens, and the
log probabilities (natural log) of the most likely tokens of each place are kept. A distance is the absolute difference of
the log probability of one token at one place; places are compared as far as both answers took the same tokens before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_dspark.errors import DsparkError
from pytest_dspark.reply import Reply, RequestError

if TYPE_CHECKING:
    from pytest_dspark.endpoint import Endpoint

TOKENS = 4
TOP = 5
DEADLINE_S = 120.0
FACTOR = 4.0
LEAST_MEAN, LEAST_SINGLE = 1e-4, 1e-3
REFUSALS = (400, 403, 404, 422, 501)

PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "Two plus two equals",
    "Water boils at a temperature of",
    "The opposite of cold is",
    "In the morning the sun rises in the",
    "A triangle has three",
    "The first month of the year is",
    "def add(a, b):\n    return",
    "import os\nfor name in os.",
    "SELECT name FROM users WHERE",
    '{"alpha": 1, "beta":',
    "<html><head><title>",
    "#include <stdio.h>\nint main(",
    "Once upon a time there was a",
    "The train leaves the station at",
    "She opened the door and saw",
    "Ingredients: flour, sugar, butter and",
    "Dear Sir or Madam,\nI am writing to",
    "The three primary colours are red, blue and",
    "1, 2, 3, 5, 8, 13,",
    "100 divided by 4 is",
    "Monday, Tuesday, Wednesday,",
    "La capitale de l'Allemagne est",
    "Der Hund läuft durch den",
    "El agua del mar es",
    "水は高いところから",
    "Столица России —",
    "The chemical symbol of gold is",
    "Light travels faster than",
    "To be or not to be, that is",
    "The largest planet of the solar system is",
    "An engine that serves a language model",
)


@dataclass(frozen=True, slots=True)
class Place:
    """One place of one answer: the token that was taken, and the most likely ones with their log probability."""

    token: str
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Observation:
    """The places of each prompt in the order of `PROMPTS`; or why there are none, and then nothing can be compared."""

    answers: tuple[tuple[Place, ...], ...] = ()
    missing: str = ""

    def as_json(self) -> dict[str, Any]:
        answers = [[{"token": place.token, "top": dict(place.top)} for place in places] for places in self.answers]
        return {"answers": answers, "missing": self.missing}


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two observations are apart: mean and largest distance over `compared` log probabilities of `places`."""

    mean: float
    single: float
    compared: int
    places: int
    prompt: int

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def observe(endpoint: Endpoint, say: Callable[[str], None] = lambda text: None) -> Observation:  # noqa: ARG005
    """Ask every prompt once. A server that refuses log probabilities is not observable; any other failure raises."""
    answers = []
    for number, prompt in enumerate(PROMPTS, 1):
        say(f"behaviour: prompt {number} of {len(PROMPTS)}")
        try:
            reply = endpoint.complete(prompt, max_tokens=TOKENS, logprobs=TOP, deadline_s=DEADLINE_S)
        except RequestError as error:
            if error.status in REFUSALS:
                return Observation(missing=f"the server refuses log probabilities: {error.message}")
            raise
        if not reply.logprobs or not reply.logprobs[0].top:
            return Observation(missing="the server answers without log probabilities")
        answers.append(_places(reply))
    return Observation(tuple(answers))


def _places(reply: Reply) -> tuple[Place, ...]:
    return tuple(
        Place(one.token, dict(sorted(one.top, key=lambda pair: -pair[1])[:TOP])) for one in reply.logprobs or ()
    )


def from_json(data: Mapping[str, Any]) -> Observation:
    """An observation as it was written. Raises KeyError, TypeError or ValueError if it is none."""
    answers = tuple(
        tuple(Place(str(p["token"]), {str(t): float(v) for t, v in p["top"].items()}) for p in places)
        for places in data["answers"]
    )
    return Observation(answers, str(data.get("missing", "")))


# --- how far apart


def distance(one: Observation, other: Observation) -> Distance:
    """Raises ValueError if the two did not answer the same number of prompts, or nothing can be compared."""
    if len(one.answers) != len(other.answers) or not one.answers:
        raise ValueError(f"{len(one.answers)} prompts beside {len(other.answers)}")
    found, places, worst = [], 0, (-1.0, 0)
    for prompt, (mine, theirs) in enumerate(zip(one.answers, other.answers, strict=True)):
        if not (mine and theirs):
            raise ValueError(f"prompt {prompt + 1} has no log probability on one side")
        for a, b in _together(mine, theirs):
            places += 1
            apart = list(_apart(a.top, b.top))
            found += apart
            worst = max(worst, (max(apart, default=0.0), prompt))
    if not found:
        raise ValueError("no place has a log probability on both sides")
    return Distance(statistics.fmean(found), worst[0], len(found), places, worst[1])


def _together(mine: Sequence[Place], theirs: Sequence[Place]) -> Iterator[tuple[Place, Place]]:
    """Pairs of places up to the first at which the answers part, which is the last that can be compared."""
    for a, b in zip(mine, theirs, strict=False):
        yield a, b
        if a.token != b.token:
            return


def _apart(mine: Mapping[str, float], theirs: Mapping[str, float]) -> Iterator[float]:
    """A token that only one side shows is at least as far away as the other side's least likely one."""
    for token in mine.keys() | theirs.keys():
        if token in mine and token in theirs:
            yield abs(mine[token] - theirs[token])
        elif token in mine and theirs:
            yield max(0.0, mine[token] - min(theirs.values()))
        elif token in theirs and mine:
            yield max(0.0, theirs[token] - min(mine.values()))


@dataclass(frozen=True, slots=True)
class Reference:
    """One observation of the engine at freezing, and how far it was from itself: the tolerance comes from this spread."""

    observation: Observation
    repeats: int
    spread_mean: float
    spread_single: float

    @property
    def tolerance(self) -> tuple[float, float]:
        """The largest mean and the largest single distance that still are this engine: the spread four times, with room
        for rounding where the engine repeats itself exactly."""
        return max(FACTOR * self.spread_mean, LEAST_MEAN), max(FACTOR * self.spread_single, LEAST_SINGLE)

    def as_json(self) -> dict[str, Any]:
        spread = {"repeats": self.repeats, "spread_mean": self.spread_mean, "spread_single": self.spread_single}
        return {**self.observation.as_json(), **spread, "tolerance": list(self.tolerance)}


def reference(observations: Sequence[Observation]) -> Reference:
    """The first as the reference, and the largest distances of the others from it. Raises ValueError for fewer than two."""
    if len(observations) < 2:
        raise ValueError("a spread needs at least two observations")
    apart = [distance(observations[0], other) for other in observations[1:]]
    return Reference(observations[0], len(observations), max(d.mean for d in apart), max(d.single for d in apart))


def reference_from(data: Mapping[str, Any]) -> Reference:
    return Reference(from_json(data), int(data["repeats"]), float(data["spread_mean"]), float(data["spread_single"]))


def within(found: Distance, tolerance: tuple[float, float]) -> bool:
    """Both bounds hold; a distance that is no number never does."""
    return found.mean <= tolerance[0] and found.single <= tolerance[1]


def sentence(found: Distance, tolerance: tuple[float, float]) -> str:
    """The distance in words."""
    return (
        f"mean {found.mean:.6f} (allowed {tolerance[0]:.6f}), largest {found.single:.6f} (allowed {tolerance[1]:.6f}) "
        f"at {PROMPTS[found.prompt % len(PROMPTS)]!r}, {found.compared} log probabilities of {found.places} places"
    )


def observed(endpoint: Endpoint) -> Observation:
    """The same as `observe`, where a request that fails is said and nothing can be compared."""
    try:
        return observe(endpoint)
    except DsparkError as error:
        return Observation(missing=f"failed: {error}")
