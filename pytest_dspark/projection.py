"""What may leave the house: every text of a run with secrets masked and private names replaced by consistent pseudonyms.

`host-1` is the same host in every file of one pack. What a name was is kept as sha256 with a private nonce, since a plain
hash of an address can be guessed by trying them all. Each run passes a planted side file through the same code
(`side_file`, `came_out`); what comes out of it stops the publication. Standard library alone.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_dspark import sanitize

PUBLIC_ROOTS: Final = frozenset("usr bin sbin lib lib64 libexec proc sys dev etc v1 health metrics".split())
"""First folders of paths that are the same everywhere, and of URLs."""
PLAIN_WORDS: Final = frozenset(
    "lo none root head worker localhost host hosts unknown endpoint any all default rank test tests suites lab rehearsal dspark pytest "
    "docker vllm nvidia ubuntu debian user admin spark dgx gb10 model image cluster node server home data cache".split()
)
"""Names that say nothing of whoever uses them, and words that our own sentences need."""
PSEUDONYM: Final = re.compile(r"(?:host|address|interface|device|user|path|mac|gid|mail|container|value|cluster)-\d+")
GID: Final = re.compile(r"(?:[0-9A-Fa-f]{4}:){7}[0-9A-Fa-f]{4}")
_NAME: Final = r"A-Za-z0-9_"
_CASELESS: Final = frozenset({"host", "mac", "gid", "address", "mail"})


def _is_v4(text: str) -> bool:
    return all(int(part) < 256 for part in text.split(".")) and text not in ("0.0.0.0", "255.255.255.255")


def _is_v6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text.partition("%")[0])
    except ValueError:
        return False
    return any(char.isdigit() for char in text) and not GID.fullmatch(text)


def _is_private_path(text: str) -> bool:
    return text.split("/")[1] not in PUBLIC_ROOTS


def _is_domain(text: str) -> bool:
    return text != "threading.local"  # what Python's tracebacks say


def _always(text: str) -> bool:
    return bool(text)


@dataclass(frozen=True, slots=True)
class Rule:
    """A shape of something private: what the pattern finds and `accept` takes becomes a pseudonym of the kind. A text
    without `needs` holds none of it, and is not searched."""

    name: str
    kind: str
    pattern: re.Pattern[str]
    accept: Callable[[str], bool] = _always
    needs: str = ""


_NEEDS: Final = {
    **dict.fromkeys(("mail", "user at a host", "host after a user"), "@"),
    **dict.fromkeys(("gid", "IPv6"), ":"),
    **{"IPv4": ".", "path": "/", "home of a user": "~", "Windows path": ":\\", "device number": "-"},
}
RULES: Final = tuple(
    Rule(name, kind, re.compile(pattern), accept, _NEEDS.get(name, ""))
    for name, kind, pattern, accept in (
        ("mail", "mail", r"(?<![\w.+-])[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){0,8}\.[A-Za-z]{2,24}(?![\w.-])(?!:)", _always),
        ("user at a host", "user", r"(?<![\w.@/-])(?<!%40)[A-Za-z_][\w.-]{0,31}(?=@[A-Za-z0-9\[])|(?<=://)[A-Za-z_][\w.-]{0,31}(?=@)", _always),
        ("host after a user", "host", r"(?<=[\w-]@)[A-Za-z][A-Za-z0-9-]*(?:\.[A-Za-z0-9-]+)*", _always),
        ("mac", "mac", r"(?<![0-9A-Fa-f:-])(?:[0-9A-Fa-f]{2}[:-]){5,19}[0-9A-Fa-f]{2}(?![0-9A-Fa-f:-])", _always),
        ("gid", "gid", r"(?<![0-9A-Fa-f:])(?:[0-9A-Fa-f]{4}:){7}[0-9A-Fa-f]{4}(?![0-9A-Fa-f:])", _always),
        ("guid", "gid", r"(?<![0-9A-Fa-f:])(?:[0-9A-Fa-f]{4}:){3}[0-9A-Fa-f]{4}(?![0-9A-Fa-f:])|\b0x[0-9a-f]{16}\b(?=[^\n]{0,40}\bguid\b)", _always),
        ("IPv6", "address", r"(?<![0-9A-Za-z:.])(?:[0-9A-Fa-f]{0,4}:){2,7}(?:[0-9A-Fa-f]{1,4}|(?:\d{1,3}\.){3}\d{1,3})?(?:%[\w.-]+)?(?![0-9A-Za-z:])", _is_v6),
        ("IPv4", "address", r"(?<![\d.])(?<!\d[+-])(?:\d{1,3}\.){3}\d{1,3}(?![\d]|\.\d)", _is_v4),
        ("private domain", "host", r"(?<![\w.-])(?:[A-Za-z0-9][\w-]{0,62}\.){1,6}(?:local|lan|internal|intranet|corp|localdomain|home\.arpa|ts\.net)(?![\w-])", _is_domain),
        ("host name of the maker", "host", r"(?<![\w-])(?:spark|gx10|promaxgb10)-[0-9a-f]{4}(?![\w-])", _always),
        ("interface", "interface", r"(?<![\w-])(?:en[oPpsx]\d\w*|enx[0-9a-f]{12}|eth\d{1,3}|wl[opPx]\d\w*|ibs?p?\d\w*|bond\d{1,3}|tailscale\d|wg\d{1,3}|veth[0-9a-f]{6,12}|br-[0-9a-f]{8,12})(?![\w-])", _always),
        ("RDMA device", "device", r"(?<![\w-])(?:mlx[45]_\d{1,3}|roce[pP]\w*\d\w*|rdmap\w*\d\w*|bnxt_re\d{1,3}|ibp\w*\d\w*)(?![\w-])", _always),
        ("device number", "device", r"\b(?:GPU|MIG)-[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", _always),
        ("container", "container", r"(?<=\"Id\": \")[0-9a-f]{64}|(?<='Id': ')[0-9a-f]{64}|(?<=containers/)[0-9a-f]{12,64}|(?<=docker-)[0-9a-f]{64}|(?<=docker/)[0-9a-f]{64}", _always),
        ("name in an inspect dump", "container", r"(?<=[\"']Name[\"']: [\"'])/[\w.-]+", _always),
        ("host in an inspect dump", "host", r"(?<=[\"']Hostname[\"']: [\"'])[\w.-]+|(?<=\bHOSTNAME=)[\w.-]+", _always),
        ("home of a user", "path", r"(?<![\w/~])~[A-Za-z_][\w-]{0,31}(?=/)[^\s'\"`,;:()<>\[\]{}|]*", _always),
        ("path", "path", rf"(?<![{_NAME}.:/~\\-])/[\w.+@~=%-]+(?:/[\w.+@~=%-]+)+/?|(?<=file://)/[\w.+@~=%-]+(?:/[\w.+@~=%-]+)*", _is_private_path),
        ("Windows path", "path", r"(?<![\w])[A-Za-z]:\\{1,2}(?:Users|Documents and Settings)\\{1,2}[^\s'\"]{1,200}", _always),
    )
)  # fmt: skip
"""In this order: a mail before its user, a MAC before an IPv6 address."""


@dataclass(slots=True)
class Projector:
    """Projects texts of one run. A private name that looks like a pseudonym (`host-1`) stays what it is, and is given to
    nobody else (`alike`). `known` maps private texts of this run to their kind, `plain` are texts that stay as they
    are (versions, paths that the recipe itself names), `fixed` are replacements that were chosen by the caller."""

    nonce: bytes
    known: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    plain: frozenset[str] = frozenset()
    fixed: Mapping[str, str] = field(default_factory=dict)
    rules: Sequence[Rule] = RULES
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    alike: set[str] = field(default_factory=set)
    _words: re.Pattern[str] | None = None
    _odd: re.Pattern[str] | None = None
    _done: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.alike |= {word for word in self.known if PSEUDONYM.fullmatch(word)}
        words = {word: kind for word, kind in self.known.items() if _worth(word)} | dict.fromkeys(self.fixed, "")
        self.known = words
        for word, kind in words.items():
            if kind:
                self.name(kind, word)
        self._words = _any_of(words)
        self._odd = _any_of(word for word in words if not word.isalpha())

    def fix(self, more: Mapping[str, str]) -> None:
        """From now on replace these texts by what is given for each."""
        self.fixed = {**self.fixed, **{word: other for word, other in more.items() if word != other}}
        self._done.clear()
        self.__post_init__()

    def name(self, kind: str, original: str) -> str:
        """The pseudonym of a private text; the same for the same text."""
        key = kind, original.lower() if kind in _CASELESS else original
        if key not in self.names:
            count = 1 + sum(1 for other, _ in self.names if other == kind)
            while f"{kind}-{count}" in self.alike or f"{kind}-{count}" in self.names.values():
                count += 1
            self.names[key] = f"{kind}-{count}"
        return self.names[key]

    def text(self, text: str) -> str:
        """The text as it may be published."""
        found = self._done.get(text)
        if found is None:
            found = self._done[text] = self._projected(text)
        return found

    def source(self, text: str) -> str:
        """The same for a file that people wrote and share (recipe, profile, suite): a known name that is a plain word, as a
        host that is called "spark", is left there as the word that it is."""
        return self._projected(text, self._odd)

    def _projected(self, text: str, words: re.Pattern[str] | None = None) -> str:
        text, words = sanitize.mask_text(text, self.secrets), words or self._words
        if words:
            text = words.sub(self._known, text)
        for rule in self.rules:
            if rule.needs in text:
                text = rule.pattern.sub(lambda match, rule=rule: self._shaped(rule, match[0]), text)  # type: ignore[misc]
        return text

    def _known(self, match: re.Match[str]) -> str:
        word = match[0]
        return self.fixed.get(word) or self.name(self.known[word], word)

    def _shaped(self, rule: Rule, found: str) -> str:
        return found if not self._taken(rule, found) else self.name(rule.kind, found)

    def _taken(self, rule: Rule, found: str) -> bool:
        if found in self.plain or PSEUDONYM.fullmatch(found) or found in PLAIN_WORDS or not rule.accept(found):
            return False
        return not (rule.kind == "path" and any(found.startswith(f"{path}/") for path in self.plain if path[0] == "/"))

    def data(self, value: Any) -> Any:
        """JSON-ready data with every text projected; of keys only those that are names."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self._key(key): self.data(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.data(item) for item in value]
        return value

    def _key(self, key: str) -> str:
        return key if key.isidentifier() and key not in self.known else self.text(key)

    def left(self, text: str, *, source: bool = False) -> Iterator[tuple[str, str]]:
        """(rule, what it finds) of everything in a text that should not be there."""
        if sanitize.mask_text(text, self.secrets) != text:
            yield "secret", "***"
        words = self._odd if source else self._words
        if words:
            yield from (("known name", match[0]) for match in words.finditer(text))
        for rule in self.rules:
            found = (match[0] for match in rule.pattern.finditer(text)) if rule.needs in text else ()
            yield from ((rule.name, word) for word in found if self._taken(rule, word))

    def map(self) -> dict[str, str]:
        """Pseudonym -> sha256 of the nonce and the original: who holds the nonce can show what a name was."""
        return {name: commitment(self.nonce, original) for (_, original), name in self.names.items()}


