"""The watcher with hosts of its own making, and a stop that asks a silent host once."""

import errno
import threading
import time
from types import SimpleNamespace

import pytest

from pytest_dspark import launch
from pytest_dspark.cluster import HostEntry, Output, RankState, Readings
from pytest_dspark.errors import HostError
from pytest_dspark.signs import Patience
from pytest_dspark.watcher import Waking, Watched, Watcher

QUICK = Patience(gone_s=0.4, api_s=0.4, wedge_s=1.0)


class Scripted:
    """A host that says what it is told to say; `hang` makes every call wait."""

    def __init__(self, name, **more):
        self.name, self.hang, self.error = name, threading.Event(), None
        self.status, self.code, self.link, self.calls = "running", None, "UP", []
        self.worked, self.draws = 0.0, "19.00, 96"
        vars(self).update(more)
        self.hang.set()

    def _answer(self, what):
        self.calls.append(what)
        self.hang.wait(10)
        if self.error:
            raise HostError("HOST_UNREACHABLE", f"{self.name}: {self.error}")

    def state(self, rank_id):
        self._answer("state")
        return RankState(rank_id, "n", self.status, exit_code=self.code, started_at="t0")

    def read(self, argv, *, timeout=10.0):
        self._answer(argv[0])
        line = f"2: eth0: <BROADCAST> mtu 1500 qdisc noqueue state {self.link} mode DEFAULT"
        if "nvidia-smi" in argv:
            return Output(0, self.draws.encode(), b"")
        return Output(0, line.encode(), b"") if argv[0] == "ip" else Output(127, b"", b"")

    def worked_s(self, rank_id):
        self._answer("worked")
        return self.worked

    def save_log(self, rank_id, sink):
        self._answer("save_log")

    def stop(self, rank_id, *, grace_s):
        self._answer("stop")
        return RankState(rank_id, "n", "exited", exit_code=0)

    def remove(self, rank_id):
        self._answer("remove")

    def owned(self, label, value=""):
        self._answer("owned")
        return ()

    def listener(self, port):
        self._answer("listener")
        return ""

    def readings(self):
        return Readings(None, None)


@pytest.fixture
def place(tmp_path):
    hosts = {"a": Scripted("a"), "b": Scripted("b")}
    entries = [HostEntry(name, "192.0.2.1", docker="unix:///x", interface="eth0") for name in hosts]
    said, lost = [], []
    watched = Watched(
        entries,
        hosts,
        lambda: {0: "id0", 1: "id1"},
        lambda rank: tmp_path / f"rank{rank}.log",
        1,
        say=said.append,
        on_lost=lost.append,
    )
    watcher = Watcher(watched, QUICK, every_s=0.02)
    yield SimpleNamespace(hosts=hosts, watcher=watcher, said=said, lost=lost, folder=tmp_path)
    watcher.stop()
    for host in hosts.values():
        host.hang.set()


