"""A Hugging Face `tokenizer.json` as a tiktoken encoding: the same ids, or a refusal that names what is not supported.

tiktoken merges any two neighbours whose bytes are in its table and takes the table's number as the priority; Hugging Face
merges only listed pairs. So the priorities here are merge indices with a map to the file's ids, and a file is refused
unless every merge (x, y) -> t re-derives as exactly [x, y] from the merges before t. Then both do the same: as long as no
merge has crossed the ends of t, its inside went the way of t alone, so x and y are the only neighbours that can become t.

What splits text into words is a closed table (`SPLITS`): each entry is one pattern that gives the pieces of the whole
`pre_tokenizer`, no character lost, and says where a text may be cut without changing a token.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_dspark.errors import ConfigError

if TYPE_CHECKING:
    import tiktoken

PIECE: Final = 65_536
"""Characters that are encoded at once, at least: then the first place is sought where a cut changes no token."""
LONGEST: Final = 900_000
"""Characters without a place to cut that can be encoded: tiktoken's regex engine gives up at a million repetitions."""
FORMAT: Final = 1
"""The cache file's format and the rules by which a table was checked. Raise it when either changes."""


@dataclass(frozen=True, slots=True)
class Split:
    """One pattern for a whole `pre_tokenizer`.

    `pattern` is tiktoken's dialect. `cut` matches, without width, where a piece always ends and no look-ahead looks across.
    `drops` says that a byte without a token can be handled: all its characters are in the class that is no blank, letter or
    number, so that the piece around it is known.
    """

    name: str
    pattern: str
    cut: re.Pattern[str]
    drops: bool


@dataclass(frozen=True, slots=True)
class Table:
    """A checked tokenizer.json. A token's place in `tokens` and `ids` is its priority: single bytes, then the merges.

    `rest` are ids that no ordinary text gives (added tokens, unused entries) with their bytes; `added` are the added tokens.
    """

    split: str
    tokens: tuple[bytes, ...]
    ids: tuple[int, ...]
    rest: dict[int, bytes]
    added: dict[str, int]


# --- how text is split

_CJK: Final = r"\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}"
_WORD: Final = r"[\p{L}\p{M}]"
_SIGN: Final = r"[\p{P}\p{S}]"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LONG: Final = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)

_DEEPSEEK: Final = "|".join(
    [
        r"\p{N}{1,3}",
        # the long pattern where there is neither a number nor a CJK character: those are text ends for it
        r"[!-/:-@\[-`{-~][A-Za-z]+",
        rf"[^\r\n\p{{L}}\p{{P}}\p{{S}}\p{{N}}{_CJK}]?[{_WORD}--[{_CJK}]]+",
        rf" ?[{_SIGN}--[{_CJK}]]+[\r\n]*",
        r"\s*[\r\n]+",
        rf"\s+(?![^\s\p{{N}}{_CJK}])",
        r"\s+",
        # the long pattern inside a CJK run, which also holds signs, marks and unassigned characters
        rf"[[{_CJK}]--[\p{{L}}\p{{P}}\p{{S}}]]?[[{_CJK}]&&{_WORD}]+",
        rf"[[{_CJK}]&&{_SIGN}]+",
        # what nothing above matches stays together up to the next match
        rf"[^\s\p{{L}}\p{{M}}\p{{N}}\p{{P}}\p{{S}}{_CJK}]+(?![{_WORD}--[{_CJK}]])",
        rf"[[{_CJK}]--[\p{{L}}\p{{M}}\p{{P}}\p{{S}}]]+(?![[{_CJK}]&&{_WORD}])",
        r"(?s:.)",
    ]
)
# No piece holds a blank behind a visible character (only line ends, behind signs), or a letter of CJK behind a full stop
# or comma of its script; and no look-ahead at the end of a piece tells what follows there from the end of the text.
_CUT: Final = re.compile(r"(?<=\S)(?= )|(?<=[^\W_])(?=\n)|(?<=[、。，．！？：；])(?=[ぁ-ゖァ-ヺ一-龥])")

