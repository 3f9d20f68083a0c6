"""The memory of the hosts' GPUs before the launch and after the stop: what a rank took must be back. And whether they work.

Read with `nvidia-smi` on the host itself. Where it is missing, or does not tell (a GPU that shares the machine's memory
reports none of its own), memory is not observable, and the reason is kept: it is never taken for returned.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_dspark.cluster import Host, HostEntry
from pytest_dspark.errors import DsparkError

# A wedged driver hangs nvidia-smi: it is ended on the host itself, since a given-up ssh command would go on there.
BOUNDED = ("timeout", "-k", "1")
FORMAT = "--format=csv,noheader,nounits"
QUERY = (*BOUNDED, "15", "nvidia-smi", "--query-gpu=index,memory.used", FORMAT)
DRAW = (*BOUNDED, "4", "nvidia-smi", "--query-gpu=power.draw,utilization.gpu", FORMAT)
BUSY = 90.0
"""Percent from which a GPU says that it is busy: one that waits in a collective says 96 and more."""
SETTLE_S = 10.0
LOOK_S = 0.5
_NUMBER = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?")
MOST_MIB = 256
"""More than this above the reading before the launch is memory that was not given back."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """MiB in use by the index of the GPU; empty with the reason where that cannot be observed."""

    used_mib: Mapping[str, int]
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"used_mib": dict(self.used_mib), "reason": self.reason or None}


@dataclass(frozen=True, slots=True)
class Draw:
    """What one GPU draws in watts, and the percent of the time in which something ran on it."""

    watts: float
    busy: float


def read_draws(host: Host, entry: HostEntry) -> tuple[Draw, ...]:
    """Of each GPU of the rank, or nothing if one of them does not tell. Raises HOST_UNREACHABLE."""
    done = host.read(_of(DRAW, entry), timeout=6.0)
    lines = [line.partition(",") for line in done.text.splitlines() if line.strip()] if done.code == 0 else []
    if not all(_NUMBER.fullmatch(word.strip()) for watts, _, busy in lines for word in (watts, busy)):
        return ()
    return tuple(Draw(float(watts), float(busy)) for watts, _, busy in lines)


def spinning(draws: Sequence[Draw], spin_w: float) -> bool:
    """Whether every GPU says that it is busy, at a power at which it computes nothing."""
    return bool(draws) and all(one.busy >= BUSY and one.watts <= spin_w for one in draws)


def _of(query: Sequence[str], entry: HostEntry) -> list[str]:
    chosen = visible(entry)
    return [*query, *(("-i", ",".join(chosen)) if chosen else ())]


def visible(entry: HostEntry) -> tuple[str, ...]:
    """The GPUs that the rank of this host is given by CUDA_VISIBLE_DEVICES; none named means all of them."""
    words = [word.strip() for word in dict(entry.env).get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return tuple(words) if words and all(word.isdigit() for word in words) else ()


def read_gpus(host: Host, entry: HostEntry) -> Gpus:
    """What the host's GPUs hold now. Never raises: what went wrong is the reason."""
    try:
        done = host.read(_of(QUERY, entry), timeout=20.0)
    except DsparkError as error:
        return Gpus({}, str(error))
    if done.code:
        said = (done.stderr.decode("utf-8", "replace").strip() or done.text.strip())[:200]
        return Gpus({}, f"{host.name}: nvidia-smi ended with code {done.code}: {said}")
    return _read(host.name, done.text)


def _read(host: str, text: str) -> Gpus:
    """Lines `index, MiB`; one that is not is the reason for all."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        index, _, used = (word.strip() for word in line.partition(","))
        if not (index.isdigit() and used.isdigit()):
            return Gpus({}, f"{host}: nvidia-smi tells no used memory, found {line.strip()!r}")
        found[index] = int(used)
    return Gpus(found) if found else Gpus({}, f"{host}: nvidia-smi lists no GPU")


def memory_back(
    hosts: Mapping[str, Host],
    entries: Sequence[HostEntry],
    before: Mapping[str, Mapping[str, Any]],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[dict[str, Any]]:
    """One entry a host with MiB before and after; waits up to ten seconds for the driver to have taken it back.

    `before` is what `read_gpus` gave for each host while nothing of the engine was up.
    """
    deadline = clock() + SETTLE_S
    while True:
        rows = [_row(hosts[entry.name], entry, before.get(entry.name)) for entry in entries]
        if not any(list(held(row)) for row in rows) or clock() > deadline:
            return rows
        sleep(LOOK_S)


def _row(host: Host, entry: HostEntry, before: Mapping[str, Any] | None) -> dict[str, Any]:
    if before is None:
        return {"host": host.name, "before": None, "after": None, "reason": "no reading before the launch"}
    if before["reason"]:
        return {"host": host.name, "before": None, "after": None, "reason": before["reason"]}
    after = read_gpus(host, entry)
    return {
        "host": host.name,
        "before": dict(before["used_mib"]),
        "after": None if after.reason else dict(after.used_mib),
        "reason": after.reason or None,
    }


def held(row: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about memory that is not back. One that could be read before and cannot any more is not back either."""
    before, after = row["before"], row["after"]
    if before is None:
        return
    if after is None:
        yield f"{row['host']}: GPU memory could be read before the launch and not after the stop: {row['reason']}"
        return
    for index, start in before.items():
        now = after.get(index)
        if now is None or now > start + MOST_MIB:
            yield f"{row['host']}: GPU {index} holds {now} MiB, {start} MiB were held before the launch"
