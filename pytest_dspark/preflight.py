"""What makes a launch hopeless or its result void, found before anything is created.

Every host is looked at before any rank is started: reachability, image identity, the name, the ports, the model and the
manifest. Nothing here changes anything on a host.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_dspark import weights
from pytest_dspark.cluster import RUN_LABEL, Host, HostEntry, HostFacts, ImageFacts, RankSpec, RankState
from pytest_dspark.errors import DsparkError, HostError, LaunchError
from pytest_dspark.evidence import work_tree
from pytest_dspark.plan import Plan
from pytest_dspark.weights import Hasher, Model, Placed


@dataclass(frozen=True, slots=True)
class Seen:
    """What preflight learned: facts and image a host, the wrapper tree, and what could not be observed."""

    hosts: Mapping[str, HostFacts]
    images: Mapping[str, ImageFacts]
    wrapper: Mapping[str, Any]
    not_observable: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "hosts": {name: _fields(facts) for name, facts in self.hosts.items()},
            "images": {name: _fields(image) | {"labels": dict(image.labels)} for name, image in self.images.items()},
            "wrapper": dict(self.wrapper),
            "not_observable": list(self.not_observable),
        }


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def preflight(
    plan: Plan,
    hosts: Mapping[str, Host],
    *,
    launching: bool = True,
    git: Callable[[Path], str] | None = None,
    hasher: Hasher | None = None,
) -> Seen:
    """Look at everything; raise LaunchError with the first problem in full and the others behind it.

    `launching` False is for an engine that is up already: then its name and ports are rightly taken.
    """
    wrapper = wrapper_tree(plan, git=git or _git_status)
    facts = {name: host.facts() for name, host in hosts.items()}
    images = {spec.host: hosts[spec.host].image(spec.image or spec.bundle) for spec in plan.specs}
    problems = [
        *wrapper_problems(plan, wrapper),
        *image_problems(plan, images, facts),
        *(problem for spec in plan.specs for problem in _host_problems(plan, spec, hosts[spec.host], launching)),
        *model_problems(plan, placed_models(plan, hosts, hasher)),
    ]
    if problems:
        more = "".join(f"; also: {problem.message}" for problem in problems[1:])
        raise LaunchError(problems[0].code, problems[0].message + more)
    return Seen(facts, images, wrapper, tuple(_unseen(plan)))


def _unseen(plan: Plan) -> Iterator[str]:
    for entry in plan.cluster.hosts:
        if entry.process:
            yield f"{entry.name}: a process host has no container image; its bundle stands for it"


# --- the wrapper tree


def wrapper_tree(plan: Plan, *, git: Callable[[Path], str]) -> dict[str, Any]:
    """The git work tree that holds the profile (or the one the cluster file names) and what is changed in it."""
    start = Path(plan.cluster.wrapper or plan.profile.path).resolve()
    tree = work_tree(start)
    if tree is None:
        return {"tree": None, "changes": [], "head": None}
    lines = git(tree).splitlines()
    return {"tree": str(tree), "head": lines[0] if lines else None, "changes": lines[1:]}


def _git_status(tree: Path) -> str:
    """The commit, then one line a change. Raises WRAPPER_DIRTY if git cannot say."""
    head = _git(tree, "rev-parse", "--verify", "HEAD", fallback="(no commit)")
    return f"{head.strip()}\n{_git(tree, 'status', '--porcelain', '--untracked-files=normal')}"


def _git(tree: Path, *words: str, fallback: str | None = None) -> str:
    try:
        done = subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            "WRAPPER_DIRTY", f"{tree}: git could not say whether the wrapper tree is clean: {error}"
        ) from error
    if done.returncode == 0:
        return done.stdout
    if fallback is not None:
        return fallback
    said = done.stderr.strip()
    raise LaunchError("WRAPPER_DIRTY", f"{tree}: git could not say whether the wrapper tree is clean: {said}")


def wrapper_problems(plan: Plan, wrapper: Mapping[str, Any]) -> Iterator[DsparkError]:
    changes = wrapper["changes"]
    if plan.recipe.wrapper == "clean" and wrapper["tree"] is None:
        where = f"{plan.profile.path} lies in none"
        yield LaunchError("WRAPPER_DIRTY", f"recipe {plan.recipe.name} needs a clean wrapper tree (git), and {where}")
    if plan.recipe.wrapper == "clean" and changes:
        shown = ", ".join(change.strip() for change in changes[:5])
        more = f" and {len(changes) - 5} more" if len(changes) > 5 else ""
        yield LaunchError(
            "WRAPPER_DIRTY",
            f"{wrapper['tree']}: recipe {plan.recipe.name} needs a clean wrapper tree, found {shown}{more}",
        )


# --- identity


def image_problems(
    plan: Plan, images: Mapping[str, ImageFacts], facts: Mapping[str, HostFacts]
) -> Iterator[DsparkError]:
    """Image id, architecture and labels of every host against the pins, and the ids against each other."""
    for host, image in images.items():
        yield from _pin_problems(plan, host, image, facts[host])
    first_host, first = next(iter(images.items()))
    for host, image in images.items():
        if image.image_id != first.image_id:
            yield LaunchError(
                "IDENTITY_MISMATCH",
                f"{host}: image is {image.image_id} ({image.id_kind} digest), {first_host} has {first.image_id} ({first.id_kind} digest)",
            )


def _pin_problems(plan: Plan, host: str, image: ImageFacts, facts: HostFacts) -> Iterator[DsparkError]:
    pins = plan.recipe.pins
    if pins.image_id and image.id_kind != pins.id_kind:
        yield LaunchError(
            "IDENTITY_MISMATCH",
            f"{host}: image id is a {image.id_kind} digest (image store {facts.image_store or 'unknown'}), "
            f"the recipe pins a {pins.id_kind} digest: only like is compared with like",
        )
    elif pins.image_id and image.image_id != pins.image_id:
        yield LaunchError(
            "IDENTITY_MISMATCH", f"{host}: image is {image.image_id}, recipe {plan.recipe.name} pins {pins.image_id}"
        )
    if pins.architecture and image.architecture != pins.architecture:
        yield LaunchError(
            "IDENTITY_MISMATCH", f"{host}: image architecture is {image.architecture}, expected {pins.architecture}"
        )
    yield from _tag_problems(plan, host, image, facts)
    repeated = {label: getattr(pins, pin) for pin, label in plan.recipe.pin_labels if getattr(pins, pin)}
    for key, value in {**repeated, **dict(plan.recipe.labels)}.items():
        found = image.labels.get(key)
        if found != value:
            yield LaunchError(
                "IDENTITY_MISMATCH", f"{host}: image label {key} is {found!r}, recipe {plan.recipe.name} pins {value!r}"
            )


def _tag_problems(plan: Plan, host: str, image: ImageFacts, facts: HostFacts) -> Iterator[DsparkError]:
    """The pinned tag is what the profile asks for and a name of the image; the pinned store is the host's own."""
    tag, store = plan.recipe.pins.image_tag, plan.recipe.pins.image_store
    asked = next(spec.image for spec in plan.specs if spec.host == host)
    if tag and asked and (asked != tag or tag not in image.tags):
        names = ", ".join(image.tags) or "no tag"
        yield LaunchError(
            "IDENTITY_MISMATCH",
            f"{host}: image tag is {asked} ({names} on the host), recipe {plan.recipe.name} pins {tag}",
        )
    if store and facts.image_store and facts.image_store.partition(" (")[0] != store:
        yield LaunchError(
            "IDENTITY_MISMATCH", f"{host}: image store is {facts.image_store}, recipe {plan.recipe.name} pins {store}"
        )


