"""Docker hosts against a tiny daemon on a unix socket: what is sent, and what is made of the answers."""

from __future__ import annotations

import errno
import http.server
import io
import json
import os
import socketserver
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("docker")

from pytest_dspark.cluster import HostEntry, Mount, RankSpec
from pytest_dspark.errors import HostError
from pytest_dspark.hosts import open_host
from pytest_dspark.hosts.docker import DockerHost, LocalConnection, agreed_version, frames, id_kind, state_of
from pytest_dspark.hosts.logfile import ROTATED, LogSink
from pytest_dspark.hosts.options import create_body, size

ID = "a1b2" * 16
RUNNING = {
    "Status": "running",
    "Running": True,
    "Pid": 4321,
    "ExitCode": 0,
    "StartedAt": "2026-01-01T00:00:00Z",
    "FinishedAt": "0001-01-01T00:00:00Z",
    "OOMKilled": False,
}
CONTAINER: dict[str, Any] = {
    "Id": ID,
    "Name": "/engine",
    "Image": "sha256:1234",
    "Path": "/entry.sh",
    "Args": ["vllm", "serve"],
    "RestartCount": 0,
    "State": RUNNING,
    "Config": {"Labels": {"io.dspark.run": "r1"}, "Env": ["OF_IMAGE=1"], "Tty": False},
    "HostConfig": {"RestartPolicy": {"Name": "no"}, "NetworkMode": "host", "IpcMode": "host"},
    "Mounts": [{"Type": "bind", "Source": "/m", "Destination": "/model", "RW": False, "Odd": None}],
}


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">BxxxL", kind, len(data)) + data


Answer = tuple[int, Any] | Callable[["Daemon"], Any]


@dataclass
class Daemon:
    """What the fake answers, and what it was asked. A bytes answer is a raw stream that ends with the connection."""

    path: str
    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, list[str]], Any]] = field(default_factory=list)

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        self.asked.append((method, path, query, body))
        found = self.answers.get(f"{method} {path}", (404, {"message": f"No such thing: {path}"}))
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        status, value = found if isinstance(found, tuple) else (200, found)
        return status, value

    def bodies(self, path: str) -> list[Any]:
        return [body for _, asked, _, body in self.asked if asked == path]


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    daemon: Daemon


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *args: Any) -> None:
        """Silent."""

    def answer(self) -> None:
        url = urlsplit(self.path)
        path = "/" + url.path.split("/", 2)[2] if url.path.startswith("/v1.") else url.path
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        status, value = self.server.daemon.answer(self.command, path, parse_qs(url.query), body)
        raw = b"" if status == 204 else value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if isinstance(value, bytes) else "application/json")
        if isinstance(value, bytes):
            self.close_connection = True
        elif status != 204:
            self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST = do_DELETE = answer


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory() as folder:
        with Server(f"{folder}/d.sock", Handler) as server:
            server.daemon = Daemon(f"{folder}/d.sock")
            server.daemon.answers |= {
                "GET /version": {"ApiVersion": "1.43", "MinAPIVersion": "1.24"},
                "GET /info": {"Name": "gb", "Driver": "overlay2", "Architecture": "aarch64", "KernelVersion": "6.1"},
                f"GET /containers/{ID}/json": CONTAINER,
                "GET /containers/engine/json": CONTAINER,
            }
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            yield server.daemon
            server.shutdown()


@pytest.fixture
def host(daemon: Daemon) -> Iterator[DockerHost]:
    made = DockerHost("gb-head", LocalConnection("gb-head", f"unix://{daemon.path}"))
    yield made
    made.close()


def spec(**more: Any) -> RankSpec:
    given: dict[str, Any] = {
        "rank": 0,
        "host": "gb-head",
        "name": "engine",
        "image": "vllm:1",
        "argv": ("vllm", "serve", "/model"),
        "env": (("A", "b c"), ("EMPTY", "")),
        "mounts": (),
        "options": (),
        "labels": (("io.dspark.run", "r1"),),
    }
    return RankSpec(**given | more)


