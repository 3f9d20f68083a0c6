"""One ssh connection a host: commands and Docker's API run through channels of it, and through one more where sshd grants
too few. No prompt, no new host key, no proxy."""

from __future__ import annotations

import io
import logging
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paramiko

from pytest_dspark.cluster import Output
from pytest_dspark.errors import HostError
from pytest_dspark.hosts import known_hosts, ssh_config
from pytest_dspark.hosts.known_hosts import HostKey, Known, check_host_key
from pytest_dspark.hosts.ssh_config import Target
from pytest_dspark.hosts.ssh_keys import BoundedAgent, Keys

CONNECT_S = 10.0
KEEPALIVE_S = 15
# What was sent and is not acknowledged for so long ends the connection; the kernel alone would try for a quarter of an hour.
SILENT_S = 30.0
EXIT_S = 1.0
MAX_KEYS = 5
MAX_COMMANDS = 4
MAX_CONNECTIONS = 8
MAX_OUTPUT = 10 * 1024 * 1024
MAX_NOISE = 256 * 1024
# Else Python's last resort prints the tracebacks that paramiko logs beside the errors that it raises.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
MARKED = 'echo "$1"; echo "$1" >&2; shift; exec "$@"'
NO_INPUT = 'exec "$@" </dev/null'


@dataclass(frozen=True, slots=True)
class Places:
    """The files that say where a host is and who it is; tests give their own."""

    configs: tuple[Path, ...] = field(default_factory=ssh_config.default_configs)
    known_hosts: tuple[Path, ...] = field(default_factory=known_hosts.default_files)
    keys: Path = field(default_factory=lambda: Path.home() / ".ssh")
    agent: Callable[[], paramiko.Agent] = BoundedAgent


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
        self._failure: tuple[float, HostError] | None = None
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
            _end(channel)

    def open(self, argv: Sequence[str]) -> tuple[paramiko.Channel, bytes]:
        """A channel in which the command begins, past whatever the shell's start-up files printed; and the mark it wrote."""
        mark, channel = secrets.token_hex(8), self._session()
        began = time.monotonic()
        try:
            with _closed_after(CONNECT_S, channel):
                channel.exec_command(shlex.join(["sh", "-c", MARKED, "sh", mark, *argv]))
                noise = _read_past(channel, f"{mark}\n".encode())
        except paramiko.SSHException as error:
            if time.monotonic() - began >= CONNECT_S:
                raise TimeoutError from error
            raise
        if noise is None:
            return channel, f"{mark}\n".encode()
        if not channel.get_transport().is_active():
            raise ConnectionResetError("the connection was lost")
        late = f" within {CONNECT_S:g} s" if time.monotonic() - began >= CONNECT_S else ""
        _end(channel)
        what = f"the login shell did not run the command{late}, it said: {noise or 'nothing'}"
        raise HostError("HOST_UNREACHABLE", f"{self.name}: {what}")

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
        """Whoever waited while an attempt of another thread failed has his answer too: no queue of time-outs."""
        asked = time.monotonic()
        with self._lock:
            if self._closed:
                raise HostError("HOST_UNREACHABLE", f"{self.name}: the connection was closed by this program")
            if place == len(self._transports) or not self._transports[place].is_active():
                if self._failure and self._failure[0] > asked:
                    raise HostError(self._failure[1].code, self._failure[1].message)
                self._transports[place : place + 1] = [self._connect()]
            return self._transports[place]

    def _connect(self) -> paramiko.Transport:
        try:
            with self._translated():
                return connect(self.name, self.target, self._places)
        except HostError as error:
            self._failure = (time.monotonic(), error)
            raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise HostError("HOST_UNREACHABLE", f"{self.name}: {self.target} did not answer in time") from error
        except (paramiko.SSHException, OSError, EOFError, UnicodeError) as error:
            why = "it closed the connection" if isinstance(error, EOFError) else str(error) or type(error).__name__
            raise HostError("HOST_UNREACHABLE", f"{self.name}: ssh to {self.target}: {why}") from error

    def close(self) -> None:
        """End the connection with every channel; whoever reads from one sees its end."""
        self._closed = True  # before the lock: who waits for it must not connect first
        with self._lock:
            for transport in self._transports:
                transport.close()


def _end(channel: paramiko.Channel) -> None:
    """Close it; where the connection is gone there is nobody to tell."""
    with suppress(EOFError, OSError):
        channel.close()