def until(seen, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def test_a_rank_that_ends_is_told_once(place):
    place.watcher.start()
    time.sleep(0.3)
    assert place.lost == [] and place.watcher.found is None
    place.hosts["b"].status, place.hosts["b"].code = "exited", 137
    until(lambda: place.lost)
    time.sleep(0.2)
    assert [error.code for error in place.lost] == ["RANK_EXITED"]
    with pytest.raises(launch.LaunchError, match="rank 1"):
        place.watcher.check()


def test_a_host_that_hangs_hides_no_other_and_is_silent_since_it_was_asked(place):
    place.watcher.start()
    place.hosts["a"].hang.clear()
    time.sleep(0.2)
    place.hosts["b"].status, place.hosts["b"].code = "exited", 137
    until(lambda: place.lost)
    assert place.lost[0].code == "RANK_EXITED" and "rank 1" in place.lost[0].message


def test_a_host_that_cannot_be_watched_is_said_once_and_again_when_it_answers(place):
    place.watcher.serve(SimpleNamespace(health_status=lambda: (200, ""), metrics=lambda: None))
    place.watcher.start()
    place.hosts["b"].error = "gone"
    until(lambda: place.said)
    time.sleep(0.5)
    place.hosts["b"].error = None
    until(lambda: len(place.said) > 1)
    assert place.said[0].startswith("b does not answer") and place.said[1:] == ["b answers again"] and not place.lost


def test_a_cable_without_carrier_and_a_silent_host_are_a_lost_fabric(place):
    place.hosts["a"].link = "DOWN"
    place.hosts["b"].error = "no answer in time"
    place.watcher.start()
    until(lambda: place.lost, 8.0)
    assert place.lost[0].code == "FABRIC_LOST" and "interface eth0 is DOWN" in place.lost[0].message


def test_nothing_is_told_after_stop(place):
    place.watcher.start()
    place.watcher.stop()
    place.hosts["b"].status = "exited"
    time.sleep(0.3)
    assert place.lost == []


def test_a_container_that_was_started_again_is_another_engine(place):
    place.watcher.start()
    until(lambda: "state" in place.hosts["b"].calls)
    time.sleep(0.1)
    place.hosts["b"].state = lambda rank_id: RankState(rank_id, "n", "running", started_at="t1")
    until(lambda: place.lost)
    assert place.lost[0].code == "RANK_RESTARTED" and "t1" in place.lost[0].message


# --- stopping


def site_of(place, say=lambda _: None):
    limits = SimpleNamespace(stop_grace_s=1.0, memory_margin_gib=0.0)
    specs = [SimpleNamespace(rank=n, host=name, name="dspark_vllm") for n, name in enumerate(place.hosts)]
    recipe = SimpleNamespace(launch=limits)
    cluster = SimpleNamespace(hosts=(), source="cluster.toml")
    plan = SimpleNamespace(specs=specs, recipe=recipe, cluster=cluster, port=1, master_port=2, mark="m")
    run = SimpleNamespace(profile=lambda _: place.folder, secrets=())
    return launch.Site(plan, place.hosts, run, say, lambda: False)


def test_a_silent_host_is_asked_once_the_other_is_stopped_and_what_is_left_is_named(place):
    place.hosts["a"].error = "no answer in time"
    result = launch.stop(site_of(place), {0: "id0", 1: "id1"}, run_id="R")
    assert place.hosts["a"].calls == ["save_log"], "a call to a silent host waits its whole time-out"
    assert {"stop", "remove", "owned", "listener"} <= set(place.hosts["b"].calls)
    assert [one["rank"] for one in result["stopped"]] == [1]
    left = result["left_behind"]
    assert [(one["host"], one["id"]) for one in left] == [("a", "id0")]
    assert left[0]["command"] == "dspark stop --cluster cluster.toml --run R"
    assert result["problems"] == ["HOST_UNREACHABLE: a: no answer in time"]


def test_a_full_disk_here_keeps_no_rank_from_being_stopped(place, monkeypatch):
    def full(site, rank, rank_id):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(launch, "keep_log", full)
    result = launch.stop(site_of(place), {0: "id0", 1: "id1"}, run_id="R")
    assert all("stop" in host.calls for host in place.hosts.values())
    assert "a: [Errno 28] No space left on device" in result["problems"]


def test_when_both_answer_nothing_is_left(place):
    result = launch.stop(site_of(place), {0: "id0", 1: "id1"}, run_id="R")
    assert (result["left_behind"], result["problems"], result["ports_taken"]) == ([], [], [])
    assert [one["rank"] for one in result["stopped"]] == [0, 1]


class Standing:
    """Metrics of a server with two requests, in which nothing moves."""

    def value(self, name):
        return 2.0


class Working(Scripted):
    """A host whose rank uses its processors all the time."""

    def worked_s(self, rank_id):
        self.worked += 1.0
        return self.worked


@pytest.mark.parametrize(
    ("watts", "spin_w", "found"), [("19.00, 96", 25.0, True), ("61.00, 96", 25.0, False), ("19.00, 96", 0.0, False)]
)
def test_gpus_that_wait_for_each_other_are_wedged_though_processors_work(tmp_path, monkeypatch, watts, spin_w, found):
    for name in ("API_S", "METRICS_S", "LINK_S"):
        monkeypatch.setattr(f"pytest_dspark.watcher.{name}", 0.05)
    hosts = {name: Working(name, draws=watts) for name in ("a", "b")}
    entries = [HostEntry(name, "192.0.2.1", docker="unix:///x", interface="eth0") for name in hosts]
    watched = Watched(entries, hosts, lambda: {0: "id0", 1: "id1"}, lambda rank: tmp_path / f"rank{rank}.log", 1)
    watcher = Watcher(watched, QUICK, every_s=0.02, spin_w=spin_w)
    watcher.start()
    watcher.serve(SimpleNamespace(health_status=lambda: (200, ""), metrics=Standing))
    if found:
        until(lambda: watcher.found)
        assert (
            watcher.found.code == "ENGINE_WEDGED"
            and "rank 1 (b): a GPU is busy at 96 % and draws 19 W" in watcher.found.message
        )
    else:
        time.sleep(2.0)
        assert watcher.found is None
    watcher.stop()


def test_a_watcher_that_stood_still_itself_calls_nobody_dead(place):
    """Ctrl-Z and fg, in a long prefill: the calls that were open look as old as the pause, and the counters as still."""
    asleep = [0.0]
    watcher = Watcher(place.watcher._watched, QUICK, every_s=0.02, clock=Waking(lambda: time.monotonic() + asleep[0]))
    watcher.start()
    time.sleep(0.2)
    watcher._api.running = 1.0
    watcher._api.still.put(True, watcher._clock())
    place.hosts["b"].hang.clear()
    time.sleep(0.1)
    asleep[0] = 60.0
    time.sleep(0.1)
    place.hosts["b"].hang.set()
    time.sleep(0.3)
    assert place.lost == [] and watcher.found is None
    place.hosts["b"].hang.clear()
    until(lambda: place.lost)
    watcher.stop()
    assert [error.code for error in place.lost] == ["HOST_UNREACHABLE"], "a silence while it is awake counts"
