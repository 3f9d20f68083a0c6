"""Does a finding follow from itself and from what was asked? Sentences about what does not; nothing means all of it.

A judge decides by a few fields of a finding. An audit makes every derived figure again from the raw ones, and compares what
was asked with the recipe, so that a number that was edited is named. Standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from pytest_dspark.verdict import Finding

Audit = Callable[[Finding, Mapping[str, Any]], Iterator[str]]


def nothing(finding: Finding, settings: Mapping[str, Any]) -> Iterator[str]:
    """For findings that say nothing but what was seen."""
    return iter(())


def same(name: str, found: Any, expected: Any) -> Iterator[str]:
    """Nothing if both are equal as JSON; else which leaf is what, and what it follows to be."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for key in found.keys() | expected.keys():
            if key not in found or key not in expected:
                yield f"{name}.{key} is {'missing' if key not in found else 'too much'}"
            else:
                yield from same(f"{name}.{key}", found[key], expected[key])
    elif isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            yield f"{name} has {len(found)} entries, {len(expected)} follow from the rest"
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=False)):
            yield from same(f"{name}.{index}", mine, theirs)
    elif found != expected or isinstance(found, bool) is not isinstance(expected, bool):
        yield f"{name} is {found!r}, {expected!r} follows from the rest"


def near(name: str, found: Any, expected: float | None) -> Iterator[str]:
    """The same for a figure that was made in another order, and so differs in its last digits."""
    if found is None or expected is None:
        yield from same(name, found, expected)
    elif not math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9):
        yield f"{name} is {found!r}, {expected!r} follows from the rest"


SLACK_S = 0.05
"""By this much two clocks of one machine (the kernel's stamp of a packet and ours) may disagree."""


def rising(name: str, slack: float = 0.0, **moments: float | None) -> Iterator[str]:
    """Nothing if the moments that are known do not fall by more than the slack."""
    known = [(key, value) for key, value in moments.items() if value is not None]
    for (first, earlier), (second, later) in pairwise(known):
        if later < earlier - slack:
            yield f"{name}: {second} is {later!r}, before {first} at {earlier!r}"


def prompt_sha256(content: str) -> str:
    """The hash of a chat of one message, as the client sends it."""
    messages = [{"role": "user", "content": content}]
    return hashlib.sha256(json.dumps(messages, separators=(",", ":")).encode()).hexdigest()