def refused(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(HostError) as caught:
        call()
    assert caught.value.message.startswith("gb-head: ")
    return caught.value.code, caught.value.message


# --- the engine


def test_facts(host: DockerHost, daemon: Daemon) -> None:
    facts = host.facts()
    assert (facts.kind, facts.hostname, facts.architecture, facts.api_version) == ("docker", "gb", "arm64", "1.43")
    assert (facts.image_store, facts.address) == ("overlay2", f"unix://{daemon.path}")


def test_nobody_at_the_socket(tmp_path: Path) -> None:
    host = open_host(HostEntry("gb-head", "10.0.0.1", docker=f"unix://{tmp_path}/no.sock"), cluster="c", state=tmp_path)
    code, message = refused(host.facts)
    assert code == "HOST_UNREACHABLE"
    assert f"unix://{tmp_path}/no.sock" in message
    assert "No such file" in message
    host.close()


@pytest.mark.parametrize("answer", [None, [], {}])
def test_an_answer_with_nothing_in_it_is_no_proof_that_a_container_is_gone(
    host: DockerHost, daemon: Daemon, answer: Any
) -> None:
    daemon.answers[f"GET /containers/{ID}/json"] = [answer]
    code, message = refused(lambda: host.state(ID))
    assert code == "HOST_UNREACHABLE"
    assert f"expected an object with something in it, found '{answer}'" in message
    daemon.answers["GET /containers/json"] = [answer]
    if answer != []:
        assert "expected a list" in refused(lambda: host.owned("io.dspark.run"))[1]
    daemon.answers["GET /info"] = [answer]
    assert refused(host.facts)[0] == "HOST_UNREACHABLE"


def test_a_web_page_is_said_to_be_no_json(host: DockerHost, daemon: Daemon) -> None:
    daemon.answers["GET /info"] = b"<html>It works</html>"
    code, message = refused(host.facts)
    assert code == "HOST_UNREACHABLE"
    assert "Expecting value: line 1 column 1" in message


@pytest.mark.parametrize(
    ("low", "high", "pinned", "wanted"),
    [
        ("1.44", "1.52", "", "1.45"),
        ("1.12", "1.41", "", "1.41"),
        ("1.24", "1.9", "", None),
        ("1.44", "1.52", "1.35", None),
        ("1.24", "1.43", "1.35", "1.35"),
        ("1.50", "1.60", "", None),
        ("1.24", "", "", None),
    ],
)
def test_versions_are_agreed_or_both_ranges_are_shown(low: str, high: str, pinned: str, wanted: str | None) -> None:
    told, environ = {"ApiVersion": high, "MinAPIVersion": low}, {"DOCKER_API_VERSION": pinned} if pinned else {}
    if wanted:
        assert agreed_version("gb-head", told, environ) == wanted
        return
    code, message = refused(lambda: agreed_version("gb-head", told, environ))
    assert code == "DOCKER_FAILED"
    if high:
        assert f"the engine speaks {low} to {high}, this client {pinned or '1.24'} to" in message
        assert ("(DOCKER_API_VERSION)" in message) is bool(pinned)


def test_the_kind_of_image_id_follows_the_store(host: DockerHost, daemon: Daemon) -> None:
    daemon.answers["GET /images/vllm:1/json"] = {
        "Id": "sha256:1",
        "Architecture": "arm64",
        "RepoDigests": None,
        "Config": {"Labels": {"a": "b"}, "Entrypoint": ["/e"]},
    }
    image = host.image("vllm:1")
    assert (image.id_kind, image.labels, image.repo_digests, image.entrypoint) == ("config", {"a": "b"}, (), ("/e",))
    daemon.answers["GET /info"] = {
        "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]],
        "Driver": "overlayfs",
    }
    assert host.image("vllm:1").id_kind == "manifest"
    assert host.facts().image_store == "overlayfs (containerd)"
    assert id_kind({"DriverStatus": None}) == "config"
    assert refused(lambda: host.image("nope"))[0] == refused(lambda: host.image(""))[0] == "IMAGE_MISSING"


# --- who is there


def test_find_is_exact(host: DockerHost, daemon: Daemon) -> None:
    assert host.find("engine") == state_of(CONTAINER)
    daemon.answers["GET /containers/a1b2/json"] = CONTAINER
    assert host.find("a1b2") is None
    assert host.find("nobody") is None


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        ({"Status": "paused", "Running": True, "ExitCode": 0}, ("running", None)),
        ({"Status": "restarting", "Running": True, "ExitCode": 1}, ("running", None)),
        ({"Status": "exited", "ExitCode": 137, "OOMKilled": True}, ("exited", 137)),
        ({"Status": "created", "ExitCode": 0}, ("created", None)),
        ({"Status": "removing", "ExitCode": 0}, ("dead", 0)),
    ],
)
def test_states(state: dict[str, Any], wanted: tuple[str, int | None]) -> None:
    found = state_of(CONTAINER | {"State": state})
    assert (found.status, found.exit_code) == wanted
    assert found.oom_killed is state.get("OOMKilled", False)


