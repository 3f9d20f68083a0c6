"""Where the ranks live: `cluster.toml`, and the one protocol that every kind of host speaks.

One `[[host]]` entry a rank, in rank order: the first is the head (rank 0).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pytest_dspark.errors import ConfigError

# The ownership marks of a rank: labels of a container, marks in the environment of a process.
RUN_LABEL = "io.dspark.run"
CLUSTER_LABEL = "io.dspark.cluster"
PROFILE_LABEL = "io.dspark.profile"
RANK_LABEL = "io.dspark.rank"
FINGERPRINT_LABEL = "io.dspark.fingerprint"
OWNER_LABEL = "io.dspark.owner"


@dataclass(frozen=True, slots=True)
class HostEntry:
    """One host of the cluster file; exactly one of `docker` and `process` says how its rank is run.

    `docker` is `unix:///path/docker.sock` or `ssh://user@host:port`; `process` runs the rank as a local process group.
    `address` is the fabric address that the other ranks reach, `interface` and `rdma` name the fabric's devices,
    `model` and `cache` are folders on that host, `manifest` is the runtime manifest's file there, `bundle` is a folder that stands for the image of a process rank,
    `env` is the environment that may differ from the other ranks.
    """

    name: str
    address: str
    docker: str | None = None
    process: bool = False
    interface: str = ""
    rdma: str = ""
    model: str = ""
    cache: str = ""
    manifest: str = ""
    bundle: str = ""
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ordered hosts, one a rank. `api` overrides the base URL (default: head address and the recipe's port)."""

    name: str
    hosts: tuple[HostEntry, ...]
    recipe: str = ""
    api: str = ""
    port: int | None = None
    master_port: int | None = None
    container: str = ""
    wrapper: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host says of itself when it is first reached. Empty string: the host could not tell."""

    kind: str
    hostname: str
    kernel: str
    architecture: str
    docker_version: str = ""
    api_version: str = ""
    image_store: str = ""
    address: str = ""
    data_root: str = ""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """One image as one host sees it. `id_kind` is `config`, `manifest` or `bundle`: only like is compared with like."""

    reference: str
    image_id: str
    id_kind: str
    architecture: str
    labels: Mapping[str, str]
    repo_digests: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one rank's container or process group, as its host knows it.

    `status` is `created`, `running`, `exited`, `dead` or `gone`; `finished_at` is the host's own text stamp.
    Of a process rank that was proven: `lost` are the processes that have ended since, `remaining` those that still live
    although its first one ended. A container holds its processes itself: both stay empty.
    """

    rank_id: str
    name: str
    status: str
    exit_code: int | None = None
    oom_killed: bool = False
    restart_count: int = 0
    started_at: str = ""
    finished_at: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    remaining: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What really runs: the inspected container or process. `environment` is that of PID 1, not of the image.

    `image_reference` is the name by which the container was made, `options` are its options by the names of Docker's API.
    """

    rank_id: str
    image_id: str
    path: str
    args: tuple[str, ...]
    environment: tuple[str, ...]
    mounts: tuple[Mapping[str, str | bool], ...]
    labels: Mapping[str, str]
    restart_policy: str
    restart_count: int
    started_at: str
    network_mode: str = ""
    ipc_mode: str = ""
    image_reference: str = ""
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Readings:
    """How a host is now. None: it could not be read, and `unreadable` says why; it is never 0 then.

    `free_memory_gib` is MemAvailable in GiB, which on unified memory is the GPU's too; `temperature_c` is the highest of
    all sensors in °C and `sensor` names it.
    """

    free_memory_gib: float | None
    temperature_c: float | None
    sensor: str = ""
    unreadable: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "free_memory_gib": self.free_memory_gib,
            "temperature_c": self.temperature_c,
            "sensor": self.sensor or None,
            "unreadable": list(self.unreadable),
        }


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a command on a host."""

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        return self.stdout.decode("utf-8", "replace")


