"""A good pair of ranks, made from the recipe itself: what the self-test breaks, one thing at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_dspark.cluster import HostFacts, ImageFacts, RankFacts, cluster_from
from pytest_dspark.gate import Api, Rank
from pytest_dspark.hosts.options import create_body
from pytest_dspark.inventory import Inventory
from pytest_dspark.launch import labelled
from pytest_dspark.plan import Plan, plan
from pytest_dspark.setup import Options, folders, read_profile, read_recipe
from pytest_dspark.weights import File, Model

RUN = "20260101T000000Z-0000abcd"
RECIPE, PROFILE, MARK = "dspark-sm121", "dspark-r0b0tlab-production", "production"
REVISION = "0" * 64
_HOSTS = [
    {
        "name": f"node-{number}",
        "docker": "unix:///var/run/docker.sock",
        "address": f"192.0.2.{number}",
        "interface": "eth1",
        "rdma": "rdma0",
        "model": "/srv/model",
        "cache": "/srv/cache",
        "manifest": "/srv/manifest.json",
    }
    for number in (1, 2)
]
_ENGINE = (
    "(EngineCore pid=1) INFO 01-01 00:00:00 [core.py:116] Initializing a V1 LLM engine (v0.26.0) with config: model='/model', "
    "compilation_config={'mode': <CompilationMode.NONE: 0>, 'cudagraph_mode': <CUDAGraphMode.FULL_DECODE_ONLY: (2, 0)>, "
    "'cudagraph_implementation': 'regular', 'cudagraph_strict': True}"
)


def planned() -> Plan:
    """The production plan of the shipped recipe on two hosts that do not exist."""
    options = Options(Path(__file__).parent.parent, recipe=RECIPE)
    if not folders(options.root, "recipe"):
        raise FileNotFoundError(f"{options.root}: no folder of recipes")
    cluster = cluster_from({"name": "specimen", "host": _HOSTS}, source="specimen")
    recipe = read_recipe(options, cluster)
    pins = replace(recipe.pins, freeze="", freeze_sha256="")
    return plan(read_profile(PROFILE, options), replace(recipe, pins=pins), cluster, mark=MARK)


def good_rank(made: Plan, number: int) -> Rank:
    """A rank that is exactly as planned, with the log lines that the recipe's own examples give."""
    spec, pins = made.specs[number], made.recipe.pins
    image = ImageFacts(
        spec.image, pins.image_id, "config", pins.architecture, dict(made.recipe.labels), (), (), (spec.image,)
    )
    marks = {**image.labels, **dict(labelled(spec, RUN, made.fingerprint).labels)}
    facts = RankFacts(
        rank_id=f"id{number}",
        image_id=pins.image_id,
        path=spec.argv[0],
        args=spec.argv[1:],
        environment=tuple(f"{key}={value}" for key, value in spec.env),
        mounts=tuple(_mount(m.source, m.target, m.read_only) for m in spec.mounts),
        labels=marks,
        restart_policy="no",
        restart_count=0,
        started_at="2026-01-01T00:00:00Z",
        name=spec.name,
        image_reference=spec.image,
        network_mode="host",
        ipc_mode="host",
        options=create_body(spec.host, spec)["HostConfig"],
    )
    return Rank(
        number,
        spec.host,
        facts,
        image,
        _log(made, number),
        pins.manifest_sha256,
        machine=HostFacts(
            "docker", spec.host, "6.17.0", "arm64", "29.1", "1.52", "overlay2", "unix:///x", "/var/lib/docker"
        ),
        model_revision=pins.model_revision,
        run_id=RUN,
        manifest=json.dumps(_manifest(made)),
        inventory=_inventory(made),
        model=_model(made),
    )


def _mount(source: str, target: str, read_only: bool) -> Mapping[str, str | bool]:
    return {"Type": "bind", "Source": source, "Destination": target, "RW": not read_only}


def _log(made: Plan, number: int) -> str:
    """One line of each required marker's own examples, and the engine's configuration on the head."""
    values = made.settings.values["COMPILATION_CONFIG_JSON"]["cudagraph_implementation"]
    other = {"regular": "breakable", "breakable": "regular"}[values]
    lines = [m.match[0] for m in made.recipe.markers if m.kind == "required" and not m.name.endswith(other)]
    return "\n".join([*([_ENGINE] if number == 0 else []), *lines]) + "\n"


def _manifest(made: Plan) -> dict[str, Any]:
    pins = made.recipe.pins
    return {
        "schema_version": 3,
        "vllm_version": pins.package,
        "model_revision": pins.model_revision,
        "integrated_vllm_commit": pins.integrated_vllm,
    }


def _inventory(made: Plan) -> Inventory:
    return Inventory(
        python="3.12.3",
        packages={"vllm": made.recipe.pins.package, "torch": "2.11.0+cu130"},
        mapped={"/x/nvidia/nccl/lib/libnccl.so.2": "aa" * 32},
        files={"/etc/nccl.conf": "bb" * 32},
        hashes={"vllm": {"vllm/engine.py": "dd" * 32}},
        kernel="6.17.0",
        driver="580.126",
    )


def _model(made: Plan) -> Model:
    count = made.recipe.weights.shards or 2
    shards = tuple(File(f"model-{n:05}-of-{count:05}.safetensors", 1000 + n, "1.5", n) for n in range(1, count + 1))
    config = {**dict(made.recipe.weights.config), "num_hidden_layers": 43}
    return Model("/srv/model", config, shards, tuple(one.name for one in shards), sum(one.size for one in shards))


def good_api(made: Plan) -> Api:
    """An API that serves what the plan asks for and answered every canary rightly."""
    right = {"ok": True, "answered": True, "text": "x", "finish_reason": "stop", "message": ""}
    answers = {canary.name: right for canary in made.recipe.canaries}
    window = int(made.settings.values["MAX_MODEL_LEN"])
    return Api([made.served_model], window, made.recipe.pins.package, answers)
