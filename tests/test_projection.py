"""Nothing private leaves: forty strings planted through every door of a run, and every rule shown to be needed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import packed
import pytest
from packed import rows_of
from rehearsed import BUNDLE

from pytest_dspark import pack, projection, publish, sanitize, setup
from pytest_dspark.evidence import Case, Finding, RunFolder, row
from pytest_dspark.plan import as_json
from pytest_dspark.projection import RULES, Projector, planted
from pytest_dspark.publish import Refused, Source
from pytest_dspark.verdict import PASS

made = packed.made

# What must be nowhere on the disk: secrets.
SECRETS = {
    "env-token": "hf_Plant0001AbCdEfGhIjKlMnOp",
    "env-key": "Plant0002-of-the-server",
    "argv-key": "Plant0003argv",
    "argv-equals": "Plant0004argv",
    "bearer": "Plant0005.bearer",
    "basic": "UGxhbnQwMDA2OnNlY3JldA==",
    "github": "ghp_Plant0007abcdefghij",
    "github-pat": "github_pat_Plant0008abcd",
    "gitlab": "glpat-Plant0009abcdef",
    "openai": "sk-Plant0010abcdefgh",
    "aws": "AKIAPLANT0011ABCDEFG",
    "slack": "xoxb-Plant0012-abcdef",
    "url-password": "Plant0013pw",
    "url-user": "Plant0014user",
    "pem": "MIIPlant0015AbCdEf",
    "inspect-env": "Plant0016inspect",
    "quoted": "Plant0017quoted",
    "known": "Plant0018 was given as DSPARK_API_KEY",
}
# What must be nowhere in publish/: private names.
PRIVATE = {
    "host": "gb10-livingroom",
    "worker": "gb10-kitchen",
    "address": "10.77.13.21",
    "worker-address": "10.77.13.22",
    "lan": "192.168.178.44",
    "cgnat": "100.101.102.103",
    "link-local-4": "169.254.17.18",
    "ula": "fd42:beef:1234::17",
    "link-local": "fe80::42:acff:fe11:77",
    "global-6": "2001:db8:77::9",
    "mac": "3c:6d:66:01:02:03",
    "gid": "fe80:0000:0000:0000:3e6d:66ff:fe01:0203",
    "mail": "jane.doe@example.org",
    "user": "janedoe",
    "home": "/home/janedoe/models/x",
    "mac-home": "/Users/janedoe/cache",
    "raid": "/raid7/secret-project/weights",
    "interface": "enp1s0f1np1",
    "rdma": "rocep1s0f1",
    "container": "ab12" * 16,
    "container-name": "/janes_engine",
    "fqdn": "livingroom.fritz.lan",
    "gpu": "GPU-12345678-1234-1234-1234-123456789abc",
    "spark": "spark-7f3a",
    "env-value": "Plant-of-one-host-alone",
}
LOG = f"""\
INFO HF_HUB_TOKEN={SECRETS["env-token"]} VLLM_API_KEY={SECRETS["env-key"]}
INFO args: serve --api-key {SECRETS["argv-key"]} --hf-token={SECRETS["argv-equals"]}
DEBUG Authorization: Bearer {SECRETS["bearer"]}
DEBUG Authorization: Basic {SECRETS["basic"]}
INFO {SECRETS["github"]} {SECRETS["github-pat"]} {SECRETS["gitlab"]} {SECRETS["openai"]} {SECRETS["aws"]} {SECRETS["slack"]}
INFO redis://cache:{SECRETS["url-password"]}@{PRIVATE["lan"]}:6379 https://{SECRETS["url-user"]}@example.invalid/x
-----BEGIN OPENSSH PRIVATE KEY-----
{SECRETS["pem"]}
-----END OPENSSH PRIVATE KEY-----
INFO [{{"Id": "{PRIVATE["container"]}", "Name": "{PRIVATE["container-name"]}", "Config": {{"Hostname": "{PRIVATE["spark"]}", "Env": ["DB_PASSWORD={SECRETS["inspect-env"]}"]}}}}]
INFO {{'api_key': '{SECRETS["quoted"]}'}} {SECRETS["known"]}
NCCL INFO NET/IB : Using [0]{PRIVATE["rdma"]}:1/RoCE [RO]; OOB {PRIVATE["interface"]}:{PRIVATE["address"]}<0>
link/ether {PRIVATE["mac"]} GID {PRIVATE["gid"]} inet6 {PRIVATE["ula"]} {PRIVATE["link-local"]}%{PRIVATE["interface"]} {PRIVATE["global-6"]}
from {PRIVATE["mail"]} ssh {PRIVATE["user"]}@{PRIVATE["worker"]} {PRIVATE["cgnat"]} {PRIVATE["link-local-4"]} {PRIVATE["fqdn"]}
loading {PRIVATE["home"]} {PRIVATE["mac-home"]} {PRIVATE["raid"]} on {PRIVATE["gpu"]} of {PRIVATE["host"]} ({PRIVATE["worker-address"]})
"""


@pytest.fixture
def source(made, tmp_path, monkeypatch):
    """A finished run to be published anew, with everything planted in it through the doors by which texts come in."""
    folder = tmp_path / "runs" / made.production.name
    shutil.copytree(made.production, folder)
    for name in ("ledger.jsonl", "ledger.key"):
        shutil.copy(made.root / name, tmp_path / name)
    run = RunFolder(folder, folder.name, (SECRETS["known"], SECRETS["env-key"]))
    plans = setup.make_plans(setup.Options(tmp_path, cluster=str(_cluster(made, tmp_path))), ["production"])
    _plant(run, plans)
    about = json.loads((folder / "run.json").read_text())
    about["counts"] = {"NOT_IMPLEMENTED": 3, "PASS": 36}
    return Source(run, plans, about, folder / "junit.xml", tmp_path)


def _cluster(made, tmp_path):
    """The run's own cluster file under the names of somebody's living room."""
    text = (made.production / "inputs" / "cluster.toml").read_text()
    renamed = text.replace('"host-1"', f'"{PRIVATE["host"]}"').replace('"host-2"', f'"{PRIVATE["worker"]}"')
    renamed = renamed.replace("127.0.0.1", PRIVATE["address"]).replace("127.0.0.2", PRIVATE["worker-address"])
    renamed = renamed.replace("[host.env]", f'[host.env]\nMY_OWN = "{PRIVATE["env-value"]}"')
    path = tmp_path / "cluster.toml"
    path.write_text(
        renamed.replace(
            "process = true", f'process = true\ninterface = "{PRIVATE["interface"]}"\nrdma = "{PRIVATE["rdma"]}"'
        )
    )
    return path


def _plant(run, plans):
    """Log lines, a model's answer, an error, an inspect dump, environment, readings and the gate."""
    log = run.path / "production" / "rank0.log"
    log.write_text(log.read_text() + sanitize.mask_text(LOG, run.secrets))
    run.write("production/plan.json", as_json(plans["production"]))
    rows, fingerprint = rows_of(run.path), plans["production"].fingerprint
    report = run.path / "junit.xml"
    report.write_text(report.read_text().replace(rows[0]["fingerprint"], fingerprint))
    for one in rows:
        one["fingerprint"] = fingerprint
        if one["check"] == "correctness.stream":
            one["finding"]["reply"]["text"] = LOG
        if one["check"] == "gate.environment":
            values = [PRIVATE["env-value"]]
            one["finding"]["comparisons"].append(
                {
                    "what": "PID 1 environment MY_OWN",
                    "rank": 0,
                    "expected": values,
                    "found": values,
                    "relation": "equal",
                    "fault": "engine",
                }
            )
        if one["check"] in ("gate.markers", "gate.mounts"):
            one["finding"]["not_observable"].append(LOG)
    run.rows.unlink()
    for one in rows:
        run.append({key: value for key, value in one.items() if key != "seal"})
    gate = json.loads((run.path / "production" / "runtime-gate.json").read_text())
    for name in ("environment", "markers", "mounts"):
        found = next(one["finding"] for one in rows if one["check"] == f"gate.{name}")
        gate["requirements"][name] |= found
    run.write("production/runtime-gate.json", gate)
    run.note(
        "production/readings.jsonl",
        {
            "at": "now",
            "host": PRIVATE["host"],
            "free_memory_gib": 1.0,
            "temperature_c": None,
            "sensor": None,
            "unreadable": [LOG],
        },
    )


