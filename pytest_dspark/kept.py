"""Engines left up by `--dspark-keep`, so that a later session on this machine may use one again after proving it.

A kept engine is a small file named by cluster and container. Claiming it renames the file away, so that two sessions never
use one engine; a live run has no such file and is therefore never taken for a kept one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_dspark.evidence import utc_now, write_whole
from pytest_dspark.plan import Plan


@dataclass(frozen=True, slots=True)
class Hold:
    """A session of this machine works with the engine of one cluster and container. The kernel gives it back if it dies."""

    handle: int

    def release(self) -> None:
        with suppress(OSError):
            os.close(self.handle)


@dataclass(frozen=True, slots=True)
class KeptStore:
    """The folder of kept engines, beside the runs."""

    folder: Path

    def _path(self, plan: Plan) -> Path:
        hosts = [(entry.name, entry.docker or "process", entry.address) for entry in plan.cluster.hosts]
        key = json.dumps([plan.cluster.name, plan.specs[0].name, plan.port, hosts])
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"

    def hold(self, plan: Plan) -> Hold | None:
        """Say that this session works with the plan's engine, until released or dead; None if another session does."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self._path(plan).with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        return Hold(handle)

    def keep(self, plan: Plan, run_id: str) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        body = {"run": run_id, "fingerprint": plan.fingerprint, "profile": plan.profile.name, "kept": utc_now()}
        write_whole(self._path(plan), json.dumps(body) + "\n")

    def peek(self, plan: Plan) -> str | None:
        """The run id of a kept engine with this plan's fingerprint; None if there is none."""
        body = self._body(plan)
        return str(body["run"]) if body.get("fingerprint") == plan.fingerprint else None

    def run_of(self, plan: Plan) -> str:
        """The run id of a kept engine of this cluster and container, whatever its plan; empty if there is none."""
        return str(self._body(plan).get("run", ""))

    def _body(self, plan: Plan) -> Mapping[str, Any]:
        try:
            body = json.loads(self._path(plan).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return body if isinstance(body, dict) else {}

    def claim(self, plan: Plan, run_id: str) -> bool:
        """Take the kept engine away from everybody else; False if somebody was faster."""
        path = self._path(plan)
        if self.peek(plan) != run_id:
            return False
        try:
            path.rename(path.with_suffix(".claimed"))
        except OSError:
            return False
        return True

    def forget(self, run_id: str) -> None:
        """Remove what names this run (its engine was stopped by hand)."""
        for path in self.folder.glob("*.json") if self.folder.is_dir() else ():
            if f'"{run_id}"' in path.read_text(encoding="utf-8"):
                path.unlink(missing_ok=True)
