"""A prompt of exactly so many tokens: a nonce, prose with needles and decoys between its sentences, a question at the end.

The body is made of pieces whose ids can be put behind one another: sentences that begin with a blank, each encoded once.
So a prompt of a million tokens costs one pass over its text, and prompts of several lengths share that pass. The end is
filled with sentences whose tokens add up to exactly what is missing; no sentence is cut.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import secrets
import string
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from pytest_dspark.errors import ConfigError, EndpointError
from pytest_dspark.recipe import Needle

Encode = Callable[[str], Sequence[int]]
"""Text to ids, without tokens at start or end."""

NONCE_LETTERS: Final = 16
ENDING: Final = 8
"""Sentences, of usual length, that are left for the exact end: enough that their sums reach every number."""
POOL: Final = 96
"""Sentences from which the exact end is chosen."""
LABELS: Final = (
    "granary|observatory|foundry|lighthouse|archive|orangery|armoury|treasury|brewery|dockyard|monastery|signal box"
).split("|")
SYSTEM: Final = secrets.SystemRandom()
CLOSING: Final = " That is the end of the text.\n\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text whose ids stand for themselves wherever it follows a sentence."""

    text: str
    ids: array[int]


@dataclass(frozen=True, slots=True)
class Template:
    """What a server's chat template puts around a user's text, in ids; `how` says which call told: render or tokenize."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    how: str = "none"

    @property
    def size(self) -> int:
        return len(self.before) + len(self.after)


@dataclass(frozen=True, slots=True)
class Secret:
    """One code to be told in the text, and at which share of the prompt. A decoy is one that is not asked for."""

    sentence: str
    label: str
    code: str
    share: float
    decoy: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """A secret where it stands: `offset` is the index of its first token in the whole prompt, `tokens` its length."""

    secret: Secret
    offset: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A whole prompt. `text` is what a user would say, without the template; `sha256` is over the ids as JSON, as sent."""

    ids: array[int]
    text: str
    placed: tuple[Placed, ...]
    nonce: str
    template: Template

    @property
    def sha256(self) -> str:
        as_json = str(self.ids.tolist()).replace(" ", "")  # what json.dumps gives for whole numbers, in half the time
        return hashlib.sha256(as_json.encode()).hexdigest()


# --- the body, encoded once


class Body:
    """Blocks of sentences with their ids, made when they are first asked for and kept for the next prompt."""

    def __init__(self, blocks: Iterator[tuple[str, ...]], encode: Encode) -> None:
        self.encode = encode
        self._source = blocks
        self._blocks: list[tuple[tuple[str, ...], array[int]]] = []

    def piece(self, text: str) -> Piece:
        return Piece(text, array("I", self.encode(text)))

    def has(self, number: int) -> bool:
        """Whether there is a block of that number; a text file ends."""
        while len(self._blocks) <= number:
            sentences = next(self._source, None)
            if sentences is None:
                return False
            self._blocks.append((sentences, array("I", self.encode("".join(sentences)))))
        return True

    @property
    def slack(self) -> int:
        """Tokens that the exact end takes."""
        if not self.has(0):
            return 0
        sentences, ids = self._blocks[0]
        return ENDING * len(ids) // len(sentences)

    def block(self, number: int) -> Piece:
        sentences, ids = self._blocks[number]
        return Piece("".join(sentences), ids)

    def sentences(self, number: int) -> Iterator[Piece]:
        return map(self.piece, self._blocks[number][0])


class _Reader:
    """Reads a body once from its beginning, in whole sentences."""

    def __init__(self, body: Body) -> None:
        self._body, self._block = body, 0
        self._loose: deque[Piece] = deque()

    def up_to(self, tokens: int) -> Iterator[Piece]:
        """The next pieces, as long as they fit."""
        while True:
            piece = self._next()
            if piece is None:
                return
            if len(piece.ids) <= tokens:
                self._drop()
                tokens -= len(piece.ids)
                yield piece
            elif self._loose:
                return
            else:
                self._open()

    def _next(self) -> Piece | None:
        if self._loose:
            return self._loose[0]
        return self._body.block(self._block) if self._body.has(self._block) else None

    def _drop(self) -> None:
        if self._loose:
            self._loose.popleft()
        else:
            self._block += 1

    def _open(self) -> None:
        self._loose.extend(self._body.sentences(self._block))
        self._block += 1

    def exactly(self, tokens: int) -> list[Piece]:
        """The next pieces, `tokens` in all: as read while there is room, then sentences that add up to the rest."""
        taken = list(self.up_to(tokens - self._body.slack))
        rest = tokens - sum(len(piece.ids) for piece in taken)
        while len(self._loose) < POOL and self._body.has(self._block):
            self._open()
        pool = list(itertools.islice(self._loose, POOL))
        chosen = adding_up([len(piece.ids) for piece in pool], rest)
        if chosen is None:
            held = sum(len(piece.ids) for piece in pool)
            problem = f"{held:,} tokens of it are left" if held < rest else "no sentences add up to that"
            raise ConfigError("RECIPE_INVALID", f"the filler cannot give {tokens:,} tokens more: {problem}")
        return taken + [pool[number] for number in chosen]


