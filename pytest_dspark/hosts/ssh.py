"""One ssh connection a host: commands and Docker's API run through channels of it, and through one more where sshd grants
too few. No prompt, no new host key, no proxy."""

from __future__ import annotations

import base64
import io
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paramiko
from paramiko.pkey import UnknownKeyType

from pytest_dspark.cluster import Output
from pytest_dspark.errors import HostError
from pytest_dspark.hosts import known_hosts, ssh_config
from pytest_dspark.hosts.known_hosts import HostKey, Known, check_host_key
from pytest_dspark.hosts.ssh_config import Target

CONNECT_S = 10.0
KEEPALIVE_S = 15
EXIT_S = 1.0
MAX_KEYS = 5
MAX_COMMANDS = 4
MAX_CONNECTIONS = 8
MAX_OUTPUT = 10 * 1024 * 1024
MAX_NOISE = 256 * 1024
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
MARKED = 'echo "$1"; echo "$1" >&2; shift; exec "$@"'
NO_INPUT = 'exec "$@" </dev/null'


@dataclass(frozen=True, slots=True)
class Places:
    """The files that say where a host is and who it is; tests give their own."""

    configs: tuple[Path, ...] = field(default_factory=ssh_config.default_configs)
    known_hosts: tuple[Path, ...] = field(default_factory=known_hosts.default_files)
    keys: Path = field(default_factory=lambda: Path.home() / ".ssh")
    agent: Callable[[], paramiko.Agent] = paramiko.Agent


class SshConnection:
    """The connection to one host, opened at first use and again after it broke. Four commands at most
    at a time, and transport.MAX_LINKS to Docker: eight channels of the ten that sshd allows. Where its MaxSessions is less,
    a further connection is opened for each channel that was refused."""

    def __init__(self, name: str, url: str, *, places: Places | None = None) -> None:
        self.name = name
        self._places = places or Places()
        self.target = ssh_config.resolve(name, ssh_config.parse_address(name, url), self._places.configs)
        self._lock, self._commands = threading.Lock(), threading.BoundedSemaphore(MAX_COMMANDS)
        self._opening = threading.Lock()
        self._transports: list[paramiko.Transport] = []
        self._closed = False

    def run(self, argv: Sequence[str], *, timeout: float = 10.0) -> Output:
        """Run one command, as it is, with no shell of its own. Raises HOST_UNREACHABLE after `timeout` seconds or above 10 MB."""
        with self._commands, self._translated(), self.channel(argv) as (channel, noise):
            return _collect(self.name, channel, argv, time.monotonic() + timeout, noise)

    @contextmanager
    def channel(self, argv: Sequence[str]) -> Iterator[tuple[paramiko.Channel, bytes]]:
        """The command without input. Its end is not sent to it through the channel: sshd drops the whole connection if that comes
        after a short command has ended and its channel was closed by both sides."""
        channel, mark = self.open(["sh", "-c", NO_INPUT, "sh", *argv])
        try:
            yield channel, mark
        finally:
            channel.close()

    def open(self, argv: Sequence[str]) -> tuple[paramiko.Channel, bytes]:
        """A channel in which the command begins, past whatever the shell's start-up files printed; and the mark it wrote."""
        mark = secrets.token_hex(8)
        channel = self._session()
        channel.settimeout(CONNECT_S)
        channel.exec_command(shlex.join(["sh", "-c", MARKED, "sh", mark, *argv]))
        noise, end = bytearray(), f"{mark}\n".encode()
        while missing := _missing(noise, end):
            more = channel.recv(missing) if len(noise) < MAX_NOISE else b""
            if not more:
                stderr = channel.makefile_stderr("rb").read() if channel.eof_received else b""
                channel.close()
                said = (bytes(noise) + b" " + stderr).decode("utf-8", "replace").strip()[-300:]
                raise HostError(
                    "HOST_UNREACHABLE", f"{self.name}: the login shell did not run the command, it said: {said}"
                )
            noise += more
        return channel, end

    def dial_docker(self) -> ChannelSocket:
        """A link to the host's Docker engine. Raises HOST_UNREACHABLE; that docker is missing shows at the first request."""
        with self._translated():
            return ChannelSocket(self.name, *self.open(["docker", "system", "dial-stdio"]))

    def _session(self) -> paramiko.Channel:
        """A channel of the first connection whose sshd grants one more."""
        for place in range(MAX_CONNECTIONS):
            try:
                return self._opened(self._connected(place))
            except paramiko.ChannelException as error:
                refused = error
        what = (
            f"sshd refused one more session on each of {MAX_CONNECTIONS} connections ({refused}); see its MaxSessions"
        )
        raise HostError("HOST_UNREACHABLE", f"{self.name}: {what}") from refused

    def _opened(self, transport: paramiko.Transport) -> paramiko.Channel:
        """One at a time: a transport keeps one refusal only, so of two at the same moment one would have no reason."""
        if not self._opening.acquire(timeout=CONNECT_S):
            raise TimeoutError
        try:
            return transport.open_session(timeout=CONNECT_S)
        finally:
            self._opening.release()

    def _connected(self, place: int) -> paramiko.Transport:
        with self._lock:
            if self._closed:
                raise HostError("HOST_UNREACHABLE", f"{self.name}: the connection was closed by this program")
            if place == len(self._transports) or not self._transports[place].is_active():
                with self._translated():
                    self._transports[place : place + 1] = [connect(self.name, self.target, self._places)]
            return self._transports[place]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise HostError("HOST_UNREACHABLE", f"{self.name}: {self.target} did not answer in time") from error
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise HostError(
                "HOST_UNREACHABLE", f"{self.name}: ssh to {self.target}: {error or type(error).__name__}"
            ) from error

    def close(self) -> None:
        """End the connection with every channel; whoever reads from one sees its end."""
        with self._lock:
            self._closed = True
            for transport in self._transports:
                transport.close()


