"""What runs differently in two packs: knobs, pins, what was read of each rank, and by what both were made.

Pure, from what the packs hold. Pseudonyms are of one pack alone, so that only their kind is compared. Standard library alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pytest_dspark.changes import leaves
from pytest_dspark.pack import Pack
from pytest_dspark.projection import PSEUDONYM

_NUMBERED: Final = re.compile(rf"(?<![\w-])({PSEUDONYM.pattern})(?![\w-])")
_GATE: Final = frozenset(
    f"gate.{name}" for name in "image pins labels argv symmetry environment container mounts model weights".split()
) | {"gate.compilation"}
_OWN: Final = re.compile(
    r"host of the rank|marks of the launch|DSPARK_|log marker|made of|HOSTNAME|command line is not"
)
MISSING: Final = "not there"


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is another: what it is, what it was, what it is now."""

    what: str
    was: str
    now: str


def differences(was: Pack, now: Pack) -> list[Change]:
    """Everything that differs, the configuration first."""
    old, new = dict(_told(was)), dict(_told(now))
    keys = [*old, *(key for key in new if key not in old)]
    return [
        Change(key, old.get(key, MISSING), new.get(key, MISSING))
        for key in keys
        if old.get(key, MISSING) != new.get(key, MISSING)
    ]


def _told(pack: Pack) -> Iterator[tuple[str, str]]:
    for mark, settings in pack.settings.items():
        yield f"{mark}: profile", pack.profiles[mark].name
        yield from ((f"{mark}: knob {name}", text) for name, text in sorted(settings.texts.items()))
        yield f"{mark}: ranks", str(len(pack.plans[mark]["ranks"]))
    yield from _gate(pack)
    yield f"recipe {pack.recipe.name}, sha256", pack.recipe.sha256
    yield "pytest-dspark", f"{pack.versions['pytest_dspark']} {pack.versions['commit'] or ''}".strip()
    yield "Python", str(pack.versions["python"])
    yield from ((f"package {name}", str(one)) for name, one in sorted(pack.versions["packages"].items()))


def _gate(pack: Pack) -> Iterator[tuple[str, str]]:
    """What the gate found of every rank; of tables each leaf."""
    for row in pack.tests:
        if row["check"] not in _GATE or not row["finding"]:
            continue
        for one in row["finding"]["comparisons"]:
            if not _OWN.search(one["what"]):
                yield from _leaves(f"{row['profile']}: {one['what']}, {_who(one)}", one["found"])


def _who(one: Mapping[str, Any]) -> str:
    return "API" if one["rank"] is None else f"rank {one['rank']}"


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        yield from ((f"{name}, {path.lstrip('.')}", _plain(one)) for path, one in leaves(dict(value)))
    else:
        yield name, _plain(value)


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return _NUMBERED.sub(lambda match: match[0].rpartition("-")[0], text)