def test_owned_by_label_and_value(host: DockerHost, daemon: Daemon) -> None:
    daemon.answers["GET /containers/json"] = [[{"Id": ID}, {"Id": "vanished"}]]
    assert [state.name for state in host.owned("io.dspark.run", "r1")] == ["engine"]
    query = next(query for _, path, query, _ in daemon.asked if path == "/containers/json")
    assert json.loads(query["filters"][0]) == {"label": ["io.dspark.run=r1"]}
    assert query["all"] == ["1"]


def test_the_environment_is_that_of_pid_1(host: DockerHost, daemon: Daemon) -> None:
    daemon.answers |= {
        f"POST /containers/{ID}/exec": (201, {"Id": "e1"}),
        "POST /exec/e1/start": frame(1, b"A=1\0B=x y\0") + frame(2, b"noise") + frame(1, b"C=\0"),
        "GET /exec/e1/json": {"ExitCode": 0},
    }
    facts = host.inspect(ID)
    assert facts.environment == ("A=1", "B=x y", "C=")
    assert (facts.path, facts.args, facts.image_id) == ("/entry.sh", ("vllm", "serve"), "sha256:1234")
    assert facts.mounts == ({"Type": "bind", "Source": "/m", "Destination": "/model", "RW": False},)
    assert (facts.restart_policy, facts.network_mode, facts.ipc_mode) == ("no", "host", "host")
    assert daemon.bodies(f"/containers/{ID}/exec")[0]["Cmd"] == ["cat", "/proc/1/environ"]
    daemon.answers[f"GET /containers/{ID}/json"] = CONTAINER | {"HostConfig": {"PidMode": "host"}}
    host.inspect(ID)
    assert daemon.bodies(f"/containers/{ID}/exec")[1]["Cmd"] == ["cat", "/proc/4321/environ"]


def test_an_environment_that_cannot_be_read_is_an_error(host: DockerHost, daemon: Daemon) -> None:
    daemon.answers |= {
        f"GET /containers/{ID}/json": CONTAINER | {"State": RUNNING | {"Pid": 2**22 + 1}},
        f"POST /containers/{ID}/exec": (201, {"Id": "e1"}),
        "POST /exec/e1/start": frame(1, b"no cat here"),
        "GET /exec/e1/json": {"ExitCode": 126},
    }
    code, message = refused(lambda: host.inspect(ID))
    assert code == "DOCKER_FAILED"
    assert "the environment of PID 1 of engine cannot be read: no cat here" in message
    daemon.answers[f"GET /containers/{ID}/json"] = CONTAINER | {"State": {"Status": "exited", "ExitCode": 1}}
    assert refused(lambda: host.inspect(ID))[0] == "RANK_EXITED"


