"""What is true of an engine build and not of one run: `recipe/*.toml`.

A recipe says how ranks are launched (container options, environment, argv), what proves them (pins, labels, markers,
canaries), what a profile may ask for (knobs, limits with their reasons) and what acceptance requires. A new engine,
model or image is a new recipe file and no new code. Everything is checked when the file is read: unknown keys, patterns
against the real lines they must and must not match, placeholders against the knobs.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from pytest_dspark.errors import ConfigError

PLACEHOLDER = re.compile(r"\{([A-Za-z][A-Za-z0-9_]*)\}")
PLAN_NAMES = frozenset(
    [
        "nnodes",
        "rank",
        "headless",
        "master_addr",
        "master_port",
        "port",
        "address",
        "interface",
        "rdma",
        "model",
        "model_source",
        "cache",
        "manifest",
        "python",
        "bundle",
    ]
)
RANK_NAMES = frozenset(
    {"rank", "headless", "address", "interface", "rdma", "model_source", "cache", "manifest", "bundle"}
)
CHECK_ID = re.compile(r"[a-z_]+(\.[a-z0-9-]+)?")
KNOB_TYPES = ("int", "float", "str", "json")
_T = TypeVar("_T")
LANES = ("gate", "correctness", "concurrency", "performance", "dataset", "niah")


@dataclass(frozen=True, slots=True)
class Knob:
    """One key that a profile may set. An optional knob that is absent leaves out each argv group that names it."""

    name: str
    type: str
    help: str = ""
    required: bool = False
    default: str | None = None
    min: float | None = None
    max: float | None = None
    choices: tuple[str, ...] = ()
    use: str = "argv"


@dataclass(frozen=True, slots=True)
class Condition:
    """A test on one knob (`NAME`, or `NAME.key` of a JSON knob). An absent value meets only `absent` and `differs`."""

    knob: str
    equals: Any = None
    differs: Any = None
    min: float | None = None
    max: float | None = None
    absent: bool | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """A rule on profile values: `effect` is `refuse`, `unpublishable` or `warn`, and `reason` says what was measured."""

    when: tuple[Condition, ...]
    effect: str
    reason: str


@dataclass(frozen=True, slots=True)
class Marker:
    """A line that a rank's log must hold (`required`) or must not hold (`forbidden`).

    `ranks` is `all`, `head` or `worker`. `unobservable` says why the other ranks cannot print it; `observable` are
    conditions on the rank's environment without which nobody prints it, with `unobservable` as the reason.
    """

    name: str
    kind: str
    pattern: re.Pattern[str]
    ranks: str = "all"
    when: tuple[Condition, ...] = ()
    observable: tuple[Condition, ...] = ()
    unobservable: str = ""
    match: tuple[str, ...] = ()
    no_match: tuple[str, ...] = ()

    def applies_to(self, rank: int) -> bool:
        return self.ranks == "all" or (self.ranks == "head") == (rank == 0)


@dataclass(frozen=True, slots=True)
class Canary:
    """One question of the gate. `kind`: `exact` (answer equals `expect`), `number` (the number that the answer comes to),
    `code` (answer holds exactly the code), `json` (answer is this object) or `tool` (a call of `tool` with at least the
    arguments of `expect_json`, or with exactly the text `expect`).

    `filler` sentences stand before and after `needle` in a `code` canary.
    """

    name: str
    kind: str
    prompt: str
    expect: str = ""
    expect_json: tuple[tuple[str, Any], ...] = ()
    tool: str = ""
    needle: str = ""
    filler: int = 0
    thinking: bool | None = None
    max_tokens: int = 64
    deadline_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Serve:
    """How one rank is started. Groups are lists of tokens with `{placeholders}`; see `plan.plan`."""

    container: str
    image: str
    port: int
    master_port: int
    served_model: str
    argv: tuple[tuple[str, ...], ...]
    argv_head: tuple[tuple[str, ...], ...] = ()
    argv_worker: tuple[tuple[str, ...], ...] = ()
    host_keys: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    model_target: str = "/model"
    options: tuple[tuple[str, str | tuple[str, ...]], ...] = ()
    process: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """Bounds in seconds of the launch, and the line by which a worker says that it waits for the head.

    `memory_margin_gib` is by how much the free memory of a host may be less after the stop than before the launch; 0: it is
    not compared, since others use that host too.
    """

    worker_ready: str = ""
    rendezvous_s: float = 300.0
    ready_s: float = 1800.0
    probe_s: float = 60.0
    stop_grace_s: float = 30.0
    poll_s: float = 0.5
    memory_margin_gib: float = 0.0


@dataclass(frozen=True, slots=True)
class Watch:
    """Seconds after which a silence is a sign that the engine is lost: of a host or the fabric, of the API, and of counters
    that stand still although requests run. A verdict needs a second sign (signs.py). `spin_w`: GPUs that say they are busy and
    draw no more watts than this wait for each other and compute nothing; 0 is not looked at.
    """

    gone_s: float = 8.0
    api_s: float = 5.0
    wedge_s: float = 120.0
    spin_w: float = 0.0


@dataclass(frozen=True, slots=True)
class Brakes:
    """When a running check is ended before its host dies; None is no brake. GiB of MemAvailable, and °C."""

    least_free_memory_gib: float | None = None
    most_temperature_c: float | None = None


@dataclass(frozen=True, slots=True)
class Pins:
    """The identity that is expected. An empty string is not pinned (and then never publishable)."""

    image_id: str = ""
    id_kind: str = "config"
    image_tag: str = ""
    architecture: str = ""
    package: str = ""
    integrated_vllm: str = ""
    source_revision: str = ""
    model_revision: str = ""
    model_marker: str = ""
    manifest_sha256: str = ""
    manifest_target: str = ""
    image_store: str = ""
    freeze: str = ""
    freeze_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Inside:
    """What is looked at inside each rank: by which interpreter, packages of which folders (none: its own), libraries by
    the beginning of their name, whole files, and the packages of which `dspark freeze` hashes every file.

    `package` is the one whose version the pin names. `required`: a rank that shows nothing of this is refused.
    """

    python: str = "python3"
    package: str = ""
    required: bool = False
    paths: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ("libnccl.so",)
    files: tuple[str, ...] = ("/etc/nccl.conf",)
    hashed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Weights:
    """What is true of the model folder: keys of config.json, number of shards, and the index's total size (0: not
    stated). `sums` names a list of sha256 beside the recipe, which is compared when the bytes are hashed."""

    pattern: str = "*.safetensors"
    index: str = "model.safetensors.index.json"
    shards: int = 0
    total_size: int = 0
    sums: str = ""
    config: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Preflight:
    """What a host must be before a launch. `required` names the looks that refuse when they are bad or cannot be made;
    the others warn. `memory_knob` is the profile's share of all memory that must be free; 0 or empty: not looked at."""

    required: tuple[str, ...] = ()
    clock_s: float = 2.0
    disk_gib: float = 0.0
    memory_knob: str = ""
    pressure_percent: float = 5.0
    swap_gib: float = 1.0
    ping_bytes: int = 0


