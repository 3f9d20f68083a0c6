"""What the ranks print: the lines of a real start, in order, with the values of this command line."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

VERSION = "0.26.0+dspark.sm121.3"
_MODES = {"NONE": "0", "PIECEWISE": "1", "FULL": "2", "FULL_DECODE_ONLY": "(2, 0)", "FULL_AND_PIECEWISE": "(2, 1)"}
_KNOWN_ENV = frozenset(
    """VLLM_CACHE_ROOT VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_USE_B12X_MOE VLLM_USE_FLASHINFER_SAMPLER
    VLLM_B12X_W4A16_FORCE_BLOCKS_PER_SM VLLM_B12X_W4A16_FORCE_BLOCKS_MAX_M VLLM_B12X_W4A16_FORCE_TILE_CONFIG
    VLLM_DSV4_ENABLE_MULTI_STREAM VLLM_DISABLE_COMPILE_CACHE VLLM_USE_AOT_COMPILE VLLM_ENGINE_ITERATION_TIMEOUT_S
    VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_ENGINE_READY_TIMEOUT_S VLLM_HOST_IP VLLM_API_KEY VLLM_RPC_BASE_PATH
    VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_DSV4_ENABLE_TORCH_COMPILE VLLM_NO_USAGE_STATS""".split()
)


class Log:
    """Writes whole lines at once, from any thread."""

    def __init__(self, rank: int, faults: Mapping[str, str]) -> None:
        self._rank, self._faults = rank, faults
        self._lock = threading.Lock()
        self._replayed = False

    def plain(self, text: str) -> None:
        missing = self._faults.get("marker_missing")
        if missing and missing in text:
            return
        with self._lock:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def line(self, who: str, where: str, text: str, level: str = "INFO") -> None:
        """One line in the engine's form; `who` is API, Engine or Worker."""
        name = {"API": "APIServer", "Engine": "EngineCore", "Worker": f"Worker_TP{self._rank}"}[who]
        stamp = time.strftime("%m-%d %H:%M:%S")
        self.plain(f"({name} pid={os.getpid()}) {level} {stamp} [{where}] {text}")

    # --- the phases

    def opening(self, args: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self.plain('{"status": "PASS", "vllm": "' + VERSION + '", "torch": "2.11.0+cu130", "cuda": "13.0", "capability": [12, 1]}')
        self.plain("DSPARK_RUNTIME_AUDIT_PASS")
        for name in sorted(environ):
            if name.startswith("VLLM_") and name not in _KNOWN_ENV:
                self.line("API", "envs.py:2310", f"Unknown vLLM environment variable detected: {name}", "WARNING")
        if self._rank == 0:
            self.line("API", "api_utils.py:273", f"non-default args: {_asked(args)}")
        self.line("API", "model.py:623", "Resolved architecture: DeepseekV4ForCausalLM")
        self.line("API", "model.py:1788", f"Using max model len {args.max_model_len}")
        self.line("API", "scheduler.py:252", f"Chunked prefill is enabled with max_num_batched_tokens={args.max_num_batched_tokens}.")
        self._graph_runtime("API", args)
        if self._rank == 0:
            self.line("Engine", "core.py:116", f"Initializing a V1 LLM engine (v{VERSION}) with config: {self._config(args)}")
        else:
            head = f"{args.master_addr}:{args.master_port}"
            self.plain(f"INFO [serve.py:212] Launching vLLM (v{VERSION}) headless multiproc executor, with head node address {head} for torch.distributed process group.")

    def joining(self, args: argparse.Namespace) -> None:
        method = f"tcp://{args.master_addr}:{args.master_port}"
        self.line("Worker", "parallel_state.py:1615", f"world_size={args.nnodes} rank={self._rank} local_rank=0 distributed_init_method={method} backend=nccl")

    def assigned(self, args: argparse.Namespace) -> None:
        text = f"rank {self._rank} in world size {args.nnodes} is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank {self._rank}, EP rank N/A, EPLB rank N/A"
        self.line("Worker", "parallel_state.py:1946", text)
        if os.environ.get("NCCL_DEBUG") == "INFO":
            self._fabric()

    def _fabric(self) -> None:
        socketed = "nccl_socket" in self._faults or os.environ.get("NCCL_NET", "IB") != "IB"
        device = os.environ.get("NCCL_SOCKET_IFNAME", "eth0")
        hca = os.environ.get("NCCL_IB_HCA", "mlx5_0")
        using = f"NET/Socket : Using [0]{device}" if socketed else f"NET/IB : Using [0]{hca}:1/RoCE [RO]; OOB {device}"
        self.plain(f"rank{self._rank}:1:1 [0] NCCL INFO {using}")
        self.plain(f"rank{self._rank}:1:1 [0] NCCL INFO Using network {'Socket' if socketed else 'IB'}")

    def loading(self, args: argparse.Namespace, pool: int, pause: Callable[[float], None]) -> None:
        kv = args.kv_cache_dtype
        self.line("Worker", "cache.py:205", f"Using {kv} data type to store kv cache")
        self.line("Worker", "mxfp4.py:88", "Using 'B12X_MXFP4' Mxfp4 MoE backend")
        pause(300)
        self.line("Worker", "model_runner.py:305", "Model loading took 79.44 GiB and 312.135953 seconds")
        self.line("Worker", "speculator.py:60", "DSpark draft model loaded: 96 params")
        if "extra_line" in self._faults:
            self.line("Worker", "extra.py:1", self._faults["extra_line"], "WARNING")
        pause(200)
        self.line("Worker", "gpu_worker.py:479", f"Available KV cache memory: {16.25 - 0.66 * self._rank:.2f} GiB")
        if self._rank == 0:
            self.line("Engine", "kv_cache_utils.py:2177", f"GPU KV cache size: {pool:,} tokens")
            ratio = pool / args.max_model_len
            self.line("Engine", "kv_cache_utils.py:2182", f"Maximum concurrency for {args.max_model_len:,} tokens per request: {ratio:.2f}x")
        self._capture(args, pause)

    def _capture(self, args: argparse.Namespace, pause: Callable[[float], None]) -> None:
        kind = implementation(args)
        if kind == "breakable":
            self.line("Worker", "wrapper.py:12", "Breakable CUDA graph enabled")
            text = "CUDA_GRAPH_AUXILIARY implementation=breakable component=dflash mode=eager reason=piecewise_unsupported"
            self.line("Worker", "speculator.py:101", text, "WARNING")
        self._graph_runtime("Worker", args)
        pause(200)
        self.line("Worker", "speculator.py:118", "Capturing model for DSpark speculator...")
        self.line("Worker", "model_runner.py:747", "Graph capturing finished in 31 secs, took 1.11 GiB")
        self.line("Worker", "model_runner.py:750", f"CUDA_GRAPH_CAPTURE implementation={kind} status=complete")

    def _graph_runtime(self, who: str, args: argparse.Namespace) -> None:
        """On a Worker line what was resolved; the API server's own, earlier line may still say otherwise."""
        given, kind = args.compilation_config, implementation(args)
        mode = given.get("cudagraph_mode", "FULL_AND_PIECEWISE")
        decode = "PIECEWISE" if mode == "PIECEWISE" else "FULL"
        asked = kind if who == "Worker" else "auto"
        strict = str(bool(given.get("cudagraph_strict", False))).lower()
        eager = str(args.enforce_eager).lower()
        breakable = str(kind == "breakable").lower()
        text = f"CUDA_GRAPH_RUNTIME requested={asked} resolved={kind} mode={mode} decode_mode={decode} breakable={breakable} enforce_eager={eager} strict={strict}"
        self.line(who, "cudagraph_utils.py:71", text)

    def serving(self, args: argparse.Namespace) -> None:
        self.line("API", "api_server.py:677", f"Starting vLLM server on http://{args.host}:{args.port}")
        self.plain(f"(APIServer pid={os.getpid()}) INFO:     Application startup complete.")

    def replay(self, args: argparse.Namespace) -> None:
        """Once, after the first decode."""
        if not self._replayed:
            self._replayed = True
            self.line("Worker", "cudagraph_utils.py:210", f"CUDA_GRAPH_REPLAY implementation={implementation(args)} status=observed")

    # --- ends

    def no_memory(self) -> int:
        text = "ValueError: To serve at least one request with the models's max seq len, (30.97 GiB KV cache is needed, which is larger than the available KV cache memory (15.61 GiB)."
        self.line("Engine", "core.py:1510", f"EngineCore failed to start. {text}", "ERROR")
        return 1

    def engine_dead(self) -> None:
        self.line("Worker", "multiproc_executor.py:1063", "WorkerProc hit an exception.", "ERROR")
        self.line("Engine", "core.py:1512", "EngineCore encountered a fatal error.", "ERROR")
        self.line("API", "async_llm.py:906", "AsyncLLM output_handler failed. vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", "ERROR")

    def peer_lost(self) -> None:
        self.line("Worker", "multiproc_executor.py:1063", "WorkerProc hit an exception. RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer.", "ERROR")

    # --- values

    def _config(self, args: argparse.Namespace) -> str:
        compiled = dict(args.compilation_config)
        if "compile_on" in self._faults:
            compiled["mode"] = 3
        parts = {
            "model": repr(args.model_tag),
            "speculative_config": f"SpeculativeConfig(method='dspark', model={args.model_tag!r}, num_spec_tokens={args.speculative_config.get('num_speculative_tokens')})",
            "max_seq_len": args.max_model_len,
            "tensor_parallel_size": args.tensor_parallel_size,
            "quantization": "deepseek_v4_fp8",
            "enforce_eager": args.enforce_eager,
            "kv_cache_dtype": args.kv_cache_dtype,
            "served_model_name": args.served_model_name,
            "enable_prefix_caching": args.enable_prefix_caching,
            "compilation_config": _compilation(compiled),
        }
        return ", ".join(f"{key}={value}" for key, value in parts.items())


def implementation(args: argparse.Namespace) -> str:
    return str(args.compilation_config.get("cudagraph_implementation", "breakable"))


def _compilation(given: Mapping[str, Any]) -> str:
    mode = int(given.get("mode", 3))
    graphs = str(given.get("cudagraph_mode", "FULL_AND_PIECEWISE"))
    parts = [
        f"'mode': <CompilationMode.{'NONE' if mode == 0 else 'VLLM_COMPILE'}: {mode}>",
        "'backend': 'inductor'",
        "'custom_ops': ['all']",
        f"'cudagraph_mode': <CUDAGraphMode.{graphs}: {_MODES.get(graphs, '0')}>",
        *(f"'{key}': {given[key]!r}" for key in given if key not in ("mode", "cudagraph_mode")),
        "'cudagraph_num_of_warmups': 1",
    ]
    return "{" + ", ".join(parts) + "}"


def _asked(args: argparse.Namespace) -> str:
    given = {key: value for key, value in vars(args).items() if value not in (None, False, {}, "") and key not in ("command", "node_rank", "compilation_config")}
    return repr(given)[:-1] + f", 'compilation_config': {_compilation(args.compilation_config)}}}"
