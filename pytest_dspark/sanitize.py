"""What may be written anywhere: secrets are replaced by `***` when they are read, in private evidence too.

Two ways, used together: by name (`is_secret_key`, `mask_argv`, `mask_env`), and by value (`mask_text`), because a secret
that was given under one name turns up in logs, errors and dumps under others.
"""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, quote_plus

MASK: Final = "***"
SHORTEST: Final = 4
# The last word of a name decides: VLLM_API_KEY is a secret, TOKENIZER_MODE and MAX_NUM_BATCHED_TOKENS are not.
SECRET_NAME: Final = re.compile(
    r"(?i:.*[_-](?:keys?|token|pass|passwd|password|passphrase|pat|secrets?|credentials?|auth)"
    r"|.*(?:apikeys?|password|secret|accesstoken)|token|passwd|passphrase|credentials?|authorization)"
)
# Names that end like a secret and hold an id, a kind of token or something public.
PLAIN_NAME: Final = re.compile(
    r"(?i:(?:.*[_-])?(?:pad|eos|bos|unk|stop|mask|end|start|first|last|next|per|cache|sort|primary|foreign|public|host)[_-](?:token|keys?))"
)
# One flag that takes a secret as its next word or after '='.
FLAG: Final = re.compile(r"--?([A-Za-z][A-Za-z0-9_-]*)")


@dataclass(frozen=True, slots=True)
class Shape:
    """What has the shape of a secret. A text that holds none of `needs`, in small letters, has none of it."""

    needs: tuple[str, ...]
    pattern: re.Pattern[str]


_NAMED: Final = (
    r"(?:[a-z0-9]{1,20}_){0,3}(?:api[_-]?keys?|hf[_-]token|password|passwd|client_secret|(?:access|auth|refresh)_token)"
)
SHAPES: Final = tuple(
    Shape(tuple(needs.split()), re.compile(pattern))
    for needs, pattern in (
        ("bearer", r"(?i)(\bbearer[ \t]{1,8})[A-Za-z0-9._~+/=-]{4,}"),
        (
            "authorization",
            r"(?i)(\bauthorization\\?['\"]?[ \t]{0,8}[:=][ \t]{0,8}\\?['\"]?(?:basic|token|digest|api-?key)[ \t]{1,8})[A-Za-z0-9+/=._~-]{4,}",
        ),
        ("hf_", r"()\bhf_(?=[a-z]{0,80}[A-Z0-9])[A-Za-z0-9]{4,}"),
        ("gh", r"()\bgh[pousr]_[A-Za-z0-9]{4,}"),
        ("github_pat_", r"()\bgithub_pat_[A-Za-z0-9_]{4,}"),
        ("glpat-", r"()\bglpat-[A-Za-z0-9_-]{8,}"),
        ("sk-", r"()(?<![A-Za-z0-9_-])sk-[A-Za-z0-9_-]{8,}"),
        ("nvapi-", r"()\bnvapi-[A-Za-z0-9_-]{8,}"),
        ("eyj", r"()\beyJ[A-Za-z0-9_-]{8,4096}\.[A-Za-z0-9_-]{8,4096}\.[A-Za-z0-9_-]{4,}"),
        ("akia", r"()\bAKIA[A-Z0-9]{12,}"),
        ("xox", r"()\bxox[abprs]-[A-Za-z0-9-]{8,}"),
        # A password in any URL; in a web address the user alone may be a token. `ssh://user@host` holds no secret.
        ("@", r"(?i)(\bhttps?://)[^\s/?#@'\"<>]{1,512}(?=@)"),
        ("@", r"(\b[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s/?#@:'\"<>]{0,100}:)[^\s/?#@'\"<>]{1,512}(?=@)"),
        # Up to its end line, so that it does not eat half of a name after it; to the last fitting character without one.
        (
            "private",
            r"()-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----"
            r"(?:[A-Za-z0-9+/=\s:,\\-]{0,20000}?-----END [A-Z ]{0,40}PRIVATE KEY-----|[A-Za-z0-9+/=\s:,\\-]{0,20000})",
        ),
        # A flag inside a shell string or a message; it may take a few values.
        (
            "--",
            r"(--(?:[A-Za-z0-9]{1,20}[_-]){0,5}(?:api[_-]?keys?|token|password|passwd|secret)(?:=|[ \t]{1,8})['\"]?)"
            r"(?!\*\*\*)[^\s'\"-][^\s'\"]{0,4096}(?:['\"]?[ \t]{1,8}['\"]?[^\s'\"\\-][^\s'\"]{0,4096}){0,3}",
        ),
        # A variable: NAME=value, NAME="two words", and as a table of names and values is printed.
        (
            "key token pass pwd secret credential auth _pat",
            r"(\b(?:[A-Z][A-Z0-9_]{0,60}_(?:KEYS?|TOKEN|PASS|PWD|PAT|AUTH|CREDENTIALS?)|[A-Z0-9_]{0,60}(?:PASSWORD|PASSWD|PASSPHRASE|SECRET|APIKEY))"
            r"(?:=|\\?['\"][ \t]{0,4}:[ \t]{0,4}(?=\\?['\"]))(?:\\?['\"])?)"
            r"(?:(?<=['\"])[^'\"\\]{1,4096}|(?<!['\"])[^\s\"',;]{1,4096})",
        ),
        (
            "key token secret passw",
            rf"(?i)((?<![A-Za-z0-9]){_NAMED}=)(?!None\b|null\b|true\b|false\b)[^\s'\"\[\](){{}}&,;*]{{4,4096}}",
        ),
        ("=", r"(?i)([?&](?:token|key|api[_-]?key|access_token|auth|sig|signature|secret)=)[^\s'\"&#*]{4,4096}"),
        ("x-", r"(?i)(\bx-(?:api-key|auth-token)\\?['\"]?[ \t]{0,4}:[ \t]{0,4}\\?['\"]?)[^\s'\",;\\]{4,4096}"),
        ("api token passw secret", rf"(?i)({_NAMED}\\?['\"]?\s{{0,4}}[:=]\s{{0,4}}\[)[^\[\]*]{{1,4096}}"),
        (
            "api hf_token hf-token passw client_secret access_token",
            r"(\b(?:api[_-]?keys?|hf[_-]token|password|passwd|client_secret|access_token)\\?['\"]?\s{0,4}[:=]\s{0,4}\[?\\?['\"])[^'\"\\]{1,4096}",
        ),
    )
)


