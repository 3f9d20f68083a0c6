"""Faults on two real hosts: real Docker, real ssh, real vLLM. Runs inside the head host, after `make lab`.

Each case starts pytest as an operator does and reads what it leaves: exit code, words, rows, and both hosts' containers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "lab" / "cluster.toml"
WORKER = "root@10.77.0.2"
NAME = "dspark_vllm"
RECIPE = ROOT / "recipe" / "lab-smollm2.toml"

pytestmark = pytest.mark.skipif(not CLUSTER.exists(), reason="lab/cluster.toml is not there: run `make lab` first")


def docker(host: str, *words: str) -> str:
    """Docker on one of the hosts; the worker's over the real ssh."""
    command = (
        ["docker", *words]
        if host == "head"
        else ["ssh", "-o", "BatchMode=yes", WORKER, *(f"'{word}'" for word in ("docker", *words))]
    )
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout.strip()


def containers() -> dict[str, str]:
    return {host: docker(host, "ps", "-a", "--format", "{{.Names}} {{.Status}}") for host in ("head", "worker")}


def vllm_processes() -> list[str]:
    """Processes of either host's ranks that any namespace of this host can see (head) or ssh reports (worker)."""
    seen = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False).stdout
    seen += subprocess.run(
        ["ssh", "-o", "BatchMode=yes", WORKER, "ps", "-eo", "args"], capture_output=True, text=True, check=False
    ).stdout
    return [line for line in seen.splitlines() if re.search(r"vllm serve|VLLM::|multiprocessing.spawn", line)]


def assert_both_empty() -> None:
    assert containers() == {"head": "", "worker": ""}
    assert vllm_processes() == []


class Session:
    """One pytest of an operator, its output, and its run folder."""

    def __init__(self, tmp_path: Path, *args: str, mark: str = "production") -> None:
        self.out = tmp_path / "out"
        self.log = tmp_path / "stderr.txt"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            mark,
            "--dspark-out",
            str(self.out),
            "suites",
            "-p",
            "no:cacheprovider",
            *args,
        ]
        if "--dspark-cluster" not in args:
            command += ["--dspark-cluster", str(CLUSTER)]
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str, seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert self.process.poll() is None, f"ended before {words!r}:\n{self.text[-3000:]}"
            assert time.monotonic() < deadline, f"no {words!r} in {seconds} s:\n{self.text[-3000:]}"
            time.sleep(0.2)

    def end(self, seconds: float = 300.0) -> int:
        return self.process.wait(timeout=seconds)

    @property
    def folder(self) -> Path:
        (folder,) = (self.out / "runs").iterdir()
        return folder

    def rows(self) -> list[dict]:
        """The rows of test cases, without those of single questions."""
        path = self.folder / "rows.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if row["part"] is None]

    def verdicts(self) -> dict[str, str]:
        return {row["check"]: row["verdict"] for row in self.rows()}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Session]]:
    sessions: list[Session] = []
    yield sessions
    for session in sessions:
        if session.process.poll() is None:
            session.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                session.process.wait(timeout=90)
                continue
            session.process.kill()


def refused(tmp_path: Path, words: str, *args: str, code: int = 1) -> Session:
    """A session that must refuse: its exit code, one clear sentence, and nothing created."""
    session = Session(tmp_path, *args)
    assert session.end() == code, session.text[-3000:]
    assert words in session.text, session.text[-3000:]
    return session


