"""A rank as a container of a host's own Docker engine: over the local socket, or through ssh."""

from __future__ import annotations

import math
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import docker
import requests
import urllib3
from docker.constants import DEFAULT_DOCKER_API_VERSION, MINIMUM_DOCKER_API_VERSION
from docker.errors import APIError, DockerException, NotFound

from pytest_dspark.cluster import HostEntry, HostFacts, ImageFacts, Output, RankFacts, RankSpec, RankState, Readings
from pytest_dspark.errors import HostError
from pytest_dspark.hosts.bundle import docker_architecture
from pytest_dspark.hosts.command import run_here
from pytest_dspark.hosts.listeners import TABLES, listening_inodes, local_owner, owner_from_ss
from pytest_dspark.hosts.logfile import LogSink, save_longer_stream
from pytest_dspark.hosts.options import HOST_KEYS, create_body
from pytest_dspark.hosts.readings import Reader
from pytest_dspark.hosts.transport import LinkAdapter, dial_unix

if TYPE_CHECKING:
    from pytest_dspark.hosts.ssh import SshConnection

NOWHERE = "http://docker.invalid:2375"
API_S = 15.0
START_S = 120.0
STOP_MARGIN_S = 30.0
REMOVAL_S = 30.0
LOOK_S = 0.2
RETRY_S = 1.0
BATCH = 256 * 1024
MAX_OUTPUT = 10 * 1024 * 1024
_STATUS = {"created": "created", "exited": "exited", "dead": "dead", "removing": "dead"}
_NEVER = "0001-01-01T00:00:00Z"


class Connection(Protocol):
    """How a Docker engine and its host are reached; `run` raises HostError. `local` says that it is this machine."""

    address: str
    local: bool

    def dial(self) -> Any: ...

    def run(self, argv: Sequence[str], *, timeout: float = 10.0) -> Output: ...

    def close(self) -> None: ...


class LocalConnection:
    """This machine's engine on its unix socket."""

    local = True

    def __init__(self, name: str, url: str) -> None:
        self._name, self.address = name, url

    def dial(self) -> Any:
        return dial_unix(self.address.removeprefix("unix://"))

    def run(self, argv: Sequence[str], *, timeout: float = 10.0) -> Output:
        return run_here(self._name, argv, timeout=timeout)

    def close(self) -> None:
        """Nothing is held beside the client."""


class RemoteConnection:
    """Another machine's engine through `docker system dial-stdio`, and its commands, on one ssh connection."""

    local = False

    def __init__(self, ssh: SshConnection) -> None:
        self._ssh = ssh
        self.address = f"ssh://{ssh.target}"

    def dial(self) -> Any:
        return self._ssh.dial_docker()

    def run(self, argv: Sequence[str], *, timeout: float = 10.0) -> Output:
        return self._ssh.run(argv, timeout=timeout)

    def close(self) -> None:
        self._ssh.close()


def open_docker(entry: HostEntry) -> DockerHost:
    """The Docker host of a cluster entry; nothing is contacted yet."""
    url = entry.docker or ""
    if not url.startswith("ssh://"):
        return DockerHost(entry.name, LocalConnection(entry.name, url))
    from pytest_dspark.hosts.ssh import SshConnection

    return DockerHost(entry.name, RemoteConnection(SshConnection(entry.name, url)))