def is_secret_key(name: str, declared: Iterable[str] = ()) -> bool:
    """Whether a value under this name is a secret: declared, or named like one (HF_TOKEN, VLLM_API_KEY, api-key, …)."""
    if name.lower() in {known.lower() for known in declared}:
        return True
    return SECRET_NAME.fullmatch(name) is not None and PLAIN_NAME.fullmatch(name) is None


def mask_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """The command line with secrets replaced: `--api-key X …`, `--api-key=X`, `-e NAME=X`, NAME=X, and secret-shaped words.

    A flag may take several values (`--api-key A B`): each word up to the next flag is replaced. A word that only looks
    like a flag after a secret flag is replaced too when it has the shape of a secret.
    """
    return tuple(_masked_words(argv))


def _masked_words(argv: Sequence[str]) -> Iterator[str]:
    hiding = False
    for word in argv:
        name, equals, value = word.partition("=")
        flag = FLAG.fullmatch(name)
        if flag:
            secret = is_secret_key(flag[1])
            hiding = secret and not equals
            yield f"{name}={MASK}" if secret and equals else mask_text(word)
        elif hiding:
            yield MASK
        elif equals and is_secret_key(name) and value:
            yield f"{name}={MASK}"
        else:
            yield mask_text(word)


def mask_env(pairs: Iterable[tuple[str, str]], declared: Iterable[str] = ()) -> tuple[tuple[str, str], ...]:
    """Environment pairs with the values of secret names replaced, and secret-shaped parts of the others. Empty stays empty."""
    known = tuple(declared)
    return tuple((key, MASK if value and is_secret_key(key, known) else mask_text(value)) for key, value in pairs)


def secret_values(pairs: Iterable[tuple[str, str]], declared: Iterable[str] = ()) -> tuple[str, ...]:
    """The values that `mask_text` should know: those of secret names, of at least four characters."""
    known = tuple(declared)
    return tuple(value for key, value in pairs if len(value) >= SHORTEST and is_secret_key(key, known))


def mask_text(text: str, values: Iterable[str] = ()) -> str:
    """The text without the known secret values and without what has the shape of one.

    A value is also found as JSON or a URL would write it. Values under four characters are left alone: they would
    change half of every text and hide nothing. The result holds none of the values, and masking it again changes nothing.
    """
    known = [value for value in values if len(value) >= SHORTEST and value.strip("*")]
    spellings = {spelling for value in known for spelling in _spellings(value) if len(spelling) >= SHORTEST}
    if spellings:
        # The longest first, so that no value is left half standing by a shorter one inside it.
        text = re.sub("|".join(re.escape(s) for s in sorted(spellings, key=len, reverse=True)), MASK, text)
    small = text.lower()
    for shape in SHAPES:
        if any(need in small for need in shape.needs):
            text = shape.pattern.sub(rf"\g<1>{MASK}", text)
    return text


def _spellings(value: str) -> set[str]:
    """The value itself, and as JSON, Python (each also in itself), a URL, a shell, HTML, XML and base64 write it."""
    written, plain = json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]
    told = repr(value)[1:-1]
    url = (quote(value, safe=""), quote(value), quote_plus(value))
    return {
        *(value, written, plain, told, *url, *(re.sub("%..", lambda found: found[0].lower(), one) for one in url)),
        *(json.dumps(written)[1:-1], json.dumps(plain, ensure_ascii=False)[1:-1], repr(told)[1:-1]),
        *(repr(value.encode("utf-8", "surrogatepass"))[2:-1], shlex.quote(value).strip("'")),
        *(html.escape(value), html.escape(value, quote=False), html.escape(value).replace("&#x27;", "&#39;")),
        base64.b64encode(value.encode("utf-8", "surrogatepass")).decode().rstrip("="),
    }
