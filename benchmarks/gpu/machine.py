"""Describe a machine with two GPUs as a cluster of two process ranks: bundle, recipe copy, cluster file, GPU memory now.

usage: machine.py --site SITE --model MODEL --out OUT

SITE is where vLLM is installed (`pip install --target`), MODEL the model's folder. OUT gets
  bundle/inventory.json   every installed file with its sha256: the identity that stands for an image
  bundle/labels.json      the version that the installed package states
  cluster.toml            one host a GPU, each with its own CUDA_VISIBLE_DEVICES
  recipe/                 the recipes, with vllm-process asking for a stream long enough to kill a rank in
  before.json             what the GPUs hold, versions, date
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
RANKS = 2
STREAM_TOKENS = 6000
# What the machine sets for its own CUDA software (multicast switched off among it) reaches the ranks as it is.
MACHINE = (
    "CPATH",
    "CUDA_",
    "CUDNN_",
    "C_INCLUDE_PATH",
    "LIBRARY_PATH",
    "NCCL_",
    "NVIDIA_",
    "NVSHMEM_",
    "TORCH_",
    "TRITON_",
)
OURS = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "OMP_NUM_THREADS": "4",
    "PYTHONUNBUFFERED": "1",
    # Multicast over NVLink stays off: where a host's GPUs are shared, it can put them out of service.
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def inventory(site: Path) -> dict[str, str]:
    """Relative path -> sha256 of every file; what Python compiles by itself is no part of it."""
    files = sorted(path for path in site.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    with ThreadPoolExecutor(8) as pool:
        return {str(path.relative_to(site)): found for path, found in zip(files, pool.map(digest, files), strict=True)}


def version(site: Path) -> str:
    """The version of vLLM in SITE, and nowhere else. Raises SystemExit if it is not there exactly once."""
    found = [one.version for one in importlib.metadata.distributions(name="vllm", path=[str(site)])]
    if len(found) != 1:
        raise SystemExit(f"{site}: expected one installed vllm, found {found}")
    return found[0]


def environment(gpu: int, site: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the rank on this GPU is started with beside the recipe's."""
    machine = {key: value for key, value in environ.items() if key.startswith(MACHINE)}
    return machine | OURS | {"PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": str(gpu)}


def cluster_text(site: Path, model: Path, bundle: Path, environ: Mapping[str, str] = os.environ) -> str:
    lines = ['name = "gpu"', 'recipe = "vllm-process"', "port = 8888", "master_port = 29512"]
    for gpu in range(RANKS):
        lines += ["", "[[host]]", f'name = "gpu-{gpu}"', "process = true", 'address = "127.0.0.1"']
        lines += [f"model = {json.dumps(str(model))}", f"bundle = {json.dumps(str(bundle))}", "[host.env]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in environment(gpu, site, environ).items()]
    return "\n".join(lines) + "\n"


def copy_recipes(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(ROOT / "recipe", out, ignore=shutil.ignore_patterns("*.overlay.toml"))
    path = out / "vllm.toml"
    text, changed = re.subn(r"(?m)^stream_tokens = \d+$", f"stream_tokens = {STREAM_TOKENS}", path.read_text())
    if changed != 1:
        raise SystemExit(f"{path}: expected one stream_tokens, found {changed}")
    path.write_text(text)


def gpus() -> dict[str, int]:
    """MiB in use by index. Raises if nvidia-smi is missing or says something else."""
    query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, check=True, capture_output=True, text=True, timeout=30).stdout.splitlines()
    return {index.strip(): int(used) for index, used in (line.split(",") for line in lines)}


def engines() -> list[int]:
    """Processes that look like vLLM, whoever started them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if re.search(rb"VLLM::|vllm\.entrypoints", path.read_bytes()):
                found.append(int(path.parent.name))
    return found


def machine() -> dict[str, object]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    names = subprocess.run(query, check=False, capture_output=True, text=True, timeout=30).stdout.splitlines()
    packages = ("torch", "transformers", "pytest", "pytest-timeout", "pytest-xdist", "requests", "urllib3", "tiktoken")
    installed = {one.metadata["Name"].lower(): one.version for one in importlib.metadata.distributions()}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpus": names,
        "used_mib": gpus(),
        "engines": engines(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: installed.get(name) for name in packages},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("site", "model", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    bundle = given.out / "bundle"
    bundle.mkdir(parents=True, exist_ok=True)
    (bundle / "inventory.json").write_text(json.dumps(inventory(given.site), indent=0))
    (bundle / "labels.json").write_text(json.dumps({"io.vllm.package.version": version(given.site)}))
    (given.out / "cluster.toml").write_text(cluster_text(given.site, given.model, bundle))
    copy_recipes(given.out / "recipe")
    seen = machine() | {"vllm": version(given.site)}
    (given.out / "before.json").write_text(json.dumps(seen, indent=1) + "\n")
    print(json.dumps(seen))
    print("environment names here:", " ".join(sorted(os.environ)), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