def recipe_copy(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """The lab's recipes in a folder of their own, with changes to lab-smollm2."""
    folder = tmp_path / "recipe"
    shutil.copytree(RECIPE.parent, folder)
    path = folder / RECIPE.name
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def profile_copy(tmp_path: Path, **knobs: str) -> Path:
    lines = (ROOT / "profiles" / "lab-smollm2.env").read_text().splitlines()
    for key, value in knobs.items():
        lines = [line for line in lines if not line.startswith(f"{key}=")] + [f"{key}={value}"]
    path = tmp_path / "changed.env"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def twins() -> Iterator[str]:
    """An image name that means another image on each host."""
    reference = "dspark-lab-fault:1"
    for host, label in (("head", "one"), ("worker", "two")):
        script = f"mkdir -p /tmp/fault && echo {label} > /tmp/fault/f && tar -C /tmp/fault -c f | docker import --change 'LABEL which={label}' - {reference}"
        where = ["bash", "-c", script] if host == "head" else ["ssh", "-o", "BatchMode=yes", WORKER, script]
        subprocess.run(where, check=True, capture_output=True, timeout=60)
    yield reference
    for host in ("head", "worker"):
        docker(host, "rmi", "-f", reference)


# --- refused before anything is created


def test_another_image_on_one_host(tmp_path, twins):
    (recipe_copy(tmp_path).parent / "lab-smollm2.overlay.toml").unlink()
    profile = profile_copy(tmp_path, DSPARK_VLLM_IMAGE=twins)
    session = refused(
        tmp_path,
        "IDENTITY_MISMATCH: gb-worker: image is sha256:",
        "--dspark-recipe",
        str(tmp_path / "recipe" / RECIPE.name),
        "--dspark-profile",
        str(profile),
    )
    assert set(session.verdicts().values()) == {"ERROR", "BLOCKED"} and session.verdicts()["launch"] == "ERROR"
    assert_both_empty()


def test_a_label_that_is_not_the_pinned_one(tmp_path):
    path = recipe_copy(tmp_path)
    overlay = path.with_suffix(".overlay.toml")
    overlay.write_text(overlay.read_text() + '"org.example.changed" = "expected"\n')
    refused(tmp_path, "image label org.example.changed is None", "--dspark-recipe", str(path))
    assert_both_empty()


def test_a_dirty_wrapper_tree(tmp_path):
    path = recipe_copy(tmp_path, ('wrapper = "any"', 'wrapper = "clean"'))
    tree = tmp_path / "tree"
    tree.mkdir()
    shutil.copy(ROOT / "profiles" / "lab-smollm2.env", tree)
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    refused(tmp_path, "WRAPPER_DIRTY", "--dspark-recipe", str(path), "--dspark-profile", str(tree / "lab-smollm2.env"))
    assert_both_empty()


def test_a_port_in_use(tmp_path):
    with socket.create_server(("0.0.0.0", 8888)):
        refused(tmp_path, "PORT_TAKEN: gb-head: API port 8888 is in use by")
    assert_both_empty()


def test_an_unknown_knob(tmp_path):
    profile = profile_copy(tmp_path, MAX_NUM_SEQ="16")
    session = refused(tmp_path, "unknown knob MAX_NUM_SEQ", "--dspark-profile", str(profile), code=4)
    assert not session.out.exists(), "a usage error leaves no run"
    assert_both_empty()


def test_a_foreign_container_of_our_name(tmp_path, twins):
    docker("worker", "create", "--name", NAME, twins, "/f")
    try:
        refused(tmp_path, f"NAME_TAKEN: gb-worker: {NAME}")
        assert containers()["worker"].startswith(NAME), "the foreign container was touched"
    finally:
        docker("worker", "rm", "-f", NAME)
    assert_both_empty()


def test_a_worker_that_exits_at_once(tmp_path):
    path = recipe_copy(
        tmp_path, ("[serve.options]", 'argv_worker = [["--headless", "--no-such-flag"]]\n\n[serve.options]')
    )
    session = refused(tmp_path, "RANK_EXITED: rank 1 (gb-worker)", "--dspark-recipe", str(path))
    assert "no-such-flag" in (session.folder / "production" / "rank1.log").read_text()
    assert session.verdicts()["launch"] == "ERROR"
    assert_both_empty()


# --- a window that this model cannot read to its end


def test_a_needle_that_the_model_misses_is_its_failure_and_nothing_else(tmp_path):
    session = Session(tmp_path, "--dspark-profile", "lab-smollm2", mark="long1m")
    assert session.end(seconds=480.0) == 1, session.text[-3000:]
    rows = {row["check"]: row for row in session.rows()}
    needles = {check: row["verdict"] for check, row in rows.items() if check.startswith("needle.")}
    # What it says differs from session to session: it may go on until its budget ends, with the code or without it.
    half, most = needles.pop("needle.50pct"), needles.pop("needle.90pct")
    assert needles == {"needle.25pct": "PASS"} and half in ("PASS", "TOKEN_LIMIT") and most in ("FAIL", "TOKEN_LIMIT")
    others = {check: row["verdict"] for check, row in rows.items() if not check.startswith("needle.")}
    assert {check for check, verdict in others.items() if verdict != "PASS"} == {"gate.frozen", "gate.behaviour"}
    assert {others["gate.frozen"], others["gate.behaviour"]} == {"NOT_IMPLEMENTED"}, "nothing is frozen here"
    for percent, tokens in ((25, 2032), (50, 4064), (90, 7315)):
        finding = rows[f"needle.{percent}pct"]["finding"]
        assert finding["planned_tokens"] == finding["reply"]["prompt_tokens"] == tokens
    junit = (session.folder / "junit.xml").read_text()
    assert 'errors="0"' in junit and f'failures="{1 + (half != "PASS")}"' in junit
    assert_both_empty()


# --- signals


@pytest.mark.parametrize(
    ("number", "workers", "times"),
    [(signal.SIGINT, "0", 1), (signal.SIGINT, "2", 2), (signal.SIGTERM, "0", 1)],
    ids=["int-n0", "int-twice-n2", "term-n0"],
)
def test_a_signal_during_the_launch(tmp_path, started, number, workers, times):
    session = Session(tmp_path, "-n", workers)
    started.append(session)
    session.wait_for("starting rank 0 on gb-head")
    for _ in range(times):
        session.process.send_signal(number)
        time.sleep(0.5)
    assert session.end() == 2, session.text[-3000:]
    assert (session.folder / "junit.xml").exists()
    assert json.loads((session.folder / "run.json").read_text())["status"] == "interrupted"
    assert_both_empty()


def test_ctrl_c_during_a_check(tmp_path, started):
    session = Session(tmp_path, "-k", "launch or test_stream or arithmetic")
    started.append(session)
    session.wait_for("engine proven and ready")
    time.sleep(5)
    session.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    session.process.send_signal(signal.SIGINT)
    assert session.end() == 2, session.text[-3000:]
    assert session.verdicts()["launch"] == "PASS"
    assert_both_empty()


# --- a rank is killed while it answers


def test_rank_1_is_killed_in_a_stream(tmp_path, started):
    session = Session(tmp_path, "-k", "launch or test_stream or arithmetic or json")
    started.append(session)
    session.wait_for("engine proven and ready")
    time.sleep(4)
    docker("worker", "kill", NAME)
    killed = time.monotonic()
    session.wait_for("RANK_EXITED: rank 1 (gb-worker)", seconds=20)
    noticed = time.monotonic() - killed
    assert session.end() == 1
    rows = {row["check"]: row for row in session.rows()}
    assert (rows["correctness.stream"]["verdict"], rows["correctness.stream"]["code"]) == ("ERROR", "RANK_EXITED")
    assert "rank 1" in rows["correctness.stream"]["message"]
    assert rows["correctness.arithmetic"]["verdict"] == rows["correctness.json"]["verdict"] == "BLOCKED"
    assert not {row["verdict"] for row in session.rows()} & {"FAIL", "TOKEN_LIMIT"}, (
        "a model was blamed for a dead rank"
    )
    assert 'failures="0"' in (session.folder / "junit.xml").read_text()
    print(f"noticed {noticed:.2f} s after docker kill returned")
    assert noticed < 2.0
    assert_both_empty()


def test_environment_is_the_head_host():
    assert os.uname().nodename == "gb-head", "run this inside the head host: make lab-full"
