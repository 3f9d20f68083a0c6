"""ssh: a real sshd on a high port of 127.0.0.1 for what is said on the wire, files for what is read before."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_dspark.cluster import Output
from pytest_dspark.errors import HostError
from pytest_dspark.hosts.known_hosts import HostKey, check_host_key, known_keys
from pytest_dspark.hosts.ssh_config import Target, parse_address, resolve

paramiko = pytest.importorskip("paramiko")

from cryptography.exceptions import UnsupportedAlgorithm  # noqa: E402

from pytest_dspark.hosts.docker import DockerHost, RemoteConnection  # noqa: E402
from pytest_dspark.hosts.ssh import Places, SshConnection, _missing  # noqa: E402
from pytest_dspark.hosts.ssh_keys import BoundedAgent  # noqa: E402

SSHD = Path("/usr/sbin/sshd")
END_OF_INPUT = bytes([96])  # SSH_MSG_CHANNEL_EOF, RFC 4254 section 9
needs_sshd = pytest.mark.skipif(
    not SSHD.exists() or os.geteuid() != 0 or not shutil.which("ssh-keygen"),
    reason="needs root, ssh-keygen and /usr/sbin/sshd (Debian: openssh-server)",
)


class NoAgent:
    """An agent that holds nothing."""

    keys: tuple[Any, ...] = ()

    def get_keys(self) -> tuple[Any, ...]:
        return self.keys

    def close(self) -> None:
        """Nothing is open."""


def keygen(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", path.name, "-f", str(path)], check=True, timeout=60
    )
    return path


@dataclass(frozen=True)
class Server:
    """A running sshd; `home` has the client's files, `bin` is first on the PATH of its sessions."""

    port: int
    home: Path
    bin: Path
    host_key: str

    @property
    def url(self) -> str:
        return f"ssh://root@127.0.0.1:{self.port}"

    def known(self, name: str = "", key: str = "") -> Path:
        path = self.home / "known_hosts"
        path.write_text(f"{name or f'[127.0.0.1]:{self.port}'} {key or self.host_key}\n")
        return path

    def places(self, **more: Any) -> Places:
        given: dict[str, Any] = {
            "configs": (self.home / "config",),
            "known_hosts": (self.home / "known_hosts",),
            "keys": self.home,
            "agent": NoAgent,
        }
        return Places(**given | more)

    def connect(self, url: str = "", **more: Any) -> SshConnection:
        return SshConnection("gb-worker", url or self.url, places=self.places(**more))


@pytest.fixture(scope="module")
def sshd() -> Iterator[Callable[..., int]]:
    """Starts servers on free ports; they end with the module."""
    servers: list[subprocess.Popen[bytes]] = []
    Path("/run/sshd").mkdir(exist_ok=True)

    def start(folder: Path, *options: str) -> int:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        settings = ["UsePAM=no", "StrictModes=no", "PidFile=none", "PasswordAuthentication=no", "PermitRootLogin=yes"]
        settings += [f"AuthorizedKeysFile={folder}/authorized_keys", f"SetEnv=PATH={folder}/bin:/usr/bin:/bin"]
        flags = [word for option in [*settings, *options] for word in ("-o", option)]
        command = [str(SSHD), "-D", "-e", "-f", "/dev/null", "-p", str(port), "-o", "ListenAddress=127.0.0.1", "-h"]
        log = (folder / "sshd.log").open("wb")
        servers.append(
            subprocess.Popen([*command, str(folder / "host_key"), *flags], stderr=log, stdin=subprocess.DEVNULL)
        )
        log.close()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return port
            except ConnectionRefusedError:
                time.sleep(0.02)
        raise AssertionError((folder / "sshd.log").read_text())

    yield start
    for server in servers:
        server.terminate()
        server.wait(10)


@pytest.fixture
def server(tmp_path: Path, sshd: Callable[..., int]) -> Server:
    return make_server(tmp_path, sshd)


def make_server(folder: Path, sshd: Callable[..., int], *options: str) -> Server:
    keygen(folder / "host_key")
    home = folder / "home"
    home.mkdir()
    (folder / "bin").mkdir()
    keygen(home / "id_ed25519")
    shutil.copy(home / "id_ed25519.pub", folder / "authorized_keys")
    port = sshd(folder, *options)
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    made = Server(port, home, folder / "bin", key)
    made.known()
    return made


