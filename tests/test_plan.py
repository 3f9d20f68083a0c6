"""The plan of the three seed profiles, token by token, and what is refused before anything is planned."""

import dataclasses
import json
from pathlib import Path

import pytest

from pytest_dspark.cluster import cluster_from, load_cluster
from pytest_dspark.errors import ConfigError
from pytest_dspark.plan import as_json, as_shell, plan, settle
from pytest_dspark.profile import load_profile
from pytest_dspark.recipe import load_recipe

ROOT = Path(__file__).parents[1]
COMPILATION = (
    '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_implementation":"regular","cudagraph_strict":true}'
)
REASONING = '{"reasoning_parser":"deepseek_v4","reasoning_start_str":"<think>","reasoning_end_str":"</think>"}'


@pytest.fixture
def recipe():
    return load_recipe(ROOT / "recipe" / "dspark-sm121.toml")


@pytest.fixture
def cluster():
    return load_cluster(ROOT / "docs" / "cluster.example.toml")


def profile(name):
    return load_profile(ROOT / "profiles" / f"{name}.env")


def edited(tmp_path, name, *changes):
    """A copy of a profile with lines replaced (`KEY=value`), added, or removed (`-KEY`)."""
    lines = (ROOT / "profiles" / f"{name}.env").read_text().splitlines()
    for change in changes:
        key = change.lstrip("-").partition("=")[0]
        lines = [line for line in lines if not line.startswith(f"{key}=")]
        if not change.startswith("-"):
            lines.append(change)
    path = tmp_path / "edited.env"
    path.write_text("\n".join(lines) + "\n")
    return load_profile(path)


def expected_argv(rank, *, length, seqs, batched, share, pinned, compilation=COMPILATION):
    """Written out by hand from the field facts, flag by flag."""
    return [
        *(
            "vllm",
            "serve",
            "/model",
            "--served-model-name",
            "deepseek-v4-flash-dspark",
            "--host",
            "0.0.0.0",
            "--port",
            "8888",
        ),
        *("--trust-remote-code", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "1"),
        *("--kv-cache-dtype", "nvfp4_ds_mla", "--block-size", "256", "--max-model-len", length, "--max-num-seqs", seqs),
        *("--max-num-batched-tokens", batched, "--gpu-memory-utilization", share),
        *(("--kv-cache-memory-bytes", pinned) if pinned else ()),
        *("--enable-prefix-caching", "--speculative-config", '{"method":"dspark","num_speculative_tokens":6}'),
        *(
            "--tokenizer-mode",
            "deepseek_v4",
            "--distributed-executor-backend",
            "mp",
            "--tool-call-parser",
            "deepseek_v4",
        ),
        *("--enable-auto-tool-choice", "--reasoning-parser", "deepseek_v4", "--reasoning-config", REASONING),
        *(
            "--default-chat-template-kwargs",
            '{"thinking":true}',
            "--enable-flashinfer-autotune",
            "--moe-backend",
            "flashinfer_b12x",
        ),
        *("--compilation-config", compilation, "--optimization-level", "2", "--performance-mode", "balanced"),
        *("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "192.0.2.1", "--master-port", "25000"),
        *(("--headless",) if rank else ()),
    ]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("mark", "name", "values"),
    [
        (
            "production",
            "dspark-r0b0tlab-production",
            {"length": "327680", "seqs": "16", "batched": "16384", "share": "0.835", "pinned": "15998753178"},
        ),
        (
            "long1m",
            "dspark-r0b0tlab-1m",
            {"length": "1048576", "seqs": "1", "batched": "8192", "share": "0.88", "pinned": ""},
        ),
    ],
)
def test_argv_of_the_seed_profiles(recipe, cluster, mark, name, values, rank):
    made = plan(profile(name), recipe, cluster, mark=mark)
    assert list(made.specs[rank].argv) == expected_argv(rank, **values)


@pytest.mark.parametrize("rank", [0, 1])
def test_argv_of_the_breakable_profile(recipe, cluster, rank):
    made = plan(profile("dspark-r0b0tlab-breakable-ab"), recipe, cluster, mark="breakable_ab")
    argv = list(made.specs[rank].argv)
    given = json.loads(argv[argv.index("--compilation-config") + 1])
    assert (given["mode"], given["cudagraph_mode"], given["cudagraph_implementation"]) == (0, "PIECEWISE", "breakable")
    values = {"length": "327680", "seqs": "16", "batched": "16384", "share": "0.835", "pinned": "15998753178"}
    assert argv == expected_argv(rank, **values, compilation=argv[argv.index("--compilation-config") + 1])


