"""The fault matrix: its rows (faults.toml), the two kinds of places where sessions run, and how each fault is made.

Runs on the machine itself as root: it reaches into the lab's hosts by `lab on`, as an operator's mishap would.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).parent
ROOT = HERE.parent
LAB = HERE / "lab"
BUNDLE = ROOT / "pytest_dspark" / "rehearsal"
STATE = Path(os.environ.get("DSPARK_LAB_STATE", "/var/lib/dspark-lab"))
NAME = "dspark_vllm"
HOSTS = ("gb-head", "gb-worker")
CHECKS = "test_launch or test_gate or test_stream or (test_correctness and test_arithmetic) or test_teardown"
LOADING = {"rehearsal": "0.02", "emulated": "0.02"}
STREAM_TOKENS = {"rehearsal": 24000, "emulated": 24000, "real": 160}
SHORT_STREAM = 96
STREAM_AFTER_S = {"rehearsal": 1.5, "emulated": 1.5, "real": 4.0}
PHASES = ("before", "loading", "idle", "stream", "stop", "any")
PLACES = ("rehearsal", "emulated", "real")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of faults.toml; see its head for the meaning of each field."""

    name: str
    fault: str
    phase: str
    where: tuple[str, ...]
    code: str
    check: str = ""
    notice_s: float = 10.0
    end_s: float = 60.0
    exit: int | None = None
    clean: str = "self"
    do: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    rank0: str = ""
    rank1: str = ""
    memory: str = ""
    launch: Mapping[str, float] = field(default_factory=dict)
    worker: str = "10.77.0.2"
    port: int = 22
    full_disk: bool = False
    gpu: str = ""

    @property
    def exit_code(self) -> int:
        if self.exit is not None:
            return self.exit
        return 1 if self.code else 0

    def limit(self, seconds: float, where: str) -> float:
        return 3 * seconds if where == "real" else seconds


def rows(path: Path = HERE / "faults.toml") -> list[Row]:
    """Every row. Raises TypeError or ValueError for one that says what is not known."""
    found = [Row(**one | {k: tuple(one[k]) for k in ("where", "do", "args") if k in one}) for one in _tables(path)]
    for row in found:
        if row.phase not in PHASES or not set(row.where) <= set(PLACES) or row.clean not in ("self", "next", "stop"):
            raise ValueError(f"{path}: row {row.name}: phase, where or clean is not known")
    if len({row.name for row in found}) != len(found):
        raise ValueError(f"{path}: names must differ")
    return found


def _tables(path: Path) -> list[dict[str, Any]]:
    return list(tomllib.loads(path.read_text(encoding="utf-8"))["row"])