def refused(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(HostError) as caught:
        call()
    assert caught.value.message.startswith("gb-worker: ")
    return caught.value.code, caught.value.message


def at_once(count: int, call: Callable[[], object]) -> list[HostError]:
    """What so many threads were refused that all made the call."""
    failed: list[HostError] = []

    def ask() -> None:
        try:
            call()
        except HostError as error:
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


# --- commands


@needs_sshd
def test_commands_are_no_shell_and_bounded(server: Server) -> None:
    ssh = server.connect()
    assert ssh.run(["printf", "%s|", "a b", "$HOME", "'; \"*", "é\n"]).text == "a b|$HOME|'; \"*|é\n|"
    done = ssh.run(["sh", "-c", "echo out; echo err >&2; exit 9"])
    assert (done.code, done.stdout, done.stderr) == (9, b"out\n", b"err\n")
    assert ssh.run(["no-such-tool"]).code == 127
    assert len(ssh.run(["head", "-c", "10000000", "/dev/zero"]).stdout) == 10_000_000
    assert len(ssh.run(["sh", "-c", "head -c 5000000 /dev/zero >&2"]).stderr) == 5_000_000
    assert refused(lambda: ssh.run(["head", "-c", "30000000", "/dev/zero"]))[1].endswith("more than 10485760 bytes")
    begin = time.monotonic()
    assert refused(lambda: ssh.run(["sleep", "60"], timeout=0.3)) == (
        "HOST_UNREACHABLE",
        "gb-worker: sleep did not end in time",
    )
    assert time.monotonic() - begin < 3
    assert ssh.run(["true"]).stdout == b""
    ssh.close()
    assert refused(lambda: ssh.run(["true"]))[0] == "HOST_UNREACHABLE"


@needs_sshd
def test_forty_commands_at_once_on_one_connection(server: Server) -> None:
    ssh = server.connect()
    codes: list[int] = []
    assert at_once(40, lambda: codes.append(ssh.run(["true"], timeout=30).code)) == []
    assert codes == [0] * 40
    log = (server.home.parent / "sshd.log").read_text()
    assert log.count("Accepted publickey") == 1
    ssh.close()


@needs_sshd
def test_a_late_end_of_input_does_not_cost_the_connection(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """sshd ends a connection in which a channel is spoken of that both sides have closed: so none may be ended on its own."""
    send = paramiko.Transport._send_user_message

    def late(transport: Any, message: Any) -> None:
        if message.asbytes()[:1] == END_OF_INPUT:
            time.sleep(0.2)
        send(transport, message)

    monkeypatch.setattr(paramiko.Transport, "_send_user_message", late)
    ssh = server.connect()
    assert [ssh.run(["cat"]) for _ in range(3)] == [Output(0, b"", b"")] * 3
    assert (server.home.parent / "sshd.log").read_text().count("Accepted publickey") == 1
    ssh.close()


@needs_sshd
def test_noise_of_start_up_files_is_not_output(tmp_path: Path, sshd: Callable[..., int]) -> None:
    """ForceCommand stands for a login shell that prints before it runs what was asked."""
    noisy = tmp_path / "noisy"
    noisy.write_text(
        "#!/bin/sh\necho 'Welcome to GB10'\nprintf 'no newline'\necho 'pyenv: cannot rehash' >&2\n"
        'exec sh -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    noisy.chmod(0o755)
    ssh = make_server(tmp_path, sshd, f"ForceCommand={noisy}").connect()
    done = ssh.run(["sh", "-c", "echo out; echo err >&2"])
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")
    ssh.close()


@pytest.mark.parametrize("noise", [b"", b"a", b"aa", b"aaa", b"motd\n", b"aab", b"aabaa", b"ab\naab"])
def test_noise_is_read_up_to_the_mark_and_no_byte_further(noise: bytes) -> None:
    end, sent = b"aab\n", noise + b"aab\n" + b"output"
    got = bytearray()
    while more := _missing(got, end):
        got += sent[len(got) : len(got) + more]
    assert bytes(got) == sent[: sent.index(end) + len(end)]


@needs_sshd
def test_a_login_shell_that_runs_nothing(tmp_path: Path, sshd: Callable[..., int]) -> None:
    ssh = make_server(tmp_path, sshd, "ForceCommand=echo This account is closed").connect()
    code, message = refused(lambda: ssh.run(["true"]))
    assert code == "HOST_UNREACHABLE"
    assert "did not run the command, it said: This account is closed" in message
    ssh.close()


@needs_sshd
def test_a_broken_connection_is_made_again(server: Server) -> None:
    ssh = server.connect()
    assert ssh.run(["true"]).code == 0
    (transport,) = ssh._transports
    transport.close()
    assert ssh.run(["true"]).code == 0
    ssh.close()


def test_nobody_there_is_said_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = Places(configs=(), known_hosts=(), keys=tmp_path, agent=NoAgent)  # type: ignore[arg-type]
    ssh = SshConnection("gb-worker", f"ssh://root@127.0.0.1:{port}", places=places)
    code, message = refused(lambda: ssh.run(["true"]))
    assert code == "HOST_UNREACHABLE"
    assert f"root@127.0.0.1:{port}" in message
    assert "refused" in message


def nobody(port: int, folder: Path) -> SshConnection:
    places = Places(configs=(), known_hosts=(), keys=folder, agent=NoAgent)  # type: ignore[arg-type]
    return SshConnection("gb-worker", f"ssh://root@127.0.0.1:{port}", places=places)


@contextmanager
def answering(first: bytes, *, stay: bool) -> Iterator[tuple[int, list[socket.socket]]]:
    """A server on a free port that says `first` to whoever comes, and then stays silent or closes."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    held.append(door.accept()[0])
                    held[-1].sendall(first)
                    if not stay:
                        held[-1].close()

        threading.Thread(target=serve, daemon=True).start()
        yield door.getsockname()[1], held
        door.shutdown(socket.SHUT_RDWR)
    for link in held:
        link.close()


@pytest.mark.parametrize("first", [b"", b"SSH-2.0-OpenSSH_9.2\r\n"])
def test_a_server_that_says_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    monkeypatch.setattr("pytest_dspark.hosts.ssh.CONNECT_S", 0.3)
    with answering(first, stay=True) as (port, _):
        begin = time.monotonic()
        code, message = refused(lambda: nobody(port, tmp_path).run(["true"]))
        assert (code, message) == ("HOST_UNREACHABLE", f"gb-worker: root@127.0.0.1:{port} did not answer in time")
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            "no ssh banner came from there: another service, or sshd with too many clients",
        ),
        (b"Exceeded MaxStartups\r\n", "no ssh banner came from there: another service, or sshd with too many clients"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "ssh to root@127.0.0.1:"),
    ],
)
def test_a_server_that_closes(tmp_path: Path, first: bytes, said: str) -> None:
    with answering(first, stay=False) as (port, _):
        code, message = refused(lambda: nobody(port, tmp_path).run(["true"]))
    assert code == "HOST_UNREACHABLE"
    assert said in message
    assert not message.endswith(": ")


def test_a_refusal_is_one_sentence_and_no_traceback_beside_it(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from pytest_dspark.errors import HostError\n"
        "from pytest_dspark.hosts.ssh import Places, SshConnection\n"
        "places = Places(configs=(), known_hosts=(), keys=Path('/nowhere'))\n"
        "try: SshConnection('w', sys.argv[1], places=places).run(['true'])\n"
        "except HostError as error: print(error)\n"
    )
    with answering(b"220 mail\r\n", stay=False) as (port, _):
        done = subprocess.run(
            [sys.executable, "-c", script, f"ssh://root@127.0.0.1:{port}"], capture_output=True, text=True, timeout=60
        )
    assert done.stdout.startswith("HOST_UNREACHABLE: w: ")
    assert done.stderr == ""


def test_a_name_that_is_no_name(tmp_path: Path) -> None:
    places = Places(configs=(), known_hosts=(), keys=tmp_path, agent=NoAgent)  # type: ignore[arg-type]
    code, message = refused(lambda: SshConnection("gb-worker", "ssh://root@gb..lab", places=places).run(["true"]))
    assert code == "HOST_UNREACHABLE"
    assert "root@gb..lab:22" in message


def test_threads_that_wait_for_one_connection_share_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_dspark.hosts.ssh.CONNECT_S", 1.0)
    with answering(b"", stay=True) as (port, held):
        ssh = nobody(port, tmp_path)
        found: list[tuple[str, str]] = []
        threads = [threading.Thread(target=lambda: found.append(refused(lambda: ssh.run(["true"])))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert [message.endswith("did not answer in time") for _, message in found] == [True] * 4
        assert len(held) == 1
        assert refused(lambda: ssh.run(["true"]))[0] == "HOST_UNREACHABLE"
        assert len(held) == 2, "a later call tries again"


def test_close_waits_for_one_attempt_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_dspark.hosts.ssh.CONNECT_S", 1.0)
    with answering(b"", stay=True) as (port, held):
        ssh = nobody(port, tmp_path)
        threads = [threading.Thread(target=lambda: refused(lambda: ssh.run(["true"]))) for _ in range(4)]
        threads[0].start()
        until(lambda: bool(held))
        closer = threading.Thread(target=ssh.close)
        closer.start()
        until(lambda: ssh._closed)
        assert threads[0].is_alive(), "who comes now must find it closed, not wait for its turn and connect"
        for thread in threads[1:]:
            thread.start()
        for thread in [*threads, closer]:
            thread.join(10)
        assert len(held) == 1


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert done()


class Wire:
    """A way to a server that can be frozen: what is sent then arrives nowhere, and nothing is closed."""

    def __init__(self, port: int) -> None:
        self.frozen, self._port, self.ends = threading.Event(), port, list[socket.socket]()
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.door.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                ends = (self.door.accept()[0], socket.create_connection(("127.0.0.1", self._port)))
                self.ends += ends
                for source, target in (ends, ends[::-1]):
                    threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.frozen.is_set():
                    target.sendall(data)
            target.close()

    def close(self) -> None:
        self.door.shutdown(socket.SHUT_RDWR)
        for end in (self.door, *self.ends):
            end.close()


@needs_sshd
def test_a_network_that_is_cut_before_the_command_begins(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(server.port)
    server.known(name=f"[127.0.0.1]:{wire.port}")
    ssh = server.connect(f"ssh://root@127.0.0.1:{wire.port}")
    assert ssh.run(["true"]).code == 0
    opened = ssh._opened

    def cut(transport: paramiko.Transport) -> paramiko.Channel:
        channel = opened(transport)
        wire.frozen.set()
        return channel

    monkeypatch.setattr(ssh, "_opened", cut)
    monkeypatch.setattr("pytest_dspark.hosts.ssh.CONNECT_S", 1.0)
    found: list[tuple[str, str]] = []
    thread = threading.Thread(target=lambda: found.append(refused(lambda: ssh.run(["true"], timeout=1))), daemon=True)
    thread.start()
    thread.join(10)
    assert found == [("HOST_UNREACHABLE", f"gb-worker: root@127.0.0.1:{wire.port} did not answer in time")]
    ssh.close()
    wire.close()


@needs_sshd
def test_the_kernel_gives_a_silent_connection_up(server: Server) -> None:
    ssh = server.connect()
    ssh.run(["true"])
    assert ssh._transports[0].sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    ssh.close()


@needs_sshd
def test_slow_start_up_files_are_named(
    tmp_path: Path, sshd: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = 'ForceCommand=echo loading modules; sleep 4; exec sh -c "$SSH_ORIGINAL_COMMAND"'
    ssh = make_server(tmp_path, sshd, slow).connect()
    ssh._connected(0)
    monkeypatch.setattr("pytest_dspark.hosts.ssh.CONNECT_S", 1.0)
    code, message = refused(lambda: ssh.run(["true"]))
    assert code == "HOST_UNREACHABLE"
    assert message.endswith("the login shell did not run the command within 1 s, it said: loading modules")
    ssh.close()


# --- host keys


@needs_sshd
def test_an_unknown_key_is_refused_with_what_to_do(server: Server) -> None:
    (server.home / "known_hosts").unlink()
    code, message = refused(lambda: server.connect().run(["true"]))
    assert code == "HOST_KEY_UNKNOWN"
    assert f"127.0.0.1 port {server.port}" in message
    assert "ssh-ed25519 key SHA256:" in message
    assert f"for [127.0.0.1]:{server.port}" in message
    assert f"ssh-keyscan -t ed25519 -p {server.port} 127.0.0.1" in message
    assert not (server.home / "known_hosts").exists()
    shown = subprocess.run(
        ["ssh-keygen", "-lf", str(server.home.parent / "host_key.pub")], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split()[1] in message


@needs_sshd
def test_an_entry_without_the_port_is_no_entry(server: Server) -> None:
    server.known(name="127.0.0.1")
    assert refused(lambda: server.connect().run(["true"]))[0] == "HOST_KEY_UNKNOWN"


@needs_sshd
def test_a_changed_key_is_worded_differently(server: Server) -> None:
    other = keygen(server.home / "other")
    server.known(key=" ".join(other.with_name("other.pub").read_text().split()[:2]))
    code, message = refused(lambda: server.connect().run(["true"]))
    assert code == "HOST_KEY_CHANGED"
    assert f"of 127.0.0.1 port {server.port} changed" in message
    assert f"{server.home / 'known_hosts'}:1 holds SHA256:" in message


@needs_sshd
def test_only_another_type_of_key_is_known(server: Server) -> None:
    other = keygen(server.home / "other", "rsa")
    server.known(key=" ".join(other.with_name("other.pub").read_text().split()[:2]))
    code, message = refused(lambda: server.connect().run(["true"]))
    assert code == "HOST_KEY_UNKNOWN"
    assert "only ssh-rsa in" in message


@needs_sshd
def test_the_known_type_is_asked_for_first(tmp_path: Path, sshd: Callable[..., int]) -> None:
    rsa = keygen(tmp_path / "rsa_key", "rsa")
    server = make_server(tmp_path, sshd, f"HostKey={rsa}")
    server.known(key=" ".join(rsa.with_name("rsa_key.pub").read_text().split()[:2]))
    ssh = server.connect()
    assert ssh.run(["true"]).code == 0
    ssh.close()


BLOB = base64.b64encode(b"\0\0\0\x0bssh-ed25519key").decode()


def test_known_hosts_lines(tmp_path: Path) -> None:
    def hashed(name: str) -> str:
        digest = hmac.new(b"salt", name.encode(), hashlib.sha1).digest()
        return f"|1|{base64.b64encode(b'salt').decode()}|{base64.b64encode(digest).decode()}"

    lines = {
        f"host,other ssh-ed25519 {BLOB}": "host",
        f"{hashed('[host]:2222')} ssh-ed25519 {BLOB} comment": "[host]:2222",
        f"*.lab,!bad.lab ssh-ed25519 {BLOB}": "good.lab",
        f"[::1]:2222 ssh-ed25519 {BLOB}": "[::1]:2222",
        f"@revoked host ssh-ed25519 {BLOB}": "host",
    }
    for line, name in lines.items():
        path = tmp_path / "known"
        path.write_text(f"# comment\n\nbroken\n@cert-authority * ssh-ed25519 {BLOB}\nhost ssh-ed25519 !!\n{line}\n")
        found = known_keys(name, [tmp_path / "missing", path])
        assert [(entry.where, entry.revoked) for entry in found] == [(f"{path}:6", line.startswith("@revoked"))]
        for stranger in ("hos", "bad.lab", "[host]:22", "xlab"):
            assert known_keys(stranger, [path]) == ()


def test_a_name_is_hashed_in_small_letters(tmp_path: Path) -> None:
    path = tmp_path / "known"
    path.write_text(f"[worker1.lab]:2222 ssh-ed25519 {BLOB}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(path)], check=True, timeout=60, capture_output=True)
    assert len(known_keys(Target("Worker1.Lab", 2222, "root").known_name, [path])) == 1


@needs_sshd
def test_a_known_hosts_file_that_cannot_be_read_is_named(server: Server) -> None:
    (server.home / "known_hosts").unlink()
    (server.home / "known_hosts").mkdir()
    code, message = refused(lambda: server.connect().run(["true"]))
    assert code == "HOST_KEY_UNKNOWN"
    assert f"{server.home / 'known_hosts'} cannot be read: Is a directory" in message


def test_a_revoked_key_is_refused_though_it_is_known(tmp_path: Path) -> None:
    path = tmp_path / "known"
    path.write_text(f"host ssh-ed25519 {BLOB}\n@revoked * ssh-ed25519 {BLOB}\n")
    key = HostKey("ssh-ed25519", base64.b64decode(BLOB))
    code, message = refused(
        lambda: check_host_key("gb-worker", Target("host", 22, "root"), key, known_keys("host", [path]))
    )
    assert code == "HOST_KEY_CHANGED"
    assert "is revoked in" in message


# --- keys


@needs_sshd
def test_an_encrypted_key_is_said_at_once(server: Server) -> None:
    locked = keygen(server.home / "locked", passphrase="secret words")
    (server.home / "config").write_text(f"Host *\n  IdentityFile {locked}\n")
    code, message = refused(lambda: server.connect().run(["true"]))
    assert (code, message) == (
        "SSH_AUTH_FAILED",
        f"gb-worker: key {locked} is encrypted and the agent does not hold it",
    )
    assert "Failed publickey" not in (server.home.parent / "sshd.log").read_text()


@needs_sshd
def test_an_encrypted_key_that_the_agent_holds(server: Server) -> None:
    shutil.copy(server.home / "id_ed25519", server.home / "plain")
    shutil.move(server.home / "id_ed25519", server.home / "locked")
    shutil.move(server.home / "id_ed25519.pub", server.home / "locked.pub")
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(server.home / "locked")], check=True)
    (server.home / "config").write_text(f"IdentityFile {server.home / 'locked'}\n")
    held = type("Held", (NoAgent,), {"keys": (paramiko.PKey.from_path(server.home / "plain"),)})
    ssh = server.connect(agent=held)
    assert ssh.run(["true"]).code == 0
    ssh.close()


@needs_sshd
def test_the_configured_key_is_tried_first_and_the_tries_are_bounded(server: Server) -> None:
    crowd = [paramiko.PKey.from_path(keygen(server.home / f"crowd{n}")) for n in range(9)]
    agent = type("Crowd", (NoAgent,), {"keys": tuple(crowd)})
    shutil.move(server.home / "id_ed25519", server.home / "mine")
    code, message = refused(lambda: server.connect(agent=agent).run(["true"]))
    assert code == "SSH_AUTH_FAILED"
    assert message.count("agent key ssh-ed25519") == 5
    assert "more keys were not tried" in message
    (server.home / "config").write_text(f"Host 127.0.0.1\n  identityfile={server.home / 'mine'}\n")
    ssh = server.connect(agent=agent)
    assert ssh.run(["true"]).code == 0
    ssh.close()


@needs_sshd
def test_no_key_at_all(server: Server) -> None:
    (server.home / "id_ed25519").unlink()
    (server.home / "config").write_text("IdentityFile /nowhere/key\n")
    code, message = refused(lambda: server.connect().run(["true"]))
    assert code == "SSH_AUTH_FAILED"
    assert "tried no key: there is none; IdentityFile /nowhere/key is not there" in message


@needs_sshd
def test_identities_only_means_the_usual_files_where_no_other_is_configured(server: Server) -> None:
    (server.home / "config").write_text("IdentitiesOnly true\n")
    agent = type("Crowd", (NoAgent,), {"keys": (paramiko.PKey.from_path(keygen(server.home / "crowd")),)})
    ssh = server.connect(agent=agent)
    assert ssh.run(["true"]).code == 0
    ssh.close()
    shutil.move(server.home / "id_ed25519", server.home / "mine")
    assert "no key: there is none" in refused(lambda: server.connect(agent=agent).run(["true"]))[1]


@needs_sshd
@pytest.mark.parametrize("named", ["held.pub", "held"])
def test_a_public_key_names_the_one_of_the_agent(server: Server, named: str) -> None:
    shutil.move(server.home / "id_ed25519", server.home / "away")
    shutil.move(server.home / "id_ed25519.pub", server.home / "held.pub")
    crowd = [paramiko.PKey.from_path(keygen(server.home / f"crowd{n}")) for n in range(6)]
    (server.home / "config").write_text(f"IdentityFile {server.home / named}\nIdentitiesOnly yes\n")
    code, message = refused(lambda: server.connect().run(["true"]))
    assert code == "SSH_AUTH_FAILED"
    assert ("is a public key and the agent does not hold" in message) == (named == "held.pub")
    keys = (*crowd, paramiko.PKey.from_path(server.home / "away"))
    ssh = server.connect(agent=type("Held", (NoAgent,), {"keys": keys}))
    assert ssh.run(["true"]).code == 0
    ssh.close()


@needs_sshd
def test_a_certificate_that_ran_out_hides_no_good_key(server: Server) -> None:
    keygen(server.home / "authority")
    sign = ["ssh-keygen", "-q", "-s", str(server.home / "authority"), "-I", "x", "-n", "root", "-V", "-2d:-1d"]
    subprocess.run([*sign, str(server.home / "id_ed25519.pub")], check=True, timeout=60)
    ssh = server.connect()
    assert ssh.run(["true"]).code == 0
    ssh.close()


@pytest.fixture
def agent_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real ssh-agent that SSH_AUTH_SOCK names; it lives as long as the test."""
    path = tmp_path / "agent.sock"
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL) as agent:
        until(path.exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        yield path
        agent.terminate()


@needs_sshd
def test_a_certificate_in_the_agent_hides_no_key_of_the_agent(server: Server, agent_socket: Path) -> None:
    """paramiko's agent gives an RSA key and its certificate the same bytes."""
    rsa, authority = keygen(server.home / "rsa", "rsa"), keygen(server.home / "authority")
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "x", "-n", "root", str(server.home / "rsa.pub")]
    subprocess.run(sign, check=True, timeout=60)
    subprocess.run(["ssh-add", "-q", str(rsa)], check=True, timeout=60)
    shutil.copy(server.home / "rsa.pub", server.home.parent / "authorized_keys")
    ssh = server.connect(agent=BoundedAgent)
    assert ssh.run(["true"]).code == 0
    ssh.close()


@needs_sshd
@pytest.mark.parametrize("answer", [None, b"", b"\0\0\0\1\5"])
def test_an_agent_that_hangs_or_fails_holds_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    monkeypatch.setattr("pytest_dspark.hosts.ssh_keys.AGENT_S", 0.3)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "sock"))
    held: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                held.append(door.accept()[0])
                if answer is not None:
                    held[-1].recv(5)
                    held[-1].sendall(answer)
                    held[-1].close()

    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "sock"))
        door.listen()
        threading.Thread(target=serve, daemon=True).start()
        ssh = server.connect(agent=BoundedAgent)
        assert ssh.run(["true"]).code == 0
        ssh.close()
        (server.home / "id_ed25519").unlink()
        code, message = refused(lambda: server.connect(agent=BoundedAgent).run(["true"]))
        door.shutdown(socket.SHUT_RDWR)
    assert code == "SSH_AUTH_FAILED"
    assert "tried no key: there is none; " in message and "agent" in message
    for link in held:
        link.close()


