"""Identity on two real hosts: dspark doctor, frozen manifests, edited files and weights. Runs inside the head host.

`make lab-identity`, after `make lab`. Nothing may be created by doctor, and nothing may be left by the rest.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_faults import (
    CLUSTER,
    NAME,
    RECIPE,
    ROOT,
    WORKER,
    Session,
    assert_both_empty,
    containers,
    docker,
    twins,  # noqa: F401
)

pytestmark = pytest.mark.skipif(not CLUSTER.exists(), reason="lab/cluster.toml is not there: run `make lab` first")
KNOWN_HOSTS = Path("/root/.ssh/known_hosts")
DOCTOR_S = 15.0


def on_worker(*words: str) -> str:
    command = ["ssh", "-o", "BatchMode=yes", WORKER, " ".join(words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def cluster_copy(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    text = CLUSTER.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def dspark(*args: str, seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
    code = "import sys; from pytest_dspark.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)


def red(cluster: Path, *, before: dict[str, str] | None = None) -> list[tuple[str, str, str]]:
    """The red rows of doctor on this cluster: it must refuse in time, say what to do, and create nothing."""
    begin = time.monotonic()
    done = dspark("doctor", "--cluster", str(cluster), "--json")
    seconds = time.monotonic() - begin
    found = json.loads(done.stdout)
    print(f"doctor took {seconds:.1f} s")
    assert done.returncode == 1 and found["allowed"] is False, done.stdout
    assert seconds < DOCTOR_S
    rows = [row for row in found["rows"] if row["state"] == "red"]
    assert rows and all(row["remedy"] for row in rows), rows
    if before is None:
        assert_both_empty()
    else:
        assert containers() == before
    return [(row["check"], row["host"], row["code"]) for row in rows]


# --- doctor


def test_a_fit_pair_is_allowed():
    done = dspark("doctor", "--cluster", str(CLUSTER))
    assert done.returncode == 0 and "a launch would be allowed" in done.stdout, done.stdout + done.stderr
    assert_both_empty()


def test_the_second_host_is_down(tmp_path):
    cluster = cluster_copy(tmp_path, ("ssh://root@10.77.0.2:22", "ssh://root@10.77.0.99:22"))
    assert red(cluster) == [("reach", "gb-worker", "HOST_UNREACHABLE")]


@pytest.fixture
def known_hosts() -> Iterator[Path]:
    """The head's known_hosts, put back afterwards."""
    text = KNOWN_HOSTS.read_text()
    yield KNOWN_HOSTS
    KNOWN_HOSTS.write_text(text)


def test_a_wrong_host_key(tmp_path, known_hosts):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    other = " ".join((tmp_path / "key.pub").read_text().split()[:2])
    known_hosts.write_text(f"10.77.0.2,gb-worker {other}\n")
    begin = time.monotonic()
    done = dspark("doctor", "--cluster", str(CLUSTER), "--json")
    (row,) = [row for row in json.loads(done.stdout)["rows"] if row["state"] == "red"]
    assert (done.returncode, row["check"], row["host"], row["code"]) == (1, "reach", "gb-worker", "HOST_KEY_CHANGED")
    assert time.monotonic() - begin < DOCTOR_S and row["remedy"]


def test_a_port_that_is_taken():
    with socket.create_server(("0.0.0.0", 8888)):
        assert red(CLUSTER) == [("ports", "gb-head", "PORT_TAKEN")]


@pytest.fixture
def shifted(known_hosts: Path) -> Iterator[str]:
    """A second sshd on the worker whose commands see a clock that is an hour ahead."""
    library = on_worker("ls /usr/lib/*/faketime/libfaketime.so.1")
    key = next(line.split(None, 1)[1] for line in known_hosts.read_text().splitlines() if line.startswith("10.77.0.2"))
    known_hosts.write_text(known_hosts.read_text() + f"[10.77.0.2]:2299 {key}\n")
    setting = f"'SetEnv=LD_PRELOAD={library} FAKETIME=+3600'"
    on_worker(f"/usr/sbin/sshd -f /etc/ssh/sshd_config_2222 -p 2299 -o PidFile=/run/sshd_2299.pid -o {setting}")
    yield "ssh://root@10.77.0.2:2299"
    on_worker("kill $(cat /run/sshd_2299.pid)")


def test_a_shifted_clock(tmp_path, shifted):
    cluster = cluster_copy(tmp_path, ("ssh://root@10.77.0.2:22", shifted))
    assert red(cluster) == [("clock", "gb-worker", "HOST_UNFIT")]


def test_a_wrong_interface(tmp_path):
    cluster = cluster_copy(tmp_path, ('interface = "gbw"', 'interface = "gbx"'))
    assert red(cluster) == [("interface", "gb-worker", "HOST_UNFIT")]


def test_a_wrong_address(tmp_path):
    cluster = cluster_copy(tmp_path, ('address = "10.77.0.2"', 'address = "10.77.0.22"'))
    assert ("interface", "gb-worker", "HOST_UNFIT") in red(cluster)


def test_a_tiny_disk(tmp_path):
    folder = next(line.split('"')[1] for line in CLUSTER.read_text().splitlines() if "cache/gb-worker" in line)
    on_worker("mkdir -p /run/tiny && mount -t tmpfs -o size=1m tiny /run/tiny")
    try:
        assert red(cluster_copy(tmp_path, (folder, "/run/tiny"))) == [("disk", "gb-worker", "HOST_UNFIT")]
    finally:
        on_worker("umount /run/tiny && rmdir /run/tiny")


