"""Whole sessions against two emulated ranks: what is launched, in which order, what is refused, and what is left."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rehearsed import BUNDLE, ROOT, free_port

from pytest_dspark.checks import bfcl, quality

pytestmark = pytest.mark.timeout(150)
GATE = [
    "image",
    "pins",
    "labels",
    "argv",
    "symmetry",
    "environment",
    "restarts",
    "container",
    "mounts",
    "model",
    "weights",
    "compilation",
    "markers",
    "forbidden",
    "frozen",
    "behaviour",
    "canaries",
]


def twin(place, change):
    """A copy of the bundle for host 2, changed."""
    copy = place.folder / "bundle"
    shutil.copytree(BUNDLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    change(copy)
    place.bundles = (BUNDLE, copy)


def assert_refused(session, words, *, code=1):
    assert session.process.returncode == code, session.text[-3000:]
    assert words in session.text, session.text[-3000:]
    assert session.place.living() == []


# --- what a good session leaves


def test_production_leaves_rows_reports_gate_and_logs(place):
    session = place.run(timed=True)
    assert session.process.returncode == 0, session.text[-3000:]
    verdicts = session.verdicts()
    absent = {f"gate.{name}" for name in ("mounts", "frozen", "behaviour")} | {"gsm8k", "r0b0bench.systems"}
    absent |= {f"bfcl.{name}" for name in bfcl.CATEGORIES} | {f"quality.{name}" for name in quality.WHY}
    assert {verdicts.pop(name) for name in absent} == {"NOT_IMPLEMENTED"}
    assert set(verdicts.values()) == {"PASS"} and {f"gate.{name}" for name in GATE} - absent < set(verdicts)
    assert place.living() == []
    gate = json.loads((session.folder / "production" / "runtime-gate.json").read_text())
    assert (gate["schema_version"], gate["status"], gate["errors"]) == (3, "PASS", [])
    assert gate["evidence"]["semantic"]["content"] == "133" and set(gate["evidence"]["runtime_identity"]) == {
        "head",
        "worker",
    }
    for rank in (0, 1):
        assert (
            "CUDA_GRAPH_REPLAY implementation=regular status=observed"
            in (session.folder / "production" / f"rank{rank}.log").read_text()
        )
    run = session.run_json()
    assert (run["status"], run["accepted"], run["requirements_met"], run["publishable"]) == (
        "complete",
        None,
        True,
        False,
    )
    assert session.text.strip().splitlines()[-1].endswith(str(session.folder))
    cases = list(ElementTree.parse(session.folder / "junit.xml").getroot().iter("testcase"))
    assert len(cases) == len(session.cases()) < len(session.rows())
    for case in cases:
        names = {p.get("name"): p.get("value") for p in case.iter("property")}
        assert names["dspark_run"] == run["run"] and len(names["dspark_fingerprint"]) == 16
    assert cases[0].get("name") == "test_launch[production]"


def test_two_profiles_are_launched_in_order_with_a_gate_each(place):
    session = place.run(mark="long1m or production")
    assert session.process.returncode == 0, session.text[-3000:]
    starts = [line for line in session.text.splitlines() if "starting rank 0" in line]
    assert [line.split()[1] for line in starts] == ["long1m", "production"]
    assert session.text.index("long1m: stopped; nothing is left") < session.text.index(
        "dspark: production +0s: starting rank 1"
    )
    assert session.verdicts("long1m")["gate.canaries"] == session.verdicts("production")["gate.canaries"] == "PASS"
    argv = json.loads((session.folder / "long1m" / "plan.json").read_text())["ranks"][0]["argv"]
    assert "--kv-cache-memory-bytes" not in argv and argv[argv.index("--max-model-len") + 1] == "1048576"


def test_four_workers_make_the_same_rows_with_one_launch_a_profile(place):
    alone, four = (
        place.run(mark="long1m or production", timed=True),
        place.run("-n", "4", mark="long1m or production", timed=True),
    )
    assert four.process.returncode == 0, four.text[-3000:]
    for profile in ("long1m", "production"):
        assert alone.verdicts(profile) == four.verdicts(profile)
    assert len(alone.rows()) == len(four.rows())
    assert four.text.count("starting rank 0") == 2 and place.living() == []
    assert len({row["written_by"] for row in four.rows()}) > 1, "only one worker did everything"
    assert (four.folder / "publish" / "junit.xml").exists() and four.run_json()["requirements_met"]


def test_any_number_of_ranks(place):
    place.bundles, place.env = (BUNDLE,) * 3, ({}, {}, {})
    session = place.run()
    assert session.process.returncode == 0, session.text[-3000:]
    gate = json.loads((session.folder / "production" / "runtime-gate.json").read_text())
    assert [entry["rank"] for entry in gate["evidence"]["runtime_identity"].values()] == [0, 1, 2]
    assert place.living() == []


def test_breakable_profile_launches_with_the_same_image(place):
    a, b = place.run("-k", "launch or gate"), place.run("-k", "launch or gate", mark="breakable_ab")
    assert b.process.returncode == 0, b.text[-3000:]
    images = [
        json.loads((s.folder / mark / "preflight.json").read_text())["images"]["host-1"]["image_id"]
        for s, mark in ((a, "production"), (b, "breakable_ab"))
    ]
    assert images[0] == images[1] and images[0].startswith("sha256:")
    assert "Breakable CUDA graph enabled" in (b.folder / "breakable_ab" / "rank1.log").read_text()


def test_a_subset_is_not_an_acceptance(place):
    session = place.run("-k", "launch")
    assert session.process.returncode == 0 and session.run_json()["accepted"] is None
    assert "subset: not an acceptance" in session.text.strip().splitlines()[-1]
    assert place.living() == [], "without a teardown case the engine is stopped all the same"


# --- the model folder


def test_one_flipped_byte_of_the_weights_is_refused_and_named(place):
    other = place.folder / "model"
    shutil.copytree(BUNDLE / "model", other)
    place.models = (BUNDLE / "model", other)
    shard = other / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b"part 2", b"part 3"))
    session = place.run("--dspark-weights=sha256")
    assert_refused(session, "IDENTITY_MISMATCH: host-2: sha256 of shards equal to host-1")
    assert shard.name in session.text and "hashing" in session.text
    assert session.verdicts()["launch"] == "ERROR"


# --- usage


def plain(*args):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_production_without_a_cluster_is_a_usage_error():
    done = plain("-m", "production")
    assert done.returncode == 4 and "--dspark-cluster" in done.stderr and "rehearsal" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-m", "prodution", "suites"], "prodution"),
        (["-m", "production", "--dspark-cluster", "rehearsal", "-n", "2", "--dist", "loadfile"], "--dist load"),
        (
            ["-m", "production", "--dspark-cluster", "rehearsal", "--timeout", "9", "--timeout-method", "thread"],
            "--timeout-method=signal",
        ),
        (["-m", "production", "--dspark-cluster", "rehearsal", "--dspark-endpoint", "http://x"], "exclude each other"),
        (["-m", "production", "--dspark-cluster", "nowhere.toml"], "nowhere.toml"),
        (
            ["-m", "production or long1m", "--dspark-cluster", "rehearsal", "--dspark-profile", "x"],
            "exactly one profile mark",
        ),
        (
            ["-m", "production", "--dspark-cluster", "rehearsal", "--dspark-profile", "nothing"],
            "profile 'nothing' is not known",
        ),
        (["-m", "production", "--dspark-cluster", "rehearsal", f"--dspark-out={ROOT}"], "outside git work trees"),
        (
            ["-m", "production", "--dspark-cluster", "rehearsal", "--junitxml=/proc/none/x.xml"],
            "--junitxml /proc/none/x",
        ),
        (
            ["-m", "production", "--dspark-cluster", "rehearsal", "--junitxml=/dev/null"],
            "expected a file that can be read",
        ),
        (
            ["-m", "production", "--dspark-cluster", "rehearsal", "-o", "junit_duration_report=call"],
            "junit_duration_report = call: the report must say what a whole case took, expected total",
        ),
    ],
)
def test_usage_errors_launch_nothing(args, words):
    done = plain(*args)
    assert done.returncode == 4, done.stdout[-2000:] + done.stderr[-2000:]
    assert words in done.stderr


def test_collect_only_needs_no_cluster_and_gives_fixed_ids():
    first = plain("--collect-only", "-q", "-m", "long1m or production", "suites")
    ids = [line for line in first.stdout.splitlines() if "::" in line]
    assert first.returncode == 0 and ids[0] == "suites/test_launch.py::test_launch[long1m]"
    assert "suites/test_gate.py::test_gate[production-image]" in ids
    assert ids.index("suites/test_teardown.py::test_teardown[long1m]") < ids.index(
        "suites/test_launch.py::test_launch[production]"
    )
    again = plain("--collect-only", "-q", "-m", "long1m or production", "suites")
    assert ids == [line for line in again.stdout.splitlines() if "::" in line]


def test_plain_pytest_deselects_what_needs_an_engine():
    done = plain("suites", "--collect-only", "-q")
    assert "no tests collected" in done.stdout and "deselected" in done.stdout


def test_plan_is_printed_and_nothing_launched(place):
    done = plain("--dspark-plan", "-m", "long1m", "--dspark-cluster", "docs/cluster.example.toml")
    assert done.returncode == 0, done.stderr
    (made,) = json.loads(done.stdout.partition("\n# ")[0])
    assert made["launch_order"] == [1, 0] and made["ranks"][1]["argv"][-1] == "--headless"
    assert "docker -H ssh://operator@192.0.2.2:22 run -d --name dspark_vllm" in done.stdout


def test_help_and_markers_name_what_there_is():
    text = plain("--help").stdout
    assert all(
        f"--dspark-{name}" in text
        for name in ("cluster", "recipe", "profile", "out", "resume", "endpoint", "plan", "keep", "attach")
    )
    assert "@pytest.mark.long1m" in plain("--markers").stdout
    assert "The verdict of this case's check" in plain("--fixtures", "suites/test_gate.py").stdout


# --- refused, each in one sentence


def test_another_image_on_one_host(place):
    twin(place, lambda copy: (copy / "extra.txt").write_text("x"))
    assert_refused(place.run(), "IDENTITY_MISMATCH: host-2: image is sha256:")


def test_a_changed_label(place):
    def change(copy):
        labels = json.loads((copy / "labels.json").read_text())
        (copy / "labels.json").write_text(json.dumps(labels | {"io.r0b0tlab.speculative.tokens": "5"}))

    twin(place, change)
    assert_refused(place.run(), "host-2: image label io.r0b0tlab.speculative.tokens is '5'")


def test_a_dirty_wrapper_tree(place):
    shutil.copytree(ROOT / "recipe", place.folder / "recipe")
    path = place.folder / "recipe" / "rehearsal.toml"
    path.write_text(path.read_text().replace('wrapper = "any"', 'wrapper = "clean"'))
    tree = place.folder / "tree"
    tree.mkdir()
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    place.recipe, place.wrapper = str(path), str(tree)
    assert place.run("-k", "launch").process.returncode == 0, "a clean tree is fine"
    (tree / "scribble").write_text("x")
    assert_refused(place.run(), "WRAPPER_DIRTY")


def test_a_worker_that_exits_at_once(place):
    place.env = ({}, {"REHEARSAL_FAULT": "exit_at_start=3"})
    session = place.run()
    assert_refused(session, "RANK_EXITED: rank 1 (host-2) is exited with exit code 3")
    verdicts = session.verdicts()
    assert (verdicts.pop("launch"), verdicts.pop("teardown")) == ("ERROR", "PASS")
    assert set(verdicts.values()) == {"BLOCKED"}
    assert 'failures="0"' in (session.folder / "junit.xml").read_text()


def test_a_port_in_use(place):
    with socket.create_server(("127.0.0.1", place.port)):
        assert_refused(place.run(), f"PORT_TAKEN: host-1: API port {place.port} is in use by")


def test_an_unknown_knob(place):
    profile = place.folder / "x.env"
    profile.write_text((ROOT / "profiles" / "dspark-r0b0tlab-production.env").read_text() + "MAX_NUM_SEQ=16\n")
    session = place.run(f"--dspark-profile={profile}")
    assert_refused(session, "unknown knob MAX_NUM_SEQ", code=4)
    assert not (place.out / "runs").exists()


def test_a_foreign_rank_of_our_name_and_a_live_run_are_left_alone(place):
    place.env = ({"REHEARSAL_FAULT": "hang_after_tokens=150"}, {})
    first = place.start()
    first.wait_for("engine proven and ready")
    ranks = place.living()
    second = place.run()
    assert second.process.returncode == 1 and "NAME_TAKEN: host-1: dspark_vllm" in second.text, second.text[-3000:]
    assert set(second.verdicts().values()) == {"ERROR", "BLOCKED"}
    assert place.living() == ranks and first.process.poll() is None, "the live run was touched"
    first.process.send_signal(signal.SIGINT)
    assert first.end() == 2 and place.living() == []


# --- keep, reuse, attach


def test_keep_then_attach_then_reuse(place):
    kept = place.run("--dspark-keep")
    assert kept.process.returncode == 1, "a kept engine leaves teardown NOT_IMPLEMENTED, which the recipe requires"
    assert kept.verdicts()["teardown"] == "NOT_IMPLEMENTED"
    ranks = place.living()
    assert len(ranks) == 2
    attached = place.run("--dspark-attach")
    assert attached.verdicts()["gate.canaries"] == "PASS" and "starting rank" not in attached.text
    assert place.living() == ranks, "attach never stops"
    again = place.run()
    assert again.process.returncode == 0, again.text[-3000:]
    assert "reusing the engine kept by run" in again.text and "starting rank" not in again.text
    assert again.verdicts()["gate.markers"] == "PASS", "it is proven again"
    assert place.living() == []


def test_attach_without_an_engine(place):
    assert_refused(place.run("--dspark-attach"), "expected a running rank to use")


def test_foreign_endpoint_runs_the_http_checks_and_proves_nothing(place):
    assert len(place.run("--dspark-keep").place.living()) == 2
    command = [
        "-m",
        "production",
        f"--dspark-endpoint=http://127.0.0.1:{place.port}",
        "--dspark-recipe=rehearsal",
        f"--dspark-out={place.out}",
        "suites",
    ]
    done = plain(*command)
    assert "acceptance not applicable" in done.stdout.strip().splitlines()[-1], done.stdout[-3000:]
    run = done.stdout.partition("dspark: run ")[2].partition(",")[0]
    rows = [json.loads(line) for line in (place.out / "runs" / run / "rows.jsonl").read_text().splitlines()]
    assert {row["verdict"] for row in rows if row["check"].startswith("correctness")} == {"PASS"}
    assert {row["verdict"] for row in rows if row["check"].startswith("gate")} == {"NOT_IMPLEMENTED"}


def test_foreign_endpoint_under_xdist_and_with_nobody_there(place):
    assert len(place.run("--dspark-keep").place.living()) == 2
    recipe = ["--dspark-recipe=rehearsal", f"--dspark-out={place.out}", "suites"]
    both = plain(
        "-m", "production and correctness", "-n", "2", f"--dspark-endpoint=http://127.0.0.1:{place.port}", *recipe
    )
    assert (both.returncode, " passed" in both.stdout and " failed" not in both.stdout) == (0, True), both.stdout[
        -3000:
    ]
    nobody = plain("-m", "production and gate", f"--dspark-endpoint=http://127.0.0.1:{free_port()}", *recipe)
    assert nobody.returncode == 1, "nothing passed, yet green"
    address = f"--dspark-endpoint=http://127.0.0.1:{place.port}"
    other = plain("-m", "production and correctness", address, "--dspark-model=other", *recipe)
    assert (other.returncode, "serves deepseek-v4-flash-dspark, expected other" in other.stdout) == (1, True)


def test_required_checks_that_are_missing_without_narrowing_are_not_accepted(place):
    session = place.run("--ignore=suites/test_correctness.py", timed=True)
    assert session.process.returncode == 1
    assert "production: correctness.json is missing" in session.run_json()["reasons"]
    assert session.run_json()["exit_status"] == 1, "run.json must say what pytest says"


def test_a_failed_check_in_an_edited_suite_is_not_green(place):
    suite = place.folder / "test_edited.py"
    suite.write_text(
        "import pytest\n"
        "@pytest.mark.profiles('production')\n"
        "@pytest.mark.check('correctness.arithmetic')\n"
        "def test_arithmetic(verdict):\n    pass\n"
    )
    shutil.copytree(ROOT / "recipe", place.folder / "recipe")
    path = place.folder / "recipe" / "dspark-sm121.toml"
    path.write_text(path.read_text().replace('expect = "81"', 'expect = "82"'))
    place.recipe = str(place.folder / "recipe" / "rehearsal.toml")
    command = ["-m", "production", f"--dspark-cluster={place.cluster()}", f"--dspark-out={place.out}", str(suite)]
    done = plain(*command)
    assert "1 passed" in done.stdout and "1 FAIL" in done.stdout, done.stdout[-3000:]
    assert done.returncode == 1


# --- defects that the gate and the checks must see


@pytest.mark.parametrize(
    ("rank", "fault", "check", "words"),
    [
        (0, "compile_on", "gate.compilation", "compilation configuration that the engine logged"),
        (1, "marker_missing=CUDA_GRAPH_CAPTURE", "gate.markers", "log marker graph-capture-regular"),
        (1, "nccl_socket", "gate.markers", "log marker fabric"),
        (1, "extra_line=fallback to eager", "gate.forbidden", "forbidden log line fallback"),
        (0, "wrong_model_len=131072", "gate.model", "max_model_len: expected 327680, found 131072"),
    ],
    ids=["compile-on", "marker-missing", "tcp-fallback", "forbidden-line", "window"],
)
def test_the_gate_goes_red(place, rank, fault, check, words):
    place.env = ({"REHEARSAL_FAULT": fault}, {}) if rank == 0 else ({}, {"REHEARSAL_FAULT": fault})
    session = place.run()
    rows = {row["check"]: row for row in session.rows()}
    assert session.process.returncode == 1 and rows[check]["verdict"] == "ERROR", session.text[-3000:]
    assert words in rows[check]["message"]
    assert rows["launch"]["verdict"] == "PASS" and rows["correctness.json"]["verdict"] == "BLOCKED"
    assert json.loads((session.folder / "production" / "runtime-gate.json").read_text())["status"] == "FAIL"
    assert rows["teardown"]["verdict"] == "PASS" and place.living() == []


@pytest.mark.parametrize(("fault", "verdict"), [("wrong_answer", "FAIL"), ("garble", "FAIL")])
def test_a_wrong_canary_is_the_models_failure(place, fault, verdict):
    place.env = ({"REHEARSAL_FAULT": fault}, {})
    session = place.run()
    assert session.verdicts()["gate.canaries"] == verdict and session.process.returncode == 1
    assert session.verdicts()["correctness.arithmetic"] == "BLOCKED"


# --- time-outs


def test_the_backstop_starts_when_the_engine_is_held_and_leaves_a_row(place):
    slow = {"REHEARSAL_TIME": "0.01"}
    place.env = (slow | {"REHEARSAL_FAULT": "hang_after_tokens=150"}, slow)
    session = place.run("--timeout=4", "-k", "launch or test_stream or json or one_stream or teardown", timed=True)
    assert session.process.returncode == 1, session.text[-3000:]
    rows = {row["check"]: row for row in session.rows()}
    assert rows["launch"]["verdict"] == "PASS"
    assert rows["launch"]["elapsed_s"] > 4, "the launch took no longer than the time-out: the test shows nothing"
    assert (rows["correctness.stream"]["verdict"], rows["correctness.stream"]["code"]) == ("ERROR", "DEADLINE")
    assert 'failures="0"' in (session.folder / "junit.xml").read_text()
    assert place.living() == []


# --- an xdist worker that dies


def test_a_killed_worker_ends_the_run_with_a_row_a_case(place):
    (place.folder / "killer.py").write_text(
        "import os, signal\n"
        "def pytest_runtest_call(item):\n"
        "    if 'test_arithmetic[' in item.nodeid and 'PYTEST_XDIST_WORKER' in os.environ:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    os.environ["PYTHONPATH"] = str(place.folder)
    try:
        session = place.start("-n", "2", "-p", "killer")
    finally:
        del os.environ["PYTHONPATH"]
    assert session.end(60) == 1, session.text[-3000:]
    rows = [(row["check"], row["verdict"]) for row in session.rows()]
    assert ("correctness.arithmetic", "ERROR") in rows
    assert {check for check, _ in rows} >= {"launch", "correctness.json", "correctness.retrieval", "teardown"}
    assert place.living() == []


# --- secrets


def test_no_secret_is_written_anywhere(place):
    secret = "hf_EXAMPLEEXAMPLEEXAMPLE42"
    env = {"HF_TOKEN": secret, "REHEARSAL_FAULT": f"extra_line=token {secret} and fallback to eager"}
    place.env = (env, env)
    session = place.run()
    assert session.verdicts()["gate.forbidden"] == "ERROR", session.text[-3000:]
    leaked = [path for path in place.out.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert leaked == []
    assert secret not in session.text
    assert "***" in (session.folder / "production" / "rank0.log").read_text()


# --- signals


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("number", "times"), [(signal.SIGINT, 1), (signal.SIGINT, 2), (signal.SIGTERM, 1)], ids=["int", "int-twice", "term"]
)
@pytest.mark.parametrize("moment", ["launch", "check"])
def test_signals(place, workers, number, times, moment):
    slow = {"REHEARSAL_TIME": "0.02"}
    place.env = (slow, slow)
    if moment == "check":
        place.env = ({"REHEARSAL_TIME": "0.001", "REHEARSAL_FAULT": "hang_after_tokens=150"}, {})
    session = place.start("-n", workers)
    session.wait_for("starting rank 0 on host-1" if moment == "launch" else "engine proven and ready")
    time.sleep(0.5)
    for _ in range(times):
        session.process.send_signal(number)
        time.sleep(0.1)
    assert session.end(60) == 2, session.text[-3000:]
    assert place.living() == []
    assert session.run_json()["status"] == "interrupted"
    ElementTree.parse(session.folder / "junit.xml")
    for row in session.rows():
        assert row["verdict"] != "FAIL"


# --- a rank that dies


@pytest.mark.parametrize("workers", ["0", "2"])
def test_rank_1_dies_in_a_stream(place, workers):
    place.env = ({"REHEARSAL_TIME": "0.001", "REHEARSAL_FAULT": "hang_after_tokens=150"}, {})
    session = place.start("-n", workers, "-k", "launch or test_stream or json or tool or teardown")
    session.wait_for("engine proven and ready")
    time.sleep(1.0)
    victim = next(pid for pid in place.living() if b"--headless" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    session.wait_for("RANK_EXITED: rank 1 (host-2)", seconds=10)
    assert time.monotonic() - killed < 3.0
    assert session.end() == 1, session.text[-3000:]
    rows = {row["check"]: row for row in session.rows()}
    assert "RANK_EXITED" in {row["code"] for row in rows.values()}
    assert not {row["verdict"] for row in rows.values()} & {"FAIL", "TOKEN_LIMIT"}
    assert 'failures="0"' in (session.folder / "junit.xml").read_text() and place.living() == []