@needs_sshd
def test_a_key_of_a_kind_that_cannot_be_loaded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: Path) -> paramiko.PKey:
        raise UnsupportedAlgorithm("sk-ssh-ed25519 private keys cannot be loaded")

    (server.home / "config").write_text(f"IdentityFile {server.home / 'id_ed25519'}\n")
    monkeypatch.setattr(paramiko.PKey, "from_path", load)
    code, message = refused(lambda: server.connect().run(["true"]))
    assert code == "SSH_AUTH_FAILED"
    assert message.endswith("cannot be used: sk-ssh-ed25519 private keys cannot be loaded")


@needs_sshd
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["PubkeyAuthentication=no", "KbdInteractiveAuthentication=yes"], "the host allows keyboard-interactive only"),
        (
            ["AuthenticationMethods=publickey,keyboard-interactive", "KbdInteractiveAuthentication=yes"],
            "the host asks for keyboard-interactive beside a key",
        ),
        (["MaxAuthTries=1", "AuthorizedKeysFile=none"], "the connection ended, more keys were not tried"),
    ],
)
def test_why_no_key_was_enough(tmp_path: Path, sshd: Callable[..., int], options: list[str], said: str) -> None:
    server = make_server(tmp_path, sshd, *options)
    if "MaxAuthTries=1" in options:
        (tmp_path / "authorized_keys").write_text("")
    code, message = refused(lambda: server.connect().run(["true"]))
    assert code == "SSH_AUTH_FAILED"
    assert said in message


