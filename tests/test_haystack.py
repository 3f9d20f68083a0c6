"""Prompts of exactly so many tokens: over several tokenizers and windows, with every secret where it is said to stand."""

import hashlib
import itertools
import random
import re
from pathlib import Path

import pytest
from test_tokens import DEEPSEEK, DIGITS, GPT2, deepseek_file, lab_file, load_tokenizer, loaded, made

from pytest_dspark import haystack, prose
from pytest_dspark.errors import ConfigError, EndpointError
from pytest_dspark.haystack import Body, Template, adding_up, asked, compose, new_nonce, new_secrets, template_of
from pytest_dspark.recipe import Needle, needle_of

NEEDLE = "The access code of the {label} is {code}."
QUESTION = "What is the access code of the {label}? Reply with only the code."
OPTIONS = Needle(NEEDLE, QUESTION)
SEVERAL = Needle(NEEDLE, "What are the codes of the {labels}?", positions=(0.1, 0.5, 0.9), decoys=2)
KNOWN = {"gpt2": GPT2, "digits": DIGITS, "deepseek": DEEPSEEK}


@pytest.fixture(params=[*KNOWN, "deepseek-v4", "lab"])
def tokenizer(request, tmp_path):
    if request.param in KNOWN:
        return loaded(tmp_path, made(KNOWN[request.param]))
    return real(request.param, tmp_path)


def real(name, tmp_path):
    path = lab_file() if name == "lab" else deepseek_file()
    if path is None or not path.is_file():
        pytest.skip(f"the {name} tokenizer.json is not on this machine")
    return load_tokenizer(path, cache=tmp_path)


def template(tokenizer):
    return Template(tuple(tokenizer.encode("System: short.\nUser: ")), tuple(tokenizer.encode("\nAnswer:")), "render")


def build(tokenizer, tokens, options=OPTIONS, body=None, nonce=None):
    found = new_secrets(options)
    body = body or Body(prose.generated(3), tokenizer.encode)
    return compose(
        body,
        tokens,
        secrets=found,
        question=asked(options, found),
        template=template(tokenizer),
        nonce=nonce or new_nonce(),
    )


@pytest.mark.parametrize("window", [8192, 16384 + 64, 60_000])
def test_the_length_is_exact_and_the_ids_are_those_of_the_text(tokenizer, window):
    body = Body(prose.generated(3), tokenizer.encode)
    for percent in (25, 50, 90):
        tokens = (window - 64) * percent // 100
        prompt = build(tokenizer, tokens, body=body)
        assert len(prompt.ids) == tokens
        before, after = prompt.template.before, prompt.template.after
        inner = list(prompt.ids[len(before) : len(prompt.ids) - len(after)])
        assert inner == tokenizer.encode(prompt.text), "the pieces are not the text's own tokens"
        assert prompt.ids[: len(before)].tolist() == list(before) and prompt.ids[-len(after) :].tolist() == list(after)


@pytest.mark.parametrize("options", [OPTIONS, SEVERAL], ids=["one needle", "three needles"])
def test_offsets_say_where_each_secret_stands(tokenizer, options):
    prompt = build(tokenizer, 14_000, options)
    assert len(prompt.placed) == len(options.positions) + options.decoys
    for place in prompt.placed:
        around = tokenizer.decode(prompt.ids[place.offset : place.offset + place.tokens])
        assert around == f" {place.secret.sentence}"
        assert tokenizer.decode(prompt.ids[place.offset - 40 : place.offset]).rstrip("\n").endswith(".")
        assert tokenizer.decode(prompt.ids[place.offset + place.tokens :])[:1] in (" ", "T")
        assert abs(place.offset / 14_000 - place.secret.share) < 0.02
        assert prompt.text.count(place.secret.code) == 1
    needles = [place.secret for place in prompt.placed if not place.secret.decoy]
    assert [secret.share for secret in needles] == sorted(options.positions)
    assert all(secret.label in prompt.text.rpartition("\n\n")[2] for secret in needles)
    assert not any(p.secret.label in prompt.text.rpartition("\n\n")[2] for p in prompt.placed if p.secret.decoy)