def _missing(noise: bytearray, end: bytes) -> int:
    """The least number of bytes after which `noise` can end with `end`: never more is read than that."""
    return next(len(end) - had for had in range(len(end), -1, -1) if noise.endswith(end[:had]))


# --- connecting


def connect(name: str, target: Target, places: Places) -> paramiko.Transport:
    """An authenticated transport. Raises HOST_KEY_*, SSH_AUTH_FAILED, and the libraries' own for what the network did."""
    files = places.known_hosts if target.known_hosts is None else target.known_hosts
    known = known_hosts.known_keys(target.known_name, files)
    link = socket.create_connection((target.host, target.port), timeout=CONNECT_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    transport = paramiko.Transport(link)
    try:
        transport.banner_timeout = transport.auth_timeout = CONNECT_S
        _prefer_known(transport, known)
        transport.start_client(timeout=CONNECT_S)
        key = transport.get_remote_server_key()
        check_host_key(name, target, HostKey(key.get_name(), key.asbytes()), known)
        _authenticate(name, target, transport, places)
        transport.set_keepalive(KEEPALIVE_S)
    except BaseException:
        transport.close()
        raise
    return transport


def _prefer_known(transport: paramiko.Transport, known: Sequence[Known]) -> None:
    """Ask first for key types that known_hosts can check, as OpenSSH does."""
    options = transport.get_security_options()
    kinds = {entry.key.kind for entry in known}
    options.key_types = tuple(sorted(options.key_types, key=lambda kind: _plain(kind) not in kinds))


def _plain(kind: str) -> str:
    return "ssh-rsa" if kind.startswith("rsa-sha2") else kind


@dataclass(frozen=True, slots=True)
class _Candidate:
    key: paramiko.PKey
    label: str


def _authenticate(name: str, target: Target, transport: paramiko.Transport, places: Places) -> None:
    """Configured key files first, then the default ones, then the agent's; five tries at most (servers allow six)."""
    tried: list[str] = []
    notes: list[str] = []
    with closing(places.agent()) as agent:
        for candidate in _candidates(name, target, places, agent, notes):
            if len(tried) == MAX_KEYS or not transport.is_active():
                notes.append("more keys were not tried")
                break
            tried.append(candidate.label)
            if _accepts(transport, target.user, candidate.key):
                return
    text = f"tried {', '.join(tried) or 'no key: there is none'}{''.join(f'; {note}' for note in notes)}"
    raise HostError("SSH_AUTH_FAILED", f"{name}: {target} accepted no key; {text}")


def _accepts(transport: paramiko.Transport, user: str, key: paramiko.PKey) -> bool:
    with suppress(paramiko.AuthenticationException):
        transport.auth_publickey(user, key)
    return transport.is_authenticated()


def _candidates(
    name: str, target: Target, places: Places, agent_: paramiko.Agent, notes: list[str]
) -> Iterator[_Candidate]:
    agent = {key.asbytes(): _Candidate(key, _agent_label(key)) for key in agent_.get_keys()}
    seen: set[bytes] = set()
    defaults = [] if target.identities_only else [places.keys / key for key in DEFAULT_KEYS]
    files = [(path, True) for path in target.identities] + [(path, False) for path in defaults]
    for path, configured in files:
        found = _from_file(name, path, agent, notes, configured=configured)
        if found and found.key.asbytes() not in seen:
            seen.add(found.key.asbytes())
            yield found
    for blob, candidate in agent.items():
        if blob not in seen and not target.identities_only:
            yield candidate


def _agent_label(key: paramiko.PKey) -> str:
    return f"agent key {key.get_name()} {getattr(key, 'comment', '')}".strip()


def _from_file(
    name: str, path: Path, agent: Mapping[bytes, _Candidate], notes: list[str], *, configured: bool
) -> _Candidate | None:
    """The key of a file; of an encrypted one the agent's copy. A configured one that cannot be used is an error at once."""
    if not path.exists():
        if configured:
            notes.append(f"IdentityFile {path} is not there")
        return None
    try:
        return _Candidate(paramiko.PKey.from_path(path), str(path))
    except (TypeError, paramiko.PasswordRequiredException):
        held = agent.get(_public_blob(path))
        if held:
            return held
        problem = f"key {path} is encrypted and the agent does not hold it"
    except (ValueError, OSError, paramiko.SSHException, UnknownKeyType) as error:
        problem = f"key {path} cannot be used: {error}"
    if configured:
        raise HostError("SSH_AUTH_FAILED", f"{name}: {problem}")
    notes.append(problem)
    return None


def _public_blob(path: Path) -> bytes:
    try:
        return base64.b64decode(path.with_name(path.name + ".pub").read_text(encoding="utf-8").split()[1])
    except (OSError, IndexError, ValueError):
        return b""


# --- one command


def _collect(name: str, channel: paramiko.Channel, argv: Sequence[str], deadline: float, mark: bytes) -> Output:
    stdout, stderr = bytearray(), bytearray()
    while True:
        ended = channel.exit_status_ready() and channel.eof_received
        got = _drain(channel, stdout, stderr)
        if ended and not got:
            break
        if len(stdout) + len(stderr) > MAX_OUTPUT + MAX_NOISE:
            raise HostError("HOST_UNREACHABLE", f"{name}: {argv[0]} printed more than {MAX_OUTPUT} bytes")
        if channel.closed and not got and not ended:
            raise HostError("HOST_UNREACHABLE", f"{name}: the connection was lost while {argv[0]} ran")
        if time.monotonic() > deadline:
            raise HostError("HOST_UNREACHABLE", f"{name}: {argv[0]} did not end in time")
        if not got:
            time.sleep(0.002)
    code = channel.recv_exit_status()
    if code < 0:
        raise HostError(
            "HOST_UNREACHABLE", f"{name}: {argv[0]} ended without an exit code (a signal, or a lost connection)"
        )
    return Output(code, bytes(stdout), bytes(stderr).partition(mark)[2])


def _drain(channel: paramiko.Channel, stdout: bytearray, stderr: bytearray) -> bool:
    before = len(stdout) + len(stderr)
    if channel.recv_ready():
        stdout += channel.recv(1 << 18)
    if channel.recv_stderr_ready():
        stderr += channel.recv_stderr(1 << 18)
    return len(stdout) + len(stderr) > before


# --- Docker's API through `docker system dial-stdio`


class _ChannelReader(io.RawIOBase):
    """The reading side of a channel as a file; the channel stays open until this is closed too."""

    def __init__(self, owner: ChannelSocket) -> None:
        self._owner = owner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._owner.channel.recv(len(buffer))
        buffer[: len(data)] = data
        if not data:
            self._owner.channel.status_event.wait(EXIT_S)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._owner.reader_closed()


class ChannelSocket:
    """A channel in the shape of a socket: what http.client needs, and closed like one, after its readers."""

    def __init__(self, name: str, channel: paramiko.Channel, mark: bytes) -> None:
        self.channel = channel
        self._name, self._mark = name, mark
        self._readers, self._closed = 0, False

    @property
    def alive(self) -> bool:
        return not self.channel.closed and not self.channel.eof_received

    def failure(self) -> HostError | None:
        """Why dial-stdio ended by itself; None if it did not, or if the connection simply broke."""
        channel = self.channel
        if self.alive or not channel.status_event.wait(EXIT_S) or channel.exit_status <= 0:
            return None
        said = ""
        with suppress(OSError):
            raw = channel.makefile_stderr("rb").read().partition(self._mark)[2]
            said = raw.decode("utf-8", "replace").strip()[-300:]
        if channel.exit_status == 127:
            what = f"docker is not on PATH of a non-interactive shell ({said})"
            return HostError("DOCKER_MISSING", f"{self._name}: {what}")
        what = f"docker system dial-stdio ended with code {channel.exit_status}: {said}"
        return HostError("HOST_UNREACHABLE", f"{self._name}: {what}", docker_only=True)

    def makefile(self, *_args: Any, **_more: Any) -> io.BufferedReader:
        self._readers += 1
        return io.BufferedReader(_ChannelReader(self), 1 << 16)

    def sendall(self, data: bytes) -> None:
        self.channel.sendall(data)

    def settimeout(self, seconds: float | None) -> None:
        self.channel.settimeout(seconds)

    def shutdown(self, how: int) -> None:
        """Wake whoever reads."""
        self.channel.close()

    def reader_closed(self) -> None:
        self._readers -= 1
        if self._closed and not self._readers:
            self.channel.close()

    def close(self) -> None:
        self._closed = True
        if not self._readers:
            self.channel.close()