# --- where an address leads


@needs_sshd
def test_the_configuration_gives_name_port_and_user(server: Server) -> None:
    (server.home / "config").write_text(f"HOST Worker*\n  hostname 127.0.0.1\n  PORT={server.port}\n  uSeR root\n")
    ssh = server.connect("ssh://worker1")
    assert str(ssh.target) == f"root@127.0.0.1:{server.port}"
    assert ssh.run(["id", "-un"]).text == "root\n"
    ssh.close()
    assert server.connect("ssh://alice@worker1:9").target == Target("127.0.0.1", 9, "alice")


def settled(tmp_path: Path, text: str, url: str = "ssh://worker1") -> Target:
    path = tmp_path / "config"
    path.write_text(text)
    return resolve("gb-worker", parse_address("gb-worker", url), [path])


def test_first_value_wins_and_keys_add_up(tmp_path: Path) -> None:
    target = settled(
        tmp_path,
        "Port 1111 # here\nIdentityFile ~/a\nHost other\n Port 3333\n ProxyJump x\nHost !worker1 *\n Port 9\n"
        "Host worker?\n Port 2222\n IdentityFile /keys/%h-%%\n IdentitiesOnly yes\n UserKnownHostsFile /k1 /k2\n",
    )
    assert (target.port, target.identities_only) == (1111, True)
    assert target.identities == (Path.home() / "a", Path("/keys/worker1-%"))
    assert target.known_hosts
    assert target.known_hosts[:2] == (Path("/k1"), Path("/k2"))


