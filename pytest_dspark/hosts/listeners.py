"""Who listens on a TCP port, from the kernel's own tables `/proc/net/tcp` and `/proc/net/tcp6`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from pytest_dspark.hosts.proctable import PROC

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTEN = "0A"


def listening_inodes(text: str, port: int) -> frozenset[str]:
    """The socket inodes that listen on the port, from the text of one or both tables."""
    rows = (line.split() for line in text.splitlines())
    return frozenset(
        row[9]
        for row in rows
        if len(row) > 9 and row[3] == _LISTEN and row[1].rpartition(":")[2].upper() == f"{port:04X}"
    )


def local_owner(inodes: Iterable[str]) -> str:
    """`name (pid N)` of a process on this machine that holds one of the sockets; `unknown` if none may be seen."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for pid in filter(str.isdigit, os.listdir(PROC)):
        if wanted & _open_files(pid):
            return f"{_name(pid)} (pid {pid})"
    return "unknown"


def _open_files(pid: str) -> set[str]:
    found: set[str] = set()
    with suppress(OSError):
        for handle in os.scandir(PROC / pid / "fd"):
            with suppress(OSError):
                found.add(os.readlink(handle.path))
    return found


def _name(pid: str) -> str:
    try:
        return (PROC / pid / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "unknown"


def owner_from_ss(text: str) -> str:
    """`name (pid N)` from `ss -ltnpH`; `unknown` if it does not say."""
    _, found, users = text.partition('users:(("')
    if not found:
        return "unknown"
    name, _, rest = users.partition('"')
    pid = rest.partition("pid=")[2].partition(",")[0]
    return f"{name} (pid {pid})" if pid.isdigit() else name
