"""Process hosts: real child processes, real signals, real other owners."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_dspark.cluster import HostEntry, Mount, RankSpec
from pytest_dspark.errors import HostError
from pytest_dspark.hosts import open_host, proctable
from pytest_dspark.hosts.listeners import listening_inodes, owner_from_ss
from pytest_dspark.hosts.marks import marks_in
from pytest_dspark.hosts.process import ProcessHost

RUN = "io.dspark.run"


def spec(*argv: str, name: str = "engine", run: str = "run-1", host: str = "one", **more: object) -> RankSpec:
    given = {"env": (("RANK_KEY", "a b"),), "mounts": (), "options": (), "image": ""} | more
    return RankSpec(
        rank=0,
        host=host,
        name=name,
        argv=argv,
        labels=((RUN, run), ("io.dspark.rank", "0")),
        **given,  # type: ignore[arg-type]
    )


def python(code: str, **more: object) -> RankSpec:
    return spec(sys.executable, "-u", "-c", code, **more)  # type: ignore[arg-type]


def until(test: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., ProcessHost]]:
    """Opens hosts of a cluster that no other test has; ends everything of it at the end."""
    hosts: list[ProcessHost] = []

    def make(
        name: str = "one", cluster: str = f"c{os.getpid()}", state: Path = tmp_path / "state", **more: str
    ) -> ProcessHost:
        hosts.append(ProcessHost(HostEntry(name, "127.0.0.1", process=True, **more), cluster=cluster, state=state))
        return hosts[-1]

    yield make
    for host in hosts:
        for state in host.owned(RUN):
            host.stop(state.rank_id, grace_s=0)
            host.remove(state.rank_id)
        host.close()


@pytest.fixture
def host(opened: Callable[..., ProcessHost]) -> ProcessHost:
    return opened()


def test_open_host_gives_a_process_host(tmp_path: Path) -> None:
    host = open_host(HostEntry("one", "127.0.0.1", process=True), cluster="c", state=tmp_path)
    assert (host.name, host.facts().kind, host.facts().address) == ("one", "process", "127.0.0.1")


def test_a_rank_lives_as_a_container_does(host: ProcessHost, tmp_path: Path) -> None:
    rank = host.start(python("print('born'); import time; time.sleep(60)"))
    host.follow(rank, tmp_path / "run" / "rank0.log")
    state = host.state(rank)
    assert (state.status, state.name, state.labels[RUN]) == ("running", "engine", "run-1")
    assert host.find("engine") == state
    assert host.find("engin") is None
    assert host.owned(RUN) == host.owned(RUN, "run-1") == (state,)
    assert host.owned(RUN, "run-2") == host.owned("other") == ()
    until(lambda: (tmp_path / "run" / "rank0.log").read_text() == "born\n")
    ended = host.stop(rank, grace_s=5)
    assert (ended.status, ended.exit_code) == ("exited", 128 + signal.SIGTERM)
    assert host.owned(RUN) == (ended,)
    host.remove(rank)
    assert host.owned(RUN) == ()
    assert host.find("engine") is None
    assert host.state(rank).status == "gone"
    assert host.stop(rank, grace_s=1).status == "gone"
    host.remove(rank)
    assert (tmp_path / "run" / "rank0.log").read_text() == "born\n"


def test_inspect_is_what_runs(
    opened: Callable[..., ProcessHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_CALLER", "x")
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "rank.py").write_text("import time; print('up', flush=True); time.sleep(60)")
    (bundle / "labels.json").write_text(json.dumps({"from": "bundle"}))
    host = opened(bundle=str(bundle))
    rank = host.start(spec(sys.executable, str(bundle / "rank.py"), "serve", bundle=str(bundle)))
    facts = host.inspect(rank)
    assert (facts.path, facts.args) == (sys.executable, (str(bundle / "rank.py"), "serve"))
    assert "RANK_KEY=a b" in facts.environment
    assert not any(entry.startswith("SECRET_OF_CALLER") for entry in facts.environment)
    assert facts.labels["from"] == "bundle"
    assert facts.labels[RUN] == "run-1"
    assert facts.image_id == host.image("whatever").image_id
    host.follow(rank, tmp_path / "log")
    until(lambda: (tmp_path / "log").read_text())
    (bundle / "rank.py").write_text("changed")
    assert opened(bundle=str(bundle)).inspect(rank).image_id == facts.image_id != host.image("").image_id


def test_bundle_identity_ignores_pycache_and_sees_names(host: ProcessHost, tmp_path: Path) -> None:
    assert (host.image("").image_id, host.image("").id_kind) == ("", "none")
    (tmp_path / "b" / "__pycache__").mkdir(parents=True)
    (tmp_path / "b" / "a.py").write_text("1")
    first = host.image(str(tmp_path / "b"))
    (tmp_path / "b" / "__pycache__" / "a.pyc").write_text("2")
    assert host.image(str(tmp_path / "b")) == first
    (tmp_path / "b" / "a.py").rename(tmp_path / "b" / "c.py")
    assert host.image(str(tmp_path / "b")).image_id != first.image_id
    with pytest.raises(HostError, match="one: bundle folder /nowhere is not there") as caught:
        host.image("/nowhere")
    assert caught.value.code == "IMAGE_MISSING"


STRAGGLER = """
import os, sys, time, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("straggler", os.getpid())
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep({sleep})
"""


def straggler_pid(host: ProcessHost, rank: str, sink: Path) -> int:
    host.follow(rank, sink)
    until(lambda: "straggler" in sink.read_text())
    return int(sink.read_text().split()[1])


def test_a_double_forked_straggler_is_killed(host: ProcessHost, tmp_path: Path) -> None:
    rank = host.start(python(STRAGGLER.format(sleep=600)))
    pid = straggler_pid(host, rank, tmp_path / "log")
    begin = time.monotonic()
    assert host.stop(rank, grace_s=0.5).status == "exited"
    assert 0.5 <= time.monotonic() - begin < 3
    assert pid not in proctable.table()


def test_a_straggler_of_a_rank_that_ended_by_itself_is_found_and_killed(host: ProcessHost, tmp_path: Path) -> None:
    rank = host.start(python(STRAGGLER.format(sleep=0)))
    pid = straggler_pid(host, rank, tmp_path / "log")
    until(lambda: host.state(rank).status == "exited")
    assert host.state(rank).exit_code == 0
    assert pid in proctable.table()
    host.stop(rank, grace_s=0)
    assert pid not in proctable.table()


def test_a_child_without_marks_dies_with_a_rank_that_ended_by_itself(host: ProcessHost, tmp_path: Path) -> None:
    code = "import subprocess as s; print('straggler', s.Popen(['sleep', '600'], env={'PATH': '/bin:/usr/bin'}).pid)"
    rank = host.start(python(code))
    pid = straggler_pid(host, rank, tmp_path / "log")
    until(lambda: host.state(rank).status == "exited")
    assert marks_in(proctable.environment(pid)) is None
    host.stop(rank, grace_s=0)
    assert pid not in proctable.table()


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(host: ProcessHost, tmp_path: Path) -> None:
    rank = host.start(
        python("import signal, time; signal.signal(15, signal.SIG_IGN); print('straggler 0'); time.sleep(600)")
    )
    straggler_pid(host, rank, tmp_path / "log")
    assert host.stop(rank, grace_s=0.3).exit_code == 128 + signal.SIGKILL


def test_exit_codes_and_no_zombies(host: ProcessHost) -> None:
    rank = host.start(python("raise SystemExit(7)"))
    until(lambda: host.state(rank).status == "exited")
    assert host.state(rank).exit_code == 7
    assert host.state(rank).finished_at
    assert proctable.process(int(rank.split(":")[0])) is None
    with pytest.raises(HostError, match=r"one: process"):
        host.inspect(rank)


OWNER = """
import sys, time
from pathlib import Path
from pytest_dspark.cluster import HostEntry, RankSpec
from pytest_dspark.hosts.process import ProcessHost
cluster, state, name = sys.argv[1:]
host = ProcessHost(HostEntry("one", "127.0.0.1", process=True), cluster=cluster, state=Path(state))
print(host.start(RankSpec(0, "one", name, "", ("sleep", "600"), (), (), (), (("io.dspark.run", "dead-run"),))), flush=True)
time.sleep(600)
"""


def other_owner(cluster: str, state: Path, name: str = "engine") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, cluster, str(state), name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )


def end(owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.communicate()


def test_leftovers_of_a_dead_owner(opened: Callable[..., ProcessHost], tmp_path: Path) -> None:
    cluster = f"dead{os.getpid()}"
    owner = other_owner(cluster, tmp_path / "theirs")
    assert owner.stdout
    rank = owner.stdout.readline().strip()
    end(owner)
    host = opened(cluster=cluster)
    found = host.find("engine")
    assert found
    assert (found.rank_id, found.status, found.labels) == (rank, "running", {RUN: "dead-run"})
    assert opened(cluster="another").find("engine") is None
    assert opened(name="two", cluster=cluster).find("engine") is None
    assert host.inspect(rank).path == "sleep"
    with pytest.raises(HostError, match=r"one: engine is process .* of run dead-run") as caught:
        host.start(spec("true"))
    assert caught.value.code == "NAME_TAKEN"
    host.save_log(rank, tmp_path / "their.log")
    assert host.stop(rank, grace_s=1).status == "exited"
    host.remove(rank)
    assert host.owned(RUN) == ()
    assert list((tmp_path / "theirs").glob("*.log")) == []


def test_one_of_many_starts_at_once_wins(opened: Callable[..., ProcessHost], tmp_path: Path) -> None:
    """With one state folder through the lock; with different ones the oldest process wins."""
    for number, states in enumerate([[tmp_path / "s"] * 4, [tmp_path / str(n) for n in range(4)]]):
        cluster = f"race{number}-{os.getpid()}"
        owners = [other_owner(cluster, state) for state in states]
        firsts = [owner.stdout.readline().strip() for owner in owners if owner.stdout]
        errors = []
        for owner in owners:
            owner.kill()
            errors.append(owner.communicate()[1])
        assert len([first for first in firsts if first]) == 1, errors
        assert sum("NAME_TAKEN" in error for error in errors) == 3, errors
        assert len(opened(cluster=cluster).owned(RUN)) == 1


def test_two_hosts_of_a_cluster_are_one_machine_with_the_same_names(opened: Callable[..., ProcessHost]) -> None:
    one, two = opened("one"), opened("two")
    first, second = one.start(spec("sleep", "60")), two.start(spec("sleep", "60", host="two"))
    assert one.find("engine") != two.find("engine")
    one.stop(first, grace_s=1)
    assert two.state(second).status == "running"


def test_a_recycled_pid_is_never_killed(host: ProcessHost) -> None:
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        now = proctable.process(stranger.pid)
        assert now
        before = proctable.Process(now.pid, now.started - 1, now.parent, now.group, now.session, False)
        proctable.send(before, signal.SIGKILL)
        assert host.state(before.ident).status == "gone"
        assert host.stop(before.ident, grace_s=0).status == "gone"
        host.stop(now.ident, grace_s=0)
        rank = host._ranks[host.start(python("pass"))]
        until(lambda: rank.ended.is_set())
        rank.first = before
        host._ranks[before.ident] = rank
        rank.kin = {before}
        assert host.stop(before.ident, grace_s=0).status == "exited"
        time.sleep(0.1)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("linked", [True, False])
def test_ten_megabytes_of_log_are_whole_after_death(
    host: ProcessHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    if not linked:
        monkeypatch.setattr("pytest_dspark.hosts.process.link_or_none", lambda log, sink: False)  # noqa: ARG005
    rank = host.start(
        python("import sys\nfor n in range(100_000): print(f'{n:099d}', file=(sys.stdout, sys.stderr)[n % 2])")
    )
    (tmp_path / "log").write_text("of an earlier run")
    host.follow(rank, tmp_path / "log")
    until(lambda: host.state(rank).status == "exited", 30)
    host.save_log(rank, tmp_path / "again")
    host.save_log(rank, tmp_path / "log")
    host.remove(rank)
    wanted = "".join(f"{n:099d}\n" for n in range(100_000))
    assert (tmp_path / "again").read_text() == wanted
    until(lambda: (tmp_path / "log").read_text() == wanted)


def test_what_cannot_be_started(host: ProcessHost) -> None:
    for wrong, words in (
        (spec("/nowhere/engine"), "one: /nowhere/engine cannot be started"),
        (spec("true", options=(("gpus", "all"),)), "one: .* found gpus"),
        (spec("true", mounts=(Mount("/a", "/b", True),)), "one: .* found /b"),
    ):
        with pytest.raises(HostError, match=words):
            host.start(wrong)
    assert host.owned(RUN) == ()


def test_a_running_rank_is_not_removed(host: ProcessHost) -> None:
    rank = host.start(spec("sleep", "60"))
    with pytest.raises(HostError, match=r"one: engine .* still runs"):
        host.remove(rank)


def test_read_is_no_shell_and_bounded(host: ProcessHost) -> None:
    assert host.read(["echo", "$HOME; *"]).text == "$HOME; *\n"
    assert host.read(["/nowhere/tool"]).code == 127
    assert host.read_in("1:1", ["false"]).code == 1
    with pytest.raises(HostError, match=r"one: sh did not end within 0\.2 s"):
        host.read(["sh", "-c", "sleep 600 & sleep 600"], timeout=0.2)


def test_a_command_whose_child_outlives_the_kill_is_bounded(host: ProcessHost) -> None:
    """A session of its own stands for a process that a wedged driver holds: both keep the pipes after the kill."""
    begin = time.monotonic()
    with pytest.raises(HostError, match=r"one: sh did not end within 0\.2 s"):
        host.read(["sh", "-c", "setsid sleep 15 & wait"], timeout=0.2)
    assert time.monotonic() - begin < 10


def test_listener_names_its_owner(host: ProcessHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"(pid {os.getpid()})" in host.listener(port)
    assert host.listener(port) == ""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        assert f"(pid {os.getpid()})" in host.listener(server.getsockname()[1])


def test_listener_tables() -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: 00000000:22B8 00000000:0000 {} 00000000:00000000 00:00000000 00000000     0        0 77 1 0 100 0 0 10 0\n"
    assert listening_inodes(head + row.format("0A"), 0x22B8) == {"77"}
    assert listening_inodes(head + row.format("01"), 0x22B8) == frozenset()
    assert listening_inodes(head + row.format("0A"), 0x22B9) == frozenset()
    line = 'LISTEN 0 128 0.0.0.0:8888 0.0.0.0:* users:(("vllm",pid=412,fd=9),("vllm",pid=413,fd=9))'
    assert owner_from_ss(line) == "vllm (pid 412)"
    assert owner_from_ss("LISTEN 0 128 0.0.0.0:8888 0.0.0.0:*") == "unknown"


# --- a process that ended is not a rank that ended

PAIR = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("worker", child.pid, flush=True)
time.sleep(600)
"""


