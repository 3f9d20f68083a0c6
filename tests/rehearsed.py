"""Sessions against emulated ranks: each test has a cluster, ports and an evidence root of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUNDLE = ROOT / "pytest_dspark" / "rehearsal"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Place:
    """Where one test's sessions take place."""

    folder: Path
    port: int = field(default_factory=free_port)
    master_port: int = field(default_factory=free_port)
    bundles: tuple[Path, Path] = (BUNDLE, BUNDLE)
    env: tuple[dict[str, str], dict[str, str]] = field(default_factory=lambda: ({}, {}))
    models: tuple[Path, ...] = ()
    recipe: str = "rehearsal"
    wrapper: str = ""

    @property
    def out(self) -> Path:
        return self.folder / "evidence"

    def cluster(self) -> Path:
        lines = [
            f'name = "test-{self.port}"',
            f'recipe = "{self.recipe}"',
            f"port = {self.port}",
            f"master_port = {self.master_port}",
        ]
        lines += [f'wrapper = "{self.wrapper}"'] if self.wrapper else []
        for number, (bundle, env) in enumerate(zip(self.bundles, self.env, strict=True), 1):
            lines += [
                "[[host]]",
                f'name = "host-{number}"',
                "process = true",
                f'address = "127.0.0.{number}"',
                f'bundle = "{bundle}"',
                f'model = "{self.models[number - 1] if self.models else BUNDLE / "model"}"',
            ]
            lines += [
                "[host.env]",
                *(f"{key} = {json.dumps(value)}" for key, value in ({"REHEARSAL_TIME": "0.001"} | env).items()),
            ]
        path = self.folder / "cluster.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def start(self, *args: str, mark: str = "production", timed: bool = False, asked: bool = False) -> Session:
        """Start pytest on this cluster; the timed lanes take seconds and run only where a test is about them, and so do
        question sets (`asked`; `timed` has both)."""
        left_out = (
            () if timed else ("concurrency", "performance") if asked else ("concurrency", "performance", "dataset")
        )
        mark = " and not ".join((f"({mark})", *left_out))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            mark,
            f"--dspark-cluster={self.cluster()}",
            f"--dspark-out={self.out}",
        ]
        command += ["-p", "no:cacheprovider", "suites", *args]
        log = self.folder / f"log-{time.monotonic_ns()}.txt"
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        return Session(self, process, log)

    def run(self, *args: str, mark: str = "production", timed: bool = False, asked: bool = False) -> Session:
        session = self.start(*args, mark=mark, timed=timed, asked=asked)
        session.end()
        return session

    def living(self) -> list[int]:
        """Processes that carry this cluster's mark."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"DSPARK_CLUSTER=test-{self.port}\0".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found


@dataclass
class Session:
    """One pytest process and what it left."""

    place: Place
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, seconds: float = 90.0) -> int:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"still running after {seconds} s:\n{self.text[-3000:]}") from None

    def wait_for(self, words: str, seconds: float = 40.0) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert self.process.poll() is None, f"ended before {words!r}:\n{self.text[-3000:]}"
            assert time.monotonic() < deadline, f"no {words!r} within {seconds} s:\n{self.text[-3000:]}"
            time.sleep(0.05)

    @property
    def folder(self) -> Path:
        run = self.text.partition("dspark: run ")[2].partition(",")[0]
        return self.place.out / "runs" / run

    def rows(self) -> list[dict]:
        path = self.folder / "rows.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def cases(self) -> list[dict]:
        """The rows of test cases, without those of single questions."""
        return [row for row in self.rows() if row["part"] is None]

    def verdicts(self, profile: str = "production") -> dict[str, str]:
        return {row["check"]: row["verdict"] for row in self.cases() if row["profile"] == profile}

    def run_json(self) -> dict:
        return json.loads((self.folder / "run.json").read_text())
