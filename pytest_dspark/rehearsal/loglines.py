"""How a line of the log looks, and the lines that are not part of a start: ends, faults, traffic."""

from __future__ import annotations

import contextlib
import os
import time

from faults import Faults

VERSION = "0.26.0+dspark.sm121.3"


class Log:
    """Whole lines, each written at once. `rank` names the worker."""

    def __init__(self, rank: int, faults: Faults) -> None:
        self.rank = rank
        self._hidden = faults.texts("marker_missing")

    def plain(self, text: str, *, stream: int = 1) -> None:
        """A line as it is; `stream` 2 is stderr."""
        if any(hidden in text for hidden in self._hidden):
            return
        with contextlib.suppress(OSError):
            os.write(stream, (text + "\n").encode("utf-8", "replace"))

    def _line(self, who: str, where: str, text: str, level: str) -> None:
        stamp = time.strftime("%m-%d %H:%M:%S")
        self.plain(f"{who}{level} {stamp} [{where}] {text}")

    def api(self, where: str, text: str, level: str = "INFO") -> None:
        """The parent process: on the head the API server, elsewhere a process without a name."""
        self._line("" if self.rank else f"(APIServer pid={os.getpid()}) ", where, text, level)

    def engine(self, where: str, text: str, level: str = "INFO") -> None:
        self._line(f"(EngineCore pid={os.getpid()}) ", where, text, level)

    def early_worker(self, where: str, text: str) -> None:
        """The worker process before it knows its rank in the tensor-parallel group."""
        self._line(f"(Worker pid={os.getpid()}) ", where, text, "INFO")

    def worker(self, where: str, text: str, level: str = "INFO") -> None:
        self._line(f"(Worker_TP{self.rank} pid={os.getpid()}) ", where, text, level)

    def uvicorn(self, text: str) -> None:
        self.plain(f"(APIServer pid={os.getpid()}) INFO:     {text}")

    # --- ends

    def peer_lost(self) -> None:
        """A collective operation failed because another rank's process is gone."""
        text = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer. "
        self.worker("multiproc_executor.py:1063", "WorkerProc hit an exception.", "ERROR")
        self.worker(
            "multiproc_executor.py:1063", text + "This is typically caused by a remote worker hanging or bugs", "ERROR"
        )

    def store_lost(self) -> None:
        """The head's store is gone."""
        stamp = time.strftime("%m%d %H:%M:%S") + f".{time.time_ns() % 10**9:09d}"
        reason = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
        self.plain(
            f"[rank{self.rank}]:[W{stamp} TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl: {reason}", stream=2
        )

    def engine_dead(self, cause: str) -> None:
        self.engine(
            "dump_input.py:72",
            f"Dumping input data for V1 LLM engine (v{VERSION}) with config: model='/model'",
            "ERROR",
        )
        self.engine("core.py:1512", "EngineCore encountered a fatal error.", "ERROR")
        self.engine("core.py:1512", cause, "ERROR")
        self.api("async_llm.py:906", "AsyncLLM output_handler failed.", "ERROR")
        error = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."
        self.api("async_llm.py:906", error, "ERROR")

    def not_started(self, cause: str) -> None:
        """The engine cannot start: what each rank says before it ends with code 1."""
        self.worker("multiproc_executor.py:870", "WorkerProc failed to start.", "ERROR")
        self.worker("multiproc_executor.py:870", cause, "ERROR")
        if self.rank:
            self.plain(
                "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.",
                stream=2,
            )
            return
        self.engine("core.py:1510", "EngineCore failed to start.", "ERROR")
        self.engine("core.py:1510", cause, "ERROR")
        self.plain(
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
            stream=2,
        )

    def standing_still(self, seconds: int) -> None:
        text = f"No available shared memory broadcast block found in {seconds} seconds. This typically happens when some processes are hanging"
        self.engine("shm_broadcast.py:871", text)

    def stopped(self) -> None:
        """An orderly stop."""
        if self.rank:
            self.api("multiproc_executor.py:429", "[shutdown] Executor: waiting for worker exit count=1")
            self.worker("multiproc_executor.py:793", "Parent process exited, terminating worker queues")
            return
        self.api("launcher.py:100", "[shutdown] API server: shutdown triggered")
        self.api("core_client.py:657", "[shutdown] MPClient: stopping engine manager")
        self.engine("core.py:1313", "[shutdown] EngineCore: trigger received signal=SIGTERM")
        self.worker("multiproc_executor.py:793", "Parent process exited, terminating worker queues")
        self.api("core_client.py:662", "[shutdown] MPClient: complete")
        for text in ("Shutting down", "Waiting for application shutdown.", "Application shutdown complete."):
            self.uvicorn(text)
