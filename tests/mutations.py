"""Any leaf of any data changed once, and what becomes of it: the list of mutations is made from the data itself."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping

from pytest_dspark import gate, launch
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import DsparkError

EXEMPT = {
    r"\.process": "known from the cluster file, not read",
    r"\.log_text": "its lines are judged by the recipe's markers",
    r"\.facts\.(rank_id|started_at)": "names this one launch, no build",
    r"\.facts\.(network_mode|ipc_mode)": "the same as the container option, which is compared",
    r"\.facts\.environment\[\d+\]=(HOSTNAME|PWD|SHLVL|OLDPWD|_|DSPARK_\w*)": "each process has its own",
    r"\.image\.reference": "the id by which a container's image was looked up; of a process the bundle is compared",
    r"\.image\.repo_digests.*": "where an image came from; no digest of a registry is ever taken for an image id",
    r"\.machine\.(hostname|address|data_root)": "which host it is, not what runs",
    r"\.inventory\.hashes.*": "compared with a frozen manifest alone: test_freeze.py",
    r"\.manifest": "its sha256 is pinned, and what it says is compared: test_manifest.py",
    r"\.model\.folder": "where it lies on its host; the mount's source is compared",
    r"\.model\.shards\[\d+\]\.(changed|inode)": "tells whether a known digest still holds",
    r"\.secrets.*": "which values are masked",
    r"\.package_folders.*": "where to look; a wrong folder shows no package and is refused as such",
}


# --- any leaf of any data


def leaves(value, path=()):
    """Every leaf with its path. Empty texts and None hold nothing, but a file that is known not to be there."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), (*path, ("field", field.name)))
    elif isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], (*path, ("key", key)))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, ("index", index)))
    elif value not in (None, "") or (path and path[-1][0] == "key"):
        yield path, value


def name_of(path, value):
    parts = {"field": ".{}", "key": "{{{}}}", "index": "[{}]"}
    text = "".join(parts[kind].format(at) for kind, at in path)
    return f"{text}={value.partition('=')[0]}" if ".environment[" in text else text


def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, frozenset):
        return value | {"~"}
    return f"{value or ''}~"


def with_leaf(whole, path, value):
    if not path:
        return value
    (kind, at), rest = path[0], path[1:]
    if kind == "field":
        return dataclasses.replace(whole, **{at: with_leaf(getattr(whole, at), rest, value)})
    if kind == "key":
        return {**whole, at: with_leaf(whole[at], rest, value)}
    items = list(whole)
    items[at] = with_leaf(items[at], rest, value)
    return type(whole)(items)


def exempt(name, also=()):
    return next((pattern for pattern in (*EXEMPT, *also) if re.fullmatch(pattern, name)), None)


# --- the engine that is as it should be


def launched(site, started):
    """Launch it and wait for it; gives its ranks, wholly read, and what its API says. `started` is for who stops it."""
    running = launch.start(site, started=started)
    made = site.plan
    endpoint = Endpoint(made.base_url, made.served_model)
    launch.await_ready(site, running, endpoint, limit_s=made.recipe.launch.ready_s)
    api = gate.ask_api(endpoint, made.recipe.canaries)
    return [launch.whole(site, rank) for rank in launch.read_ranks(site, running)], api


# --- what becomes of one change


def verdict_of(made, ranks, api):
    """`refused`, `recorded` or `unseen`."""
    try:
        report = gate.examine(made, ranks, api)
    except DsparkError:
        return "refused"
    if report.first_failure:
        return "refused"
    before = sum(len(finding.data["recorded"]) for finding in report.findings.values())
    return "recorded" if before else "unseen"


def tried(kind, whole, judge):
    """Every leaf of `whole` changed once; returns the counts and the leaves that nobody saw."""
    counts, unseen = Counter(), []
    for path, value in leaves(whole):
        name = name_of(path, value)
        if exempt(name):
            counts["exempt"] += 1
            continue
        outcome = judge(with_leaf(whole, path, changed(value)))
        counts[outcome] += 1
        if outcome == "unseen":
            unseen.append(f"{kind}{name} = {value!r}")
    return counts, unseen


def say(what, counts):
    total = sum(counts.values())
    line = ", ".join(f"{counts[name]} {name}" for name in ("refused", "recorded", "exempt", "unseen"))
    print(f"identity: {what}: {total} leaves: {line}")