PREFLIGHT_CHECKS = frozenset(
    [
        "clock",
        "disk",
        "memory",
        "pressure",
        "swap",
        "gpu-processes",
        "gpu",
        "interface",
        "rdma",
        "gid",
        "jumbo",
        "cache",
        "api",
    ]
)


@dataclass(frozen=True, slots=True)
class Asymmetry:
    """Whether a difference between ranks is an `error` or is only recorded (`record`), by kind."""

    packages: str = "error"
    library: str = "error"
    files: str = "error"
    kernel: str = "error"
    driver: str = "error"
    docker: str = "error"
    host: str = "error"


@dataclass(frozen=True, slots=True)
class Needle:
    """`[checks.needle]`: how the cells of the needle-in-a-haystack lane are built, sent and bounded.

    `reserve` tokens of the window are kept free; they are the answer's budget unless `max_tokens` is less. There is one
    needle at each share of `positions`. `needle` and `decoy` are sentences with {code} and perhaps {label}; `question`
    may name {labels}. `code` is the shape of a code: A is any letter, 0 any digit. `send` is `ids` (/v1/completions) or
    `chat` (text). `filler` names a text file, `filler_sha256` what it must be; without one prose is generated from `seed`.
    `tokenizer` names a tokenizer.json. `deadline_s` bounds one cell and must not be below `deadline_floor_s`; a prompt that
    is not scheduled for `stall_s` ends; the engine is looked at every `poll_s`.
    """

    needle: str
    question: str
    decoy: str = ""
    code: str = "AAAA-00000"
    decoys: int = 2
    positions: tuple[float, ...] = (0.5,)
    reserve: int = 64
    max_tokens: int = 0
    thinking: bool | None = None
    send: str = "ids"
    filler: str = ""
    filler_sha256: str = ""
    seed: int = 1
    tokenizer: str = ""
    deadline_s: float = 43200.0
    deadline_floor_s: float = 43200.0
    stall_s: float = 300.0
    poll_s: float = 5.0

    @property
    def budget(self) -> int:
        """Tokens that an answer may take."""
        return self.max_tokens or self.reserve


