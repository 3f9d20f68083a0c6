"""The recipe for stock vLLM against what vLLM 0.26.0 really printed as two ranks on two GPUs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from pytest_dspark.cluster import ImageFacts, RankFacts, cluster_from
from pytest_dspark.gate import Api, Rank, examine
from pytest_dspark.plan import plan
from pytest_dspark.profile import load_profile
from pytest_dspark.recipe import load_recipe

ROOT = Path(__file__).parents[1]
REAL = ROOT.parent / "shared" / "data" / "logs" / "vllm-0.26.0-h200-tp2"
needs_logs = pytest.mark.skipif(not REAL.is_dir(), reason=f"the recorded logs are not there: {REAL}")
LABELS = {"io.vllm.package.version": "0.26.0"}


def host(gpu: int) -> dict[str, object]:
    place = {"name": f"gpu-{gpu}", "process": True, "address": "127.0.0.1", "model": "/tmp/vl/model", "bundle": "/b"}
    return place | {"env": {"CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONPATH": "/tmp/site"}}


def made(profile: str = "gpu-smollm2"):
    recipe = load_recipe(ROOT / "recipe" / "vllm-process.toml")
    cluster = cluster_from({"name": "gpu", "port": 8888, "master_port": 29512, "host": [host(0), host(1)]}, source="t")
    return plan(
        load_profile(ROOT / "profiles" / f"{profile}.env"), recipe, cluster, mark="production", python="python3"
    )


def ranks(one, logs: tuple[str, str]) -> list[Rank]:
    image = ImageFacts("/b", "sha256:1", "bundle", "amd64", LABELS)
    return [
        Rank(number, spec.host, _facts(spec, number), image, text, process=True)
        for number, (spec, text) in enumerate(zip(one.specs, logs, strict=True))
    ]


def _facts(spec, number: int) -> RankFacts:
    environment = tuple(f"{key}={value}" for key, value in spec.env)
    return RankFacts(
        f"{number}:1", "sha256:1", spec.argv[0], spec.argv[1:], environment, (), {}, "no", 0, "t", name=spec.name
    )


def api(one) -> Api:
    canaries = {canary.name: {"ok": True, "answered": True} for canary in one.recipe.canaries}
    return Api([one.served_model], 8192, "0.26.0", canaries)


def recorded() -> tuple[str, str]:
    return (REAL / "rank0.log").read_text(), (REAL / "rank1.log").read_text()


def test_the_argv_is_the_one_that_was_seen_to_work():
    head, worker = made().specs
    assert head.argv[:5] == ("python3", "-m", "vllm.entrypoints.cli.main", "serve", "/tmp/vl/model")
    pairs = dict(zip(head.argv[5:-2:2], head.argv[6:-2:2], strict=True))
    assert pairs == {
        "--served-model-name": "smollm2",
        "--tensor-parallel-size": "2",
        "--max-model-len": "8192",
        "--max-num-seqs": "16",
        "--max-num-batched-tokens": "16384",
        "--gpu-memory-utilization": "0.5",
        "--kv-cache-memory-bytes": "15998753178",
        "--compilation-config": '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}',
        "--nnodes": "2",
        "--node-rank": "0",
        "--master-addr": "127.0.0.1",
        "--master-port": "29512",
    }
    assert head.argv[-2:] == ("--port", "8888")
    assert worker.argv[-1] == "--headless" and worker.argv[worker.argv.index("--node-rank") + 1] == "1"


@needs_logs
def test_the_gate_reads_mode_none_and_full_decode_only_from_real_logs():
    one = made()
    pair = ranks(one, recorded())
    assert pair[0].log.compilation["mode"] == 0
    assert pair[0].log.compilation["cudagraph_mode"] == "FULL_DECODE_ONLY"
    report = examine(one, pair, api(one))
    found = {name: str(verdict.status) for name, verdict in report.verdicts.items()}
    unseen = [found.pop(name) for name in ("mounts", "weights", "frozen", "behaviour")]
    assert set(unseen) == {"NOT_IMPLEMENTED"}, "a process, no folder read, nothing frozen"
    assert set(found.values()) == {"PASS"}, report.first_failure
    assert report.findings["compilation"].data["not_observable"] == [
        "rank 1 logs no engine configuration; its command line and markers stand for it"
    ]
    assert report.findings["markers"].data["not_observable"] == [
        "engine-config on rank 1: a headless rank of stock vLLM prints no engine configuration"
    ]
    seen = {(row["what"], row["rank"]) for row in report.findings["markers"].data["comparisons"]}
    assert seen >= {
        (f"log marker {name}", rank) for name in ("compile-off", "graph-capture", "world") for rank in (0, 1)
    }


@needs_logs
def test_rank_1_is_ready_for_the_head_by_a_line_that_it_prints_before_the_head_is_there():
    wanted = re.compile(made().recipe.launch.worker_ready)
    assert wanted.search((REAL / "rank1.log").read_text())


@needs_logs
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("line", "marker"),
    [("Inductor compilation was disabled", "compile-off"), ("Graph capturing finished", "graph-capture")],
)
def test_a_rank_without_its_line_is_refused(rank, line, marker):
    one, logs = made(), list(recorded())
    logs[rank] = "\n".join(text for text in logs[rank].splitlines() if line not in text)
    verdict = examine(one, ranks(one, tuple(logs)), api(one)).verdicts["markers"]
    assert str(verdict.status) == "ERROR" and f"rank {rank}: log marker {marker}" in verdict.message


@needs_logs
def test_an_engine_that_compiled_is_refused_by_a_profile_that_pins_none():
    """The command line says mode 0 and the engine's own line says otherwise."""
    one, (head, worker) = made(), recorded()
    compiled = head.replace("'mode': <CompilationMode.NONE: 0>", "'mode': <CompilationMode.VLLM_COMPILE: 3>")
    assert compiled != head
    verdict = examine(one, ranks(one, (compiled, worker)), api(one)).verdicts["compilation"]
    assert str(verdict.status) == "ERROR" and "compilation configuration that the engine logged" in verdict.message


@needs_logs
def test_a_compiled_engine_meets_both_profiles():
    """An engine of mode 3 is good for the profile that asks for it, and refused by the one that pins 0."""
    asked, pinned, logs = made("gpu-smollm2-compiled"), made(), recorded()
    head, worker = (
        "\n".join(text for text in log.splitlines() if "Inductor compilation was disabled" not in text) for log in logs
    )
    head = head.replace("'mode': <CompilationMode.NONE: 0>", "'mode': <CompilationMode.VLLM_COMPILE: 3>")
    pair = ranks(asked, (head, worker))
    good = examine(asked, pair, api(asked))
    assert good.first_failure is None
    bad = examine(pinned, pair, api(pinned)).verdicts
    assert [str(bad[name].status) for name in ("argv", "compilation", "markers")] == ["ERROR"] * 3


@needs_logs
def test_another_version_is_refused():
    one = made()
    other = dataclasses.replace(api(one), version="0.26.1")
    assert str(examine(one, ranks(one, recorded()), other).verdicts["pins"].status) == "ERROR"
