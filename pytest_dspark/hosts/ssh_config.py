"""Where an `ssh://` address leads: the same target as the ssh command's, or a refusal that names what is not understood.

HostName, Port, User, IdentityFile, IdentitiesOnly, UserKnownHostsFile, GlobalKnownHostsFile and Include are honoured, from
the user's file and then the system's. What else changes the target or its keys is refused with file and line, never skipped.
"""

from __future__ import annotations

import getpass
import glob
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pytest_dspark.errors import HostError
from pytest_dspark.sanitize import mask_text

SSH_PORT = 22
INCLUDE_DEPTH = 16
_HARMLESS = {
    "proxyjump": "none",
    "proxycommand": "none",
    "canonicalizehostname": "no",
    "identityagent": "ssh_auth_sock",
}
_REFUSED = frozenset(
    {
        "proxyjump",
        "proxycommand",
        "proxyusefdpass",
        "canonicalizehostname",
        "hostkeyalias",
        "bindaddress",
        "bindinterface",
        "certificatefile",
        "identityagent",
        "pkcs11provider",
        "securitykeyprovider",
        "remotecommand",
        "knownhostscommand",
        "revokedhostkeys",
    }
)
_KNOWN_HOSTS = ("userknownhostsfile", "globalknownhostsfile")
_HONOURED = frozenset(("hostname", "port", "user", "identityfile", "identitiesonly", *_KNOWN_HOSTS))


def default_configs() -> tuple[Path, ...]:
    return (Path.home() / ".ssh" / "config", Path("/etc/ssh/ssh_config"))


@dataclass(frozen=True, slots=True)
class Address:
    """An `ssh://` URL as it was written; `user` and `port` are None where it says nothing."""

    host: str
    user: str | None = None
    port: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where to connect and with which keys. `identities` are the configured key files, in order; `known_hosts` are the
    files to look up the host's key in, or None for the usual ones."""

    host: str
    port: int
    user: str
    identities: tuple[Path, ...] = ()
    identities_only: bool = False
    known_hosts: tuple[Path, ...] | None = None

    @property
    def known_name(self) -> str:
        """The host as known_hosts writes it, and hashes it: in small letters."""
        host = self.host.lower()
        return host if self.port == SSH_PORT else f"[{host}]:{self.port}"

    def __str__(self) -> str:
        return f"{self.user}@[{self.host}]:{self.port}" if ":" in self.host else f"{self.user}@{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Line:
    """One directive that may hold for the host. `match` is the place of the Match block around it, if any."""

    key: str
    words: tuple[str, ...]
    where: str
    match: str = ""


@dataclass(slots=True)
class _Found:
    first: dict[str, tuple[str, ...]] = field(default_factory=dict)
    identities: list[str] = field(default_factory=list)

    def value(self, key: str, default: str) -> str:
        return self.first.get(key, (default,))[0]


def parse_address(name: str, url: str) -> Address:
    """Take `ssh://user@host:port` apart; IPv6 stands in brackets. Raises CLUSTER_INVALID."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, unquote(parts.hostname or "")
    except ValueError as error:
        raise HostError("CLUSTER_INVALID", f"{name}: {url}: {error}") from error
    more = parts.password is not None or parts.path.strip("/") or parts.query
    if not host or more or port == 0 or host.startswith("-"):
        found = mask_text(url)
        raise HostError("CLUSTER_INVALID", f"{name}: expected ssh://user@host:port and nothing else, found {found}")
    return Address(host, unquote(parts.username) if parts.username else None, port)


def resolve(name: str, address: Address, configs: Sequence[Path]) -> Target:
    """The target after the configuration files; the URL's own user and port win. Raises SSH_CONFIG_UNSUPPORTED."""
    found = _Found()
    for path in configs:
        for line in _active(name, path, address.host):
            _take(name, line, found)
    host = _expand(name, found.value("hostname", "%h"), {"h": address.host, "n": address.host})
    user = address.user or found.value("user", getpass.getuser())
    tokens = {"d": str(Path.home()), "h": host, "r": user, "u": getpass.getuser(), "n": address.host}
    return Target(
        host=host,
        port=address.port or _port(name, found.value("port", str(SSH_PORT))),
        user=user,
        identities=tuple(_paths(name, dict.fromkeys(found.identities), tokens)),
        identities_only=found.value("identitiesonly", "no").lower() in ("yes", "true"),
        known_hosts=_known_hosts(name, found, tokens),
    )


def _paths(name: str, texts: Iterable[str], tokens: dict[str, str]) -> Iterator[Path]:
    for text in texts:
        if text.lower() != "none":
            yield _home(name, _expand(name, text, tokens))


