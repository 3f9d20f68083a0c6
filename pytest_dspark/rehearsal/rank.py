"""One emulated rank of a vLLM engine: `python rank.py serve /model --nnodes 2 --node-rank N ...`. Standard library alone.

It takes the command line of the recipe, meets the other ranks over TCP, prints the log lines of a cold start in believable
phases, holds the KV pool that the profile implies, and (rank 0) answers the OpenAI API. It behaves as the real engine does
when a rank dies: the head ends what is open with an error inside a 200 and exits with code 0 after a second; a worker that
lost its head says so once and stays. A worker that stands still (SIGSTOP, a cut link) makes the engine stand still.

It proves harnesses, never an engine: what it answers comes from rules that read the prompt.

Controls, from the environment:

| name | meaning |
|---|---|
| REHEARSAL_TIME | factor on all durations: 1 is a cold start of about 15 minutes, 1,000 tokens/s prefill, 80 tokens/s decode; default 0.005 |
| REHEARSAL_SPEED | a further factor on the duration of generation alone; default 1 |
| REHEARSAL_FAULT | comma-separated defects of this rank: see faults.py |
| REHEARSAL_BIND | address of the API instead of --host |

Exit codes: 0 stopped or engine dead, 1 cannot start, 2 usage, 64 wrong --kv-cache-dtype (the image's entry point), 137 killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import argv as arguments
import faults as faulting
import graphs as graphing
import kvpool
import pace as pacing
from api import Api
from engine import STEP_TIMEOUT_S, Engine
from httpserver import serve
from loglines import Log
from startup import Start
from world import Head, Lost, NotMet, Worker

KV_DTYPE = "nvfp4_ds_mla"
DRAFT_BLOCK = 5
EXIT_AFTER_DEATH_S = 1.1
STANDING_STILL_S = 60.0
THROUGHPUT_LOG_S = 10.0
PULSE_S = 0.2


class Ended(Exception):
    """This process ends with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Rank:
    """This process."""

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._settings = arguments.parse(argv)
        self._faults = faulting.parse(os.environ.get("REHEARSAL_FAULT", ""))
        self._pace = pacing.read(os.environ)
        self._graphs = graphing.resolve(self._settings, os.environ)
        self._log = Log(self._settings.node_rank, self._faults)
        self._start = Start(self._settings, self._graphs, self._pace, self._faults, self._log, os.environ)
        self._stop = asyncio.Event()
        self._serving = False
        self._made = 0
        self._decoded = False

    async def run(self) -> int:
        """The whole life; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        life, stop = asyncio.ensure_future(self._live()), asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            return life.result()
        if not self._serving:
            await asyncio.sleep(self._pace.stop())
        self._log.stopped()
        return 0

    def _on_signal(self) -> None:
        if "slow_stop" not in self._faults:
            self._stop.set()

    async def _live(self) -> int:
        try:
            await self._begin()
            return await (self._lead() if self._settings.node_rank == 0 else self._work())
        except Ended as ended:
            return ended.code
        except NotMet as error:
            self._log.not_started(str(error))
            return 1

    # --- start

    async def _begin(self) -> None:
        if "hang_at_start" in self._faults:
            await asyncio.Event().wait()
        if "exit_at_start" in self._faults:
            self._fail("RuntimeError: rehearsal fault exit_at_start", int(self._faults.number("exit_at_start") or 0))
        if self._argv.count("--kv-cache-dtype") != 1 or self._settings.kv_cache_dtype != KV_DTYPE:
            self._log.plain(f"DSPARK_RUNTIME_AUDIT_FAIL: expected --kv-cache-dtype {KV_DTYPE} once", stream=2)
            raise Ended(64)
        await self._start.opening()
        if refusal := self._refusal():
            self._fail(refusal, 1)
        await self._start.joining()

    def _refusal(self) -> str:
        """Why the engine refuses this configuration before the ranks meet."""
        settings = self._settings
        if settings.world_size != settings.nnodes:
            return f"ValueError: world size {settings.world_size} over {settings.nnodes} nodes: each node has 1 GPU"
        if settings.speculative and settings.k < DRAFT_BLOCK:
            return f"ValueError: DSpark requires num_speculative_tokens >= dspark_block_size ({settings.k} < {DRAFT_BLOCK})"
        return self._graphs.error

    def _fail(self, cause: str, code: int) -> None:
        self._log.not_started(cause)
        raise Ended(code)

    async def _load(self, side: Head | Worker) -> int:
        """From the first meeting to an engine that could serve; returns the pool in tokens."""
        await side.meet()
        await self._start.assigned()
        if "exit_in_load" in self._faults:
            self._fail("RuntimeError: rehearsal fault exit_in_load", int(self._faults.number("exit_in_load") or 0))
        await self._start.loading()
        await side.together("loaded")
        pool = kvpool.pool_tokens(self._settings)
        if not pool:
            self._fail(self._start.no_memory(), 1)
        await self._start.sizing(pool)
        await self._start.capturing()
        await self._start.finishing()
        if "never_ready" in self._faults:
            await asyncio.Event().wait()
        await side.together("ready")
        self._dying = asyncio.create_task(self._die_later())
        self._eating = asyncio.create_task(self._eat_later())
        self._pulse = asyncio.create_task(self._beat())
        return pool

    async def _beat(self) -> None:
        """A rank that is no deadlock uses some of its processor, as one that waits for its GPU does."""
        while self._takes_part():
            await asyncio.sleep(PULSE_S)

    # --- faults of a rank that serves

    async def _die_later(self) -> None:
        seconds = self._faults.number("die_after_s")
        if seconds is not None:
            await asyncio.sleep(seconds)
            os.kill(os.getpid(), signal.SIGKILL)

    async def _eat_later(self) -> None:
        seconds = self._faults.number("eat_memory_after_s")
        if seconds is not None:
            await asyncio.sleep(seconds)
            eaten = []
            while True:
                eaten.append(b"x" * 2**24)

    async def _after(self, fault: str) -> None:
        """Until the moment of this fault, which never comes without it."""
        seconds = self._faults.number(fault)
        await asyncio.sleep(seconds) if seconds is not None else await asyncio.Event().wait()

    async def _close_later(self, server: asyncio.Server) -> None:
        await self._after("api_gone_after_s")
        server.close()

    def _told(self, tokens: int, decoded: bool) -> None:
        """How much the engine has generated so far."""
        self._made = tokens
        if decoded and not self._decoded:
            self._decoded = True
            self._start.replayed()
        limit = self._faults.number("die_after_tokens")
        if limit is not None and tokens >= limit:
            os.kill(os.getpid(), signal.SIGKILL)

    def _takes_part(self) -> bool:
        return not self._faults.stands_still(self._made)

    # --- a worker

    async def _work(self) -> int:
        side = Worker(self._settings, self._argv, int(self._faults.number("lossy") or 0))
        try:
            await self._load(side)
            await side.follow(self._told, self._takes_part)
        except Lost:
            self._log.store_lost()
            self._log.peer_lost()
        await asyncio.Event().wait()
        return 0

    # --- the head

    async def _lead(self) -> int:
        self._head = Head(self._settings, self._argv)
        with self._listener() as listener:
            pool = await self._load(self._head)
            lossy = self._head.lossy or int(self._faults.number("lossy") or 0)
            engine = Engine(self._settings, pool, self._pace, self._faults, self._sync, self._lead_told, lossy)
            garbled = "garble" in self._faults or self._graphs.compilation != 0
            key = self._settings.api_key or os.environ.get("VLLM_API_KEY", "")
            api = Api(self._settings, engine, self._faults, garbled=garbled, key=key)
            server = await serve(listener, api.answer, self._log.uvicorn)
            self._start.serving()
            self._serving = True
            closing = asyncio.create_task(self._close_later(server))
            await self._until_death(engine)
            closing.cancel()
            await asyncio.sleep(EXIT_AFTER_DEATH_S)
            server.close()
        return 0

    def _listener(self) -> socket.socket:
        """The API's port, taken before the model is loaded, as the real server does; it listens only in the end."""
        host = os.environ.get("REHEARSAL_BIND") or self._settings.host
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, self._settings.port))
        except OSError as error:
            listener.close()
            self._log.plain(f"OSError: [Errno {error.errno}] {error.strerror}", stream=2)
            raise Ended(1) from error
        return listener

    def _lead_told(self, tokens: int, decoded: bool) -> None:
        self._head.made(tokens, decoded)
        self._told(tokens, decoded)

    async def _sync(self) -> None:
        """One step of all ranks; says so when it takes too long."""
        step, waited = asyncio.ensure_future(self._head.step()), 0.0
        try:
            while not step.done():
                await asyncio.wait({step}, timeout=self._pace.patience(STANDING_STILL_S))
                waited += STANDING_STILL_S
                if not step.done():
                    self._log.standing_still(int(waited))
            step.result()
        finally:
            step.cancel()

    async def _until_death(self, engine: Engine) -> None:
        limit = float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS") or STEP_TIMEOUT_S)
        running = asyncio.ensure_future(engine.run(self._pace.patience(limit)))
        lost, traffic = asyncio.ensure_future(self._head.lost()), asyncio.ensure_future(self._log_traffic(engine))
        dying = asyncio.ensure_future(self._after("engine_dies_after_s"))
        await asyncio.wait({running, lost, dying}, return_when=asyncio.FIRST_COMPLETED)
        cause = "RuntimeError: Worker failed with error 'Connection reset by peer'"
        if dying.done():
            cause = "RuntimeError: rehearsal fault engine_dies_after_s"
        dying.cancel()
        if running.done():
            with contextlib.suppress(Lost):
                try:
                    running.result()
                except TimeoutError:
                    cause = "TimeoutError: RPC call to execute_model timed out."
        traffic.cancel()
        running.cancel()
        if "Connection reset" in cause:
            self._log.peer_lost()
        self._log.engine_dead(cause)
        engine.kill()

    async def _log_traffic(self, engine: Engine) -> None:
        """Throughput every ten seconds, until one line has said that nothing happens any more."""
        numbers, before, said = engine.numbers, (0, 0), True
        while True:
            await asyncio.sleep(THROUGHPUT_LOG_S)
            now = numbers.prompt_tokens, numbers.generation_tokens
            busy = now != before or numbers.running + numbers.waiting > 0
            if busy or not said:
                prompt, made = ((a - b) / THROUGHPUT_LOG_S for a, b in zip(now, before, strict=True))
                usage = 100 * numbers.kv_tokens / engine.pool
                hits = 100 * numbers.prefix_hits / max(1, numbers.prefix_queries)
                text = f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: {made:.1f} tokens/s, Running: {numbers.running} reqs, "
                text += f"Waiting: {numbers.waiting} reqs, GPU KV cache usage: {usage:.1f}%, Prefix cache hit rate: {hits:.1f}%"
                self._log.api("loggers.py:310", text)
            before, said = now, not busy


def main() -> int:
    try:
        rank = Rank(sys.argv[1:])
    except ValueError as error:
        print(f"rank.py: error: {error}", file=sys.stderr)
        return 2
    return asyncio.run(rank.run())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
