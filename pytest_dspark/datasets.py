"""Published question sets: where they lie, and that they are the ones they are called. Standard library alone.

A set is known by the sha256 of its official file and by nothing else, and is never replaced by another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_dspark.errors import DsparkError
from pytest_dspark.evidence import default_root
from pytest_dspark.questions import Question

FETCH_S: Final = 60.0
MOST_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Dataset:
    """One file of a published set: its name under the data folder, sha256, official address and number of questions."""

    name: str
    file: str
    sha256: str
    url: str
    questions: int


GSM8K: Final = Dataset(
    "gsm8k",
    "gsm8k/test.jsonl",
    "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl",
    1319,
)
DATASETS: Final = {GSM8K.name: GSM8K}


def data_folder() -> Path:
    """Where question sets lie unless told otherwise: beside the runs, in the user's data folder."""
    return default_root() / "data"


def read(dataset: Dataset, folder: Path) -> bytes:
    """The file's bytes. Raises NOT_IMPLEMENTED if it is absent or not the official one, saying how to get it."""
    path = folder / dataset.file
    how = f"get it with `dspark data {dataset.name} --data {folder}`, or copy {dataset.url} to that path"
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise DsparkError(
            "NOT_IMPLEMENTED", f"{path}: the official {dataset.name} test set is not there; {how}"
        ) from error
    except OSError as error:
        raise DsparkError("NOT_IMPLEMENTED", f"{path}: cannot be read: {error.strerror}; {how}") from error
    problem = _difference(raw, dataset)
    if problem:
        raise DsparkError("NOT_IMPLEMENTED", f"{path}: not the official {dataset.name} test set: {problem}; {how}")
    return raw


def _difference(raw: bytes, dataset: Dataset) -> str:
    found = hashlib.sha256(raw).hexdigest()
    return "" if found == dataset.sha256 else f"sha256 is {found}, expected {dataset.sha256}"


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=FETCH_S) as answer:  # the address is one of DATASETS
        body: bytes = answer.read(MOST_BYTES + 1)
    return body


def fetch(dataset: Dataset, folder: Path, get: Callable[[str], bytes] = _get) -> Path:
    """Bring the official file into the folder, checked before it is there. Raises DATA_UNAVAILABLE."""
    path = folder / dataset.file
    try:
        raw = get(dataset.url)
    except (OSError, ValueError) as error:  # no network, no name, HTTP 404, a proxy's refusal
        text = (
            f"{dataset.url} cannot be fetched: {error}; without a network, copy the file from another machine to {path}"
        )
        raise DsparkError("DATA_UNAVAILABLE", f"{text} (sha256 {dataset.sha256})") from error
    problem = _difference(raw, dataset)
    if problem:
        raise DsparkError(
            "DATA_UNAVAILABLE", f"{dataset.url}: what came is not the official file: {problem}; nothing was kept"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(raw)
        temporary.replace(path)
    except OSError as error:
        raise DsparkError("DATA_UNAVAILABLE", f"{path}: cannot be written: {error.strerror}") from error
    return path


def bfcl_steps(folder: Path) -> str:
    """What to type for an environment of the official BFCL package: it brings 6 GB of packages, so that is the user's to do."""
    venv = folder / "bfcl"
    return "\n".join(
        [
            "# The official package in an environment of its own, about 6 GB. soundfile is missing among its own requirements.",
            f"python3 -m venv {venv}",
            f"{venv}/bin/pip install bfcl-eval soundfile",
            f"# then: --dspark-bfcl {venv}/bin/python, or in the ini file: dspark_bfcl = {venv}/bin/python",
        ]
    )


GSM8K_ENDING: Final = "Work it out step by step. Write as the last line: The answer is <number>."


def gsm8k(folder: Path, subset: int | str) -> tuple[Question, ...]:
    """The first `subset` questions of the official file, or `all`. An id is the number of the question's line."""
    raw = read(GSM8K, folder)
    lines = [line for line in raw.decode("utf-8").splitlines() if line.strip()]
    if len(lines) != GSM8K.questions:
        raise DsparkError("NOT_IMPLEMENTED", f"{folder}: {len(lines)} questions, expected {GSM8K.questions}")
    chosen = lines if subset == "all" else lines[: int(subset)]
    return tuple(_gsm8k_question(number, json.loads(line)) for number, line in enumerate(chosen, 1))


def _gsm8k_question(number: int, told: dict[str, Any]) -> Question:
    expect = told["answer"].rpartition("####")[2].strip().replace(",", "")
    prompt = f"{told['question'].strip()}\n\n{GSM8K_ENDING}"
    sha256 = hashlib.sha256(f"{prompt}\0{expect}".encode()).hexdigest()
    return Question(f"gsm8k-{number:04d}", prompt, expect, sha256)