def lab(*words: str, check: bool = True, timeout: float = 120.0) -> str:
    done = subprocess.run([str(LAB), *words], capture_output=True, text=True, timeout=timeout, check=False)
    if check and done.returncode:
        raise RuntimeError(f"lab {shlex.join(words)} ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout.strip()


def on(host: str, *words: str, check: bool = True, timeout: float = 120.0) -> str:
    return lab("on", host, *words, check=check, timeout=timeout)


def host_of(rank: str) -> str:
    return HOSTS[int(rank)]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# --- where a session runs


@dataclass
class Place:
    """One row's cluster, recipe and evidence. `where` is rehearsal, emulated or real."""

    where: str
    row: Row
    folder: Path
    port: int = field(default_factory=free_port)
    master_port: int = field(default_factory=free_port)
    undo: list[Callable[[], object]] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        return self.folder / ("disk/out" if self.row.full_disk else "out")

    @property
    def cluster(self) -> Path:
        return self.folder / "cluster.toml"

    @property
    def mark(self) -> str:
        """The cluster's name, by which its processes are known."""
        return f"matrix-{self.port}"

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        recipe = {"rehearsal": "rehearsal", "emulated": "lab-emulated", "real": "lab-smollm2"}[self.where]
        shutil.copytree(ROOT / "recipe", self.folder / "recipe", dirs_exist_ok=True)
        (self.folder / "recipe" / "matrix.toml").write_text(self._recipe(recipe), encoding="utf-8")
        overlay = ROOT / "recipe" / f"{recipe}.overlay.toml"
        if overlay.exists():
            shutil.copy(overlay, self.folder / "recipe" / "matrix.overlay.toml")
        self.cluster.write_text(self._cluster(), encoding="utf-8")
        if self.row.gpu:
            self._gpu(self.folder / "bin" / "nvidia-smi")

    def _gpu(self, path: Path) -> None:
        """A driver's tool that answers what one asks of power and utilisation, and nothing else."""
        path.parent.mkdir()
        path.write_text(f'#!/bin/sh\ncase "$*" in *power.draw*) echo "{self.row.gpu}";; *) exit 9;; esac\n')
        path.chmod(0o755)
        self.environ["PATH"] = f"{path.parent}:{os.environ['PATH']}"

    def _recipe(self, base: str) -> str:
        lines = [f'extends = "{base}"', 'name = "matrix"', "[checks.correctness]"]
        tokens = STREAM_TOKENS[self.where] if self.row.phase in ("idle", "stream") else SHORT_STREAM
        lines += [f"stream_tokens = {tokens}", "deadline_s = 300.0"]
        if self.row.memory:
            lines += ["[serve.options]", f'memory = "{self.row.memory}"', f'memory-swap = "{self.row.memory}"']
        if self.row.launch:
            lines += ["[launch]", *(f"{key} = {value}" for key, value in self.row.launch.items())]
        return "\n".join(lines) + "\n"

    def _cluster(self) -> str:
        return self._processes() if self.where == "rehearsal" else self._containers()

    def _env(self, rank: int) -> str:
        fault = (self.row.rank0, self.row.rank1)[rank]
        if self.where == "real":
            return ""
        pace = LOADING[self.where] if self.row.phase == "loading" and self.row.do else "0.001"
        fault = f', REHEARSAL_FAULT = "{fault}"' if fault else ""
        return f'env = {{ REHEARSAL_TIME = "{pace}"{fault} }}'

    def _processes(self) -> str:
        lines = [f'name = "{self.mark}"', 'recipe = "matrix"', f"port = {self.port}"]
        lines += [f"master_port = {self.master_port}"]
        for rank in (0, 1):
            lines += ["[[host]]", f'name = "host-{rank + 1}"', "process = true", f'address = "127.0.0.{rank + 1}"']
            lines += [f'bundle = "{BUNDLE}"', f'model = "{BUNDLE / "model"}"', self._env(rank)]
        return "\n".join(lines) + "\n"

    def _containers(self) -> str:
        model = STATE / ("model" if self.where == "real" else "emulated-model")
        lines = ['name = "lab"', 'recipe = "matrix"']
        reach = ("unix:///var/run/docker.sock", f"ssh://root@{self.row.worker}:{self.row.port}")
        for rank, (host, address, interface) in enumerate(
            zip(HOSTS, ("10.77.0.1", "10.77.0.2"), ("gbh", "gbw"), strict=True)
        ):
            lines += ["[[host]]", f'name = "{host}"', f'docker = "{reach[rank]}"', f'address = "{address}"']
            lines += [
                f'interface = "{interface}"',
                f'model = "{model}"',
                f'cache = "{STATE}/cache/{host}"',
                self._env(rank),
            ]
        return "\n".join(lines) + "\n"

    # --- sessions

    def command(self, *args: str, out: Path | None = None) -> list[str]:
        words = [sys.executable, "-m", "pytest", "suites", "-m", "production", "-k", CHECKS, "-p", "no:cacheprovider"]
        words += ["--dspark-cluster", str(self.cluster), "--dspark-recipe", str(self.folder / "recipe" / "matrix.toml")]
        words += ["--dspark-out", str(out or self.out), *args]
        return words if self.where == "rehearsal" else [str(LAB), "on", "gb-head", *words]

    def start(self, *args: str, out: Path | None = None) -> Session:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
        environ |= {"DSPARK_PAUSE": str(self.folder), "PYTHONPATH": str(HERE), **self.environ}
        log = self.folder / f"log-{time.monotonic_ns()}.txt"
        with log.open("wb") as file:
            child = subprocess.Popen(
                self.command("-p", "pauses", *args, out=out),
                cwd=ROOT,
                env=environ,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return Session(self, child, log, out or self.out)

    def stop_run(self, run: str) -> None:
        words = [sys.executable, "-m", "pytest_dspark.cli", "stop", "--cluster", str(self.cluster), "--run", run]
        words += ["--out", str(self.out)]
        words = words if self.where == "rehearsal" else [str(LAB), "on", "gb-head", *words]
        subprocess.run(words, cwd=ROOT, capture_output=True, timeout=180, check=False)

    def left(self) -> list[str]:
        """What is still on the hosts: processes of this cluster, or containers of either host."""
        if self.where == "rehearsal":
            return [f"process {pid}" for pid in self.processes()]
        found = {host: on(host, "docker", "ps", "-a", "--format", "{{.Names}} {{.Status}}") for host in HOSTS}
        return [f"{host}: {line}" for host, text in found.items() for line in text.splitlines()]

    def processes(self, host: str = "") -> list[int]:
        wanted = [f"DSPARK_CLUSTER={self.mark}\0".encode(), *([f"DSPARK_HOST={host}\0".encode()] if host else [])]
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if all(word in path.read_bytes() for word in wanted):
                    found.append(int(path.parent.name))
        return found

    def restore(self) -> None:
        """Undo what was done to the place, both hosts up again."""
        for action in reversed(self.undo):
            action()
        self.undo.clear()
        if self.where != "rehearsal":
            heal()

    def abandon(self) -> None:
        """After a row that failed: the next one must find empty hosts."""
        self.restore()
        if self.where != "rehearsal":
            sweep()
        for pid in self.processes() if self.where == "rehearsal" else ():
            os.kill(pid, signal.SIGKILL)


def heal() -> None:
    """Both hosts up, cable in, engines and sshd running."""
    lab("link", "up", check=False)
    for host in HOSTS:
        if "dead" in on(host, "sh", "-c", "timeout 5 docker version >/dev/null 2>&1 || echo dead", check=False):
            lab("engine", host, "start", check=False)
    lab("sshd", "start", check=False)
    lab("up")


def sweep() -> None:
    """What a row that failed left under our name; a row begins only on empty hosts, so it is of that row."""
    for host in HOSTS:
        on(host, "docker", "rm", "-f", NAME, check=False)


@dataclass
class Session:
    """One pytest of an operator. For a lab place the child is `nsenter`, and pytest is its child."""

    place: Place
    child: subprocess.Popen[bytes]
    log: Path
    out: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        if self.place.where == "rehearsal":
            return self.child.pid
        below = Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children").read_text().split()
        return int(below[0])

    @property
    def run(self) -> str:
        return self.text.partition("dspark: run ")[2].partition(",")[0]

    @property
    def folder(self) -> Path:
        return self.out / "runs" / self.run

    def rows(self) -> list[dict[str, Any]]:
        """Every row, parsed: a line that does not parse is a failure of the row that is tried."""
        text = self.read("rows.jsonl")
        return [json.loads(line) for line in text.splitlines()]

    def read(self, name: str) -> str:
        if self.place.row.full_disk:
            return on("gb-head", "sh", "-c", 'cat "$1" 2>/dev/null || true', "sh", str(self.folder / name))
        path = self.folder / name
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def wait_until(self, seen: Callable[[], bool], seconds: float, what: str) -> float:
        """Seconds that it took. Raises AssertionError that says what did not come."""
        begin = time.monotonic()
        while not seen():
            over = self.child.poll() is not None
            if (over and not seen()) or time.monotonic() - begin > seconds:
                state = f"the session ended with {self.child.returncode}" if over else f"not within {seconds:g} s"
                raise AssertionError(f"{what}: {state}:\n{self.text[-2500:]}")
            time.sleep(0.05)
        return time.monotonic() - begin

    def wait_for(self, words: str, seconds: float) -> float:
        return self.wait_until(lambda: words in self.text, seconds, f"no {words!r}")

    def end(self, seconds: float) -> int:
        try:
            return self.child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            with suppress(OSError, IndexError):
                os.kill(self.pid, signal.SIGKILL)
            self.child.kill()
            raise AssertionError(f"still running after {seconds:g} s:\n{self.text[-2500:]}") from None


# --- how a fault is made


def make(step: str, session: Session | None, place: Place) -> None:
    """One step of `do`; what has to be put back goes to `place.undo`."""
    verb, _, rest = step.partition(" ")
    if rest.startswith("rank "):
        return _rank(verb, rest.removeprefix("rank "), place)
    if verb in ("cut", "link", "engine", "sshd"):
        lab(*step.split())
        return None
    if verb in ("signal", "signal-worker"):
        assert session is not None
        pid = session.pid if verb == "signal" else _worker_pid(session)
        os.kill(pid, getattr(signal, f"SIG{rest}"))
        return None
    return _MAKERS[verb](rest, place)


def _worker_pid(session: Session) -> int:
    """The xdist worker that is in the stream check: by the number that it wrote, which is of its own table of processes."""
    inner = int((session.place.folder / "worker").read_text())
    for path in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            numbers = next(line for line in path.read_text().splitlines() if line.startswith("NSpid:")).split()[1:]
            if (
                int(numbers[-1]) == inner
                and f"DSPARK_PAUSE={session.place.folder}\0".encode() in (path.parent / "environ").read_bytes()
            ):
                return int(path.parent.name)
    raise AssertionError(f"no process {inner}")


_DOCKER = {
    "kill": ("kill",),
    "stop": ("stop",),
    "restart": ("restart",),
    "remove": ("rm", "-f"),
    "pause": ("pause",),
    "unpause": ("unpause",),
}


def _rank(verb: str, rank: str, place: Place) -> None:
    if place.where != "rehearsal":
        on(host_of(rank), "docker", *_DOCKER[verb], NAME)
        if verb == "pause":
            place.undo.append(lambda: on(host_of(rank), "docker", "unpause", NAME, check=False))
        return
    number = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[verb]
    for pid in place.processes(f"host-{int(rank) + 1}"):
        os.kill(pid, number)


def _replace(path: Path, text: str | None, place: Place) -> None:
    """Write a file of a host, and put back what was there. The file is bound into the host: it must stay the same one."""
    before = path.read_text() if path.exists() else None
    place.undo.append(lambda: path.write_text(before) if before is not None else path.unlink(missing_ok=True))
    path.write_text(text or "")


def _known_hosts(how: str, place: Place) -> None:
    path = STATE / "gb-head" / "dotssh" / "known_hosts"
    lines = path.read_text().splitlines()
    other = _fresh_key(place).with_suffix(".pub").read_text().split()[1]
    texts = {"empty": "", "plain": f"{lines[0]}\n", "other": f"10.77.0.2,gb-worker ssh-ed25519 {other}\n"}
    _replace(path, texts[how], place)


def _fresh_key(place: Place, passphrase: str = "") -> Path:
    path = place.folder / "fresh"
    if not path.exists():
        _keygen(path, passphrase)
    return path


def _keygen(path: Path, passphrase: str = "") -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path)], check=True)