# --- one host


def _host_problems(plan: Plan, spec: RankSpec, host: Host, launching: bool) -> Iterator[DsparkError]:
    entry = plan.cluster.hosts[spec.rank]
    if launching:
        yield from name_problems(host, spec)
    if launching and spec.rank == 0:
        yield from port_problems(host, {"API": plan.port, "rendezvous": plan.master_port})
    yield from _folder_problems(host, entry)
    yield from _pinned_file_problems(plan, host, entry)


def name_problems(host: Host, spec: RankSpec) -> Iterator[DsparkError]:
    """A container or process of our name is somebody else's engine: it is named and left alone."""
    state = host.find(spec.name)
    if state is not None:
        yield LaunchError("NAME_TAKEN", describe_holder(host.name, state))


def describe_holder(host: str, state: RankState) -> str:
    run = state.labels.get(RUN_LABEL)
    owner = f"belongs to run {run} (if that run is dead: dspark stop --run {run})" if run else "is not ours"
    return (
        f"{host}: {state.name} ({state.rank_id[:24]}, {state.status}) is there already and {owner}; it was left alone"
    )


def port_problems(host: Host, ports: Mapping[str, int]) -> Iterator[DsparkError]:
    for purpose, port in ports.items():
        owner = host.listener(port)
        if owner:
            yield LaunchError("PORT_TAKEN", f"{host.name}: {purpose} port {port} is in use by {owner}, expected nobody")