def test_an_included_host_leads_where_ssh_leads(tmp_path: Path) -> None:
    (tmp_path / "more.conf").write_text("Host worker1\n  HostName 192.0.2.7\n  Port 2200\n")
    assert settled(tmp_path, f"Include {tmp_path}/*.conf\nPort 9\n").port == 2200
    assert settled(tmp_path, f"Host other\n  Include {tmp_path}/*.conf\nHost *\n  Port 9\n").port == 9
    (tmp_path / "more.conf").write_text("Host worker1\n  ProxyJump bastion\n")
    with pytest.raises(HostError, match=r"more.conf:2: proxyjump bastion is not supported"):
        settled(tmp_path, f"Include {tmp_path}/*.conf\n")
    (tmp_path / "more.conf").write_text(f"Include {tmp_path}/*.conf\n")
    with pytest.raises(HostError, match=r"Include deeper than 16 files"):
        settled(tmp_path, f"Include {tmp_path}/*.conf\n")


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("Host worker1\n  ProxyJump bastion\n", 2, "proxyjump bastion"),
        ("ProxyCommand=nc %h %p\n", 1, "proxycommand nc %h %p"),
        ("Host w*\nHostKeyAlias x\n", 2, "hostkeyalias x"),
        ("Match host worker1\n  Port 2222\n", 1, "a Match block that sets port"),
        ("Match final\n  HostName x\n", 1, "a Match block that sets hostname"),
        ("CanonicalizeHostname yes\n", 1, "canonicalizehostname yes"),
        ("BindAddress 10.0.0.1\n", 1, "bindaddress 10.0.0.1"),
        ("Include ${HOME}/more\n", 1, "a token in Include ${HOME}/more"),
        ("Include %d/more\n", 1, "a token in Include %d/more"),
        ("\ufeffHost other\n  Port 9\n", 1, "expected KEYWORD VALUE, found"),
        ('Port 9\n"HostName" elsewhere\n', 2, "expected KEYWORD VALUE"),
    ],
)
def test_what_changes_the_target_is_refused_with_its_line(tmp_path: Path, text: str, line: int, what: str) -> None:
    code, message = refused(lambda: settled(tmp_path, text))
    assert code == "SSH_CONFIG_UNSUPPORTED"
    assert f"{tmp_path / 'config'}:{line}: {what}" in message


