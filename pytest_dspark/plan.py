"""Profile, recipe and cluster become one container or process specification per rank: a pure function, no network.

`--dspark-plan` prints the result as JSON and as the shell commands that a person would type.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_dspark.cluster import CLUSTER_LABEL, PROFILE_LABEL, RANK_LABEL, Cluster, HostEntry, Mount, RankSpec
from pytest_dspark.errors import ConfigError
from pytest_dspark.profile import Profile
from pytest_dspark.recipe import PLACEHOLDER, RANK_NAMES, Condition, Knob, Limit, Recipe, placeholders
from pytest_dspark.sanitize import is_secret_key, mask_argv


@dataclass(frozen=True, slots=True)
class Settings:
    """The profile's values, typed by the recipe's knobs, with the warnings and the reasons against publishing."""

    values: Mapping[str, Any]
    texts: Mapping[str, str]
    environment: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    unpublishable: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be started, one RankSpec a rank in rank order, and everything the gate compares it with.

    `rank_env` are the environment keys that may differ between ranks. `fingerprint` names the configuration: equal
    fingerprints are equal launches.
    """

    mark: str
    profile: Profile
    recipe: Recipe
    cluster: Cluster
    settings: Settings
    specs: tuple[RankSpec, ...]
    base_url: str
    port: int
    master_port: int
    served_model: str
    rank_env: frozenset[str]
    fingerprint: str


def meets(condition: Condition, values: Mapping[str, Any]) -> bool:
    """Whether a knob's value meets the condition. `NAME.key` looks into a JSON knob."""
    name, _, key = condition.knob.partition(".")
    value = values.get(name)
    if key:
        value = value.get(key) if isinstance(value, Mapping) else None
    if condition.absent is not None:
        return (value is None) is condition.absent
    tests: tuple[tuple[Any, Callable[[], bool]], ...] = (
        (condition.equals, lambda: value == condition.equals),
        (condition.differs, lambda: value != condition.differs),
        (condition.min, lambda: value is not None and float(value) >= float(condition.min or 0)),
        (condition.max, lambda: value is not None and float(value) <= float(condition.max or 0)),
    )
    return all(test() for given, test in tests if given is not None)


def settle(profile: Profile, recipe: Recipe) -> Settings:
    """Check the profile's values against the recipe's knobs and limits.

    Raises PROFILE_INVALID for an unknown or missing knob, a wrong type or a value out of range, with file and line, and
    PROFILE_REFUSED with the measured reason for values that the recipe forbids.
    """
    texts: dict[str, str] = {knob.name: knob.default for knob in recipe.knobs if knob.default is not None}
    environment = []
    for key, text, line in profile.values:
        if recipe.knob(key):
            texts[key] = text
        elif key.startswith(recipe.passthrough):
            environment.append((key, text))
        else:
            raise _invalid(profile, line, f"unknown knob {key}, expected one of {_knob_names(recipe)}")
    for knob in recipe.knobs:
        if knob.required and knob.name not in texts:
            raise ConfigError(
                "PROFILE_INVALID", f"{profile.path}: knob {knob.name} is missing, recipe {recipe.name} requires it"
            )
    values = {name: _typed(profile, recipe, name, text) for name, text in texts.items()}
    hit = [limit for limit in recipe.limits if all(meets(condition, values) for condition in limit.when)]
    _refuse(profile, hit)
    noop = dict(recipe.noop_env)
    warnings = [f"{key} has no effect on this engine: {noop[key]}" for key, _ in environment if key in noop]
    return Settings(
        values=values,
        texts=texts,
        environment=tuple(environment),
        warnings=tuple(warnings + [limit.reason for limit in hit if limit.effect == "warn"]),
        unpublishable=tuple(limit.reason for limit in hit if limit.effect == "unpublishable"),
    )


def _knob_names(recipe: Recipe) -> str:
    prefixes = [f"{prefix}*" for prefix in recipe.passthrough]
    return ", ".join([*sorted(knob.name for knob in recipe.knobs), *prefixes])


def _invalid(profile: Profile, line: int, message: str) -> ConfigError:
    return ConfigError("PROFILE_INVALID", f"{profile.path}:{line}: {message}")


def _refuse(profile: Profile, limits: Iterable[Limit]) -> None:
    for limit in limits:
        if limit.effect == "refuse":
            knobs = sorted(
                {condition.knob.split(".")[0] for condition in limit.when} & {key for key, _, _ in profile.values}
            )
            where = ", ".join(f"{knob} (line {profile.line(knob)})" for knob in knobs)
            raise ConfigError("PROFILE_REFUSED", f"{profile.path}: {where}: {limit.reason}")


def _typed(profile: Profile, recipe: Recipe, name: str, text: str) -> Any:
    knob = recipe.knob(name)
    assert knob is not None
    line = profile.line(name) or 0
    if knob.choices and text not in knob.choices:
        raise _invalid(profile, line, f"{name} must be one of {', '.join(knob.choices)}, found {text!r}")
    if knob.type == "json":
        return _json_object(profile, line, name, text)
    if knob.type == "str":
        return text
    return _number(profile, line, knob, text)


