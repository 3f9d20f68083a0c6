"""GSM8K's first 200 questions on two emulated ranks: one at a time, and 16 at a time, in one run.

    python benchmarks/questions.py --data DIR

DIR holds the official file (`dspark data gsm8k`). The emulated model knows it by heart, so what is measured is how full our own
threads keep an engine that takes 16 sequences, rows on the disk included. Prints one line and ends with code 1 if 16 at a time
take more than 0.15 of the time of one at a time, or if an answer is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_dspark import datasets, setup
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import DsparkError
from pytest_dspark.evidence import Case, new_run
from pytest_dspark.live import Live
from pytest_dspark.parts import Part, Parts
from pytest_dspark.tally import ask_set, judge_part

ROOT = Path(__file__).parents[1]
LIMIT = 0.15
STREAMS = 16
READY_S = 60.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def cluster(folder: Path, data: Path) -> Path:
    """Two emulated ranks with ports of their own; the head knows the file by heart."""
    bundle, path = ROOT / "pytest_dspark" / "rehearsal", folder / "cluster.toml"
    lines = ['name = "questions"', 'recipe = "rehearsal"', f"port = {free_port()}", f"master_port = {free_port()}"]
    for number in (1, 2):
        lines += ["[[host]]", f'name = "host-{number}"', "process = true", f'address = "127.0.0.{number}"']
        lines += [f"bundle = {json.dumps(str(bundle))}", f"model = {json.dumps(str(bundle / 'model'))}"]
        lines += ["[host.env]", f"REHEARSAL_KNOWS = {json.dumps(str(data / datasets.GSM8K.file))}"]
    path.write_text("\n".join(lines) + "\n")
    return path


@contextmanager
def engine(folder: Path, data: Path) -> Iterator[Endpoint]:
    """Both ranks of the production profile, up and answering."""
    plan = setup.make_plans(setup.Options(ROOT, str(cluster(folder, data))), ["production"])["production"]
    ranks = []
    try:
        for spec in sorted(plan.specs, key=lambda one: -one.rank):
            env = {"PATH": os.environ["PATH"], **dict(spec.env)}
            with (folder / f"rank{spec.rank}.log").open("wb") as log:
                ranks.append(subprocess.Popen(spec.argv, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        endpoint = Endpoint(plan.base_url, plan.served_model)
        _wait(endpoint, ranks)
        yield endpoint
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _wait(endpoint: Endpoint, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + READY_S
    while True:
        try:
            endpoint.generate_one(deadline_s=5)
            return
        except DsparkError as error:
            if time.monotonic() > until or any(rank.poll() is not None for rank in ranks):
                raise SystemExit(f"the ranks did not get ready: {error}") from error
            time.sleep(0.05)


def asked(endpoint: Endpoint, folder: Path, data: Path, streams: int) -> tuple[list[Part], float]:
    """All 200 with so many threads: the parts and the seconds."""
    run = new_run(folder / f"evidence-{streams}")
    case = Case(run.run_id, "questions", "gsm8k", "gsm8k", "production", "rehearsal", "")
    settings = {"thinking": False, "max_tokens": 1024, "deadline_s": 60.0}
    parts = Parts(run, replace(case), judge_part, settings)
    made, told = ask_set(endpoint, settings, datasets.gsm8k(data, 200), parts, streams, Live())
    return made, float(told["elapsed_s"] or "nan")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=datasets.data_folder(), help="where the question sets lie")
    data = parser.parse_args(argv).data.absolute()
    with tempfile.TemporaryDirectory() as name, engine(Path(name), data) as endpoint:
        serial, serial_s = asked(endpoint, Path(name), data, 1)
        full, full_s = asked(endpoint, Path(name), data, STREAMS)
    right = [sum(part.verdict.passed for part in made) for made in (serial, full)]
    ratio = full_s / serial_s
    print(
        f"200 questions: {serial_s:.2f} s one at a time, {full_s:.2f} s {STREAMS} at a time, ratio {ratio:.3f}; right {right}"
    )
    return 0 if ratio <= LIMIT and right == [200, 200] else 1


if __name__ == "__main__":
    sys.exit(main())
