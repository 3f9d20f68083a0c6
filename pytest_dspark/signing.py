"""Detached OpenSSH signatures over statement.json, made and checked with ssh-keygen: agents and encrypted keys are its business.

A second lab adds a second signature over the same statement; each has a name of its own.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytest_dspark.errors import ConfigError, DsparkError
from pytest_dspark.pack import SIGNATURE, STATEMENT

NAMESPACE: Final = "pytest-dspark"
WAIT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature of a pack. `signer` is whom the given keys say it is of; `problem` why it does not count."""

    name: str
    signer: str = ""
    problem: str = ""


def signatures(path: Path) -> list[str]:
    """The names of a pack's signatures."""
    return sorted(one.name for one in path.iterdir() if SIGNATURE.fullmatch(one.name))


def sign(path: Path, key: Path) -> Path:
    """Sign the statement of a pack. `key` is a private key, or a public one whose private half the agent holds.

    Raises USAGE for a pack without a statement, a missing key or a signature of that key that is there already, and
    HARNESS with ssh-keygen's own words if it cannot sign. Without a terminal nothing is asked: an encrypted key must then
    be in the agent.
    """
    statement = path / STATEMENT
    if not statement.is_file():
        raise ConfigError("USAGE", f"{path}: there is no {STATEMENT}: a run without a proof is not signed")
    if not key.is_file():
        raise ConfigError("USAGE", f"{key}: no such key")
    target = path / f"{STATEMENT}.{_name_of(key)}.sig"
    if target.exists():
        raise ConfigError("USAGE", f"{target}: this key has signed already")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / STATEMENT
        copy.write_bytes(statement.read_bytes())
        done = _keygen(["-Y", "sign", "-q", "-f", str(key), "-n", NAMESPACE, str(copy)], asking=sys.stdin.isatty())
        made = copy.with_name(f"{STATEMENT}.sig")
        if done.returncode or not made.is_file():
            raise DsparkError("HARNESS", f"ssh-keygen did not sign: {done.stderr.strip() or done.stdout.strip()}")
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(made.read_bytes())
    return target


def _name_of(key: Path) -> str:
    """16 hex digits that name the key, by its fingerprint."""
    public = key if key.suffix == ".pub" else key.with_name(f"{key.name}.pub")
    done = _keygen(["-l", "-f", str(public if public.is_file() else key)], asking=False)
    words = done.stdout.split()
    if done.returncode or len(words) < 2:
        raise ConfigError("USAGE", f"{key}: ssh-keygen does not know this key: {done.stderr.strip()}")
    return hashlib.sha256(words[1].encode()).hexdigest()[:16]


def command(signature: Path) -> str:
    """What a stranger types to check a signature with OpenSSH alone."""
    check = f"ssh-keygen -Y verify -f ALLOWED_SIGNERS -I SIGNER -n {NAMESPACE} -s {shlex.quote(signature.name)}"
    return f"cd {shlex.quote(str(signature.parent))} && {check} < {STATEMENT}"


def allowed_line(signer: str, public: str) -> str:
    """The line of ssh-keygen's file of allowed signers for a public key."""
    return f'{signer} namespaces="{NAMESPACE}" {" ".join(public.split()[:2])}'


def check(path: Path, allowed: Path | None) -> list[Signature]:
    """Every signature of a pack: whether it is one of this statement, and of whom among the allowed signers."""
    return [_check(path, name, allowed) for name in signatures(path)]


def _check(path: Path, name: str, allowed: Path | None) -> Signature:
    statement = (path / STATEMENT).read_bytes() if (path / STATEMENT).is_file() else b""
    intact = _over(["-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(path / name)], statement)
    if intact.returncode:
        return Signature(name, problem=f"is no signature of this statement: {_said(intact)}")
    if allowed is None:
        return Signature(name, problem="")
    found = _over(["-Y", "find-principals", "-f", str(allowed), "-s", str(path / name)], statement)
    for signer in found.stdout.decode("utf-8", "replace").split("\n"):
        given = ["-Y", "verify", "-f", str(allowed), "-I", signer, "-n", NAMESPACE, "-s", str(path / name)]
        if signer and _over(given, statement).returncode == 0:
            return Signature(name, signer=signer)
    return Signature(name)


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    return (done.stderr or done.stdout).decode("utf-8", "replace").strip()


def _keygen(words: Sequence[str], *, asking: bool) -> subprocess.CompletedProcess[str]:
    """ssh-keygen, which may ask for a passphrase only where somebody can answer."""
    environ = dict(os.environ) if asking else {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}
    try:
        return subprocess.run(
            ["ssh-keygen", *words],
            stdin=None if asking else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env=environ,
            start_new_session=not asking,
            timeout=None if asking else WAIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DsparkError("HARNESS", f"ssh-keygen: {error}") from error


def _over(words: Sequence[str], data: bytes) -> subprocess.CompletedProcess[bytes]:
    """ssh-keygen with the statement on its standard input."""
    try:
        return subprocess.run(["ssh-keygen", *words], input=data, capture_output=True, check=False, timeout=WAIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DsparkError("HARNESS", f"ssh-keygen: {error}; without it no signature can be checked") from error
