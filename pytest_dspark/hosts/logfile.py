"""A rank's log as a file: the sink always holds the whole log so far, from the rank's birth."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

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
    """The whole log into the sink, unless the sink holds as much or more already. Raises OSError."""
    sink.parent.mkdir(parents=True, exist_ok=True)
    if sink.exists() and sink.stat().st_size >= log.stat().st_size:
        return
    whole = _beside(sink)
    shutil.copyfile(log, whole)
    whole.replace(sink)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
