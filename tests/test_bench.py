"""The benchmark without its peers: formulas, what is refused, the decision, the reports' readers, the reference client."""

import json
import os
import sys
import time
from dataclasses import replace

import pytest

from benchmarks import bench, reference, table, usage, venvs
from benchmarks.figures import BadRun, Row, middle, quantile, read_log, read_streams, row, stamp_errors
from benchmarks.peers import (
    PEERS,
    Job,
    read_aiperf,
    read_guidellm,
    read_llama_benchy,
    read_vllm,
    write_shared,
)
from benchmarks.scenarios import LEVELS, Level, Scenario
from benchmarks.usage import Usage
from benchmarks.verdict import bounds, growth, judge

A1, A16, A64, A256, B64, B256, C64, C256 = LEVELS
TINY = Level(Scenario("T", "/s/0.02/0.02/4/2", 4, 8, "4 events of 2 tokens"), 2)
GOOD = Row(
    ttft_ms=0.1,
    ttft_p99_ms=0.2,
    answer_ms=0.1,
    tpot_ms=0.0,
    tokens=0.0,
    stamp_p50_ms=0.1,
    stamp_p99_ms=0.5,
    cpu_s=0.03,
    peak_mb=50.0,
    lateness_p99_ms=0.1,
)
PEER = replace(
    GOOD, ttft_ms=-9.0, ttft_p99_ms=9.0, answer_ms=None, tpot_ms=0.5, tokens=1.0, stamp_p50_ms=None, stamp_p99_ms=None
)
WHOLE = {level: {name: GOOD if name in ("ours", "reference") else PEER for name in bench.NAMES} for level in LEVELS}


def judged(**changed):
    """The verdict of a whole good run in which, at A C256, these clients' rows are changed."""
    rows = WHOLE | {A256: WHOLE[A256] | changed}
    return judge(rows, levels=LEVELS, clients=bench.NAMES)


def log(level=TINY, lateness=0.1, **changed):
    """What the server says of a punctual run: requests a millisecond apart."""
    requests = [
        {
            "arrival": 10 + number / 1000,
            "user": f"r{number}",
            "tokens": level.scenario.tokens,
            "stamps": [10 + number / 1000 + 0.02 * (n + 1) for n in range(level.scenario.events)],
            "first_answer": 10 + number / 1000 + 0.02,
        }
        | changed
        for number in range(level.requests)
    ]
    return {"requests": requests, "lateness_p99_ms": lateness}


def streams(shift=0.0, start=0.0, tokens=8):
    """The report of a client whose clock starts `start` early and whose stamps are `shift` late, in seconds."""
    told = [
        {
            "user": one["user"],
            "start": one["arrival"] - start,
            "stamps": [stamp + shift for stamp in one["stamps"]],
            "first_answer": one["first_answer"] + shift,
            "tokens": tokens,
        }
        for one in log()["requests"]
    ]
    return json.dumps({"streams": told})


# 1 CPU second until 9.0, 3 until 11.0, and 0.5 more that only wait4 knew
USAGE = Usage(0, ((9.0, 1.0), (11.0, 3.0), (12.0, 3.5)), 50.0, 1)


# --- formulas


def test_errors_are_reported_minus_truth():
    found = row(read_streams(streams(shift=0.003, start=0.002, tokens=9)), read_log(log(), TINY), USAGE)
    assert found.ttft_ms == pytest.approx(5.0)
    assert found.answer_ms == pytest.approx(5.0)
    assert found.tokens == pytest.approx(1.0)
    assert found.tpot_ms == pytest.approx(60 / 8 - 60 / 7)
    assert found.stamp_p50_ms == pytest.approx(3.0)
    assert found.stamp_p99_ms is None, "16 events are no p99"
    assert found.ttft_p99_ms is None
    assert found.lateness_p99_ms == 0.1


def test_cpu_counts_from_the_first_arrival():
    """2.0 s had been spent at 10.0, 3.5 in all; 16 events."""
    assert row(read_streams(streams()), read_log(log(), TINY), USAGE).cpu_s == pytest.approx(1.5 / 16 * 1000)


