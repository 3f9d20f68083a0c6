"""The mutation list on real Docker and over real ssh: every leaf of the plan, one rank made otherwise, and the gate's answer.

Runs inside the head host, after `make lab`, on the emulated rank in its small image. The engine is launched once as it should
be and read; then each leaf of a rank's specification is changed, that rank alone is made so by its host's Docker, read, and
put in the place of the good one. A leaf whose change nothing sees fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest
from mutations import changed, exempt, launched, leaves, name_of, say, verdict_of, with_leaf
from test_faults import ROOT, assert_both_empty

from pytest_dspark import gate, launch, setup
from pytest_dspark.errors import DsparkError
from pytest_dspark.evidence import new_run
from pytest_dspark.hosts import open_host

CLUSTER = ROOT / "lab" / "cluster-emulated.toml"
pytestmark = pytest.mark.skipif(not CLUSTER.exists(), reason=f"{CLUSTER.name} is not there: run `make lab` first")

# What no container shows, each with where it is caught instead.
BEFORE = {
    r"\.host": "where a rank is started; the cluster file says it and preflight reaches it",
    r"\.rank": "the number by which the plan knows it",
    r"\.bundle": "of a process rank alone",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The good pair, read; nothing of it runs any more."""
    made = setup.make_plans(setup.Options(root=ROOT, cluster=str(CLUSTER)), ["production"])["production"]
    out = tmp_path_factory.mktemp("mutations")
    hosts = {e.name: open_host(e, cluster=made.cluster.name, state=out / "hosts") for e in made.cluster.hosts}
    site = launch.Site(made, hosts, new_run(out), print, lambda: False)
    started = {}
    try:
        ranks, api = launched(site, started)
    finally:
        launch.stop(site, started, run_id=site.run.run_id)
    yield SimpleNamespace(made=made, site=site, ranks=ranks, api=api)
    for host in hosts.values():
        host.close()
    assert_both_empty()


def alone(engine, number, spec):
    """The rank as this specification makes it, with the good one's log: alone it says less. Raises DsparkError."""
    site, host = engine.site, engine.site.hosts[engine.made.specs[number].host]
    rank_id = host.start(launch.labelled(spec, site.run.run_id, engine.made.fingerprint))
    try:
        ids = tuple(rank_id for _ in engine.made.specs)
        found = launch.read_rank(site, engine.made.specs[number], launch.Engine(site.run.run_id, ids))
        found = launch.whole(site, found)
    finally:
        with contextlib.suppress(DsparkError):
            host.stop(rank_id, grace_s=0.0)
        host.remove(rank_id)
    return dataclasses.replace(found, log_text=engine.ranks[number].log_text)


def outcome(engine, number, spec):
    try:
        found = alone(engine, number, spec)
    except DsparkError:
        return "refused"
    ranks = [found if n == number else rank for n, rank in enumerate(engine.ranks)]
    return verdict_of(engine.made, ranks, engine.api)


def test_the_good_pair_is_accepted(engine):
    assert gate.examine(engine.made, engine.ranks, engine.api).first_failure is None


@pytest.mark.parametrize("number", [0, 1])
def test_every_leaf_of_the_plan_made_otherwise_is_refused(engine, number):
    whole = engine.made.specs[number]
    assert outcome(engine, number, whole) == "unseen", "the same rank alone must be accepted, or every refusal is empty"
    counts, unseen = Counter(), []
    for path, value in leaves(whole):
        name = name_of(path, value)
        if exempt(name, BEFORE):
            counts["exempt"] += 1
            continue
        found = outcome(engine, number, with_leaf(whole, path, changed(value)))
        counts[found] += 1
        unseen += [f"{name} = {value!r}"] if found == "unseen" else []
    say(f"Docker, plan of rank {number}", counts)
    assert not unseen, "nothing compares:\n" + "\n".join(unseen)
    assert counts["refused"] > 60