@pytest.mark.parametrize(
    "text",
    [
        "Host other\n  ProxyJump bastion\n",
        "ProxyJump none\nCanonicalizeHostname no\n",
        "Match host x\n  ForwardAgent yes\n",
        "ServerAliveInterval 5\nSendEnv LANG LC_*\nHashKnownHosts yes\n",
        "# ProxyJump x\n",
        "# a note\u2028ProxyJump x\n\t\n",
    ],
)
def test_what_does_not_touch_the_target_is_left_alone(tmp_path: Path, text: str) -> None:
    assert settled(tmp_path, text).host == "worker1"


def test_tokens_that_are_not_understood(tmp_path: Path) -> None:
    assert settled(tmp_path, "HostName %h.lab\n").host == "worker1.lab"
    for text in ("HostName %C\n", "IdentityFile ${HOME}/key\n", "IdentityFile ~nobody-here/key\n", "Port ssh\n"):
        assert refused(lambda text=text: settled(tmp_path, text))[0] == "SSH_CONFIG_UNSUPPORTED"


def test_addresses() -> None:
    v6 = resolve("gb-worker", parse_address("gb-worker", "ssh://root@[fd00::2]:2222"), [])
    assert (v6.host, v6.port, v6.known_name, str(v6)) == ("fd00::2", 2222, "[fd00::2]:2222", "root@[fd00::2]:2222")
    assert parse_address("w", "ssh://root@[fe80::1%25eth0]").host == "fe80::1%eth0"
    for url in (
        "ssh://",
        "ssh://u:p@h",
        "ssh://h:port",
        "ssh://h/var/run/docker.sock",
        "ssh://-oProxyCommand=x",
        "ssh://h:99999",
    ):
        assert refused(lambda url=url: parse_address("gb-worker", url))[0] == "CLUSTER_INVALID"


