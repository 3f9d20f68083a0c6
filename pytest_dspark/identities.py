"""Which texts of a run are private names, and of what kind: of its cluster, of what its hosts said, of this machine."""

from __future__ import annotations

import getpass
import json
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pytest_dspark.cluster import HostEntry
from pytest_dspark.plan import Plan

PATH: Final = re.compile(r"(?<![A-Za-z0-9_.:/~-])/[\w.+@~=-]+(?:/[\w.+@~=-]+)*")
VERSION: Final = re.compile(r"\d+(?:\.\d+){3}")
_LONG_ID: Final = re.compile(r"[0-9a-f]{64}|\d+:\d+")


def of_plans(plans: Iterable[Plan]) -> dict[str, str]:
    """What the cluster file tells, host after host, so that the numbers of pseudonyms follow the ranks."""
    found: dict[str, str] = {}
    for plan in plans:
        for entry in plan.cluster.hosts:
            found |= dict(_of_host(entry))
        found |= {plan.cluster.name: "cluster", plan.cluster.container: "container"}
        host = urlsplit(plan.base_url).hostname or ""
        found.setdefault(host, "address")
    return {word: kind for word, kind in found.items() if word}


def _of_host(entry: HostEntry) -> Iterator[tuple[str, str]]:
    yield entry.name, "host"
    yield entry.address, "address"
    yield entry.interface, "interface"
    yield from ((word.partition(":")[0], "device") for word in entry.rdma.split(","))
    yield from ((path, "path") for path in (entry.model, entry.cache, entry.manifest, entry.bundle))
    if entry.docker:
        parts = urlsplit(entry.docker)
        yield parts.username or "", "user"
        yield parts.hostname or "", "host"
        yield parts.path if parts.scheme == "unix" else "", "path"


def of_folder(folder: Path) -> dict[str, str]:
    """What the hosts said of themselves, as the run kept it of one profile."""
    found: dict[str, str] = {}
    for name in ("preflight.json", "runtime-gate.json", "engine.json"):
        found |= dict(_said(_read(folder / name)))
    return found


def _said(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    kinds = {"hostname": "host", "address": "address", "data_root": "path", "tree": "path", "folder": "path"}
    kinds |= {"rank_id": "container", "container_id": "container", "gateway": "address"}
    if isinstance(value, dict):
        for inner, item in value.items():
            yield from _said(item, inner)
    elif isinstance(value, list):
        for item in value:
            yield from _said(item, key)
    elif isinstance(value, str) and value and (key in kinds or _LONG_ID.fullmatch(value)):
        if key in kinds:
            yield value, kinds[key]
        elif key.isdigit():  # engine.json: the id of each rank by its number
            yield value, "container"


def of_machine(run: Path, root: Path) -> dict[str, str]:
    """The machine, the user and the folders of whoever runs pytest."""
    name = socket.gethostname()
    found = {name: "host", name.partition(".")[0]: "host", str(root.resolve()): "path", str(run): "path"}
    found |= {
        str(Path.cwd()): "path",
        str(Path(__file__).parents[1]): "path",
        sys.prefix: "path",
        sys.executable: "path",
    }
    try:
        found |= {getpass.getuser(): "user", str(Path.home()): "path"}
    except (OSError, KeyError, RuntimeError):  # a user without a name or a home
        return found
    return found


def public(run: Path, plans: Mapping[str, Plan]) -> frozenset[str]:
    """Texts that are no private name although they look like one: paths that recipe and profiles name, and versions of
    packages of four numbers, which look like addresses."""
    inputs = run / "inputs"
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in (*inputs.glob("recipe/*.toml"), *inputs.glob("profiles/*.env"))
    )
    versions = {word for mark in plans for word in _versions(_read(run / mark / "runtime-gate.json"))}
    own = {
        path
        for plan in plans.values()
        for entry in plan.cluster.hosts
        for path in (entry.model, entry.cache, entry.bundle)
    }
    return frozenset(set(PATH.findall(text)) | versions) - own


def _versions(gate: Mapping[str, Any]) -> Iterator[str]:
    for one in (gate.get("evidence") or {}).get("identity", {}).values():
        packages = (one.get("inventory") or {}).get("packages") or {}
        yield from (version for version in packages.values() if VERSION.fullmatch(version))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
