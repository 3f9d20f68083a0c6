"""What lies inside a rank: the script as an interpreter inside would run it, and what is made of its answer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_dspark.cluster import HostEntry
from pytest_dspark.hosts import open_host
from pytest_dspark.inventory import SCRIPT, order, parse, take
from pytest_dspark.recipe import Inside

BUNDLE = Path(__file__).parents[1] / "pytest_dspark" / "rehearsal"


@pytest.fixture
def site(tmp_path):
    """A folder with one package of two files, and a library."""
    info = tmp_path / "engine-1.0.dist-info"
    (tmp_path / "engine" / "deep").mkdir(parents=True)
    (tmp_path / "nvidia" / "nccl" / "lib").mkdir(parents=True)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Engine\nVersion: 1.0\n")
    (info / "RECORD").write_text("engine/__init__.py,,\nengine/deep/kernel.py,,\nengine-1.0.dist-info/METADATA,,\n")
    (tmp_path / "engine" / "__init__.py").write_text("")
    (tmp_path / "engine" / "deep" / "kernel.py").write_text("x = 1\n")
    (tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2").write_bytes(b"one")
    return tmp_path


def told(site, **changes):
    inside = Inside(files=(str(site / "nccl.conf"),))
    asked = order(inside, paths=[str(site)], root=os.getpid(), hashed=["engine", "absent"], extra=["engine/gone.py"])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.read_text(), asked], capture_output=True, text=True, timeout=60, check=True
    )
    return parse(done.stdout)


def test_packages_libraries_and_files_are_told_with_their_hashes(site):
    found = told(site)
    assert found.packages == {"engine": "1.0"}
    assert list(found.installed) == ["nvidia/nccl/lib/libnccl.so.2"]
    assert sorted(found.hashes["engine"]) == ["engine/__init__.py", "engine/deep/kernel.py"]
    assert found.hashes["absent"] is None and found.extra == {"engine/gone.py": None}
    assert found.files == {str(site / "nccl.conf"): None} and found.kernel == os.uname().release


@pytest.mark.parametrize("name", ["engine/deep/kernel.py", "engine/added.py"])
def test_an_edited_or_an_added_file_is_seen(site, name):
    before = told(site)
    (site / name).write_text("x = 2\n")
    after = told(site)
    assert before.hashes != after.hashes and before.packages == after.packages


def test_two_builds_of_one_library_version_are_told_apart(site):
    before = told(site)
    (site / "nvidia" / "nccl" / "lib" / "libnccl.so.2").write_bytes(b"two")
    assert told(site).installed != before.installed


def test_a_library_in_memory_is_told_by_the_process_that_has_it(site):
    library = next(p for p in map(Path, _maps()) if p.name.startswith("libc"))
    asked = order(Inside(libraries=(library.name,), files=()), paths=[str(site)], root=os.getpid())
    done = subprocess.run([sys.executable, "-c", SCRIPT.read_text(), asked], capture_output=True, text=True, check=True)
    assert list(parse(done.stdout).mapped) == [str(library)]


def _maps():
    return [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]


def test_a_rank_without_an_interpreter_says_so(tmp_path):
    host = open_host(HostEntry("h", "127.0.0.1", process=True), cluster="c", state=tmp_path)
    found = take(host, "1:1", "/nowhere/python3", json.dumps({}))
    assert "code 127" in found.missing and found.packages == {}


@pytest.mark.parametrize("text", ["", "Segmentation fault", "[]", '{"surprise": 1}'])
def test_what_is_no_inventory_is_none(text):
    assert parse(text).missing