def test_warm_up_streams_count_as_events_and_not_as_requests():
    half = Level(TINY.scenario, 2, waves=1)
    truth = read_log(log(), half, warm_up=2)
    assert [one.user for one in truth.sent] == ["r2", "r3"]
    assert (truth.events, truth.first_arrival) == (16, 10.0)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (log(Level(TINY.scenario, 1)), "saw 2 streams, expected 4"),
        (log(tokens=7), "a stream had"),
        (log(stamps=[10.0]), "1 of 4 events"),
        (log(lateness=None), "lateness"),
        ({"requests": [], "lateness_p99_ms": None}, "saw 0 streams"),
    ],
)
def test_a_log_of_another_run_is_refused(data, says):
    with pytest.raises(BadRun, match=says):
        read_log(data, TINY)


def test_a_request_that_did_not_stream_counts_for_nothing():
    data = log()
    data["requests"].append({"arrival": 1.0, "user": "", "tokens": 8, "stamps": [], "first_answer": None})
    assert len(read_log(data, TINY).sent) == 4


def test_a_report_of_fewer_requests_is_refused():
    told = json.loads(streams())["streams"][:3]
    with pytest.raises(BadRun, match="of 3 requests, the server saw 4"):
        row(read_streams(json.dumps({"streams": told})), read_log(log(), TINY), USAGE)


def test_a_stream_with_a_lost_event_has_no_stamp_error():
    told = json.loads(streams())["streams"]
    told[0]["stamps"].pop()
    with pytest.raises(BadRun, match="r0 has 3 events"):
        stamp_errors(read_streams(json.dumps({"streams": told})).streams, read_log(log(), TINY).sent)


@pytest.mark.parametrize("change", [{"stamps": []}, {"tokens": None}])
def test_a_stream_without_tokens_is_no_sample(change):
    told = json.loads(streams())["streams"]
    told[1] |= change
    with pytest.raises(BadRun, match="r1"):
        read_streams(json.dumps({"streams": told}))


def test_the_median_leaves_out_rounds_in_which_the_server_was_late():
    fast, slow = replace(GOOD, ttft_ms=1.0), replace(GOOD, ttft_ms=9.0, lateness_p99_ms=3.0)
    assert middle([fast, fast, slow], 0.5).ttft_ms == 1.0
    most_late = middle([fast, slow, slow], 0.5)
    assert (most_late.ttft_ms, most_late.lateness_p99_ms) == (9.0, 3.0)
    assert middle([fast, replace(GOOD, answer_ms=None), fast], 0.5).answer_ms is None


def test_a_quantile_is_linear_between_its_neighbours():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.99) == pytest.approx(9.9)


# --- the decision


def test_a_whole_good_run_is_zero():
    assert judged() == judge(WHOLE, levels=LEVELS, clients=bench.NAMES)
    assert (judged().code, judged().failures, judged().open) == (0, (), ())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ttft_ms", -9.01),
        ("ttft_p99_ms", 9.01),
        ("tpot_ms", -0.51),
        ("tokens", -1.01),
        ("tpot_ms", None),
        ("tokens", None),
    ],
)
def test_worse_than_the_best_peer_is_one(name, value):
    found = judged(ours=replace(GOOD, **{name: value}))
    assert found.code == 1
    assert any("worse than" in text and text.startswith("A C256") for text in found.failures)


def test_only_the_best_peer_counts_and_a_tie_passes():
    one = replace(PEER, tpot_ms=0.02)
    assert judged(ours=replace(GOOD, tpot_ms=0.3), guidellm=one).code == 1
    assert judged(ours=replace(GOOD, tpot_ms=0.3)).code == 0
    assert judged(ours=replace(GOOD, tpot_ms=-0.02), guidellm=one).code == 0


def test_an_error_smaller_than_what_is_printed_is_no_difference():
    assert judged(ours=replace(GOOD, tpot_ms=0.004), guidellm=replace(PEER, tpot_ms=0.0001)).code == 0


@pytest.mark.parametrize(
    ("level", "name", "value"),
    [
        (A1, "ttft_ms", 1.01),
        (A64, "ttft_ms", -1.01),
        (C64, "ttft_ms", 1.01),
        (A256, "ttft_ms", 5.01),
        (A1, "stamp_p99_ms", 1.01),
        (A16, "stamp_p99_ms", 1.01),
        (A256, "stamp_p99_ms", 10.01),
        (A256, "peak_mb", 220.1),
        (A64, "cpu_s", 0.0451),
    ],
)
def test_a_bound_is_one(level, name, value):
    rows = WHOLE | {level: WHOLE[level] | {"ours": replace(GOOD, **{name: value})}}
    found = judge(rows, levels=LEVELS, clients=bench.NAMES)
    assert found.code == 1
    assert found.failures[0].startswith(level.name)