def _key(how: str, place: Place) -> None:
    key = _fresh_key(place, "secret" if how == "encrypted" else "")
    for end in ("", ".pub"):
        _replace(STATE / "gb-head" / "dotssh" / f"id_ed25519{end}", Path(f"{key}{end}").read_text(), place)


def _bashrc(how: str, place: Place) -> None:
    texts = {
        "noisy": "echo welcome to this host; echo a warning >&2; sleep 0.3\n",
        "slow": "sleep 1\n",
        "flood": "head -c 10000000 /dev/zero\n",
        "exit": "exit 3\n",
    }
    _replace(STATE / "gb-worker" / "bashrc", _without_docker(place) if how == "path" else texts[how], place)


def _without_docker(place: Place) -> str:
    """A PATH with every usual command and no docker: a folder of links."""
    folder = STATE / "gb-worker" / "bin-without-docker"
    if not folder.exists():
        folder.mkdir()
        for path in [*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()]:
            if not path.name.startswith("docker") and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    place.undo.append(lambda: shutil.rmtree(folder, ignore_errors=True))
    return f"export PATH={folder}\n"


def _ssh_config(text: str, place: Place) -> None:
    _replace(STATE / "gb-head" / "dotssh" / "config", f"Host *\n  {text}\n", place)


def _sshd_config(text: str, place: Place) -> None:
    """A line more in the worker's sshd configuration, and sshd again."""

    def restart() -> None:
        lab("sshd", "kill")
        lab("sshd", "start")

    path = STATE / "gb-worker" / "etcssh" / "sshd_config"
    place.undo.append(restart)
    _replace(path, f"{path.read_text()}{text}\n", place)
    restart()


