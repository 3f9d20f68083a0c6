"""The numbers of the engine, and the text that /metrics answers: names, labels and buckets as vLLM 0.26 has them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from argv import Settings

_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
_LONG = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_STEP = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
REASONS = ("stop", "length", "abort", "error", "repetition")
HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "request_prompt_tokens": _COUNTS,
    "request_generation_tokens": _COUNTS,
    "iteration_tokens_total": _STEP,
    "request_max_num_generation_tokens": _COUNTS,
    "request_params_n": (1.0, 2.0, 5.0, 10.0, 20.0),
    "request_params_max_tokens": _COUNTS,
    "time_to_first_token_seconds": _FIRST,
    "inter_token_latency_seconds": _GAP,
    "request_time_per_output_token_seconds": _GAP,
    "e2e_request_latency_seconds": _LONG,
    "request_queue_time_seconds": _LONG,
    "request_inference_time_seconds": _LONG,
    "request_prefill_time_seconds": _LONG,
    "request_decode_time_seconds": _LONG,
    "request_prefill_kv_computed_tokens": _COUNTS,
}


@dataclass(slots=True)
class Histogram:
    """Counts by bucket, each including those below."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    number: int = 0

    def observe(self, value: float) -> None:
        self.counts = self.counts or [0] * len(self.bounds)
        self.total, self.number = self.total + value, self.number + 1
        for at, bound in enumerate(self.bounds):
            if value <= bound:
                self.counts[at] += 1