def _folder_problems(host: Host, entry: HostEntry) -> Iterator[DsparkError]:
    if entry.model and host.read(["test", "-d", entry.model]).code != 0:
        yield LaunchError("MODEL_MISSING", f"{host.name}: model folder {entry.model} is not there")


def _pinned_file_problems(plan: Plan, host: Host, entry: HostEntry) -> Iterator[DsparkError]:
    pins = plan.recipe.pins
    if pins.manifest_sha256 and entry.manifest:
        found = file_sha256(host, entry.manifest)
        if found != pins.manifest_sha256:
            yield LaunchError(
                "IDENTITY_MISMATCH",
                f"{host.name}: sha256 of {entry.manifest} is {found}, recipe pins {pins.manifest_sha256}",
            )
    if pins.model_marker and entry.model:
        text = host.read(["cat", f"{entry.model}/{pins.model_marker}"])
        revision = text.text.strip() if text.code == 0 else "not readable"
        if revision != pins.model_revision:
            yield LaunchError(
                "IDENTITY_MISMATCH", f"{host.name}: model revision is {revision}, recipe pins {pins.model_revision}"
            )


# --- the model


def look_at(host: Host, entry: HostEntry, plan: Plan, hasher: Hasher | None) -> Model | None:
    """The host's model folder, hashed if that was asked; None where the cluster file names none."""
    if not entry.model:
        return None
    model = weights.look(host, entry.model, plan.recipe.weights)
    return replace(model, sums=hasher.sums(host, model)) if hasher and not model.problem else model


def placed_models(plan: Plan, hosts: Mapping[str, Host], hasher: Hasher | None) -> list[Placed]:
    """The model folder of every rank; all hosts are looked at at once."""
    with ThreadPoolExecutor(max_workers=len(plan.specs)) as pool:
        entries = plan.cluster.hosts
        jobs = [pool.submit(look_at, hosts[s.host], entries[s.rank], plan, hasher) for s in plan.specs]
        return [Placed(spec.rank, spec.host, job.result()) for spec, job in zip(plan.specs, jobs, strict=True)]


def model_problems(plan: Plan, placed: Sequence[Placed]) -> Iterator[DsparkError]:
    return weights.problems(plan.recipe.weights, weights.sums_of(plan.recipe), placed)


def file_sha256(host: Host, path: str) -> str:
    """sha256 of a file on the host, read there; raises HostError if it cannot be read."""
    done = host.read(["sha256sum", path], timeout=60.0)
    if done.code != 0:
        raise HostError(
            "MODEL_MISSING", f"{host.name}: {path} cannot be read: {done.stderr.decode('utf-8', 'replace').strip()}"
        )
    return done.text.split()[0].lstrip("\\")


def leftovers(hosts: Iterable[Host], run_id: str) -> Sequence[tuple[Host, RankState]]:
    """Everything on the hosts that carries this run's label."""
    return [(host, state) for host in hosts for state in host.owned(RUN_LABEL, run_id)]
