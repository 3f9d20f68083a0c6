"""Which keys are offered to a host and in which order: the configured files, or else the usual ones, then the agent's.

Nothing is asked. An agent that fails or does not answer holds nothing, and a refusal says so.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.pkey import UnknownKeyType

from pytest_dspark.errors import HostError
from pytest_dspark.hosts.ssh_config import Target

# Less than what a host gets to answer a key, so that it is the agent that is named.
AGENT_S = 8.0
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
Public = tuple[str, bytes]


class BoundedAgent(paramiko.Agent):
    """The user's agent, given a few seconds for each answer. Raises SSHException."""

    def _connect(self, conn: Any) -> None:
        conn.settimeout(AGENT_S)
        try:
            super()._connect(conn)  # type: ignore[misc]
        except paramiko.SSHException:
            conn.close()
            raise

    def _send_message(self, msg: Any) -> Any:
        try:
            return super()._send_message(msg)  # type: ignore[misc]
        except TimeoutError as error:
            raise paramiko.SSHException(f"the ssh agent did not answer within {AGENT_S:g} s") from error
        except OSError as error:
            raise paramiko.SSHException(f"the ssh agent failed: {error}") from error


@dataclass(frozen=True, slots=True)
class Candidate:
    key: paramiko.PKey
    label: str

    @property
    def public(self) -> Public:
        return self.key.get_name(), self.key.asbytes()


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys for one host, from this user's files and agent; `notes` says what could not be used."""

    name: str
    target: Target
    folder: Path
    notes: list[str] = field(default_factory=list)

    def candidates(self, agent: Callable[[], paramiko.Agent]) -> Generator[Candidate]:
        """Every key once, while the agent is open. Raises SSH_AUTH_FAILED for a configured file that cannot be used."""
        with ExitStack() as stack:
            held = {key.public: key for key in self._held(agent, stack)}
            seen: set[Public] = set()
            for found in self._from_files(held):
                if found.public not in seen:
                    seen.add(found.public)
                    yield from _with_and_without_certificate(found)
            if not self.target.identities_only:
                yield from (key for public, key in held.items() if public not in seen)

    def _held(self, agent: Callable[[], paramiko.Agent], stack: ExitStack) -> list[Candidate]:
        try:
            opened = stack.enter_context(closing(agent()))
            return [Candidate(key, f"agent key {key.get_name()} {_comment(key)}".strip()) for key in opened.get_keys()]
        except (paramiko.SSHException, OSError, ValueError) as error:
            self.notes.append(str(error))
            return []

    def _from_files(self, held: Mapping[Public, Candidate]) -> Iterator[Candidate]:
        """`IdentitiesOnly` leaves out the agent's other keys; the usual files only where others are configured."""
        usual = [] if self.target.identities_only and self.target.identities else DEFAULT_KEYS
        yield from self._usable(self.target.identities, held, configured=True)
        yield from self._usable([self.folder / key for key in usual], held, configured=False)

    def _usable(
        self, paths: Iterable[Path], held: Mapping[Public, Candidate], *, configured: bool
    ) -> Iterator[Candidate]:
        for path in paths:
            found = self._from_file(path, held)
            if isinstance(found, Candidate):
                yield found
            elif path.exists() and configured:
                raise HostError("SSH_AUTH_FAILED", "; ".join([f"{self.name}: {found}", *self.notes]))
            elif path.exists() or configured:
                self.notes.append(found)

    def _from_file(self, path: Path, held: Mapping[Public, Candidate]) -> Candidate | str:
        """The key of a file, else the agent's copy of it, else why there is none."""
        try:
            return Candidate(paramiko.PKey.from_path(path), str(path))
        except (TypeError, paramiko.PasswordRequiredException):
            problem = f"key {path} is encrypted and the agent does not hold it"
        except FileNotFoundError:
            problem = f"IdentityFile {path} is not there"
        except (ValueError, OSError, paramiko.SSHException, UnknownKeyType, UnsupportedAlgorithm) as error:
            problem = f"key {path} cannot be used: {error}"
        public = public_key(path) or public_key(path.with_name(path.name + ".pub"))
        if public_key(path):
            problem = f"{path} is a public key and the agent does not hold its private one"
        return held.get(public, problem) if public else problem


def _comment(key: paramiko.PKey) -> str:
    return str(getattr(key, "comment", ""))


def _with_and_without_certificate(found: Candidate) -> Iterator[Candidate]:
    """A certificate that ran out hides no key that is good without it."""
    yield found
    if found.key.public_blob:
        bare = copy.copy(found.key)
        bare.public_blob = None
        yield Candidate(bare, f"{found.label} without its certificate")


def public_key(path: Path) -> Public | None:
    """Type and bytes of a file that holds a public key; None of any other."""
    try:
        kind, data = path.read_text(encoding="ascii").split()[:2]
        blob = base64.b64decode(data, validate=True)
    except (OSError, ValueError):
        return None
    return (kind, blob) if blob[4:].startswith(kind.encode()) else None