_BYTES: Final = ("ByteLevel", False)
_Steps = tuple[tuple[Any, ...], ...]
SPLITS: Final[dict[_Steps, Split]] = {
    (("ByteLevel", True),): Split("gpt2", _GPT2, _CUT, drops=True),
    (("Digits", True), ("ByteLevel", True)): Split(
        "gpt2-single-digits",
        r"\p{N}|" + _GPT2.replace(r"| ?\p{N}+", "").replace(r"(?!\S)", r"(?![^\s\p{N}])"),
        _CUT,
        drops=True,
    ),
    (("Split", r"\p{N}{1,3}"), ("Split", "[一-龥\u3040-ゟ゠-ヿ]+"), ("Split", _LONG), _BYTES): Split(
        "deepseek", _DEEPSEEK, _CUT, drops=False
    ),
}
_BY_NAME: Final = {split.name: split for split in SPLITS.values()}


# --- what a tokenizer.json says


def _refused(feature: str) -> ConfigError:
    return ConfigError("RECIPE_INVALID", f"tokenizer.json: not supported: {feature}")


def _require(data: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]], where: str) -> None:
    """Each key of `data` must have one of its allowed values; a key that is not listed must be empty."""
    for key, value in data.items():
        if value is not None and value not in allowed.get(key, ()):
            raise _refused(f"{where}{key} = {json.dumps(value, ensure_ascii=False)[:120]}")


def _steps(data: Mapping[str, Any] | None) -> Iterator[tuple[Any, ...]]:
    """The flat list of what a pre-tokenizer does, options that change nothing but offsets left out."""
    data = data or {"type": "none"}
    kind = data["type"]
    if kind == "Sequence":
        for part in data["pretokenizers"]:
            yield from _steps(part)
    elif kind == "Split":
        plain = data["behavior"] == "Isolated" and not data["invert"]
        yield (kind, data["pattern"].get("Regex")) if plain else (kind, json.dumps(data))
    elif kind == "ByteLevel":
        yield (kind, bool(data.get("use_regex", True))) + ("add_prefix_space",) * bool(data["add_prefix_space"])
    else:
        yield (kind, bool(data.get("individual_digits", False))) if kind == "Digits" else (kind,)


def _split(data: Mapping[str, Any] | None) -> Split:
    steps = tuple(_steps(data))
    if steps not in SPLITS:
        raise _refused(f"pre_tokenizer {' + '.join(' '.join(map(str, step)) for step in steps)[:400]}")
    return SPLITS[steps]


def _check_frame(data: Mapping[str, Any]) -> None:
    """Everything beside model, pre-tokenizer and added tokens: it must leave text and ids as they are."""
    normalizer = data.get("normalizer")
    if normalizer and not (normalizer["type"] == "Sequence" and not normalizer["normalizers"]):
        raise _refused(f"normalizer {normalizer['type']}")
    post = data.get("post_processor") or {"type": "ByteLevel"}
    if post["type"] != "ByteLevel" and not _adds_nothing(post):
        raise _refused(f"post_processor {post['type']}")
    decoder = data.get("decoder") or {"type": "none"}
    if decoder["type"] != "ByteLevel":
        raise _refused(f"decoder {decoder['type']}")
    for key in ("truncation", "padding"):
        if data.get(key):
            raise _refused(key)


def _adds_nothing(post: Mapping[str, Any]) -> bool:
    """A template of the text alone, as some converters write it."""
    return post["type"] == "TemplateProcessing" and [list(part) for part in post["single"]] == [["Sequence"]]


def _check_model(model: Mapping[str, Any]) -> None:
    allowed: dict[str, Sequence[Any]] = {
        "type": ("BPE",),
        "dropout": (0,),
        "continuing_subword_prefix": ("",),
        "end_of_word_suffix": ("",),
        "fuse_unk": (False, True),
        "byte_fallback": (False,),
        "ignore_merges": (False,),
    }
    if model.get("type") != "BPE":
        raise _refused(f"model.type = {model.get('type')}")
    _require({key: model[key] for key in model.keys() - {"vocab", "merges"}}, allowed, "model.")


