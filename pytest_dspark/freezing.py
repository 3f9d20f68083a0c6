"""`dspark freeze`: read a running engine, prove it, measure how it answers, and say all of it as a manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pytest_dspark import behaviour, freeze, gate, launch
from pytest_dspark.cluster import Host
from pytest_dspark.endpoint import Endpoint
from pytest_dspark.errors import LaunchError
from pytest_dspark.evidence import RunFolder
from pytest_dspark.plan import Plan


def take(
    plan: Plan, hosts: Mapping[str, Host], run: RunFolder, *, api_key: str, repeats: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The manifest of the engine that is up. Raises GATE_FAILED for one that is not proven, USAGE for ranks that differ."""
    before, plan = freeze.read(plan.recipe), _unfrozen(plan)
    site = launch.Site(plan, hosts, run, say, lambda: False)
    engine = launch.adopt(site, run_id=None)
    endpoint = Endpoint(plan.base_url, plan.served_model, api_key=api_key)
    api = gate.ask_api(endpoint, plan.recipe.canaries)
    say(f"reading every file of {', '.join(plan.recipe.inside.hashed) or 'no package'} inside each rank")
    ranks = [launch.whole(site, rank, plan.recipe.inside.hashed) for rank in launch.read_ranks(site, engine)]
    failure = gate.examine(plan, ranks, api).first_failure
    if failure:
        text = f"gate.{failure[0]}: {failure[1].message}; an engine that is not proven is not frozen"
        raise LaunchError("GATE_FAILED", text)
    freeze.alike(ranks)
    return freeze.manifest(plan, ranks, _answers(endpoint, repeats, say), before)


def _unfrozen(plan: Plan) -> Plan:
    """The plan without the manifest that is about to be written anew."""
    pins = replace(plan.recipe.pins, freeze="", freeze_sha256="")
    return replace(plan, recipe=replace(plan.recipe, pins=pins))


def _answers(endpoint: Endpoint, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The reference with its spread, or why there is none."""
    found = []
    for number in range(1, repeats + 1):
        say(f"behaviour: {number} of {repeats} times {len(behaviour.PROMPTS)} prompts")
        found.append(behaviour.observe(endpoint))
        if found[-1].missing:
            say(f"behaviour is not observable: {found[-1].missing}")
            return {"missing": found[-1].missing}
    return behaviour.reference(found).as_json()