def test_a_foreign_container_of_our_name(twins):  # noqa: F811
    docker("worker", "create", "--name", NAME, twins, "/f")
    try:
        assert red(CLUSTER, before=containers()) == [("name", "gb-worker", "NAME_TAKEN")]
    finally:
        docker("worker", "rm", "-f", NAME)
    assert_both_empty()


def session_in(folder: Path, *args: str) -> Session:
    folder.mkdir()
    return Session(folder, *args)


# --- frozen


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The lab's recipes in a folder of their own, so that a frozen manifest stays out of the tree."""
    shutil.copytree(RECIPE.parent, tmp_path / "recipe", ignore=shutil.ignore_patterns("*.freeze.json"))
    return tmp_path / "recipe" / RECIPE.name


@pytest.fixture
def frozen(tmp_path: Path, recipe: Path) -> Path:
    """Launch, freeze, stop: the recipe with its manifest."""
    session = session_in(tmp_path / "frozen", "-k", "launch", "--dspark-keep", "--dspark-recipe", str(recipe))
    assert session.end() == 0, session.text[-3000:]
    where = ("--cluster", str(CLUSTER), "--out", str(session.out))
    try:
        done = dspark("freeze", *where, "--recipe", str(recipe), seconds=900)
        assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout)
    finally:
        assert dspark("stop", *where, "--run", session.folder.name).returncode == 0
    assert_both_empty()
    return recipe


def layer_file(host: str, name: str) -> str:
    """A file of the lab image as it lies in the store of the host's own Docker engine; the image id does not see it."""
    root = docker(host, "info", "--format", "{{.DockerRootDir}}")
    command = f"find {root} -path '*/site-packages/{name}' -type f"
    found = (
        subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
        if host == "head"
        else on_worker(command)
    )
    paths = found.split()
    assert paths, f"{host}: {name} lies in no layer below {root}"
    return paths[0]


def test_the_same_engine_is_accepted_and_one_edited_package_file_is_refused(tmp_path, frozen):
    good = session_in(tmp_path / "good", "-k", "launch or gate", "--dspark-recipe", str(frozen))
    assert good.end(900) == 0, good.text[-3000:]
    assert good.verdicts()["gate.frozen"] == "PASS" and good.verdicts()["gate.behaviour"] == "PASS"
    path = layer_file("worker", "vllm/version.py")
    on_worker(f"cp -p {path} /run/kept && echo '# edited' >> {path}")
    try:
        bad = session_in(tmp_path / "bad", "-k", "launch or gate", "--dspark-recipe", str(frozen))
        assert bad.end(900) == 1, bad.text[-3000:]
    finally:
        on_worker(f"cat /run/kept > {path} && rm /run/kept")
    assert bad.verdicts()["gate.frozen"] == "ERROR" and bad.verdicts()["gate.image"] == "PASS"
    assert "rank 1 (gb-worker): frozen files of vllm" in bad.text and "vllm/version.py" in bad.text
    assert_both_empty()


@pytest.fixture
def other_model(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A copy of the model folder; the name of its first shard."""
    source = next(line.split('"')[1] for line in CLUSTER.read_text().splitlines() if line.startswith("model"))
    folder = Path(source).with_name("model-changed")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    shutil.copytree(source, folder)
    yield folder, sorted(path.name for path in folder.glob("*.safetensors"))[0]
    shutil.rmtree(folder)


def flip(path: Path) -> None:
    """One byte in the first norm's first weight: its exponent, so that it is another number and not a rounding."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    begin = next(value["data_offsets"][0] for key, value in sorted(header.items()) if "norm" in key)
    data[8 + length + begin + 1] ^= 0x01
    path.write_bytes(data)


def test_one_byte_of_the_weights_on_one_host_is_named(tmp_path, other_model):
    folder, shard = other_model
    flip(folder / shard)
    worker = CLUSTER.read_text().rpartition("model = ")[2].split('"')[1]
    text = CLUSTER.read_text()
    at = text.rindex(f'model = "{worker}"')
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(text[:at] + text[at:].replace(f'model = "{worker}"', f'model = "{folder}"'))
    session = Session(tmp_path, "-k", "launch", "--dspark-cluster", str(cluster), "--dspark-weights", "sha256")
    assert session.end() == 1, session.text[-3000:]
    assert "IDENTITY_MISMATCH: gb-worker: sha256 of shards equal to gb-head" in session.text and shard in session.text
    assert_both_empty()


def test_one_byte_of_the_weights_on_both_hosts_answers_otherwise(tmp_path, frozen, other_model):
    folder, shard = other_model
    flip(folder / shard)
    source = next(line.split('"')[1] for line in CLUSTER.read_text().splitlines() if line.startswith("model"))
    cluster = cluster_copy(tmp_path, (f'model = "{source}"', f'model = "{folder}"'))
    session = session_in(
        tmp_path / "other", "-k", "launch or gate", "--dspark-cluster", str(cluster), "--dspark-recipe", str(frozen)
    )
    assert session.end(900) == 1, session.text[-3000:]
    assert session.verdicts()["gate.behaviour"] == "ERROR" and session.verdicts()["gate.frozen"] == "PASS"
    assert_both_empty()