def proven_pair(host: ProcessHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """A rank of a parent and a worker that was proven; returns its id and the worker's pid."""
    monkeypatch.setattr("pytest_dspark.hosts.process.STANDING_S", 0.2)
    rank = host.start(python(PAIR))
    host.follow(rank, tmp_path / "log")
    until(lambda: "worker" in (tmp_path / "log").read_text())
    time.sleep(0.3)
    host.inspect(rank)
    assert (host.state(rank).lost, host.state(rank).remaining) == ((), ())
    return rank, int((tmp_path / "log").read_text().split()[1])


def test_a_worker_that_is_lost_is_seen_although_its_parent_lives(
    host: ProcessHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, worker = proven_pair(host, tmp_path, monkeypatch)
    os.kill(worker, signal.SIGKILL)
    until(lambda: host.state(rank).lost, 2)
    state = host.state(rank)
    assert state.status == "running" and state.remaining == ()
    assert [lost.split(" ")[0] for lost in state.lost] == [str(worker)]
    host.stop(rank, grace_s=1)


def test_a_parent_that_is_lost_leaves_its_worker_which_is_named_and_ended(
    host: ProcessHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, worker = proven_pair(host, tmp_path, monkeypatch)
    os.kill(int(rank.split(":")[0]), signal.SIGKILL)
    until(lambda: host.state(rank).status == "exited", 2)
    assert host.state(rank).exit_code == 128 + signal.SIGKILL
    assert [left.split(" ")[0] for left in host.state(rank).remaining] == [str(worker)]
    with pytest.raises(HostError, match=f"still runs .processes {worker}"):
        host.remove(rank)
    host.stop(rank, grace_s=1)
    assert worker not in proctable.table() and host.state(rank).remaining == ()
    host.remove(rank)


def test_what_a_rank_runs_for_a_moment_is_no_part_of_it(host: ProcessHost, tmp_path: Path) -> None:
    rank = host.start(python("import subprocess, time; subprocess.run(['sleep', '1']); print('over'); time.sleep(600)"))
    host.follow(rank, tmp_path / "log")
    host.inspect(rank)
    until(lambda: "over" in (tmp_path / "log").read_text())
    assert host.state(rank).lost == ()
    host.stop(rank, grace_s=1)


def test_a_program_that_writes_its_title_keeps_the_marks(host: ProcessHost, tmp_path: Path) -> None:
    """Title-writing libraries overwrite the environment unless this is set: then a leftover could not be found."""
    rank = host.start(python("import os; print(os.environ['SPT_NOENV']); import time; time.sleep(600)"))
    host.follow(rank, tmp_path / "log")
    until(lambda: (tmp_path / "log").read_text() == "1\n")
    host.stop(rank, grace_s=1)
