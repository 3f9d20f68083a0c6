"""This client beside `vllm bench serve` of the same vLLM on one running engine, interleaved.

usage: compare.py --url URL --model ID --tokenizer FOLDER --python "PYTHON" --out FILE [--repeats 7] [--budget-s 240]

A round is one pair at each level (1, 4, 16 at once): both ask the same number of raw completions of exactly the same
prompt and output length, one of the two first in turn. Prompts differ from their first token on. The first round warms both
and is published but not judged. Per figure the difference of each pair is taken in percent of the peer's, and the 95 %
t-interval of its mean is the answer.

Figures: `output_rate` (all completion tokens / wall time of the set), `tpot_ms` (mean of (last - first token) / (tokens - 1)),
`ttft_ms` (mean). The peer's TTFT clock starts before the request is built and connected, ours at its first byte: that figure
is reported, and not judged.
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pytest_dspark.endpoint import Asked, Endpoint, Reply
from pytest_dspark.load import output_rate, sample

LEVELS = {1: 12, 4: 32, 16: 96}
"""Requests of one set, by how many are in flight at once."""
TOKENS = 128
LEAST_PAIRS = 5
JUDGED = ("output_rate", "tpot_ms")
FIGURES = (*JUDGED, "ttft_ms")
WITHIN = 2.0
STORY = "Tell a long story about a lighthouse, the people who kept it, the ships that passed and the storms they saw."
# 97.5 % quantiles of Student's t by degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def prompts(count: int) -> list[str]:
    """Twelve random digits first: as many tokens in each, and another first token block in each."""
    return [f"{secrets.randbelow(9 * 10**11) + 10**11} {STORY}\n" for _ in range(count)]


def ours(endpoint: Endpoint, level: int, texts: Sequence[str]) -> dict[str, Any]:
    """One set through this client. Raises SystemExit with the first error: a pair with a failed request is no pair."""
    length = {"max_tokens": TOKENS, "min_tokens": TOKENS, "ignore_eos": True}
    outcomes = endpoint.stream_many([Asked({"prompt": text, **length}) for text in texts], places=level, deadline_s=120)
    replies = [one for one in outcomes if isinstance(one, Reply)]
    if len(replies) != len(texts):
        raise SystemExit(f"ours: {next(one for one in outcomes if not isinstance(one, Reply))}")
    samples = [sample(reply) for reply in replies]
    return {
        "requests": len(samples),
        "prompt_tokens": sum(one["prompt_tokens"] for one in samples),
        "completion_tokens": sum(one["completion_tokens"] for one in samples),
        "output_rate": output_rate(samples),
        "tpot_ms": statistics.fmean(one["tpot_s"] for one in samples) * 1000,
        "ttft_ms": statistics.fmean(one["first_token_s"] for one in samples) * 1000,
    }


class Peer:
    """The other client's process."""

    def __init__(self, process: subprocess.Popen[str], base: Sequence[str]) -> None:
        self._process, self._base = process, base
        if self._line() != {"ready": True}:
            raise SystemExit("peer: expected it to be ready")

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"peer: ended with code {self._process.wait()}; its last words are in its log")
        return dict(json.loads(line))

    def __call__(self, level: int, texts: Sequence[str]) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.write("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
            file.flush()
            given = ["--dataset-path", file.name, "--num-prompts", str(len(texts)), "--max-concurrency", str(level)]
            assert self._process.stdin
            self._process.stdin.write(json.dumps([*self._base, *given]) + "\n")
            self._process.stdin.flush()
            found = self._line()
        if found["completed"] != len(texts):
            raise SystemExit(f"peer: {found['completed']} of {len(texts)} requests completed")
        return {
            "requests": found["completed"],
            "prompt_tokens": found["total_input_tokens"],
            "completion_tokens": found["total_output_tokens"],
            "output_rate": found["output_throughput"],
            "tpot_ms": found["mean_tpot_ms"],
            "ttft_ms": found["mean_ttft_ms"],
        }


def peer_arguments(url: str, model: str, tokenizer: str) -> list[str]:
    """`vllm bench serve` with everything named that decides what is sent; no test request before, which would be cached."""
    return [
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
        *("--model", model, "--served-model-name", model, "--tokenizer", tokenizer),
        *("--dataset-name", "custom", "--skip-chat-template", "--disable-shuffle", "--custom-output-len", str(TOKENS)),
        *("--ignore-eos", "--temperature", "0", "--extra-body", json.dumps({"min_tokens": TOKENS})),
        *("--ready-check-timeout-sec", "0", "--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl"),
    ]


@contextmanager
def peer_of(python: str, base: Sequence[str], log: Path):
    command = [*python.split(), str(Path(__file__).with_name("peer.py"))]
    with log.open("w") as said:
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, text=True) as process:
            try:
                yield Peer(process, base)
            finally:
                process.stdin.close()
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()