def _home(name: str, text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise HostError("SSH_CONFIG_UNSUPPORTED", f"{name}: there is no such home folder here: {text}") from error


def _known_hosts(name: str, found: _Found, tokens: dict[str, str]) -> tuple[Path, ...] | None:
    if not any(key in found.first for key in _KNOWN_HOSTS):
        return None
    usual = (("~/.ssh/known_hosts", "~/.ssh/known_hosts2"), ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"))
    texts = [text for key, files in zip(_KNOWN_HOSTS, usual, strict=True) for text in found.first.get(key, files)]
    return tuple(_paths(name, texts, tokens))


def _take(name: str, line: _Line, found: _Found) -> None:
    """The first value of a directive holds; identity files add up; the rest is refused if it changes the target."""
    if line.key in _REFUSED and line.words and line.words[0].lower() != _HARMLESS.get(line.key):
        raise _unsupported(name, f"{line.where}: {line.key} {' '.join(line.words)}")
    if line.key not in _HONOURED or not line.words:
        return
    if line.match:
        raise _unsupported(name, f"{line.match}: a Match block that sets {line.key} ({line.where})")
    if line.key == "identityfile":
        found.identities.append(line.words[0])
    else:
        found.first.setdefault(line.key, line.words)


def _unsupported(name: str, what: str) -> HostError:
    return HostError("SSH_CONFIG_UNSUPPORTED", f"{name}: {what} is not supported here, and ssh itself would heed it")


def _active(name: str, path: Path, host: str, depth: int = 0) -> Iterator[_Line]:
    """The directives of a file, and of those it includes, that hold or may hold for the host."""
    holds, match = True, ""
    for line in _lines(name, path):
        if line.key == "host":
            holds, match = host_matches(host, line.words), ""
        elif line.key == "match":
            holds, match = True, "" if [word.lower() for word in line.words] == ["all"] else line.where
        elif holds and line.key == "include":
            if depth == INCLUDE_DEPTH:
                raise _unsupported(name, f"{line.where}: Include deeper than {INCLUDE_DEPTH} files")
            for inner in _included(name, path, line):
                for found in _active(name, inner, host, depth + 1):
                    yield _Line(found.key, found.words, found.where, found.match or match)
        elif holds:
            yield _Line(line.key, line.words, line.where, match)


def _lines(name: str, path: Path) -> Iterator[_Line]:
    """Keyword and words of every line; keywords in any case, `key value` or `key=value`, `#` begins a comment.

    Raises SSH_CONFIG_UNSUPPORTED for any other line, as ssh does: a byte order mark would hide a `Host`.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise HostError("SSH_CONFIG_UNSUPPORTED", f"{name}: {path} cannot be read: {error}") from error
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        found = re.match(r"(\w+)(?:\s*=\s*|\s+)(.*)", line)
        if line and not found and not line.startswith("#"):
            raise HostError(
                "SSH_CONFIG_UNSUPPORTED", f"{name}: {path}:{number}: expected KEYWORD VALUE, found {line!r}"
            )
        if found:
            yield _Line(found.group(1).lower(), _words(found.group(2)), f"{path}:{number}")


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text, comments=True))
    except ValueError:
        return tuple(text.split())


def _included(name: str, path: Path, line: _Line) -> Iterator[Path]:
    """Files of an Include; a relative name lies in the folder of the configuration that includes it."""
    base = Path("/etc/ssh") if path.is_relative_to("/etc/ssh") else Path.home() / ".ssh"
    for word in line.words:
        if "%" in word or "${" in word:
            raise _unsupported(name, f"{line.where}: a token in Include {word}")
        yield from map(Path, sorted(glob.glob(str(base / _home(name, word)))))


def host_matches(host: str, patterns: Iterable[str]) -> bool:
    """OpenSSH's pattern list: `*` and `?`, a `!` pattern that matches excludes; names in any case."""
    found = False
    for pattern in patterns:
        plain = pattern.removeprefix("!").lower().replace("[", "[[]")
        if fnmatchcase(host.lower(), plain):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def _expand(name: str, text: str, tokens: dict[str, str]) -> str:
    unknown = [token for token in re.findall(r"%(.?)", text) if token not in {*tokens, "%"}]
    if unknown or "${" in text:
        raise _unsupported(name, f"a token in {text}")
    return re.sub(r"%(.)", lambda found: tokens.get(found[1], "%"), text)


def _port(name: str, text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise HostError("SSH_CONFIG_UNSUPPORTED", f"{name}: Port must be a number from 1 to 65535, found {text!r}")
    return int(text)
