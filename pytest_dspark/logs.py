"""One rank's log text -> facts: configuration, KV pool, graph runtime, rank, faults.

A log is hostile text: it may be cut, repeated, megabytes long, or hold what a user sent. Nothing here raises on any text,
nothing is evaluated, and every pattern has a literal start and bounded repeats, so that reading takes linear time.
A fact that the log does not state is None or empty, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pytest_dspark.sanitize import is_secret_key

LINE_LIMIT: Final = 500
FAULTS_OF_A_KIND: Final = 20
DEPTH: Final = 6
CONFIG_LIMIT: Final = 100_000


@dataclass(frozen=True, slots=True)
class Fault:
    """A recognised line of trouble. `line` counts from 1; `figures` are the numbers of the line, by name."""

    kind: str
    line: int
    text: str
    figures: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RankLog:
    """What one rank's log says. Where a start is repeated in the log, the last one counts.

    engine_version, engine_config: of the last line "Initializing a V1 LLM engine"; only rank 0 prints it. Values are
        JSON-like; constructor calls stay text. Empty when there is no such line.
    compilation: what the engine resolved (`compilation_config` of that line): `mode` is the number and `mode_name` its
        name, `cudagraph_mode` the name, other enums as in `jsonable`. Comparable with --compilation-config JSON.
    non_default_args: what was asked for (API server, rank 0 only), with `compilation_config` in the same form. Secrets
        (`api_key`, `hf_token`) are replaced by `***`.
    graph_runtime: the last complete CUDA_GRAPH_RUNTIME record of a Worker_TP line, values as text; None when absent.
    kv_pool_tokens, max_concurrency: as logged, never derived.
    rank, world_size: of torch.distributed; the lowest rank where a log holds several.
    unknown_env: names of environment variables that the engine said it does not know.
    faults: at most 20 of a kind, in order. The kinds are those of `FAULTS`; `jit` is a warning (a timed row with one is
        not warm), `hang` may recover, the others end the start or the engine.
    """

    engine_version: str = ""
    engine_config: Mapping[str, Any] | None = None
    compilation: Mapping[str, Any] | None = None
    non_default_args: Mapping[str, Any] | None = None
    graph_runtime: Mapping[str, str] | None = None
    kv_pool_tokens: int | None = None
    max_concurrency: float | None = None
    rank: int | None = None
    world_size: int | None = None
    unknown_env: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


ECHO: Final = re.compile(
    r"\b(?:Received request|Generated response|Added request) \S|\bRequest \S{1,200} details: "
    r"|\"(?:GET|POST|HEAD|PUT|DELETE|OPTIONS|PATCH) /[^\"]{0,8000} HTTP/\d"
)
"""A line that repeats what a client sent: its words are the client's, so they neither prove nor accuse."""
ENGINE: Final = re.compile(r"(?:^|[\]:] ?)\s*Initializing a V1 LLM engine \(v([^)\s]{1,100})\) with config: (.*)")
ARGUMENTS: Final = re.compile(r"(?:^|[\]:] ?)\s*non-default args: (\{.*)")
POOL: Final = re.compile(r"\b[A-Z]{2,8} KV cache size: (\d[\d,]{0,24}) tokens")
CONCURRENCY: Final = re.compile(r"Maximum concurrency for \d[\d,]{0,24} tokens per request: (\d{1,12}(?:\.\d{1,6})?)x")
ASSIGNED: Final = re.compile(r"\brank (\d{1,6}) in world size (\d{1,6}) is assigned")
JOINING: Final = re.compile(r"\bworld_size=(?P<size>\d{1,6}) rank=(?P<rank>\d{1,6}) local_rank=")
UNKNOWN: Final = re.compile(r"Unknown vLLM environment variable detected: ([A-Za-z_][A-Za-z0-9_]{0,100})")
RUNTIME: Final = re.compile(r"\bCUDA_GRAPH_RUNTIME((?: [a-z_]{1,40}=[^\s=]{1,80}){7,20})(?=\s|$)")
RUNTIME_KEYS: Final = frozenset(
    ["requested", "resolved", "mode", "decode_mode", "breakable", "enforce_eager", "strict"]
)