class Host(Protocol):
    """One host. Every call is bounded by its own time-out and raises `HostError` with the host's name in the message."""

    @property
    def name(self) -> str: ...

    def facts(self) -> HostFacts:
        """Reach the host and say what it is. Raises HOST_UNREACHABLE, HOST_KEY_*, SSH_AUTH_FAILED, DOCKER_MISSING."""
        ...

    def read(self, argv: Sequence[str], *, timeout: float = 10.0) -> Output:
        """Run one read-only command on the host itself (no shell, no pty)."""
        ...

    def read_in(self, rank_id: str, argv: Sequence[str], *, timeout: float = 30.0) -> Output:
        """Run one read-only command inside the rank's container (a process rank: on the host)."""
        ...

    def image(self, reference: str) -> ImageFacts:
        """Look at an image. Raises IMAGE_MISSING."""
        ...

    def find(self, name: str) -> RankState | None:
        """The container or process of exactly this name, whoever owns it; None if there is none."""
        ...

    def owned(self, label: str, value: str = "") -> tuple[RankState, ...]:
        """All containers or processes that carry the label (with that value unless empty), running or not."""
        ...

    def start(self, spec: RankSpec) -> str:
        """Create and start the rank; returns its id. The name is the lock: raises NAME_TAKEN on a conflict."""
        ...

    def state(self, rank_id: str) -> RankState:
        """The rank's state now; status `gone` if it does not exist any more."""
        ...

    def inspect(self, rank_id: str) -> RankFacts:
        """What really runs, for the gate."""
        ...

    def follow(self, rank_id: str, sink: Path) -> None:
        """Begin to write the rank's whole log, from its birth, into the file until the rank ends (in the background)."""
        ...

    def save_log(self, rank_id: str, sink: Path) -> None:
        """Fetch the whole log at once into the file, replacing what `follow` wrote if that is shorter."""
        ...

    def stop(self, rank_id: str, *, grace_s: float) -> RankState:
        """Ask the rank to end, wait `grace_s`, then kill it with everything it started. Never raises for one gone already."""
        ...

    def remove(self, rank_id: str) -> None:
        """Remove the stopped rank. One that is gone already is success."""
        ...

    def listener(self, port: int) -> str:
        """Who listens on the TCP port on this host: a process name and pid, `unknown`, or an empty string for nobody."""
        ...

    def worked_s(self, rank_id: str) -> float | None:
        """Seconds of processor time that the rank has used so far, to the nanosecond; None if that cannot be read."""
        ...

    def readings(self) -> Readings:
        """Free memory and highest temperature now, within about ten seconds; raises nothing."""
        ...

    def close(self) -> None:
        """Give back connections and threads. The host stays usable by nobody afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind mount of one rank."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Everything needed to start one rank, and nothing that is not: the plan is made of these.

    `options` are the container options of the recipe by Docker's own long names (`gpus`, `ipc`, `network`, `shm-size`,
    `ulimit`, `cap-add`, `device`, `security-opt`, `entrypoint`); a list where Docker's flag may be repeated.
    `labels` carry the run's ownership marks. `secrets` names the environment keys whose value is never written. `package_folders` are
    where packages are looked for inside the rank, if not where its interpreter finds them.
    """

    rank: int
    host: str
    name: str
    image: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    mounts: tuple[Mount, ...]
    options: tuple[tuple[str, str | tuple[str, ...]], ...]
    labels: tuple[tuple[str, str], ...] = ()
    secrets: frozenset[str] = frozenset()
    bundle: str = ""
    package_folders: tuple[str, ...] = ()

    @property
    def role(self) -> str:
        return "head" if self.rank == 0 else "worker"


_HOST_KEYS = {
    "name": str,
    "address": str,
    "docker": str,
    "process": bool,
    "interface": str,
    "rdma": str,
    "model": str,
    "cache": str,
    "manifest": str,
    "bundle": str,
    "env": dict,
}
_CLUSTER_KEYS = {
    "name": str,
    "recipe": str,
    "api": str,
    "port": int,
    "master_port": int,
    "container": str,
    "wrapper": str,
    "host": list,
}
_PORTS = frozenset({"port", "master_port"})
_WORDS = frozenset({"address", "docker", "interface", "rdma", "container", "api"})
_NAMES = frozenset({"name", "container", "interface"})


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file. Raises ConfigError (CLUSTER_INVALID) that names the file, the entry and the key."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("CLUSTER_INVALID", f"{path}: {error}") from error
    return cluster_from(data, source=str(path))


