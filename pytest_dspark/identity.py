"""Which build runs on which rank, and whether all ranks are one engine: comparisons of what was read, pure.

Nothing is compared with anything but its own kind: image ids by the kind of digest that each host's store gives. Where a
value was read is written beside it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from pytest_dspark.cluster import FINGERPRINT_LABEL, OWNER_LABEL, RUN_LABEL, HostFacts, ImageFacts, RankFacts, RankSpec
from pytest_dspark.comparison import Sheet
from pytest_dspark.hosts.options import planned, settled
from pytest_dspark.inventory import NOT_TAKEN, Inventory
from pytest_dspark.logs import RankLog, read_log
from pytest_dspark.plan import Plan, told_names
from pytest_dspark.sanitize import mask_argv, mask_env
from pytest_dspark.weights import Model

RANK_FLAGS = {"--node-rank": 1, "--headless": 0, "--host": 1, "--port": 1}


@dataclass(frozen=True)
class Rank:
    """Everything that was read of one running rank. No slots: its log is read once and kept.

    `run_id` is the run that launched it, empty for an engine that this run only attached to. `model_revision` is the text
    of the marker in the model folder as the rank sees it; None: not there, or the recipe names no marker.
    """

    number: int
    host: str
    facts: RankFacts
    image: ImageFacts
    log_text: str
    manifest_sha256: str | None = None
    process: bool = False
    machine: HostFacts | None = None
    model_revision: str | None = None
    run_id: str = ""
    inventory: Inventory = NOT_TAKEN
    model: Model | None = None
    manifest: str | None = None

    @cached_property
    def log(self) -> RankLog:
        return read_log(self.log_text)

    @property
    def environment(self) -> dict[str, str]:
        return dict(entry.partition("=")[::2] for entry in self.facts.environment)

    @property
    def where(self) -> dict[str, str]:
        return {"host": self.host}


# --- the command line


def serve_argv(path: str, args: Sequence[str]) -> tuple[str, ...]:
    """The tokens from `serve` on, of a container started with an argv list or with `bash -lc "<script>"`.

    Empty if there is no `serve`: an empty argv is never equal to a planned one.
    """
    tokens = [path, *args]
    for index, token in enumerate(tokens[:-1]):
        if token.rsplit("/", 1)[-1] in ("bash", "sh") and re.fullmatch(r"-[a-z]*c", tokens[index + 1]):
            tokens = _script_tokens(tokens[index + 2 :])
            break
    return tuple(tokens[tokens.index("serve") :]) if "serve" in tokens else ()


def _script_tokens(rest: Sequence[str]) -> list[str]:
    """The words of a shell script, its line continuations dropped and `"$@"` replaced by the arguments after $0."""
    if not rest:
        return []
    try:
        words = shlex.split(rest[0].replace("\\\n", " "), comments=True)
    except ValueError:
        return []
    result: list[str] = []
    for word in words:
        result += list(rest[2:]) if word == "$@" else [word]
    return result


def without_rank(argv: Sequence[str]) -> tuple[str, ...]:
    """The argv without what may differ between ranks: rank, headless, address and port of the API."""
    result: list[str] = []
    skip = 0
    for token in argv:
        if skip:
            skip -= 1
        elif token in RANK_FLAGS:
            skip = RANK_FLAGS[token]
        else:
            result.append(token)
    return tuple(result)


def argv(plan: Plan, ranks: Sequence[Rank], sheet: Sheet) -> None:
    """The command line of every rank, token by token; of one that was launched here also the words before `serve`."""
    for rank, spec in zip(ranks, plan.specs, strict=True):
        wanted = mask_argv(spec.argv[spec.argv.index("serve") :]) if "serve" in spec.argv else ()
        found = mask_argv(serve_argv(rank.facts.path, rank.facts.args))
        sheet.add("command line", rank.number, list(wanted), list(found))
        sheet.add("command line is not empty", rank.number, "vllm serve …", list(found), "present")
        if rank.run_id:
            sheet.add("program of the command line", rank.number, _before(_command(rank, spec)), _program(rank))


def _command(rank: Rank, spec: RankSpec) -> list[str]:
    """The whole command that this plan makes: the image's entry point, or the plan's own, and the argv."""
    entrypoint = dict(spec.options).get("entrypoint")
    first = [entrypoint] if isinstance(entrypoint, str) else list(entrypoint or rank.image.entrypoint)
    return [*first, *spec.argv]


def _program(rank: Rank) -> list[str]:
    return _before([rank.facts.path, *rank.facts.args])


def _before(tokens: Sequence[str]) -> list[str]:
    return list(tokens[: tokens.index("serve")]) if "serve" in tokens else list(tokens)


# --- image, labels, pins


def image(plan: Plan, ranks: Sequence[Rank], sheet: Sheet) -> None:
    """One image on all ranks, of the kind that the recipe pins, and really the one that runs."""
    pins, first = plan.recipe.pins, ranks[0]
    for rank in ranks:
        if not rank.image.image_id:
            sheet.not_observable.append(f"rank {rank.number} runs from no image (a process without a bundle)")
            continue
        sheet.add("image id kind", rank.number, pins.id_kind, rank.image.id_kind, **rank.where, how=store(rank))
        sheet.add("image id equal to rank 0", rank.number, first.image.image_id, rank.image.image_id, **rank.where)
        sheet.add("architecture equal to rank 0", rank.number, first.image.architecture, rank.image.architecture)
        sheet.add("entry point equal to rank 0", rank.number, list(first.image.entrypoint), list(rank.image.entrypoint))
        sheet.add("running image is the image looked at", rank.number, rank.image.image_id, rank.facts.image_id)


def store(rank: Rank) -> str:
    """How an image id was read: its kind is that of the host's image store."""
    name = rank.machine.image_store if rank.machine else ""
    return f"image inspect, {rank.image.id_kind} digest" + (f", store {name}" if name else "")