# kind, a literal that every such line holds, the pattern. Named groups become figures.
FAULTS: Final = tuple(
    (kind, literal, re.compile(pattern))
    for kind, literal, pattern in (
        ("audit_failed", "DSPARK_RUNTIME_AUDIT_FAIL", r"DSPARK_RUNTIME_AUDIT_FAIL"),
        (
            "peer_lost",
            "gloo/transport",
            r"gloo/transport/tcp/\w{1,40}\.cc:\d{1,6}\] .{0,200}?(?:by peer|remote worker|imed out|Broken pipe)",
        ),
        (
            "fabric",
            "NCCL",
            r"\bNCCL error|NCCL WARN .{0,120}?(?:Connection (?:closed|reset|refused)|IBV_WC_\w{1,40}|unhandled system error)",
        ),
        ("fabric", "nccl", r"\bnccl(?:Remote|System|Internal|UnhandledCuda)Error\b"),
        ("worker_exception", "WorkerProc hit an exception", r"WorkerProc hit an exception"),
        ("engine_fatal", "EngineCore encountered a fatal error", r"EngineCore encountered a fatal error"),
        ("engine_dead", "EngineDeadError", r"\bEngineDeadError\b"),
        (
            "hang",
            "No available shared memory broadcast block",
            r"No available shared memory broadcast block found in (?P<seconds>\d{1,6}) seconds",
        ),
        ("hang", "Watchdog caught collective operation timeout", r"Watchdog caught collective operation timeout"),
        ("rpc_timeout", "RPC call to ", r"RPC call to \w{1,80} timed out"),
        ("startup_failed", "Engine core initialization failed", r"Engine core initialization failed"),
        ("startup_failed", "EngineCore failed to start", r"EngineCore failed to start"),
        ("startup_failed", "WorkerProc initialization failed", r"WorkerProc initialization failed"),
        ("rendezvous_timeout", "DistStoreError", r"\bDistStoreError: Timed out after (?P<seconds>\d{1,9}) seconds"),
        (
            "free_memory",
            "Free memory on device",
            r"Free memory on device [^()]{0,40}\((?P<free_gib>\d{1,6}(?:\.\d{1,6})?)/(?P<total_gib>\d{1,6}(?:\.\d{1,6})?) GiB\) on startup is less"
            r" than desired GPU memory utilization \((?P<share>\d{1,3}(?:\.\d{1,6})?), (?P<wanted_gib>\d{1,6}(?:\.\d{1,6})?) GiB\)",
        ),
        (
            "kv_too_small",
            "available KV cache memory",
            r"(?P<needed_gib>\d{1,6}(?:\.\d{1,6})?) Gi?B KV cache is needed, which is larger than the available KV cache memory"
            r" \((?P<available_gib>\d{1,6}(?:\.\d{1,6})?) Gi?B\)",
        ),
        ("kv_too_small", "No available memory for the cache blocks", r"No available memory for the cache blocks"),
        ("out_of_memory", "out of memory", r"CUDA out of memory|CUDA error: out of memory"),
        ("out_of_memory", "OutOfMemoryError", r"\btorch\.(?:cuda\.)?OutOfMemoryError\b"),
        ("out_of_memory", "NV_ERR_NO_MEMORY", r"NV_ERR_NO_MEMORY"),
        (
            "graph_selection",
            "CUDA graph selection",
            r"(?:Conflicting native and legacy|Strict (?:regular|breakable)) CUDA graph selection",
        ),
        ("jit", "JIT compilation during inference", r"\bJIT compilation during inference: \S"),
    )
)


def read_log(text: str) -> RankLog:
    """Read one rank's log. Never raises; linear in the length of the text."""
    found: dict[str, Any] = {"unknown_env": {}, "faults": {}}
    takers = [entry for entry in _TAKERS if entry[0] in text]
    faults = [entry for entry in FAULTS if entry[1] in text]
    for number, line in enumerate(text.split("\n"), 1) if takers or faults else ():
        for literal, take in takers:
            if literal in line and not ECHO.search(line):
                take(line, found)
        for kind, literal, pattern in faults:
            if literal in line and not ECHO.search(line):
                _take_fault(kind, pattern, number, line, found["faults"])
    return _finish(found)


