"""The KV pool: how many tokens it holds, and which prefixes are in it.

Size in tokens, from `--max-num-batched-tokens` b, the memory share u, and the pinned bytes B:

    auto    (1,253,213 - 74.61 (b - 8192)) (u - 0.70) / 0.18
    pinned  156,000 (B / 15,998,753,178) auto(b, 0.88) / auto(16384, 0.88)

Measured on two GB10: auto 1,253,213 at 8192 and about 642,000 at 16384 (u = 0.88); pinned 156,000 at 16384; no start at 32768.
Between and beyond these points it is an invention: it falls with b and grows with u and B. It does not depend on the window
or on the number of sequences.
"""

from __future__ import annotations

import zlib
from array import array

from argv import Settings

_AUTO, _AUTO_16K, _PINNED, _PINNED_BYTES = 1_253_213, 642_000, 156_000, 15_998_753_178
_SLOPE = (_AUTO - _AUTO_16K) / 8192
NO_START = 32768


def _auto(batched: int) -> float:
    return _AUTO - _SLOPE * (batched - 8192)


def pool_tokens(settings: Settings) -> int:
    """Tokens that the pool holds; 0 where the engine does not start."""
    if settings.max_num_batched_tokens >= NO_START:
        return 0
    batched = settings.max_num_batched_tokens
    if settings.kv_cache_memory_bytes is not None:
        size = _PINNED * settings.kv_cache_memory_bytes / _PINNED_BYTES * _auto(batched) / _AUTO_16K
    else:
        size = _auto(batched) * (settings.gpu_memory_utilization - 0.70) / 0.18
    tokens = round(size)
    return tokens if tokens >= settings.block_size else 0


class PrefixCache:
    """Whole blocks of tokens that were computed, by their content and all before it. The oldest go first."""

    def __init__(self, block: int, pool: int, *, enabled: bool) -> None:
        self._block, self._most, self._enabled = block, max(1, pool // block), enabled
        self._known: dict[tuple[int, int], None] = {}

    def _keys(self, ids: array[int]) -> list[tuple[int, int]]:
        """One key a whole block: two checksums chained from the first token on."""
        raw, width = memoryview(ids).cast("B"), ids.itemsize * self._block
        keys, first, second = [], 1, 0
        for end in range(width, len(raw) + 1, width):
            part = raw[end - width : end]
            first, second = zlib.adler32(part, first), zlib.crc32(part, second)
            keys.append((first, second))
        return keys

    def hits(self, ids: array[int]) -> int:
        """Tokens of the longest known prefix; the last token of a prompt is always computed."""
        count = 0
        for key in self._keys(ids) if self._enabled else ():
            if key not in self._known:
                break
            self._known[key] = self._known.pop(key)
            count += 1
        return min(count, (len(ids) - 1) // self._block) * self._block

    def add(self, ids: array[int]) -> None:
        for key in self._keys(ids) if self._enabled else ():
            self._known.pop(key, None)
            self._known[key] = None
        while len(self._known) > self._most:
            self._known.pop(next(iter(self._known)))
