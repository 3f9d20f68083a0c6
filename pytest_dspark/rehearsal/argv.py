"""The command line of `vllm serve`, as far as recipes use it. An unknown flag is a usage error, as in the real one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# What may differ between the ranks of one engine, with the number of values that follow.
OF_ONE_RANK = {"--node-rank": 1, "--headless": 0, "--host": 1, "--port": 1, "--master-addr": 1, "--api-key": 1}

_INTEGERS: tuple[tuple[str, int | None], ...] = (
    ("--port", 8000),
    ("--tensor-parallel-size", 1),
    ("--pipeline-parallel-size", 1),
    ("--block-size", 16),
    ("--max-model-len", 8192),
    ("--max-num-seqs", 256),
    ("--max-num-batched-tokens", 8192),
    ("--kv-cache-memory-bytes", None),
    ("--optimization-level", 2),
    ("--nnodes", 1),
    ("--node-rank", 0),
    ("--master-port", 29501),
    ("--max-logprobs", 20),
    ("--max-cudagraph-capture-size", None),
    ("--seed", 0),
)
_TEXTS = (
    ("--served-model-name", "", ()),
    ("--host", "0.0.0.0", ()),
    ("--kv-cache-dtype", "auto", ()),
    ("--tokenizer-mode", "auto", ()),
    ("--distributed-executor-backend", "mp", ("mp", "ray", "uni")),
    ("--tool-call-parser", "", ()),
    ("--reasoning-parser", "", ()),
    ("--moe-backend", "auto", ()),
    ("--performance-mode", "balanced", ("balanced", "throughput", "interactivity")),
    ("--master-addr", "127.0.0.1", ()),
    ("--jit-monitor-mode", "warn", ("off", "warn", "error")),
    ("--api-key", "", ()),
)
_SWITCHES = (
    ("--trust-remote-code", False),
    ("--enable-prefix-caching", True),
    ("--enable-auto-tool-choice", False),
    ("--enable-flashinfer-autotune", True),
    ("--enforce-eager", False),
    ("--enable-scale-out", False),
    ("--enable-prompt-tokens-details", False),
    ("--headless", False),
)
_OBJECTS = ("--speculative-config", "--reasoning-config", "--default-chat-template-kwargs", "--compilation-config")


@dataclass(frozen=True, slots=True)
class Settings:
    """One rank's command line, read. `given` holds what differs from the defaults, for the log."""

    model: str
    served_model_name: str
    host: str
    port: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    kv_cache_dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    enable_prefix_caching: bool
    enable_auto_tool_choice: bool
    enable_flashinfer_autotune: bool
    enforce_eager: bool
    enable_scale_out: bool
    enable_prompt_tokens_details: bool
    trust_remote_code: bool
    headless: bool
    speculative: dict[str, Any]
    reasoning: dict[str, Any]
    template_kwargs: dict[str, Any]
    compilation: dict[str, Any]
    tokenizer_mode: str
    tool_call_parser: str
    reasoning_parser: str
    moe_backend: str
    optimization_level: int
    performance_mode: str
    jit_monitor_mode: str
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    max_logprobs: int
    api_key: str
    given: dict[str, Any]

    @property
    def k(self) -> int:
        """Speculative tokens a step."""
        return int(self.speculative.get("num_speculative_tokens", 0))

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class _Parser(argparse.ArgumentParser):
    """`--max_model_len` is `--max-model-len`, as in vLLM."""

    def parse(self, argv: Iterable[str]) -> argparse.Namespace:
        return self.parse_args([_dashed(token) for token in argv])


def _dashed(token: str) -> str:
    name, equals, value = token.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else token


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to <function loads>.") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, found {text!r}")
    return value


def _parser() -> _Parser:
    parser = _Parser(prog="vllm serve", allow_abbrev=False)
    parser.add_argument("model")
    for name, number in _INTEGERS:
        parser.add_argument(name, type=int, default=number)
    for name, text, choices in _TEXTS:
        parser.add_argument(name, default=text, choices=choices or None)
    for name, on in _SWITCHES:
        parser.add_argument(name, action=argparse.BooleanOptionalAction, default=on)
    for name in _OBJECTS:
        parser.add_argument(name, type=_object, default={})
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    return parser


def parse(argv: list[str]) -> Settings:
    """Ends the program with code 2 for what is not known, and for anything but `serve`."""
    parser = _parser()
    if argv[:1] != ["serve"]:
        parser.error(f"argument subparser: invalid choice: {argv[:1]} (choose from 'serve')")
    found = vars(parser.parse(argv[1:]))
    given = {key: value for key, value in found.items() if value != parser.get_default(key) and key != "model"}
    found["speculative"] = found.pop("speculative_config")
    found["reasoning"] = found.pop("reasoning_config")
    found["template_kwargs"] = found.pop("default_chat_template_kwargs")
    found["compilation"] = found.pop("compilation_config")
    found["served_model_name"] = found["served_model_name"] or found["model"]
    fields = {key: value for key, value in found.items() if key in Settings.__slots__}
    return Settings(**fields, given=given)


def comparable(argv: Iterable[str]) -> list[str]:
    """The command line without what may differ between ranks."""
    result, skip = [], 0
    for token in argv:
        if skip:
            skip -= 1
        elif token.partition("=")[0] in OF_ONE_RANK:
            skip = 0 if "=" in token else OF_ONE_RANK[token]
        else:
            result.append(token)
    return result