class DockerHost:
    """One Docker engine. The version of its API is agreed at the first call, on each host for itself."""

    def __init__(self, name: str, connection: Connection) -> None:
        self._name, self._connection = name, connection
        self._client: Any = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._sinks: dict[tuple[str, Path], LogSink] = {}
        self._streams: set[requests.Response] = set()
        self._reader = Reader()

    @property
    def name(self) -> str:
        return self._name

    # --- the engine

    def _api(self) -> Any:
        with self._lock:
            if self._client is None:
                client = docker.APIClient(NOWHERE, version=DEFAULT_DOCKER_API_VERSION, timeout=API_S)
                client.trust_env = False
                client.mount("http://", LinkAdapter(self._connection.dial))
                version = agreed_version(self.name, _object(client.version(api_version=False)), os.environ)
                client._version = version
                self._client = client
            return self._client

    @contextmanager
    def _translated(self, doing: str, lost: str = "HOST_UNREACHABLE") -> Iterator[None]:
        """The libraries' errors in this project's words; the daemon's own message is kept. `lost` is the code of no answer."""
        try:
            yield
        except APIError as error:
            code = "RANK_EXITED" if isinstance(error, NotFound) or "is not running" in _said(error) else "DOCKER_FAILED"
            raise HostError(code, f"{self.name}: {doing}: {_said(error)}") from error
        except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            address = self._connection.address
            text = f"{self.name}: {doing} at {address}: {_cause(error)}"
            raise HostError(lost, text, docker_only=address.startswith("unix:")) from error

    def _call(self, method: str, path: str, *, timeout: float = API_S, body: Any = None, **query: Any) -> Any:
        """One request; returns the response, whose status is not an error. Raises APIError inside `_translated`."""
        api = self._api()
        url = api._url("{0}", path)
        response = api.request(method, url, json=body, params=query, timeout=(API_S, timeout))
        api._raise_for_status(response)
        return response.json() if response.content and "json" in response.headers.get("Content-Type", "") else None

    def facts(self) -> HostFacts:
        with self._translated("docker info"):
            api = self._api()
            info = _object(api.info())
        return HostFacts(
            kind="docker",
            hostname=info.get("Name", ""),
            kernel=info.get("KernelVersion", ""),
            architecture=docker_architecture(info.get("Architecture", "")),
            docker_version=info.get("ServerVersion", ""),
            api_version=api.api_version,
            image_store=image_store(info),
            address=self._connection.address,
            data_root=info.get("DockerRootDir", ""),
        )

    def read(self, argv: Sequence[str], *, timeout: float = 10.0) -> Output:
        return self._connection.run(argv, timeout=timeout)

    def image(self, reference: str) -> ImageFacts:
        """Look at an image. Its id is a manifest digest in a containerd store, else a config digest."""
        with self._translated(f"image {reference}"):
            try:
                found = _object(self._api().inspect_image(reference)) if reference else None
            except NotFound:
                found = None
            kind = id_kind(_object(self._api().info()))
        if found is None:
            raise HostError("IMAGE_MISSING", f"{self.name}: image {reference!r} is not there")
        config = found.get("Config") or {}
        return ImageFacts(
            reference=reference,
            image_id=found["Id"],
            id_kind=kind,
            architecture=found.get("Architecture", ""),
            labels=config.get("Labels") or {},
            repo_digests=tuple(found.get("RepoDigests") or ()),
            entrypoint=tuple(config.get("Entrypoint") or ()),
            tags=tuple(found.get("RepoTags") or ()),
        )

    # --- who is there

    def _look(self, name_or_id: str) -> Mapping[str, Any] | None:
        with self._translated(f"container {name_or_id[:24]}"):
            try:
                return _object(self._api().inspect_container(name_or_id))
            except NotFound:
                return None

    def find(self, name: str) -> RankState | None:
        found = self._look(name)
        return state_of(found) if found and found["Name"] == f"/{name}" else None

    def owned(self, label: str, value: str = "") -> tuple[RankState, ...]:
        wanted = f"{label}={value}" if value else label
        with self._translated(f"containers with label {wanted}"):
            listed = self._api().containers(all=True, filters={"label": [wanted]})
            if not isinstance(listed, list):
                raise ValueError(f"expected a list, found {str(listed)[:40]!r}")
        return tuple(state_of(found) for found in map(self._look, [entry["Id"] for entry in listed]) if found)

    def state(self, rank_id: str) -> RankState:
        found = self._look(rank_id)
        return state_of(found) if found else RankState(rank_id, "", "gone")

    def inspect(self, rank_id: str) -> RankFacts:
        """The container and the environment of its PID 1. Raises RANK_EXITED, or DOCKER_FAILED if it cannot be read."""
        found = self._look(rank_id)
        if found is None or not found["State"].get("Running"):
            status = state_of(found).status if found else "gone"
            raise HostError(
                "RANK_EXITED", f"{self.name}: container {rank_id[:12]} is {status}, expected it to be running"
            )
        host_config = found.get("HostConfig") or {}
        return RankFacts(
            rank_id=found["Id"],
            image_id=found["Image"],
            path=found["Path"],
            args=tuple(found.get("Args") or ()),
            environment=self._environment(found),
            mounts=tuple(_plain(mount) for mount in found.get("Mounts") or ()),
            labels=(found.get("Config") or {}).get("Labels") or {},
            restart_policy=(host_config.get("RestartPolicy") or {}).get("Name") or "no",
            restart_count=found.get("RestartCount", 0),
            started_at=_stamp(found["State"].get("StartedAt")),
            network_mode=host_config.get("NetworkMode", ""),
            ipc_mode=host_config.get("IpcMode", ""),
            name=str(found.get("Name", "")).removeprefix("/"),
            image_reference=(found.get("Config") or {}).get("Image", ""),
            options={key: host_config[key] for key in HOST_KEYS if host_config.get(key)},
        )

    def _environment(self, found: Mapping[str, Any]) -> tuple[str, ...]:
        """PID 1's environment as the kernel holds it: from inside the container, else from the host; never the image's."""
        pid = found["State"]["Pid"]
        host_pids = (found.get("HostConfig") or {}).get("PidMode") == "host"
        inside = self.read_in(found["Id"], ["cat", f"/proc/{pid if host_pids else 1}/environ"])
        if inside.code == 0 and inside.stdout:
            return _entries(inside.stdout)
        outside = self.read(["cat", f"/proc/{pid}/environ"])
        if outside.code == 0 and outside.stdout:
            return _entries(outside.stdout)
        said = (inside.stderr or inside.stdout or outside.stderr).decode("utf-8", "replace").strip()
        raise HostError(
            "DOCKER_FAILED", f"{self.name}: the environment of PID 1 of {found['Name'][1:]} cannot be read: {said}"
        )

    def read_in(self, rank_id: str, argv: Sequence[str], *, timeout: float = 30.0) -> Output:
        """Run a command inside the container. One that does not end in time goes on in there; the call does not."""
        asked = {"AttachStdout": True, "AttachStderr": True, "Cmd": list(argv)}
        with self._translated(f"{argv[0]} in {rank_id[:12]}"):
            created = self._call("POST", f"/containers/{rank_id}/exec", body=asked)
            with self._streamed(
                "POST", f"/exec/{created['Id']}/start", timeout, body={"Detach": False, "Tty": False}
            ) as raw:
                stdout, stderr = _collect(self.name, argv[0], raw)
            code = self._call("GET", f"/exec/{created['Id']}/json")["ExitCode"]
        return Output(code if code is not None else -1, stdout, stderr)

    # --- start

    def start(self, spec: RankSpec) -> str:
        """Create and start. Raises NAME_TAKEN, IMAGE_MISSING, LAUNCH_FAILED (an option), DOCKER_FAILED (the daemon's words)."""
        body = create_body(self.name, spec)
        with self._translated(f"create {spec.name}"):
            rank_id = self._create(spec, body)
        try:
            with self._translated(f"start {spec.name}"):
                self._call("POST", f"/containers/{rank_id}/start", timeout=START_S)
        except HostError as error:
            raise HostError(error.code, f"{error.message}{self._discard(rank_id)}") from error
        return rank_id

    def _create(self, spec: RankSpec, body: Mapping[str, Any]) -> str:
        try:
            created = self._call("POST", "/containers/create", timeout=START_S, body=body, name=spec.name)
        except NotFound as error:
            raise HostError("IMAGE_MISSING", f"{self.name}: image {spec.image!r}: {_said(error)}") from error
        except APIError as error:
            if error.response.status_code != 409:
                raise
            raise HostError("NAME_TAKEN", f"{self.name}: {_said(error)}") from error
        return str(created["Id"])

    def _discard(self, rank_id: str) -> str:
        """Remove what was created and could not be started; returns what to add to the message if that failed too."""
        try:
            with self._translated("remove"):
                self._delete(rank_id, force=True)
        except HostError as error:
            return f"; and the container {rank_id[:12]} was left behind: {error.message}"
        return ""

    def _delete(self, rank_id: str, *, force: bool) -> None:
        with suppress(NotFound):
            try:
                self._call("DELETE", f"/containers/{rank_id}", timeout=START_S, force=int(force), v=1)
            except APIError as error:
                if "already in progress" not in _said(error):
                    raise
                self._await_removal(rank_id)

    def _await_removal(self, rank_id: str) -> None:
        """Somebody else removes it already. Raises DOCKER_FAILED if it is there after `REMOVAL_S` seconds."""
        deadline = time.monotonic() + REMOVAL_S
        while self._look(rank_id):
            if time.monotonic() > deadline:
                what = f"the removal of {rank_id[:12]} by somebody else did not end within {REMOVAL_S:g} s"
                raise HostError("DOCKER_FAILED", f"{self.name}: {what}")
            time.sleep(LOOK_S)

    # --- the log

    def follow(self, rank_id: str, sink: Path) -> None:
        """One thread copies the log; after a broken connection it fetches the whole again and goes on."""
        target = self._sinks[rank_id, sink] = LogSink(sink)
        thread = threading.Thread(
            target=self._follow, args=(rank_id, target), name=f"dspark-log-{self.name}", daemon=True
        )
        thread.start()

    def _follow(self, rank_id: str, sink: LogSink) -> None:
        while not self._closing.is_set():
            whole = False
            with suppress(HostError, OSError):  # a full disk here may have room again
                self._copy_log(rank_id, sink, follow=True)
                whole = self.state(rank_id).status not in ("running", "created")
            if whole or self._gone(rank_id) or self._closing.wait(RETRY_S):
                return

    def _gone(self, rank_id: str) -> bool:
        try:
            return self._look(rank_id) is None
        except HostError:
            return False

    def _copy_log(self, rank_id: str, sink: LogSink, *, follow: bool) -> None:
        position = 0
        chunks = self._log(rank_id, follow=follow)
        with sink.opened() as file:
            for chunk in chunks if follow else batched(chunks):
                position = sink.put(file, position, chunk)

    def _log(self, rank_id: str, *, follow: bool) -> Iterator[bytes]:
        """The log from its first byte, both streams in the order in which the engine has them. Raises HostError.

        A log that breaks off is DOCKER_FAILED: the host answered, and must still be asked to stop its rank.
        """
        doing = f"logs of {rank_id[:12]}"
        with self._translated(doing):
            tty = _object(self._api().inspect_container(rank_id))["Config"]["Tty"]
            query = {"stdout": 1, "stderr": 1, "follow": int(follow), "timestamps": 0, "tail": "all"}
            timeout, path = None if follow else START_S, f"/containers/{rank_id}/logs"
            with self._streamed("GET", path, timeout, **query) as raw, self._translated(doing, "DOCKER_FAILED"):
                yield from iter(lambda: raw.read1(1 << 16), b"") if tty else (data for _, data in frames(raw))

    @contextmanager
    def _streamed(
        self, method: str, path: str, timeout: float | None, *, body: Any = None, **query: Any
    ) -> Iterator[urllib3.response.BaseHTTPResponse]:
        """An open answer, closed afterwards or by `close`."""
        api = self._api()
        url, limits = api._url("{0}", path), (API_S, timeout)
        response = api.request(method, url, json=body, params=query, stream=True, timeout=limits)
        self._streams.add(response)
        try:
            api._raise_for_status(response)
            yield response.raw
        finally:
            self._streams.discard(response)
            response.close()

    def save_log(self, rank_id: str, sink: Path) -> None:
        followed = self._sinks.get((rank_id, sink))
        if followed:
            self._copy_log(rank_id, followed, follow=False)
        else:
            save_longer_stream(batched(self._log(rank_id, follow=False)), sink)

    # --- stop

    def stop(self, rank_id: str, *, grace_s: float) -> RankState:
        """Docker's own stop: SIGTERM, `grace_s` seconds rounded up, SIGKILL to everything in the container."""
        seconds = math.ceil(grace_s)
        with self._translated(f"stop {rank_id[:12]}"), suppress(NotFound):
            path, timeout = f"/containers/{rank_id}/stop", seconds + STOP_MARGIN_S
            self._call("POST", path, timeout=timeout, t=seconds)
        return self.state(rank_id)

    def remove(self, rank_id: str) -> None:
        with self._translated(f"remove {rank_id[:12]}"):
            self._delete(rank_id, force=False)

    # --- the rest

    def listener(self, port: int) -> str:
        done = self.read(["cat", *TABLES])
        if not done.stdout:
            raise HostError("HOST_UNREACHABLE", f"{self.name}: {TABLES[0]} cannot be read: {done.stderr!r}")
        inodes = listening_inodes(done.text, port)
        if not inodes:
            return ""
        if self._connection.local:
            return local_owner(inodes)
        shown = self.read(["ss", "-ltnpH", f"sport = :{port}"])
        return owner_from_ss(shown.text) if shown.code == 0 else "unknown"

    def worked_s(self, rank_id: str) -> float | None:
        """One look at the container's counters, without the second that Docker waits to compute a share."""
        query: dict[str, Any] = {"stream": 0, "one-shot": 1}
        with self._translated(f"stats of {rank_id[:12]}"):
            found = self._call("GET", f"/containers/{rank_id}/stats", **query) or {}
        used = ((found.get("cpu_stats") or {}).get("cpu_usage") or {}).get("total_usage")
        return used / 1e9 if used else None

    def readings(self) -> Readings:
        return self._reader.read(self.read)

    def close(self) -> None:
        """End the copying of logs and the connection. Containers that run go on."""
        self._closing.set()
        for response in list(self._streams):
            with suppress(OSError, ValueError, RuntimeError, NotImplementedError):
                response.raw.shutdown()
        self._connection.close()
        if self._client is not None:
            self._client.close()