def _json_object(profile: Profile, line: int, name: str, text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise _invalid(profile, line, f"{name} must be a JSON object, found {text!r} ({error})") from error
    if not isinstance(value, dict):
        raise _invalid(profile, line, f"{name} must be a JSON object, found {text!r}")
    return value


def _number(profile: Profile, line: int, knob: Knob, text: str) -> int | float:
    kind = int if knob.type == "int" else float
    try:
        number = kind(text)
    except ValueError as error:
        raise _invalid(profile, line, f"{knob.name} must be {knob.type}, found {text!r}") from error
    if not math.isfinite(number) or (knob.type == "int" and str(number) != text):
        raise _invalid(profile, line, f"{knob.name} must be a plain {knob.type}, found {text!r}")
    low, high = knob.min, knob.max
    if (low is not None and number < low) or (high is not None and number > high):
        raise _invalid(profile, line, f"{knob.name} must be from {low:g} to {high:g}, found {text}")
    return number


def plan(profile: Profile, recipe: Recipe, cluster: Cluster, *, mark: str, python: str = sys.executable) -> Plan:
    """The specification of every rank. Raises ConfigError with file and line, host or knob; starts nothing."""
    settings = settle(profile, recipe)
    _check_hosts(recipe, cluster)
    port = cluster.port or settings.values.get("PORT") or recipe.serve.port
    master_port = cluster.master_port or settings.values.get("MASTER_PORT") or recipe.serve.master_port
    common = dict(settings.texts) | {
        "nnodes": str(len(cluster.hosts)),
        "master_addr": cluster.hosts[0].address,
        "master_port": str(master_port),
        "port": str(port),
        "python": python,
    }
    specs = tuple(
        _spec(rank, entry, common, settings, recipe, cluster, mark) for rank, entry in enumerate(cluster.hosts)
    )
    return Plan(
        mark=mark,
        profile=profile,
        recipe=recipe,
        cluster=cluster,
        settings=settings,
        specs=specs,
        base_url=cluster.api or f"http://{_bracketed(cluster.hosts[0].address)}:{port}",
        port=port,
        master_port=master_port,
        served_model=_fill(recipe.serve.served_model, common) or "",
        rank_env=_rank_env(recipe, cluster),
        fingerprint=_fingerprint(profile, recipe, specs),
    )


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _check_hosts(recipe: Recipe, cluster: Cluster) -> None:
    for entry in cluster.hosts:
        for key in recipe.serve.host_keys:
            if not getattr(entry, key):
                raise ConfigError(
                    "CLUSTER_INVALID",
                    f"{cluster.source}: host {entry.name}: {key} is missing, recipe {recipe.name} needs it",
                )
        if entry.process and not recipe.serve.process:
            raise ConfigError(
                "CLUSTER_INVALID",
                f"{cluster.source}: host {entry.name}: recipe {recipe.name} does not say how to run a process",
            )


def _rank_env(recipe: Recipe, cluster: Cluster) -> frozenset[str]:
    own = {key for key, value in recipe.env if RANK_NAMES & set(placeholders(value))}
    return frozenset(own | {key for entry in cluster.hosts for key, _ in entry.env})


def _names(rank: int, entry: HostEntry, common: Mapping[str, str], recipe: Recipe) -> dict[str, str]:
    """Everything a template may name on this rank; what is absent is simply not in it."""
    target = recipe.serve.model_target
    own = {
        "rank": str(rank),
        "address": entry.address,
        "interface": entry.interface,
        "rdma": entry.rdma,
        "model": (entry.model or target) if entry.process else target,
        "model_source": entry.model,
        "cache": entry.cache,
        "manifest": entry.manifest,
        "bundle": entry.bundle,
    }
    return dict(common) | {key: value for key, value in own.items() if value} | {"headless": "" if rank == 0 else "1"}


def _fill(template: str, names: Mapping[str, str]) -> str | None:
    """The template with its placeholders replaced; None if one of them is absent."""
    if any(name not in names for name in placeholders(template)):
        return None
    return PLACEHOLDER.sub(lambda match: names[match.group(1)], template)


def _filled(groups: Iterable[Iterable[str]], names: Mapping[str, str]) -> list[str]:
    """The tokens of all groups whose every placeholder has a value: an absent optional knob leaves its flag out."""
    result: list[str] = []
    for group in groups:
        tokens = [_fill(token, names) for token in group]
        if all(token is not None for token in tokens):
            result += [token for token in tokens if token is not None]
    return result


def _spec(
    rank: int,
    entry: HostEntry,
    common: Mapping[str, str],
    settings: Settings,
    recipe: Recipe,
    cluster: Cluster,
    mark: str,
) -> RankSpec:
    serve, names = recipe.serve, _names(rank, entry, common, recipe)
    argv = _filled((*serve.argv, *(serve.argv_worker if rank else serve.argv_head)), names)
    if entry.process:
        argv = [*_filled([serve.process], names), *argv[1:]]
    if not argv:
        raise ConfigError("RECIPE_INVALID", f"recipe {recipe.name}: the argv of rank {rank} is empty")
    env = _environment(entry, settings, recipe, names)
    return RankSpec(
        rank=rank,
        host=entry.name,
        name=cluster.container or serve.container,
        image="" if entry.process else (_fill(serve.image, names) or ""),
        argv=tuple(argv),
        env=env,
        mounts=() if entry.process else tuple(_mount(text) for text in _filled([[m] for m in serve.mounts], names)),
        options=() if entry.process else serve.options,
        labels=((CLUSTER_LABEL, cluster.name), (PROFILE_LABEL, mark), (RANK_LABEL, str(rank))),
        secrets=frozenset(key for key, _ in env if is_secret_key(key)),
        bundle=entry.bundle,
        package_folders=tuple(_filled([[path] for path in recipe.inside.paths], names)),
    )


def _environment(
    entry: HostEntry, settings: Settings, recipe: Recipe, names: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Recipe, then profile pass-through, then the host's own; the later wins. Raises on what the recipe forbids."""
    filled = {key: _fill(value, names) for key, value in recipe.env}
    merged = (
        {key: value for key, value in filled.items() if value is not None}
        | dict(settings.environment)
        | dict(entry.env)
    )
    for key in recipe.env_absent:
        if key in merged:
            raise ConfigError(
                "PROFILE_REFUSED",
                f"{key} must be absent from the environment, recipe {recipe.name} says; host {entry.name}",
            )
    return tuple(sorted(merged.items()))


def _mount(text: str) -> Mount:
    body, read_only = (text[:-3], True) if text.endswith(":ro") else (text, False)
    source, _, target = body.rpartition(":")
    return Mount(source, target, read_only)


def _masked_env(spec: RankSpec) -> dict[str, str]:
    return {key: "***" if key in spec.secrets else value for key, value in spec.env}


def _as_json(spec: RankSpec) -> dict[str, Any]:
    return {
        "rank": spec.rank,
        "role": spec.role,
        "host": spec.host,
        "name": spec.name,
        "image": spec.image,
        "argv": list(mask_argv(spec.argv)),
        "env": _masked_env(spec),
        "mounts": [{"source": m.source, "target": m.target, "read_only": m.read_only} for m in spec.mounts],
        "options": {key: value if isinstance(value, str) else list(value) for key, value in spec.options},
        "labels": dict(spec.labels),
    }


def _fingerprint(profile: Profile, recipe: Recipe, specs: Iterable[RankSpec]) -> str:
    body = {"profile": profile.sha256, "recipe": recipe.sha256, "ranks": [_as_json(spec) for spec in specs]}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def as_json(made: Plan) -> dict[str, Any]:
    """The plan as JSON-ready data, secrets masked."""
    return {
        "mark": made.mark,
        "profile": made.profile.name,
        "profile_sha256": made.profile.sha256,
        "recipe": made.recipe.name,
        "recipe_sha256": made.recipe.sha256,
        "cluster": made.cluster.name,
        "fingerprint": made.fingerprint,
        "base_url": made.base_url,
        "served_model": made.served_model,
        "warnings": list(made.settings.warnings),
        "unpublishable": list(made.settings.unpublishable),
        "launch_order": [spec.rank for spec in launch_order(made)],
        "ranks": [_as_json(spec) for spec in made.specs],
    }


def told_names(made: Plan) -> frozenset[str]:
    """Names of the environment that recipe or profile tell; the others are of one host alone."""
    told = {key for key, _ in (*made.recipe.env, *made.settings.environment)}
    return frozenset(told | {"HEADLESS", *made.recipe.env_absent})


def launch_order(made: Plan) -> tuple[RankSpec, ...]:
    """Workers first, so that they wait for the head; the head last."""
    return (*made.specs[1:], made.specs[0])


def as_shell(made: Plan) -> str:
    """The commands a person would type, in launch order, secrets masked."""
    entries = {entry.name: entry for entry in made.cluster.hosts}
    return "\n".join(_shell(spec, entries[spec.host]) for spec in launch_order(made))


def _shell(spec: RankSpec, entry: HostEntry) -> str:
    argv = shlex.join(mask_argv(spec.argv))
    env = _masked_env(spec)
    if entry.process:
        return shlex.join(["env", *(f"{key}={value}" for key, value in env.items())]) + f" {argv}"
    words = ["docker", "-H", entry.docker or "", "run", "-d", "--name", spec.name]
    for key, value in spec.options:
        words += [f"--{key}={item}" for item in ((value,) if isinstance(value, str) else value)]
    for mount in spec.mounts:
        words += ["-v", f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}"]
    for key, value in env.items():
        words += ["-e", f"{key}={value}"]
    return f"{shlex.join([*words, spec.image])} {argv}"
