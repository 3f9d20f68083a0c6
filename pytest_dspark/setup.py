"""From options to plans: find and read the files of one invocation. Touches no network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_dspark.cluster import Cluster, HostEntry, load_cluster
from pytest_dspark.errors import ConfigError
from pytest_dspark.freeze import read as read_frozen
from pytest_dspark.plan import Plan, plan
from pytest_dspark.profile import Profile, load_profile
from pytest_dspark.recipe import Recipe, find_recipe, load_recipe

PACKAGE = Path(__file__).parent
DEFAULT_RECIPE = "dspark-sm121"
REHEARSAL = "rehearsal"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one invocation, as given; empty means not given."""

    root: Path
    cluster: str = ""
    recipe: str = ""
    profile: str = ""
    endpoint: str = ""
    model: str = ""
    weights: str = ""
    data: str = ""
    bfcl: str = ""
    r0b0bench: str = ""
    challenge: str = ""


def folders(root: Path, kind: str) -> list[Path]:
    """Where files of a kind (`recipe`, `profiles`) are looked for: the invocation's root, the clone, the package."""
    candidates = [root / kind, PACKAGE.parent / kind, PACKAGE / kind]
    return [folder for folder in dict.fromkeys(candidates) if folder.is_dir()]


def read_cluster(options: Options) -> Cluster | None:
    """The cluster of the invocation: `rehearsal`, a file, or None if none is named."""
    if not options.cluster:
        return None
    return rehearsal_cluster() if options.cluster == REHEARSAL else load_cluster(Path(options.cluster))


def rehearsal_cluster(environ: Mapping[str, str] = os.environ) -> Cluster:
    """Two emulated ranks as local processes on two loopback addresses. `REHEARSAL_*` of the caller reach both."""
    env = tuple(sorted((key, value) for key, value in environ.items() if key.startswith("REHEARSAL_")))
    bundle = str(PACKAGE / "rehearsal")
    hosts = tuple(
        HostEntry(
            name=f"rehearsal-{n}",
            address=f"127.0.0.{n}",
            process=True,
            interface="lo",
            rdma="none",
            bundle=bundle,
            model=str(PACKAGE / "rehearsal" / "model"),
            env=env,
        )
        for n in (1, 2)
    )
    return Cluster(name="rehearsal", hosts=hosts, recipe=REHEARSAL, port=18888, master_port=18900, source="rehearsal")


def read_recipe(options: Options, cluster: Cluster | None) -> Recipe:
    name = options.recipe or (cluster.recipe if cluster else "") or ("vllm" if options.endpoint else DEFAULT_RECIPE)
    return load_recipe(find_recipe(name, folders(options.root, "recipe")))


def read_profile(name: str, options: Options) -> Profile:
    """A profile by path or by name. Raises PROFILE_INVALID listing what there is."""
    if name.endswith(".env"):
        return load_profile(Path(name))
    places = folders(options.root, "profiles")
    for folder in places:
        if (folder / f"{name}.env").is_file():
            return load_profile(folder / f"{name}.env")
    known = sorted({path.stem for folder in places for path in folder.glob("*.env")})
    raise ConfigError("PROFILE_INVALID", f"profile {name!r} is not known, expected a path or one of {', '.join(known)}")


def checked_weights(options: Options) -> str:
    """How the bytes of the weights are compared: `sizes` or `sha256`. Raises USAGE."""
    value = options.weights or "sizes"
    if value not in ("sizes", "sha256"):
        raise ConfigError("USAGE", f"--dspark-weights must be sizes or sha256, found {value!r}")
    return value


def make_plans(options: Options, marks: Iterable[str]) -> dict[str, Plan]:
    """One plan a wanted profile. Raises ConfigError with file, line or host; launches nothing."""
    marks = tuple(marks)
    cluster = read_cluster(options)
    recipe = read_recipe(options, cluster)
    if options.profile and len(marks) != 1:
        raise ConfigError(
            "USAGE", f"--dspark-profile goes with exactly one profile mark, found {', '.join(marks) or 'none'}"
        )
    return {mark: _plan(mark, options, recipe, cluster or endpoint_cluster(options)) for mark in marks}


def _plan(mark: str, options: Options, recipe: Recipe, cluster: Cluster) -> Plan:
    name = options.profile or recipe.profile_of(mark)
    if not name:
        known = ", ".join(name for name, _ in recipe.profiles)
        raise ConfigError("USAGE", f"recipe {recipe.name} has no profile for -m {mark}, expected one of {known}")
    read_frozen(recipe)
    made = plan(read_profile(name, options), recipe, cluster, mark=mark)
    return replace(made, served_model=options.model or made.served_model) if options.endpoint else made


def endpoint_cluster(options: Options) -> Cluster:
    """What stands for the cluster of a server that somebody else runs: one host of which nothing is known."""
    if not options.endpoint:
        raise ConfigError("USAGE", no_cluster(()))
    host = HostEntry(
        name="endpoint",
        address="endpoint",
        docker="unix:///nowhere",
        interface="-",
        rdma="-",
        model="-",
        cache="-",
        manifest="-",
        bundle="-",
    )
    return Cluster(name="endpoint", hosts=(host,), api=options.endpoint, source="--dspark-endpoint")


def no_cluster(marks: Iterable[str]) -> str:
    asked = " and ".join(f"-m {mark}" for mark in marks) or "this run"
    return (
        f"{asked} needs a cluster: --dspark-cluster FILE (your hosts), --dspark-cluster rehearsal (two emulated ranks on this "
        "machine), or --dspark-endpoint URL (any running server; never publishable)"
    )