# --- pure readings


def _object(answer: Any) -> Mapping[str, Any]:
    """Of an answer with nothing in it nothing follows, least of all that a container is gone. Raises ValueError."""
    if not isinstance(answer, dict) or not answer:
        raise ValueError(f"expected an object with something in it, found {str(answer)[:40]!r}")
    return answer


def agreed_version(host: str, told: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """The newest API version that both speak; DOCKER_API_VERSION pins ours. Raises DOCKER_FAILED that shows both ranges."""
    pinned = environ.get("DOCKER_API_VERSION")
    ours = (pinned, pinned) if pinned else (MINIMUM_DOCKER_API_VERSION, DEFAULT_DOCKER_API_VERSION)
    theirs = (told.get("MinAPIVersion") or "1.12", told.get("ApiVersion") or "")
    try:
        low, high = max(_number(ours[0]), _number(theirs[0])), min(_number(ours[1]), _number(theirs[1]))
    except ValueError as error:
        raise HostError("DOCKER_FAILED", f"{host}: the engine's or our API version is no version: {error}") from error
    if low > high:
        why = " (DOCKER_API_VERSION)" if pinned else ""
        raise HostError(
            "DOCKER_FAILED",
            f"{host}: no common Docker API version: the engine speaks {theirs[0]} to {theirs[1]}, "
            f"this client {ours[0]} to {ours[1]}{why}",
        )
    return f"{high[0]}.{high[1]}"


def _number(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def id_kind(info: Mapping[str, Any]) -> str:
    """What an image id is on this engine: containerd's store names images by their manifest."""
    status = {str(row[0]): str(row[1]) for row in info.get("DriverStatus") or () if len(row) > 1}
    return "manifest" if "containerd" in status.get("driver-type", "") else "config"


def image_store(info: Mapping[str, Any]) -> str:
    driver = info.get("Driver", "")
    return f"{driver} (containerd)" if id_kind(info) == "manifest" else str(driver)


def state_of(found: Mapping[str, Any]) -> RankState:
    """A container's inspection as a state. Paused and restarting count as running: the restart count tells them apart."""
    state = found["State"]
    status = _STATUS.get(state.get("Status", ""), "running")
    return RankState(
        rank_id=found["Id"],
        name=found["Name"].removeprefix("/"),
        status=status,
        exit_code=state.get("ExitCode") if status in ("exited", "dead") else None,
        oom_killed=bool(state.get("OOMKilled")),
        restart_count=found.get("RestartCount", 0),
        started_at=_stamp(state.get("StartedAt")),
        finished_at=_stamp(state.get("FinishedAt")),
        labels=(found.get("Config") or {}).get("Labels") or {},
    )


def _stamp(text: str | None) -> str:
    return "" if text in (None, _NEVER) else str(text)


def _plain(mount: Mapping[str, Any]) -> Mapping[str, str | bool]:
    return {key: value for key, value in mount.items() if isinstance(value, (str, bool))}


def _entries(raw: bytes) -> tuple[str, ...]:
    return tuple(entry.decode("utf-8", "surrogateescape") for entry in raw.split(b"\0") if entry)


def frames(raw: Any) -> Iterator[tuple[int, bytes]]:
    """Docker's multiplexed stream: (1 stdout or 2 stderr, bytes). Raises OSError if it ends inside a frame."""
    while head := raw.read(8):
        kind, length = struct.unpack(">BxxxL", head) if len(head) == 8 else (0, 1)
        data = raw.read(length) if length else b""
        if len(data) != length or len(head) != 8:
            raise OSError("the stream ended inside a frame")
        yield kind, data


def batched(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of 256 KiB and more; a log has a frame for every line."""
    whole = bytearray()
    for chunk in chunks:
        whole += chunk
        if len(whole) >= BATCH:
            yield bytes(whole)
            whole.clear()
    yield bytes(whole)


def _collect(host: str, what: str, raw: Any) -> tuple[bytes, bytes]:
    parts = {1: bytearray(), 2: bytearray()}
    for kind, data in frames(raw):
        parts.get(kind, parts[1]).extend(data)
        if len(parts[1]) + len(parts[2]) > MAX_OUTPUT:
            raise HostError("DOCKER_FAILED", f"{host}: {what} printed more than {MAX_OUTPUT} bytes")
    return bytes(parts[1]), bytes(parts[2])


def _said(error: APIError) -> str:
    return str(error.explanation or error).strip()


def _cause(error: BaseException) -> str:
    """The innermost reason that says something: requests wraps urllib3, which wraps the system's error.

    What a parser stumbled over is no reason; the error that it is wrapped in is.
    """
    seen: list[BaseException] = []
    inner: BaseException | None = error
    while inner is not None and inner not in seen and not isinstance(inner, TimeoutError):
        if seen and isinstance(inner, (ValueError, StopIteration)):
            break
        seen.append(inner)
        reason = getattr(inner, "reason", None)
        inner = reason if isinstance(reason, BaseException) else inner.__cause__ or inner.__context__
    if isinstance(inner, TimeoutError):
        return "no answer in time"
    return next(filter(None, map(str, reversed(seen))), type(seen[-1]).__name__)