def test_read_in_tells_the_streams_apart(host: DockerHost, daemon: Daemon) -> None:
    daemon.answers |= {
        f"POST /containers/{ID}/exec": (201, {"Id": "e1"}),
        "POST /exec/e1/start": frame(1, b"out") + frame(2, b"err") + frame(1, b"") + frame(1, b"more"),
        "GET /exec/e1/json": {"ExitCode": 9},
    }
    done = host.read_in(ID, ["sh"])
    assert (done.code, done.stdout, done.stderr) == (9, b"outmore", b"err")
    daemon.answers["POST /exec/e1/start"] = frame(1, b"output")[:-2]
    assert refused(lambda: host.read_in(ID, ["sh"]))[1].endswith("the stream ended inside a frame")
    daemon.answers[f"POST /containers/{ID}/exec"] = (409, {"message": f"Container {ID} is not running"})
    assert refused(lambda: host.read_in(ID, ["sh"]))[0] == "RANK_EXITED"


# --- start


def test_options_become_the_create_body() -> None:
    body = create_body(
        "gb-head",
        spec(
            mounts=(Mount("/models/x", "/model", True), Mount("volume", "/cache", False)),
            options=(
                ("gpus", "all"),
                ("ipc", "host"),
                ("network", "host"),
                ("shm-size", "64g"),
                ("ulimit", ("memlock=-1:-1", "stack=67108864:-1", "nofile=1024")),
                ("cap-add", ("IPC_LOCK", "SYS_NICE")),
                ("device", ("/dev/infiniband", "/dev/a:/dev/b:r")),
                ("security-opt", ("label=disable", "seccomp=unconfined")),
                ("entrypoint", "/bin/bash"),
                ("init", "true"),
                ("memory", "100g"),
                ("cpuset-cpus", "0-3"),
                ("pid", "host"),
            ),
        ),
    )
    assert body == {
        "Image": "vllm:1",
        "Cmd": ["vllm", "serve", "/model"],
        "Env": ["A=b c", "EMPTY="],
        "Labels": {"io.dspark.run": "r1"},
        "Entrypoint": ["/bin/bash"],
        "HostConfig": {
            "Mounts": [
                {"Type": "bind", "Source": "/models/x", "Target": "/model", "ReadOnly": True},
                {"Type": "volume", "Source": "volume", "Target": "/cache", "ReadOnly": False},
            ],
            "RestartPolicy": {"Name": "no"},
            "DeviceRequests": [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}],
            "IpcMode": "host",
            "NetworkMode": "host",
            "ShmSize": 64 << 30,
            "Ulimits": [
                {"Name": "memlock", "Soft": -1, "Hard": -1},
                {"Name": "stack", "Soft": 67108864, "Hard": -1},
                {"Name": "nofile", "Soft": 1024, "Hard": 1024},
            ],
            "CapAdd": ["IPC_LOCK", "SYS_NICE"],
            "Devices": [
                {"PathOnHost": "/dev/infiniband", "PathInContainer": "/dev/infiniband", "CgroupPermissions": "rwm"},
                {"PathOnHost": "/dev/a", "PathInContainer": "/dev/b", "CgroupPermissions": "r"},
            ],
            "SecurityOpt": ["label=disable", "seccomp=unconfined"],
            "Init": True,
            "Memory": 100 << 30,
            "CpusetCpus": "0-3",
            "PidMode": "host",
        },
    }


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("publish", "80:80", "'publish' is not mapped"),
        ("shm-size", "64 gigabytes", "expected a size"),
        ("ulimit", ("memlock",), "expected name=soft:hard"),
        ("gpus", "some", "expected all, a number"),
        ("device", "infiniband", "expected /dev/path"),
        ("security-opt", "seccomp=/etc/profile.json", "seccomp profile file"),
        ("ipc", ("host", "private"), "expected one value"),
        ("init", "maybe", "expected true or false"),
    ],
)
def test_an_option_that_cannot_be_mapped_is_named(key: str, value: Any, words: str) -> None:
    code, message = refused(lambda: create_body("gb-head", spec(options=((key, value),))))
    assert code == "LAUNCH_FAILED"
    assert key in message
    assert words in message


def test_sizes() -> None:
    assert [size(text) for text in ("1024", "1k", "64g", "64GB", "64GiB", "1.5m")] == [
        1024,
        1024,
        64 << 30,
        64 << 30,
        64 << 30,
        3 << 19,
    ]


