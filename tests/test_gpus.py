"""GPU memory before the launch and after the stop: what is back, what is held, and what only cannot be seen."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_dspark.checks.teardown import judge
from pytest_dspark.cluster import HostEntry, Output
from pytest_dspark.errors import HostError
from pytest_dspark.gpus import Draw, Gpus, held, memory_back, read_draws, read_gpus, spinning, visible
from pytest_dspark.verdict import Finding, Status

ENTRY = HostEntry("one", "127.0.0.1", process=True, env=(("CUDA_VISIBLE_DEVICES", "1"),))


class Answers:
    """A host that gives these outputs in turn, the last one for ever."""

    name = "one"

    def __init__(self, *outputs: Output | HostError) -> None:
        self.outputs, self.asked = list(outputs), []

    def read(self, argv: list[str], *, timeout: float) -> Output:
        self.asked.append(argv)
        given = self.outputs.pop(0) if len(self.outputs) > 1 else self.outputs[0]
        if isinstance(given, HostError):
            raise given
        return given


def said(text: str) -> Output:
    return Output(0, text.encode(), b"")


def back(host: Answers, before: dict[str, Any]) -> list[dict[str, Any]]:
    ticks = iter(range(1000))
    return memory_back({"one": host}, [ENTRY], before, clock=lambda: float(next(ticks)), sleep=lambda _: None)


def test_only_the_gpus_of_the_rank_are_read():
    host = Answers(said("1, 17004\n"))
    assert read_gpus(host, ENTRY) == Gpus({"1": 17004})
    assert host.asked[0][-2:] == ["-i", "1"]
    assert visible(HostEntry("one", "a", process=True)) == ()
    assert visible(HostEntry("one", "a", process=True, env=(("CUDA_VISIBLE_DEVICES", "GPU-ab,1"),))) == ()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Output(127, b"", b"nvidia-smi: not found"), "code 127: nvidia-smi: not found"),
        (Output(9, b"NVIDIA-SMI has failed", b""), "code 9: NVIDIA-SMI has failed"),
        (said("0, [N/A]\n"), "tells no used memory, found '0, [N/A]'"),
        (said(""), "lists no GPU"),
        (HostError("HOST_UNREACHABLE", "one: gone"), "one: gone"),
    ],
)
def test_what_cannot_be_read_is_a_reason_and_never_a_number(answer, words):
    seen = read_gpus(Answers(answer), ENTRY)
    assert seen.used_mib == {} and words in seen.reason


def test_memory_that_comes_back_late_is_waited_for():
    (row,) = back(Answers(said("1, 17004"), said("1, 9000"), said("1, 100")), {"one": Gpus({"1": 4}).as_json()})
    assert (row["before"], row["after"], list(held(row))) == ({"1": 4}, {"1": 100}, [])


@pytest.mark.parametrize(("used", "good"), [(4, True), (260, True), (261, False), (17004, False)])
def test_memory_that_is_held_is_left_behind(used, good):
    rows = back(Answers(said(f"1, {used}")), {"one": Gpus({"1": 4}).as_json()})
    verdict = judged(rows)
    assert verdict.passed is good
    if not good:
        assert (verdict.status, verdict.code) == (Status.ERROR, "LEFT_BEHIND")
        assert f"one: GPU 1 holds {used} MiB, 4 MiB were held before" in verdict.message


def test_a_gpu_that_cannot_be_read_any_more_is_not_back():
    rows = back(Answers(Output(9, b"lost", b"")), {"one": Gpus({"1": 4}).as_json()})
    assert "could be read before the launch and not after" in judged(rows).message
    gone = back(Answers(said("0, 4")), {"one": Gpus({"1": 4}).as_json()})
    assert "GPU 1 holds None MiB" in judged(gone).message


@pytest.mark.parametrize(
    ("before", "reason"),
    [({}, "no reading before the launch"), ({"one": Gpus({}, "no nvidia-smi").as_json()}, "no nvidia-smi")],
)
def test_what_was_never_seen_is_said_beside_the_pass(before, reason):
    host = Answers(said("1, 17004"))
    verdict = judged(back(host, before))
    assert verdict.passed and verdict.message == f"not observable: GPU memory: {reason}"
    assert host.asked == []


def judged(rows: list[dict[str, Any]]):
    result = {"left_behind": [], "ports_taken": [], "problems": [], "gpu_memory": rows}
    return judge(Finding("teardown", json.loads(json.dumps({"kept": False, "launched": True, "result": result}))), {})


def test_what_a_gpu_draws_is_read_of_the_gpus_of_the_rank():
    host = Answers(said("19.00, 96\n61.5, 100\n"))
    assert read_draws(host, ENTRY) == (Draw(19.0, 96.0), Draw(61.5, 100.0))
    assert host.asked[0][-2:] == ["-i", "1"]


@pytest.mark.parametrize(
    "answer",
    [said(""), said("[N/A], 96\n"), said("19.00, 96\n[Not Supported], 0\n"), said("19.00\n"), Output(127, b"", b"")],
)
def test_a_gpu_that_does_not_say_what_it_draws_is_no_sign(answer):
    assert not spinning(read_draws(Answers(answer), ENTRY), 25.0)


@pytest.mark.parametrize(
    ("draws", "spins"),
    [
        ((Draw(19.0, 96.0),), True),
        ((Draw(19.0, 96.0), Draw(20.0, 100.0)), True),
        ((Draw(19.0, 0.0),), False),
        ((Draw(45.0, 96.0),), False),
        ((Draw(19.0, 96.0), Draw(19.0, 0.0)), False),
    ],
)
def test_spinning_is_busy_at_a_power_that_computes_nothing(draws, spins):
    assert spinning(draws, 25.0) is spins
    assert not spinning(draws, 0.0)
