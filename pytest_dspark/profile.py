"""The knobs of one served configuration: `profiles/*.env`, nothing but KEY=value.

The meaning of a profile is what `set -a; source FILE` gives in bash. A line that another usual reader of such files
(Docker's `--env-file`, the Docker SDK, python-dotenv) would read differently is refused with its line number, so no
profile has two meanings. The one exception are JSON knobs: bash needs single quotes around them and Docker's readers
would keep those quotes, so a quoted value is allowed for a JSON object and for nothing else.

Only syntax is judged here. Which knobs exist, and their types and limits, is the recipe's business.
Values are never repeated in messages: one of them may be a secret.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from pytest_dspark import strictjson
from pytest_dspark.errors import ConfigError

KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Every character here means itself to bash, Docker and dotenv; '#' does so anywhere but at the start.
PLAIN: Final = re.compile(r"(?:[A-Za-z0-9_./:@%+,=^-][A-Za-z0-9_./:@%+,=^#-]*)?")
UNSAFE: Final = re.compile(r"[^A-Za-z0-9_./:@%+,=^#-]")
# Names that bash keeps for itself: it drops, changes or obeys what is assigned to them.
SHELL: Final = re.compile(
    r"(BASH|COMP_|HIST|LC_|READLINE_).*|PS[0-4]|LINES|COLUMNS|LANG|LANGUAGE|LD_LIBRARY_PATH|LD_PRELOAD|IFS|PATH|CDPATH|HOME"
    r"|_|PWD|OLDPWD|SHELL|SHLVL|SHELLOPTS|TERM|TMOUT|TMPDIR|TIMEFORMAT|ENV|POSIXLY_CORRECT|PROMPT_COMMAND|PROMPT_DIRTRIM"
    r"|UID|EUID|PPID|GROUPS|RANDOM|SRANDOM|SECONDS|LINENO|EPOCHSECONDS|EPOCHREALTIME|DIRSTACK|PIPESTATUS|REPLY|MAPFILE"
    r"|FUNCNAME|FUNCNEST|OPTARG|OPTERR|OPTIND|HOSTNAME|HOSTTYPE|MACHTYPE|OSTYPE|GLOBIGNORE|EXECIGNORE|FIGNORE|FCEDIT"
    r"|IGNOREEOF|INPUTRC|CHILD_MAX|EMACS|INSIDE_EMACS|histchars|auto_resume"
)
REASONS: Final = {
    "$": "bash would expand it",
    "`": "bash would run it",
    "\\": "bash would drop it",
    '"': "bash drops double quotes and Docker keeps them",
    "'": "single quotes are for JSON objects alone",
    "~": "bash would put the home directory there",
    "*": "a shell pattern",
    "?": "a shell pattern",
    "[": "a shell pattern",
    "]": "a shell pattern",
    "{": "bash would change it; write a JSON object in single quotes",
    "}": "bash would change it; write a JSON object in single quotes",
    "#": "a comment to some readers and a value to others",
    " ": "bash would end the value there; blanks and trailing comments are not part of a profile",
    "\t": "bash would end the value there; blanks and trailing comments are not part of a profile",
    "\r": "the line ends with CR LF; save the file with LF alone",
}


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile file. `values` are (key, value, line) in the order of the file; `sha256` is over its bytes."""

    name: str
    path: str
    values: tuple[tuple[str, str, int], ...]
    sha256: str

    def get(self, key: str) -> str | None:
        """The value as bash would export it, or None when the profile does not set the key."""
        return next((value for name, value, _ in self.values if name == key), None)

    def line(self, key: str) -> int | None:
        """The line number (from 1) that sets the key, or None."""
        return next((line for name, _, line in self.values if name == key), None)


def load_profile(path: Path) -> Profile:
    """Read a profile. Raises ConfigError PROFILE_INVALID with file and line for whatever has no single meaning."""
    raw = _read(path)
    values = tuple(_values(_text(raw, path), path))
    if not values:
        raise ConfigError("PROFILE_INVALID", f"{path}: expected at least one KEY=value, found none")
    return Profile(path.stem, str(path), values, hashlib.sha256(raw).hexdigest())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            "PROFILE_INVALID", f"{path}: expected a readable file, found {error.strerror or error}"
        ) from error


