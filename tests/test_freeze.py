"""Freezing a running engine, and what a later launch says when a file, a weight or the configuration is another."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_gate
from rehearsed import BUNDLE, ROOT, Place

from pytest_dspark import behaviour, freeze
from pytest_dspark.behaviour import Observation, distance, reference, within
from pytest_dspark.behaviour import Place as At
from pytest_dspark.comparison import Sheet, hold
from pytest_dspark.errors import ConfigError
from pytest_dspark.recipe import load_recipe

SHARD = "model-00002-of-00002.safetensors"


# --- distances, pure


def answers(shift=0.0, *, token=" a", only=None):
    """Every prompt answered with two tokens; the first prompt's are shifted."""
    far = At(token, {token: -0.5 - shift, " b": -1.5 + shift})
    near = At(" a", {" a": -0.5, " b": -1.5})
    return Observation(tuple((far if n == 0 else near, near) for n in range(only or len(behaviour.PROMPTS))))


def test_equal_answers_are_at_distance_zero():
    apart = distance(answers(), answers())
    assert (apart.mean, apart.single, apart.places) == (0.0, 0.0, 2 * len(behaviour.PROMPTS))


def test_a_shift_is_measured_by_hand():
    apart = distance(answers(), answers(0.32))
    assert apart.single == pytest.approx(0.32) and apart.prompt == 0
    assert apart.mean == pytest.approx(2 * 0.32 / (4 * len(behaviour.PROMPTS)))


def test_after_another_token_nothing_is_compared_any_more():
    apart = distance(answers(), answers(token=" z"))
    assert apart.places == 2 * len(behaviour.PROMPTS) - 1 and apart.single >= 1.0


@pytest.mark.parametrize("other", [Observation(), answers(only=3), Observation(((),) * len(behaviour.PROMPTS))])
def test_what_cannot_be_compared_is_no_distance(other):
    with pytest.raises(ValueError, match="prompts beside|no log probability"):
        distance(answers(), other)


def test_a_tolerance_is_the_measured_spread_with_room():
    exact = reference([answers(), answers(), answers()])
    assert exact.tolerance == (behaviour.LEAST_MEAN, behaviour.LEAST_SINGLE)
    noisy = reference([answers(), answers(0.05), answers(0.02)])
    assert noisy.tolerance[1] == pytest.approx(0.2)
    assert within(distance(answers(), answers(0.1)), noisy.tolerance)
    assert not within(distance(answers(), answers(0.3)), noisy.tolerance)
    assert not within(dataclasses.replace(distance(answers(), answers()), mean=float("nan")), noisy.tolerance)
    with pytest.raises(ValueError, match="at least two"):
        reference([answers()])


def test_there_are_about_32_prompts_and_none_twice():
    assert len(set(behaviour.PROMPTS)) == len(behaviour.PROMPTS) == 32


# --- the manifest, pure


def sheet_of(frozen, ranks, plan):
    sheet = Sheet()
    freeze.compare(frozen, plan, ranks, sheet)
    return [c for c in sheet.comparisons if not hold(c.as_json())]


@pytest.fixture
def pair():
    recipe = load_recipe(ROOT / "recipe" / "dspark-sm121.toml")
    profile = test_gate.load_profile(ROOT / "profiles" / "dspark-r0b0tlab-production.env")
    cluster = test_gate.load_cluster(ROOT / "docs" / "cluster.example.toml")
    made = test_gate.plan(profile, recipe, cluster, mark="production")
    return made, [test_gate.good_rank(made, 0), test_gate.good_rank(made, 1)]


@pytest.fixture
def frozen(pair):
    made, ranks = pair
    data = freeze.manifest(made, ranks, reference([answers(), answers()]).as_json(), None)
    return freeze.parse(json.dumps(data).encode(), "x")


INSIDE = {
    "packages": {"vllm": "0.26.0+dspark.sm121.3", "torch": "2.11.1"},
    "mapped": {"/x/libnccl.so.2": "cc" * 32},
    "hashes": {"vllm": {"vllm/engine.py": "ee" * 32}},
    "python": "3.12.9",
}


@pytest.mark.parametrize("key", INSIDE)
def test_what_differs_from_the_frozen_is_named_with_its_rank(pair, frozen, key):
    made, ranks = pair
    assert sheet_of(frozen, ranks, made) == []
    ranks[1] = test_gate.inside(ranks[1], **{key: INSIDE[key]})
    (broken,) = sheet_of(frozen, ranks, made)
    assert (broken.rank, broken.host) == (1, "spark-2")
    if key == "hashes":
        assert list(broken.found) == ["vllm/engine.py"], "the file is named"


def test_a_file_that_was_added_or_is_gone_is_named(pair, frozen):
    made, ranks = pair
    ranks[0] = test_gate.inside(ranks[0], hashes={"vllm": {"vllm/more.py": "ff" * 32}})
    (broken,) = sheet_of(frozen, ranks, made)
    assert broken.found == {"vllm/engine.py": "not there", "vllm/more.py": "ff" * 32}


def test_another_engine_configuration(pair, frozen):
    made, ranks = pair
    ranks[0] = dataclasses.replace(ranks[0], log_text=ranks[0].log_text.replace("model='/model'", "model='/other'"))
    assert [c.what for c in sheet_of(frozen, ranks, made)] == ["frozen engine configuration"]


def test_ranks_that_differ_or_show_nothing_are_not_frozen(pair):
    _, ranks = pair
    freeze.alike(ranks)
    with pytest.raises(ConfigError, match=r"rank 1 \(spark-2\) differs from rank 0 in hashes.*engine.py"):
        freeze.alike([ranks[0], test_gate.inside(ranks[1], hashes=INSIDE["hashes"])])
    unread = {"hashes": {"vllm": {"vllm/engine.py": None}}}
    for nothing in ({"packages": {}}, {"hashes": {"vllm": None}}, unread, {"missing": "no python3"}):
        with pytest.raises(ConfigError, match="rank 1"):
            freeze.alike([ranks[0], test_gate.inside(ranks[1], **nothing)])