@needs_sshd
def test_ipv6_on_the_wire(tmp_path: Path, sshd: Callable[..., int]) -> None:
    server = make_server(tmp_path, sshd, "ListenAddress=::1")
    server.known(name=f"[::1]:{server.port}")
    ssh = server.connect(f"ssh://root@[::1]:{server.port}")
    assert ssh.run(["true"]).code == 0
    ssh.close()


# --- docker through ssh


def docker_host(server: Server) -> DockerHost:
    connection = RemoteConnection(server.connect())
    return DockerHost("gb-worker", connection)


def tool(server: Server, name: str, text: str) -> None:
    (server.bin / name).write_text(text)
    (server.bin / name).chmod(0o755)


@needs_sshd
def test_docker_that_is_not_on_the_path(tmp_path: Path, sshd: Callable[..., int]) -> None:
    server = make_server(tmp_path, sshd)
    tool(server, "docker", "#!/bin/sh\necho 'sh: 1: exec: docker: not found' >&2; exit 127\n")
    host = docker_host(server)
    code, message = refused(host.facts)
    assert code == "DOCKER_MISSING"
    assert "docker is not on PATH of a non-interactive shell" in message
    host.close()


@needs_sshd
def test_docker_that_may_not_reach_its_socket(server: Server) -> None:
    tool(server, "docker", "#!/bin/sh\necho 'permission denied while trying to connect' >&2; exit 1\n")
    host = docker_host(server)
    code, message = refused(host.facts)
    assert code == "HOST_UNREACHABLE"
    assert "dial-stdio ended with code 1: permission denied while trying to connect" in message
    host.close()