def test_environment_differs_by_rank_only_where_declared(recipe, cluster):
    made = plan(profile("dspark-r0b0tlab-production"), recipe, cluster, mark="production")
    head, worker = (dict(spec.env) for spec in made.specs)
    assert {key for key in head | worker if head.get(key) != worker.get(key)} == {
        "NODE_RANK",
        "HEADLESS",
        "NCCL_IB_HCA",
        "NCCL_SOCKET_IFNAME",
    }
    assert made.rank_env >= {"NODE_RANK", "HEADLESS", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"}
    assert (head["NCCL_IB_HCA"], worker["NCCL_IB_HCA"], head["HEADLESS"], worker["HEADLESS"]) == (
        "rocep1s0f0",
        "rocep1s0f1",
        "",
        "1",
    )
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH" not in head


def test_shell_form_launches_the_worker_first_and_quotes(recipe, cluster):
    made = plan(profile("dspark-r0b0tlab-production"), recipe, cluster, mark="production")
    worker, head = as_shell(made).splitlines()
    assert "--node-rank 1" in worker and "ssh://operator@192.0.2.2:22" in worker and "--headless" in worker
    assert "--node-rank 0" in head and "--headless" not in head
    assert "'" + COMPILATION + "'" in head and "--ulimit=memlock=-1:-1" in head


def test_secrets_are_masked_in_every_form(recipe, cluster):
    host = dataclasses.replace(cluster.hosts[0], env=(("HF_TOKEN", "hf_EXAMPLEEXAMPLEEXAMPLE"),))
    made = plan(
        profile("dspark-r0b0tlab-production"),
        recipe,
        dataclasses.replace(cluster, hosts=(host, cluster.hosts[1])),
        mark="production",
    )
    assert dict(made.specs[0].env)["HF_TOKEN"] == "hf_EXAMPLEEXAMPLEEXAMPLE"
    assert "hf_EXAMPLE" not in json.dumps(as_json(made)) + as_shell(made)


def test_noop_variable_is_a_warning(recipe):
    warnings = settle(profile("dspark-r0b0tlab-1m"), recipe).warnings
    assert any(text.startswith("VLLM_RPC_TIMEOUT has no effect") for text in warnings)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("dspark-r0b0tlab-1m", "MAX_NUM_BATCHED_TOKENS=16384", "642k"),
        ("dspark-r0b0tlab-1m", "MAX_NUM_BATCHED_TOKENS=32768", "does not start"),
        ("dspark-r0b0tlab-production", "MAX_NUM_BATCHED_TOKENS=32768", "does not start"),
        ("dspark-r0b0tlab-production", "MAX_NUM_SEQ=16", "unknown knob MAX_NUM_SEQ"),
        ("dspark-r0b0tlab-production", "-MAX_NUM_SEQS", "knob MAX_NUM_SEQS is missing"),
        ("dspark-r0b0tlab-production", "MAX_NUM_SEQS=sixteen", "must be int"),
        ("dspark-r0b0tlab-production", "MAX_NUM_SEQS=016", "plain int"),
        ("dspark-r0b0tlab-production", "MAX_NUM_SEQS=0", "must be from 1"),
        ("dspark-r0b0tlab-production", "GPU_MEMORY_UTILIZATION=nan", "plain float"),
        ("dspark-r0b0tlab-production", "GPU_MEMORY_UTILIZATION=1.5", "must be from"),
        ("dspark-r0b0tlab-production", "KV_CACHE_DTYPE=fp8", "must be one of"),
        ("dspark-r0b0tlab-production", "MTP_NUM_TOKENS=3", "must be from 5"),
        (
            "dspark-r0b0tlab-production",
            """COMPILATION_CONFIG_JSON='{"mode":3,"cudagraph_mode":"FULL_DECODE_ONLY"}'""",
            "garbles",
        ),
        ("dspark-r0b0tlab-production", "COMPILATION_CONFIG_JSON=3", "must be a JSON object"),
    ],
)
def test_refused_before_launch_with_file_and_reason(recipe, tmp_path, name, change, words):
    with pytest.raises(ConfigError) as caught:
        settle(edited(tmp_path, name, change), recipe)
    assert words in caught.value.message
    assert "edited.env" in caught.value.message


def test_compile_on_needs_the_experimental_knob_and_is_never_publishable(recipe, tmp_path):
    given = edited(
        tmp_path,
        "dspark-r0b0tlab-production",
        """COMPILATION_CONFIG_JSON='{"mode":3}'""",
        "ALLOW_EXPERIMENTAL_PROFILE=1",
    )
    assert any("never publishable" in reason for reason in settle(given, recipe).unpublishable)


def test_forbidden_environment_is_refused(recipe, cluster, tmp_path):
    given = edited(tmp_path, "dspark-r0b0tlab-production", "VLLM_USE_BREAKABLE_CUDAGRAPH=0")
    with pytest.raises(ConfigError, match="VLLM_USE_BREAKABLE_CUDAGRAPH must be absent"):
        plan(given, recipe, cluster, mark="production")