def test_create_then_start(host: DockerHost, daemon: Daemon) -> None:
    daemon.answers |= {"POST /containers/create": (201, {"Id": ID}), f"POST /containers/{ID}/start": (204, {})}
    assert host.start(spec()) == ID
    method, _, query, body = next(asked for asked in daemon.asked if asked[1] == "/containers/create")
    assert (method, query["name"], body["Image"]) == ("POST", ["engine"], "vllm:1")


def test_a_name_that_is_taken(host: DockerHost, daemon: Daemon) -> None:
    daemon.answers["POST /containers/create"] = (409, {"message": 'The container name "/engine" is already in use'})
    assert refused(lambda: host.start(spec())) == (
        "NAME_TAKEN",
        'gb-head: The container name "/engine" is already in use',
    )
    assert not any(method == "DELETE" for method, *_ in daemon.asked)


def test_a_failed_start_leaves_nothing_and_keeps_the_message(host: DockerHost, daemon: Daemon) -> None:
    daemon.answers |= {
        "POST /containers/create": (201, {"Id": ID}),
        f"POST /containers/{ID}/start": (500, {"message": "could not select device driver"}),
        f"DELETE /containers/{ID}": (204, {}),
    }
    assert refused(lambda: host.start(spec())) == (
        "DOCKER_FAILED",
        "gb-head: start engine: could not select device driver",
    )
    assert ("DELETE", f"/containers/{ID}") in [asked[:2] for asked in daemon.asked]
    daemon.answers[f"DELETE /containers/{ID}"] = (500, {"message": "device busy"})
    assert refused(lambda: host.start(spec()))[1].endswith("was left behind: gb-head: remove: device busy")
    daemon.answers["POST /containers/create"] = (404, {"message": "No such image: vllm:1"})
    assert refused(lambda: host.start(spec()))[0] == "IMAGE_MISSING"


# --- stop


def test_what_is_gone_is_stopped_and_removed(host: DockerHost) -> None:
    assert host.stop("gone", grace_s=1).status == "gone"
    host.remove("gone")
    assert host.state("gone").status == "gone"


def test_stop_waits_in_whole_seconds(host: DockerHost, daemon: Daemon) -> None:
    daemon.answers[f"POST /containers/{ID}/stop"] = (204, {})
    host.stop(ID, grace_s=1.2)
    assert next(query for _, path, query, _ in daemon.asked if path.endswith("/stop")) == {"t": ["2"]}
    daemon.answers[f"DELETE /containers/{ID}"] = (409, {"message": "You cannot remove a running container"})
    assert refused(lambda: host.remove(ID))[0] == "DOCKER_FAILED"