def _any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """Any of the words by itself, the longest first; None for no word, since an empty choice would be found everywhere."""
    ordered = sorted(words, key=len, reverse=True)
    edge = rf"{_NAME}-"
    return re.compile(rf"(?<![{edge}])(?:{'|'.join(map(re.escape, ordered))})(?![{edge}])") if ordered else None


def _worth(word: str) -> bool:
    plain = word.isdigit() or word.lower() in PLAIN_WORDS or PSEUDONYM.fullmatch(word)
    return len(word) > 1 and not plain


def commitment(nonce: bytes, original: str | bytes) -> str:
    """sha256 of the nonce, a line feed and the original."""
    raw = original.encode("utf-8", "surrogatepass") if isinstance(original, str) else original
    return hashlib.sha256(nonce.hex().encode() + b"\n" + raw).hexdigest()


# --- the side file


PLANTED: Final[tuple[tuple[str, str, str], ...]] = (
    # rule, text, what must not come out; {} is fresh in each run, and looks like a secret's value
    ("bearer", "Authorization: Bearer {}", "{}"),
    ("basic", "Authorization: Basic {}", "{}"),
    ("hugging face token", "hub says hf_{}", "hf_{}"),
    ("github token", "remote: ghp_{}", "ghp_{}"),
    ("github pat", "remote: github_pat_{}", "github_pat_{}"),
    ("gitlab token", "remote: glpat-{}", "glpat-{}"),
    ("sk key", "the client used sk-{}", "sk-{}"),
    ("nvidia token", "pulled with nvapi-{}", "nvapi-{}"),
    ("web token", "cookie eyJ{0}{0}.{0}{0}.{0}{0}", "eyJ{}"),
    ("aws key", "id AKIA{}", "AKIA{}"),
    ("slack token", "hook xoxb-{}", "xoxb-{}"),
    ("user of a web address", "GET https://{0}{0}{0}{0}{0}@example.invalid/x", "{}"),
    ("password of a URL", "redis://cache:{0}{0}{0}{0}{0}@example.invalid:6379/0", "{}"),
    ("private key", "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----", "{}"),
    ("flag", "serve --api-key {} --port 1", "{}"),
    ("environment", "HF_HUB_TOKEN={}", "{}"),
    ("named value", "connected with password={}", "{}"),
    ("query", "GET /v1/models?token={}", "{}"),
    ("header", "x-api-key: {}", "{}"),
    ("list of values", "api_key=['{0}', '{0}']", "{}"),
    ("quoted name", "'api_key': '{}'", "{}"),
    ("mail", "written by jane.doe+{0}{0}@example.org", "jane.doe"),
    ("user at a host", "ssh jane{}@worker", "jane{}"),
    ("host after a user", "ssh root@box{}", "box{}"),
    ("mac", "link/ether 02:42:ac:11:00:0f brd ff:ff:ff:ff:ff:ff", "02:42:ac:11:00:0f"),
    ("gid", "GID[3] fe80:0000:0000:0000:0242:acff:fe11:000f", "0242:acff:fe11:000f"),
    ("guid", "node_guid 0242:acff:fe11:0010", "0242:acff:fe11:0010"),
    ("IPv6", "listening on fd12:3456:789a::1 and fe80::42:acff:fe11:f%eth9", "fd12:3456:789a::1"),
    ("IPv6", "listening on fe80::42:acff:fe11:f", "fe80::42:acff:fe11:f"),
    ("IPv4", "connected to 192.168.77.21:8888", "192.168.77.21"),
    ("private domain", "resolving box{}.lan", "box{}.lan"),
    ("host name of the maker", "hello from spark-7f3a", "spark-7f3a"),
    ("interface", "NCCL_SOCKET_IFNAME is enp97s0f9np9", "enp97s0f9np9"),
    ("RDMA device", "Using [0]rocep97s0f9:1/RoCE", "rocep97s0f9"),
    ("device number", "GPU-12345678-1234-1234-1234-123456789abc: 40 C", "GPU-12345678"),
    ("container", '[{{"Id": "' + "ab12" * 16 + '"}}]', "ab12" * 16),
    ("name in an inspect dump", '"Name": "/box{}"', "/box{}"),
    ("host in an inspect dump", '"Hostname": "box{}"', "box{}"),
    ("home of a user", "cannot read ~jane{}/models", "~jane{}"),
    ("path", "loading /home/jane{}/models/x.safetensors", "/home/jane{}"),
    ("path", "loading /raid7/{}/x.safetensors", "/raid7/{}"),
    ("Windows path", "C:\\Users\\jane{}\\model", "jane{}"),
    ("known secret", "the value {secret} was given under no name", "{secret}"),
    ("known name", "rank 1 lives on {known}", "{known}"),
)


def planted(token: str, secret: str, known: str) -> tuple[tuple[str, str, str], ...]:
    """The side file's lines as (rule, text, what must not come out). `token` is of capital letters and digits."""

    def filled(number: int, text: str) -> str:
        return text.format(f"{token}{number:02}", secret=secret, known=known) if "{" in text else text

    return tuple((rule, filled(n, text), filled(n, word)) for n, (rule, text, word) in enumerate(PLANTED))


def came_out(projected: str, lines: Sequence[tuple[str, str, str]]) -> list[str]:
    """The rules whose planted text is still in the projected side file."""
    return list(dict.fromkeys(rule for rule, _, word in lines if word in projected))
