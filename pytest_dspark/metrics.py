"""/metrics text to numbers, or "unavailable, because". An unknown counter is None with a reason, never 0."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

# One figure under its old and its new name.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "vllm:kv_cache_usage_perc": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
CACHE_INFO = "vllm:cache_config_info"


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

    def value(self, name: str) -> float | None:
        """The sum over all engines and labels; None if the name is not there or any value is not a number."""
        names = ALIASES.get(name, (name,))
        values = [sample.value for sample in self.samples if sample.name in names]
        return sum(values) if values and all(math.isfinite(value) for value in values) else None

    def label(self, name: str, key: str) -> str | None:
        """A label of an info-style metric, None if it is not there or says "None"."""
        found = [sample.labels[key] for sample in self.samples if sample.name == name and key in sample.labels]
        return found[0] if found and found[0] != "None" else None

    @property
    def kv_pool_tokens(self) -> int | None:
        """The KV pool in tokens as advertised; never derived from blocks, whose label may be another unit."""
        text = self.label(CACHE_INFO, "kv_cache_size_tokens")
        return int(text) if text and text.isdecimal() else None


def read_metrics(text: str, *, problem: str = "") -> Metrics:
    """Parse one reading. HTML, nothing, or what the parser refuses is unavailable with the reason."""
    if problem or not text.strip():
        return Metrics((), problem or "the server sent nothing")
    try:
        samples = tuple(_samples(text.replace("\r\n", "\n")))
    except ValueError as error:
        return Metrics((), f"not Prometheus text: {str(error)[:200]}")
    return Metrics(samples, "" if samples else "the text holds no sample")


def _samples(text: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                yield Sample(sample.name, sample.labels, sample.value)
