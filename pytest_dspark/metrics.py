"""/metrics text to numbers, or "unavailable, because". An unknown counter is None with a reason, never 0.

On prometheus_client's parser, which reads labels with spaces, commas and escapes, time stamps and exponents. `_created`
samples are dropped: they are dates beside the counters, not counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# One figure under its new name and the older ones.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "vllm:kv_cache_usage_perc": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "vllm:gpu_cache_usage_perc": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
CACHE_INFO = "vllm:cache_config_info"
START_TIME = "process_start_time_seconds"
_WHOLE = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, or None with the reason why there is none. Unmeasured is never 0."""

    value: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the text."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """One reading. `problem` says why there are no samples; empty if there are."""

    samples: tuple[Sample, ...]
    problem: str = ""
    _by_name: dict[str, list[Sample]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for sample in self.samples:
            self._by_name.setdefault(sample.name, []).append(sample)

    def find(self, name: str, **labels: str) -> tuple[Sample, ...]:
        """The samples of that name (old, new, with or without `_total`: the first that is there) with those labels."""
        found = next((self._by_name[known] for known in _names(name) if known in self._by_name), [])
        return tuple(sample for sample in found if labels.items() <= sample.labels.items())

    def figure(self, name: str, **labels: str) -> Figure:
        """The sum over all engines and labels (a share, `…_perc`: the fullest engine), or None with the reason."""
        return _total(name, self.find(name, **labels), self.problem)

    def value(self, name: str, **labels: str) -> float | None:
        """`figure` without the reason."""
        return self.figure(name, **labels).value

    def per_engine(self, name: str) -> dict[str, Figure]:
        """The figure of each engine, by its `engine` label; a server without that label is engine ""."""
        found = self.find(name)
        engines = sorted({sample.labels.get("engine", "") for sample in found})
        return {
            engine: _total(name, tuple(one for one in found if one.labels.get("engine", "") == engine), "")
            for engine in engines
        }

    def label(self, info: str, key: str) -> str | None:
        """A label of an info metric (`vllm:cache_config_info`); None if it is not there, empty, or says "None"."""
        found = [sample.labels[key] for sample in self.find(info) if key in sample.labels]
        return found[0] if found and found[0] not in ("", "None") else None

    @property
    def kv_pool(self) -> Figure:
        """The KV pool in tokens as advertised, of the smallest engine, since one prompt must fit one engine.

        Only the label `kv_cache_size_tokens` counts. Blocks times block size is never used: the label's block may be
        another unit (DeepSeek V4 advertises 4 where 256 was asked for).
        """
        if self.problem:
            return Figure(None, self.problem)
        texts = [sample.labels.get("kv_cache_size_tokens", "") for sample in self.find(CACHE_INFO)]
        if not texts:
            return Figure(None, f"the server has no {CACHE_INFO}")
        sizes = [whole(text) for text in texts]
        if not all(sizes):
            return Figure(None, f"label kv_cache_size_tokens is {', '.join(repr(text[:40]) for text in texts)}")
        return Figure(min(size for size in sizes if size))

    @property
    def kv_pool_tokens(self) -> int | None:
        """`kv_pool` without the reason."""
        value = self.kv_pool.value
        return None if value is None else int(value)


def read_metrics(text: str, *, problem: str = "") -> Metrics:
    """Parse one reading. HTML, nothing, or what the parser refuses is unavailable with the reason."""
    reason = problem or _not_metrics(text)
    if reason:
        return Metrics((), reason)
    try:
        samples = tuple(_samples(text.replace("\r\n", "\n").replace("\r", "\n")))
    except (ValueError, LookupError, TypeError) as error:  # what the parser raises for broken lines
        return Metrics((), f"not Prometheus text: {str(error)[:200]}")
    return Metrics(samples, "" if samples else "the text holds no sample")


def whole(text: str) -> int | None:
    """The number that up to 18 decimal digits say; None for any other text, which no server counts tokens with."""
    return int(text) if _WHOLE.fullmatch(text) else None


def delta(before: Metrics, after: Metrics, name: str, **labels: str) -> Figure:
    """What a counter grew by between two readings, or None: unknown in one of them, or the server was restarted."""
    old, new = before.figure(name, **labels), after.figure(name, **labels)
    if old.value is None or new.value is None:
        return Figure(None, f"before: {old.reason}" if old.value is None else f"after: {new.reason}")
    reason = restarted(before, after) or _went_back(before, after, name)
    return Figure(None, reason) if reason else Figure(new.value - old.value)


def restarted(before: Metrics, after: Metrics) -> str:
    """Why the two readings cannot be of one server's life; empty if its start time did not change or is not told."""
    old, new = before.value(START_TIME), after.value(START_TIME)
    if old is not None and new is not None and old != new:
        return f"server restarted: {START_TIME} went from {old!r} to {new!r}"
    return ""


def _went_back(before: Metrics, after: Metrics, name: str) -> str:
    """Every label set for itself, so that one engine's growth does not hide another one's restart."""
    new = {tuple(sorted(sample.labels.items())): sample.value for sample in after.find(name)}
    for sample in before.find(name):
        value = new.get(tuple(sorted(sample.labels.items())))
        if value is None or value < sample.value:
            return (
                f"server restarted: {name} went from {sample.value:g} to {'nothing' if value is None else f'{value:g}'}"
            )
    return ""


def _total(name: str, found: tuple[Sample, ...], problem: str) -> Figure:
    if problem or not found:
        return Figure(None, problem or f"the server has no {name}")
    if len({tuple(sorted(sample.labels.items())) for sample in found}) < len(found):
        return Figure(None, f"{name} is there twice with the same labels")
    values = [sample.value for sample in found]
    if not all(map(math.isfinite, values)):
        return Figure(None, f"{name} is not a number")
    return Figure(max(values) if name.endswith("_perc") else math.fsum(values))


def _names(name: str) -> tuple[str, ...]:
    if name in ALIASES:
        return ALIASES[name]
    return (name, name.removesuffix("_total")) if name.endswith("_total") else (name, f"{name}_total")


def _not_metrics(text: str) -> str:
    start = text.lstrip("\ufeff \t\r\n")[:1]
    if not start:
        return "the server sent nothing"
    return f"not Prometheus text: it begins with {start!r}" if start in "<{[" else ""


def _samples(text: str) -> Iterator[Sample]:
    from prometheus_client.parser import text_string_to_metric_families  # only who asks a server needs it

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                yield Sample(sample.name, sample.labels, sample.value)
