"""The gate's comparisons, pure: what holds, what does not, and what is only not observable."""

import dataclasses
import json
from pathlib import Path

import pytest

from pytest_dspark.cluster import HostFacts, ImageFacts, RankFacts, load_cluster
from pytest_dspark.gate import Api, Rank, as_file, examine, hold, judge_tool, serve_argv, without_rank
from pytest_dspark.hosts.options import create_body
from pytest_dspark.inventory import Inventory
from pytest_dspark.launch import labelled
from pytest_dspark.plan import plan
from pytest_dspark.profile import load_profile
from pytest_dspark.recipe import load_recipe
from pytest_dspark.weights import File, Model

ROOT = Path(__file__).parents[1]
IMAGE = "sha256:2dfe24a303743722046c55bf2cf3ef9c9e6a40a008f73be16f9aa5c2ca38cf9b"
RUN = "20260101T000000Z-0000abcd"
SHARDS = tuple(File(f"model-{n:05}-of-00048.safetensors", 1000 + n, "1.5", n) for n in range(1, 49))
MANIFEST = "f6777b31e8c8977361d629ca99c37a199d3b52b9abc134f1de624eb202f083a9"


@pytest.fixture(scope="module")
def made():
    recipe = load_recipe(ROOT / "recipe" / "dspark-sm121.toml")
    profile = load_profile(ROOT / "profiles" / "dspark-r0b0tlab-production.env")
    return plan(profile, recipe, load_cluster(ROOT / "docs" / "cluster.example.toml"), mark="production")


def log_of(made, rank):
    """One line of each required marker's own examples, with an engine line on the head."""
    wanted = [
        marker.match[0]
        for marker in made.recipe.markers
        if marker.kind == "required" and not marker.name.endswith("breakable")
    ]
    engine = (
        "(EngineCore pid=1) INFO 08-22 06:49:00 [core.py:116] Initializing a V1 LLM engine (v0.26.0) with config: model='/model', "
        "compilation_config={'mode': <CompilationMode.NONE: 0>, 'cudagraph_mode': <CUDAGraphMode.FULL_DECODE_ONLY: (2, 0)>, "
        "'cudagraph_implementation': 'regular', 'cudagraph_strict': True}"
    )
    return "\n".join([*([engine] if rank == 0 else []), *wanted]) + "\n"


