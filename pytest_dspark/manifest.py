"""The runtime manifest that the image's maker publishes (schema 3): what it says of the build, against what is there.

Its profiles (`production_profile`, `long_context_profile`, …) are a record of what the maker had in mind. The pinned file
contradicts the profile that is served with a 1M window, so it is a pin and never a source of settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_dspark import strictjson
from pytest_dspark.comparison import Sheet
from pytest_dspark.identity import Rank
from pytest_dspark.plan import Plan

SCHEMA = 3
PACKAGES = {
    "vllm_version": "vllm",
    "torch_version": "torch",
    "torchvision_version": "torchvision",
    "flashinfer_version": "flashinfer-python",
    "flashinfer_cubin_version": "flashinfer-cubin",
    "cutlass_dsl_version": "nvidia-cutlass-dsl",
}
PINS = {
    "model_revision": "model_revision",
    "integrated_vllm_commit": "integrated_vllm",
    "vllm_version": "package",
}
KNOBS = {"kv_cache_dtype": "KV_CACHE_DTYPE", "moe_backend": "MOE_BACKEND"}


def parse(text: str | None) -> dict[str, Any] | None:
    """The manifest's object; None for what is none."""
    try:
        data = strictjson.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def patched_files(data: Mapping[str, Any] | None) -> dict[str, str]:
    """Files below the package folder with the sha256 that the maker's patch left."""
    patch = (data or {}).get("flashinfer_local_patch")
    files = patch.get("patched_file_sha256") if isinstance(patch, dict) else None
    return {str(path): str(digest) for path, digest in files.items()} if isinstance(files, dict) else {}


def compare(plan: Plan, ranks: Sequence[Rank], sheet: Sheet) -> None:
    """What the manifest inside each rank says, against pins, profile, packages and files. Nothing without a pinned one."""
    if not plan.recipe.pins.manifest_sha256:
        return
    for rank in ranks:
        data = parse(rank.manifest)
        if data is None:
            sheet.not_observable.append(f"rank {rank.number} ({rank.host}): the runtime manifest cannot be read there")
            continue
        for what, expected, found, how in _said(plan, rank, data):
            sheet.add(f"runtime manifest {what}", rank.number, expected, found, host=rank.host, how=how)


def _said(plan: Plan, rank: Rank, data: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    """What the manifest says (expected) beside what is so (found)."""
    yield "schema_version", SCHEMA, data.get("schema_version"), "the manifest"
    for key, pin in PINS.items():
        if getattr(plan.recipe.pins, pin):
            yield key, data.get(key), getattr(plan.recipe.pins, pin), f"pin {pin}"
    for key, knob in KNOBS.items():
        if key in data and knob in plan.settings.values:
            yield key, data[key], plan.settings.values[knob], f"profile {knob}"
    if rank.inventory.missing:
        return
    for key, package in PACKAGES.items():
        if key in data:
            yield key, data[key], rank.inventory.packages.get(package), f"package {package} inside the rank"
    for path, digest in patched_files(data).items():
        yield f"sha256 of {path}", digest, rank.inventory.extra.get(path), "the file inside the rank"
