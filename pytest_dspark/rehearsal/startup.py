"""The start of one rank, phase by phase, as the log tells it. Durations are those of two GB10, about 15 minutes in all."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass

import graphs as graphing
from argv import Settings
from faults import Faults
from graphs import Graphs
from loglines import VERSION, Log
from pace import Pace

KNOWN_ENV = frozenset(
    [
        "VLLM_CACHE_ROOT",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB",
        "VLLM_USE_B12X_MOE",
        "VLLM_USE_FLASHINFER_SAMPLER",
        "VLLM_B12X_W4A16_FORCE_BLOCKS_PER_SM",
        "VLLM_B12X_W4A16_FORCE_BLOCKS_MAX_M",
        "VLLM_B12X_W4A16_FORCE_TILE_CONFIG",
        "VLLM_DSV4_ENABLE_MULTI_STREAM",
        "VLLM_DSV4_ENABLE_TORCH_COMPILE",
        "VLLM_DISABLE_COMPILE_CACHE",
        "VLLM_USE_AOT_COMPILE",
        "VLLM_USE_BREAKABLE_CUDAGRAPH",
        "VLLM_ENGINE_ITERATION_TIMEOUT_S",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_RPC_BASE_PATH",
        "VLLM_HOST_IP",
        "VLLM_API_KEY",
        "VLLM_BUILD_COMMIT",
        "VLLM_IMAGE_TAG",
        "VLLM_BIN",
        "VLLM_LOGGING_LEVEL",
        "VLLM_CONFIGURE_LOGGING",
        "VLLM_PORT",
        "VLLM_USE_MODELSCOPE",
        "VLLM_NO_USAGE_STATS",
        "VLLM_DO_NOT_TRACK",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_ALLREDUCE_USE_SYMM_MEM",
        "VLLM_PREFIX_CACHE_RETENTION_INTERVAL",
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
        "VLLM_SKIP_INIT_MEMORY_CHECK",
        "VLLM_TRITON_MLA_SPARSE",
        "VLLM_TORCH_PROFILER_DIR",
        "VLLM_SERVER_DEV_MODE",
        "VLLM_ATTENTION_BACKEND",
        "VLLM_TARGET_DEVICE",
        "VLLM_USE_V1",
        "VLLM_CPU_KVCACHE_SPACE",
    ]
)
SHARDS = 48
ROUTES = (
    "/version",
    "/health",
    "/metrics",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/ping",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/chat/completions/render",
)


@dataclass(frozen=True, slots=True)
class Start:
    """Everything that the lines of a start need."""

    settings: Settings
    graphs: Graphs
    pace: Pace
    faults: Faults
    log: Log
    environ: Mapping[str, str]

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(self.pace.seconds(seconds))

    @property
    def _head(self) -> bool:
        return self.settings.node_rank == 0

    # --- before the ranks meet

    async def opening(self) -> None:
        """From the audit of the image to what the model is."""
        self._audit()
        await self._pause(25)
        self._banner()
        self._unknown_variables()
        await self._pause(20)
        self._model()
        await self._pause(15)

    async def joining(self) -> None:
        """Up to the line after which this rank waits for the others."""
        self._config() if self._head else self._headless()
        await self._pause(15)
        self._world()

    def _audit(self) -> None:
        found = {
            "status": "PASS",
            "vllm": VERSION,
            "torch": "2.11.0+cu130",
            "cuda": "13.0",
            "flashinfer": "0.6.14",
            "device": "NVIDIA GB10",
            "capability": [12, 1],
            "kv_cache_dtype": self.settings.kv_cache_dtype,
            "speculative_method": self.settings.speculative.get("method"),
        }
        self.log.plain(json.dumps(found))
        self.log.plain("DSPARK_RUNTIME_AUDIT_PASS")

    def _banner(self) -> None:
        if not self._head:
            return
        for text in (
            "",
            "rehearsal: an emulated rank, not an engine",
            f"version {VERSION}",
            f"model   {self.settings.model}",
            "",
        ):
            self.log.api("api_utils.py:345", text)
        self.log.api("api_utils.py:273", f"non-default args: {self._asked()}")

    def _asked(self) -> str:
        """The arguments that differ from the defaults, as a dict is printed."""
        skipped = ("node_rank", "compilation_config", "served_model_name")
        parts = {"model_tag": repr(self.settings.model), "model": repr(self.settings.model)}
        parts["served_model_name"] = repr([self.settings.served_model_name])
        parts |= {key: repr(value) for key, value in self.settings.given.items() if key not in skipped}
        if "api_key" in parts:
            parts["api_key"] = repr([self.settings.api_key])
        if "compilation_config" in self.settings.given:
            given = self.settings.compilation
            graph_mode = str(given.get("cudagraph_mode", "FULL_AND_PIECEWISE"))
            printed = graphing.printed(given, mode=self.graphs.compilation, graph_mode=graph_mode, effective=False)
            parts["compilation_config"] = printed
        return "{" + ", ".join(f"'{key}': {value}" for key, value in parts.items()) + "}"

    def _unknown_variables(self) -> None:
        for name in sorted(self.environ):
            if name.startswith("VLLM_") and name not in KNOWN_ENV:
                self.log.api("envs.py:2310", f"Unknown vLLM environment variable detected: {name}", "WARNING")

    def _model(self) -> None:
        settings, log = self.settings, self.log
        log.api("model.py:623", "Resolved architecture: DeepseekV4ForCausalLM")
        log.api("model.py:1788", f"Using max model len {settings.max_model_len}")
        log.api("arg_utils.py:2056", f"Inferred data_parallel_rank 0 from node_rank {settings.node_rank}")
        log.api("cache.py:205", f"Using {settings.kv_cache_dtype} data type to store kv cache")
        log.api(
            "scheduler.py:252",
            f"Chunked prefill is enabled with max_num_batched_tokens={settings.max_num_batched_tokens}.",
        )
        log.api("vllm.py:1109", "Asynchronous scheduling is enabled.")
        if self.graphs.eager:
            text = "Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup."
            log.api("vllm.py:1090", text, "WARNING")
            log.api("vllm.py:1210", "Cudagraph is disabled under eager mode")
        elif not self.graphs.compilation:
            log.api("vllm.py:1213", "Inductor compilation was disabled by user settings", "WARNING")
        log.api("vllm.py:1402", self.graphs.line(parent=True))

    def _config(self) -> None:
        text = ", ".join(f"{key}={value}" for key, value in self._engine_fields().items())
        self.log.engine("core.py:116", f"Initializing a V1 LLM engine (v{VERSION}) with config: {text}")
        head = self.settings.master_addr
        text = (
            f"DP group leader: node_rank=0, node_rank_within_dp=0, master_addr={head}, mq_connect_ip={head} (local), "
        )
        self.log.engine("multiproc_executor.py:140", f"{text}world_size={self.settings.world_size}, local_world_size=1")

    def _engine_fields(self) -> dict[str, object]:
        settings = self.settings
        mode = graphing.engine_mode(self.graphs, self.faults)
        compiled = graphing.printed(settings.compilation, mode=mode, graph_mode=self.graphs.mode, effective=True)
        speculation = f"SpeculativeConfig(method={settings.speculative.get('method')!r}, model={settings.model!r}, num_spec_tokens={settings.k})"
        return {
            "model": repr(settings.model),
            "speculative_config": speculation if settings.k else None,
            "tokenizer": repr(settings.model),
            "skip_tokenizer_init": False,
            "tokenizer_mode": settings.tokenizer_mode,
            "revision": None,
            "trust_remote_code": settings.trust_remote_code,
            "dtype": "torch.bfloat16",
            "max_seq_len": settings.max_model_len,
            "download_dir": None,
            "load_format": "auto",
            "tensor_parallel_size": settings.tensor_parallel_size,
            "pipeline_parallel_size": settings.pipeline_parallel_size,
            "data_parallel_size": 1,
            "quantization": "deepseek_v4_fp8",
            "enforce_eager": settings.enforce_eager,
            "kv_cache_dtype": settings.kv_cache_dtype,
            "device_config": "cuda",
            "structured_outputs_config": f"StructuredOutputsConfig(backend='auto', reasoning_parser={settings.reasoning_parser!r})",
            "observability_config": f"ObservabilityConfig(kv_cache_metrics=False, jit_monitor_mode={settings.jit_monitor_mode!r})",
            "seed": 0,
            "served_model_name": settings.served_model_name,
            "enable_prefix_caching": settings.enable_prefix_caching,
            "enable_chunked_prefill": True,
            "pooler_config": None,
            "compilation_config": compiled,
            "kernel_config": f"KernelConfig(enable_flashinfer_autotune={settings.enable_flashinfer_autotune}, moe_backend={settings.moe_backend!r})",
        }

    def _headless(self) -> None:
        head = f"{self.settings.master_addr}:{self.settings.master_port}"
        text = f"Launching vLLM (v{VERSION}) headless multiproc executor, with head node address {head} for torch.distributed process group."
        self.log.api("serve.py:212", text)

    def _world(self) -> None:
        settings = self.settings
        method = f"tcp://{settings.master_addr}:{settings.master_port}"
        text = f"world_size={settings.world_size} rank={settings.node_rank} local_rank=0 distributed_init_method={method} backend=nccl"
        self.log.early_worker("parallel_state.py:1615", text)

    # --- after the ranks have met

    async def assigned(self) -> None:
        """The ranks know each other: fabric and places."""
        await self._pause(15)
        self._fabric()
        rank = self.settings.node_rank
        place = f"rank {rank} in world size {self.settings.world_size} is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank {rank}, "
        self.log.early_worker("parallel_state.py:1946", place + "EP rank N/A, EPLB rank N/A")

    def _fabric(self) -> None:
        if self._head:
            self.log.early_worker("pynccl.py:113", "vLLM is using nccl==2.28.9")
        if self.environ.get("NCCL_DEBUG", "").upper() != "INFO":
            return
        sockets = "nccl_socket" in self.faults or self.environ.get("NCCL_NET") != "IB"
        device = self.environ.get("NCCL_SOCKET_IFNAME") or "eth0"
        outside = f"{device}:{self.environ.get('VLLM_HOST_IP') or self.settings.master_addr}<0>"
        hca = self.environ.get("NCCL_IB_HCA") or "mlx5_0"
        using = f"NET/Socket : Using [0]{outside}" if sockets else f"NET/IB : Using [0]{hca}:1/RoCE [RO]; OOB {outside}"
        who = f"rank{self.settings.node_rank}:{os.getpid()}:{os.getpid()} [0] NCCL INFO"
        self.log.plain(f"{who} {using}")
        self.log.plain(f"{who} Using network {'Socket' if sockets else 'IB'}")

    async def loading(self) -> None:
        """Weights, backends and the draft model. The head takes longer than a worker."""
        log, seconds = self.log, 312.135953 if self._head else 195.880412
        log.worker("model_runner.py:284", "Loading model from scratch...")
        log.worker("cuda.py:482", "Using FLASHINFER_MLA_SPARSE_DSV4 attention backend")
        log.worker("deepseek_v4.py:77", f"Using DeepSeek V4 padded {self.settings.kv_cache_dtype} KV cache format")
        log.worker("mxfp4.py:88", "Using 'B12X_MXFP4' Mxfp4 MoE backend")
        for shard in range(0, SHARDS, 12):
            text = f"Loading safetensors checkpoint shards: {100 * shard // SHARDS:3d}% Completed | {shard}/{SHARDS}"
            log.plain(f"(Worker_TP{log.rank} pid={os.getpid()}) {text}", stream=2)
            await self._pause(seconds / 4)
        self._loaded(self.pace.seconds(seconds))
        await self._pause(312.135953 - seconds + 30)

    def _loaded(self, seconds: float) -> None:
        log = self.log
        log.worker("default_loader.py:430", f"Loading weights took {seconds:.2f} seconds")
        log.worker("b12x.py:201", "Prewarmed B12X route-pack capacities")
        if self.settings.k:
            log.worker("speculator.py:60", "DSpark draft model loaded: 96 params")
        log.worker("model_runner.py:305", f"Model loading took 79.44 GiB and {seconds:.6f} seconds")
        for text in self.faults.texts("extra_line"):
            log.worker("extra.py:1", text, "WARNING")

    def no_memory(self) -> str:
        """Why no pool fits: printed by both ranks."""
        pinned = self.settings.kv_cache_memory_bytes is not None
        needed, there = (14.29, 12.59) if pinned else (30.97, 15.61)
        text = (
            f"ValueError: To serve at least one request with the models's max seq len ({self.settings.max_model_len}), "
        )
        text += f"({needed} GiB KV cache is needed, which is larger than the available KV cache memory ({there} GiB). "
        return (
            text + "Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
        )

    async def sizing(self, pool: int) -> None:
        """The KV pool. The ranks report different memory; the head alone tells the tokens."""
        await self._pause(60)
        settings, log, pinned = self.settings, self.log, self.settings.kv_cache_memory_bytes
        if pinned is not None:
            text = f"Initial free memory 116.2 GiB, reserved {pinned / 2**30:.1f} GiB memory for KV Cache as specified by kv_cache_memory_bytes config and skipped memory profiling."
            log.worker("gpu_worker.py:479", text)
        gib = pinned / 2**30 if pinned is not None else 18.08 - 0.66 * bool(log.rank)
        log.worker("gpu_worker.py:498", f"Available KV cache memory: {gib:.2f} GiB")
        if self._head:
            log.engine("kv_cache_utils.py:2177", f"GPU KV cache size: {pool:,} tokens")
            each = f"Maximum concurrency for {settings.max_model_len:,} tokens per request: {pool / settings.max_model_len:.2f}x"
            log.engine("kv_cache_utils.py:2178", each)
        await self._pause(150)

    async def capturing(self) -> None:
        """CUDA graphs, or the lines of a run without them."""
        log, graphs = self.log, self.graphs
        if graphs.breakable and not graphs.eager:
            log.worker("breakable.py:64", "Breakable CUDA graph enabled")
        log.worker("cudagraph_utils.py:71", graphs.line(parent=False))
        if graphs.mode == "NONE":
            log.worker("model_runner.py:731", "Skipping CUDA graph capture.", "WARNING")
            await self._pause(20)
            return
        if graphs.breakable:
            text = (
                "CUDA_GRAPH_AUXILIARY implementation=breakable component=dflash mode=eager reason=piecewise_unsupported"
            )
            log.worker("speculator.py:101", text, "WARNING")
        await self._pause(120)
        if self.settings.k:
            log.worker("speculator.py:118", "Capturing model for DSpark speculator...")
        await self._pause(30)
        seconds = max(1, round(self.pace.seconds(150)))
        size = 1.11 + random.Random(log.rank).random() / 50
        log.worker("model_runner.py:747", f"Graph capturing finished in {seconds} secs, took {size:.2f} GiB")
        log.worker("model_runner.py:750", f"CUDA_GRAPH_CAPTURE implementation={graphs.resolved} status=complete")

    async def finishing(self) -> None:
        """The last lines before the API listens; a worker has no line that says it is ready."""
        log, settings = self.log, self.settings
        text = f"Kernel JIT monitor activated; monitored JIT compilations during inference will use mode={settings.jit_monitor_mode}."
        log.worker("jit_monitor.py:79", text)
        if not self._head:
            return
        log.engine(
            "core.py:347", f"init engine (profile, create kv cache, warmup model) took {self.pace.seconds(400):.2f} s"
        )
        await self._pause(20)
        log.api("api_server.py:673", "Supported tasks: ['generate']")
        if not settings.enable_scale_out:
            text = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            log.api("factories.py:89", text)
        log.api("api_server.py:677", f"Starting vLLM server on http://{settings.host}:{settings.port}")
        for route in ROUTES:
            log.api("launcher.py:46", f"Route: {route}, Methods: {'GET' if route in ROUTES[:3] else 'POST'}")

    def serving(self) -> None:
        self.log.uvicorn(f"Started server process [{os.getpid()}]")
        self.log.uvicorn("Waiting for application startup.")
        self.log.uvicorn("Application startup complete.")

    def replayed(self) -> None:
        """After the first decode of this rank."""
        if self.graphs.mode != "NONE":
            text = f"CUDA_GRAPH_REPLAY implementation={self.graphs.resolved} status=observed"
            self.log.worker("cudagraph_utils.py:210", text)
