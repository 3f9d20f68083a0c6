"""A rank's log as a file: the sink always holds the whole log so far, from the rank's birth."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

POLL_S = 0.1


def link_or_none(log: Path, sink: Path) -> bool:
    """Give the growing log file a second name, in place of whatever the sink was. False if that cannot be done here."""
    sink.parent.mkdir(parents=True, exist_ok=True)
    if sink.exists() and log.exists() and sink.samefile(log):
        return True
    name = _beside(sink)
    try:
        os.link(log, name)
    except OSError:
        return False
    name.replace(sink)
    return True


def copy_growing(log: Path, sink: Path, over: Callable[[], bool]) -> None:
    """Copy the log from its first byte and go on until `over()`, and once more after it; ends early if a file is removed."""
    with suppress(FileNotFoundError), log.open("rb") as source:
        sink.write_bytes(b"")
        last = False
        while not last:
            last = over()
            with sink.open("ab") as target:
                source.seek(target.tell())
                shutil.copyfileobj(source, target)
            time.sleep(0 if last else POLL_S)


def save_longer(log: Path, sink: Path) -> None:
    """The whole log into the sink, unless the sink holds more already. Raises OSError."""
    sink.parent.mkdir(parents=True, exist_ok=True)
    if sink.exists() and (sink.samefile(log) or sink.stat().st_size > log.stat().st_size):
        return
    whole = _beside(sink)
    shutil.copyfile(log, whole)
    whole.replace(sink)


def save_longer_stream(chunks: Iterable[bytes], sink: Path) -> None:
    """The same for a log that comes in pieces."""
    sink.parent.mkdir(parents=True, exist_ok=True)
    whole = _beside(sink)
    try:
        with whole.open("wb") as file:
            file.writelines(chunks)
        if not sink.exists() or sink.stat().st_size <= whole.stat().st_size:
            whole.replace(sink)
    finally:
        whole.unlink(missing_ok=True)


ROTATED = b"\n[dspark] the host's log begins anew here: it was rotated, and something before this line may be missing\n"


class LogSink:
    """A file that holds a log of which the whole can be fetched again at any time.

    Whoever writes gives the position in the log: bytes that are there already are written over by themselves, so that a
    second fetch leaves neither gap nor duplicate. If the log turns out to be another one, it goes behind what is there.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._base, self._lock = path, 0, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        with self._path.open("r+b", buffering=0) as file:
            yield file

    def put(self, file: IO[bytes], position: int, chunk: bytes) -> int:
        """Write a piece of the log into the opened file; returns the position behind it. Raises OSError."""
        with self._lock:
            file.seek(self._base + position)
            there = file.read(len(chunk))
            if chunk.startswith(there):
                file.seek(self._base + position)
            else:
                file.seek(0, os.SEEK_END)
                file.write(ROTATED)
                self._base = file.tell() - position
            _write(file, chunk)
        return position + len(chunk)


def _write(file: IO[bytes], data: bytes) -> None:
    """All of it: an unbuffered file takes a part where the disk becomes full. Raises OSError for the rest."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