def _ipv6(address: str, place: Place) -> None:
    """The worker's sshd at an IPv6 address too, and known by it."""
    for host, interface, end in (("gb-head", "gbh", 1), ("gb-worker", "gbw", 2)):
        words = (f"{address}{end}/64", "dev", interface)
        on(host, "ip", "-6", "addr", "add", *words, "nodad")
        place.undo.append(partial(on, host, "ip", "-6", "addr", "del", *words))
    known = STATE / "gb-head" / "dotssh" / "known_hosts"
    key = known.read_text().splitlines()[0].partition(" ")[2]
    _replace(known, f"{known.read_text()}{address}2 {key}\n", place)
    _sshd_config(f"ListenAddress {address}2", place)


def _agent(keys: str, place: Place) -> None:
    """An ssh-agent with that many keys of nobody."""
    said = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True).stdout
    found = dict(word.split("=") for word in said.replace("\n", ";").split(";") if word.startswith("SSH_"))
    place.environ["SSH_AUTH_SOCK"] = found["SSH_AUTH_SOCK"]
    place.undo.append(lambda: os.kill(int(found["SSH_AGENT_PID"]), signal.SIGTERM))
    for number in range(int(keys)):
        path = place.folder / f"agent-{number}"
        _keygen(path)
        subprocess.run(["ssh-add", "-q", str(path)], check=True, env=os.environ | place.environ)


