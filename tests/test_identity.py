"""The mutation list, generated: every leaf of what was read of a rank, and of what was planned, is changed once.

Each change must be refused, or be a difference that the recipe lets stand and that is then recorded. A leaf that nothing
compares fails here; what is no identity is exempt by name, with the reason. `make identity` prints the counts.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import test_gate
from mutations import EXEMPT, launched, leaves, name_of, say, tried, verdict_of
from rehearsed import ROOT, Place

from pytest_dspark import gate, launch, setup
from pytest_dspark.comparison import hold
from pytest_dspark.errors import ConfigError
from pytest_dspark.evidence import new_run
from pytest_dspark.hosts import open_host
from pytest_dspark.plan import plan
from pytest_dspark.profile import load_profile
from pytest_dspark.recipe import load_recipe

# --- two recordings: a container pair as Docker shows one, and a pair of emulated ranks that really ran


@pytest.fixture(scope="module")
def containers():
    made = _made()
    ranks = [test_gate.good_rank(made, number) for number in (0, 1)]
    answers = {
        c.name: {"ok": True, "answered": True, "text": "x", "finish_reason": "stop", "message": ""}
        for c in made.recipe.canaries
    }
    api = gate.Api([made.served_model], made.settings.values["MAX_MODEL_LEN"], made.recipe.pins.package, answers)
    return SimpleNamespace(made=made, ranks=ranks, api=api)


def _made():
    recipe = load_recipe(ROOT / "recipe" / "dspark-sm121.toml")
    profile = load_profile(ROOT / "profiles" / "dspark-r0b0tlab-production.env")
    return plan(profile, recipe, setup.load_cluster(ROOT / "docs" / "cluster.example.toml"), mark="production")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Launched, read and stopped by the same code as any engine."""
    place = Place(tmp_path_factory.mktemp("identity"))
    options = setup.Options(root=ROOT, cluster=str(place.cluster()))
    made = setup.make_plans(options, ["production"])["production"]
    hosts = {e.name: open_host(e, cluster=made.cluster.name, state=place.out / "hosts") for e in made.cluster.hosts}
    site = launch.Site(made, hosts, new_run(place.out), print, lambda: False)
    started = {}
    try:
        ranks, api = launched(site, started)
        yield SimpleNamespace(made=made, ranks=ranks, api=api, place=place)
    finally:
        launch.stop(site, started, run_id=site.run.run_id)
        for pid in place.living():
            os.kill(pid, 9)


@pytest.fixture(params=["containers", "emulated"])
def seen(request):
    return request.getfixturevalue(request.param)


def test_what_was_recorded_is_accepted_as_it_is(seen):
    report = gate.examine(seen.made, seen.ranks, seen.api)
    assert report.first_failure is None
    assert verdict_of(seen.made, seen.ranks, seen.api) == "unseen"


@pytest.mark.parametrize("number", [0, 1])
def test_every_leaf_that_was_read_of_a_rank_has_a_check(seen, number, request):
    def judge(rank):
        return verdict_of(seen.made, [rank if n == number else r for n, r in enumerate(seen.ranks)], seen.api)

    counts, unseen = tried(f"rank {number}", seen.ranks[number], judge)
    say(f"{request.node.callspec.params['seen']}, read of rank {number}", counts)
    assert not unseen, "nothing compares:\n" + "\n".join(unseen)
    assert counts["refused"] > 60


@pytest.mark.parametrize("number", [0, 1])
def test_every_leaf_of_the_plan_has_a_check(seen, number, request):
    def judge(spec):
        specs = tuple(spec if n == number else s for n, s in enumerate(seen.made.specs))
        return verdict_of(dataclasses.replace(seen.made, specs=specs), seen.ranks, seen.api)

    counts, unseen = tried(f"plan of rank {number}", seen.made.specs[number], judge)
    say(f"{request.node.callspec.params['seen']}, plan of rank {number}", counts)
    assert not unseen, "nothing compares:\n" + "\n".join(unseen)
    assert counts["refused"] > 60


PLAIN_PINS = {"model_marker": "where the revision is read", "manifest_target": "where the manifest is read"}


