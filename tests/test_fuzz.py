"""Hostile input to every parser: nothing but our own errors, and no hang. Seconds each; the same examples every time."""

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import leaves, name_of, with_leaf
from scripted import SSE, Scripted, delta, usage, whole

from pytest_dspark import inventory, manifest
from pytest_dspark.cluster import cluster_from, load_cluster
from pytest_dspark.endpoint import Asked, Endpoint
from pytest_dspark.errors import ConfigError, DsparkError
from pytest_dspark.gate import judge_tool
from pytest_dspark.hosts import known_hosts, ssh_config
from pytest_dspark.logs import read_log
from pytest_dspark.metrics import read_metrics
from pytest_dspark.plan import settle
from pytest_dspark.profile import load_profile
from pytest_dspark.recipe import load_recipe
from pytest_dspark.reply import StreamReader, plain_reply
from pytest_dspark.strictjson import loads
from pytest_dspark.timing import Timing

ROOT = Path(__file__).parents[1]
FEW = settings(
    max_examples=120,
    deadline=2000,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TIMING = Timing(None, None, None, 1.0)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=30)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=12), inner, max_size=4)),
    max_leaves=12,
)
WORDS = st.sampled_from(
    [
        "MAX_MODEL_LEN",
        "MAX_NUM_SEQS",
        "COMPILATION_CONFIG_JSON",
        "export ",
        "=",
        "'",
        '"',
        "$(x)",
        "`x`",
        "\\",
        "{",
        "#",
        " ",
        "\r\n",
    ]
    + ["\n", "8192", "\ufeff", "\0", "é", "A", "=x"]
)


def ours(action):
    """The error that an input gives must be ours; anything else ends the test."""
    try:
        return action()
    except DsparkError as error:
        return error.message and None


@FEW
@given(text=st.lists(WORDS, max_size=25).map("".join))
def test_profile(tmp_path, text):
    path = tmp_path / "x.env"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    profile = ours(lambda: load_profile(path))
    if profile:
        ours(lambda: settle(profile, RECIPE))


@FEW
@given(data=st.binary(max_size=300))
def test_profile_of_any_bytes(tmp_path, data):
    path = tmp_path / "x.env"
    path.write_bytes(data)
    ours(lambda: load_profile(path))


RECIPE_TEXT = (ROOT / "recipe" / "vllm.toml").read_text()
RECIPE = load_recipe(ROOT / "recipe" / "vllm.toml")
RECIPE_KEYS = sorted(tomllib.loads(RECIPE_TEXT))