def test_a_silent_server_does_not_pass_a_frozen_behaviour(frozen):
    for found in (None, Observation(missing="refused"), Observation()):
        sheet = Sheet()
        freeze.compare_behaviour(frozen, "production", found, {}, sheet)
        assert [hold(c.as_json()) for c in sheet.comparisons] == [False]


def test_a_manifest_that_is_not_the_pinned_one_is_refused(tmp_path):
    shutil.copytree(ROOT / "recipe", tmp_path / "recipe")
    path = tmp_path / "recipe" / "rehearsal.freeze.json"
    path.write_text("{}")
    overlay = tmp_path / "recipe" / "rehearsal.overlay.toml"
    overlay.write_text(f'[pins]\nfreeze = "{path.name}"\nfreeze_sha256 = "{"0" * 64}"\n')
    with pytest.raises(ConfigError, match=r"sha256 is 44136f.*pins 000"):
        freeze.read(load_recipe(tmp_path / "recipe" / "rehearsal.toml"))
    overlay.write_text(f'[pins]\nfreeze = "{path.name}"\n')
    with pytest.raises(ConfigError, match="freeze"):
        load_recipe(tmp_path / "recipe" / "rehearsal.toml")


# --- on emulated ranks


@pytest.fixture
def place(tmp_path):
    shutil.copytree(
        ROOT / "recipe", tmp_path / "recipe", ignore=shutil.ignore_patterns("*.overlay.toml", "*.freeze.json")
    )
    made = Place(tmp_path, recipe=str(tmp_path / "recipe" / "rehearsal.toml"))
    yield made
    for pid in made.living():
        os.kill(pid, 9)


def dspark(place, *args):
    code = "import sys; from pytest_dspark.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )


def freeze_now(place):
    """Launch, freeze, stop."""
    session = place.run("--dspark-keep", "-k", "launch")
    assert session.process.returncode == 0, session.text[-2000:]
    done = dspark(place, "freeze", "--cluster", str(place.cluster()), "--out", str(place.out))
    stopped = dspark(
        place, "stop", "--cluster", str(place.cluster()), "--out", str(place.out), "--run", session.folder.name
    )
    assert stopped.returncode == 0, stopped.stderr
    return done


def test_a_frozen_engine_is_proven_again_and_an_edited_one_is_refused(place):
    done = freeze_now(place)
    assert done.returncode == 0 and "pins it" in done.stdout, done.stderr
    session = place.run("-k", "launch or gate")
    assert session.process.returncode == 0, session.text[-3000:]
    verdicts = session.verdicts()
    assert (verdicts["gate.frozen"], verdicts["gate.behaviour"]) == ("PASS", "PASS")

    same = dspark(place, "behaviour", str(place.folder / "recipe" / "rehearsal.freeze.json"), str(session.folder))
    assert same.returncode == 0 and same.stdout.startswith("one engine: mean 0.000000"), same.stdout + same.stderr

    both = place.folder / "bundle"
    shutil.copytree(BUNDLE, both, ignore=shutil.ignore_patterns("__pycache__"))
    (both / "site-packages" / "vllm" / "engine.txt").write_text("edited\n")
    place.bundles = (both, both)
    edited = place.run("-k", "launch or gate")
    assert edited.process.returncode == 1 and place.living() == []
    assert edited.verdicts()["gate.frozen"] == "ERROR"
    assert "GATE_FAILED: gate.frozen: rank 0 (host-1): frozen files of vllm" in edited.text
    assert "vllm/engine.txt" in edited.text


def test_one_byte_of_the_weights_answers_otherwise(place):
    assert freeze_now(place).returncode == 0
    model = place.folder / "model"
    shutil.copytree(BUNDLE / "model", model)
    (model / SHARD).write_bytes((model / SHARD).read_bytes().replace(b"part 2", b"part 3", 1))
    place.models = (model, model)
    session = place.run("-k", "launch or gate")
    assert session.process.returncode == 1 and session.verdicts()["gate.behaviour"] == "ERROR"
    assert "behaviour of the model" in session.text and "allowed" in session.text
    apart = dspark(place, "behaviour", str(place.folder / "recipe" / "rehearsal.freeze.json"), str(session.folder))
    assert apart.returncode == 1 and apart.stdout.startswith("another engine")


def test_a_server_that_refuses_log_probabilities_is_not_observable(place):
    place.env = ({"REHEARSAL_FAULT": "no_logprobs"}, {})
    done = freeze_now(place)
    assert done.returncode == 0 and "not observable" in done.stderr, done.stderr
    session = place.run("-k", "launch or gate")
    assert session.process.returncode == 0, session.text[-2000:]
    assert (session.verdicts()["gate.frozen"], session.verdicts()["gate.behaviour"]) == ("PASS", "NOT_IMPLEMENTED")


def test_a_server_that_refuses_them_later_is_not_the_frozen_one(place):
    assert freeze_now(place).returncode == 0
    place.env = ({"REHEARSAL_FAULT": "no_logprobs"}, {})
    session = place.run("-k", "launch or gate")
    assert session.verdicts()["gate.behaviour"] == "ERROR" and session.process.returncode == 1


def test_nothing_to_freeze_is_said(place):
    done = dspark(place, "freeze", "--cluster", str(place.cluster()), "--out", str(place.out))
    assert done.returncode == 1 and "not there, expected a running rank" in done.stderr
    assert not list(Path(place.folder / "recipe").glob("*.freeze.json"))
