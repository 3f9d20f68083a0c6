"""What a compilation config comes to: CUDA graphs as asked, as resolved, and when the engine refuses to start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from argv import Settings
from faults import Faults

CODES = {"NONE": "0", "PIECEWISE": "1", "FULL": "2", "FULL_DECODE_ONLY": "(2, 0)", "FULL_AND_PIECEWISE": "(2, 1)"}
DECODE = {"NONE": "NONE", "PIECEWISE": "PIECEWISE"}
MODES = {0: "NONE", 1: "STOCK_TORCH_COMPILE", 2: "DYNAMO_TRACE_ONCE", 3: "VLLM_COMPILE"}
_LEGACY = "VLLM_USE_BREAKABLE_CUDAGRAPH"


@dataclass(frozen=True, slots=True)
class Graphs:
    """`error` is why the engine does not start, "" if it does."""

    requested: str
    resolved: str
    asked_mode: str
    mode: str
    strict: bool
    eager: bool
    compilation: int
    error: str = ""

    @property
    def breakable(self) -> bool:
        return self.resolved == "breakable"

    @property
    def decode_mode(self) -> str:
        return DECODE.get(self.mode, "FULL")

    def line(self, *, parent: bool) -> str:
        """The marker line; the parent process prints its own before the worker has settled mode and strictness."""
        mode, decode = (
            ("FULL_AND_PIECEWISE", "FULL") if parent and not self.breakable else (self.mode, self.decode_mode)
        )
        fields = {
            "requested": self.requested,
            "resolved": self.resolved,
            "mode": mode,
            "decode_mode": decode,
            "breakable": str(self.breakable).lower(),
            "enforce_eager": str(self.eager).lower(),
            "strict": str(self.strict).lower(),
        }
        return "CUDA_GRAPH_RUNTIME " + " ".join(f"{key}={value}" for key, value in fields.items())


def resolve(settings: Settings, environ: Mapping[str, str]) -> Graphs:
    """The implementation by config, else by the old variable, else by architecture: this one prefers breakable graphs."""
    given = settings.compilation
    requested = str(given.get("cudagraph_implementation", "auto"))
    legacy = {"0": "regular", "1": "breakable"}.get(environ.get(_LEGACY, ""), "")
    resolved = requested if requested != "auto" else legacy or "breakable"
    compilation = int(given.get("mode", 0))
    asked = str(given.get("cudagraph_mode", "FULL_AND_PIECEWISE"))
    mode = "NONE" if settings.enforce_eager else _settled(asked, resolved, compilation)
    strict = bool(given.get("cudagraph_strict", False))
    graphs = Graphs(requested, resolved, asked, mode, strict, settings.enforce_eager, compilation)
    error = _refusal(graphs, legacy)
    return Graphs(requested, resolved, asked, mode, strict, settings.enforce_eager, compilation, error)


def _settled(asked: str, resolved: str, compilation: int) -> str:
    """Piecewise graphs of the regular kind need compilation."""
    if resolved == "breakable" or compilation:
        return asked
    return {"PIECEWISE": "NONE", "FULL_AND_PIECEWISE": "FULL_DECODE_ONLY"}.get(asked, asked)


def _refusal(graphs: Graphs, legacy: str) -> str:
    if graphs.requested not in ("auto", "regular", "breakable") or graphs.asked_mode not in CODES:
        return "ValueError: unknown cudagraph_implementation or cudagraph_mode"
    if legacy and graphs.requested not in ("auto", legacy):
        pair = f"cudagraph_implementation={graphs.requested!r} and {_LEGACY} ({legacy})"
        return f"ValueError: Conflicting native and legacy CUDA graph selections: {pair}"
    if graphs.strict and (graphs.eager or graphs.decode_mode == "NONE"):
        return f"RuntimeError: cudagraph_strict: no decode graph is left (enforce_eager={graphs.eager}, mode={graphs.mode})"
    return ""


def printed(given: Mapping[str, Any], *, mode: int, graph_mode: str, effective: bool) -> str:
    """A compilation config as the log prints it. `effective`: as the engine runs it, else as it was asked."""
    fields: dict[str, str] = {
        "mode": f"<CompilationMode.{MODES.get(mode, 'NONE')}: {mode}>",
        "debug_dump_path": "None",
        "cache_dir": "''",
        "compile_cache_save_format": "'binary'",
        "backend": "'inductor'",
        "custom_ops": "['all']" if effective else "[]",
        "splitting_ops": "[]" if effective else "None",
        "compile_sizes": "[]" if effective else "None",
        "inductor_compile_config": "{'enable_auto_functionalized_v2': False, 'combo_kernels': True}",
        "inductor_passes": "{}",
        "cudagraph_mode": f"<CUDAGraphMode.{graph_mode}: {CODES.get(graph_mode, '0')}>",
        "cudagraph_num_of_warmups": "1" if effective else "0",
        "cudagraph_capture_sizes": "[1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112]"
        if effective
        else "None",
        "cudagraph_copy_inputs": "False",
        "use_inductor_graph_partition": "False" if effective else "None",
        "pass_config": "{'fuse_norm_quant': True, 'enable_sp': False}" if effective else "{}",
        "dynamic_shapes_config": "{'type': <DynamicShapesType.BACKED: 'backed'>, 'evaluate_guards': False}",
        "local_cache_dir": "None",
    }
    fields |= {key: repr(value) for key, value in given.items() if key not in ("mode", "cudagraph_mode")}
    return "{" + ", ".join(f"'{key}': {value}" for key, value in fields.items()) + "}"


def engine_mode(graphs: Graphs, faults: Faults) -> int:
    """The compilation mode that the engine's line tells."""
    return 3 if "compile_on" in faults else graphs.compilation
