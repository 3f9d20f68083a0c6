"""Filler for long prompts: seeded English prose with a vocabulary and a grammar of its own, or a text file.

Both come as blocks of sentences. The prose holds no digit and no capital letter within a word, so that no code can stand
in it by accident, and no sentence of it speaks of codes.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from pytest_dspark.errors import ConfigError

_T = TypeVar("_T")
SENTENCES: Final = 128
"""Sentences in one block."""
LONGEST: Final = 2_000
"""Characters of a sentence of a text file; a longer one is cut at a blank."""

_WHO: Final = (
    "ferryman|baker|surveyor|clockmaker|shepherd|glazier|printer|weaver|gardener|night porter|schoolteacher|carpenter|"
    "beekeeper|apothecary|stonemason|piano tuner|postman|cooper|bookbinder|miller|harness maker|tinsmith|drover|lamplighter"
).split("|")
_KIND: Final = (
    "old|young|patient|quiet|cheerful|careful|tired|new|second|former|stubborn|lonely|hopeful|retired|travelling|kindly"
).split("|")
_FROM: Final = (
    "|from the valley|of the upper village|by the canal|from across the river|of the northern road|in the grey coat|"
    "with the lantern|from the island|at the corner house"
).split("|")
_DID: Final = (
    "mended|carried|described|painted|weighed|remembered|traded away|polished|borrowed|measured|sketched|buried|praised|"
    "returned|counted|unpacked|labelled|examined|repaired|inherited|mislaid|admired|set aside|wrapped"
).split("|")
_THING: Final = (
    "the copper kettle|a wicker basket|the long ladder|two bolts of linen|the parish map|a box of candles|the broken oar|"
    "an iron stove|the weather vane|a jar of honey|the church bell rope|several planks of oak|the almanac|a pair of boots|"
    "the garden gate|a coil of wire|the violin case|half a sack of flour|the painted sign|a bundle of letters|the millstone|"
    "three panes of glass|the market ledger|a silver thimble"
).split("|")
_WHERE: Final = (
    "behind the stables|near the old weir|under the chestnut trees|beside the town pump|along the towpath|in the chapel yard|"
    "at the edge of the moor|on the slate roof|inside the boathouse|above the quarry|past the toll bridge|between the orchards"
).split("|")
_WHEN: Final = (
    "before sunrise|after the first frost|during the harvest|on a wet afternoon|late in the evening|in the spring|"
    "while the fair was on|once the fog had lifted|on the eve of the feast|by lamplight|as the tide went out|all summer long"
).split("|")
_LINK: Final = (
    "|||Later, |Meanwhile, |Even so, |By then, |As usual, |In truth, |For once, |Little by little, |Without a word, "
).split("|")
_TAIL: Final = (
    "||||, and nobody minded|, though the wind was rising|, which pleased the children|, but the rain came early|"
    ", and the dog followed|, so supper was late|, as the neighbours still tell it|, for there was time enough"
).split("|")
_SAID: Final = "noticed|wrote|heard|believed|told everyone|dreamt|argued|swore".split("|")
_FORMS: Final = (
    "{start} {kind} {who}{of} {did} {thing} {where}{tail}.",
    "{start} {who} {did} {thing} {when}{tail}.",
    "{start} {kind} {who}{of} {said} that the {other_kind} {other_who} had {did} {thing} {where}.",
    "{start} {who}{of} {did} {thing}, and then {did_too} {thing_too} {when}{tail}.",
    "{start} {kind} {who} never {did} {thing} {where} again{tail}.",
)
# Forms with places instead of names. `The` begins a sentence small behind a link, else big.
_SLOTS: Final = {
    "kind": _KIND,
    "who": _WHO,
    "of": [f" {text}" if text else "" for text in _FROM],
    "did": _DID,
    "thing": _THING,
    "where": _WHERE,
    "when": _WHEN,
    "tail": _TAIL,
    "said": _SAID,
    "other_kind": _KIND,
    "other_who": _WHO,
    "did_too": _DID,
    "thing_too": _THING,
}
_STARTS: Final = [f"{link}{'the' if link else 'The'}" for link in _LINK]
_PLACES: Final = {name: f"{{{place}}}" for place, name in enumerate(["start", *_SLOTS])}
_TEMPLATES: Final = [f" {form}".format(**_PLACES).format for form in _FORMS]
_BYTES: Final = 256


def _wheel(words: Sequence[_T]) -> list[_T]:
    """A word for each byte, so that a random byte chooses one."""
    return list(itertools.islice(itertools.cycle(words), _BYTES))


_WHEELS: Final = [_wheel(words) for words in (_STARTS, *_SLOTS.values())]
_FORM_WHEEL: Final = _wheel(_TEMPLATES)


def generated(seed: int) -> Iterator[tuple[str, ...]]:
    """Blocks of sentences without end, the same for the same seed. Each sentence begins with a blank; a block ends a
    paragraph."""
    drawn = random.Random(seed).randbytes
    while True:
        words = [map(wheel.__getitem__, drawn(SENTENCES)) for wheel in _WHEELS]
        forms = map(_FORM_WHEEL.__getitem__, drawn(SENTENCES))
        lines = [form(*row) for form, *row in zip(forms, *words, strict=True)]
        lines[-1] += "\n\n"
        yield tuple(lines)


def from_file(path: Path, sha256: str) -> Iterator[tuple[str, ...]]:
    """Blocks of the sentences of a text file, once from its beginning to its end.

    Raises RECIPE_INVALID if the file cannot be read as UTF-8 or is not the one that was named by its sha256.
    """
    try:
        raw = path.read_bytes()
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("RECIPE_INVALID", f"{path}: expected a UTF-8 text as filler: {error}") from error
    found = hashlib.sha256(raw).hexdigest()
    if found != sha256:
        raise ConfigError(
            "RECIPE_INVALID", f"{path}: filler is sha256 {found}, filler_sha256 says {sha256 or 'nothing'}"
        )
    sentences = _sentences(text)
    return iter(lambda: tuple(itertools.islice(sentences, SENTENCES)), ())


def _sentences(text: str) -> Iterator[str]:
    """Sentences with one blank before each; blanks and line ends within a sentence become one blank."""
    for part in re.split(r"(?<=[.!?])\s+", text):
        words = " ".join(part.split())
        while len(words) > LONGEST:
            head, _, rest = words[:LONGEST].rpartition(" ")
            yield f" {head or rest}"
            words = words[len(head) + 1 if head else LONGEST :]
        if words:
            yield f" {words}"
