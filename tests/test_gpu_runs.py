"""The parts of the GPU runs that need no GPU: the cluster file, the comparison's judgement, the script's own refusals."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
from pathlib import Path

import pytest

from pytest_dspark.cluster import load_cluster
from pytest_dspark.recipe import load_recipe

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"


def module(name: str):
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", FOLDER / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


compare, machine = module("compare"), module("machine")


def test_each_rank_gets_its_gpu_and_what_the_machine_sets_for_its_cuda_software(tmp_path):
    environ = {
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
        "CUDA_VISIBLE_DEVICES": "7",
        "CC": "gcc",
        "OUT": "x",
    }
    path = tmp_path / "cluster.toml"
    path.write_text(machine.cluster_text(Path("/site"), Path("/model"), Path("/bundle"), environ))
    cluster = load_cluster(path)
    assert [(host.name, host.process, host.model, host.bundle) for host in cluster.hosts] == [
        ("gpu-0", True, "/model", "/bundle"),
        ("gpu-1", True, "/model", "/bundle"),
    ]
    for number, host in enumerate(cluster.hosts):
        env = dict(host.env)
        assert (env["CUDA_VISIBLE_DEVICES"], env["PYTHONPATH"]) == (str(number), "/site")
        assert (env["NCCL_NVLS_ENABLE"], env["NVSHMEM_DISABLE_NVLS"]) == ("0", "1")
        assert not {"CC", "OUT"} & env.keys()


def test_the_inventory_is_every_file_and_the_version_is_of_this_folder_alone(tmp_path):
    (tmp_path / "vllm" / "__pycache__").mkdir(parents=True)
    (tmp_path / "vllm" / "a.py").write_text("1")
    (tmp_path / "vllm" / "__pycache__" / "a.pyc").write_text("2")
    assert set(machine.inventory(tmp_path)) == {"vllm/a.py"}
    with pytest.raises(SystemExit, match="expected one installed vllm"):
        machine.version(tmp_path)


def test_the_copied_recipe_streams_long_enough_to_kill_a_rank_in(tmp_path):
    machine.copy_recipes(tmp_path / "recipe")
    recipe = load_recipe(tmp_path / "recipe" / "vllm-process.toml")
    assert recipe.checks["correctness"]["stream_tokens"] == 6000
    assert "stream_tokens = 6000" in (tmp_path / "recipe" / "vllm.toml").read_text()


def pair(level, number, ratio, **more):
    side = {"requests": 12, "prompt_tokens": 480, "completion_tokens": 1536}
    peer = side | {"output_rate": 400.0, "tpot_ms": 2.0, "ttft_ms": 30.0}
    mine = side | {"output_rate": 400.0 * ratio, "tpot_ms": 2.0 / ratio, "ttft_ms": 28.0}
    return {"round": number, "level": level, "order": ["ours", "peer"], "ours": mine | more, "peer": peer}


def rounds(ratios, **more):
    return [pair(level, number, ratio, **more) for number, ratio in enumerate(ratios) for level in (1, 4, 16)]


def test_the_interval_is_students():
    found = compare.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776 * math.sqrt(2.5) / math.sqrt(5)
    assert found == {"mean": 3.0, "low": pytest.approx(3 - half), "high": pytest.approx(3 + half)}
    assert compare.interval([1.0]) is None


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.5, 1.0, 1.01, 0.99, 1.0, 1.005], "AGREE"),  # the first round is warm-up
        ([1.0, 1.011, 1.012, 1.011, 1.012, 1.011], "AGREE"),  # a difference, within 2 %
        ([1.0, 1.031, 1.032, 1.031, 1.032, 1.031], "DIFFER"),
        ([1.0, 0.8, 1.3, 0.9, 1.2, 1.0], "AGREE"),  # noisy, and 0 is in the interval
        ([1.0, 1.0, 1.0, 1.0, 1.0], "DIFFER"),  # four pairs are too few
        ([1.0], "DIFFER"),
    ],
)
def test_the_verdict(ratios, verdict):
    assert compare.judged(rounds(ratios))["verdict"] == verdict


def test_unlike_pairs_and_missing_levels_are_no_agreement():
    good = rounds([1.0] * 7)
    assert compare.judged(good)["verdict"] == "AGREE"
    assert compare.judged(rounds([1.0] * 7, prompt_tokens=481))["verdict"] == "DIFFER"
    assert compare.judged(rounds([1.0] * 7, completion_tokens=1535))["verdict"] == "DIFFER"
    assert compare.judged([one for one in good if one["level"] != 16])["verdict"] == "DIFFER"
    assert compare.judged([])["verdict"] == "DIFFER"
    compare.table(compare.judged(good))


def test_prompts_are_unique_from_the_first_token_and_equally_long():
    made = compare.prompts(50)
    assert len({text[:12] for text in made}) == 50 and len({len(text) for text in made}) == 1
    json.dumps(made)


def test_an_unknown_part_is_refused(tmp_path):
    environ = {"PATH": "/usr/bin:/bin", "OUT": str(tmp_path / "out"), "DSPARK_GPU": str(tmp_path / "place")}
    done = subprocess.run(
        ["bash", str(FOLDER / "run.sh"), "all"], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "unknown part all" in done.stdout