def _added(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Added tokens by text. One that plain prose could hold would change what a server counts, so it is refused."""
    for row in rows:
        text = row["content"]
        for flag in ("lstrip", "rstrip", "single_word"):
            if row.get(flag):
                raise _refused(f"added token {text!r} with {flag}")
        if all(char.isalnum() or char.isspace() for char in text):
            raise _refused(f"added token {text!r}, which ordinary text may hold")
    return {row["content"]: int(row["id"]) for row in rows}


# --- the table of merges


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """The byte of each character of byte-level BPE: visible Latin-1 as it is, the others from U+0100 upwards (GPT-2)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(plain))
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _bytes(token: str) -> bytes:
    """The bytes of a vocabulary entry; an entry of other characters stands for its own text."""
    alphabet = _alphabet()
    known = [alphabet[char] for char in token if char in alphabet]
    return bytes(known) if len(known) == len(token) else token.encode()


def _pairs(merges: Sequence[Any]) -> list[tuple[str, str]]:
    """Both spellings: "x y" and ["x", "y"]."""
    found = []
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        found.append((left, right))
    return found


def _merged(piece: bytes, ranks: Mapping[bytes, int], limit: int) -> list[bytes]:
    """`piece` after all merges before `limit`, the earliest first and the leftmost of equals: what tiktoken does."""
    parts = [piece[place : place + 1] for place in range(len(piece))]
    steps = [ranks.get(left + right, limit) for left, right in pairwise(parts)]
    while steps and (best := min(steps)) < limit:
        at = steps.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del steps[at]
        for place in range(max(at - 1, 0), min(at + 1, len(steps))):
            steps[place] = ranks.get(parts[place] + parts[place + 1], limit)
    return parts


def _check_merges(pairs: Sequence[tuple[str, str]], ranks: Mapping[bytes, int], first: int) -> None:
    for rank, (left, right) in enumerate(pairs, first):
        x, y = _bytes(left), _bytes(right)
        if ranks[x + y] != rank:
            raise _refused(f"two merges give {left + right!r}")
        if _merged(x + y, ranks, rank) != [x, y]:
            raise _refused(f"merge {rank - first}: {left!r} + {right!r} is not what the merges before it leave")


def _check_bytes(missing: Sequence[int], split: Split) -> None:
    """Hugging Face drops a byte that has no token. That is followed where its characters are of one known class."""
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}
    controls = {*range(0x09), *range(0x0E, 0x20), 0x7F}
    for byte in missing:
        if byte not in never and not (split.drops and byte in controls | {0xF1, 0xF2, 0xF3, 0xF4}):
            raise _refused(f"no token for byte 0x{byte:02X}")


def _table(data: Mapping[str, Any]) -> Table:
    """The checked table of a parsed tokenizer.json."""
    model = data["model"]
    _check_model(model)
    _check_frame(data)
    split, added = _split(data.get("pre_tokenizer")), _added(data.get("added_tokens") or ())
    vocab: dict[str, int] = model["vocab"]
    _check_ids(vocab | added)
    single = [char for char in _alphabet() if char in vocab]
    _check_bytes([byte for char, byte in _alphabet().items() if char not in vocab], split)
    pairs = _pairs(model["merges"])
    names = single + [left + right for left, right in pairs]
    if unknown := [name for name in names if name not in vocab]:
        raise _refused(f"merge to {unknown[0]!r}, which is not in the vocabulary")
    tokens = tuple(_bytes(name) for name in names)
    _check_merges(pairs, {token: rank for rank, token in enumerate(tokens)}, len(single))
    return Table(split.name, tokens, tuple(vocab[name] for name in names), _rest(vocab, added, set(names)), added)


def _check_ids(ids: Mapping[str, int]) -> None:
    """Each a number that four bytes hold, and of one text alone."""
    texts: dict[int, str] = {}
    for text, number in ids.items():
        if type(number) is not int or not 0 <= number < 1 << 32:
            raise _refused(f"id {number!r} of {text!r}")
        if texts.setdefault(number, text) != text:
            raise _refused(f"id {number} of {texts[number]!r} and of {text!r}")


def _rest(vocab: Mapping[str, int], added: Mapping[str, int], used: set[str]) -> dict[int, bytes]:
    return {number: _bytes(text) for text, number in (dict(vocab) | dict(added)).items() if text not in used}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError("MODEL_MISSING", f"{path}: no tokenizer.json could be read: {error.strerror}") from error


def _parsed(raw: bytes) -> Table:
    try:
        return _table(json.loads(raw))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise _refused(f"this is not the file's known shape ({type(error).__name__}: {error})") from error