def test_wide_levels_have_their_own_bounds():
    assert judged(ours=replace(GOOD, ttft_ms=4.9, stamp_p99_ms=9.9)).code == 0
    assert {bound.name for bound in bounds(A64)} == {"ttft_ms"}


def test_cost_per_event_must_not_rise():
    rows = WHOLE | {A256: WHOLE[A256] | {"ours": replace(GOOD, cpu_s=0.031)}}
    assert growth(rows) == ["cost per event rises by 1.03 from A C16 to A C256"]
    assert growth(WHOLE) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"guidellm": "not installed: why"},
        {"ours": "failed: why"},
        {"reference": "failed: why"},
        {"aiperf": replace(PEER, lateness_p99_ms=0.51)},
        {"ours": replace(GOOD, lateness_p99_ms=0.51, ttft_ms=99.0)},
        {"ours": replace(GOOD, lateness_p99_ms=None)},
        {"ours": replace(GOOD, stamp_p99_ms=None)},
        {"ours": replace(GOOD, peak_mb=None)},
    ],
)
def test_what_is_not_known_is_two(changed):
    assert judged(**changed).code == 2


def test_a_late_server_decides_nothing_for_a_peer():
    """A peer that looks perfect in a row without a schedule is not the best one."""
    assert judged(aiperf=replace(PEER, ttft_ms=0.0, lateness_p99_ms=9.0)).failures == ()


@pytest.mark.parametrize("name", bench.NAMES)
def test_a_client_that_was_not_run_is_two(name):
    rows = {level: {client: one for client, one in found.items() if client != name} for level, found in WHOLE.items()}
    found = judge(rows, levels=LEVELS, clients=bench.NAMES)
    assert (found.code, len(found.open)) == (2, 1)
    assert f"not run: {name} at A C1" in found.open[0]


def test_nothing_run_at_all_is_two():
    assert judge({}, levels=LEVELS, clients=bench.NAMES).code == 2


def test_a_failure_outweighs_what_is_missing():
    assert judged(ours=replace(GOOD, ttft_ms=50.0), guidellm="not installed: why").code == 1


# --- reports of peers: small ones in the form of those recorded from the pinned versions


def job(folder, level=TINY):
    return Job("http://127.0.0.1:1/x", level, folder, folder)


def test_llama_benchy_tells_rates(tmp_path):
    run = {
        "e2e_ttft": {"values": [21.0, 22.0]},
        "tg_req_throughput": {"values": [50.0, 40.0]},
        "tg_throughput": {"values": [90.0]},
    }
    (tmp_path / "result.json").write_text(json.dumps({"benchmarks": [run]}))
    found = read_llama_benchy(job(tmp_path))
    assert (found.ttft_ms, found.tpot_ms, found.tokens) == ((21.0, 22.0), (20.0, 25.0), None)
    assert read_llama_benchy(job(tmp_path, A1)).tpot_ms == (1000 / 90,)


def test_guidellm_tells_each_request(tmp_path):
    one = {
        "time_to_first_token_ms": 33.3,
        "inter_token_latency_ms": 19.9,
        "time_per_output_token_ms": 20.1,
        "time_to_first_output_token_ms": 44.4,
        "output_tokens": 200,
    }
    data = {"benchmarks": [{"requests": {"successful": [one, one], "errored": [], "incomplete": []}}]}
    (tmp_path / "result.json").write_text(json.dumps(data))
    found = read_guidellm(job(tmp_path))
    assert (found.ttft_ms, found.tpot_ms, found.tokens, found.answer_ms) == (
        (33.3,) * 2,
        (19.9,) * 2,
        (200.0,) * 2,
        None,
    )
    assert read_guidellm(job(tmp_path, C64)).answer_ms == (44.4, 44.4)
    data["benchmarks"][0]["requests"]["successful"][1]["inter_token_latency_ms"] = None
    (tmp_path / "result.json").write_text(json.dumps(data))
    with pytest.raises(BadRun, match="no such figure"):
        read_guidellm(job(tmp_path))