def _foreign(_: str, place: Place) -> None:
    on("gb-worker", "docker", "create", "--name", NAME, "dspark-lab-emulated:1", "sleep", "1")
    place.undo.append(lambda: on("gb-worker", "docker", "rm", "-f", NAME))


def _listen(port: str, place: Place) -> None:
    script = f"import socket, time; s = socket.create_server(('0.0.0.0', {int(port)})); time.sleep(600)"
    child = subprocess.Popen([str(LAB), "on", "gb-head", sys.executable, "-c", script])
    place.undo.append(child.wait)
    place.undo.append(child.kill)
    below = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    place.undo.append(lambda: [os.kill(int(pid), signal.SIGKILL) for pid in below.read_text().split()])
    time.sleep(1.0)


def _fill(_: str, place: Place) -> None:
    path = place.folder / "disk" / "filler"
    on("gb-head", "sh", "-c", 'cat /dev/zero >"$1" 2>/dev/null; true', "sh", str(path))


def _wait(seconds: str, _: Place) -> None:
    time.sleep(float(seconds))


def _exit(_: str, place: Place) -> None:
    (place.folder / "exit").touch()


_MAKERS: Mapping[str, Callable[[str, Place], None]] = {
    "known_hosts": _known_hosts,
    "key": _key,
    "bashrc": _bashrc,
    "ssh_config": _ssh_config,
    "sshd_config": _sshd_config,
    "ipv6": _ipv6,
    "agent": _agent,
    "foreign": _foreign,
    "listen": _listen,
    "fill": _fill,
    "wait": _wait,
    "exit": _exit,
}