def test_no_two_prompts_share_more_than_the_template(tmp_path):
    tokenizer = loaded(tmp_path, made(GPT2))
    body = Body(prose.generated(3), tokenizer.encode)
    prompts = [build(tokenizer, size, body=body) for size in (3000, 3000, 6000, 12_000) for _ in range(5)]
    start = len(prompts[0].template.before)
    for one, two in itertools.combinations(prompts, 2):
        shared = next(n for n, (left, right) in enumerate(zip(one.ids, two.ids, strict=False)) if left != right)
        assert shared - start < 8, "the nonce does not stand at the very start"
    assert len({prompt.nonce for prompt in prompts}) == len({prompt.sha256 for prompt in prompts}) == len(prompts)


def test_the_question_stands_at_the_end():
    prompt = compose(
        Body(prose.generated(3), words), 500, secrets=(), question="What?", template=Template((7,), (8, 9)), nonce="n"
    )
    assert prompt.text.startswith("n\n\n") and prompt.text.endswith(".\n\nWhat?") and prompt.ids[-2:].tolist() == [8, 9]


def words(text):
    """A tokenizer of words: what counts is how many."""
    return [len(word) for word in text.split()]


@pytest.mark.parametrize("tokens", range(700, 740))
def test_every_length_can_be_reached(tokens):
    assert len(build_words(tokens).ids) == tokens


def build_words(tokens, blocks=None):
    found = new_secrets(OPTIONS)
    body = Body(blocks or prose.generated(tokens), words)
    return compose(body, tokens, secrets=found, question=asked(OPTIONS, found), template=Template(), nonce="n")


def test_too_few_tokens_are_refused():
    with pytest.raises(ConfigError, match="30 tokens: template, needles and question take"):
        build_words(30)


def test_a_text_that_ends_too_soon_is_refused():
    with pytest.raises(ConfigError, match=r"cannot give [\d,]+ tokens more: [\d,]+ tokens of it are left"):
        build_words(20_000, iter([next(prose.generated(1))]))


def test_adding_up_against_every_subset():
    chooser = random.Random(5)
    for _ in range(200):
        sizes = [chooser.randint(3, 12) for _ in range(8)]
        total = chooser.randint(0, 50)
        possible = any(sum(c) == total for n in range(9) for c in itertools.combinations(sizes, n))
        found = adding_up(sizes, total)
        assert (found is not None) == possible
        if found is not None:
            assert sum(sizes[place] for place in found) == total and found == sorted(set(found))


# --- the template


def chat(tokenizer, before="<sys>be brief\n", after="\n<assistant>"):
    return lambda text: (tokenizer.encode(before) + tokenizer.encode(text) + tokenizer.encode(after), "render")


def test_the_template_is_measured(tmp_path):
    tokenizer = loaded(tmp_path, made(GPT2))
    found = template_of(chat(tokenizer), tokenizer.encode, ("abc The end?", "7 more (all)"))
    assert tokenizer.decode(found.before) == "<sys>be brief\n" and tokenizer.decode(found.after) == "\n<assistant>"
    assert found.how == "render" and found.size == len(found.before) + len(found.after)


def test_a_template_that_swallows_a_part_of_the_text_is_refused(tmp_path):
    tokenizer = loaded(tmp_path, made(GPT2))

    def stripped(text):
        return tokenizer.encode(f"<sys>{text.strip('?)')}<assistant>"), "render"

    with pytest.raises(EndpointError, match="the server's ids of a short text are not those of"):
        template_of(stripped, tokenizer.encode, ("abc The end?", "7 more (all)"))


def test_another_tokenizer_of_the_server_is_seen(tmp_path):
    tokenizer, other = loaded(tmp_path, made(GPT2)), loaded(tmp_path, made(GPT2, merges=["Ġ t", "h e"]))
    with pytest.raises(EndpointError):
        template_of(chat(other), tokenizer.encode, ("abc in the end?", "7 in the (all)"))


