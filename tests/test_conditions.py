"""What a host must be before a launch: each look at a host that answers as told, and what the recipe makes of it."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest
from rehearsed import BUNDLE, ROOT

from pytest_dspark import doctor
from pytest_dspark.cluster import HostFacts, Output, load_cluster
from pytest_dspark.conditions import LOOKS, REMEDIES_OF, Row, judged_clock, judged_gid, judged_memory, parity, rows
from pytest_dspark.errors import HostError
from pytest_dspark.plan import plan
from pytest_dspark.profile import load_profile
from pytest_dspark.recipe import PREFLIGHT_CHECKS, load_recipe

GOOD = {
    "df": "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/x 900000000 1 800000000 1% /\n",
    "/proc/meminfo": "MemTotal: 121000000 kB\nMemFree: 118000000 kB\nCached: 100 kB\nSwapTotal: 9 kB\nSwapFree: 9 kB\n",
    "/proc/pressure/memory": "some avg10=9.00\nfull avg10=0.00 avg60=0.00\n",
    "nvidia-smi -L": "GPU 0: NVIDIA GB10 (UUID: GPU-1)\n",
    "nvidia-smi --query-compute-apps=pid,process_name": "",
    "ip": "2: enp1s0f0np0    inet 192.0.2.1/24 brd 192.0.2.255 scope global enp1s0f0np0\n",
    "/sys/class/infiniband/rocep1s0f0/ports/1/state": "4: ACTIVE\n",
    "/sys/class/infiniband/rocep1s0f0/ports/1/gid_attrs/types/3": "RoCE v2\n",
    "/sys/class/infiniband/rocep1s0f0/ports/1/gids/3": "0000:0000:0000:0000:0000:ffff:c000:0201\n",
    "ping": "",
    "test": "",
}
BAD = {
    "clock": {"date": "1000000000.0"},
    "disk": {"df": GOOD["df"].replace("800000000", "1000")},
    "memory": {
        "/proc/meminfo": GOOD["/proc/meminfo"]
        .replace("118000000", "9000000")
        .replace("Cached: 100", "Cached: 90000000")
    },
    "pressure": {"/proc/pressure/memory": "full avg10=40.00\n"},
    "swap": {"/proc/meminfo": GOOD["/proc/meminfo"].replace("SwapTotal: 9 ", "SwapTotal: 16000000 ")},
    "gpu-processes": {"nvidia-smi --query-compute-apps=pid,process_name": "4711, VLLM::EngineCore\n"},
    "gpu": {"nvidia-smi -L": "\n"},
    "interface": {"ip": GOOD["ip"].replace("192.0.2.1/", "192.0.2.9/")},
    "rdma": {"/sys/class/infiniband/rocep1s0f0/ports/1/state": "1: DOWN\n"},
    "gid": {"/sys/class/infiniband/rocep1s0f0/ports/1/gid_attrs/types/3": "IB/RoCE v1\n"},
    "jumbo": {"ping": 1},
    "cache": {"test": 1},
}


class Told:
    """A host that answers as told; a number is an exit code, what is not told is not there (127)."""

    name = "spark-1"

    def __init__(self, **answers):
        self.answers = {**GOOD, **answers}

    def facts(self):
        return HostFacts("docker", "spark-1", "6.17", "arm64", data_root="/var/lib/docker")

    def read(self, argv, *, timeout=10.0):
        keys = (" ".join(argv[:2]), argv[-1], argv[0])
        answer = next((self.answers[key] for key in keys if key in self.answers), 127)
        if argv[0] == "date" and answer == 127:
            answer = str(time.time())
        return Output(answer, b"", b"no") if isinstance(answer, int) else Output(0, answer.encode(), b"")


@pytest.fixture(scope="module")
def made():
    recipe = load_recipe(ROOT / "recipe" / "dspark-sm121.toml")
    profile = load_profile(ROOT / "profiles" / "dspark-r0b0tlab-production.env")
    return plan(profile, recipe, load_cluster(ROOT / "docs" / "cluster.example.toml"), mark="production")


def states(made, host):
    return {row.check: row.state for row in rows(made, made.specs[0], host)}


def test_a_fit_host_is_green_but_for_the_open_api(made):
    found = states(made, Told())
    assert found.pop("api") == "amber" and set(found.values()) == {"green"} and set(found) == set(LOOKS) - {"api"}


@pytest.mark.parametrize("check", BAD)
def test_each_bad_answer_is_seen_by_its_look_alone(made, check):
    found = states(made, Told(**BAD[check]))
    required = check in made.recipe.preflight.required
    assert found[check] == ("red" if required else "amber")
    assert {name for name, state in found.items() if state != "green"} == {check, "api"}


@pytest.mark.parametrize("check", ["memory", "gpu", "rdma", "jumbo", "pressure"])
def test_what_cannot_be_seen_is_red_only_where_it_is_required(made, check):
    told = Told()
    for key in BAD[check]:
        del told.answers[key]
    (row,) = [row for row in rows(made, made.specs[0], told) if row.check == check]
    required = check in made.recipe.preflight.required
    assert row.state == ("red" if required else "not observable") and ("requires it" in row.message) is required


def test_every_look_is_known_to_recipes_and_has_a_remedy():
    assert set(LOOKS) == PREFLIGHT_CHECKS and set(LOOKS) <= set(REMEDIES_OF)


def test_a_running_engine_may_hold_memory_and_gpu(made):
    told = Told(**BAD["memory"], **BAD["gpu-processes"])
    assert not {"memory", "gpu-processes"} & {row.check for row in rows(made, made.specs[0], told, launching=False)}


def test_the_clock_is_bounded_by_the_round_trip():
    assert judged_clock(0.5, 1.0, 2.0).good
    assert not judged_clock(5.0, 1.0, 2.0).good and not judged_clock(-5.0, 1.0, 2.0).good
    assert judged_clock(4.0, 6.0, 2.0).good, "a slow answer may hide a skew, and must not invent one"


def test_page_cache_is_named_and_is_not_free():
    found = {"MemTotal": 100 << 30, "MemFree": 20 << 30, "Cached": 70 << 30}
    seen = judged_memory(found, 0.8, "SHARE")
    assert not seen.good and "20.00 GiB free" in seen.message and "page cache holds 70.00 GiB" in seen.message


@pytest.mark.parametrize(
    ("kind", "gid", "good"),
    [
        ("RoCE v2", "0000:0000:0000:0000:0000:ffff:c000:0201", True),
        ("RoCE v2", "fe80:0000:0000:0000:0000:ffff:c000:0201", False),
        ("RoCE v2", "0000:0000:0000:0000:0000:0000:0000:0000", False),
        ("IB/RoCE v1", "0000:0000:0000:0000:0000:ffff:c000:0201", False),
    ],
)
def test_a_gid_must_be_ipv4_over_roce_v2(kind, gid, good):
    assert judged_gid("d", "3", kind, gid).good is good


@pytest.mark.parametrize(("severity", "state"), [("error", "red"), ("record", "amber")])
def test_hosts_of_different_kernels(made, severity, state):
    recipe = dataclasses.replace(made.recipe, asymmetry=dataclasses.replace(made.recipe.asymmetry, kernel=severity))
    facts = {"a": HostFacts("docker", "a", "6.17", "arm64"), "b": HostFacts("docker", "b", "6.11", "arm64")}
    (row,) = parity(dataclasses.replace(made, recipe=recipe), facts, {"a": "580", "b": "580"})
    assert (row.host, row.state) == ("b", state) and "6.11" in row.message and row.remedy


# --- dspark doctor


def test_nothing_looked_at_is_nothing_allowed():
    assert not doctor.allowed([]) and doctor.allowed([Row("reach", "h", "green", "")])


def ask(place, *args):
    command = [sys.executable, "-c", "import sys; from pytest_dspark.cli import main; sys.exit(main())", "doctor"]
    command += ["--cluster", str(place.cluster()), "--out", str(place.out), *args]
    begin = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert time.monotonic() - begin < 15 and place.living() == [] and not place.out.exists(), "nothing is created"
    return done


def red(place, *args):
    done = ask(place, "--json", *args)
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["allowed"] is False, done.stdout + done.stderr
    rows = [row for row in found["rows"] if row["state"] == "red"]
    assert all(row["remedy"] for row in rows)
    return [(row["check"], row["host"], row["code"]) for row in rows]


def test_a_fit_pair_is_allowed(place):
    done = ask(place)
    assert done.returncode == 0 and done.stdout.strip().endswith("a launch would be allowed"), done.stdout + done.stderr


def test_a_port_that_is_taken(place):
    with socket.create_server(("127.0.0.1", place.port)):
        assert red(place) == [("ports", "host-1", "PORT_TAKEN")]


def test_another_bundle_on_one_host(place):
    other = place.folder / "bundle"
    shutil.copytree(BUNDLE, other, ignore=shutil.ignore_patterns("__pycache__"))
    (other / "more.txt").write_text("x")
    place.bundles = (BUNDLE, other)
    assert red(place) == [("image", "host-2", "IDENTITY_MISMATCH")]


def test_no_bundle_and_no_model(place):
    place.bundles, place.models = (BUNDLE, place.folder / "none"), (BUNDLE / "model", place.folder / "none")
    assert red(place) == [
        ("image", "host-2", "IMAGE_MISSING"),
        ("pinned files", "host-2", "IDENTITY_MISMATCH"),
        ("model", "host-2", "MODEL_MISSING"),
    ]


def test_a_disk_that_is_too_small(place):
    for name in ("dspark-sm121.toml", "rehearsal.toml"):
        text = (ROOT / "recipe" / name).read_text()
        (place.folder / name).write_text(text.replace("disk_gib = 0.1", "disk_gib = 900000"))
    recipe = str(place.folder / "rehearsal.toml")
    assert red(place, "--recipe", recipe) == [("disk", "host-1", "HOST_UNFIT"), ("disk", "host-2", "HOST_UNFIT")]
    table = ask(place, "--recipe", recipe).stdout
    assert "red" in table.splitlines()[0] and "-> free space on that file system" in table
    assert table.strip().endswith("looks are red")


def test_an_engine_of_our_name(place):
    session = place.run("--dspark-keep", "-k", "launch")
    run = session.folder.name
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; from pytest_dspark.cli import main; sys.exit(main())",
                "doctor",
                "--cluster",
                str(place.cluster()),
                "--out",
                str(place.out),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1 and "NAME_TAKEN: dspark_vllm" in done.stdout and run in done.stdout
    finally:
        for pid in place.living():
            os.kill(pid, 9)


def test_a_host_that_is_not_reached_has_one_red_row(made):
    from pytest_dspark.preflight import refuse, survey

    class Gone(Told):
        name = "spark-2"

        def facts(self):
            raise HostError("HOST_UNREACHABLE", "spark-2: no answer in time")

    class There(Told):
        def image(self, reference):
            raise HostError("IMAGE_MISSING", "spark-1: no image")

        def find(self, name):
            return None

        def listener(self, port):
            return ""

    seen = survey(made, {"spark-1": There(), "spark-2": Gone()}, git=str)
    assert [row.check for row in seen.rows if row.host == "spark-2"] == ["reach"]
    with pytest.raises(Exception, match="spark-2: no answer in time; also: "):
        refuse(seen)