@dataclass(frozen=True, slots=True)
class Recipe:
    """One recipe file, checked. `sha256` is over the files it was read from, overlay included."""

    name: str
    about: str
    sha256: str
    sources: tuple[str, ...]
    rehearsal: bool
    wrapper: str
    profiles: tuple[tuple[str, str], ...]
    acceptance: tuple[tuple[str, tuple[str, ...]], ...]
    pins: Pins
    pin_labels: tuple[tuple[str, str], ...]
    inside: Inside
    asymmetry: Asymmetry
    weights: Weights
    preflight: Preflight
    behaviour: Mapping[str, float]
    folder: Path
    labels: tuple[tuple[str, str], ...]
    serve: Serve
    env: tuple[tuple[str, str], ...]
    env_absent: tuple[str, ...]
    passthrough: tuple[str, ...]
    noop_env: tuple[tuple[str, str], ...]
    knobs: tuple[Knob, ...]
    limits: tuple[Limit, ...]
    markers: tuple[Marker, ...]
    canaries: tuple[Canary, ...]
    launch: Launch
    brakes: Brakes
    watch: Watch
    compilation: str
    checks: Mapping[str, Mapping[str, Any]]

    def knob(self, name: str) -> Knob | None:
        return next((knob for knob in self.knobs if knob.name == name), None)

    def profile_of(self, mark: str) -> str:
        return dict(self.profiles).get(mark, "")

    def required(self, mark: str) -> tuple[str, ...]:
        return dict(self.acceptance).get(mark, ())

    def overlaid(self) -> bool:
        return any(source.endswith(".overlay.toml") for source in self.sources)


def find_recipe(name: str, folders: Sequence[Path]) -> Path:
    """The file of a recipe given by path or by name in one of the folders. Raises RECIPE_INVALID listing what there is."""
    if name.endswith(".toml"):
        path = Path(name)
        if path.is_file():
            return path
        raise ConfigError("RECIPE_INVALID", f"{name}: no such file")
    for folder in folders:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    known = sorted({path.stem for folder in folders for path in folder.glob("*.toml") if "." not in path.stem})
    raise ConfigError("RECIPE_INVALID", f"recipe {name!r} is not known, expected a path or one of {', '.join(known)}")


def load_recipe(path: Path) -> Recipe:
    """Read a recipe with what it extends and its overlay. Raises ConfigError (RECIPE_INVALID) with file and key."""
    data, sources = _read_chain(path)
    overlay = path.with_suffix(".overlay.toml")
    if overlay.is_file():
        data = _overlaid(data, _read_toml(overlay), str(overlay))
        sources = (*sources, overlay)
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
    return _recipe(data, str(path), digest, tuple(source.name for source in sources))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("RECIPE_INVALID", f"{path}: {error}") from error