def labels(plan: Plan, ranks: Sequence[Rank], sheet: Sheet) -> None:
    """The image's labels that the recipe pins, and all of them equal to those of rank 0."""
    wanted = dict(plan.recipe.labels)
    if not wanted:
        sheet.not_observable.append("the recipe pins no label")
    for rank in ranks:
        for key, value in wanted.items():
            sheet.add(f"label {key}", rank.number, value, rank.image.labels.get(key))
        if rank.image.image_id:
            sheet.add("labels equal to rank 0", rank.number, dict(ranks[0].image.labels), dict(rank.image.labels))


@dataclass(frozen=True, slots=True)
class PinFound:
    """One way in which one pin can be read of one rank: what was found, and from where."""

    pin: str
    found: Any
    how: str
    relation: str = "equal"


def pins(plan: Plan, ranks: Sequence[Rank], version: str, sheet: Sheet) -> None:
    """Every pin of the recipe against every rank, with host and source; a pin that nothing can show is said so."""
    wanted = {name: getattr(plan.recipe.pins, name) for name in PINNED if getattr(plan.recipe.pins, name)}
    for rank in ranks:
        found = [entry for entry in _found_pins(plan, rank, version) if entry.pin in wanted]
        for entry in found:
            expected, name = wanted[entry.pin], entry.pin.replace("_", " ")
            sheet.add(f"pin {name}", rank.number, expected, entry.found, entry.relation, **rank.where, how=entry.how)
        for name in sorted(wanted.keys() - {entry.pin for entry in found}):
            sheet.not_observable.append(f"rank {rank.number}: pin {name}: {_why_unseen(name, rank)}")


PINNED = (
    "image_id",
    "image_tag",
    "image_store",
    "architecture",
    "package",
    "integrated_vllm",
    "source_revision",
    "model_revision",
    "manifest_sha256",
)


def _found_pins(plan: Plan, rank: Rank, version: str) -> Iterator[PinFound]:
    if rank.image.image_id:
        yield PinFound("image_id", rank.image.image_id, store(rank))
        yield PinFound("architecture", rank.image.architecture, "image inspect")
    if not rank.process:
        yield PinFound("image_tag", rank.facts.image_reference, "the container's own image name")
        yield PinFound("image_tag", list(rank.image.tags), "tags of the image", "among")
    if rank.machine and rank.machine.image_store:
        yield PinFound("image_store", rank.machine.image_store.partition(" (")[0], "docker info")
    if version and rank.number == 0:
        yield PinFound("package", version, "/version of the API")
    name = plan.recipe.inside.package
    if name and not rank.inventory.missing:
        yield PinFound("package", rank.inventory.packages.get(name), f"package {name} inside the rank")
    for pin, label in plan.recipe.pin_labels:
        yield PinFound(pin, rank.image.labels.get(label), f"label {label}")
    if plan.recipe.pins.model_marker and (rank.model_revision is not None or not rank.process):
        yield PinFound("model_revision", rank.model_revision, f"{plan.recipe.pins.model_marker} inside the rank")
    if plan.recipe.pins.manifest_target and not rank.process:
        how = f"sha256sum {plan.recipe.pins.manifest_target} inside the rank"
        yield PinFound("manifest_sha256", rank.manifest_sha256, how)


def _why_unseen(pin: str, rank: Rank) -> str:
    if pin == "package":
        return "only the API tells it, and it did not" if rank.number == 0 else "the API of rank 0 tells it"
    return "a process shows none" if rank.process else "nothing on this host shows it"


# --- environment, restarts, options, mounts


