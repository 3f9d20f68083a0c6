"""What a run was given, kept in its folder from the first second: recipe, profiles, cluster file, plans, suites, versions.

Copies have the secrets of the run masked like everything else that is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_dspark import provenance
from pytest_dspark.evidence import RunFolder, write_whole
from pytest_dspark.plan import Plan, as_json


def keep(run: RunFolder, plans: Mapping[str, Plan]) -> None:
    """Copy recipe, profiles and cluster file, write the plans and the versions. Raises OSError."""
    for plan in plans.values():
        for name in plan.recipe.sources:
            _copy(run, plan.recipe.folder / name, f"inputs/recipe/{name}")
        _copy(run, Path(plan.profile.path), f"inputs/profiles/{plan.profile.name}.env")
        _copy(run, Path(plan.cluster.source), "inputs/cluster.toml")
        run.write(f"{plan.mark}/plan.json", as_json(plan))
    run.write("versions.json", provenance.versions({}))


def keep_suites(run: RunFolder, suites: Mapping[str, Path]) -> None:
    """Copy the suites that were run, and say their sha256 in versions.json. Raises OSError."""
    for name, path in suites.items():
        _copy(run, path, f"inputs/suites/{name}")
    run.write("versions.json", provenance.versions(suites))


def _copy(run: RunFolder, path: Path, name: str) -> None:
    if not path.is_file():
        return  # a cluster without a file: the rehearsal, --dspark-endpoint
    target = run.path / name
    for folder in (target.parent.parent, target.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
    write_whole(target, str(run.masked(path.read_text(encoding="utf-8"))))