# --- the cache: what a check of a file found, by the file's sha256


def _packed(table: Table) -> bytes:
    lengths = array("I", map(len, table.tokens)).tobytes()
    body = array("I", table.ids).tobytes() + lengths + b"".join(table.tokens)
    head = {
        "format": FORMAT,
        "order": sys.byteorder,
        "sha256": hashlib.sha256(body).hexdigest(),
        "split": table.split,
        "tokens": len(table.tokens),
        "rest": {str(number): token.hex() for number, token in table.rest.items()},
        "added": table.added,
    }
    return json.dumps(head).encode() + b"\n" + body


def _unpacked(raw: bytes) -> Table | None:
    """The table of a cache file; None for one that is cut off, changed, or of another format."""
    line, _, body = raw.partition(b"\n")
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        head = json.loads(line)
        good = head["sha256"] == hashlib.sha256(body).hexdigest() and head["split"] in _BY_NAME
        if good and (head["format"], head["order"]) == (FORMAT, sys.byteorder):
            return _of_body(head, body)
    return None


def _of_body(head: Mapping[str, Any], body: bytes) -> Table:
    count = head["tokens"]
    numbers = array("I", body[: 8 * count])
    text = body[8 * count :]
    ends = list(accumulate(numbers[count:], initial=0))
    tokens = tuple(text[start:end] for start, end in pairwise(ends))
    rest = {int(number): bytes.fromhex(token) for number, token in head["rest"].items()}
    return Table(head["split"], tokens, tuple(numbers[:count]), rest, head["added"])


def _cached(raw: bytes, digest: str, cache: Path | None) -> Table:
    """The table of a file. A cache that cannot be written costs time only."""
    if cache is None:
        return _parsed(raw)
    kept = cache / f"tokens-{digest}.bin"
    with suppress(OSError):
        if table := _unpacked(kept.read_bytes()):
            return table
    table = _parsed(raw)
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        fresh = kept.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(_packed(table))
        fresh.replace(kept)
    return table


# --- encoding


@lru_cache(maxsize=1)
def _others() -> tiktoken.Encoding:
    """Gives tokens for characters that are no blank, letter or number, by tiktoken's own tables, and none for others."""
    import tiktoken  # only who encodes needs it

    ranks = {bytes([byte]): byte for byte in range(256)}
    return tiktoken.Encoding("others", pat_str=r"[^\s\p{L}\p{N}]", mergeable_ranks=ranks, special_tokens={})


@lru_cache(maxsize=4096)
def _is_other(char: str) -> bool:
    return bool(_others().encode_ordinary(char))


def _around(text: str, at: int) -> tuple[int, int]:
    """Start and end of the piece ` ?[^\\s\\p{L}\\p{N}]+` around the character at `at`, which is of that class."""
    start, end = at, at + 1
    while start and _is_other(text[start - 1]):
        start -= 1
    while end < len(text) and _is_other(text[end]):
        end += 1
    return start - (text[start - 1 : start] == " "), end


def _droppers(missing: Sequence[int]) -> re.Pattern[str] | None:
    """Matches a character whose UTF-8 form holds a byte without a token; None if every byte has one."""
    lead = {0xF1: (0x40000, 0x7FFFF), 0xF2: (0x80000, 0xBFFFF), 0xF3: (0xC0000, 0xFFFFF), 0xF4: (0x100000, 0x10FFFF)}
    spans = [lead.get(byte, (byte, byte)) for byte in missing if byte < 0x80 or byte in lead]
    return re.compile("[" + "".join(f"{chr(low)}-{chr(high)}" for low, high in spans) + "]") if spans else None


def pieces(text: str, cut: re.Pattern[str], size: int = PIECE) -> Iterator[str]:
    """`text` in pieces of at least `size` characters, cut where `cut` allows it. ConfigError if one gets over LONGEST."""
    start = 0
    while start < len(text):
        found = cut.search(text, start + size)
        end = found.start() if found else len(text)
        if end - start > LONGEST:
            message = f"text from character {start:,} on: {end - start:,} characters without a word's end, at most {LONGEST:,}"
            raise ConfigError("USAGE", message)
        yield text[start:end]
        start = end


