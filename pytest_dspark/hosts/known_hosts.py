"""known_hosts, read strictly: a key is known, changed, revoked or unknown. Nothing is ever added or asked."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_dspark.errors import HostError
from pytest_dspark.hosts.ssh_config import Target, host_matches


def default_files() -> tuple[Path, ...]:
    return (
        Path.home() / ".ssh" / "known_hosts",
        Path.home() / ".ssh" / "known_hosts2",
        Path("/etc/ssh/ssh_known_hosts"),
        Path("/etc/ssh/ssh_known_hosts2"),
    )


@dataclass(frozen=True, slots=True)
class HostKey:
    """A server's public key; `kind` is its type, `blob` its bytes."""

    kind: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """As ssh-keygen -l prints it."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class Known:
    """A line that names the host; `where` is its file and line."""

    key: HostKey
    revoked: bool
    where: str


def known_keys(name: str, files: Iterable[Path]) -> tuple[Known, ...]:
    """Every key that the files hold for this name (`host` or `[host]:port`); files that are not there hold none."""
    return tuple(known for path in files for known in _in_file(name, path))


def unreadable(files: Iterable[Path]) -> tuple[str, ...]:
    """The files that are there and cannot be read, with the reason."""
    return tuple(why for path in files if (why := _why_unreadable(path)))


def _why_unreadable(path: Path) -> str:
    try:
        path.open("rb").close()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return ""


def _in_file(name: str, path: Path) -> Iterator[Known]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for number, line in enumerate(lines, 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or marker == "@cert-authority" or not _names(words[0], name):
            continue
        try:
            blob = base64.b64decode(words[2], validate=True)
        except ValueError:
            continue
        yield Known(HostKey(words[1], blob), marker == "@revoked", f"{path}:{number}")


def _names(field: str, name: str) -> bool:
    if field.startswith("|1|"):
        salt, _, digest = field[3:].partition("|")
        try:
            wanted, key = base64.b64decode(digest), base64.b64decode(salt)
        except ValueError:
            return False
        return hmac.compare_digest(hmac.new(key, name.encode(), hashlib.sha1).digest(), wanted)
    return host_matches(name, field.split(","))


def check_host_key(host: str, target: Target, key: HostKey, known: Iterable[Known], notes: Sequence[str] = ()) -> None:
    """Accept only a known key. Raises HOST_KEY_UNKNOWN or HOST_KEY_CHANGED with host, port, type, fingerprint and a command.

    `notes` is why a key may be missing among the known ones.
    """
    known = tuple(known)
    where = f"{target.host} port {target.port}"
    offered = f"{key.kind} key {key.fingerprint}"
    command = f"ssh-keyscan -t {_keyscan_type(key.kind)} -p {target.port} {target.host} | ssh-keygen -lf -"
    same = [entry for entry in known if entry.key == key]
    revoked = [entry for entry in same if entry.revoked]
    if revoked:
        raise HostError("HOST_KEY_CHANGED", f"{host}: {where} offers {offered}, which is revoked in {revoked[0].where}")
    if same:
        return
    of_kind = [entry for entry in known if entry.key.kind == key.kind and not entry.revoked]
    if of_kind:
        raise HostError(
            "HOST_KEY_CHANGED",
            f"{host}: the host key of {where} changed: it offers {offered}, {of_kind[0].where} holds "
            f"{of_kind[0].key.fingerprint}; somebody may be in between. To look: {command}",
        )
    others = ", ".join(sorted({f"{entry.key.kind} in {entry.where}" for entry in known if not entry.revoked}))
    raise HostError(
        "HOST_KEY_UNKNOWN",
        f"{host}: the host key of {where} is not known: it offers {offered}, and no known_hosts file has such a key for "
        f"{target.known_name}{f' (only {others})' if others else ''}{''.join(f'; {note}' for note in notes)}. Compare it with the host's own: {command}",
    )


def _keyscan_type(kind: str) -> str:
    return {"ssh-ed25519": "ed25519", "ssh-rsa": "rsa"}.get(kind, "ecdsa" if kind.startswith("ecdsa") else kind)
