"""What changed since the last accepted run."""

import json
import shutil

import pytest
from rehearsed import BUNDLE, Place

from pytest_dspark.changes import differences, last_accepted, leaves, said


def run_of(runs, name, *, met=True, proven=True, profile="p", identity=None, hosts=None):
    folder = runs / name / "production"
    folder.mkdir(parents=True)
    about = {"requirements_met": met, "profiles": {"production": {"profile": profile, "proven": proven}}}
    (runs / name / "run.json").write_text(json.dumps(about))
    if identity is not None:
        (folder / "runtime-gate.json").write_text(json.dumps({"evidence": {"identity": identity}}))
    (folder / "preflight.json").write_text(json.dumps({"hosts": hosts or {"h": {"kernel": "6.1"}}}))
    return folder


HEAD = {"facts": {"rank_id": "a", "environment": ["A=1", "HOSTNAME=x"]}, "inventory": {"packages": {"torch": "2.11"}}}


def test_each_leaf_that_is_another_is_named_with_both_values(tmp_path):
    other = {
        "facts": {"rank_id": "b", "environment": ["A=2", "HOSTNAME=y"]},
        "inventory": {"packages": {"torch": "2.12"}},
    }
    before = run_of(tmp_path, "1", identity={"head": HEAD})
    now = run_of(tmp_path, "2", identity={"head": other}, hosts={"h": {"kernel": "6.2"}})
    assert list(differences(before, now)) == [
        "hosts.h.kernel is 6.2, it was 6.1",
        "head.facts.environment.A is 2, it was 1",
        "head.inventory.packages.torch is 2.12, it was 2.11",
    ]


def test_the_newest_accepted_run_of_the_profile_is_meant(tmp_path):
    for name, more in {"1": {}, "2": {}, "3": {"met": False}, "4": {"proven": False}, "5": {"profile": "q"}}.items():
        run_of(tmp_path, name, **more)
    (tmp_path / "6").mkdir()
    assert last_accepted(tmp_path, "9", "production", "p").name == "2"
    assert last_accepted(tmp_path, "2", "production", "p").name == "1"
    assert last_accepted(tmp_path, "9", "long1m", "p") is None


def test_nothing_to_compare_and_nothing_that_differs_are_told_apart(tmp_path):
    run_of(tmp_path, "1", identity={"head": HEAD}, met=False)
    assert list(said(tmp_path, "2", "production", "p")) == [
        "production: no earlier accepted run of p is here to compare with"
    ]
    run_of(tmp_path, "0", identity={"head": HEAD})
    assert "nothing of what was read differs from the last accepted run 0" in next(
        said(tmp_path, "1", "production", "p")
    )


def test_many_differences_are_cut(tmp_path):
    run_of(tmp_path, "1", identity={"head": {str(n): 1 for n in range(40)}})
    run_of(tmp_path, "2", identity={"head": {str(n): 2 for n in range(40)}})
    lines = list(said(tmp_path, "2", "production", "p"))
    assert len(lines) == 13 and "and 28 more" in lines[-1]


def test_leaves_of_lists_and_tables():
    assert dict(leaves({"a": [1, {"b": 2}], "environment": ["X=1=2"]})) == {
        ".a.0": 1,
        ".a.1.b": 2,
        ".environment.X": "1=2",
    }


@pytest.mark.timeout(150)
def test_a_refusal_says_what_changed(tmp_path):
    place = Place(tmp_path)
    good = place.run("-k", "not concurrency")
    assert good.process.returncode == 0, good.text[-2000:]
    about = good.folder / "run.json"
    about.write_text(about.read_text().replace('"requirements_met": false', '"requirements_met": true'))
    other = tmp_path / "bundle"
    shutil.copytree(BUNDLE, other, ignore=shutil.ignore_patterns("__pycache__"))
    (other / "labels.json").write_text((other / "labels.json").read_text().replace('"6"', '"5"'))
    place.bundles = (other, other)
    bad = place.run("-k", "launch")
    assert bad.process.returncode == 1
    assert f"since {good.folder.name}: images.host-1.labels.io.r0b0tlab.speculative.tokens is 5, it was 6" in bad.text