def test_aiperf_tells_each_request(tmp_path):
    figures = {"time_to_first_token": 36.3, "time_to_first_output_token": 37.0, "inter_token_latency": 19.9}
    figures["usage_completion_tokens"] = 200
    line = json.dumps(
        {"metadata": {}, "metrics": {name: {"value": value, "unit": "x"} for name, value in figures.items()}}
    )
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / "profile_export.jsonl").write_text(f"{line}\n{line}\n")
    found = read_aiperf(job(tmp_path, C64))
    assert (found.ttft_ms, found.tpot_ms, found.answer_ms) == ((36.3,) * 2, (19.9,) * 2, (37.0,) * 2)
    assert found.tokens == (200.0, 200.0)


def test_vllm_tells_seconds(tmp_path):
    data = {"failed": 0, "errors": [""], "ttfts": [0.027], "latencies": [4.007], "output_lens": [200]}
    (tmp_path / "result.json").write_text(json.dumps(data))
    found = read_vllm(job(tmp_path))
    assert found.ttft_ms == (27.0,)
    assert found.tpot_ms == pytest.approx((20.0,))
    assert (found.tokens, found.answer_ms) == ((200.0,), None)
    (tmp_path / "result.json").write_text(json.dumps(data | {"failed": 1, "errors": ["", "refused"]}))
    with pytest.raises(BadRun, match="1 requests failed: refused"):
        read_vllm(job(tmp_path))


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_command_asks_for_the_level(peer, tmp_path):
    text = " ".join(peer.command(job(tmp_path, B64))) + "".join(path.read_text() for path in tmp_path.glob("*.json"))
    assert "http://127.0.0.1:1/x" in text
    assert "60" in text, "output tokens"
    assert "64" in text, "concurrency"
    assert "eos" in text or "--exact-tg" in text
    assert any(peer.version in name for names in peer.pip for name in names), "the version is pinned"


def test_the_tokenizer_and_the_book_are_written_here(tmp_path):
    write_shared(tmp_path)
    data = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())
    assert data["model"]["vocab"]["w1"] == 1
    (book,) = (tmp_path / "home" / ".cache" / "llama-benchy").iterdir()
    assert book.read_text().startswith("w1 w2 ")


# --- installing


def test_a_venv_is_made_once_and_not_left_half_made(tmp_path, monkeypatch):
    (peer,) = [one for one in PEERS if one.name == "vllm bench"]
    calls = []

    def call(argv):
        calls.append(argv)
        venvs.folder(tmp_path, peer).mkdir(parents=True, exist_ok=True)
        if argv[-1].startswith("vllm") and len(calls) < 4:
            raise venvs.NotInstalled("no such wheel")

    monkeypatch.setattr(venvs, "_call", call)
    with pytest.raises(venvs.NotInstalled):
        venvs.install(tmp_path, peer, index="", say=lambda _: None)
    assert not venvs.folder(tmp_path, peer).exists()
    venv = venvs.install(tmp_path, peer, index="", say=lambda _: None)
    assert len(calls) == 6
    assert venvs.install(tmp_path, peer, index="", say=lambda _: None) == venv
    assert len(calls) == 6, "it is there"
    assert not any("torch" in part for argv in calls for part in argv)


@pytest.mark.parametrize(
    ("version", "wants", "expected"),
    [
        ("2.13.0+cpu", ["nvidia-cublas; platform_system == 'Linux'"], False),
        ("2.13.0", ["nvidia-cublas==13; platform_system == 'Linux'", "sympy"], True),
        ("2.13.0", ["cuda-bindings"], True),
        ("2.13.0", ["sympy"], False),
    ],
)
def test_a_cuda_build_of_torch_is_known_before_it_is_fetched(version, wants, expected):
    report = {"install": [{"metadata": {"name": "torch", "version": version, "requires_dist": wants}}]}
    assert venvs.cuda(report) is expected


