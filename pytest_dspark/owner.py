"""Who started a rank, in a form that can be shown to be dead: this machine's boot, the process table, and the process in it.

A pid alone proves nothing: it may be of another machine, of a boot ago, or somebody else's by now. The owner is dead only if
it was of this very boot and this very process table, and no process of that number and start time is in it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pytest_dspark.cluster import OWNER_LABEL, RUN_LABEL, RankState

BOOT = Path("/proc/sys/kernel/random/boot_id")


def owner() -> str:
    """This process, as `boot/table/pid/start`; empty where the kernel does not tell."""
    try:
        place = f"{BOOT.read_text(encoding='ascii').strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except (OSError, ValueError):
        return ""
    started = _started(os.getpid())
    return f"{place}/{os.getpid()}/{started}" if started else ""


def _started(pid: int) -> str:
    """The start time of a process that has not ended, in the kernel's clock; empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    words = text[text.rindex(")") + 2 :].split()
    return "" if words[0] in "ZX" else words[19]


def dead(text: str) -> bool:
    """Whether this owner is provably dead. Anything that is not known for sure is not."""
    mine, parts = owner().split("/"), text.split("/")
    if (
        len(mine) != 4
        or len(parts) != 4
        or parts[:2] != mine[:2]
        or not parts[2].isdecimal()
        or not parts[3].isdecimal()
    ):
        return False
    return _started(int(parts[2])) != parts[3]


def take_over(run_id: str) -> socket.socket | None:
    """Say, until this process ends, that it works with the engine of a run whose owner is dead; None if somebody else does.

    A name in the kernel alone: there is no file to be left behind.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0dspark-run-{run_id}")
    except OSError:
        claim.close()
        return None
    return claim


def orphaned(state: RankState) -> bool:
    """Whether a rank carries an owner that is provably dead, and nobody took its engine over."""
    if not dead(state.labels.get(OWNER_LABEL, "")):
        return False
    claim = take_over(state.labels.get(RUN_LABEL, ""))
    if claim is None:
        return False
    claim.close()
    return True
