"""One emulated rank of a vLLM engine: `python rank.py serve /model … --node-rank N`.

It takes the very command line of the recipe, meets the other ranks over TCP, prints the log lines of a cold start in
believable phases, holds the KV pool that the profile implies, and (rank 0) answers the OpenAI API. It behaves as the real
engine does when a rank dies: the head answers what is open with an error inside a 200 and ends with code 0; a worker that
lost its head logs it once and stays.

Controls, from the environment:
    REHEARSAL_TIME   factor on believable durations (1 = a cold start of about 15 minutes; default 0.003)
    REHEARSAL_FAULT  comma-separated defects of this rank, NAME or NAME=VALUE; see faults.py
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import api
import arguments
import engine
import faults
import loglines

EXIT_AFTER_DEATH_S = 1.1
_RANK_FLAGS = {"--node-rank": 1, "--headless": 0, "--host": 1, "--port": 1}


def comparable(argv: list[str]) -> list[str]:
    """The command line without what may differ between ranks."""
    result, skip = [], 0
    for token in argv:
        if skip:
            skip -= 1
        elif token in _RANK_FLAGS:
            skip = _RANK_FLAGS[token]
        else:
            result.append(token)
    return result


class Rank:
    """This process: its settings, its log, and its lines to the other ranks."""

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv
        self.args = arguments.parse(argv)
        self.factor = float(os.environ.get("REHEARSAL_TIME", "0.003"))
        self.faults = faults.parse(os.environ.get("REHEARSAL_FAULT", ""))
        self.log = loglines.Log(self.args.node_rank, self.faults)
        self.peers: list[socket.socket] = []
        self.engine: engine.Engine | None = None

    def pause(self, seconds: float) -> None:
        """A believable duration, scaled."""
        time.sleep(seconds * self.factor)

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._terminate)
        if "hang_at_start" in self.faults:
            threading.Event().wait()
        if "exit_at_start" in self.faults:
            self.log.plain("Exception: WorkerProc initialization failed due to an exception in a background process.")
            return int(self.faults["exit_at_start"] or 1)
        self.log.opening(self.args, os.environ)
        self.pause(20)
        self.log.joining(self.args)
        self._meet()
        return self._load_and_serve()

    def _terminate(self, number: int, frame: object) -> None:
        if "slow_stop" in self.faults:
            return
        self.log.line("API", "launcher.py:110", "Shutting down")
        sys.stdout.flush()
        os._exit(0)

    # --- meeting the others

    def _meet(self) -> None:
        if self.args.node_rank == 0:
            self._listen()
        else:
            self._join()

    def _listen(self) -> None:
        with socket.create_server((self.args.master_addr, self.args.master_port)) as server:
            hellos = []
            while len(self.peers) < self.args.nnodes - 1:
                connection, _ = server.accept()
                hellos.append(json.loads(_read_line(connection)))
                self.peers.append(connection)
        if any(comparable(hello) != comparable(self.argv) for hello in hellos):
            threading.Event().wait()  # ranks with different command lines wait for each other for ever
        for peer in self.peers:
            peer.sendall(b"go\n")

    def _join(self) -> None:
        while True:
            try:
                connection = socket.create_connection((self.args.master_addr, self.args.master_port), timeout=5)
                break
            except OSError:
                time.sleep(0.05)
        connection.settimeout(None)
        connection.sendall(json.dumps(self.argv).encode() + b"\n")
        _read_line(connection)
        self.peers.append(connection)

    # --- loading and serving

    def _load_and_serve(self) -> int:
        self.log.assigned(self.args)
        self.pause(60)
        if "exit_in_load" in self.faults:
            self.log.line("Worker", "multiproc_executor.py:870", "WorkerProc failed to start.", "ERROR")
            return int(self.faults["exit_in_load"] or 1)
        pool = engine.kv_pool(self.args)
        if pool is None:
            return self.log.no_memory()
        self.log.loading(self.args, pool, self.pause)
        if "never_ready" in self.faults:
            threading.Event().wait()
        return self._head(pool) if self.args.node_rank == 0 else self._worker()

    def _worker(self) -> int:
        connection = self.peers[0]
        threading.Thread(target=self._die_on_order, daemon=True).start()
        while True:
            try:
                order = _read_line(connection)
            except (OSError, EOFError):
                self.log.peer_lost()
                threading.Event().wait()  # a worker that lost its head stays
            if order == b"decode":
                self.log.replay(self.args)

    def _die_on_order(self) -> None:
        """The fault `die_after_s`: this rank is killed so many seconds after it is loaded."""
        if "die_after_s" in self.faults:
            time.sleep(float(self.faults["die_after_s"]))
            os.kill(os.getpid(), signal.SIGKILL)

    def _head(self, pool: int) -> int:
        self.engine = engine.Engine(self.args, pool, self.factor, self.faults, first_decode=self._first_decode)
        for peer in self.peers:
            threading.Thread(target=self._watch, args=(peer,), daemon=True).start()
        threading.Thread(target=self._die_on_order, daemon=True).start()
        server = api.serve(self.args, self.engine, self.faults, os.environ.get("REHEARSAL_BIND", ""))
        self.log.serving(self.args)
        self.engine.dead.wait()
        time.sleep(EXIT_AFTER_DEATH_S)
        server.server_close()
        return 0

    def _first_decode(self) -> None:
        for peer in self.peers:
            peer.sendall(b"decode\n")
        self.log.replay(self.args)

    def _watch(self, peer: socket.socket) -> None:
        try:
            _read_line(peer)
        except (OSError, EOFError):
            pass
        self.log.engine_dead()
        if self.engine is not None:
            self.engine.dead.set()


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(65536) if not line else connection.recv(1)
        if not part:
            raise EOFError
        line += part
    return line.strip()


if __name__ == "__main__":
    code = Rank(sys.argv[1:]).run()
    sys.stdout.flush()
    os._exit(code)