def test_every_pin_and_label_of_the_recipe_has_a_check(seen, request):
    recipe, counts = seen.made.recipe, Counter()
    for name in (field.name for field in dataclasses.fields(recipe.pins)):
        value = getattr(recipe.pins, name)
        if not value or name in PLAIN_PINS:
            counts["exempt"] += 1
            continue
        pins = dataclasses.replace(recipe.pins, **{name: f"{value}~"})
        outcome = verdict_of(
            dataclasses.replace(seen.made, recipe=dataclasses.replace(recipe, pins=pins)), seen.ranks, seen.api
        )
        counts[outcome] += 1
        assert outcome == "refused", name
    for at, (key, value) in enumerate(recipe.labels):
        labels = (*recipe.labels[:at], (key, f"{value}~"), *recipe.labels[at + 1 :])
        made = dataclasses.replace(seen.made, recipe=dataclasses.replace(recipe, labels=labels))
        counts[verdict_of(made, seen.ranks, seen.api)] += 1
    say(f"{request.node.callspec.params['seen']}, pins and labels", counts)
    assert not counts["unseen"] and counts["refused"]


def test_every_line_of_the_profile_and_every_key_of_a_host_has_a_check(seen, request, tmp_path):
    """Another value makes another plan, which is refused by itself or is not the plan of the engine that runs. A worker's own address is in no rank's command line:
    preflight looks whether it is on the host's interface."""
    made, counts = seen.made, Counter()
    for key, value, _ in made.profile.values:
        path = tmp_path / "changed.env"
        new = value.replace("true", "false").replace("6", "7") if value.startswith("{") else f"{value}9"
        text = (ROOT / "profiles" / f"{made.profile.name}.env").read_text()
        path.write_text(re.sub(rf"(?m)^{key}=.*$", f"{key}='{new}'" if new.startswith("{") else f"{key}={new}", text))
        counts[_planned_anew(seen, load_profile(path), made.cluster)] += 1
    for number, entry in enumerate(made.cluster.hosts):
        for field in ("name", "address", "interface", "rdma", "model", "cache", "manifest", "bundle"):
            value = getattr(entry, field)
            if (
                value
                and (entry.process or field != "bundle")
                and not (entry.process and field in ("interface", "rdma", "cache", "manifest"))
            ):
                hosts = list(made.cluster.hosts)
                hosts[number] = dataclasses.replace(
                    entry, **{field: "192.0.2.77" if field == "address" else f"{value}9"}
                )
                outcome = _planned_anew(seen, made.profile, dataclasses.replace(made.cluster, hosts=tuple(hosts)))
                own = field == "address" and number > 0
                counts["exempt" if own else outcome] += 1
                assert outcome == "refused" or own, (number, field)
    say(f"{request.node.callspec.params['seen']}, profile and cluster", counts)
    assert counts["refused"] > 10


def _planned_anew(seen, profile, cluster):
    try:
        made = plan(profile, seen.made.recipe, cluster, mark=seen.made.mark)
    except ConfigError:
        return "refused"
    return verdict_of(made, seen.ranks, seen.api)


def test_every_exemption_is_of_a_leaf_that_there_is(containers, emulated):
    """An exemption that names nothing any more would hide a leaf of that name later."""
    names = set()
    for recorded in (containers, emulated):
        for whole in (*recorded.ranks, *recorded.made.specs):
            names |= {name_of(path, value) for path, value in leaves(whole)}
    assert [pattern for pattern in EXEMPT if not any(re.fullmatch(pattern, name) for name in names)] == []


def test_the_list_itself_can_fail(containers):
    """A check taken away leaves leaves that nobody sees, and the list says which."""

    def judge(rank):
        report = gate.examine(containers.made, [rank, containers.ranks[1]], containers.api)
        kept = {name: f for name, f in report.findings.items() if name not in ("argv", "symmetry")}
        held = all(hold(c) for finding in kept.values() for c in finding.data["comparisons"])
        return "unseen" if held else "refused"

    _, unseen = tried("rank 0", containers.ranks[0], judge)
    assert any(".facts.args[" in name for name in unseen) and any(".packages{" in name for name in unseen)