def _text(raw: bytes, path: Path) -> str:
    if raw.startswith(b"\xef\xbb\xbf"):
        _refuse(path, 1, "expected text, found a byte order mark; save the file as UTF-8 without BOM")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _invalid(path, line, f"expected UTF-8, found the byte {raw[error.start]:#04x}") from error
    for character, name in (("\0", "a NUL"), ("\r", "a carriage return; save the file with LF line ends")):
        if character in text:
            _refuse(path, text.count("\n", 0, text.index(character)) + 1, f"expected plain text, found {name}")
    return text


def _values(text: str, path: Path) -> Iterator[tuple[str, str, int]]:
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("#") or not line.strip(" \t"):
            continue
        key, value = _pair(line, partial(_refuse, path, number))
        if key in seen:
            _refuse(path, number, f"expected each key once, found {key} again (first on line {seen[key]})")
        seen[key] = number
        yield key, value, number


def _pair(line: str, refuse: Callable[[str], NoReturn]) -> tuple[str, str]:
    """The key and the meaning of its value."""
    key, equals, value = line.partition("=")
    _check_key(key, equals, refuse)
    if value.startswith("'"):
        return key, _quoted(key, value, refuse)
    _check_plain(key, value, refuse)
    return key, value


def _check_key(key: str, equals: str, refuse: Callable[[str], NoReturn]) -> None:
    if key.lstrip().startswith("#"):
        refuse("expected a comment to start in the first column, found blanks before the '#'")
    if not equals:
        refuse("expected KEY=value, found no '='")
    if key.split()[:1] == ["export"]:
        refuse("expected KEY=value, found 'export'; `set -a` exports every key")
    if key != key.strip():
        refuse(f"expected KEY=value, found blanks around the key {_clip(key.strip())!r}")
    if not KEY.fullmatch(key):
        refuse(f"expected a name of letters, digits and '_', found {_clip(key)!r}")
    if SHELL.fullmatch(key):
        refuse(f"expected a knob, found {key}, which bash keeps for itself")


def _clip(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "…"


def _check_plain(key: str, value: str, refuse: Callable[[str], NoReturn]) -> None:
    if PLAIN.fullmatch(value):
        return
    unsafe = UNSAFE.search(value)
    at = unsafe.start() if unsafe else 0
    character = value[at]
    reason = REASONS.get(character, "readers disagree about it")
    refuse(f"expected a plain value of {key}, found {character!r} at its character {at + 1}: {reason}")


def _quoted(key: str, value: str, refuse: Callable[[str], NoReturn]) -> str:
    """The text between the quotes: one JSON object, on which bash and dotenv agree."""
    body = value[1:-1]
    if len(value) < 2 or not value.endswith("'") or "'" in body:
        refuse(
            f"expected {key}='{{…}}', found text after the closing quote or none; a quote in JSON is written \\u0027"
        )
    if "\\\\" in body:
        refuse(f"expected one meaning of {key}, found two backslashes, which some readers halve; write \\u005c")
    if "${" in body:
        refuse(
            f"expected one meaning of {key}, found '${{', which some readers expand even in single quotes; write \\u0024{{"
        )
    if not body.startswith("{"):
        refuse(f"expected a JSON object in the quotes of {key}; any other value stands without quotes")
    if not body.isprintable():
        refuse(f"expected printable JSON in {key}, found a control character")
    _check_json(key, body, refuse)
    return body


def _check_json(key: str, body: str, refuse: Callable[[str], NoReturn]) -> None:
    try:
        value = strictjson.loads(body)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        refuse(f"expected a JSON object in {key}, found one that is nested too deeply")
    except json.JSONDecodeError as error:
        refuse(f"expected a JSON object in {key}, found {error.msg} at its character {error.pos + 1}")
    except UnicodeEncodeError:
        refuse(f"expected a JSON object in {key}, found half of a surrogate pair")
    except ValueError as error:
        refuse(f"expected a JSON object in {key}, found {error}")


def _invalid(path: Path, line: int, message: str) -> ConfigError:
    return ConfigError("PROFILE_INVALID", f"{path}:{line}: {message}")


def _refuse(path: Path, line: int, message: str) -> NoReturn:
    raise _invalid(path, line, message)