def _finish(found: dict[str, Any]) -> RankLog:
    engine = found.get("engine_config")
    resolved = engine.get("compilation_config") if engine else None
    faults = sorted((fault for many in found.pop("faults").values() for fault in many), key=lambda fault: fault.line)
    return RankLog(
        **found | {"unknown_env": tuple(found["unknown_env"])},
        compilation=resolved if isinstance(resolved, dict) else None,
        faults=tuple(faults),
    )


def _take_engine(line: str, found: dict[str, Any]) -> None:
    if match := ENGINE.search(line):
        found["engine_version"] = match[1]
        found["engine_config"] = _pairs(match[2][:CONFIG_LIMIT], "=", 0)


def _take_arguments(line: str, found: dict[str, Any]) -> None:
    if match := ARGUMENTS.search(line):
        arguments = jsonable(match[1][:CONFIG_LIMIT].rstrip())
        found["non_default_args"] = {key: "***" if is_secret_key(key) else value for key, value in arguments.items()}


def _take_pool(line: str, found: dict[str, Any]) -> None:
    if match := POOL.search(line):
        found["kv_pool_tokens"] = int(match[1].replace(",", ""))


def _take_concurrency(line: str, found: dict[str, Any]) -> None:
    if match := CONCURRENCY.search(line):
        found["max_concurrency"] = float(match[1])


def _take_rank(line: str, found: dict[str, Any]) -> None:
    if match := ASSIGNED.search(line):
        rank, size = int(match[1]), int(match[2])
    elif match := JOINING.search(line):
        rank, size = int(match["rank"]), int(match["size"])
    else:
        return
    found["rank"] = min(rank, found.get("rank", rank))
    found["world_size"] = size


def _take_unknown(line: str, found: dict[str, Any]) -> None:
    if match := UNKNOWN.search(line):
        found["unknown_env"].setdefault(match[1])


def _take_runtime(line: str, found: dict[str, Any]) -> None:
    match = RUNTIME.search(line) if "Worker_TP" in line else None
    record = dict(item.split("=", 1) for item in match[1].split()) if match else {}
    if record.keys() >= RUNTIME_KEYS:
        found["graph_runtime"] = record


_TAKERS: Final[tuple[tuple[str, Callable[[str, dict[str, Any]], None]], ...]] = (
    ("Initializing a V1 LLM engine", _take_engine),
    ("non-default args: {", _take_arguments),
    (" KV cache size: ", _take_pool),
    ("Maximum concurrency for ", _take_concurrency),
    (" in world size ", _take_rank),
    (" local_rank=", _take_rank),
    ("Unknown vLLM environment variable", _take_unknown),
    ("CUDA_GRAPH_RUNTIME", _take_runtime),
)


def _take_fault(kind: str, pattern: re.Pattern[str], number: int, line: str, faults: dict[str, list[Fault]]) -> None:
    kept = faults.setdefault(kind, [])
    if len(kept) == FAULTS_OF_A_KIND or (kept and kept[-1].line == number):
        return
    if match := pattern.search(line):
        figures = tuple((name, float(value)) for name, value in match.groupdict().items())
        kept.append(Fault(kind, number, _window(line, match.start()), figures))


def explain(fault: Fault) -> str:
    """One sentence about a fault, with its figures and the profile knob that decides, where there is one."""
    figures = dict(fault.figures)
    if fault.kind == "free_memory":
        return (
            f"{figures['free_gib']:g} GiB of {figures['total_gib']:g} GiB are free and GPU_MEMORY_UTILIZATION={figures['share']:g}"
            f" wants {figures['wanted_gib']:g} GiB"
        )
    if fault.kind == "kv_too_small" and figures:
        return f"MAX_MODEL_LEN needs {figures['needed_gib']:g} GiB of KV cache and {figures['available_gib']:g} GiB are there"
    return f"line {fault.line}: {fault.text}"


