"""`vllm bench serve` without the engine: the command's own code, with stand-ins for what only a server or a model uses.

vLLM's package imports torch, several GB, from its first line on. Its benchmark needs none of it: requests, stamps, parsing
and figures are vllm.benchmarks on aiohttp, and run here as they are. What is named below can be imported and does nothing.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HOLLOW = (
    *("torch", "torchvision", "torchaudio", "triton", "xgrammar", "llguidance"),
    *(
        "vllm.env_override",
        "vllm.utils.torch_utils",
        "vllm.config",
        "vllm.distributed",
        "vllm.inputs",
        "vllm.lora",
        "vllm.model_executor",
        "vllm.multimodal",
        "vllm.platforms",
    ),
)


class Hollow(type):
    """A class whose every attribute and operation is such a class again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __add__ = __getitem__ = __or__


class Nothing(metaclass=Hollow):
    """Takes every call; as a decorator it leaves what it decorates as it is."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *given: Any, **_: object) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __bool__(self) -> bool:
        return False


class HollowModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Hollow(name, (Nothing,), {})
        setattr(self, name, made)
        return made


class Finder(MetaPathFinder, Loader):
    """Finds every module in or below one of HOLLOW."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        hollow = any(f"{name}.".startswith(f"{one}.") for one in HOLLOW)
        return ModuleSpec(name, self, is_package=True) if hollow else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return HollowModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def main() -> None:
    from transformers.utils import is_torch_available

    is_torch_available()  # looked for once, before the finder pretends: transformers too shall know that there is none
    sys.meta_path.insert(0, Finder())
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())


if __name__ == "__main__":
    main()