@dataclass(slots=True)
class Numbers:
    """Everything that /metrics tells, except what the configuration says."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    http: dict[tuple[str, str, str], int] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=lambda: {n: Histogram(b) for n, b in HISTOGRAMS.items()})
    created: float = field(default_factory=time.time)

    def observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    def draft(self, k: int, accepted: int) -> None:
        """One step of one sequence with k draft tokens, of which the first `accepted` were right."""
        self.accepted_at = self.accepted_at or [0] * k
        self.drafts, self.draft_tokens, self.accepted = self.drafts + 1, self.draft_tokens + k, self.accepted + accepted
        for at in range(accepted):
            self.accepted_at[at] += 1


class _Page:
    """Lines of the exposition format; every sample has the engine and the model as labels."""

    def __init__(self, numbers: Numbers, model: str) -> None:
        self._created = numbers.created
        self.own = {"engine": "0", "model_name": model}
        self.lines: list[str] = []

    def family(
        self, name: str, kind: str, samples: Sequence[tuple[str, Mapping[str, str], float]], about: str = ""
    ) -> None:
        self.lines += [f"# HELP {name} {about or name.rpartition(':')[2].replace('_', ' ')}", f"# TYPE {name} {kind}"]
        self.lines += [f"{name}{suffix}{_labels(labels)} {_spelled(value)}" for suffix, labels, value in samples]

    def counter(self, name: str, samples: Mapping[str, float], label: str = "") -> None:
        """`samples` by the value of `label`. Each counter has its `_created` sibling, the time it began."""
        rows = [(self.own | ({label: key} if label else {}), value) for key, value in samples.items()]
        self.family(f"vllm:{name}_total", "counter", [("", labels, value) for labels, value in rows])
        self.family(f"vllm:{name}_created", "gauge", [("", labels, self._created) for labels, _ in rows])

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self.family(f"vllm:{name}", "gauge", [("", self.own | labels, value)])

    def histogram(self, name: str, found: Histogram, most: float) -> None:
        rows: list[tuple[str, Mapping[str, str], float]] = []
        for at, bound in enumerate(found.bounds):
            if found.bounds is not _COUNTS or bound <= most:
                rows.append(("_bucket", self.own | {"le": _spelled(bound)}, found.counts[at] if found.counts else 0))
        rows.append(("_bucket", self.own | {"le": "+Inf"}, found.number))
        rows += [("_count", self.own, found.number), ("_sum", self.own, found.total)]
        self.family(f"vllm:{name}", "histogram", rows)
        self.family(f"vllm:{name}_created", "gauge", [("", self.own, self._created)])


def page(numbers: Numbers, settings: Settings, pool: int) -> str:
    """The text of /metrics."""
    out = _Page(numbers, settings.served_model_name)
    _process(out, numbers)
    if settings.k:
        _speculation(out, numbers, settings.k)
    _state(out, numbers, pool)
    _tokens(out, numbers)
    for name, found in numbers.histograms.items():
        out.histogram(name, found, settings.max_model_len)
    out.family("vllm:cache_config_info", "gauge", [("", cache_labels(settings, pool), 1.0)])
    rows = [("", {"handler": h, "method": m, "status": s}, float(n)) for (h, m, s), n in numbers.http.items()]
    out.family("http_requests_total", "counter", rows)
    out.family("http_requests_created", "gauge", [("", labels, numbers.created) for _, labels, _ in rows])
    return "\n".join(out.lines) + "\n"


def _process(out: _Page, numbers: Numbers) -> None:
    python = {"implementation": "CPython", "major": "3", "minor": "12", "patchlevel": "3", "version": "3.12.3"}
    out.family("python_info", "gauge", [("", python, 1.0)])
    out.family("process_start_time_seconds", "gauge", [("", {}, numbers.created)])
    out.family("process_cpu_seconds_total", "counter", [("", {}, sum(os.times()[:2]))])


def _speculation(out: _Page, numbers: Numbers, k: int) -> None:
    out.counter("spec_decode_num_drafts", {"": numbers.drafts})
    out.counter("spec_decode_num_draft_tokens", {"": numbers.draft_tokens})
    out.counter("spec_decode_num_accepted_tokens", {"": numbers.accepted})
    at = numbers.accepted_at or [0] * k
    by_position = {str(position): float(count) for position, count in enumerate(at)}
    out.counter("spec_decode_num_accepted_tokens_per_pos", by_position, "position")


def _state(out: _Page, numbers: Numbers, pool: int) -> None:
    out.gauge("num_requests_running", numbers.running)
    out.gauge("num_requests_waiting", numbers.waiting)
    own = out.own
    reasons = [("", own | {"reason": "capacity"}, float(numbers.waiting)), ("", own | {"reason": "deferred"}, 0.0)]
    out.family("vllm:num_requests_waiting_by_reason", "gauge", reasons)
    states = [
        ("", own | {"sleep_state": name}, on)
        for name, on in (("awake", 1.0), ("weights_offloaded", 0.0), ("discard_all", 0.0))
    ]
    out.family("vllm:engine_sleep_state", "gauge", states)
    out.gauge("kv_cache_usage_perc", min(1.0, numbers.kv_tokens / pool) if pool else 0.0)


def _tokens(out: _Page, numbers: Numbers) -> None:
    for name, value in (("prefix_cache_queries", numbers.prefix_queries), ("prefix_cache_hits", numbers.prefix_hits)):
        out.counter(name, {"": value})
        out.counter(f"external_{name}", {"": 0})
    out.counter("mm_cache_queries", {"": 0})
    out.counter("mm_cache_hits", {"": 0})
    out.counter("num_preemptions", {"": numbers.preemptions})
    out.counter("prompt_tokens", {"": numbers.prompt_tokens})
    computed = numbers.prompt_tokens - numbers.cached_tokens
    by_source = {"local_compute": computed, "local_cache_hit": numbers.cached_tokens, "external_kv_transfer": 0}
    out.counter("prompt_tokens_by_source", by_source, "source")
    out.counter("prompt_tokens_cached", {"": numbers.cached_tokens})
    out.counter("generation_tokens", {"": numbers.generation_tokens})
    out.counter("request_success", {key: float(value) for key, value in numbers.finished.items()}, "finished_reason")


def cache_labels(settings: Settings, pool: int) -> dict[str, str]:
    """The cache's configuration. For this model the block size label says 4 at --block-size 256, as the real one does."""
    return {
        "_block_size_resolved": "True",
        "block_size": str(max(1, settings.block_size // 64)),
        "cache_dtype": settings.kv_cache_dtype,
        "calculate_kv_scales": "False",
        "enable_prefix_caching": str(settings.enable_prefix_caching),
        "engine": "0",
        "gpu_memory_utilization": str(settings.gpu_memory_utilization),
        "is_attention_free": "False",
        "kv_cache_dtype_skip_layers": "[]",
        "kv_cache_max_concurrency": str(pool / settings.max_model_len),
        "kv_cache_memory_bytes": str(settings.kv_cache_memory_bytes),
        "kv_cache_size_tokens": str(pool),
        "kv_offloading_backend": "native",
        "kv_offloading_size": "None",
        "kv_sharing_fast_prefill": "False",
        "num_cpu_blocks": "None",
        "num_gpu_blocks": str(pool // 16),
        "num_gpu_blocks_override": "None",
        "prefix_caching_hash_algo": "sha256",
        "prefix_match_unit": "None",
        "sliding_window": "None",
        "user_specified_block_size": "True",
    }


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in sorted(labels.items())) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _spelled(value: float) -> str:
    """A number as the Prometheus client spells it: 68.0, 1.7960115020271106e+09."""
    text = repr(float(value))
    dot = text.find(".")
    if value > 0 and dot > 6 and "e" not in text:
        return f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.") + f"e+{dot - 1:02d}"
    return text
