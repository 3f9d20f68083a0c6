"""What makes a launch hopeless or its result void, found before anything is created.

Every host is looked at before any rank is started: reachability, image identity, the name, the ports, the model and the
manifest. Nothing here changes anything on a host.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_dspark import conditions, weights
from pytest_dspark.cluster import RUN_LABEL, Host, HostEntry, HostFacts, ImageFacts, RankSpec, RankState
from pytest_dspark.conditions import Row, parity
from pytest_dspark.errors import DsparkError, HostError, LaunchError
from pytest_dspark.evidence import work_tree
from pytest_dspark.gpus import Gpus, read_gpus
from pytest_dspark.plan import Plan
from pytest_dspark.weights import Hasher, Model, Placed


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything that was looked at: the rows of all looks, facts and image a host, the wrapper tree."""

    rows: tuple[Row, ...]
    hosts: Mapping[str, HostFacts]
    images: Mapping[str, ImageFacts]
    wrapper: Mapping[str, Any]
    gpus: Mapping[str, Gpus]
    not_observable: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "hosts": {name: _fields(facts) for name, facts in self.hosts.items()},
            "images": {name: _fields(image) | {"labels": dict(image.labels)} for name, image in self.images.items()},
            "wrapper": dict(self.wrapper),
            "looks": [row.as_json() for row in self.rows],
            "gpus": {name: gpus.as_json() for name, gpus in self.gpus.items()},
            "not_observable": list(self.not_observable),
        }

    def warnings(self) -> Iterator[str]:
        """What is not as it should be and does not refuse."""
        return (_with_host(row) for row in self.rows if row.state == "amber")


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def refuse(seen: Survey) -> None:
    """Raise LaunchError if anything is red: the first in full and the others behind it."""
    red = [row for row in seen.rows if row.state == "red"]
    if red:
        raise LaunchError(red[0].code, _with_host(red[0]) + "".join(f"; also: {_with_host(row)}" for row in red[1:]))


def _with_host(row: Row) -> str:
    return f"{row.host}: {row.message}" if row.host else row.message


@dataclass(frozen=True, slots=True)
class _Looked:
    """One host: facts and image if it was reached, and the rows of what was looked at."""

    rows: tuple[Row, ...]
    facts: HostFacts | None = None
    image: ImageFacts | None = None


def survey(
    plan: Plan,
    hosts: Mapping[str, Host],
    *,
    launching: bool = True,
    git: Callable[[Path], str] | None = None,
    hasher: Hasher | None = None,
) -> Survey:
    """Look at every host at once, then at what they have in common. Raises nothing that a host does.

    `launching` False is for an engine that is up already: then its name and ports are rightly taken.
    """
    wrapper, rows = _wrapper_row(plan, git or _git_status)
    with ThreadPoolExecutor(max_workers=len(plan.specs)) as pool:
        jobs = {s.host: pool.submit(_look, plan, s, hosts[s.host], launching) for s in plan.specs}
        looked = {name: job.result() for name, job in jobs.items()}
    facts = {name: one.facts for name, one in looked.items() if one.facts}
    images = {name: one.image for name, one in looked.items() if one.image}
    reached = {name: hosts[name] for name in facts}
    rows += [row for one in looked.values() for row in one.rows]
    rows += _image_rows(plan, images, facts) + _model_rows(plan, reached, hasher)
    rows += parity(plan, facts, {name: _driver(host) for name, host in reached.items()})
    ordered = sorted(rows, key=lambda row: ORDER.index(row.check) if row.check in ORDER else len(ORDER))
    gpus = {e.name: read_gpus(reached[e.name], e) for e in plan.cluster.hosts if launching and e.name in reached}
    return Survey(tuple(ordered), facts, images, wrapper, gpus, tuple(_unseen(plan, gpus)))


ORDER = ("reach", "wrapper", "image", "name", "ports", "pinned files", "model")


def _judged(check: str, host: str, problems: Iterable[DsparkError], good: str) -> list[Row]:
    """A red row a problem, or one green row."""
    red = [Row(check, host, "red", p.message.removeprefix(f"{host}: "), p.code) for p in problems]
    return red or [Row(check, host, "green", good)]


def _caught(check: str, host: str, look: Callable[[], Iterable[DsparkError]], good: str) -> list[Row]:
    """The same for looks at a host that may stop answering."""
    try:
        return _judged(check, host, list(look()), good)
    except HostError as error:
        return _judged(check, host, [error], good)