def environment(plan: Plan, ranks: Sequence[Rank], sheet: Sheet) -> None:
    told = told_names(plan)
    for rank, spec in zip(ranks, plan.specs, strict=True):
        entries = [entry.partition("=") for entry in rank.facts.environment]
        for key, value in spec.env:
            found = [text for entry, _, text in entries if entry == key]
            name = f"PID 1 environment {key}"
            if key in spec.secrets:
                shown = ["***"] if found == [value] else ["*** (differs)"]
                sheet.add(name, rank.number, ["***"], shown)
            elif key in told:
                sheet.add(name, rank.number, [value], found)
            else:
                sheet.add_private(name, rank.number, [value], found)
        for key in plan.recipe.env_absent:
            found = [text for name, _, text in entries if name == key]
            sheet.add(f"PID 1 environment {key}", rank.number, None, found, "absent")


def restarts(plan: Plan, ranks: Sequence[Rank], sheet: Sheet) -> None:
    for rank in ranks:
        sheet.add("restart count", rank.number, 0, rank.facts.restart_count)
        sheet.add("restart policy", rank.number, "no", rank.facts.restart_policy or "no")


def container(plan: Plan, ranks: Sequence[Rank], sheet: Sheet) -> None:
    """The options and the ownership marks with which each rank was made."""
    for rank, spec in zip(ranks, plan.specs, strict=True):
        sheet.add("host of the rank", spec.rank, [spec.rank, spec.host], [rank.number, rank.host])
        sheet.add("name of the rank", rank.number, spec.name, rank.facts.name, **rank.where)
        if rank.run_id:
            wanted = dict(spec.labels) | {RUN_LABEL: rank.run_id, FINGERPRINT_LABEL: plan.fingerprint}
            sheet.add("made of", rank.number, spec.bundle if rank.process else spec.image, _made_of(rank), **rank.where)
            # The owner says who may clean up, and is another one after a kept or resumed engine was taken over.
            found = {key: value for key, value in rank.facts.labels.items() if key != OWNER_LABEL}
            sheet.add("marks of the launch", rank.number, {**rank.image.labels, **wanted}, found)
        else:
            sheet.not_observable.append(f"rank {rank.number} was not launched by this run and carries no marks of it")
        if rank.process:
            sheet.not_observable.append(f"rank {rank.number} is a process and has no container options")
            continue
        _options(rank, ranks[0], spec, sheet)


def _made_of(rank: Rank) -> str:
    """The name of the image, or the folder of the bundle, from which the rank was made."""
    return rank.image.reference if rank.process else rank.facts.image_reference


def record(rank: Rank) -> dict[str, Any]:
    """All that was read of the rank but its log, as JSON, secrets masked. Hashes of package files only by their number."""
    whole = asdict(replace(rank, log_text=""))
    whole["facts"] |= {"path": rank.facts.path, "args": list(mask_argv([rank.facts.path, *rank.facts.args])[1:])}
    whole["facts"]["environment"] = [f"{key}={value}" for key, value in mask_env(rank.environment.items())]
    whole["inventory"]["hashes"] = {name: len(files or ()) for name, files in rank.inventory.hashes.items()}
    del whole["log_text"], whole["manifest"]
    return whole


def _options(rank: Rank, first: Rank, spec: RankSpec, sheet: Sheet) -> None:
    found = settled(rank.facts.options)
    for key, value in planned(rank.host, spec).items():
        if isinstance(value, list):
            missing = [entry for entry in value if entry not in (found.get(key) or ())]
            sheet.add(f"container option {key}, planned and not there", rank.number, None, missing, "absent")
        else:
            sheet.add(f"container option {key}", rank.number, value, found.get(key))
    sheet.add("container options equal to rank 0", rank.number, settled(first.facts.options), found)


def mounts(plan: Plan, ranks: Sequence[Rank], sheet: Sheet) -> None:
    for rank, spec in zip(ranks, plan.specs, strict=True):
        if rank.process:
            sheet.not_observable.append(f"rank {rank.number} is a process and has no mounts")
            continue
        for mount in spec.mounts:
            found = [m for m in rank.facts.mounts if m.get("Destination") == mount.target]
            sheet.add(f"mounts at {mount.target}", rank.number, 1, len(found))
            if found:
                sheet.add(f"mount {mount.target} is writable", rank.number, not mount.read_only, found[0].get("RW"))
                source = found[0].get("Name" if found[0].get("Type") == "volume" else "Source")
                sheet.add(f"source of mount {mount.target}", rank.number, mount.source, source)
        _mounts_equal(rank, ranks[0], sheet)


def _mounts_equal(rank: Rank, first: Rank, sheet: Sheet) -> None:
    """All mounts, those of the image included, by everything but their source on the host."""
    own = ("Source", "Name")
    mine, theirs = (
        sorted(([{k: v for k, v in m.items() if k not in own} for m in r.facts.mounts]), key=repr)
        for r in (first, rank)
    )
    sheet.add("mounts equal to rank 0 but for their source", rank.number, mine, theirs)


Examiner = Callable[[Plan, Sequence[Rank], Sheet], None]
EXAMINERS: Mapping[str, Examiner] = {
    "image": image,
    "labels": labels,
    "argv": argv,
    "environment": environment,
    "restarts": restarts,
    "container": container,
    "mounts": mounts,
}