@contextmanager
def small_disk(place: Place) -> Iterator[None]:
    """A file system of 2 MB for the evidence, in the head host."""
    folder = place.folder / "disk"
    folder.mkdir(exist_ok=True)
    on("gb-head", "mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder))
    try:
        yield
    finally:
        on("gb-head", "umount", "-l", str(folder), check=False)


# --- one row


@dataclass
class Result:
    """What happened: seconds until it was said and until the session ended, the exit code, and how the hosts got empty."""

    where: str
    row: str
    code: str
    noticed_s: float | None = None
    ended_s: float | None = None
    exit: int | None = None
    clean_s: float | None = None
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def execute(row: Row, where: str, folder: Path) -> Result:
    """Run one row in one place. Raises AssertionError for what is not as the row says."""
    place, result = Place(where, row, folder), Result(where, row.name, row.code)
    place.prepare()
    assert not place.left(), f"the hosts are not empty before the row: {place.left()}"
    try:
        if row.full_disk:
            with small_disk(place):
                _execute(row, place, result)
        else:
            _execute(row, place, result)
    except (AssertionError, RuntimeError):
        place.abandon()
        raise
    finally:
        place.restore()
    return result


def _execute(row: Row, place: Place, result: Result) -> None:
    where = place.where
    before = row.phase == "before"
    if before:
        for step in row.do:
            make(step, None, place)
    if row.phase not in ("idle", "stream"):
        (place.folder / "go").touch()
    session = place.start(*row.args)
    _reach(row, session, place)
    written = session.read("rows.jsonl")
    broken = time.monotonic()
    if not before:
        if row.phase == "idle" and not row.do:
            time.sleep(6.0)  # the rank does it by itself
        _do(row, session, place)
        if row.phase == "idle":
            _let_go(place)
    if row.code and row.code != "CANCELLED":
        limit = row.limit(row.notice_s, where)
        session.wait_until(lambda: _said(row, session), limit + 15, f"{row.code} was not said")
        result.noticed_s = round(time.monotonic() - broken, 1)
        assert result.noticed_s <= limit, f"{row.code} was said after {result.noticed_s} s, limit {limit:g} s"
    result.exit = session.end(row.limit(row.end_s, where) + 60)
    result.ended_s = round(time.monotonic() - broken, 1)
    assert result.ended_s <= row.limit(row.end_s, where), f"the session ended after {result.ended_s} s"
    assert session.read("rows.jsonl").startswith(written), "a row that was written before the fault is lost"
    _check(row, session, result)
    _cleaned(row, session, place, result)


def _said(row: Row, session: Session) -> bool:
    return f"{row.code}:" in session.text or any(one["code"] == row.code for one in session.rows())


def _reach(row: Row, session: Session, place: Place) -> None:
    """Wait for the phase. Only an idle or streaming engine is waited for at the stream check."""
    real = place.where == "real"
    if row.phase == "loading" and row.do:
        session.wait_for("starting rank 0", 240 if real else 60)
        time.sleep((0.5 if row.do[0].startswith("pause") else 6.0) if real else 2.0)
    if row.phase not in ("idle", "stream"):
        return
    session.wait_until(lambda: (place.folder / "idle").exists(), 300 if real else 60, "the session was not idle")
    if row.phase == "stream":
        (place.folder / "go").touch()
        time.sleep(STREAM_AFTER_S[place.where] if row.do else 0.0)


def _do(row: Row, session: Session, place: Place) -> None:
    for step in row.do:
        make(step, session, place)


def _let_go(place: Place) -> None:
    """After the fault of an idle engine the session asks it; some faults must be noticed before anybody asks."""
    time.sleep(1.0)
    (place.folder / "go").touch()


def _check(row: Row, session: Session, result: Result) -> None:
    found = session.rows()
    killed = row.exit == -9
    if not killed and not row.full_disk:
        ElementTree.fromstring(session.read("junit.xml"))
        json.loads(session.read("run.json"))
    want = {-9, 137} if killed else {row.exit_code}
    assert result.exit in want, f"exit code {result.exit}, expected {row.exit_code}:\n{session.text[-2500:]}"
    blamed = [one for one in found if one["part"] is None and one["verdict"] in ("FAIL", "TOKEN_LIMIT")]
    assert not blamed, f"a model was blamed: {blamed}"
    if row.code and row.check not in ("", "-"):
        said = {one["check"]: f"{one['code']}: {one['message']}" for one in found}
        # What was not asked because the engine was lost before is BLOCKED, and names the first cause.
        assert row.code in said.get(row.check, ""), f"{row.check} is {said.get(row.check)}, expected {row.code}"
    if not row.code and row.exit_code == 0:
        assert {one["verdict"] for one in found} <= {"PASS", "NOT_IMPLEMENTED"}, found


def _cleaned(row: Row, session: Session, place: Place, result: Result) -> None:
    """Within its limit both hosts are empty: by the session itself, by the next one, or by `dspark stop`."""
    begin = time.monotonic()
    if row.clean == "self" and not row.full_disk:
        folder = session.folder / "production"
        stopped = (folder / "teardown.json").exists()
        if stopped:
            assert json.loads((folder / "teardown.json").read_text())["left_behind"] == []
    if row.clean == "self":
        if row.name not in ("name-taken",):
            assert not place.left(), f"left behind: {place.left()}"
        result.clean_s = 0.0
        return
    run = session.run
    place.restore()
    if row.clean == "next":
        (place.folder / "go").touch()
        after = place.start(out=place.folder / "out2")
        assert after.end(120) == 0, after.text[-2500:]
        assert f"run {run} of this machine is dead" in after.text, after.text[-2500:]
    else:
        place.stop_run(run)
    assert not place.left(), f"left behind after {row.clean}: {place.left()}"
    result.clean_s = round(time.monotonic() - begin, 1)


# --- what is written of it

HEAD = """# Faults: what is said, and within which time

Generated from `lab/faults.toml` by `python lab/matrix.py doc`; a test holds both together. `make faults` executes every row of
*rehearsal* (two emulated ranks as processes) and *emulated* (the emulated rank in Docker on the two lab hosts, over real ssh),
`make lab-full` those of *real* (vLLM on CPU on the same hosts).

After each row: the code was said within its time, the check that was asking carries it (or is BLOCKED and names it, if nobody
was asking yet), no model was blamed, every row that was written before parses, JUnit is well-formed, pytest's exit code is the
stated one, and both hosts are empty: by the session itself, by the next session on that machine (*next*), or by `dspark stop` once
the hosts are up again (*stop*). *survived* means that every check passed. Times are limits in seconds until it is said, and until
the session has ended; of *real* they may be three times as long. They count from the fault; from the session's start where it
was there before; from the start of its phase where a rank makes it by itself.

**What decides.** An exit, a restart, an end for memory are facts, told by the Docker engine or the kernel. Silence is not: a
verdict needs two signs that do not follow from each other (`pytest_dspark/signs.py`), after the recipe's `[watch]` times.

| code | first sign | and |
|---|---|---|
| RANK_EXITED, OOM_KILLED, RANK_RESTARTED, PROCESS_LOST | the state of a rank | - |
| ENGINE_DEAD | a rank's log says that the engine died | the head ended with code 0, or /health is 5xx |
| FABRIC_LOST | an interface has no carrier, or a fabric address answers no ping although its host can be reached otherwise | the other host cannot be reached by that cable either, or requests run and no counter moves, or the other interface says it too |
| HOST_UNREACHABLE | a host does not answer at its Docker address | another rank ended, the API is silent, or requests run and no counter moves |
| API_DOWN | the API does not answer | nobody listens on its port, and its rank runs |
| ENGINE_WEDGED | requests run and no counter moves | a rank has used no processor at all in that time, or the GPUs of all ranks say that they are busy at a power at which they compute nothing (`spin_w` of the recipe) |

If ssh and the fabric share one cable, a cable that was pulled and a host that lost its power differ by the carrier of the interface at
this end alone: without a carrier it is FABRIC_LOST, which says so. A host that only cannot be watched (its Docker daemon or sshd is
gone while its rank serves on) is said once and ends nothing; what cannot be stopped in the end is LEFT_BEHIND, with host, id and
the command to type. A prefill whose counters stand still for hours is left alone as long as its ranks use their processors and,
where a recipe states `spin_w`, the GPUs of one of them draw the power of work or say that nothing runs on them (a kernel that is being compiled).

"""


def document() -> str:
    """docs/faults.md."""
    lines = [
        "| row | fault | phase | where | said | notice s | end s | exit | clean |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        said = f"{row.code} on {row.check}" if row.check not in ("", "-") else row.code or "survived"
        notice = f"{row.notice_s:g}" if row.code and row.code != "CANCELLED" else "-"
        cells = [
            row.name,
            row.fault,
            row.phase,
            ", ".join(row.where),
            said,
            notice,
            f"{row.end_s:g}",
            row.exit_code,
            row.clean,
        ]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    executed = sum(len(row.where) for row in rows())
    return HEAD + "\n".join(lines) + f"\n\n{len(rows())} rows, {executed} executions.\n"


def results(paths: list[Path], title: str) -> str:
    """A table of what was executed, the last execution of each row in each place."""
    found = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    last = {(one["where"], one["row"]): one for one in found}
    order = [(where, row.name) for where in PLACES for row in rows() if where in row.where]
    lines = [title, "", "| where | row | expected | said after s | ended after s | exit | cleaned in s | result |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for key in order:
        one = last.get(key)
        cells = ["not executed"] if one is None else [one["problem"].replace("|", "/") or "as expected"]
        values = ["", "", "", ""] if one is None else [one[k] for k in ("noticed_s", "ended_s", "exit", "clean_s")]
        code = next(row.code for row in rows() if row.name == key[1]) or "survived"
        shown = ["-" if value is None else str(value) for value in values]
        lines.append(f"| {' | '.join([*key, code, *shown, *cells])} |")
    good = sum(1 for key in order if key in last and not last[key]["problem"])
    return "\n".join(lines) + f"\n\n{good} of {len(order)} executions as expected.\n"


def main(argv: list[str]) -> int:
    """`doc` writes docs/faults.md; `results OUT TITLE FILE...` writes a table; `heal` brings both hosts up."""
    if argv[:1] == ["doc"]:
        (ROOT / "docs" / "faults.md").write_text(document(), encoding="utf-8")
    elif argv[:1] == ["results"] and len(argv) > 3:
        Path(argv[1]).write_text(results([Path(name) for name in argv[3:]], argv[2]), encoding="utf-8")
    elif argv == ["heal"]:
        heal()
    else:
        print(main.__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