def toml(value):
    """A value as TOML; None has no way of being written, and is left out above."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(toml(v) for v in value if v is not None) + "]"
    return json.dumps(value) if isinstance(value, (str, bool)) else repr(value)


@FEW
@given(key=st.sampled_from(RECIPE_KEYS), value=VALUES.filter(lambda v: v is not None))
def test_recipe_with_any_value_of_a_key(tmp_path, key, value):
    body = {**tomllib.loads(RECIPE_TEXT), key: value}
    path = tmp_path / "x.toml"
    path.write_text("\n".join(f"{json.dumps(k)} = {toml(v)}" for k, v in body.items()))
    ours(lambda: load_recipe(path))


@FEW
@given(cut=st.integers(0, len(RECIPE_TEXT)), junk=st.text(max_size=20))
def test_recipe_that_is_cut(tmp_path, cut, junk):
    path = tmp_path / "x.toml"
    path.write_bytes((RECIPE_TEXT[:cut] + junk).encode("utf-8", "surrogatepass"))
    ours(lambda: load_recipe(path))


HOSTS = st.dictionaries(
    st.sampled_from(["name", "address", "docker", "process", "interface", "env", "model", "bundle", "odd"]),
    VALUES,
    max_size=6,
)


@FEW
@given(
    data=st.dictionaries(st.sampled_from(["name", "recipe", "port", "host", "api", "wrapper", "odd"]), VALUES),
    hosts=st.lists(HOSTS, max_size=3),
)
def test_cluster(data, hosts):
    ours(lambda: cluster_from({**data, "host": hosts}, source="x"))
    ours(lambda: cluster_from(data, source="x"))


@FEW
@given(data=st.binary(max_size=200))
def test_cluster_of_any_bytes(tmp_path, data):
    path = tmp_path / "cluster.toml"
    path.write_bytes(data)
    ours(lambda: load_cluster(path))


CHUNKS = st.one_of(
    st.binary(max_size=60),
    st.builds(lambda value: b"data: " + json.dumps(value).encode() + b"\n\n", VALUES),
    st.builds(
        lambda delta, finish: (
            b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"
        ),
        VALUES,
        VALUES,
    ),
    st.sampled_from(
        [
            b"data: [DONE]\n\n",
            b": ping\n\n",
            b"\r",
            b"\n\n",
            b"data:",
            b'data: {"usage": {"completion_tokens": -1}}\n\n',
        ]
    ),
)


@FEW
@given(packets=st.lists(CHUNKS, max_size=12))
def test_stream(packets):
    reader = StreamReader()

    def read():
        for number, packet in enumerate([*packets, b""]):
            reader.feed(packet, float(number))
        return reader.reply({}, "", TIMING)

    ours(read)


@FEW
@given(value=VALUES)
def test_plain_answer(value):
    if isinstance(value, dict):
        ours(lambda: plain_reply(value, {}, "", TIMING))
    ours(lambda: plain_reply({"choices": [value]}, {}, "", TIMING))


CHOICE = {
    "index": 0,
    "text": "a",
    "delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]},
    "message": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    "logprobs": {
        "content": [{"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "a", "logprob": -0.5}]}],
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.5}],
    },
    "finish_reason": "stop",
}


@pytest.mark.parametrize("value", [None, 5, True, "x", [], [7], [[1]], {}, {"a": "b"}, [None]], ids=repr)
@pytest.mark.parametrize("path", [path for path, _ in leaves(CHOICE)], ids=lambda path: name_of(path, ""))
def test_an_answer_with_any_part_of_another_kind(path, value):
    for part in {path[:end] for end in range(1, len(path) + 1)}:
        data = {"choices": [with_leaf(CHOICE, part, value)], "usage": {"completion_tokens": 1}}
        reader = StreamReader()
        packet = b"data: " + json.dumps(data).encode() + b"\n\n"
        ours(lambda reader=reader, packet=packet: reader.feed(packet, 0.0) and reader.reply({}, "", TIMING))
        ours(lambda data=data: plain_reply(data, {}, "", TIMING))


LONG = "9" * 5000


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (SSE.replace(b"\r\n\r\n", f"\r\ncontent-length: {LONG}\r\n\r\n".encode()), "ok"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 2000 + SSE, "ok"),
        (whole(b"[" * 100_000, status="500 Broken"), "SERVER_ERROR"),
    ],
    ids=["length", "100", "deep"],
)
@pytest.mark.parametrize("reader", ["loop", "threads"])
def test_an_answer_that_no_server_gives_ends_its_own_stream_alone(answer, said, reader):
    body = delta("stop", content="ok") + usage(1) + b"data: [DONE]\n\n"
    with Scripted((answer + (body if said == "ok" else b""),), (SSE + body,)) as server:
        asked = [Asked({"prompt": "x"}), Asked({"prompt": "x"}, due_s=0.1)]
        first, second = Endpoint(server.url, "m", reader=reader).stream_many(asked, places=1)
    assert said in (getattr(first, "text", ""), getattr(first, "code", "")) and second.text == "ok"


def test_a_number_of_a_server_that_is_no_number():
    with Scripted((whole({"data": [{"id": "m", "max_model_len": LONG}]}),)) as server:
        (card,) = Endpoint(server.url, "m").models()
    assert card.max_model_len is None and "expected a number" in card.problem
    pool = read_metrics(f'vllm:cache_config_info{{kv_cache_size_tokens="{LONG}"}} 1\n').kv_pool
    assert pool.value is None and "kv_cache_size_tokens" in pool.reason


@pytest.mark.parametrize("said", ["[" * 100_000, '{"a": 1, "a": 1}', '{"a": true}', '{"a": NaN}', f'{{"a": {LONG}}}'])
def test_arguments_of_a_tool_that_are_no_json_are_wrong(said):
    ok, message = judge_tool([("f", said)], "f", {"a": 1})
    assert not ok and message


@FEW
@given(
    text=st.one_of(
        st.text(max_size=200),
        st.lists(
            st.sampled_from(
                [
                    "vllm:num_requests_running",
                    "{a=",
                    '"b"}',
                    " 1",
                    " NaN",
                    " +Inf",
                    " 1e999",
                    "\n",
                    "# TYPE x counter",
                    "# HELP",
                    "\\",
                    '"',
                ]
            )
        ).map("".join),
    )
)
def test_metrics(text):
    found = ours(lambda: read_metrics(text))
    value = found.value("vllm:num_requests_running")
    assert value is None or isinstance(value, float)


LINES = [
    "Initializing a V1 LLM engine (v0.26.0) with config: model='/m', compilation_config={'mode': <X: 0>, ",
    "non-default args: {'model': ",
    "GPU KV cache size: 9,999,999,999,999,999,999 tokens",
    "rank 999999 in world size 0 is assigned",
    "CUDA_GRAPH_RUNTIME requested=regular resolved=",
    "EngineDeadError",
    "{[(", "'" * 50, "}" * 50, "\\", "\x1b[31m", "\n", "\r", ", ", "=", "1" * 30,
]  # fmt: skip


@FEW
@given(text=st.lists(st.one_of(st.sampled_from(LINES), st.text(max_size=20)), max_size=30).map("".join))
def test_log(text):
    read_log(text)


@FEW
@given(data=st.binary(max_size=300))
def test_json(data):
    try:
        loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return


@FEW
@given(
    data=st.binary(max_size=200),
    line=st.lists(
        st.sampled_from(
            ["Host *", "Include x", "Port", "Match", " ", "\n", '"', "a", "%h", "22", "@revoked", "|1|a|b", "="]
        )
    ).map("".join),
)
def test_ssh_files(tmp_path, data, line):
    for number, content in enumerate((data, line.encode())):
        path = tmp_path / f"f{number}"
        path.write_bytes(content)
        assert isinstance(known_hosts.known_keys("h", [path]), tuple)
        ours(lambda path=path: ssh_config.resolve("h", ssh_config.Address("h"), [path]))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 50_000, "9" * 6000])
def test_deep_and_long_json_of_a_server_is_our_error(text):
    reader = StreamReader()
    ours(lambda: reader.feed(f"data: {text}\n\n".encode(), 0.0))


@pytest.mark.parametrize(
    "text", [f"x = {LONG}", f"x = {'[' * 20_000}{']' * 20_000}", f"x = {'{a=' * 3000}1{'}' * 3000}"]
)
@pytest.mark.parametrize("load", [load_cluster, load_recipe])
def test_deep_and_long_toml_is_our_error(tmp_path, load, text):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.toml"):
        load(tmp_path / "x.toml")


@pytest.mark.parametrize(
    "said",
    [
        "[" * 100_000,
        LONG,
        "[]",
        "",
        '{"packages": 5}',
        '{"packages": {"a": 1}}',
        '{"hashes": {"a": [1]}}',
        '{"kernel": 1}',
    ]
    + ['{"packages": {"a": "1", "a": "2"}}'],
)
def test_what_a_rank_says_of_itself_in_another_shape_is_no_inventory_and_no_manifest(said):
    assert "printed no inventory" in inventory.parse(said).missing
    assert inventory.parse('{"packages": {"a": "1"}, "hashes": {"a": null, "b": {"c": null}}}').packages == {"a": "1"}
    assert said[:1] == "{" or manifest.parse(said) is None


def test_a_manifest_with_a_key_twice_has_no_meaning():
    assert manifest.parse('{"vllm_version": "1", "vllm_version": "2"}') is None


@pytest.mark.parametrize("before", [480, 495, 499])
def test_a_key_that_a_server_repeats_is_not_cut_in_half_and_told(before):
    key = "Plant-4711-of-the-server"
    answer = whole({"error": {"message": "x" * before + key}}, status="401 Unauthorized")
    with Scripted((answer,)) as server, pytest.raises(DsparkError) as caught:
        Endpoint(server.url, "m", api_key=key).models()
    assert "xxx" in caught.value.message and "Plant"[:1] not in caught.value.message.partition("xxx")[2]