def good_rank(made, number):
    spec = made.specs[number]
    facts = RankFacts(
        rank_id=f"id{number}",
        image_id=IMAGE,
        path=spec.argv[0],
        args=spec.argv[1:],
        environment=tuple(f"{key}={value}" for key, value in spec.env),
        mounts=tuple(
            {"Type": "bind", "Source": m.source, "Destination": m.target, "RW": not m.read_only} for m in spec.mounts
        ),
        labels={},
        restart_policy="no",
        restart_count=0,
        started_at="t",
        name=spec.name,
        image_reference=spec.image,
        network_mode="host",
        ipc_mode="host",
        options=create_body(spec.host, spec)["HostConfig"],
    )
    image = ImageFacts(
        "i", IMAGE, "config", "arm64", dict(made.recipe.labels), tags=(spec.image,), repo_digests=("r@sha256:11",)
    )
    marks = {**image.labels, **dict(labelled(spec, RUN, made.fingerprint).labels)}
    facts = dataclasses.replace(facts, labels=marks)
    machine = HostFacts(
        "docker", spec.host, "6.17.0", "arm64", "29.1", "1.52", "overlay2", "unix:///x", "/var/lib/docker"
    )
    return Rank(
        number,
        spec.host,
        facts,
        image,
        log_of(made, number),
        MANIFEST,
        machine=machine,
        model_revision=made.recipe.pins.model_revision,
        run_id=RUN,
        manifest=json.dumps(
            {
                "schema_version": 3,
                "vllm_version": made.recipe.pins.package,
                "model_revision": made.recipe.pins.model_revision,
                "integrated_vllm_commit": made.recipe.pins.integrated_vllm,
            }
        ),
        inventory=Inventory(
            python="3.12.3",
            packages={"vllm": made.recipe.pins.package, "torch": "2.11.0+cu130"},
            mapped={"/x/nvidia/nccl/lib/libnccl.so.2": "aa" * 32},
            files={"/etc/nccl.conf": "bb" * 32},
            hashes={"vllm": {"vllm/engine.py": "dd" * 32}},
            kernel="6.17.0",
            driver="580.126",
        ),
        model=Model(
            "/srv/models/m",
            {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_hidden_layers": 43},
            SHARDS,
            tuple(shard.name for shard in SHARDS),
            sum(shard.size for shard in SHARDS),
        ),
    )


@pytest.fixture
def ranks(made):
    return [good_rank(made, 0), good_rank(made, 1)]


@pytest.fixture
def api(made):
    answers = {
        c.name: {"ok": True, "answered": True, "text": "x", "finish_reason": "stop", "message": ""}
        for c in made.recipe.canaries
    }
    return Api(["deepseek-v4-flash-dspark"], 327680, "0.26.0+dspark.sm121.3", answers)


def verdicts(made, ranks, api):
    return {name: str(verdict.status) for name, verdict in examine(made, ranks, api).verdicts.items()}


def test_a_good_pair_passes_everything(made, ranks, api):
    report = examine(made, ranks, api)
    found = verdicts(made, ranks, api)
    assert (found.pop("frozen"), found.pop("behaviour")) == ("NOT_IMPLEMENTED", "NOT_IMPLEMENTED"), "nothing is frozen"
    assert set(found.values()) == {"PASS"}, report.first_failure
    file = as_file(made, ranks, api, report)
    assert (file["schema_version"], file["status"], file["errors"]) == (3, "PASS", [])
    head = file["evidence"]["runtime_identity"]["head"]
    assert head["optimization_level"] == "2"
    assert head["dsv4_multi_stream_pid1_entries"] == ["VLLM_DSV4_ENABLE_MULTI_STREAM=0"]
    assert head["runtime_audit_manifest_read_only"] is True


def facts(rank, **changes):
    return dataclasses.replace(rank, facts=dataclasses.replace(rank.facts, **changes))


def image(rank, **changes):
    return dataclasses.replace(rank, image=dataclasses.replace(rank.image, **changes))


def inside(rank, **changes):
    return dataclasses.replace(rank, inventory=dataclasses.replace(rank.inventory, **changes))


def model(rank, **changes):
    return dataclasses.replace(rank, model=dataclasses.replace(rank.model, **changes))


def machine(rank, **changes):
    return dataclasses.replace(rank, machine=dataclasses.replace(rank.machine, **changes))


def swapped(argv, old, new):
    return tuple(new if token == old else token for token in argv)


def without_env(rank, key):
    return tuple(entry for entry in rank.facts.environment if not entry.startswith(f"{key}="))


MUTATIONS = {
    "another image": (lambda r: image(facts(r, image_id="sha256:81aa"), image_id="sha256:81aa"), "image"),
    "another kind of id": (lambda r: image(r, id_kind="manifest"), "image"),
    "architecture": (lambda r: image(r, architecture="amd64"), "pins"),
    "a tag": (lambda r: image(r, tags=("other:1",)), "pins"),
    "made from another name": (lambda r: facts(r, image_reference="other:1"), "pins"),
    "source revision": (
        lambda r: image(r, labels={**r.image.labels, "org.opencontainers.image.revision": "0" * 40}),
        "pins",
    ),
    "integrated commit": (
        lambda r: image(r, labels={k: v for k, v in r.image.labels.items() if "integrated" not in k}),
        "pins",
    ),
    "model revision": (lambda r: dataclasses.replace(r, model_revision=None), "pins"),
    "an option": (lambda r: facts(r, options={**r.facts.options, "IpcMode": "private"}), "container"),
    "a capability": (lambda r: facts(r, options={**r.facts.options, "CapAdd": []}), "container"),
    "another launch": (lambda r: facts(r, labels={**r.facts.labels, "io.dspark.fingerprint": "0"}), "container"),
    "another build of the same library": (
        lambda r: inside(r, mapped={"/x/nvidia/nccl/lib/libnccl.so.2": "cc" * 32}),
        "symmetry",
    ),
    "a package": (lambda r: inside(r, packages={**r.inventory.packages, "torch": "2.11.1"}), "symmetry"),
    "a package of one rank alone": (lambda r: inside(r, packages={**r.inventory.packages, "extra": "1"}), "symmetry"),
    "the engine's package": (lambda r: inside(r, packages={**r.inventory.packages, "vllm": "0.26.0"}), "pins"),
    "nccl.conf": (lambda r: inside(r, files={"/etc/nccl.conf": None}), "symmetry"),
    "GPU driver": (lambda r: inside(r, driver="580.159"), "symmetry"),
    "no inventory": (lambda r: dataclasses.replace(r, inventory=Inventory(missing="no python3")), "symmetry"),
    "another architecture of the host": (lambda r: machine(r, architecture="amd64"), "symmetry"),
    "a key of config.json": (lambda r: model(r, config={**r.model.config, "model_type": "llama"}), "weights"),
    "an unpinned key of config.json": (
        lambda r: model(r, config={**r.model.config, "num_hidden_layers": 42}),
        "weights",
    ),
    "a shard fewer": (lambda r: model(r, shards=SHARDS[1:]), "weights"),
    "a shard of another size": (
        lambda r: model(r, shards=(dataclasses.replace(SHARDS[0], size=9), *SHARDS[1:])),
        "weights",
    ),
    "an empty shard": (lambda r: model(r, shards=(dataclasses.replace(SHARDS[0], size=0), *SHARDS[1:])), "weights"),
    "another byte": (lambda r: model(r, sums={SHARDS[0].name: "0" * 64}), "weights"),
    "no folder": (lambda r: model(r, problem="cannot be read"), "weights"),
    "another program": (lambda r: facts(r, path="/tmp/vllm"), "argv"),
    "another source": (
        lambda r: facts(r, mounts=tuple({**m, "Source": "/tmp"} for m in r.facts.mounts)),
        "mounts",
    ),
    "runs another image than looked at": (lambda r: facts(r, image_id="sha256:81aa"), "image"),
    "a label": (lambda r: image(r, labels={**r.image.labels, "io.r0b0tlab.speculative.tokens": "5"}), "labels"),
    "a flag": (lambda r: facts(r, args=swapped(r.facts.args, "327680", "131072")), "argv"),
    "a doubled flag": (lambda r: facts(r, args=(*r.facts.args, "--max-num-seqs", "16")), "argv"),
    "no command line": (lambda r: facts(r, path="sleep", args=("9",)), "argv"),
    "an environment value": (
        lambda r: facts(r, environment=(*without_env(r, "NCCL_NET"), "NCCL_NET=Socket")),
        "environment",
    ),
    "an environment key twice": (lambda r: facts(r, environment=(*r.facts.environment, "NCCL_NET=IB")), "environment"),
    "a forbidden variable": (
        lambda r: facts(r, environment=(*r.facts.environment, "VLLM_USE_BREAKABLE_CUDAGRAPH=0")),
        "environment",
    ),
    "an undeclared variable": (lambda r: facts(r, environment=(*r.facts.environment, "OMP_NUM_THREADS=1")), "symmetry"),
    "a restart": (lambda r: facts(r, restart_count=1), "restarts"),
    "a restart policy": (lambda r: facts(r, restart_policy="unless-stopped"), "restarts"),
    "a writable manifest": (
        lambda r: facts(r, mounts=tuple({**m, "RW": True} for m in r.facts.mounts)),
        "mounts",
    ),
    "a mount twice": (lambda r: facts(r, mounts=(*r.facts.mounts, r.facts.mounts[-1])), "mounts"),
    "another manifest": (lambda r: dataclasses.replace(r, manifest_sha256="0" * 64), "pins"),
    "an unreadable manifest": (lambda r: dataclasses.replace(r, manifest_sha256=None), "pins"),
    "not strict": (
        lambda r: dataclasses.replace(r, log_text=r.log_text.replace("strict=true", "strict=false")),
        "markers",
    ),
    "no replay": (
        lambda r: dataclasses.replace(r, log_text="\n".join(x for x in r.log_text.splitlines() if "REPLAY" not in x)),
        "markers",
    ),
    "an empty log": (lambda r: dataclasses.replace(r, log_text=""), "markers"),
    "marlin": (
        lambda r: dataclasses.replace(r, log_text=r.log_text + "Using 'MARLIN' Mxfp4 MoE backend\n"),
        "forbidden",
    ),
    "an unknown variable": (
        lambda r: dataclasses.replace(r, log_text=r.log_text + "Unknown vLLM environment variable detected: VLLM_X\n"),
        "forbidden",
    ),
    "compilation on the command line": (
        lambda r: facts(r, args=tuple(t.replace('"mode":0', '"mode":3') for t in r.facts.args)),
        "compilation",
    ),
}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", MUTATIONS)
def test_one_mutation_on_one_rank_is_seen_by_its_requirement(made, ranks, api, name, number):
    change, requirement = MUTATIONS[name]
    ranks[number] = change(ranks[number])
    assert verdicts(made, ranks, api)[requirement] == "ERROR"
    assert as_file(made, ranks, api, examine(made, ranks, api))["status"] == "FAIL"


@pytest.mark.parametrize(("severity", "verdict"), [("record", "PASS"), ("error", "ERROR")])
def test_a_difference_is_an_error_or_is_recorded_as_the_recipe_says(made, ranks, api, severity, verdict):
    ranks[1] = machine(inside(ranks[1], kernel="6.11.0"), kernel="6.11.0")
    asymmetry = dataclasses.replace(made.recipe.asymmetry, kernel=severity)
    loose = dataclasses.replace(made, recipe=dataclasses.replace(made.recipe, asymmetry=asymmetry))
    report = examine(loose, ranks, api)
    assert str(report.verdicts["symmetry"].status) == verdict
    assert "6.11.0" in report.verdicts["symmetry"].message, "a recorded difference is said too"


@pytest.mark.parametrize(
    ("change", "requirement", "status"),
    [
        ({"model_ids": ["other"]}, "model", "ERROR"),
        ({"model_ids": ["deepseek-v4-flash-dspark", "other"]}, "model", "ERROR"),
        ({"max_model_len": None}, "model", "ERROR"),
        ({"max_model_len": 131072}, "model", "ERROR"),
        ({"version": "0.26.0"}, "pins", "ERROR"),
        ({"canaries": {}}, "canaries", "ERROR"),
    ],
)
def test_what_the_api_says_is_compared(made, ranks, api, change, requirement, status):
    assert verdicts(made, ranks, dataclasses.replace(api, **change))[requirement] == status


def test_a_wrong_canary_is_the_model_and_an_unanswered_one_is_not(made, ranks, api):
    name = made.recipe.canaries[0].name
    wrong = {
        **api.canaries,
        name: {"ok": False, "answered": True, "text": "132", "finish_reason": "stop", "message": "it said 132"},
    }
    report = examine(made, ranks, dataclasses.replace(api, canaries=wrong))
    assert (str(report.verdicts["canaries"].status), "it said 132" in report.verdicts["canaries"].message) == (
        "FAIL",
        True,
    )
    dead = {
        **api.canaries,
        name: {"ok": False, "answered": False, "text": "", "finish_reason": None, "message": "SERVER_LOST"},
    }
    assert verdicts(made, ranks, dataclasses.replace(api, canaries=dead))["canaries"] == "ERROR"


def test_the_engines_own_configuration_beats_the_command_line(made, ranks, api):
    text = ranks[0].log_text.replace("<CompilationMode.NONE: 0>", "<CompilationMode.VLLM_COMPILE: 3>")
    ranks[0] = dataclasses.replace(ranks[0], log_text=text)
    assert verdicts(made, ranks, api)["compilation"] == "ERROR"


def test_no_engine_line_on_any_rank_is_an_error(made, ranks, api):
    lines = [line for line in ranks[0].log_text.splitlines() if "Initializing" not in line]
    ranks[0] = dataclasses.replace(ranks[0], log_text="\n".join(lines))
    assert verdicts(made, ranks, api)["compilation"] == "ERROR"


def test_nccl_without_info_is_not_observable_and_said(made, ranks, api):
    """The fabric marker cannot be printed; that is said, and the environment requirement fails for the change itself."""
    for number, rank in enumerate(ranks):
        env = (*without_env(rank, "NCCL_DEBUG"), "NCCL_DEBUG=WARN")
        lines = [line for line in rank.log_text.splitlines() if "NCCL INFO" not in line]
        ranks[number] = dataclasses.replace(facts(rank, environment=env), log_text="\n".join(lines))
    report = examine(made, ranks, api)
    assert any("fabric on rank 1" in reason for reason in report.findings["markers"].data["not_observable"])
    assert str(report.verdicts["environment"].status) == "ERROR"


def test_requirements_without_any_comparison_are_never_a_pass(made, ranks, api):
    processes = [dataclasses.replace(rank, process=True) for rank in ranks]
    assert verdicts(made, processes, api)["mounts"] == "NOT_IMPLEMENTED"


def test_relations():
    def row(relation, expected, found):
        return {"relation": relation, "expected": expected, "found": found}

    assert not hold(row("equal", None, None)), "nothing expected is never equal"
    assert not hold(row("approximately", 1, 1))
    assert hold(row("superset", {"a": 1}, {"a": 1, "b": 2}))
    assert not hold(row("superset", {"a": 1}, {"b": 2}))
    assert not hold(row("superset", {"a": 1}, None))


def test_a_stored_gate_is_judged_again_from_json(made, ranks, api):
    report = examine(made, ranks, api)
    stored = json.loads(json.dumps({name: dict(f.data) for name, f in report.findings.items()}))
    assert all(all(hold(c) for c in data["comparisons"]) for data in stored.values())


SCRIPT = "set -eu\nexec vllm serve /model \\\n  --port 8888 \\\n  --speculative-config '{\"a\":1}' --headless\n"


@pytest.mark.parametrize(
    ("path", "args"),
    [
        ("/usr/local/bin/dspark-entrypoint.sh", ["bash", "-lc", SCRIPT]),
        ("bash", ["-lc", SCRIPT]),
        ("vllm", ["serve", "/model", "--port", "8888", "--speculative-config", '{"a":1}', "--headless"]),
        (
            "bash",
            [
                "-lc",
                'exec vllm serve "$@"',
                "bash",
                "/model",
                "--port",
                "8888",
                "--speculative-config",
                '{"a":1}',
                "--headless",
            ],
        ),
    ],
)
def test_both_forms_of_a_command_line(path, args):
    found = serve_argv(path, args)
    assert found == ("serve", "/model", "--port", "8888", "--speculative-config", '{"a":1}', "--headless")
    assert without_rank(found) == ("serve", "/model", "--speculative-config", '{"a":1}')


def test_no_command_line_is_empty():
    assert serve_argv("bash", ["-lc", "echo 'unclosed"]) == ()
    assert serve_argv("sleep", ["9"]) == ()


@pytest.mark.parametrize(
    ("calls", "wanted", "ok"),
    [
        ([("w", '{"city": "Paris"}')], {"city": "Paris"}, True),
        ([("w", '{"city": "Paris", "unit": "C"}')], {"city": "Paris"}, True),
        ([("w", '{"city": "Par')], {"city": "Paris"}, False),
        ([("w", '"Paris"')], {"city": "Paris"}, False),
        ([("w", '"Paris"')], "Paris", True),
        ([("w", '{"city": "Paris"}')] * 2, {"city": "Paris"}, False),
        ([("x", '{"city": "Paris"}')], {"city": "Paris"}, False),
        ([], {"city": "Paris"}, False),
    ],
)
def test_tool_calls(calls, wanted, ok):
    assert judge_tool(calls, "w", wanted)[0] is ok