@dataclass(frozen=True)
class Tokenizer:
    """Text to the ids of one tokenizer.json, and back. Text of special tokens is ordinary text here."""

    sha256: str
    table: Table
    encoding: tiktoken.Encoding

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without any token at start or end.

        UnicodeEncodeError for a lone surrogate, ConfigError for a text that never ends a word (`LONGEST`).
        """
        number = self.table.ids.__getitem__
        return [each for piece in pieces(text, self.split.cut) for each in map(number, self._ranks(piece))]

    def count(self, text: str) -> int:
        """How many tokens `encode` gives, in memory that does not grow with the text."""
        return sum(len(self._ranks(piece)) for piece in pieces(text, self.split.cut))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, added tokens as their text; bytes that are no UTF-8 become U+FFFD. An unknown id is a KeyError."""
        return b"".join(map(self._bytes_of.__getitem__, ids)).decode("utf-8", "replace")

    def added_in(self, text: str) -> tuple[str, ...]:
        """The added tokens whose text is in `text`: a server may read them as tokens, so prompts must not hold them."""
        return tuple(dict.fromkeys(self._added.findall(text))) if self.table.added else ()

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included."""
        return len(self._bytes_of)

    @property
    def split(self) -> Split:
        return _BY_NAME[self.table.split]

    @cached_property
    def _bytes_of(self) -> dict[int, bytes]:
        return dict(zip(self.table.ids, self.table.tokens, strict=True)) | self.table.rest

    @cached_property
    def _added(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.table.added, key=len, reverse=True))))

    @cached_property
    def _priorities(self) -> dict[bytes, int]:
        return {token: rank for rank, token in enumerate(self.table.tokens)}

    @cached_property
    def _missing(self) -> bytes:
        return bytes(byte for byte in range(256) if bytes([byte]) not in self._known)

    @cached_property
    def _known(self) -> frozenset[bytes]:
        return frozenset(self.table.tokens[:256])

    @cached_property
    def _dropped(self) -> re.Pattern[str] | None:
        return _droppers(self._missing)

    def _ranks(self, text: str) -> list[int]:
        """Priorities of the tokens of `text`."""
        text.encode()
        if self._dropped is None or not self._dropped.search(text):
            return self.encoding.encode_ordinary(text)
        return list(self._ranks_around(text, self._dropped))

    def _ranks_before(self, text: str, sign: str) -> list[int]:
        """As if `sign` stood behind `text`: how blanks are split depends on what follows them."""
        ranks = self.encoding.encode_ordinary(text + sign)
        return ranks[: len(ranks) - len(self.encoding.encode_ordinary(sign))]

    def _ranks_within(self, piece: bytes) -> Iterator[int]:
        """Of one piece, which need not be UTF-8 any more."""
        try:
            yield from self.encoding.encode_ordinary(piece.decode())
        except UnicodeDecodeError:
            yield from map(self._priorities.__getitem__, _merged(piece, self._priorities, len(self._priorities)))

    def _ranks_around(self, text: str, dropped: re.Pattern[str]) -> Iterator[int]:
        """As Hugging Face does it: a byte without a token vanishes from its piece before anything is merged."""
        done = 0
        while found := dropped.search(text, done):
            start, end = _around(text, found.start())
            yield from self._ranks_before(text[done:start], "!" if text[start] != " " else " !")
            left = text[start:end].encode().translate(None, self._missing)
            yield from self._ranks_within(left)
            done = end
        yield from self.encoding.encode_ordinary(text[done:])


def load_tokenizer(path: Path, *, cache: Path | None) -> Tokenizer:
    """The tokenizer of the tokenizer.json at `path`.

    `cache` is a folder for what was checked, by the file's sha256 (None: check each time, a second or two for 128,000
    merges). ConfigError: MODEL_MISSING if the file cannot be read, RECIPE_INVALID naming the feature if it is not supported.
    """
    import tiktoken  # only who encodes needs it

    raw = _read(path)
    digest = hashlib.sha256(raw).hexdigest()
    table = _cached(raw, digest, cache)
    del raw
    ranks = {token: rank for rank, token in enumerate(table.tokens)}
    pattern = _BY_NAME[table.split].pattern
    return Tokenizer(
        digest, table, tiktoken.Encoding(digest, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    )