def test_a_removal_in_progress_is_waited_for(host: DockerHost, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = f"removal of container {ID} is already in progress"
    daemon.answers[f"DELETE /containers/{ID}"] = (409, {"message": busy})
    daemon.answers[f"GET /containers/{ID}/json"] = [CONTAINER, CONTAINER, (404, {"message": "No such container"})]
    host.remove(ID)
    daemon.answers[f"GET /containers/{ID}/json"] = CONTAINER
    monkeypatch.setattr("pytest_dspark.hosts.docker.REMOVAL_S", 0.3)
    code, message = refused(lambda: host.remove(ID))
    assert (code, "did not end within 0.3 s" in message) == ("DOCKER_FAILED", True)


# --- the log

EXITED = CONTAINER | {"State": {"Status": "exited", "ExitCode": 0}}


def until(test: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_broken_log_is_fetched_again_without_gap_or_duplicate(
    host: DockerHost, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_dspark.hosts.docker.RETRY_S", 0.05)
    whole = b"".join(frame(1 + n % 2, f"line {n}\n".encode()) for n in range(1000))
    text = "".join(f"line {n}\n" for n in range(1000))
    daemon.answers[f"GET /containers/{ID}/logs"] = [whole[:5003], whole[:9000], (500, {"message": "busy"}), whole]
    sink = tmp_path / "run" / "log"
    sink.parent.mkdir()
    sink.write_text("of an earlier run")
    host.follow(ID, sink)
    until(lambda: sink.read_text() == text)
    host.save_log(ID, sink)
    daemon.answers[f"GET /containers/{ID}/json"] = EXITED
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "dspark-log-gb-head"])
    assert sink.read_text() == text
    host.save_log(ID, tmp_path / "other")
    assert (tmp_path / "other").read_text() == text
    (tmp_path / "other").write_text(text + "and more")
    host.save_log(ID, tmp_path / "other")
    assert (tmp_path / "other").read_text() == text + "and more"
    assert list(tmp_path.glob(".other*")) == []
    assert refused(lambda: host.save_log("gone", sink))[0] == "RANK_EXITED"


def test_a_log_that_breaks_off_is_no_host_that_is_gone(host: DockerHost, daemon: Daemon, tmp_path: Path) -> None:
    daemon.answers[f"GET /containers/{ID}/logs"] = frame(1, b"hello")[:-1]
    code, message = refused(lambda: host.save_log(ID, tmp_path / "log"))
    assert (code, message.endswith("the stream ended inside a frame")) == ("DOCKER_FAILED", True)


def test_a_log_goes_on_when_the_disk_has_room_again(
    host: DockerHost, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, full = LogSink.put, [OSError(errno.ENOSPC, "No space left on device")] * 2

    def sometimes(sink: LogSink, file: Any, position: int, chunk: bytes) -> int:
        if full:
            raise full.pop()
        return put(sink, file, position, chunk)

    monkeypatch.setattr(LogSink, "put", sometimes)
    monkeypatch.setattr("pytest_dspark.hosts.docker.RETRY_S", 0.05)
    daemon.answers[f"GET /containers/{ID}/logs"] = frame(1, b"hello")
    host.follow(ID, tmp_path / "log")
    until(lambda: (tmp_path / "log").read_bytes() == b"hello")


def test_a_disk_that_takes_a_part_leaves_no_gap(tmp_path: Path) -> None:
    class Narrow(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:3])

    sink = LogSink(tmp_path / "log")
    with Narrow(tmp_path / "log", "r+") as file:
        sink.put(file, sink.put(file, 0, b"one two "), b"three")
    assert (tmp_path / "log").read_bytes() == b"one two three"


def test_a_rotated_log_loses_nothing(tmp_path: Path) -> None:
    sink = LogSink(tmp_path / "log")
    with sink.opened() as file:
        assert sink.put(file, sink.put(file, 0, b"one two "), b"three ") == 14
        position = sink.put(file, 0, b"two three four ")
        sink.put(file, position, b"five")
        assert sink.put(file, 0, b"two ") == 4
    assert (tmp_path / "log").read_bytes() == b"one two three " + ROTATED + b"two three four five"


def test_close_ends_the_following(host: DockerHost, daemon: Daemon, tmp_path: Path) -> None:
    release = threading.Event()
    answer = daemon.answer

    def slow(method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        if path.endswith("/logs"):
            release.wait(20)
        return answer(method, path, query, body)

    daemon.answers[f"GET /containers/{ID}/logs"] = frame(1, b"x")
    daemon.answer = slow  # type: ignore[method-assign]
    host.follow(ID, tmp_path / "log")
    until(lambda: daemon.asked)
    host.close()
    release.set()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "dspark-log-gb-head"])


def test_frames_end_cleanly_or_not_at_all() -> None:
    class Raw:
        def __init__(self, data: bytes) -> None:
            self.data = data

        def read(self, count: int) -> bytes:
            now, self.data = self.data[:count], self.data[count:]
            return now

    assert list(frames(Raw(frame(1, b"a") + frame(2, b"")))) == [(1, b"a"), (2, b"")]
    for cut in (1, 8, 9):
        with pytest.raises(OSError, match="inside a frame"):
            list(frames(Raw(frame(1, b"abc")[:cut])))


def test_listener_reads_the_hosts_own_tables(host: DockerHost) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"(pid {os.getpid()})" in host.listener(port)
    assert host.listener(port) == ""


def test_readings_are_those_of_the_host_itself(host: DockerHost) -> None:
    found = host.readings()
    assert found.free_memory_gib is not None and found.free_memory_gib > 0
    assert (found.temperature_c is None) == bool(found.unreadable)
