"""What guidellm takes of torch: a loop over its prompts. It stands in site-packages as `torch`, which would be gigabytes.

guidellm neither sends, stamps nor reads with torch; without this file it would want the CUDA build wherever pip prefers that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class IterableDataset(Generic[Item]):
    """A base class and nothing more."""


class DataLoader(Generic[Item]):
    """The items one at a time, in this process, each as a batch of one."""

    def __init__(self, dataset: Iterable[Item], *, collate_fn: Callable[[list[Item]], Any], **_: Any) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __iter__(self) -> Iterator[Any]:
        return (self.collate_fn([item]) for item in self.dataset)


def get_worker_info() -> None:
    """There are no workers."""


def _module(name: str, **held: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(held)
    sys.modules[name] = made
    return made


_dataloader = _module("torch.utils.data.dataloader", DataLoader=DataLoader)
_dataset = _module("torch.utils.data.dataset", IterableDataset=IterableDataset)
_data = _module("torch.utils.data", dataloader=_dataloader, dataset=_dataset, get_worker_info=get_worker_info)
utils = _module("torch.utils", data=_data)