def _look(plan: Plan, spec: RankSpec, host: Host, launching: bool) -> _Looked:
    """One host, from reaching it to its fabric. A host that cannot be reached has that row alone."""
    try:
        facts = host.facts()
        now = host.read(["true"])
    except HostError as error:
        return _Looked(tuple(_judged("reach", host.name, [error], "")))
    what = f"docker {facts.docker_version}, API {facts.api_version}, store {facts.image_store}, " if spec.image else ""
    reach = Row(
        "reach", host.name, "green" if now.code == 0 else "red", f"{what}kernel {facts.kernel}", "HOST_UNREACHABLE"
    )
    rows = [replace(reach, code="") if reach.state == "green" else reach]
    image: ImageFacts | None = None
    try:
        image = host.image(spec.image or spec.bundle)
    except HostError as error:
        rows += _judged("image", host.name, [error], "")
    entry = plan.cluster.hosts[spec.rank]
    if launching:
        rows += _caught("name", host.name, lambda: name_problems(host, spec), f"nobody is called {spec.name}")
    if launching and spec.rank == 0:
        ports = {"API": plan.port, "rendezvous": plan.master_port}
        rows += _caught(
            "ports", host.name, lambda: port_problems(host, ports), f"ports {plan.port} and {plan.master_port} are free"
        )
    rows += _caught(
        "pinned files", host.name, lambda: _pinned_file_problems(plan, host, entry), "as pinned, or not pinned"
    )
    return _Looked((*rows, *conditions.rows(plan, spec, host, launching=launching)), facts, image)


def _wrapper_row(plan: Plan, git: Callable[[Path], str]) -> tuple[dict[str, Any], list[Row]]:
    try:
        wrapper = wrapper_tree(plan, git=git)
        problems = list(wrapper_problems(plan, wrapper))
    except LaunchError as error:
        wrapper, problems = {"tree": None, "changes": [], "head": None}, [error]
    good = (
        "any tree is accepted, and never publishable" if plan.recipe.wrapper == "any" else f"{wrapper['tree']} is clean"
    )
    return wrapper, _judged("wrapper", "", problems, good)


def _image_rows(plan: Plan, images: Mapping[str, ImageFacts], facts: Mapping[str, HostFacts]) -> list[Row]:
    rows: list[Row] = []
    for host, image in images.items():
        problems = [*_pin_problems(plan, host, image, facts[host]), *_other_image(host, image, images)]
        rows += _judged("image", host, problems, f"{image.image_id or 'no image'} ({image.id_kind} digest)")
    return rows


def _other_image(host: str, image: ImageFacts, images: Mapping[str, ImageFacts]) -> Iterator[DsparkError]:
    first_host, first = next(iter(images.items()))
    if image.image_id != first.image_id:
        mine, theirs = f"{image.image_id} ({image.id_kind} digest)", f"{first.image_id} ({first.id_kind} digest)"
        yield LaunchError("IDENTITY_MISMATCH", f"{host}: image is {mine}, {first_host} has {theirs}")


def _model_rows(plan: Plan, hosts: Mapping[str, Host], hasher: Hasher | None) -> list[Row]:
    """The model folders of the hosts that were reached; without a folder in the cluster file there is no row."""
    specs = [spec for spec in plan.specs if spec.host in hosts and plan.cluster.hosts[spec.rank].model]
    if not specs:
        return []
    try:
        placed = placed_models(plan, specs, hosts, hasher)
    except HostError as error:
        return _judged("model", "", [error], "")
    problems = list(weights.problems(plan.recipe.weights, weights.sums_of(plan.recipe), placed))
    rows: list[Row] = []
    for place in placed:
        model = place.model or Model("")
        good = f"{len(model.shards)} shards, {sum(model.sizes.values()) / 1e9:.1f} GB{', every byte' if model.sums else ''}"
        rows += _judged("model", place.host, [error for host, error in problems if host == place.host], good)
    return rows


def _driver(host: Host) -> str:
    try:
        found = re.search(r"\d+\.\d+[.\d]*", host.read(["cat", "/proc/driver/nvidia/version"]).text)
    except HostError:
        return ""
    return found[0] if found else ""


def _unseen(plan: Plan, gpus: Mapping[str, Gpus]) -> Iterator[str]:
    yield from (f"GPU memory: {seen.reason}" for seen in gpus.values() if seen.reason)
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


def placed_models(
    plan: Plan, specs: Sequence[RankSpec], hosts: Mapping[str, Host], hasher: Hasher | None
) -> list[Placed]:
    """The model folder of every rank; all hosts are looked at at once. Raises HostError, and CANCELLED while hashing."""
    entries = plan.cluster.hosts
    with ThreadPoolExecutor(max_workers=len(specs)) as pool:
        jobs = [pool.submit(look_at, hosts[s.host], entries[s.rank], plan, hasher) for s in specs]
        return [Placed(spec.rank, spec.host, job.result()) for spec, job in zip(specs, jobs, strict=True)]


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
