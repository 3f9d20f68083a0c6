"""A rank loses a process while it answers, and an engine that is not the one asked for: real vLLM on two GPUs.

`DSPARK_GPU` names the folder that machine.py wrote. Each case starts pytest as an operator does and reads what it leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import engines, gpus

ROOT = Path(__file__).parents[2]
PLACE = Path(os.environ.get("DSPARK_GPU", "/nowhere"))
CLUSTER = PLACE / "cluster.toml"
MOST_MIB = 256
NOTICED_S = 2.0

pytestmark = pytest.mark.skipif(not CLUSTER.exists(), reason="no cluster.toml in $DSPARK_GPU: run machine.py first")


def marked(host: str = "") -> dict[int, str]:
    """Living processes of the cluster (of one host) by pid, with how they call themselves."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "environ").read_bytes().split(b"\0")
            alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            ours = b"DSPARK_CLUSTER=gpu" in words and (not host or f"DSPARK_HOST={host}".encode() in words)
            if alive and ours:
                title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(folder.name)] = title.strip()[:80]
    return found


def parent_of(host: str) -> int:
    (pid,) = [pid for pid in marked(host) if os.getsid(pid) == pid]
    return pid


def worker_of(host: str) -> int:
    (pid,) = [pid for pid, title in marked(host).items() if title.startswith("VLLM::Worker")]
    return pid


def holders() -> str:
    """Processes that hold GPU memory, as the driver lists them."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    return subprocess.run(query, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


def assert_all_back() -> None:
    """No process of ours, none of vLLM whoever started it, nobody on a GPU, and its memory as before anything ran."""
    assert marked() == {}
    seen = json.loads((PLACE / "before.json").read_text())
    assert set(engines()) <= set(seen["engines"])
    before = {int(gpu): used for gpu, used in seen["used_mib"].items()}
    now = {int(gpu): used for gpu, used in gpus().items()}
    print("GPU memory in MiB before anything and now:", before, now)
    assert {gpu: used for gpu, used in now.items() if used > before[gpu] + MOST_MIB} == {}
    assert holders() == ""


class Session:
    """One pytest of an operator, its output, and its run folder."""

    def __init__(self, name: str, *args: str, out: Path | None = None) -> None:
        self.out = out or PLACE / "evidence" / name
        self.log = PLACE / f"{name}.log"
        command = [sys.executable, "-m", "pytest", "suites", "-m", "production", "-p", "no:cacheprovider", *args]
        command += ["--dspark-cluster", str(CLUSTER), "--dspark-out", str(self.out)]
        if "PYTEST_DISABLE_PLUGIN_AUTOLOAD" in os.environ:
            command += ["-p", "xdist", "-p", "timeout", "-p", "pytest_dspark.plugin"]
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert self.process.poll() is None, f"ended before {words!r}:\n{self.text[-3000:]}"
            assert time.monotonic() < deadline, f"no {words!r} in {seconds} s:\n{self.text[-3000:]}"
            time.sleep(0.05)

    def end(self, seconds: float = 120.0) -> int:
        return self.process.wait(timeout=seconds)

    @property
    def folder(self) -> Path:
        return self.out / "runs" / self.text.partition("dspark: run ")[2].partition(",")[0]

    def rows(self) -> dict[str, dict]:
        lines = (self.folder / "rows.jsonl").read_text().splitlines()
        return {row["check"]: row for row in map(json.loads, lines)}


@pytest.fixture
def sessions() -> Iterator[list[Session]]:
    """Sessions of a test: whatever happens they are ended, and what they left is stopped."""
    started: list[Session] = []
    yield started
    for session in started:
        if session.process.poll() is None:
            session.process.send_signal(signal.SIGINT)
            try:
                session.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                session.process.kill()
    for session in started:
        stop(session)


def stop(session: Session) -> None:
    command = [sys.executable, "-m", "pytest_dspark.cli", "stop", "--cluster", str(CLUSTER)]
    subprocess.run(
        [*command, "--out", str(session.out), "--run", session.folder.name], cwd=ROOT, check=True, timeout=90
    )


@pytest.mark.parametrize(("who", "keep"), [("worker", "kept"), ("parent", "parent")])
def test_a_process_of_rank_1_is_killed_in_a_stream(who: str, keep: str, sessions: list[Session]) -> None:
    """The first case uses the engine that the comparison kept, if it did; it is proven again in any case."""
    recipe = PLACE / "recipe" / "vllm-process.toml"
    chosen = "launch or test_stream or arithmetic or teardown"
    session = Session(f"kill-{who}", "-k", chosen, "--dspark-recipe", str(recipe), out=PLACE / "evidence" / keep)
    sessions.append(session)
    session.wait_for("engine proven and ready", 300)
    time.sleep(2)
    both = marked()
    print("processes before:", json.dumps(both, indent=1))
    victim = (worker_of if who == "worker" else parent_of)("gpu-1")
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    session.wait_for("rank 1 (gpu-1)", 20)
    noticed = time.monotonic() - killed
    print(f"noticed {noticed:.2f} s after the kill of {victim} ({both[victim]}); still there: {marked('gpu-1')}")
    assert session.end() == 1, session.text[-3000:]
    rows = session.rows()
    print(
        json.dumps(
            {check: [row["verdict"], row["code"], row["message"][:300]] for check, row in rows.items()}, indent=1
        )
    )
    stream = rows["correctness.stream"]
    assert (stream["verdict"], stream["code"] in ("RANK_EXITED", "PROCESS_LOST")) == ("ERROR", True), stream
    assert "rank 1 (gpu-1)" in stream["message"]
    assert rows["correctness.arithmetic"]["verdict"] == "BLOCKED"
    assert not {row["verdict"] for row in rows.values()} & {"FAIL", "TOKEN_LIMIT"}, "a model was blamed for a dead rank"
    assert noticed < NOTICED_S
    assert rows["teardown"]["verdict"] == "PASS", rows["teardown"]
    assert_all_back()


def test_compilation_on_is_refused_by_a_profile_that_pins_it_off(sessions: list[Session]) -> None:
    """The engine runs in mode 3 and is proven to; then the profile that pins mode 0 meets it and must refuse."""
    chosen = ("-k", "launch or test_gate")
    first = Session("compiled", *chosen, "--dspark-profile", "gpu-smollm2-compiled", "--dspark-keep")
    sessions.append(first)
    first.end(400)
    assert "left running as asked" in first.text, first.text[-3000:]
    assert first.rows()["gate.compilation"]["verdict"] == "PASS", "the gate must know mode 3 where it is asked for"
    second = Session("refused", *chosen, "--dspark-profile", "gpu-smollm2", "--dspark-attach")
    sessions.append(second)
    assert second.end() == 1, second.text[-3000:]
    assert "GATE_FAILED" in second.text
    rows = second.rows()
    print(json.dumps({check: [row["verdict"], row["message"][:300]] for check, row in rows.items()}, indent=1))
    assert rows["gate.compilation"]["verdict"] == "ERROR"
    gate = json.loads((second.folder / "production" / "runtime-gate.json").read_text())
    logged = [one for one in gate["requirements"]["compilation"]["comparisons"] if "engine logged" in one["what"]]
    assert [one["found"]["mode"] for one in logged] == [3], (
        "the engine's own log line must say so, not the command line alone"
    )
    missing = [
        one["rank"]
        for one in gate["requirements"]["markers"]["comparisons"]
        if "compile-off" in one["what"] and not one["found"]
    ]
    assert missing == [0, 1]
    stop(first)
    assert_all_back()