# --- prose and files


def test_prose_is_varied_and_seeded_and_cannot_hold_a_code():
    blocks = list(itertools.islice(prose.generated(1), 40))
    assert blocks == list(itertools.islice(prose.generated(1), 40)) != list(itertools.islice(prose.generated(2), 40))
    sentences = [sentence for block in blocks for sentence in block]
    assert len(set(sentences)) > 0.98 * len(sentences) and not re.search(r"\d|[A-Z]{2}|code", "".join(sentences))
    assert all(re.fullmatch(r" [A-Z][a-z, ]+\.\n{0,2}", sentence) for sentence in sentences)


def test_a_text_file_is_known_by_its_sha256(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("One night.  It rained!\nWho knew? " * 300)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    blocks = list(prose.from_file(path, digest))
    assert "".join(itertools.chain(*blocks)) == " One night. It rained! Who knew?" * 300
    with pytest.raises(ConfigError, match="filler is sha256"):
        prose.from_file(path, "0" * 64)
    with pytest.raises(ConfigError, match="expected a UTF-8 text"):
        prose.from_file(tmp_path / "none", digest)


def test_a_sentence_without_end_is_cut_between_words(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("word " * 5000)
    parts = list(itertools.chain(*prose.from_file(path, hashlib.sha256(path.read_bytes()).hexdigest())))
    assert max(map(len, parts)) <= prose.LONGEST + 1 and "".join(parts).split() == ["word"] * 5000


# --- codes and options


def test_codes_are_fresh_and_of_the_shape():
    codes = {haystack.new_code("AAAA-00000") for _ in range(500)}
    assert len(codes) == 500 and all(re.fullmatch(r"[A-Z]{4}-[1-9]{5}", code) for code in codes)
    found = new_secrets(SEVERAL)
    assert len({secret.code for secret in found}) == len({secret.label for secret in found}) == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"needle": "no place"}, "needle must hold {code}"),
        ({"question": " "}, "question must be a text"),
        ({"code": "AAAA"}, "code must hold a digit"),
        ({"send": "both"}, "send must be ids or chat"),
        ({"positions": [0.5, 1.5]}, "positions are shares"),
        ({"positions": []}, "at least one needle"),
        ({"positions": [0.1, 0.9]}, "question with {labels}"),
        ({"needle": "It is {code}."}, "decoys need a needle with {label}"),
        ({"decoy": "It was nothing."}, "decoy must hold {code}"),
        ({"reserve": 0}, "reserve must be above 0"),
        ({"reserve": "64"}, "reserve must be int"),
        ({"max_tokens": 65}, "more than the reserve"),
        ({"deadline_s": 7200.0}, "deadline_s is 7200, the floor is 43200"),
        ({"stall_s": 0.0}, "must be above 0"),
        ({"filler": "book.txt"}, "needs filler_sha256"),
        ({"fillers": "book.txt"}, "unknown key 'fillers'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(change, words):
    base = {"needle": NEEDLE, "question": QUESTION}
    assert needle_of(base, "here") == OPTIONS
    with pytest.raises(ConfigError, match=re.escape(words)):
        needle_of(base | change, "here")


def test_the_shipped_recipes_have_needles():
    from pytest_dspark.recipe import load_recipe

    found = []
    for path in (Path(__file__).parents[1] / "recipe").glob("*[a-z0-9].toml"):
        if ".overlay" not in path.name:
            recipe = load_recipe(path)
            if "long1m" not in dict(recipe.profiles):
                continue
            found.append(recipe.name)
            assert {"needle.25pct", "needle.50pct", "needle.90pct"} <= set(recipe.required("long1m"))
            needle_of(recipe.checks["needle"], path.name)
    assert {"dspark-sm121", "rehearsal", "lab-smollm2"} <= set(found)
