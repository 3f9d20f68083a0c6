"""The command line of `vllm serve`, as far as recipes use it. An unknown flag is a usage error, as in the real one."""

from __future__ import annotations

import argparse
import json
from typing import Any


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, found {text!r}")
    return value


_INTEGERS = (
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
)
_TEXTS = (
    ("--served-model-name", "model"),
    ("--host", "0.0.0.0"),
    ("--kv-cache-dtype", "auto"),
    ("--tokenizer-mode", "auto"),
    ("--distributed-executor-backend", "mp"),
    ("--tool-call-parser", ""),
    ("--reasoning-parser", ""),
    ("--moe-backend", "auto"),
    ("--performance-mode", "balanced"),
    ("--master-addr", "127.0.0.1"),
    ("--jit-monitor-mode", "warn"),
)
_FLAGS = (
    "--trust-remote-code",
    "--enable-prefix-caching",
    "--enable-auto-tool-choice",
    "--enable-flashinfer-autotune",
    "--enforce-eager",
    "--enable-scale-out",
    "--enable-prompt-tokens-details",
    "--headless",
)
_OBJECTS = ("--speculative-config", "--reasoning-config", "--default-chat-template-kwargs", "--compilation-config")


def parse(argv: list[str]) -> argparse.Namespace:
    """Ends the program with code 2 for what is not known."""
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model_tag")
    for name, default in _INTEGERS:
        parser.add_argument(name, type=int, default=default)
    for name, text in _TEXTS:
        parser.add_argument(name, default=text)
    for name in _FLAGS:
        parser.add_argument(name, action="store_true")
    for name in _OBJECTS:
        parser.add_argument(name, type=_object, default={})
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    return parser.parse_args(argv)