def search(text: str, pattern: re.Pattern[str] | str) -> tuple[int, str] | None:
    """The first line that the pattern matches and that no request wrote (`ECHO`), as (number from 1, line), or None.

    The pattern sees one line at a time, without its line end. Of a long line 500 characters around the match come back.
    """
    wanted = re.compile(pattern)
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.rstrip("\r")
        match = wanted.search(line)
        if match and not ECHO.search(line):
            return number, _window(line, match.start())
    return None


def _window(line: str, start: int) -> str:
    """At most 500 characters of the line, with the place `start` among them."""
    line = line.rstrip("\r")
    begin = 0 if start < LINE_LIMIT - 200 else start - 100
    return line[begin : begin + LINE_LIMIT]


# --- the text of a Python object -> JSON-like values

STRING: Final = r"'(?:[^'\\]|\\.)*+(?:'|\\?\Z)" + r'|"(?:[^"\\]|\\.)*+(?:"|\\?\Z)'
ENUM: Final = re.compile(r"<[A-Za-z_][\w.]{0,100}?\.([A-Za-z_]\w{0,80}): ([^<>]{1,200})>")
TOKEN: Final = re.compile(STRING + r"|<[A-Za-z_][\w.]{0,180}: [^<>]{1,200}>|[(){}\[\],=:]", re.DOTALL)
WHOLE_STRING: Final = re.compile(STRING, re.DOTALL)
INTEGER: Final = re.compile(r"[+-]?\d{1,40}")
FLOAT: Final = re.compile(r"[+-]?(?:\d{1,40}\.\d{0,40}|\.\d{1,40}|\d{1,40}(?=[eE]))(?:[eE][+-]?\d{1,2})?")
WORDS: Final = {"None": None, "True": True, "False": False, "null": None, "true": True, "false": False}
ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r"}


def jsonable(text: str, depth: int = 0) -> Any:
    """The value that the text of a Python (or JSON) object stands for; what is not understood stays text.

    Numbers, strings, None and truth values, lists, tuples (as lists) and mappings become themselves. An enum like
    `<CUDAGraphMode.FULL_DECODE_ONLY: (2, 0)>` becomes its name, and one with a text value that text. Nesting beyond six
    levels stays text. Never raises.
    """
    text = text.strip()
    if text in WORDS:
        return WORDS[text]
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    if WHOLE_STRING.fullmatch(text) and len(text) > 1 and text[-1] == text[0]:
        return re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[1]), text[1:-1], flags=re.DOTALL)
    if match := ENUM.fullmatch(text):
        return match[2][1:-1] if match[2][:1] in "'\"" else match[1]
    return _container(text, depth) if text[:1] in ("{", "[", "(") and depth < DEPTH else text


def _container(text: str, depth: int) -> Any:
    inner = text[1:-1] if text[-1] in "}])" else text[1:]
    if text[0] == "{":
        return _pairs(inner, ":", depth + 1)
    return [jsonable(item, depth + 1) for item in _split(inner, ",") if item.strip()]


def _pairs(text: str, between: str, depth: int) -> dict[str, Any]:
    """The items `key=value` or `'key': value` of one level. An enum under `mode` becomes its number, and `mode_name`."""
    table: dict[str, Any] = {}
    for item in _split(text, ","):
        name, *rest = _split(item, between, 1)
        if not rest:
            continue
        key = str(jsonable(name, DEPTH))
        table[key] = jsonable(rest[0], depth)
        number = ENUM.fullmatch(rest[0].strip())
        if key == "mode" and number and INTEGER.fullmatch(number[2]):
            table |= {"mode": int(number[2]), "mode_name": number[1]}
    return table


def _split(text: str, separator: str, limit: int = -1) -> Iterator[str]:
    """The parts between separators that stand in no bracket and no string; with a limit, at most that many cuts."""
    level, start = 0, 0
    for match in TOKEN.finditer(text):
        token = match[0]
        if token in ("(", "[", "{"):
            level += 1
        elif token in (")", "]", "}"):
            level = max(0, level - 1)
        elif token == separator and level == 0 and limit != 0:
            yield text[start : match.start()]
            start, limit = match.end(), limit - 1
    yield text[start:]