def _read_chain(path: Path, depth: int = 0) -> tuple[dict[str, Any], tuple[Path, ...]]:
    data = _read_toml(path)
    base = data.pop("extends", None)
    if base is None:
        return data, (path,)
    if depth > 3 or not isinstance(base, str):
        raise ConfigError(
            "RECIPE_INVALID", f"{path}: extends must name a recipe beside it, at most 4 deep; found {base!r}"
        )
    below, sources = _read_chain(find_recipe(base, [path.parent]), depth + 1)
    return _merged(below, data), (*sources, path)


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key; anything else above replaces what is below."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        result[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return result


def _overlaid(data: dict[str, Any], overlay: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An overlay of measured values may add pins and labels, and never change one."""
    result = dict(data)
    for section, values in overlay.items():
        if section not in ("pins", "labels"):
            raise ConfigError("RECIPE_INVALID", f"{where}: an overlay may hold [pins] and [labels], found {section!r}")
        result[section] = dict(data.get(section, {}))
        for key, value in values.items():
            if result[section].get(key, "") not in ("", value):
                raise ConfigError(
                    "RECIPE_INVALID", f"{where}: {section}.{key} is {value!r}, the recipe pins {result[section][key]!r}"
                )
            result[section][key] = value
    return result


_TOP_KEYS = frozenset(
    [
        "schema",
        "name",
        "about",
        "engine",
        "rehearsal",
        "wrapper",
        "profiles",
        "acceptance",
        "pins",
        "pin_labels",
        "inside",
        "asymmetry",
        "weights",
        "preflight",
        "behaviour",
        "labels",
        "serve",
        "env",
        "env_absent",
        "passthrough",
        "noop_env",
        "knobs",
        "limit",
        "marker",
        "canary",
        "launch",
        "brakes",
        "watch",
        "compilation",
        "checks",
    ]
)


_LISTS_OF_TABLES = ("limit", "marker", "canary")
_LISTS_OF_TEXTS = ("env_absent", "passthrough")
_TABLES_OF_TABLES = ("knobs", "checks")
_TEXTS = ("name", "about", "engine", "wrapper", "compilation")


def _shaped(data: Mapping[str, Any], where: str) -> None:
    """Every key is known and of its kind: a table unless it is said above."""
    _known(data, _TOP_KEYS, where)
    for key, value in data.items():
        if key in ("schema", "rehearsal"):
            good, kind = type(value) in (int, bool), "a number or a truth value"
        elif key in _TEXTS:
            good, kind = isinstance(value, str), "a text"
        elif key in _LISTS_OF_TEXTS:
            good, kind = isinstance(value, list) and all(isinstance(one, str) for one in value), "a list of texts"
        elif key in _LISTS_OF_TABLES:
            good, kind = isinstance(value, list) and all(isinstance(one, dict) for one in value), "a list of tables"
        else:
            good, kind = isinstance(value, dict), "a table"
        if good and key in _TABLES_OF_TABLES:
            good, kind = all(isinstance(one, dict) for one in value.values()), "a table of tables"
        if not good:
            raise ConfigError("RECIPE_INVALID", f"{where}: {key} must be {kind}, found {value!r:.80}")


def _recipe(data: dict[str, Any], where: str, digest: str, sources: tuple[str, ...]) -> Recipe:
    _shaped(data, where)
    if data.get("schema") != 1:
        raise ConfigError("RECIPE_INVALID", f"{where}: schema must be 1, found {data.get('schema')!r}")
    recipe = Recipe(
        name=_text(data, "name", where),
        about=_text(data, "about", where),
        sha256=digest,
        sources=sources,
        rehearsal=bool(data.get("rehearsal", False)),
        wrapper=data.get("wrapper", "clean"),
        profiles=_strings(data.get("profiles", {}), f"{where}: profiles"),
        acceptance=_acceptance(_table(data, "acceptance", where), where),
        pins=_build(Pins, data.get("pins", {}), f"{where}: pins"),
        pin_labels=_strings(data.get("pin_labels", {}), f"{where}: pin_labels"),
        inside=_inside(_table(data, "inside", where), f"{where}: inside"),
        asymmetry=_asymmetry(_table(data, "asymmetry", where), f"{where}: asymmetry"),
        weights=_weights(_table(data, "weights", where), f"{where}: weights"),
        preflight=_preflight(_table(data, "preflight", where), f"{where}: preflight"),
        behaviour=_behaviour(_table(data, "behaviour", where), f"{where}: behaviour"),
        folder=Path(where).parent,
        labels=tuple(pair for pair in _strings(data.get("labels", {}), f"{where}: labels") if pair[1]),
        serve=_serve(data.get("serve", {}), f"{where}: serve"),
        env=_strings(data.get("env", {}), f"{where}: env"),
        env_absent=tuple(data.get("env_absent", ())),
        passthrough=tuple(data.get("passthrough", ())),
        noop_env=_strings(data.get("noop_env", {}), f"{where}: noop_env"),
        knobs=tuple(_knob(name, table, where) for name, table in data.get("knobs", {}).items()),
        limits=tuple(_limit(table, f"{where}: limit {n}") for n, table in enumerate(data.get("limit", ()), 1)),
        markers=tuple(_marker(table, f"{where}: marker {n}") for n, table in enumerate(data.get("marker", ()), 1)),
        canaries=tuple(_canary(table, f"{where}: canary {n}") for n, table in enumerate(data.get("canary", ()), 1)),
        launch=_build(Launch, data.get("launch", {}), f"{where}: launch"),
        brakes=_brakes(_table(data, "brakes", where), f"{where}: brakes"),
        watch=_watch(_table(data, "watch", where), f"{where}: watch"),
        compilation=data.get("compilation", ""),
        checks=data.get("checks", {}),
    )
    _check_names(recipe, where)
    if "needle" in recipe.checks:
        needle_of(recipe.checks["needle"], f"{where}: checks.needle")
    return recipe


def _table(data: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError("RECIPE_INVALID", f"{where}: {key} must be a table, found {value!r}")
    return value


def _acceptance(table: Mapping[str, Any], where: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The required checks of each mark: lists of ids, each of the form NAME or LANE.NAME."""
    for mark, checks in table.items():
        if not isinstance(checks, list) or not all(isinstance(c, str) and CHECK_ID.fullmatch(c) for c in checks):
            raise ConfigError(
                "RECIPE_INVALID", f"{where}: acceptance.{mark} must be a list of check ids, found {checks!r}"
            )
    return tuple((mark, tuple(checks)) for mark, checks in table.items())


def _known(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(
                "RECIPE_INVALID", f"{where}: unknown key {key!r}, expected one of {', '.join(sorted(known))}"
            )


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError("RECIPE_INVALID", f"{where}: {key} must be a text, found {value!r}")
    return value


def _strings(table: Mapping[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    for key, value in table.items():
        if not isinstance(value, str):
            raise ConfigError("RECIPE_INVALID", f"{where}.{key} must be a text, found {value!r}")
    return tuple(table.items())


def _build(kind: type[_T], table: Mapping[str, Any], where: str) -> _T:
    """A flat dataclass of texts, numbers and truth values out of a TOML table, types checked against its defaults."""
    names = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    _known(table, names, where)
    for key, value in table.items():
        default = names[key].default
        if isinstance(default, (bool, int, float, str)) and not _like(value, default):
            kind_name = type(default).__name__
            raise ConfigError("RECIPE_INVALID", f"{where}: {key} must be {kind_name}, found {value!r}")
    try:
        return kind(**table)
    except TypeError as error:
        raise ConfigError("RECIPE_INVALID", f"{where}: {error}") from error


def _like(value: Any, default: Any) -> bool:
    """A number may be whole where a fraction is the default; a truth value is no number."""
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(default)


def _watch(table: Mapping[str, Any], where: str) -> Watch:
    for key, value in table.items():
        unit, least, most = ("watts", 0.0, 2000.0) if key == "spin_w" else ("seconds", 0.5, 3600.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            what = f"{key} must be {unit} from {least:g} to {most:g}, found {value!r}"
            raise ConfigError("RECIPE_INVALID", f"{where}: {what}")
    return _build(Watch, table, where)


def _brakes(table: Mapping[str, Any], where: str) -> Brakes:
    """Limits between what would never and what would always brake; a mistyped unit is refused here."""
    for key, least, most in (("least_free_memory_gib", 0.0, 1024.0), ("most_temperature_c", 30.0, 150.0)):
        value = table.get(key, most / 2)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and least < value < most):
            raise ConfigError(
                "RECIPE_INVALID", f"{where}: {key} must be a number above {least:g} and below {most:g}, found {value!r}"
            )
    return _build(Brakes, table, where)


def _groups(value: Any, where: str) -> tuple[tuple[str, ...], ...]:
    if not isinstance(value, list) or not all(
        isinstance(g, list) and all(isinstance(t, str) for t in g) for g in value
    ):
        raise ConfigError("RECIPE_INVALID", f"{where} must be a list of lists of texts")
    return tuple(tuple(group) for group in value)


def _serve(table: dict[str, Any], where: str) -> Serve:
    options = tuple((k, tuple(v) if isinstance(v, list) else str(v)) for k, v in table.get("options", {}).items() if v)
    plain = {key: value for key, value in table.items() if key != "options"}
    for key in ("argv", "argv_head", "argv_worker"):
        if key in plain:
            plain[key] = _groups(plain[key], f"{where}.{key}")
    for key in ("mounts", "process", "host_keys"):
        plain[key] = tuple(plain.get(key, ()))
    return _build(Serve, plain | {"options": options}, where)


def _inside(table: dict[str, Any], where: str) -> Inside:
    lists: dict[str, Any] = {
        key: _list(table[key], f"{where}.{key}") for key in ("paths", "libraries", "files", "hashed") if key in table
    }
    return _build(Inside, table | lists, where)


def _weights(table: dict[str, Any], where: str) -> Weights:
    return _build(Weights, {**table, "config": tuple(sorted(_table(table, "config", where).items()))}, where)


def _preflight(table: dict[str, Any], where: str) -> Preflight:
    required = _list(table.get("required", []), f"{where}.required")
    for name in required:
        if name not in PREFLIGHT_CHECKS:
            known = ", ".join(sorted(PREFLIGHT_CHECKS))
            raise ConfigError("RECIPE_INVALID", f"{where}.required: {name!r} is no look, expected some of {known}")
    return _build(Preflight, {**table, "required": required}, where)


def _behaviour(table: dict[str, Any], where: str) -> dict[str, float]:
    """Tolerances that take the place of the frozen spread's: `mean` and `single`, in units of log probability."""
    _known(table, ("mean", "single"), where)
    for key, value in table.items():
        if not _like(value, 0.0) or not value > 0:
            raise ConfigError("RECIPE_INVALID", f"{where}.{key} must be a number above 0, found {value!r}")
    return table


def _list(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError("RECIPE_INVALID", f"{where} must be a list of texts, found {value!r}")
    return tuple(value)


def _asymmetry(table: dict[str, Any], where: str) -> Asymmetry:
    for key, value in table.items():
        if value not in ("error", "record"):
            raise ConfigError("RECIPE_INVALID", f"{where}.{key} must be error or record, found {value!r}")
    return _build(Asymmetry, table, where)


def _knob(name: str, table: dict[str, Any], where: str) -> Knob:
    where = f"{where}: knobs.{name}"
    knob = _build(Knob, {**table, "name": name, "choices": tuple(table.get("choices", ()))}, where)
    if knob.type not in KNOB_TYPES:
        raise ConfigError(
            "RECIPE_INVALID", f"{where}: type must be one of {', '.join(KNOB_TYPES)}, found {knob.type!r}"
        )
    if knob.use not in ("argv", "record", "experimental"):
        raise ConfigError("RECIPE_INVALID", f"{where}: use must be argv, record or experimental, found {knob.use!r}")
    return knob


def _conditions(table: Mapping[str, Any], where: str) -> tuple[Condition, ...]:
    return tuple(_build(Condition, {"knob": name, **test}, f"{where}: {name}") for name, test in table.items())


def _limit(table: dict[str, Any], where: str) -> Limit:
    _known(table, ("when", "effect", "reason"), where)
    if table.get("effect") not in ("refuse", "unpublishable", "warn"):
        raise ConfigError("RECIPE_INVALID", f"{where}: effect must be refuse, unpublishable or warn")
    return Limit(_conditions(table.get("when", {}), where), table["effect"], _text(table, "reason", where))


def _marker(table: dict[str, Any], where: str) -> Marker:
    where = f"{where} ({table.get('name', '?')})"
    if table.get("kind") not in ("required", "forbidden") or table.get("ranks", "all") not in ("all", "head", "worker"):
        raise ConfigError("RECIPE_INVALID", f"{where}: kind must be required or forbidden; ranks all, head or worker")
    ready = {key: tuple(table.get(key, ())) for key in ("match", "no_match")}
    ready |= {key: _conditions(table.get(key, {}), where) for key in ("when", "observable")}
    marker = _build(Marker, {**table, **ready, "pattern": _pattern(_text(table, "pattern", where), where)}, where)
    if marker.pattern.search(""):
        raise ConfigError(
            "RECIPE_INVALID", f"{where}: pattern {marker.pattern.pattern!r} matches an empty line, so it proves nothing"
        )
    if not marker.match:
        raise ConfigError("RECIPE_INVALID", f"{where}: expected at least one real line that the pattern must match")
    for line, wanted in [(line, True) for line in marker.match] + [(line, False) for line in marker.no_match]:
        if bool(marker.pattern.search(line)) is not wanted:
            verb = "match" if wanted else "not match"
            raise ConfigError("RECIPE_INVALID", f"{where}: pattern {marker.pattern.pattern!r} must {verb} {line!r}")
    return marker


def _pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError("RECIPE_INVALID", f"{where}: pattern {text!r}: {error}") from error


def _canary(table: dict[str, Any], where: str) -> Canary:
    if table.get("kind") not in ("exact", "number", "code", "json", "tool"):
        raise ConfigError(
            "RECIPE_INVALID", f"{where}: kind must be exact, number, code, json or tool, found {table.get('kind')!r}"
        )
    expect_json = tuple(sorted(table.get("expect_json", {}).items()))
    canary = _build(Canary, {**table, "expect_json": expect_json}, where)
    needed = {"json": bool(canary.expect_json), "tool": bool(canary.tool and (canary.expect or canary.expect_json))}
    if not needed.get(canary.kind, bool(canary.expect)):
        raise ConfigError("RECIPE_INVALID", f"{where}: a {canary.kind} canary without what it expects proves nothing")
    if canary.kind == "number" and not re.fullmatch(r"-?\d+(\.\d+)?", canary.expect):
        raise ConfigError("RECIPE_INVALID", f"{where}: expect must be a number, found {canary.expect!r}")
    return canary


def needle_of(table: Mapping[str, Any], where: str) -> Needle:
    """The options of the needle lane, checked. Raises RECIPE_INVALID."""
    given = table.get("positions", ())
    lists = (
        {"positions": tuple(given) if isinstance(given, (list, tuple)) else (given,)} if "positions" in table else {}
    )
    needle = _build(Needle, {**table, **lists}, where)
    for good, text in _needle_rules(needle):
        if not good:
            raise ConfigError("RECIPE_INVALID", f"{where}: {text}")
    return needle


def _needle_rules(needle: Needle) -> Iterator[tuple[bool, str]]:
    told = isinstance(needle.needle, str) and isinstance(needle.question, str)
    yield told, f"needle and question must be texts, found {needle.needle!r} and {needle.question!r}"
    yield "{code}" in needle.needle, f"needle must hold {{code}}, found {needle.needle!r}"
    yield bool(needle.question.strip()), "question must be a text"
    yield (
        bool(re.search("0", needle.code)),
        f"code must hold a digit (0), or it could stand in prose; found {needle.code!r}",
    )
    yield needle.send in ("ids", "chat"), f"send must be ids or chat, found {needle.send!r}"
    known = all(isinstance(share, (int, float)) and 0 <= share <= 1 for share in needle.positions)
    yield len(needle.positions) > 0, "positions must name at least one needle"
    yield (
        known and 0 < len(needle.positions) + needle.decoys <= 12,
        "positions are shares from 0 to 1, at most 12 with decoys",
    )
    apart = needle.decoys == 0 or "{label}" in needle.needle or needle.decoy not in ("", needle.needle)
    yield apart, "decoys need a needle with {label}, or a decoy sentence of their own"
    yield needle.decoys == 0 or "{code}" in (needle.decoy or needle.needle), "decoy must hold {code}"
    yield len(needle.positions) == 1 or "{labels}" in needle.question, "several needles need a question with {labels}"
    yield needle.reserve > 0 <= needle.max_tokens, f"reserve must be above 0, found {needle.reserve}"
    yield (
        needle.max_tokens <= needle.reserve,
        f"max_tokens is {needle.max_tokens}, more than the reserve of {needle.reserve}",
    )
    yield (
        needle.deadline_s >= needle.deadline_floor_s,
        f"deadline_s is {needle.deadline_s:g}, the floor is {needle.deadline_floor_s:g}: a cell that is given up halfway costs all of it",
    )
    yield needle.stall_s > 0 < needle.poll_s, "stall_s and poll_s must be above 0"
    yield not needle.filler or bool(needle.filler_sha256), "filler needs filler_sha256"


def placeholders(text: str) -> Iterator[str]:
    """The names of the `{placeholders}` in a template, in order."""
    return (match.group(1) for match in PLACEHOLDER.finditer(text))


def _templates(recipe: Recipe) -> Iterator[str]:
    serve = recipe.serve
    for group in (*serve.argv, *serve.argv_head, *serve.argv_worker, serve.process, serve.mounts, recipe.inside.paths):
        yield from group
    yield from (serve.image, serve.served_model, *dict(recipe.env).values())


def _check_names(recipe: Recipe, where: str) -> None:
    """Each placeholder is a knob or a name of the plan, and each knob for the argv is used by one."""
    used = {name for template in _templates(recipe) for name in placeholders(template)}
    knobs = {knob.name for knob in recipe.knobs}
    for name in sorted(used - knobs - PLAN_NAMES):
        raise ConfigError(
            "RECIPE_INVALID",
            f"{where}: placeholder {{{name}}} is neither a knob nor one of {', '.join(sorted(PLAN_NAMES))}",
        )
    for knob in recipe.knobs:
        if knob.use == "argv" and knob.name not in used:
            raise ConfigError("RECIPE_INVALID", f"{where}: knob {knob.name} is used by no argv, environment or image")
    named = {condition.knob.split(".")[0] for limit in recipe.limits for condition in limit.when}
    for name in sorted(named - knobs):
        raise ConfigError("RECIPE_INVALID", f"{where}: limit on {name}, which is no knob")
    _check_pins(recipe, where)
    if recipe.wrapper not in ("clean", "any"):
        raise ConfigError("RECIPE_INVALID", f"{where}: wrapper must be clean or any, found {recipe.wrapper!r}")


def _check_pins(recipe: Recipe, where: str) -> None:
    """A pin that nothing could ever show would be no pin."""
    by_label, pins = dict(recipe.pin_labels), recipe.pins
    _known(by_label, ("package", "integrated_vllm", "source_revision", "model_revision"), f"{where}: pin_labels")
    ways = {
        "integrated_vllm": ("a label under pin_labels", bool(by_label.get("integrated_vllm"))),
        "source_revision": ("a label under pin_labels", bool(by_label.get("source_revision"))),
        "model_revision": ("model_marker or a label", bool(pins.model_marker or by_label.get("model_revision"))),
        "freeze": ("freeze_sha256", bool(pins.freeze_sha256)),
        "freeze_sha256": ("freeze", bool(pins.freeze)),
        "manifest_sha256": ("manifest_target", bool(pins.manifest_target)),
    }
    for name, (needed, there) in ways.items():
        if getattr(pins, name) and not there:
            raise ConfigError("RECIPE_INVALID", f"{where}: pins.{name} can be read nowhere, it needs {needed}")
    if pins.id_kind not in ("config", "manifest", "bundle"):
        raise ConfigError(
            "RECIPE_INVALID", f"{where}: pins.id_kind must be config, manifest or bundle, found {pins.id_kind!r}"
        )