def test_a_host_that_lacks_what_the_recipe_needs(recipe, cluster):
    hosts = (cluster.hosts[0], dataclasses.replace(cluster.hosts[1], rdma=""))
    with pytest.raises(ConfigError, match="host spark-2: rdma is missing"):
        plan(
            profile("dspark-r0b0tlab-production"), recipe, dataclasses.replace(cluster, hosts=hosts), mark="production"
        )


def test_fingerprint_names_the_launch(recipe, cluster, tmp_path):
    first = plan(profile("dspark-r0b0tlab-production"), recipe, cluster, mark="production")
    again = plan(profile("dspark-r0b0tlab-production"), recipe, cluster, mark="production")
    other = plan(edited(tmp_path, "dspark-r0b0tlab-production", "MAX_NUM_SEQS=8"), recipe, cluster, mark="production")
    assert first.fingerprint == again.fingerprint != other.fingerprint


HOST = {"name": "a", "address": "192.0.2.1", "docker": "unix:///var/run/docker.sock"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "at least one"),
        ({"host": [HOST], "hosts": []}, "unknown key 'hosts'"),
        ({"host": [HOST | {"adress": "x"}]}, "unknown key 'adress'"),
        ({"host": [HOST | {"docker": "tcp://x"}]}, "docker must be"),
        ({"host": [HOST | {"process": True}]}, "exactly one of docker and process"),
        ({"host": [{"name": "a", "docker": "unix:///x"}]}, "address is missing"),
        ({"host": [HOST, HOST]}, "names must differ"),
        ({"host": [HOST], "port": "8888"}, "port must be int"),
        ({"host": [HOST | {"env": {"A": 1}}]}, "env A must be a string"),
        ({"host": [HOST | {"env": {"A=B": "x"}}]}, "env 'A=B' cannot"),
        ({"host": [HOST | {"env": {"A": "x\0y"}}]}, "env 'A' cannot"),
        *(
            ({"host": [HOST | {key: "-delete"}]}, f"{key} must be")
            for key in ("name", "address", "model", "cache", "rdma")
        ),
        *(({"host": [HOST | {key: "models/x"}]}, f"{key} must be a path from /") for key in ("model", "manifest")),
        *(({"host": [HOST | {"name": name}]}, "name must be") for name in ("../x", "a\nb", "a\x1b[2J")),
        ({"host": [HOST | {"address": "192.0.2.1 -x"}]}, "address must be one word"),
        *(({"host": [HOST], "port": port}, "port must be 1 to 65535") for port in (0, -1, 70000)),
        ({"host": [HOST], "container": "-x"}, "container must be"),
        ({"host": [HOST], "name": "../../etc"}, "name must be one word"),
    ],
)
def test_cluster_file_refusals(data, words):
    with pytest.raises(ConfigError) as caught:
        cluster_from(data, source="c.toml")
    assert words in caught.value.message and "c.toml" in caught.value.message


# --- another engine, by a recipe alone


def sglang_argv(rank):
    """Written out by hand from SGLang's documentation of two nodes."""
    argv = [
        "python3",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "/model",
        "--served-model-name",
        "smollm2",
        "--tp",
        "2",
    ]
    argv += [
        "--nnodes",
        "2",
        "--node-rank",
        str(rank),
        "--dist-init-addr",
        "192.0.2.1:20000",
        "--context-length",
        "8192",
    ]
    argv += [
        "--max-running-requests",
        "16",
        "--mem-fraction-static",
        "0.5",
        "--tool-call-parser",
        "llama3",
        "--enable-metrics",
    ]
    return argv + (["--host", "0.0.0.0", "--port", "30000"] if rank == 0 else [])


def test_a_new_engine_needs_no_code(cluster):
    """SGLang from a recipe file: its own module, its own rendezvous, only the head serves."""
    made = plan(profile("sglang-smollm2"), load_recipe(ROOT / "recipe" / "sglang.toml"), cluster, mark="production")
    for rank, spec in enumerate(made.specs):
        assert list(spec.argv) == sglang_argv(rank)
        assert spec.image == "lmsysorg/sglang:spark" and spec.name == "dspark_sglang"
    assert "python3 -m sglang.launch_server --model-path /model" in as_shell(made)


def test_plan_of_the_new_engine_on_the_command_line(pytester, monkeypatch):
    """What docs/recipes.md shows: --dspark-plan with the recipe prints both ranks."""
    monkeypatch.chdir(ROOT)
    options = [
        "-m",
        "production",
        "--dspark-recipe=sglang",
        f"--dspark-cluster={ROOT / 'docs' / 'cluster.example.toml'}",
    ]
    found = pytester.runpytest_subprocess("--dspark-plan", *options, f"--rootdir={ROOT}", str(ROOT / "suites"))
    text = found.stdout.str()
    assert found.ret == 0, text
    told = json.loads(text[: text.index("\n\n#")])
    assert [rank["argv"] for rank in told[0]["ranks"]] == [sglang_argv(0), sglang_argv(1)]