def cluster_from(data: Mapping[str, object], *, source: str) -> Cluster:
    """A Cluster out of parsed TOML; `source` is what messages call the file."""
    _check_keys(data, _CLUSTER_KEYS, source)
    entries = data.get("host", [])
    if not isinstance(entries, list) or not entries:
        raise ConfigError("CLUSTER_INVALID", f"{source}: expected at least one [[host]], found none")
    hosts = tuple(_host(entry, f"{source}: host {number}") for number, entry in enumerate(entries, 1))
    names = [host.name for host in hosts]
    if len(set(names)) != len(names):
        raise ConfigError("CLUSTER_INVALID", f"{source}: host names must differ, found {', '.join(names)}")
    plain = {key: value for key, value in data.items() if key != "host"}
    return Cluster(hosts=hosts, source=source, **({"name": "cluster"} | plain))  # type: ignore[arg-type]


def _host(entry: object, where: str) -> HostEntry:
    if not isinstance(entry, dict):
        raise ConfigError("CLUSTER_INVALID", f"{where}: expected a table, found {entry!r}")
    _check_keys(entry, _HOST_KEYS, where)
    for key in ("name", "address"):
        if not entry.get(key):
            raise ConfigError("CLUSTER_INVALID", f"{where}: {key} is missing")
    if bool(entry.get("docker")) == bool(entry.get("process")):
        raise ConfigError("CLUSTER_INVALID", f"{where}: expected exactly one of docker and process = true")
    docker = str(entry.get("docker", ""))
    if docker and not docker.startswith(("unix:///", "ssh://")):
        raise ConfigError(
            "CLUSTER_INVALID", f"{where}: docker must be unix:///… or ssh://user@host:port, found {docker!r}"
        )
    env = entry.get("env", {})
    for key, value in env.items():
        if not isinstance(value, str):
            raise ConfigError("CLUSTER_INVALID", f"{where}: env {key} must be a string, found {value!r}")
        if not key or "=" in key or "\0" in key + value:
            raise ConfigError("CLUSTER_INVALID", f"{where}: env {key!r} cannot be handed to a process")
    for key in ("model", "cache", "manifest", "bundle") if docker else ():
        if entry.get(key) and not entry[key].startswith("/"):
            raise ConfigError("CLUSTER_INVALID", f"{where}: {key} must be a path from / on, found {entry[key]!r}")
    return HostEntry(**{**entry, "env": tuple(sorted(env.items()))})


def _check_keys(table: Mapping[str, object], known: Mapping[str, type], where: str) -> None:
    for key, value in table.items():
        if key not in known:
            raise ConfigError(
                "CLUSTER_INVALID", f"{where}: unknown key {key!r}, expected one of {', '.join(sorted(known))}"
            )
        if type(value) is not known[key]:
            raise ConfigError(
                "CLUSTER_INVALID",
                f"{where}: {key} must be {known[key].__name__}, found {type(value).__name__} {value!r}",
            )
        if isinstance(value, str):
            _check_text(key, value, where)
        if key in _PORTS and not 0 < int(str(value)) < 65536:
            raise ConfigError("CLUSTER_INVALID", f"{where}: {key} must be 1 to 65535, found {value!r}")


def _check_text(key: str, value: str, where: str) -> None:
    """No word may be taken for an option of the command that it is given to, none for two, and no name for a path."""
    if value.startswith("-") or not value.isprintable():
        raise ConfigError(
            "CLUSTER_INVALID", f"{where}: {key} must be printable text that is no option, found {value!r}"
        )
    if (key in _WORDS and any(char.isspace() for char in value)) or (key in _NAMES and "/" in value):
        raise ConfigError("CLUSTER_INVALID", f"{where}: {key} must be one word, found {value!r}")
