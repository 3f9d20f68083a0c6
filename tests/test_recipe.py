"""Recipes are checked when they are read."""

from pathlib import Path

import pytest

from pytest_dspark.errors import ConfigError
from pytest_dspark.recipe import find_recipe, load_recipe

RECIPES = Path(__file__).parents[1] / "recipe"
BASE = """
schema = 1
name = "small"
about = "a recipe for tests"
[serve]
container = "c"
image = "i"
port = 1
master_port = 2
served_model = "m"
argv = [["vllm", "serve", "{model}"], ["--n", "{N}"]]
[knobs.N]
type = "int"
"""


def write(tmp_path, text, name="small.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["dspark-sm121", "vllm", "sglang", "lab-smollm2", "lab-emulated", "rehearsal"])
def test_shipped_recipes_load_and_require_something(name):
    recipe = load_recipe(RECIPES / f"{name}.toml")
    assert recipe.canaries and recipe.markers
    assert all(checks for _, checks in recipe.acceptance) and {mark for mark, _ in recipe.acceptance} == {
        mark for mark, _ in recipe.profiles
    }


def test_pins_of_the_frozen_image():
    pins = load_recipe(RECIPES / "dspark-sm121.toml").pins
    assert pins.image_id == "sha256:2dfe24a303743722046c55bf2cf3ef9c9e6a40a008f73be16f9aa5c2ca38cf9b"
    assert pins.manifest_sha256 == "f6777b31e8c8977361d629ca99c37a199d3b52b9abc134f1de624eb202f083a9"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BASE.replace("schema = 1", "schema = 2"), "schema must be 1"),
        (BASE + "[launch]\nready = 5\n", "unknown key 'ready'"),
        (BASE + "[surprise]\n", "unknown key 'surprise'"),
        (BASE + "[watch]\ngone_s = 0.1\n", "watch: gone_s must be seconds from 0.5 to 3600, found 0.1"),
        (BASE + "[watch]\nspin_w = -1\n", "watch: spin_w must be watts from 0 to 2000, found -1"),
        (BASE + '[watch]\nspin_w = "25"\n', "watch: spin_w must be watts from 0 to 2000, found '25'"),
        (BASE.replace("{N}", "{M}"), "placeholder {M}"),
        (BASE + '[knobs.UNUSED]\ntype = "str"\n', "knob UNUSED is used by no argv"),
        (BASE.replace('type = "int"', 'type = "number"'), "type must be one of"),
        (
            BASE + '[[limit]]\nwhen = { X = { min = 1 } }\neffect = "refuse"\nreason = "r"\n',
            "limit on X, which is no knob",
        ),
        (BASE + '[[limit]]\nwhen = { N = { least = 1 } }\neffect = "refuse"\nreason = "r"\n', "unknown key 'least'"),
        (BASE + '[[marker]]\nname = "a"\nkind = "required"\npattern = "("\nmatch = ["("]\n', "pattern '('"),
        (BASE + '[[marker]]\nname = "a"\nkind = "required"\npattern = "x"\nmatch = ["y"]\n', "must match 'y'"),
        (
            BASE + '[[marker]]\nname = "a"\nkind = "required"\npattern = "x"\nmatch = ["x"]\nno_match = ["xx"]\n',
            "must not match 'xx'",
        ),
        (BASE + '[[marker]]\nname = "a"\nkind = "required"\npattern = "x"\n', "at least one real line"),
        (
            BASE + '[[marker]]\nname = "a"\nkind = "wanted"\npattern = "x"\nmatch = ["x"]\n',
            "kind must be required or forbidden",
        ),
        (BASE + '[[canary]]\nname = "a"\nkind = "exact"\nprompt = "?"\n', "proves nothing"),
        (BASE + "[labels]\na = 1\n", "labels.a must be a text"),
        ("schema = [", "small.toml"),
        (BASE.replace("[serve]", 'acceptance = "launch"\n[serve]'), "acceptance must be a table"),
        (BASE + '[acceptance]\nproduction = "launch"\n', "must be a list of check ids"),
        (BASE + '[launch]\npoll_s = "0.1"\n', "poll_s must be float"),
        (BASE + '[[marker]]\nname = "a"\nkind = "required"\npattern = ".*"\nmatch = ["x"]\n', "matches an empty line"),
        (BASE + '[[canary]]\nname = "a"\nkind = "tool"\nprompt = "?"\ntool = "t"\n', "proves nothing"),
        (BASE + '[[canary]]\nname = "a"\nkind = "number"\nprompt = "?"\nexpect = "one"\n', "must be a number"),
    ],
)
def test_refusals_name_file_and_key(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, text))
    assert words in caught.value.message and "small.toml" in caught.value.message


def test_unknown_recipe_lists_the_known_ones():
    with pytest.raises(ConfigError, match="dspark-sm121, lab-emulated, lab-smollm2, rehearsal, sglang, vllm"):
        find_recipe("nothing", [RECIPES])


def test_extends_merges_tables_and_replaces_the_rest(tmp_path):
    write(tmp_path, BASE)
    above = write(tmp_path, 'extends = "small"\nname = "above"\n[serve]\nport = 7\n', "above.toml")
    recipe = load_recipe(above)
    assert (recipe.name, recipe.serve.port, recipe.serve.master_port) == ("above", 7, 2)
    assert recipe.sha256 != load_recipe(tmp_path / "small.toml").sha256


def test_overlay_adds_pins_and_never_changes_one(tmp_path):
    path = write(tmp_path, BASE + '[pins]\npackage = "1.0"\n')
    plain = load_recipe(path)
    write(tmp_path, '[pins]\nimage_id = "sha256:ab"\n[labels]\na = "b"\n', "small.overlay.toml")
    recipe = load_recipe(path)
    assert (recipe.pins.image_id, recipe.pins.package, recipe.labels) == ("sha256:ab", "1.0", (("a", "b"),))
    assert recipe.overlaid() and recipe.sha256 != plain.sha256
    write(tmp_path, '[pins]\npackage = "2.0"\n', "small.overlay.toml")
    with pytest.raises(ConfigError, match=r"pins.package is '2.0', the recipe pins '1.0'"):
        load_recipe(path)
    write(tmp_path, "[serve]\nport = 9\n", "small.overlay.toml")
    with pytest.raises(ConfigError, match="an overlay may hold"):
        load_recipe(path)
