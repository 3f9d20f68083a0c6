"""What lies inside a rank: packages, libraries, files, kernel, driver, as an interpreter inside it tells."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_dspark import strictjson
from pytest_dspark.cluster import Host
from pytest_dspark.errors import DsparkError
from pytest_dspark.recipe import Inside

SCRIPT = Path(__file__).with_name("inventory_script.py")
READ_S = 300.0


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the interpreter inside the rank said. `missing` says why there is nothing, and then everything else is empty.

    `hashes` are sha256 of every file of the chosen packages, None for a package that is not there.
    """

    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    mapped: Mapping[str, str | None] = field(default_factory=dict)
    installed: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str | None] = field(default_factory=dict)
    extra: Mapping[str, str | None] = field(default_factory=dict)
    hashes: Mapping[str, Mapping[str, str | None] | None] = field(default_factory=dict)
    kernel: str = ""
    driver: str | None = None
    missing: str = ""


NOT_TAKEN = Inventory(missing="the inventory was not taken")


def order(
    inside: Inside, *, paths: Sequence[str], root: int, hashed: Sequence[str] = (), extra: Sequence[str] = ()
) -> str:
    """What the script is asked, as its one argument."""
    return json.dumps(
        {
            "paths": list(paths),
            "libraries": list(inside.libraries),
            "files": list(inside.files),
            "hashed": list(hashed),
            "extra": list(extra),
            "root": root,
        }
    )


def take(host: Host, rank_id: str, python: str, asked: str) -> Inventory:
    """Run the script inside the rank. What goes wrong is data: `missing` says it."""
    try:
        done = host.read_in(rank_id, [python, "-c", SCRIPT.read_text(encoding="utf-8"), asked], timeout=READ_S)
    except DsparkError as error:
        return Inventory(missing=str(error))
    if done.code != 0:
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        return Inventory(missing=f"{python} inside the rank ended with code {done.code}: {said[-1] if said else ''}")
    return parse(done.text)


def parse(text: str) -> Inventory:
    """The script's line as an Inventory; anything else is one without content that says so."""
    try:
        data = strictjson.loads(text.strip().splitlines()[-1])
        if _is_inventory(data):
            return Inventory(**data)
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError):
        pass
    return Inventory(missing=f"the inventory inside the rank printed no inventory: {text[:200]!r}")


def _is_inventory(data: Any) -> bool:
    """Whether every field is of its kind: texts, tables of texts, and one of such tables."""
    tables = {name: data.get(name, {}) for name in ("packages", "mapped", "installed", "files", "extra")}
    hashes = data.get("hashes", {})
    tables |= {f"hashes of {name}": {} if one is None else one for name, one in hashes.items()}
    texts = [data.get(name, "") for name in ("python", "kernel", "driver", "missing")]
    texts += [value for table in tables.values() for value in table.values()]
    return all(isinstance(value, (str, type(None))) for value in texts)