def interval(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and 95 % t-interval; None for fewer than two values or more than the table holds."""
    if not 2 <= len(values) <= len(STUDENT) + 1:
        return None
    mean, half = statistics.fmean(values), STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def agree(found: Mapping[str, float] | None, pairs: int) -> bool:
    """The interval of the difference holds 0 or lies within ±2 %, from at least five pairs."""
    if found is None or pairs < LEAST_PAIRS or not all(math.isfinite(value) for value in found.values()):
        return False
    return found["low"] <= 0 <= found["high"] or (found["low"] >= -WITHIN and found["high"] <= WITHIN)


def alike(pair: Mapping[str, Any]) -> bool:
    """Both asked and got as many tokens."""
    mine, theirs = pair["ours"], pair["peer"]
    return all(mine[key] == theirs[key] for key in ("requests", "prompt_tokens", "completion_tokens"))


def judged(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per level and figure: the differences in percent of the peer's, their interval, and whether both agree."""
    levels: dict[str, Any] = {}
    for level in sorted({pair["level"] for pair in pairs}):
        rows = [pair for pair in pairs if pair["level"] == level and pair["round"] > 0]
        figures = {name: _figure([pair for pair in rows if alike(pair)], name) for name in FIGURES}
        levels[f"c{level}"] = {"pairs": len(rows), "alike": sum(map(alike, rows)), **figures}
    good = [one["alike"] == one["pairs"] and all(one[name]["agree"] for name in JUDGED) for one in levels.values()]
    complete = {f"c{level}" for level in LEVELS} == set(levels)
    return {"verdict": "AGREE" if complete and all(good) else "DIFFER", "judged": list(JUDGED), "levels": levels}


def _figure(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    percent = [100 * (pair["ours"][name] / pair["peer"][name] - 1) for pair in rows]
    found = interval(percent)
    means = {who: statistics.fmean(pair[who][name] for pair in rows) if rows else None for who in ("ours", "peer")}
    return {**means, "difference_percent": percent, "interval": found, "agree": agree(found, len(percent))}


def measure(endpoint: Endpoint, peer: Peer, repeats: int, budget_s: float) -> list[dict[str, Any]]:
    """Rounds of pairs until they are enough or the time is over; whole rounds alone."""
    pairs: list[dict[str, Any]] = []
    begin, longest = time.monotonic(), 0.0
    for number in range(repeats + 1):
        started = time.monotonic()
        if started + longest > begin + budget_s:
            print(f"the time is over after {number} rounds", file=sys.stderr)
            break
        pairs += [_pair(endpoint, peer, level, count, number) for level, count in LEVELS.items()]
        longest = max(longest, time.monotonic() - started)
    return pairs


def _pair(endpoint: Endpoint, peer: Peer, level: int, count: int, number: int) -> dict[str, Any]:
    runs = {"ours": lambda: ours(endpoint, level, prompts(count)), "peer": lambda: peer(level, prompts(count))}
    order = ["ours", "peer"] if number % 2 else ["peer", "ours"]
    pair: dict[str, Any] = {"round": number, "level": level, "order": order}
    pair |= {who: runs[who]() for who in order}
    shown = {who: {name: round(pair[who][name], 3) for name in FIGURES} for who in sorted(order)}
    print(f"round {number} C{level} {json.dumps(shown)}", flush=True)
    return pair


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("url", "model", "tokenizer", "python", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=240.0)
    given = parser.parse_args()
    out = Path(given.out)
    base = peer_arguments(given.url, given.model, given.tokenizer)
    endpoint = Endpoint(given.url, given.model)
    begin = time.monotonic()
    with peer_of(given.python, base, out.with_suffix(".peer.log")) as peer:
        pairs = measure(endpoint, peer, given.repeats, given.budget_s)
    endpoint.close()
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "elapsed_s": round(time.monotonic() - begin, 1),
        "tokens": TOKENS,
        "requests": {f"c{level}": count for level, count in LEVELS.items()},
        "peer_arguments": base,
        **judged(pairs),
        "rounds": pairs,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0 if result["verdict"] == "AGREE" else 1


def table(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| level | figure | ours | vllm bench serve | difference, 95 % interval | agree |",
        "|---|---|---|---|---|---|",
    ]
    for level, one in result["levels"].items():
        for name in FIGURES:
            figure = one[name]
            found = figure["interval"]
            shown = (
                f"{found['mean']:+.2f} % ({found['low']:+.2f} to {found['high']:+.2f})" if found else "too few pairs"
            )
            both = " | ".join("-" if figure[who] is None else f"{figure[who]:.2f}" for who in ("ours", "peer"))
            verdict = ("yes" if figure["agree"] else "no") if name in JUDGED else "not judged"
            lines.append(f"| {level} ({one['alike']} pairs) | {name} | {both} | {shown} | {verdict} |")
    return "\n".join([*lines, f"\n{result['verdict']}"])


if __name__ == "__main__":
    sys.exit(main())
