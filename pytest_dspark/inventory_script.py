"""What lies inside a rank, told by an interpreter inside it: `python3 -c SOURCE JSON` prints one line of JSON.

It runs wherever the rank runs and imports the standard library alone. Nothing is written, and what cannot be read is null.
The order: `paths` (folders to look for packages in; none: those of this interpreter), `libraries` (parts of file names),
`files` (whole paths), `hashed` (packages of which every file is hashed), `extra` (files below a package folder), `root`
(the rank's first process).
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import json
import os
import re
import sys
from typing import Any


def sha256(path: str) -> str | None:
    """sha256 of a file; None if it cannot be read."""
    total = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
    except OSError:
        return None
    return total.hexdigest()


def text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return None


def distributions(paths: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """Every package by its plain name: the first one on the path is the one that is imported."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for one in importlib.metadata.distributions(path=paths or list(sys.path)):
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
        if name:
            found.setdefault(name, one)
    return found


def family(root: int) -> set[int]:
    """The rank's first process and all that came of it."""
    parents = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        line = text(path)
        if line:
            parents[int(path.split("/")[2])] = int(line.rpartition(")")[2].split()[1])
    found, more = {root}, {root}
    while more:
        more = {pid for pid, parent in parents.items() if parent in more} - found
        found |= more
    return found


def mapped(root: int, parts: list[str]) -> dict[str, str | None]:
    """Libraries that the rank's processes really have in memory, by path, with the hash of the file as it is mapped."""
    found: dict[str, str | None] = {}
    for pid in sorted(family(root)):
        for line in (text(f"/proc/{pid}/maps") or "").splitlines():
            path = line[line.find("/") :] if "/" in line else ""
            if path and path not in found and any(part in os.path.basename(path) for part in parts):
                found[path] = sha256(f"/proc/{pid}/root{path}") or sha256(path)
    return found


def installed(paths: list[str], parts: list[str]) -> dict[str, str | None]:
    """Libraries that lie in the package folders."""
    found: dict[str, str | None] = {}
    for folder in paths or sys.path:
        for part in parts:
            for path in glob.glob(os.path.join(folder, "nvidia", "*", "lib", part + "*")):
                found[path[len(folder) + 1 :]] = sha256(path)
    return found


def package_files(one: importlib.metadata.Distribution) -> dict[str, str | None]:
    """Every file of a package, and every file beside them in its own folders, by path below the package folder."""
    base = str(one.locate_file(""))
    listed = [str(name) for name in one.files or ()]
    tops = {name.split("/")[0] for name in listed if "/" in name} - {"..", "bin"}
    tops = {top for top in tops if not top.endswith((".dist-info", ".data", "__pycache__"))}
    single = {name for name in listed if "/" not in name and name.endswith((".py", ".so", ".pth"))}
    for top in tops:
        for folder, below, names in os.walk(os.path.join(base, top)):
            below[:] = sorted(name for name in below if name != "__pycache__")
            single |= {os.path.relpath(os.path.join(folder, name), base) for name in names}
    return {name: sha256(os.path.join(base, name)) for name in sorted(single)}


def base_of(found: dict[str, importlib.metadata.Distribution], names: list[str]) -> str:
    return next((str(found[name].locate_file("")) for name in names if name in found), "")


def main(asked: dict[str, Any]) -> dict[str, Any]:
    found = distributions(asked["paths"])
    parts, files = asked["libraries"], asked["files"]
    driver = re.search(r"(\d+\.\d+[.\d]*)", text("/proc/driver/nvidia/version") or "")
    base = base_of(found, list(asked["hashed"]) + sorted(found))
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {name: one.version for name, one in sorted(found.items())},
        "mapped": mapped(asked["root"], parts) if parts else {},
        "installed": installed(asked["paths"], parts),
        "files": {path: sha256(path) for path in files},
        "extra": {path: sha256(os.path.join(base, path)) for path in asked["extra"]},
        "hashes": {name: package_files(found[name]) if name in found else None for name in asked["hashed"]},
        "kernel": os.uname().release,
        "driver": driver.group(1) if driver else None,
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
