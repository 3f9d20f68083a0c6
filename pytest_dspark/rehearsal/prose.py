"""Believable English without end: seeded sentences around a subject."""

from __future__ import annotations

import random
from collections.abc import Iterator

_SUBJECTS = (
    "the keeper",
    "a traveller",
    "the harbour master",
    "an old sailor",
    "the engineer",
    "a young teacher",
    "the gardener",
    "her brother",
)
_VERBS = (
    "watched",
    "remembered",
    "described",
    "repaired",
    "followed",
    "measured",
    "carried",
    "painted",
    "counted",
    "found",
)
_OBJECTS = (
    "the lamp",
    "a narrow path",
    "the northern light",
    "an unfinished letter",
    "the tide",
    "a brass key",
    "the long staircase",
    "a quiet engine",
    "the map of the coast",
)
_PLACES = (
    "near the water",
    "behind the hill",
    "under a grey sky",
    "in the small workshop",
    "at the edge of town",
    "along the railway",
    "above the bay",
)
_TIMES = (
    "that evening",
    "before dawn",
    "in the second winter",
    "after the storm",
    "once more",
    "on the last day of the month",
    "for an hour",
)
_LINKS = ("Then", "Later", "Even so", "By then", "In the end", "Meanwhile", "Because of that", "Slowly")
_ENDS = (
    "and nobody spoke",
    "and the work went on",
    "while the wind turned",
    "so the door stayed open",
    "and it was enough",
    "as the bells began",
)


def sentences(seed: int, subject: str = "") -> Iterator[str]:
    """Sentences, each with the blank that joins it to the one before."""
    chooser = random.Random(seed)
    pick = chooser.choice
    blank = ""
    while True:
        who = subject if subject and chooser.random() < 0.5 else pick(_SUBJECTS)
        start = f"{pick(_LINKS)} {who}" if chooser.random() < 0.6 else who[:1].upper() + who[1:]
        tail = f", {pick(_ENDS)}." if chooser.random() < 0.5 else "."
        yield f"{blank}{start} {pick(_VERBS)} {pick(_OBJECTS)} {pick(_PLACES)} {pick(_TIMES)}{tail}"
        blank = "\n\n" if chooser.random() < 0.12 else " "


def text(seed: int, subject: str, words: int) -> str:
    """Whole sentences of at least so many words."""
    parts: list[str] = []
    count = 0
    for sentence in sentences(seed, subject):
        parts.append(sentence)
        count += len(sentence.split())
        if count >= words:
            break
    return "".join(parts)
