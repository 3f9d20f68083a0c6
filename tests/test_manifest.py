"""The published runtime manifest: what it says is compared with what is there, and its profiles are no settings."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import test_gate

from pytest_dspark.comparison import Sheet, hold
from pytest_dspark.manifest import PACKAGES, compare, parse, patched_files

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT.parent / "shared" / "data" / "runtime-manifest.vllm-sm121.3.json"
SMALL = {
    "schema_version": 3,
    "model_revision": "9e165c30e2704aec5d9d593cce3eebd58bbef1cb",
    "integrated_vllm_commit": "fbad93432ebf60c8345397b3032fe03bf5d239cc",
    "vllm_version": "0.26.0+dspark.sm121.3",
    "torch_version": "2.11.0+cu130",
    "kv_cache_dtype": "nvfp4_ds_mla",
    "moe_backend": "flashinfer_b12x",
    "flashinfer_local_patch": {"patched_file_sha256": {"flashinfer/mla/x.py": "ab" * 32}},
    "long_context_profile": {"gpu_memory_utilization": 0.835},
}


@pytest.fixture
def made():
    recipe = test_gate.load_recipe(ROOT / "recipe" / "dspark-sm121.toml")
    profile = test_gate.load_profile(ROOT / "profiles" / "dspark-r0b0tlab-1m.env")
    return test_gate.plan(
        profile, recipe, test_gate.load_cluster(ROOT / "docs" / "cluster.example.toml"), mark="long1m"
    )


def rank_of(made, text, **inside):
    rank = dataclasses.replace(test_gate.good_rank(made, 0), manifest=text)
    return test_gate.inside(rank, extra={"flashinfer/mla/x.py": "ab" * 32}, **inside)


def broken(made, rank):
    sheet = Sheet()
    compare(made, [rank], sheet)
    return [c.what.removeprefix("runtime manifest ") for c in sheet.comparisons if not hold(c.as_json())], sheet


def test_what_it_says_and_what_is_there(made):
    wrong, sheet = broken(made, rank_of(made, json.dumps(SMALL)))
    assert wrong == [] and len(sheet.comparisons) == 9
    assert not any("utilization" in c.what for c in sheet.comparisons), "its profiles are no settings"


@pytest.mark.parametrize(
    "key",
    ["schema_version", "model_revision", "integrated_vllm_commit", "torch_version", "kv_cache_dtype", "moe_backend"],
)
def test_each_statement_that_is_not_so_is_found(made, key):
    assert broken(made, rank_of(made, json.dumps({**SMALL, key: "other"})))[0] == [key]


def test_a_patched_file_that_is_another(made):
    rank = test_gate.inside(rank_of(made, json.dumps(SMALL)), extra={"flashinfer/mla/x.py": None})
    assert broken(made, rank)[0] == ["sha256 of flashinfer/mla/x.py"]


@pytest.mark.parametrize("text", [None, "", "[]", "not json"])
def test_one_that_cannot_be_read_is_said(made, text):
    wrong, sheet = broken(made, rank_of(made, text))
    assert wrong == [] and "cannot be read" in sheet.not_observable[0]
    assert parse(text) is None and patched_files(parse(text)) == {}


@pytest.mark.skipif(not PUBLISHED.exists(), reason=f"{PUBLISHED} is not there")
def test_the_published_one_is_the_pinned_one_and_says_what_the_recipe_pins(made):
    raw = PUBLISHED.read_bytes()
    assert hashlib.sha256(raw).hexdigest() == made.recipe.pins.manifest_sha256
    data = parse(raw.decode())
    packages = {package: data[key] for key, package in PACKAGES.items() if key in data}
    rank = rank_of(made, raw.decode(), packages=packages)
    assert broken(made, test_gate.inside(rank, extra=patched_files(data)))[0] == []
    assert len(patched_files(data)) == 3
    own = made.settings.values["GPU_MEMORY_UTILIZATION"]
    assert data["long_context_profile"]["gpu_memory_utilization"] != own, (
        "it contradicts the profile: a pin, no settings"
    )