def every_text(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_forty_planted_strings_come_out_nowhere(source, capsys):
    target = publish.publish(source)
    planted_count = len(SECRETS) + len(PRIVATE)
    on_disk = [
        (path, name)
        for path, raw in every_text(source.run.path).items()
        for name, word in SECRETS.items()
        if word.encode() in raw
    ]
    assert on_disk == []
    published = every_text(target)
    out = [
        (path.name, name)
        for path, raw in published.items()
        for name, word in (SECRETS | PRIVATE).items()
        if word.encode() in raw
    ]
    assert out == []
    assert planted_count >= 40
    text = b"".join(published.values()).decode()
    assert "host-1" in text and "host-2" in text and "address-1" in text
    log = (target / "production" / "rank0.log").read_text()
    assert "Using [0]device-1:1/RoCE" in log and "OOB interface-1:address-1<0>" in log, "the same names as in the plan"
    assert json.loads((target / "production" / "plan.json").read_text())["ranks"][0]["env"]["MY_OWN"] == "value-1"
    with capsys.disabled():
        print(f"\n{planted_count} strings planted: none of {len(SECRETS)} secrets on the disk, none of any in publish/")


def test_without_any_one_rule_the_run_is_red(source, monkeypatch):
    made, shapes = publish.projector_of(source), sanitize.SHAPES
    for number, rule in enumerate(RULES):
        made.rules = [*RULES[:number], *RULES[number + 1 :]]
        with pytest.raises(Refused, match="planted side file came out"):
            publish.publish(source, made)
        assert not (source.run.path / "publish").exists(), rule.name
    made.rules = RULES
    for number in range(len(shapes)):
        monkeypatch.setattr(sanitize, "SHAPES", (*shapes[:number], *shapes[number + 1 :]))
        with pytest.raises(Refused, match="planted side file came out"):
            publish.publish(source, made)


def test_without_the_rule_for_a_hosts_own_environment_the_run_is_red(source, monkeypatch):
    monkeypatch.setattr(publish, "_own_environment", lambda *given: given[0])
    with pytest.raises(Refused, match="environment of a host alone"):
        publish.publish(source)


def test_what_the_search_finds_at_the_end_stops_the_publication(source, monkeypatch):
    monkeypatch.setattr(publish, "_log_text", lambda *given: given[0].decode())
    monkeypatch.setattr(publish, "_sanitizer", lambda *_: None)
    with pytest.raises(Refused, match=r"production/rank0\.log: something private would come out"):
        publish.publish(source)
    assert not (source.run.path / "publish").exists()


def test_a_verdict_that_does_not_survive_stops_the_publication(source):
    """An answer that holds an address is judged otherwise without it: then nothing is published."""
    rows = rows_of(source.run.path)
    for one in rows:
        if one["check"] == "correctness.json":
            one["finding"] |= {
                "expect": {"192.168.1.1": 1},
                "reply": {**one["finding"]["reply"], "text": '{"192\\u002e168.1.1": 1}'},
            }
    source.run.rows.unlink()
    for one in rows:
        source.run.append({key: value for key, value in one.items() if key != "seal"})
    with pytest.raises(Refused, match="does not survive the projection"):
        publish.publish(source)


# --- the projector


@pytest.mark.parametrize(
    "text",
    [
        "11:50:06 INFO [core.py:116]", "torch::jit c10::Error std::vector", "2.11.0+cu130 and 0.26.0+dspark.sm121.3", "1/2/3 and/or N/A tok/s (48/48)",
        "pytest.mark @decorator", "https://example.org/a/b/c?x=1", "vllm/vllm-openai:v0.26.0", "sha256:" + "ab" * 32, "</s></think> <|im_end|>",
        "POST /v1/chat/completions", "SmolLM2-135M-Instruct", "nvidia/nccl/lib/libnccl.so.2", "deepseek-ai/DeepSeek-V4-Flash", "/usr/local/cuda/bin/nvcc",
        "0.0.0.0:8888", "suites/test_gate.py::test_gate[production-image]", "NET/IB : RoCE [RO]", "Loading 50%/60%", "3 ≤ x ≤ 4; a, b = c", "mode:0 a:b:c",
    ],
)  # fmt: skip
def test_what_is_not_private_stays(text):
    assert Projector(b"n").text(text) == text


def test_pseudonyms_are_consistent_and_numbered_by_rank():
    made = Projector(b"n", {"alpha-box": "host", "beta-box": "host", "10.0.0.1": "address"})
    assert made.text("beta-box talks to alpha-box at 10.0.0.1:80") == "host-2 talks to host-1 at address-1:80"
    assert made.data({"alpha-box": ["10.0.0.2", {"x": "10.0.0.1"}]}) == {"host-1": ["address-2", {"x": "address-1"}]}
    assert set(made.map()) == {"host-1", "host-2", "address-1", "address-2"}


def test_a_real_name_that_looks_like_a_pseudonym_is_given_to_nobody_else():
    made = Projector(b"n", {"host-1": "host", "attic": "host"})
    assert made.text("attic and host-1") == "host-2 and host-1"


def test_the_map_needs_the_nonce():
    one, other = (Projector(nonce, {"10.0.0.1": "address"}).map() for nonce in (b"one", b"other"))
    assert one != other and projection.commitment(b"one", "10.0.0.1") == one["address-1"]


def test_a_plain_word_of_a_host_stays_a_word_in_a_recipe():
    made = Projector(b"n", {"attic": "host", "attic.example.lan": "host"})
    assert made.source("two attic boxes, attic.example.lan") == "two attic boxes, host-2"
    assert made.text("two attic boxes") == "two host-1 boxes"
    assert (
        Projector(b"n", {"nvidia": "user", "dspark": "user"}).text("dspark verify, nvidia/nccl")
        == "dspark verify, nvidia/nccl"
    )


def test_the_side_file_is_fresh_in_each_run():
    one, other = (planted(token, "s", "k") for token in ("QA", "QB"))
    assert one != other and len({rule for rule, _, _ in one} & {rule.name for rule in RULES}) == len(RULES)


def test_a_row_without_a_finding_is_published_as_it_is(tmp_path):
    case = Case("run", "suites/x.py::t[production]", "x", "x", "production", "recipe", "f" * 16)
    made = row(case, PASS, Finding("x", {"a": "10.0.0.9"}), started="t", elapsed_s=0)
    told = publish._row(made, Projector(b"n"), frozenset())
    assert told["finding"] == {"a": "address-1"} and told["part"] is None


def test_long_logs_are_cut_in_the_middle_and_the_whole_is_named(tmp_path):
    lines = b"".join(b"line %d of a long log that goes on and on\n" % n for n in range(80_000))
    (tmp_path / "rank0.log").write_bytes(lines)
    told = publish._log(tmp_path / "rank0.log", tmp_path / "out" / "rank0.log", Projector(b"n"))
    cut = (tmp_path / "out" / "rank0.log").read_bytes()
    assert told["bytes"] == len(lines) and told["lines"] == 80_000 and not told["whole"]
    assert cut.startswith(b"line 0 ") and cut.endswith(b"line 79999 of a long log that goes on and on\n")
    assert b"bytes are left out here" in cut and len(cut) < publish.HEAD + publish.TAIL + 200
    assert pack.LAYOUT.fullmatch("production/rank0.log") and BUNDLE.is_dir() and Path(__file__).is_file()
