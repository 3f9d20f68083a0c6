"""The model folder: what is read of it, what is compared, and every byte of it."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from pytest_dspark.cluster import HostEntry
from pytest_dspark.comparison import Sheet, hold
from pytest_dspark.errors import ConfigError, LaunchError
from pytest_dspark.hosts import open_host
from pytest_dspark.recipe import Weights
from pytest_dspark.weights import Hasher, Placed, compare, look, problems, read_sums

MODEL = Path(__file__).parents[1] / "pytest_dspark" / "rehearsal" / "model"
SHARD = "model-00002-of-00002.safetensors"
RIGHT = Weights(shards=2, config=(("model_type", "deepseek_v4"),))


@pytest.fixture
def pair(tmp_path):
    """Two hosts with a folder each, equal at first."""
    for name in ("a", "b"):
        shutil.copytree(MODEL, tmp_path / name)
    return [
        (open_host(HostEntry(n, "127.0.0.1", process=True), cluster="c", state=tmp_path), tmp_path / n) for n in "ab"
    ]


def placed(pair, hasher=None):
    found = []
    for rank, (host, folder) in enumerate(pair):
        model = look(host, str(folder), RIGHT)
        if hasher:
            model = dataclasses.replace(model, sums=hasher.sums(host, model))
        found.append(Placed(rank, host.name, model))
    return found


INDEX = "model.safetensors.index.json"
BROKEN_INDEXES = (
    '{"weight_map": ["a"]}',
    '{"weight_map": {"a": ["b"]}}',
    '{"weight_map": {"a": 1, "b": "c"}}',
    '{"weight_map": {}, "metadata": [1]}',
    *(
        f'{{"weight_map": {{}}, "metadata": {{"total_size": {size}}}}}'
        for size in ('"x"', "1e400", "-5", "true", "NaN")
    ),
    "[" * 100_000,
    "{half",
)


def broken(found, weights=RIGHT, sums=None):
    sheet = Sheet()
    compare(weights, sums or {}, found, sheet)
    assert sheet.comparisons
    return [(c.host, c.what) for c in sheet.comparisons if not hold(c.as_json())]


def test_equal_folders_are_equal_and_bytes_are_said_not_to_be_hashed(pair):
    sheet = Sheet()
    compare(RIGHT, {}, placed(pair), sheet)
    assert all(hold(c.as_json()) for c in sheet.comparisons) and "not hashed" in sheet.not_observable[0]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda folder: (folder / SHARD).unlink(), "shards that the index names"),
        (lambda folder: (folder / SHARD).write_bytes(b""), "empty shards"),
        (lambda folder: (folder / SHARD).write_bytes(b"short"), "bytes of all shards"),
        (lambda folder: (folder / "more.safetensors").write_bytes(b"x"), "number of shards"),
        (lambda folder: (folder / "config.json").write_text("{}"), "config.json model_type"),
        (lambda folder: (folder / "config.json").unlink(), "model folder"),
        (lambda folder: shutil.rmtree(folder), "model folder"),
        *((lambda folder, text=text: (folder / INDEX).write_text(text), "model folder") for text in BROKEN_INDEXES),
        (lambda folder: (folder / "a\tb\n.safetensors").write_bytes(b"x"), "model folder"),
    ],
)
def test_each_defect_is_found_on_its_host(pair, change, what):
    change(pair[1][1])
    assert ("b", what) in broken(placed(pair))
    refused = list(problems(RIGHT, {}, placed(pair)))
    assert refused and refused[0][0] == "b" and refused[0][1].message.startswith("b: ")


def test_one_flipped_byte_is_found_and_named(pair, tmp_path):
    path = pair[1][1] / SHARD
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    said = []
    hasher = Hasher(tmp_path / "sums.json", said.append, lambda: False)
    (message,) = [str(problem) for _, problem in problems(RIGHT, {}, placed(pair, hasher))]
    assert SHARD in message and ": b: " in message and "00001" not in message
    assert len(said) == 4 and "2 of 2" in said[-1] and "GB" in said[-1]
    assert broken(placed(pair)) == [], "sizes alone cannot see it, and say so"


def test_a_list_of_the_recipe_tells_which_host_is_wrong(pair, tmp_path):
    (pair[0][1] / SHARD).write_bytes((pair[0][1] / SHARD).read_bytes().replace(b"part 2", b"part 3"))
    hasher = Hasher(tmp_path / "sums.json", print, lambda: False)
    found = placed(pair, hasher)
    assert [host for host, what in broken(found, sums=found[1].model.sums) if SHARD in what] == ["a"]


def test_a_digest_is_kept_until_the_file_is_touched(pair, tmp_path):
    said = []
    hasher = Hasher(tmp_path / "sums.json", said.append, lambda: False)
    placed(pair, hasher)
    placed(pair, hasher)
    assert len(said) == 4, "an untouched file is not read again"
    stat = (pair[0][1] / SHARD).stat()
    (pair[0][1] / SHARD).write_bytes((pair[0][1] / SHARD).read_bytes().replace(b"part 2", b"part 9"))
    os.utime(pair[0][1] / SHARD, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    placed(pair, hasher)
    assert len(said) == 5, "a file whose old date was put back is read again all the same"


def test_hashing_can_be_interrupted(pair, tmp_path):
    with pytest.raises(LaunchError, match="interrupted"):
        placed(pair, Hasher(tmp_path / "sums.json", print, lambda: True))


def test_a_list_is_read_or_refused_with_its_line(tmp_path):
    path = tmp_path / "sums"
    path.write_text(f"{'a' * 64}  ./x.safetensors\n\n{'b' * 64} *y.safetensors\n")
    assert read_sums(path) == {"x.safetensors": "a" * 64, "y.safetensors": "b" * 64}
    path.write_text("abc  x\n")
    with pytest.raises(ConfigError, match="sums:1: expected a sha256"):
        read_sums(path)