def test_a_peer_that_cannot_be_installed_is_a_row_with_its_reason(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise venvs.NotInstalled("no such wheel")

    monkeypatch.setattr(bench, "install", refuse)
    options = bench.parsed(["--only", "aiperf", "--cache", str(tmp_path)])
    lacking = bench.made_ready([client for client in bench.CLIENTS if client.name == "aiperf"], options)
    assert lacking == {"aiperf": "not installed: no such wheel"}
    quick = bench.parsed(["--quick", "--cache", str(tmp_path)])
    assert set(bench.made_ready(bench.CLIENTS, quick)) == {peer.name for peer in PEERS}


# --- processes


def test_processor_time_of_a_whole_tree_is_counted(tmp_path):
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    script = f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {burn!r}])\n{burn}child.wait()"
    found = usage.watched([sys.executable, "-c", script], env=os.environ, folder=tmp_path, limit_s=30)
    assert (found.status, found.processes) == (0, 2)
    assert 0.6 <= found.total_s < 1.2
    assert found.since(time.monotonic()) == pytest.approx(0.0)
    assert found.since(0.0) == pytest.approx(found.total_s)
    assert 5 < found.peak_mb < 200


def test_a_client_past_its_limit_is_ended(tmp_path):
    found = usage.watched(
        [sys.executable, "-c", "import time; time.sleep(60)"], env=os.environ, folder=tmp_path, limit_s=0.3
    )
    assert found.status == -9


# --- the reference and ours against the schedule server


@pytest.mark.parametrize("client", bench.OWN, ids=lambda client: client.name)
def test_our_clients_measure_a_small_schedule(client, tmp_path):
    with bench.serving() as server:
        found = bench.measure(client, TINY, server, tmp_path)
    assert isinstance(found, Row), found
    assert found.tokens == 0.0
    assert abs(found.ttft_ms) < 20 and abs(found.tpot_ms) < 5
    assert 0 <= found.stamp_p50_ms < 20
    assert found.cpu_s > 0 and found.peak_mb > 5


def test_a_client_that_fails_is_a_text(tmp_path):
    broken = replace(bench.OWN[0], command=lambda _: ["python", "-c", "raise SystemExit('went wrong')"])
    mute = replace(bench.OWN[0], command=lambda _: ["python", "-c", "pass"])
    with bench.serving() as server:
        for client, says in ((broken, "exit 1: "), (mute, "report: ")):
            bench_argv = [sys.executable, *client.command(None)[1:]]
            found = usage.watched(bench_argv, env=os.environ, folder=tmp_path, limit_s=30)
            with pytest.raises(BadRun, match=says):
                bench.read(client, job(tmp_path), found, server.log())


def test_the_reference_reads_events_over_packets():
    """A line over two receives has the moment of the second; a role and an empty delta are no events."""
    said = [{"role": "assistant", "content": ""}, {"content": ""}, {"reasoning": "hm"}, {"content": "yes"}]
    lines = [b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n" for delta in said]
    lines.append(b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n')
    first, last = lines[3][:9], lines[3][9:]
    received = [(1.0, lines[0] + lines[1]), (2.0, lines[2]), (3.0, first), (4.0, last + lines[4])]
    found = reference.told(reference.Stream("r0", None, 0.5, received))
    assert found == {"user": "r0", "start": 0.5, "stamps": [2.0, 4.0], "first_answer": 4.0, "tokens": 2}


# --- the table


def test_the_table_fits_and_says_what_is_not_told():
    text = table.level_text(A256, {"ours": GOOD, "a peer 0.1": PEER, "other": "not installed: " + "why " * 60})
    assert max(len(line) for line in text.splitlines()) <= 140
    assert "+0.10" in text and " - " in text and "not installed" in text
    late = table.line("ours", replace(GOOD, lateness_p99_ms=0.6))
    assert late.endswith("inconclusive") and len(late) <= 140


def test_the_file_has_every_round_and_the_verdict(tmp_path):
    options = bench.parsed(["--only", "ours,reference", "--levels", "A1", "--json", str(tmp_path / "out.json")])
    measured = {A1: {"ours": [GOOD, "failed: why", GOOD], "reference": [GOOD]}}
    assert bench.report(measured, options).code == 2
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["exit"] == 2
    assert data["levels"][0]["medians"]["ours"] == "failed: why"
    assert data["levels"][0]["rounds"]["ours"][1] == "failed: why"
    assert data["levels"][0]["rounds"]["reference"][0]["ttft_ms"] == 0.1


@pytest.mark.parametrize("arguments", [["--only", "ours,nobody"], ["--levels", "A2"]])
def test_unknown_names_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        bench.parsed(arguments)
    assert "there are" in capsys.readouterr().err