def adding_up(sizes: Sequence[int], total: int) -> list[int] | None:
    """The places of sizes that add up to exactly `total`, in order and each once; None if there are none."""
    reached: dict[int, tuple[int, int]] = {0: (0, -1)}
    for place, size in enumerate(sizes):
        for held in list(reached):
            if held + size <= total:
                reached.setdefault(held + size, (held, place))
        if total in reached:
            break
    if total not in reached:
        return None
    places = []
    while total:
        total, place = reached[total]
        places.append(place)
    return places[::-1]


# --- the template


def template_of(
    render: Callable[[str], tuple[Sequence[int], str]], encode: Encode, samples: tuple[str, str]
) -> Template:
    """What `render` puts around a text: what the ids of two samples have in common at both ends.

    `samples` are texts whose first and last words differ. Raises PROTOCOL if the samples do not stand in the rendered ids as
    `encode` says: then the template joins with the text, or the server's tokenizer is another one.
    """
    (one, how), (two, _) = render(samples[0]), render(samples[1])
    before = _common(one, two)
    after = _common(one[::-1], two[::-1])
    template = Template(tuple(one[:before]), tuple(one[len(one) - after :]), how)
    for sample, ids in zip(samples, (one, two), strict=True):
        if (*template.before, *encode(sample), *template.after) != tuple(ids):
            text = f"the server's ids of a short text are not those of {len(encode(sample))} tokens within a template"
            raise EndpointError("PROTOCOL", f"{text} of {before} and {after}")
    return template


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    pairs = enumerate(zip(one, two, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(two)))


# --- codes and needles


def chooser(challenge: str, what: str) -> random.Random:
    """What chooses codes and labels: the machine's own randomness, or what the challenge alone makes of `what`."""
    return random.Random(f"{challenge}/{what}") if challenge else SYSTEM


def seed_of(challenge: str, seed: int) -> int:
    """The seed of the filler: the recipe's, or the one that the challenge makes."""
    return int(hashlib.sha256(challenge.encode()).hexdigest()[:8], 16) if challenge else seed


def new_nonce() -> str:
    return "".join(secrets.choice(string.ascii_lowercase) for _ in range(NONCE_LETTERS))


def like(code: str) -> str:
    """The shape of a code."""
    return "".join("A" if char.isalpha() else "0" if char.isdigit() else char for char in code)


def new_code(shape: str, by: random.Random = SYSTEM) -> str:
    """A code of the shape: each `A` becomes a letter, each `0` a digit, as `by` chooses; digits do not begin with 0."""
    letters, digits = "ABCDEFGHJKLMNPQRSTUVWXYZ", "123456789"
    return "".join(by.choice(letters) if c == "A" else by.choice(digits) if c == "0" else c for c in shape)


def new_secrets(options: Needle, by: random.Random = SYSTEM) -> tuple[Secret, ...]:
    """The needles and decoys of one cell in the order of their places, each with a code and a label of its own.

    Decoys are spread evenly.
    """
    shares = [(share, False) for share in options.positions]
    shares += [((number + 1) / (options.decoys + 1), True) for number in range(options.decoys)]
    labels = by.sample(LABELS, k=len(shares))
    codes: dict[str, None] = {}
    while len(codes) < len(shares):
        codes[new_code(options.code, by)] = None
    made = [
        Secret(_told(options, code, label, decoy), label, code, share, decoy)
        for (share, decoy), label, code in zip(shares, labels, codes, strict=True)
    ]
    return tuple(sorted(made, key=lambda secret: secret.share))


def _told(options: Needle, code: str, label: str, decoy: bool) -> str:
    sentence = options.decoy if decoy and options.decoy else options.needle
    return sentence.replace("{code}", code).replace("{label}", label)


def asked(options: Needle, found: Sequence[Secret]) -> str:
    """The question after the needles, by their labels."""
    labels = [secret.label for secret in found if not secret.decoy]
    named = " and of the ".join(labels)
    return options.question.replace("{labels}", named).replace("{label}", labels[0])


# --- the prompt


@dataclass(slots=True)
class _Draft:
    """A prompt that grows from its beginning."""

    ids: array[int] = field(default_factory=lambda: array("I"))
    texts: list[str] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self.ids.extend(piece.ids)
            self.texts.append(piece.text)


def compose(
    body: Body, tokens: int, *, secrets: Sequence[Secret], question: str, template: Template, nonce: str
) -> Prompt:
    """A prompt of exactly `tokens` tokens, template included.

    Raises RECIPE_INVALID if so few tokens cannot hold the needles and the question, or a text file has not as many.
    """
    draft, reader = _Draft(array("I", template.before)), _Reader(body)
    draft.add([body.piece(f"{nonce}\n\n")])
    needles = [body.piece(f" {secret.sentence}") for secret in secrets]
    end = body.piece(CLOSING + question)
    fixed = len(end.ids) + len(template.after)
    left = tokens - fixed - len(draft.ids) - sum(len(piece.ids) for piece in needles)
    if left < 0:
        raise ConfigError("RECIPE_INVALID", f"{tokens} tokens: template, needles and question take {tokens - left}")
    placed = []
    for secret, piece in zip(secrets, needles, strict=True):
        before = list(reader.up_to(min(int(secret.share * tokens) - len(draft.ids), left - body.slack)))
        left -= sum(len(one.ids) for one in before)
        draft.add(before)
        placed.append(Placed(secret, len(draft.ids), len(piece.ids)))
        draft.add([piece])
    draft.add([*reader.exactly(left), end])
    draft.ids.extend(template.after)
    return Prompt(draft.ids, "".join(draft.texts), tuple(placed), nonce, template)