@contextmanager
def _closed_after(seconds: float, channel: paramiko.Channel) -> Iterator[None]:
    """paramiko waits without a limit for the answer to `exec`; a channel that is closed wakes it, and whoever reads."""
    timer = threading.Timer(seconds, _end, [channel])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read_past(channel: paramiko.Channel, end: bytes) -> str | None:
    """Read the output up to `end` and no byte further; if it never comes, returns what came instead."""
    noise = bytearray()
    while missing := _missing(noise, end):
        more = channel.recv(missing) if len(noise) < MAX_NOISE else b""
        if not more:
            stderr = channel.makefile_stderr("rb").read() if channel.eof_received else b""
            return (bytes(noise) + b" " + stderr).decode("utf-8", "replace").strip()[-300:]
        noise += more
    return None


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
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000))
    transport = paramiko.Transport(link)
    try:
        transport.banner_timeout, transport.auth_timeout = 2 * CONNECT_S, CONNECT_S
        _prefer_known(transport, known)
        _greet(transport)
        key = transport.get_remote_server_key()
        check_host_key(name, target, HostKey(key.get_name(), key.asbytes()), known, known_hosts.unreadable(files))
        _authenticate(name, target, transport, places)
        transport.set_keepalive(KEEPALIVE_S)
    except BaseException:
        transport.close()
        raise
    return transport


def _greet(transport: paramiko.Transport) -> None:
    """Banner and key exchange. When the time is up paramiko returns as if all were well, if its banner has more."""
    try:
        transport.start_client(timeout=CONNECT_S)
    except paramiko.SSHException as error:
        if transport.remote_version:
            raise
        what = "no ssh banner came from there: another service, or sshd with too many clients (MaxStartups)"
        raise paramiko.SSHException(what) from error
    if not transport.initial_kex_done:
        raise TimeoutError


def _prefer_known(transport: paramiko.Transport, known: Sequence[Known]) -> None:
    """Ask first for key types that known_hosts can check, as OpenSSH does."""
    options = transport.get_security_options()
    kinds = {entry.key.kind for entry in known}
    options.key_types = tuple(sorted(options.key_types, key=lambda kind: _plain(kind) not in kinds))


def _plain(kind: str) -> str:
    return "ssh-rsa" if kind.startswith("rsa-sha2") else kind


def _authenticate(name: str, target: Target, transport: paramiko.Transport, places: Places) -> None:
    """The keys in their order, five tries at most (servers allow six). Raises SSH_AUTH_FAILED with what was tried."""
    keys = Keys(name, target, places.keys)
    tried: list[str] = []
    with closing(keys.candidates(places.agent)) as candidates:
        for candidate in candidates:
            if len(tried) == MAX_KEYS:
                keys.notes.append("more keys were not tried")
                break
            tried.append(candidate.label)
            why = _refusal(transport, target.user, candidate.key)
            if transport.is_authenticated():
                return
            keys.notes.extend({why} - {"", *keys.notes})
            if not transport.is_active():
                keys.notes.append("the connection ended, more keys were not tried")
                break
    text = f"tried {', '.join(tried) or 'no key: there is none'}{''.join(f'; {note}' for note in keys.notes)}"
    raise HostError("SSH_AUTH_FAILED", f"{name}: {target} accepted no key; {text}")


def _refusal(transport: paramiko.Transport, user: str, key: paramiko.PKey) -> str:
    """Offer a key; returns why it was not enough, as far as that was said. Raises TimeoutError, OSError."""
    deadline = time.monotonic() + CONNECT_S
    try:
        more = transport.auth_publickey(user, key)
    except paramiko.BadAuthenticationType as error:
        return f"the host allows {', '.join(error.allowed_types)} only"
    except paramiko.SSHException as error:
        if time.monotonic() >= deadline:
            raise TimeoutError from error
        return "" if isinstance(error, paramiko.AuthenticationException) else str(error)
    return f"the host asks for {', '.join(more)} beside a key" if more else ""


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


@contextmanager
def _as_a_socket() -> Iterator[None]:
    """paramiko raises EOFError where a message could not be sent, even in recv; no HTTP library expects that."""
    try:
        yield
    except EOFError as error:
        raise ConnectionResetError("the ssh connection was lost") from error


class _ChannelReader(io.RawIOBase):
    """The reading side of a channel as a file; the channel stays open until this is closed too."""

    def __init__(self, owner: ChannelSocket) -> None:
        self._owner = owner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _as_a_socket():
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
        with _as_a_socket():
            self.channel.sendall(data)

    def settimeout(self, seconds: float | None) -> None:
        self.channel.settimeout(seconds)

    def shutdown(self, how: int) -> None:
        """Wake whoever reads."""
        _end(self.channel)

    def reader_closed(self) -> None:
        self._readers -= 1
        if self._closed and not self._readers:
            _end(self.channel)

    def close(self) -> None:
        self._closed = True
        if not self._readers:
            _end(self.channel)
