"""Log text -> facts. The always-run lines are made up in the real form; the real logs are read where they are there."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_dspark.logs import FAULTS, FAULTS_OF_A_KIND, LINE_LIMIT, RankLog, explain, jsonable, read_log, search

REAL = Path(__file__).parents[2] / "shared" / "data" / "logs"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason=f"the real logs are not at {REAL}")

CONFIG = (
    "model='/m, odd=1', speculative_config=SpeculativeConfig(method='dspark', num_spec_tokens=6), dtype=torch.bfloat16, "
    "max_seq_len=327680, load_format=auto, enforce_eager=False, kv_cache_dtype=nvfp4_ds_mla, served_model_name=served, "
    "compilation_config={'mode': <CompilationMode.NONE: 0>, 'cache_dir': '', 'custom_ops': ['all'], 'sizes': [1, 2, (4, 0)], "
    "'cudagraph_mode': <CUDAGraphMode.FULL_DECODE_ONLY: (2, 0)>, 'cudagraph_implementation': <CUDAGraphImplementation.REGULAR: 'regular'>, "
    "'cudagraph_strict': True, 'pass_config': {'fuse': False}, 'share': 0.5, 'type': {'kind': <Shapes.BACKED: 'backed'>}, 'none': None}, "
    "kernel_config=KernelConfig(moe_backend='auto', more={'a': [1, 2]})"
)


def engine(config: str = CONFIG, version: str = "0.26.0+dspark.sm121.3") -> str:
    return f"(EngineCore pid=40) INFO 11-30 02:44:04 [core.py:116] Initializing a V1 LLM engine (v{version}) with config: {config}"


def runtime(strict: str = "true", who: str = "Worker_TP0", implementation: str = "regular") -> str:
    return (
        f"({who} pid=41) INFO 08-22 06:55:12 [cudagraph_utils.py:71] CUDA_GRAPH_RUNTIME requested={implementation}"
        f" resolved={implementation} mode=FULL_DECODE_ONLY decode_mode=FULL breakable=false enforce_eager=false strict={strict}"
    )


def test_nothing_is_known_of_an_empty_log() -> None:
    assert read_log("") == RankLog()


def test_engine_line() -> None:
    log = read_log(f"first\n{engine()}\nlast\n")
    config = log.engine_config or {}
    assert log.engine_version == "0.26.0+dspark.sm121.3"
    assert (config["model"], config["max_seq_len"], config["dtype"]) == ("/m, odd=1", 327680, "torch.bfloat16")
    assert (config["enforce_eager"], config["kv_cache_dtype"]) == (False, "nvfp4_ds_mla")
    assert config["speculative_config"] == "SpeculativeConfig(method='dspark', num_spec_tokens=6)"
    assert config["kernel_config"] == "KernelConfig(moe_backend='auto', more={'a': [1, 2]})"
    assert "odd" not in config


def test_compilation_compares_with_the_json_of_a_profile() -> None:
    found = read_log(engine()).compilation or {}
    asked = (
        '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_implementation":"regular","cudagraph_strict":true}'
    )
    assert json.loads(asked).items() <= found.items()
    assert (found["mode_name"], found["sizes"], found["share"], found["none"]) == ("NONE", [1, 2, [4, 0]], 0.5, None)
    assert (found["pass_config"], found["type"], found["cache_dir"]) == ({"fuse": False}, {"kind": "backed"}, "")
    assert json.loads(json.dumps(found)) == found


def test_a_difference_is_seen() -> None:
    line = engine(CONFIG.replace("NONE: 0", "VLLM_COMPILE: 3").replace("FULL_DECODE_ONLY: (2, 0)", "NONE: 0"))
    found = read_log(line).compilation or {}
    assert (found["mode"], found["mode_name"], found["cudagraph_mode"]) == (3, "VLLM_COMPILE", "NONE")


def test_the_last_engine_line_counts() -> None:
    log = read_log(f"{engine()}\n{engine('max_seq_len=1, compilation_config=None', '9')}")
    assert (log.engine_version, log.engine_config, log.compilation) == (
        "9",
        {"max_seq_len": 1, "compilation_config": None},
        None,
    )


@pytest.mark.parametrize(
    "line",
    [
        f"(EngineCore pid=2) ERROR [dump_input.py:72] Dumping input data for V1 LLM engine (v0.32.0) with config: {CONFIG}",
        f"INFO [x.py:1] prompt: 'Initializing a V1 LLM engine (v9) with config: {CONFIG}'",
        "INFO [core.py:1] Initializing a V1 LLM engine without any more",
    ],
)
def test_lines_that_only_look_like_the_engine_line(line: str) -> None:
    log = read_log(line)
    assert (log.engine_version, log.engine_config, log.compilation) == ("", None, None)


def test_a_cut_engine_line_gives_what_stands_there() -> None:
    cut = engine().split("'cudagraph_implementation'")[0]
    found = read_log(cut).compilation or {}
    assert found["mode"] == 0
    assert "cudagraph_strict" not in found


def test_arguments_and_their_secrets() -> None:
    line = (
        "(APIServer pid=1) INFO 11-30 02:47:28 [api_utils.py:286] non-default args: {'port': 8888, 'api_key': ['planted-1'], "
        "'hf_token': 'planted-2', 'served_model_name': ['s'], 'compilation_config': {'mode': <CompilationMode.NONE: 0>}}"
    )
    found = read_log(line).non_default_args or {}
    assert "planted" not in repr(found)
    assert found == {
        "port": 8888,
        "api_key": "***",
        "hf_token": "***",
        "served_model_name": ["s"],
        "compilation_config": {"mode": 0, "mode_name": "NONE"},
    }


@pytest.mark.parametrize(
    ("text", "tokens", "concurrency"),
    [
        (
            "[kv.py:2177] GPU KV cache size: 1,041,584 tokens\n[kv.py:2178] Maximum concurrency for 8,192 tokens per request: 127.15x",
            1041584,
            127.15,
        ),
        (
            "[kv.py:2327] CPU KV cache size: 69,888 tokens, Maximum concurrency for 8,192 tokens per request: 8.53x",
            69888,
            8.53,
        ),
        ("GPU KV cache size: 156,000 tokens", 156000, None),
        ("GPU KV cache size: 5 tokens\nGPU KV cache size: 7 tokens", 7, None),
        ("Engine 000: Running: 2 reqs, GPU KV cache usage: 0.4%", None, None),
        ("GPU KV cache size: None tokens", None, None),
        ("GPU KV cache size: ,, tokens", None, None),
        ("Available KV cache memory: 16.25 GiB", None, None),
    ],
)
def test_kv_pool(text: str, tokens: int | None, concurrency: float | None) -> None:
    log = read_log(text)
    assert (log.kv_pool_tokens, log.max_concurrency) == (tokens, concurrency)


def test_rank_and_world() -> None:
    joining = "world_size=2 rank=1 local_rank=0 distributed_init_method=tcp://192.0.2.1:29512 backend=nccl"
    assigned = "rank {} in world size 4 is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank 1"
    assert (read_log(joining).rank, read_log(joining).world_size) == (1, 2)
    several = read_log("\n".join(assigned.format(rank) for rank in (3, 2)))
    assert (several.rank, several.world_size) == (2, 4)
    assert read_log("Inferred data_parallel_rank 0 from node_rank 1").rank is None


def test_unknown_environment_once_each() -> None:
    line = "(APIServer pid=1) WARNING 07-02 21:58:11 [envs.py:2027] Unknown vLLM environment variable detected: "
    assert read_log(f"{line}VLLM_RPC_TIMEOUT\n{line}VLLM_BUILD_COMMIT\n{line}VLLM_RPC_TIMEOUT").unknown_env == (
        "VLLM_RPC_TIMEOUT",
        "VLLM_BUILD_COMMIT",
    )


def test_the_last_graph_line_of_a_worker_counts() -> None:
    log = read_log("\n".join([runtime("false"), runtime("true", "Worker_TP1"), runtime("false", "APIServer")]))
    assert log.graph_runtime == {
        "requested": "regular",
        "resolved": "regular",
        "mode": "FULL_DECODE_ONLY",
        "decode_mode": "FULL",
        "breakable": "false",
        "enforce_eager": "false",
        "strict": "true",
    }


def test_an_incomplete_graph_line_is_none() -> None:
    assert read_log(runtime().replace(" strict=true", "")).graph_runtime is None
    assert read_log(runtime().replace("requested=", "asked=")).graph_runtime is None
    more = read_log(runtime() + " source=config").graph_runtime or {}
    assert more["source"] == "config"


LINES = [
    ("audit_failed", "DSPARK_RUNTIME_AUDIT_FAIL: vllm version 0.25"),
    (
        "peer_lost",
        "(Worker_TP0 pid=3) ERROR 11-30 [multiproc_executor.py:1063] RuntimeError: [/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
        "Read error [192.0.2.2]:16612: Connection reset by peer. This is typically caused by a remote worker hanging or bugs",
    ),
    (
        "peer_lost",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [192.0.2.2]:36213",
    ),
    (
        "peer_lost",
        "RuntimeError: [../gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete",
    ),
    ("fabric", "spark-1:203:203 [0] NCCL WARN socketProgress: Connection closed by remote peer 192.0.2.2<3>"),
    ("fabric", "spark-1:203:203 [0] NCCL WARN NET/IB : Got completion from peer with status=12 IBV_WC_RETRY_EXC_ERR"),
    (
        "fabric",
        "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:2251, unhandled system error",
    ),
    (
        "fabric",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ),
    (
        "worker_exception",
        "(Worker_TP0 pid=30) ERROR 11-30 02:37:16 [multiproc_executor.py:1063] WorkerProc hit an exception.",
    ),
    ("engine_fatal", "(EngineCore pid=21) ERROR 11-30 02:37:16 [core.py:1512] EngineCore encountered a fatal error."),
    (
        "engine_dead",
        "[async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
    ),
    (
        "hang",
        "[shm_broadcast.py:871] No available shared memory broadcast block found in 60 seconds. This typically happens when",
    ),
    (
        "hang",
        "[rank1]:[E ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
    ),
    (
        "rpc_timeout",
        "(EngineCore pid=23) ERROR 11-30 02:46:33 [core.py:1512] TimeoutError: RPC call to execute_model timed out.",
    ),
    (
        "startup_failed",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
    ),
    ("startup_failed", "(EngineCore pid=9) ERROR 11-30 [core.py:1510] EngineCore failed to start."),
    ("startup_failed", "Exception: WorkerProc initialization failed due to an exception in a background process."),
    (
        "rendezvous_timeout",
        "torch.distributed.DistStoreError: Timed out after 31 seconds waiting for clients. 1/2 clients joined.",
    ),
    (
        "free_memory",
        "ValueError: Free memory on device cuda:0 (68.0/121.0 GiB) on startup is less than desired GPU memory utilization (0.835, 101.04 GiB).",
    ),
    (
        "free_memory",
        "ValueError: Free memory on device (61.05/119.7 GiB) on startup is less than desired GPU memory utilization (0.52, 62.24 GiB)",
    ),
    (
        "kv_too_small",
        "ValueError: To serve at least one request with the model's max seq len (327680), (14.29 GiB KV cache is needed, which is larger than the "
        "available KV cache memory (12.59 GiB). Based on the available memory, the estimated maximum model length is 280000.",
    ),
    ("kv_too_small", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    ("out_of_memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    ("out_of_memory", "RuntimeError: CUDA error: out of memory"),
    ("out_of_memory", "NVRM: nvAssertFailedNoLog: Assertion failed: NV_ERR_NO_MEMORY 0x51"),
    (
        "graph_selection",
        "ValueError: Conflicting native and legacy CUDA graph selections: regular and VLLM_USE_BREAKABLE_CUDAGRAPH=1",
    ),
    (
        "graph_selection",
        "ValueError: Strict breakable CUDA graph selection did not select the breakable capture runner",
    ),
    (
        "jit",
        "(Worker_TP1 pid=11) WARNING 11-30 [jit_monitor.py:135] Triton kernel JIT compilation during inference: some_kernel. This causes a latency spike",
    ),
]


@pytest.mark.parametrize(("kind", "line"), LINES, ids=[f"{kind}-{n}" for n, (kind, _) in enumerate(LINES)])
def test_fault_lines(kind: str, line: str) -> None:
    faults = read_log(f"before\n{line}\r\nafter").faults
    assert [(fault.kind, fault.line) for fault in faults] == [(kind, 2)]
    assert faults[0].text == line[:LINE_LIMIT]
    assert explain(faults[0])


def test_every_fault_pattern_has_a_line() -> None:
    for kind, literal, pattern in FAULTS:
        assert any(name == kind and literal in line and pattern.search(line) for name, line in LINES), (
            kind,
            pattern.pattern,
        )


@pytest.mark.parametrize(
    "line",
    [
        '    raise TimeoutError(f"RPC call to {method} timed out.") from e',
        "[jit_monitor.py:79] Kernel JIT monitor activated; monitored JIT compilations during inference will use mode=warn.",
        "Initial free memory 138.38 GiB, reserved 14.9 GiB memory for KV Cache as specified",
        "If OOM'ed, check the difference of initial free memory",
        "spark-1:203:203 [0] NCCL INFO NET/IB : Using [0]rocep1s0f0:1/RoCE [RO]; OOB enp1s0f0np0:192.0.2.1<0>",
        "[c10d] The hostname of the client socket cannot be retrieved. err=-3",
        "[TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host 192.0.2.1:29702 - retrying (try=0, timeout=1800000ms)",
        "DSPARK_RUNTIME_AUDIT_PASS",
    ],
)
def test_harmless_lines(line: str) -> None:
    assert read_log(line).faults == ()


def test_free_memory_names_figures_and_knob() -> None:
    line = next(line for kind, line in LINES if kind == "free_memory")
    fault = read_log(line).faults[0]
    assert dict(fault.figures) == {"free_gib": 68.0, "total_gib": 121.0, "share": 0.835, "wanted_gib": 101.04}
    assert explain(fault) == "68 GiB of 121 GiB are free and GPU_MEMORY_UTILIZATION=0.835 wants 101.04 GiB"


def test_repeated_faults_are_bounded() -> None:
    faults = read_log("\n".join(["x EngineDeadError"] * 1000 + ["RPC call to sample timed out"])).faults
    assert len(faults) == FAULTS_OF_A_KIND + 1
    assert faults[-1].line == 1001


def test_search_gives_the_first_line_and_a_window() -> None:
    text = "one\r\ntwo x\nthree x\n" + "a" * 9000 + "NEEDLE" + "b" * 9000
    assert search(text, re.compile("x$")) == (2, "two x")
    assert search(text, "e$") == (1, "one")
    number, line = search(text, "NEEDLE") or (0, "")
    assert (number, len(line)) == (4, LINE_LIMIT)
    assert "NEEDLE" in line
    assert search(text, "absent") is None
    assert search("", "x") is None


def test_search_never_matches_over_two_lines() -> None:
    assert search("a\nb", r"a\s*b") is None
    assert search("a\u2028b", r"^b") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-2", -2), ("0.5", 0.5), ("1e-5", 1e-5), ("1e999", "1e999"), ("nan", "nan"), ("inf", "inf"), ("1_0", "1_0"),
        ("'a'", "a"), ('"it\'s"', "it's"), (r"'a\'b\\c\n'", "a'b\\c\n"), ("'open", "'open"), ("'", "'"), ("", ""),
        ("<A.B: 1>", "B"), ("<A.B: 'b'>", "b"), ("<a.b.C.D: (1, 2)>", "D"), ("<A: 1>", "<A: 1>"),
        ("[]", []), ("{}", {}), ("(1,)", [1]), ("{", {}), ("[1, [2, '],'], {'k': ','}]", [1, [2, "],"], {"k": ","}]),
        ("{'a': 1, 'b:c': 'd, e'}", {"a": 1, "b:c": "d, e"}), ('{"a": true, "b": null}', {"a": True, "b": None}),
        ("Thing(a=1)", "Thing(a=1)"), ("[" * 50 + "]" * 50, [[[[[["[" * 44 + "]" * 44]]]]]]), ("9" * 50, "9" * 50),
    ],
)  # fmt: skip
def test_jsonable(text: str, value: object) -> None:
    assert jsonable(text) == value


FRAGMENTS = st.sampled_from(
    [
        "Initializing a V1 LLM engine (v1) with config: ", "non-default args: {", "compilation_config={", "'mode': ", "<CompilationMode.NONE: 0>",
        "<", ">", "{", "}", "[", "]", "(", ")", "'", '"', "\\", ",", "=", ": ", "\n", "] ", "GPU KV cache size: ", "9,9", " tokens",
        "Maximum concurrency for 1 tokens per request: ", "9" * 30, "x", "CUDA_GRAPH_RUNTIME", " a=b", "Worker_TP", " in world size ",
        "rank 9", "Free memory on device (", "GiB", "RPC call to ", "JIT compilation during inference: ", "\0", "\ud800", "١", "²",
    ]
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.lists(FRAGMENTS | st.text(max_size=4), max_size=40).map("".join))
def test_no_text_raises(text: str) -> None:
    log = read_log(text)
    json.dumps([log.engine_config, log.compilation, log.non_default_args], allow_nan=False)
    search(text, r"x")


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text(max_size=6),
        lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3),
        max_leaves=6,
    )
)
def test_a_repr_comes_back(value: object) -> None:
    """What Python prints is read back, but for nesting beyond the limit, unprintable characters and a `mode` of enums."""
    text = repr(value)
    if text.count("[") + text.count("{") <= 6 and "\\x" not in text and "\\u" not in text and "\\U" not in text:
        assert jsonable(text) == value


@pytest.mark.parametrize(
    "piece",
    [
        "a", "'", '"', "\\'", "'\\", "<a.B: ", "<a.B: 1>", "[", "]", "] ", ")", "{'a': ", "a=", ", ", "] Initializing a V1 LLM engine ",
        "Free memory on device (", "gloo/transport/tcp/pair.cc:1] ", "NCCL WARN ", "CUDA_GRAPH_RUNTIME a=b c=d e=f", " a=b", "9,", "9",
        "GPU KV cache size: 9,9,9,", "JIT compilation during inference: ", "RPC call to aaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "non-default args: {", " ",
    ],
)  # fmt: skip
@pytest.mark.parametrize("head", ["", engine("compilation_config={'a': ")])
def test_five_megabytes_in_one_line(piece: str, head: str) -> None:
    text = head + piece * (5_000_000 // len(piece))
    start = time.process_time()
    read_log(text)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "line",
    [
        '(APIServer pid=1) INFO:     192.0.2.9:46722 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n',
        runtime() + "\n",
        "\n",
    ],
)
def test_five_megabytes_of_lines(line: str) -> None:
    text = line * (5_000_000 // len(line))
    start = time.process_time()
    read_log(text)
    assert time.process_time() - start < 5


# --- real logs


@needs_real
@pytest.mark.parametrize(
    ("folder", "version", "mode", "tokens", "faults"),
    [
        ("vllm-0.26.0-h200-tp2", "0.26.0", "FULL_DECODE_ONLY", 1041584, set()),
        ("vllm-0.26.0-h200-tp2-ngram", "0.26.0", "FULL_DECODE_ONLY", 1041584, {"jit"}),
        ("vllm-0.32.0-cpu-lab", "0.32.0", "NONE", 69888, set()),
    ],
)
def test_real_starts(folder: str, version: str, mode: str, tokens: int, faults: set[str]) -> None:
    head, worker = (read_log((REAL / folder / f"rank{rank}.log").read_text()) for rank in (0, 1))
    assert head.compilation is not None
    assert head.non_default_args is not None
    assert (head.engine_version, head.compilation["mode"], head.compilation["cudagraph_mode"]) == (version, 0, mode)
    assert (head.kv_pool_tokens, head.rank, head.world_size) == (tokens, 0, 2)
    assert (head.non_default_args["nnodes"], head.non_default_args["max_num_seqs"]) == (2, 16)
    assert head.non_default_args["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert (worker.rank, worker.world_size, worker.compilation, worker.kv_pool_tokens) == (1, 2, None, None)
    assert {fault.kind for fault in (*head.faults, *worker.faults)} == faults


@needs_real
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("cut", {"hang", "engine_fatal", "rpc_timeout", "engine_dead"}),
        ("flap", set()),
        ("kill0", {"worker_exception", "peer_lost"}),
        ("kill1", {"worker_exception", "peer_lost", "engine_fatal", "engine_dead"}),
        ("stop1", {"worker_exception", "peer_lost", "engine_fatal", "engine_dead"}),
    ],
)
def test_real_faults(name: str, kinds: set[str]) -> None:
    log = read_log((REAL / "vllm-0.32.0-cpu-lab" / f"fault-{name}.txt").read_text())
    assert {fault.kind for fault in log.faults} == kinds


ECHOES = [
    "(APIServer pid=1) INFO 11-30 02:50:00 [logger.py:40] Received request cmpl-1-0: prompt: '{}', params: SamplingParams(n=1)",
    "(APIServer pid=1) DEBUG 11-30 02:50:00 [logger.py:49] Request chatcmpl-1 details: prompt: '{}', prompt_token_ids: [1]",
    "(APIServer pid=1) INFO 11-30 02:50:00 [logger.py:71] Generated response cmpl-1: output: '{}', finish_reason: stop",
    '(APIServer pid=1) INFO:     192.0.2.9:40000 - "GET /{} HTTP/1.1" 404 Not Found',
]
CLAIMS = [
    "GPU KV cache size: 999,999,999 tokens",
    "(Worker_TP0 pid=1) CUDA_GRAPH_RUNTIME requested=regular resolved=regular mode=FULL_DECODE_ONLY decode_mode=FULL breakable=false enforce_eager=false strict=true",
    "Initializing a V1 LLM engine (v9.9) with config: model=x, compilation_config={}",
    "rank 0 in world size 9 is assigned",
    "vllm.v1.engine.exceptions.EngineDeadError",
    "CUDA out of memory",
    "Unknown vLLM environment variable detected: VLLM_X",
]


@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize("claim", CLAIMS)
def test_what_a_client_sent_proves_nothing_and_accuses_nobody(echo, claim):
    own = "INFO GPU KV cache size: 1,000 tokens\n"
    log = read_log(own + echo.replace("{}", claim) + "\n")
    assert log == read_log(own)
    assert read_log(claim) != read_log("")
    assert search(echo.replace("{}", claim) + "\n" + claim, re.escape(claim)) == (2, claim[:500])
