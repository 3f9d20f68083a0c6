"""What evidence costs: a row beside a bare write and fsync of its bytes, and `dspark verify` beside reading the pack once.

    python -m benchmarks.evidence [--rows 20000] [--log-mb 200]

Both sides of each ratio are measured in turns in one run. Exit code 1 if a goal is missed: a row at most 3 times the bare write,
verify at most 3 s more than one reading.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pytest_dspark import pack, publish, verify
from pytest_dspark.evidence import Case, new_run, row, sealed
from pytest_dspark.verdict import PASS, Finding

ROW_GOAL = 3.0
VERIFY_GOAL_S = 3.0
TURNS = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--log-mb", type=int, default=200)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        good = rows(Path(folder))
        return 0 if verified(Path(folder), given.rows, given.log_mb) and good else 1


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


# --- a row


def rows(folder: Path) -> bool:
    """Rows of a kilobyte (a question with its answer) and of ten (a timed row)."""
    small, large = _row(folder, 800), _row(folder, 9_000)
    return small and large


def _row(folder: Path, size: int) -> bool:
    run = new_run(folder / f"rows-{size}")
    case = Case(run.run_id, "suites/x.py::t[production]", "x", "x", "production", "recipe", "f" * 16)
    made = row(case, PASS, Finding("x", {"text": "word " * (size // 5)}), started="t", elapsed_s=0.1)
    data = json.dumps(made).encode() + b"\n"
    handle = os.open(folder / f"bare-{size}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def bare() -> None:
        os.write(handle, data)
        os.fsync(handle)

    turns = [(timed(bare), timed(lambda: run.append(made))) for _ in range(TURNS)]
    os.close(handle)
    theirs, mine = (statistics.median(side) for side in zip(*turns, strict=True))
    print(
        f"row of {len(data):,} bytes: {mine * 1e3:.2f} ms, bare write and fsync {theirs * 1e3:.2f} ms: {mine / theirs:.2f} times (goal {ROW_GOAL:g})"
    )
    return mine / theirs <= ROW_GOAL


# --- verify


def verified(folder: Path, count: int, megabytes: int) -> bool:
    """A rehearsal's pack with that many rows and that much log."""
    target = _pack(folder, count, megabytes)
    size = sum((target / name).stat().st_size for name in pack.files_of(target))

    def read_once() -> None:
        for name in pack.files_of(target):
            with (target / name).open("rb") as file:
                while file.read(1 << 20):
                    pass

    read_once()
    turns = [(timed(read_once), timed(lambda: _must(verify.examine(target)))) for _ in range(3)]
    reading, whole = (min(side) for side in zip(*turns, strict=True))
    print(
        f"verify {size / 1e6:.0f} MB, {count:,} rows: {whole:.2f} s, reading once {reading:.2f} s: {whole - reading:.2f} s more (goal {VERIFY_GOAL_S:g})"
    )
    return whole - reading <= VERIFY_GOAL_S


def _must(report: verify.Report) -> None:
    if not report.verified:
        raise SystemExit(f"the pack does not verify: {report.problems[:3]}")


def _pack(folder: Path, count: int, megabytes: int) -> Path:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "suites",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--dspark-out={folder / 'out'}",
    ]
    command += ["-m", "production and not concurrency and not performance", "--dspark-cluster=rehearsal"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    found = list((folder / "out" / "runs").glob("*/publish"))
    if not found:
        raise SystemExit(f"the rehearsal left no pack:\n{done.stdout[-2000:]}")
    _more_rows(found[0], count)
    _more_log(found[0], megabytes)
    publish.derive(found[0])
    return found[0]


def _more_rows(target: Path, count: int) -> None:
    """Rows of single questions, each with the finding of one of the run's own answers."""
    told = [json.loads(line) for line in (target / "rows.jsonl").read_text().splitlines()]
    one = next(row for row in told if row["check"] == "correctness.json")
    told += [{**one, "part": f"question-{number:05}"} for number in range(count - len(told))]
    before, lines = told[0]["run"].encode(), []
    for made in told:
        body = {key: value for key, value in made.items() if key != "seal"}
        lines.append(sealed(json.dumps(body).encode(), before))
        before = lines[-1][-67:-3]
    (target / "rows.jsonl").write_bytes(b"".join(lines))


def _more_log(target: Path, megabytes: int) -> None:
    path = target / "production" / "rank0.log"
    line = b"(EngineCore pid=1) INFO 11-30 12:00:00 [loggers.py:1] Avg generation throughput: 40.0 tokens/s, Running: 4 reqs\n"
    with path.open("ab") as file:
        for _ in range(megabytes * 10):
            file.write(line * (100_000 // len(line)))
    logs = json.loads((target / "logs.json").read_text())
    logs["logs"]["production/rank0.log"]["lines"] = path.read_bytes().count(b"\n")
    logs["logs"]["production/rank0.log"]["bytes"] = path.stat().st_size
    (target / "logs.json").write_text(json.dumps(logs, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