DIAL = """#!{python}
import http.server, json, sys, socketserver, io, time
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = {{"ApiVersion": "1.44", "MinAPIVersion": "1.24", "Name": "remote", "Id": "x"}}
        if "slow" in self.path: time.sleep(0.2)
        data = json.dumps(body).encode()
        self.send_response(200); self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data))); self.end_headers(); self.wfile.write(data)
    def setup(self):
        self.rfile, self.wfile = sys.stdin.buffer, sys.stdout.buffer
    def finish(self): self.wfile.flush()
    def log_message(self, *a): pass
    def handle(self):
        self.close_connection = False
        while not self.close_connection:
            self.handle_one_request(); self.wfile.flush()
H(None, None, None)
"""


@needs_sshd
def test_a_message_that_could_not_be_sent_is_a_lost_host(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """paramiko raises a bare EOFError then, from sending, from reading and from closing."""

    def lost(message: object) -> None:
        raise EOFError

    tool(server, "docker", DIAL.format(python=sys.executable))
    host = docker_host(server)
    host.facts()
    (transport,) = host._connection._ssh._transports  # type: ignore[attr-defined]
    monkeypatch.setattr(transport, "_send_user_message", lost)
    code, message = refused(host.facts)
    assert (code, message.endswith("the ssh connection was lost")) == ("HOST_UNREACHABLE", True)
    host.close()


@needs_sshd
def test_a_connection_that_ends_while_a_command_begins_is_not_the_shells_fault(server: Server) -> None:
    tool(server, "sh", "#!/bin/bash\nkill -9 $PPID\n")
    ssh = server.connect()
    code, message = refused(lambda: ssh.run(["true"]))
    assert (code, message.endswith("the connection was lost")) == ("HOST_UNREACHABLE", True)
    ssh.close()


@needs_sshd
def test_twelve_at_once_stay_below_the_sessions_of_sshd(server: Server) -> None:
    tool(server, "docker", DIAL.format(python=sys.executable))
    host = docker_host(server)
    assert host.facts().hostname == "remote"
    assert host.facts().address == f"ssh://root@127.0.0.1:{server.port}"
    assert at_once(12, lambda: [(host.facts(), host.read(["true"])) for _ in range(3)]) == []
    log = (server.home.parent / "sshd.log").read_text()
    assert log.count("Accepted publickey") == 1
    assert "no more sessions" not in log
    host.close()


@needs_sshd
def test_where_sshd_grants_one_session_a_connection_more_connections_are_opened(
    tmp_path: Path, sshd: Callable[..., int]
) -> None:
    server = make_server(tmp_path, sshd, "MaxSessions=1")
    ssh = server.connect()
    held = [ssh.open(["sleep", "60"])[0] for _ in range(3)]
    assert ssh.run(["echo", "hello"]).stdout == b"hello\n"
    assert (tmp_path / "sshd.log").read_text().count("Accepted publickey") == 4
    for channel in held:
        channel.close()
    ssh.close()


@needs_sshd
def test_sessions_refused_at_the_same_moment_are_each_opened_on_a_further_connection(
    tmp_path: Path, sshd: Callable[..., int]
) -> None:
    server = make_server(tmp_path, sshd, "MaxSessions=1")
    ssh = server.connect()
    held = ssh.open(["sleep", "60"])[0]
    assert at_once(4, lambda: [ssh.run(["true"]) for _ in range(12)]) == []
    held.close()
    ssh.close()


@needs_sshd
def test_a_server_that_grants_no_session_is_named_with_its_setting(tmp_path: Path, sshd: Callable[..., int]) -> None:
    server = make_server(tmp_path, sshd, "MaxSessions=0")
    ssh = server.connect()
    code, message = refused(lambda: ssh.run(["true"]))
    assert code == "HOST_UNREACHABLE"
    assert "see its MaxSessions" in message
    ssh.close()


@needs_sshd
def test_readings_through_ssh(server: Server) -> None:
    tool(server, "nvidia-smi", "#!/bin/sh\necho '[N/A]'; echo 47\n")
    host = docker_host(server)
    found = host.readings()
    assert found.free_memory_gib is not None and found.free_memory_gib > 0
    assert found.temperature_c is not None and found.temperature_c >= 47
    host.close()
    lost = host.readings()
    assert (lost.free_memory_gib, lost.temperature_c) == (None, None) and "HOST_UNREACHABLE" in lost.unreadable[0]


@needs_sshd
def test_a_hung_nvidia_smi_ends_on_its_own_host_and_hides_no_memory(server: Server) -> None:
    tool(server, "nvidia-smi", "#!/bin/sh\necho $$ > " + str(server.bin / "pid") + "\nexec sleep 60\n")
    host = docker_host(server)
    found = host.readings()
    assert found.free_memory_gib is not None
    if found.temperature_c is None:
        assert "nvidia-smi did not end within 4 s" in found.unreadable[0]
    pid = int((server.bin / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists(), "it goes on there after it was given up here"
    host.close()
