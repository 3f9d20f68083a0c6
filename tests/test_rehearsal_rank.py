"""The emulated rank as a program: real processes on loopback addresses, asked by a client of these tests' own."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

RANK = Path(__file__).parents[1] / "pytest_dspark" / "rehearsal" / "rank.py"
MODEL = "deepseek-v4-flash-dspark"
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_implementation": "regular",
    "cudagraph_strict": True,
}
ENV = {
    "NCCL_DEBUG": "INFO",
    "NCCL_NET": "IB",
    "NCCL_IB_HCA": "rocep1s0f0",
    "VLLM_RPC_TIMEOUT": "3600",
    "VLLM_USE_AOT_COMPILE": "0",
}
FLAGS = {
    "--served-model-name": MODEL,
    "--tensor-parallel-size": "2",
    "--pipeline-parallel-size": "1",
    "--kv-cache-dtype": "nvfp4_ds_mla",
    "--block-size": "256",
    "--max-model-len": "327680",
    "--max-num-seqs": "16",
    "--max-num-batched-tokens": "16384",
    "--gpu-memory-utilization": "0.835",
    "--kv-cache-memory-bytes": "15998753178",
    "--speculative-config": '{"method":"dspark","num_speculative_tokens":6}',
    "--tokenizer-mode": "deepseek_v4",
    "--distributed-executor-backend": "mp",
    "--tool-call-parser": "deepseek_v4",
    "--reasoning-parser": "deepseek_v4",
    "--reasoning-config": '{"reasoning_parser":"deepseek_v4","reasoning_start_str":"<think>","reasoning_end_str":"</think>"}',
    "--default-chat-template-kwargs": '{"thinking":true}',
    "--moe-backend": "flashinfer_b12x",
    "--compilation-config": json.dumps(GRAPHS),
    "--optimization-level": "2",
    "--performance-mode": "balanced",
    "--master-addr": "127.0.0.1",
}
SWITCHES = [
    "--trust-remote-code",
    "--enable-prefix-caching",
    "--enable-auto-tool-choice",
    "--enable-flashinfer-autotune",
]
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def until(what: Callable[[], Any], limit_s: float = 10.0) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.01)
    return found


@dataclass
class Ranks:
    """The processes of one engine and where it answers."""

    folder: Path
    nodes: int = 2
    flags: dict[str, str | None] = field(default_factory=dict)
    more: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ("", "")
    port: int = field(default_factory=free_port)
    master_port: int = field(default_factory=free_port)
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, rank: int, *more: str) -> subprocess.Popen[bytes]:
        flags: dict[str, str | None] = {**FLAGS, "--tensor-parallel-size": str(self.nodes), **self.flags}
        argv = [sys.executable, str(RANK), "serve", "/model", "--host", "0.0.0.0", "--port", str(self.port), *SWITCHES]
        argv += [word for key, value in flags.items() if value is not None for word in (key, value)]
        argv += ["--nnodes", str(self.nodes), "--node-rank", str(rank), "--master-port", str(self.master_port)]
        argv += [*self.more, *more, *(["--headless"] if rank else [])]
        env = {"PATH": os.environ["PATH"], "REHEARSAL_TIME": "0.0003", "REHEARSAL_BIND": "127.0.0.1", **ENV, **self.env}
        env["REHEARSAL_FAULT"] = self.faults[rank] if rank < len(self.faults) else ""
        with (self.folder / f"rank{rank}.log").open("wb") as log:
            self.processes[rank] = subprocess.Popen(argv, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        return self.processes[rank]

    def log(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.log").read_text()

    def says(self, rank: int, text: str, limit_s: float = 10.0) -> None:
        until(lambda: text in self.log(rank), limit_s)

    def code(self, rank: int, limit_s: float = 5.0) -> int:
        return self.processes[rank].wait(limit_s)

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    # --- the API

    def raw(self, method: str, path: str, body: Any = None, timeout: float = 20.0) -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as line:
            line.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            with line.getresponse() as reply:
                return reply.status, reply.read().decode()

    def post(self, path: str, body: Any, timeout: float = 20.0) -> tuple[int, Any]:
        status, text = self.raw("POST", path, body, timeout)
        return status, json.loads(text)

    def body(self, question: str, **more: Any) -> dict[str, Any]:
        given = {"max_tokens": 128, "temperature": 0, "chat_template_kwargs": {"thinking": False}}
        return {"model": MODEL, "messages": [{"role": "user", "content": question}], **given, **more}

    def ask(self, question: str, **more: Any) -> dict[str, Any]:
        status, found = self.post("/v1/chat/completions", self.body(question, **more))
        assert status == 200, found
        return {**found["choices"][0], "usage": found["usage"]}

    def events(self, question: str, **more: Any) -> list[Any]:
        """The data of each event of a stream; the end mark as the string that it is."""
        more = {"stream": True, "stream_options": {"include_usage": True}} | more
        status, text = self.raw("POST", "/v1/chat/completions", self.body(question, **more))
        assert status == 200, text
        data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]

    def metric(self, name: str, **labels: str) -> float:
        text = self.raw("GET", "/metrics")[1]
        lines = [line for line in text.splitlines() if re.match(rf"vllm:{name}(\{{| )", line)]
        wanted = [line for line in lines if all(f'{key}="{value}"' in line for key, value in labels.items())]
        assert wanted, f"no {name} in /metrics"
        return sum(float(line.rpartition(" ")[2]) for line in wanted)


@contextmanager
def ranks(folder: Path, **options: Any) -> Iterator[Ranks]:
    """An engine that serves."""
    found = Ranks(folder, **options)
    with ExitStack() as stack:
        stack.callback(found.stop)
        for rank in reversed(range(found.nodes)):
            found.start(rank)
        found.says(0, "Application startup complete.")
        yield found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(tmp_path_factory.mktemp("pair"), more=["--enable-scale-out"]) as found:
        yield found


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """Engines of one rank, which start fastest."""
    with ExitStack() as stack:

        def start(fault: str = "", **options: Any) -> Ranks:
            folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            return stack.enter_context(ranks(folder, nodes=1, faults=(fault,), **options))

        yield start


def text_of(events: list[Any], kind: str = "content") -> str:
    chunks = [event for event in events if isinstance(event, dict)]
    return "".join(choice["delta"].get(kind) or "" for chunk in chunks for choice in chunk.get("choices", ()))


# --- start


def test_worker_waits_silently_and_the_world_comes_together(tmp_path: Path) -> None:
    found = Ranks(tmp_path)
    try:
        worker = found.start(1)
        found.says(
            1,
            f"world_size=2 rank=1 local_rank=0 distributed_init_method=tcp://127.0.0.1:{found.master_port} backend=nccl",
        )
        time.sleep(0.3)
        assert worker.poll() is None
        assert "is assigned" not in found.log(1)
        found.start(0)
        found.says(0, "Application startup complete.")
        assert "rank 1 in world size 2 is assigned" in found.log(1)
    finally:
        found.stop()


def test_lines_of_both_ranks(pair: Ranks) -> None:
    pair.ask("Tell a long story.", max_tokens=20)
    for rank in (0, 1):
        pair.says(rank, "CUDA_GRAPH_REPLAY implementation=regular status=observed")
        log = pair.log(rank)
        order = [
            "\nDSPARK_RUNTIME_AUDIT_PASS\n",
            "Unknown vLLM environment variable detected: VLLM_RPC_TIMEOUT",
            "Resolved architecture: DeepseekV4ForCausalLM",
            "Using nvfp4_ds_mla data type to store kv cache",
            "Chunked prefill is enabled with max_num_batched_tokens=16384.",
            f"world_size=2 rank={rank} local_rank=0",
            "NCCL INFO NET/IB : Using [0]rocep1s0f0:1/RoCE",
            "NCCL INFO Using network IB",
            f"rank {rank} in world size 2 is assigned",
            "Using 'B12X_MXFP4' Mxfp4 MoE backend",
            "DSpark draft model loaded",
            "Model loading took 79.44 GiB and ",
            "Available KV cache memory: ",
            f"(Worker_TP{rank} pid=",
            "Capturing model for DSpark speculator...",
            "Graph capturing finished in ",
            "CUDA_GRAPH_CAPTURE implementation=regular status=complete",
            "CUDA_GRAPH_REPLAY",
        ]
        places = [log.find(text) for text in order if not text.startswith("(Worker_TP")]
        assert -1 not in places, order[places.index(-1)]
        assert places == sorted(places)
        assert log.count("CUDA_GRAPH_REPLAY") == 1
        assert "VLLM_USE_AOT_COMPILE" not in log
        last = [line for line in log.splitlines() if f"(Worker_TP{rank}" in line and "CUDA_GRAPH_RUNTIME" in line]
        assert last[-1].endswith(
            "CUDA_GRAPH_RUNTIME requested=regular resolved=regular mode=FULL_DECODE_ONLY decode_mode=FULL "
            "breakable=false enforce_eager=false strict=true"
        )


def test_head_alone_tells_of_api_and_engine(pair: Ranks) -> None:
    head, worker = pair.log(0), pair.log(1)
    engine = next(line for line in head.splitlines() if "Initializing a V1 LLM engine" in line)
    assert "(v0.26.0+dspark.sm121.3) with config: model='/model'" in engine
    for text in (
        "'mode': <CompilationMode.NONE: 0>",
        "'cudagraph_mode': <CUDAGraphMode.FULL_DECODE_ONLY: (2, 0)>",
        "'cudagraph_strict': True",
        "enforce_eager=False",
        "kv_cache_dtype=nvfp4_ds_mla",
        f"served_model_name={MODEL}",
    ):
        assert text in engine
    assert "GPU KV cache size: 156,000 tokens" in head
    assert "non-default args: {'model_tag': '/model'" in head
    assert not re.search("APIServer|EngineCore|KV cache size|non-default", worker)


@pytest.mark.parametrize(
    ("flags", "pool"),
    [
        ({}, 156_000),
        ({"--max-model-len": "1048576", "--max-num-seqs": "1", "--max-num-batched-tokens": "8192", "--gpu-memory-utilization": "0.88", "--kv-cache-memory-bytes": None}, 1_253_213),
        ({"--max-model-len": "1048576", "--gpu-memory-utilization": "0.88", "--kv-cache-memory-bytes": None}, 642_000),
    ],
)  # fmt: skip
def test_pool_of_the_profiles(alone: Callable[..., Ranks], flags: dict[str, str | None], pool: int) -> None:
    found = alone(flags=flags)
    info = next(line for line in found.raw("GET", "/metrics")[1].splitlines() if "vllm:cache_config_info{" in line)
    assert f'kv_cache_size_tokens="{pool}"' in info
    assert 'block_size="4"' in info
    assert f"GPU KV cache size: {pool:,} tokens" in found.log(0)


def test_too_many_batched_tokens_end_both_ranks(tmp_path: Path) -> None:
    found = Ranks(tmp_path, flags={"--max-num-batched-tokens": "32768"})
    try:
        found.start(1)
        found.start(0)
        assert (found.code(0), found.code(1)) == (1, 1)
        assert all("larger than the available KV cache memory" in found.log(rank) for rank in (0, 1))
    finally:
        found.stop()


@pytest.mark.parametrize(
    ("flags", "more", "code", "text"),
    [
        ({}, ["--no-such-flag"], 2, "unrecognized arguments: --no-such-flag"),
        ({"--performance-mode": "fast"}, [], 2, "invalid choice"),
        ({"--kv-cache-dtype": "fp8"}, [], 64, "DSPARK_RUNTIME_AUDIT_FAIL"),
        ({"--speculative-config": '{"method":"dspark","num_speculative_tokens":3}'}, [], 1, "dspark_block_size"),
        ({}, ["--enforce-eager"], 1, "cudagraph_strict"),
    ],
)
def test_refusals(tmp_path: Path, flags: dict[str, str | None], more: list[str], code: int, text: str) -> None:
    found = Ranks(tmp_path, nodes=1, flags=flags, more=more)
    found.start(0)
    assert found.code(0) == code
    assert text in found.log(0)


def test_unknown_fault_and_bad_factor_are_usage_errors(tmp_path: Path) -> None:
    for env, faults in (({}, ("no_such",)), ({}, ("die_after_tokens",)), ({"REHEARSAL_TIME": "0"}, ("",))):
        found = Ranks(tmp_path, nodes=1, env=env, faults=faults)
        found.start(0)
        assert found.code(0) == 2


def test_breakable_and_eager_say_so(alone: Callable[..., Ranks]) -> None:
    config = {
        "mode": 0,
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_implementation": "breakable",
        "cudagraph_strict": True,
    }
    found = alone(flags={"--compilation-config": json.dumps(config)})
    found.ask("Tell a long story.", max_tokens=20)
    for text in (
        "Breakable CUDA graph enabled",
        "requested=breakable resolved=breakable mode=PIECEWISE decode_mode=PIECEWISE breakable=true",
        "CUDA_GRAPH_AUXILIARY implementation=breakable component=dflash mode=eager reason=piecewise_unsupported",
        "CUDA_GRAPH_CAPTURE implementation=breakable status=complete",
        "CUDA_GRAPH_REPLAY implementation=breakable status=observed",
    ):
        assert text in found.log(0)
    loose = json.dumps(GRAPHS | {"cudagraph_strict": False})
    eager = alone(flags={"--compilation-config": loose}, more=["--enforce-eager"])
    assert "Cudagraph is disabled under eager mode" in eager.log(0)
    assert "decode_mode=NONE breakable=false enforce_eager=true" in eager.log(0)


def test_different_command_lines_hang_silently(tmp_path: Path) -> None:
    found = Ranks(tmp_path)
    try:
        found.start(1, "--max-num-seqs", "8")
        found.start(0)
        found.says(0, "world_size=2 rank=0")
        time.sleep(0.7)
        assert "is assigned" not in found.log(0) + found.log(1)
        assert all(process.poll() is None for process in found.processes.values())
    finally:
        found.stop()


# --- answers


def test_short_answers(pair: Ranks) -> None:
    for question, answer in (
        ("Compute 7 multiplied by 19. Reply with only the number.", "133"),
        ("17×19等于多少？只回答数字。", "323"),
        ("What is (3 + 4) * 5 - 2?", "33"),
        ("Compute 144 minus 77. Reply with only the number.", "67"),
        ("What is the capital of France?", "Paris"),
        ("Reply with exactly: R0B0BENCH_OK", "R0B0BENCH_OK"),
        ("List the first 5 prime numbers.", "2, 3, 5, 7, 11"),
        ("The secret for stream 3 is AB-33.\nThe secret for stream 13 is CD-44.\n\nWhat is the secret for stream 3?", "AB-33"),
        ("Remember: the code is 48213.\n\nWhat is the code?", "48213"),
        ("IMPORTANT SECRET VERIFICATION CODE: R0B0-NIAH-7K3M.\n\nWhat is the secret verification code?", "R0B0-NIAH-7K3M"),
        ("Nothing is here.\n\nWhat is the secret code?", "I could not find that in the text."),
    ):  # fmt: skip
        found = pair.ask(question)
        assert (found["message"]["content"], found["finish_reason"]) == (answer, "stop"), question
        assert found["message"]["reasoning"] is None


def test_json_in_words_and_by_schema(pair: Ranks) -> None:
    question = "Return a JSON object in which alpha is 2 and beta is 3. Reply with only the JSON."
    assert json.loads(pair.ask(question)["message"]["content"]) == {"alpha": 2, "beta": 3}
    schema = {
        "type": "object",
        "properties": {"alpha": {"type": "integer"}, "ok": {"type": "boolean"}, "to": {"enum": ["x", "y"]}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert json.loads(pair.ask(question, response_format=form)["message"]["content"]) == {
        "alpha": 2,
        "ok": True,
        "to": "x",
    }
    assert json.loads(pair.ask(question, response_format={"type": "json_object"})["message"]["content"])["beta"] == 3


def test_thinking_is_the_default_and_may_end_the_budget(pair: Ranks) -> None:
    question = "Compute 7 multiplied by 19. Reply with only the number."
    found = pair.ask(question, chat_template_kwargs={})
    assert found["message"]["content"] == "133"
    assert "133" in found["message"]["reasoning"]
    cut = pair.ask(question, chat_template_kwargs={}, max_tokens=8)
    assert (cut["message"]["content"], cut["finish_reason"], cut["usage"]["completion_tokens"]) == (None, "length", 8)
    events = pair.events(question, chat_template_kwargs={})
    assert text_of(events, "reasoning") == found["message"]["reasoning"]
    assert text_of(events) == "133"


@pytest.mark.parametrize(
    ("choice", "finish"),
    [
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, "stop"),
    ],
)
def test_tool_call_whole_and_streamed(pair: Ranks, choice: Any, finish: str) -> None:
    question = "What is the weather in Oslo? Use the tool."
    found = pair.ask(question, tools=[WEATHER], tool_choice=choice)
    call = found["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"]), found["finish_reason"]) == (
        "get_weather",
        {"city": "Oslo"},
        finish,
    )
    events = pair.events(question, tools=[WEATHER], tool_choice=choice)
    parts = [part for event in events[:-2] for part in event["choices"][0]["delta"].get("tool_calls", ())]
    assert len(parts) > 1
    assert json.loads("".join(part["function"]["arguments"] for part in parts)) == {"city": "Oslo"}
    assert [part["function"]["name"] for part in parts if "name" in part["function"]] == ["get_weather"]
    assert events[-3]["choices"][0]["finish_reason"] == finish


def test_no_tool_when_none_is_wanted(pair: Ranks) -> None:
    found = pair.ask("Compute 2 plus 3.", tools=[WEATHER])
    assert (found["message"]["content"], found["message"]["tool_calls"]) == ("5", [])


def test_stream_has_the_shape_of_the_real_one(pair: Ranks) -> None:
    events = pair.events("Tell a long story.", max_tokens=64, min_tokens=64, ignore_eos=True)
    first, last, usage, end = events[0], events[-3], events[-2], events[-1]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert set(first) == {"id", "object", "created", "model", "choices", "prompt_token_ids", "prompt_text"}
    assert set(events[1]["choices"][0]) == {"index", "delta", "logprobs", "finish_reason", "token_ids"}
    assert last["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]["completion_tokens"], end) == ([], 64, "[DONE]")
    assert usage["usage"]["prompt_tokens_details"] is None
    assert 64 / 7 <= len(events) - 3 < 64
    assert text_of(events) == pair.ask("Tell a long story.", max_tokens=64, ignore_eos=True)["message"]["content"]
    assert "usage" not in pair.events("Hi", max_tokens=3, stream_options=None)[-2]


def test_stop_seed_and_logprobs(pair: Ranks) -> None:
    whole = pair.ask("Tell a long story.", max_tokens=60)["message"]["content"]
    word = whole.split()[5]
    cut = pair.ask("Tell a long story.", max_tokens=60, stop=[word])
    assert (cut["message"]["content"], cut["finish_reason"], cut["stop_reason"]) == (
        whole[: whole.index(word)],
        "stop",
        word,
    )
    assert text_of(pair.events("Tell a long story.", max_tokens=60, stop=[word])) == whole[: whole.index(word)]
    one, same, other = (
        pair.ask("Tell a long story.", temperature=1, seed=seed, max_tokens=40)["message"]["content"]
        for seed in (1, 1, 2)
    )
    assert one == same != other
    logprobs = pair.ask("Hi", logprobs=True, top_logprobs=2, max_tokens=5)["logprobs"]["content"]
    assert len(logprobs) == 5
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in logprobs)


def test_tokens_and_render(pair: Ranks) -> None:
    text = "Hello wörld 12345  x\n\n\tz ✅ <think> \u2028 naïve"
    tokens = pair.post("/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True})[1]
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 327680
    assert pair.post("/detokenize", {"tokens": tokens["tokens"][1:]})[1] == {"prompt": text}
    body = pair.body("Compute 7 multiplied by 19.")
    rendered = pair.post("/v1/chat/completions/render", body)[1]["token_ids"]
    assert len(rendered) == 17 + pair.post("/tokenize", {"prompt": "Compute 7 multiplied by 19."})[1]["count"] - 1
    assert rendered == pair.post("/tokenize", body)[1]["tokens"]
    found = pair.post("/v1/completions", {"prompt": rendered, "max_tokens": 8, "temperature": 0})[1]
    assert (found["choices"][0]["text"], found["usage"]["prompt_tokens"]) == ("133", len(rendered))


def test_errors_as_the_real_one(pair: Ranks, alone: Callable[..., Ranks]) -> None:
    status, found = pair.post("/v1/chat/completions", pair.body("Hi", max_tokens=327680))
    error = found["error"]
    assert (status, error["type"], error["code"], error["param"]) == (400, "BadRequestError", 400, None)
    assert "327680" in error["message"]
    assert "18 input tokens" in error["message"]
    odd = {"stream_options": "x", "stream": True}
    assert pair.post("/v1/chat/completions", pair.body("Hi", **odd))[0] == 400
    for status, more in ((404, {"model": "other"}), (400, {"n": 2}), (400, {"temperature": -1}), (400, {"max_tokens": 0}),
                         (400, {"tool_choice": "required"}), (400, {"min_tokens": 200}), (400, {"messages": []})):  # fmt: skip
        assert pair.post("/v1/chat/completions", pair.body("Hi", **more))[0] == status, more
    assert pair.post("/v1/completions", {"prompt": [999999999]})[0] == 400
    assert pair.raw("POST", "/v1/chat/completions", "text")[0] == 400
    assert pair.raw("GET", "/nowhere")[0] == 404
    assert pair.raw("GET", "/v1/completions")[0] == 405
    closed = alone(more=["--api-key", "sk-rehearsal"])
    assert closed.raw("GET", "/v1/models")[0] == 401
    assert closed.raw("GET", "/health")[0] == 200
    assert closed.post("/v1/chat/completions/render", {"messages": []})[0] == 401


# --- numbers


def test_metrics_move_by_what_was_asked(alone: Callable[..., Ranks]) -> None:
    found = alone(more=["--enable-prompt-tokens-details"])
    names = ["prompt_tokens_total", "generation_tokens_total", "request_success_total", "prefix_cache_hits_total"]
    names += ["prefix_cache_queries_total", "request_decode_time_seconds_count", "request_prefill_time_seconds_count"]
    assert [found.metric(name) for name in names] == [0] * 7
    question = "word " * 600
    usages = [
        found.ask(question, max_tokens=40)["usage"],
        found.ask(question, max_tokens=40)["usage"],
        found.ask("Compute 2 plus 3.")["usage"],
    ]
    prompt, made = (sum(usage[key] for usage in usages) for key in ("prompt_tokens", "completion_tokens"))
    assert [found.metric(name) for name in names] == [prompt, made, 3, 512, prompt, 3, 3]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 512, 0]
    assert found.metric("request_success_total", finished_reason="stop") == 1
    accepted, drafts = (
        found.metric("spec_decode_num_accepted_tokens_total"),
        found.metric("spec_decode_num_drafts_total"),
    )
    assert found.metric("spec_decode_num_draft_tokens_total") == 6 * drafts
    assert found.metric("spec_decode_num_accepted_tokens_per_pos_total") == accepted >= made - 3 - drafts
    assert found.metric("spec_decode_num_drafts_created") > 1e9
    assert found.metric("num_preemptions_total") == 0


def test_prompt_above_the_pool_is_never_scheduled_and_blocks_the_rest(alone: Callable[..., Ranks]) -> None:
    found = alone()
    with ThreadPoolExecutor(2) as threads:
        big = {"prompt": [7] * 160_000, "max_tokens": 4}
        waits = threads.submit(found.raw, "POST", "/v1/completions", big, 1.5)
        until(lambda: found.metric("num_requests_waiting") == 1)
        behind = threads.submit(found.ask, "Compute 2 plus 3.")
        until(lambda: found.metric("num_requests_waiting") == 2)
        assert (found.metric("num_requests_running"), found.metric("kv_cache_usage_perc")) == (0, 0)
        assert not behind.done()
        with pytest.raises(TimeoutError):
            waits.result()
        assert behind.result()["message"]["content"] == "5"  # the client that went away gave its place up
    assert found.metric("request_success_total", finished_reason="abort") == 1


def test_only_so_many_run_and_each_gets_its_own_answer(alone: Callable[..., Ranks]) -> None:
    found = alone(flags={"--max-num-seqs": "4"}, env={"REHEARSAL_TIME": "0.0003", "REHEARSAL_SPEED": "20"})
    with ThreadPoolExecutor(24) as threads:
        asked = [f"The secret for stream {n} is KEY-{n:04d}.\n\nWhat is the secret for stream {n}?" for n in range(24)]
        answers = [threads.submit(found.ask, question) for question in asked]
        seen = until(lambda: found.metric("num_requests_running") == 4 and found.metric("num_requests_waiting") > 0)
        assert seen
        assert [answer.result()["message"]["content"] for answer in answers] == [f"KEY-{n:04d}" for n in range(24)]
    assert found.metric("num_requests_running") == 0


def test_a_full_pool_preempts_and_all_still_finish(alone: Callable[..., Ranks]) -> None:
    found = alone(flags={"--kv-cache-memory-bytes": str(15998753178 // 200), "--enable-prefix-caching": None})
    with ThreadPoolExecutor(4) as threads:
        story = [threads.submit(found.ask, f"{n} word " * 80, max_tokens=250, ignore_eos=True) for n in range(4)]
        assert [one.result()["usage"]["completion_tokens"] for one in story] == [250] * 4
    assert found.metric("num_preemptions_total") > 0
    assert found.metric("generation_tokens_total") == 1000
    assert found.metric("prompt_tokens_total") == sum(one.result()["usage"]["prompt_tokens"] for one in story)


# --- ends


def test_killed_worker_ends_streams_with_an_error_and_the_head_with_0(tmp_path: Path) -> None:
    with ranks(tmp_path, env={"REHEARSAL_SPEED": "300"}) as found, ThreadPoolExecutor(2) as threads:
        stream = threads.submit(found.events, "Tell a long story.", max_tokens=5000, ignore_eos=True)
        plain = threads.submit(found.post, "/v1/chat/completions", found.body("Hi", max_tokens=5000, ignore_eos=True))
        until(lambda: found.metric("num_requests_running") == 2)
        begin = time.monotonic()
        found.processes[1].kill()
        events = stream.result()
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["message"].startswith("EngineCore encountered an issue.")
        assert events[-2]["error"]["code"] == 500
        assert plain.result()[0] == 500
        assert found.raw("GET", "/v1/models")[0] == 200
        assert found.raw("GET", "/health")[0] == 503
        assert found.code(0) == 0
        assert time.monotonic() - begin < 3
        assert "EngineCore encountered a fatal error." in found.log(0)
        assert "vllm.v1.engine.exceptions.EngineDeadError" in found.log(0)


def test_killed_head_leaves_the_worker_running(tmp_path: Path) -> None:
    with ranks(tmp_path) as found:
        found.processes[0].kill()
        found.says(1, "WorkerProc hit an exception.")
        time.sleep(0.5)
        assert found.processes[1].poll() is None
        assert found.log(1).count("WorkerProc hit an exception.") == 1
        found.processes[1].terminate()
        assert found.code(1) == 0


def test_paused_worker_stops_generation_and_not_the_api(tmp_path: Path) -> None:
    with ranks(tmp_path) as found, ThreadPoolExecutor(1) as threads:
        found.processes[1].send_signal(signal.SIGSTOP)
        asked = threads.submit(found.ask, "Compute 2 plus 3.")
        until(lambda: found.metric("num_requests_running") == 1)
        time.sleep(0.5)
        assert not asked.done()
        assert found.raw("GET", "/health")[0] == 200
        found.processes[1].send_signal(signal.SIGCONT)
        assert asked.result()["message"]["content"] == "5"


def test_orderly_stop_and_a_free_port(tmp_path: Path) -> None:
    with ranks(tmp_path) as found:
        begin = time.monotonic()
        found.processes[0].terminate()
        assert found.code(0) == 0
        found.processes[1].terminate()
        assert found.code(1) == 0
        assert time.monotonic() - begin < 1.5
        assert "[shutdown] API server: shutdown triggered" in found.log(0)


def test_taken_ports_end_the_head(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = Ranks(tmp_path, nodes=1, port=taken.getsockname()[1])
        found.start(0)
        assert found.code(0) == 1
        assert "Address already in use" in found.log(0)
        found = Ranks(tmp_path, master_port=taken.getsockname()[1])
        found.start(0)
        assert found.code(0) == 1
        assert "The server socket has failed to listen" in found.log(0)


# --- faults


def test_faults_of_a_start(tmp_path: Path) -> None:
    found = Ranks(tmp_path, faults=("", "exit_at_start=7"))
    try:
        found.start(1)
        assert found.code(1) == 7
        found.faults = ("", "exit_in_load=3")
        found.start(1)
        found.start(0)
        assert found.code(1) == 3
        time.sleep(0.5)
        assert found.processes[0].poll() is None  # the head waits on, silently
    finally:
        found.stop()


@pytest.mark.parametrize("fault", ["hang_at_start", "never_ready"])
def test_ranks_that_never_serve_still_stop(tmp_path: Path, fault: str) -> None:
    found = Ranks(tmp_path, nodes=1, faults=(fault,))
    found.start(0)
    time.sleep(0.8)
    deadline = time.monotonic() + 20
    while fault == "never_ready" and not found.log(0) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "Application startup complete." not in found.log(0)
    assert (found.log(0) == "") == (fault == "hang_at_start")
    found.processes[0].terminate()
    assert found.code(0) == 0


@pytest.mark.parametrize("dying", [0, 1])
def test_die_after_tokens(tmp_path: Path, dying: int) -> None:
    faults = tuple("die_after_tokens=30" if rank == dying else "" for rank in (0, 1))
    with ranks(tmp_path, faults=faults) as found:
        assert found.ask("Compute 2 plus 3.")["message"]["content"] == "5"
        with pytest.raises((AssertionError, OSError, http.client.HTTPException)):
            found.ask("Tell a long story.", max_tokens=100, ignore_eos=True)
        assert found.code(dying) == -signal.SIGKILL


@pytest.mark.parametrize("hanging", [0, 1])
def test_hang_after_tokens(tmp_path: Path, hanging: int) -> None:
    faults = tuple("hang_after_tokens=30" if rank == hanging else "" for rank in (0, 1))
    with ranks(tmp_path, faults=faults) as found:
        body = found.body("Tell a long story.", max_tokens=100, ignore_eos=True)
        with pytest.raises(TimeoutError):
            found.raw("POST", "/v1/chat/completions", body, 0.5)
        assert found.raw("GET", "/v1/models")[0] == 200
        assert 30 <= found.metric("generation_tokens_total") < 40


def test_faults_of_answers(alone: Callable[..., Ranks]) -> None:
    wrong = alone("wrong_answer,wrong_model_len=1000,no_usage,marker_missing=NET/IB,extra_line=a%2Cb Marlin")
    assert wrong.ask("Compute 7 multiplied by 19.")["message"]["content"] == "244"
    call = wrong.ask("Weather in Oslo? Use the tool.", tools=[WEATHER])["message"]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"]) != {"city": "Oslo"}
    assert '"max_model_len":1000' in wrong.raw("GET", "/v1/models")[1]
    assert wrong.ask("Hi")["usage"] is None
    assert all("usage" not in event for event in wrong.events("Hi")[:-1])
    assert "NET/IB" not in wrong.log(0)
    assert "a,b Marlin" in wrong.log(0)
    odd = alone("garble,cut_tool_args,nccl_socket,compile_on,slow_stop")
    assert odd.ask("Compute 7 multiplied by 19.")["message"]["content"] != "133"
    call = odd.ask("Weather in Oslo? Use the tool.", tools=[WEATHER])["message"]["tool_calls"][0]["function"]
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        json.loads(call["arguments"])
    assert "NET/Socket" in odd.log(0)
    assert "NCCL INFO Using network Socket" in odd.log(0)
    assert "'mode': <CompilationMode.VLLM_COMPILE: 3>" in odd.log(0).split("Initializing a V1 LLM engine")[1]
    odd.processes[0].terminate()
    time.sleep(0.3)
    assert odd.processes[0].poll() is None
    forever = alone("think_forever")
    found = forever.ask("Compute 2 plus 3.", max_tokens=200)
    assert (found["message"]["content"], found["finish_reason"]) == (None, "length")


def test_compilation_garbles_by_itself(alone: Callable[..., Ranks]) -> None:
    found = alone(flags={"--compilation-config": json.dumps(GRAPHS | {"mode": 3})})
    assert found.ask("Compute 7 multiplied by 19.")["message"]["content"] != "133"


def test_faults_of_streams(alone: Callable[..., Ranks]) -> None:
    broken = alone("error_in_stream")
    events = broken.events("Tell a long story.")
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == 500
    assert text_of(events[:-2])
    assert broken.post("/v1/chat/completions", broken.body("Tell a long story."))[0] == 500
    silent = alone("truncate_stream").events("Tell a long story.")
    assert text_of(silent)
    assert not any(event["choices"][0]["finish_reason"] for event in silent)
    with pytest.raises(http.client.IncompleteRead):
        alone("truncate_stream=abrupt").events("Tell a long story.")
    mute = alone("api_only")
    assert mute.raw("GET", "/health")[0] == 200
    with pytest.raises(TimeoutError):
        mute.raw("POST", "/v1/completions", {"prompt": "Hello"}, 0.3)


def test_cross_talk_swaps_answers(alone: Callable[..., Ranks]) -> None:
    found = alone("cross_talk", env={"REHEARSAL_SPEED": "50"})
    with ThreadPoolExecutor(2) as threads:
        asked = [
            f"{'word ' * 20000}The secret for stream {n} is KEY-{n:04d}.\n\nWhat is the secret for stream {n}?"
            for n in (1, 2)
        ]
        answers = [threads.submit(found.ask, question) for question in asked]
        assert [answer.result()["message"]["content"] for answer in answers] == ["KEY-0002", "KEY-0001"]
