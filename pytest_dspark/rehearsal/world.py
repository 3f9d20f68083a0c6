"""The ranks of one engine and the lines between them: one TCP connection from each worker to the head.

A worker says who it is and with which command line it was started. The head waits until all are there, silently, and goes on
only if all command lines agree; else everyone waits for ever, as the real ones do. Afterwards lines of text go both ways:
`at NAME` / `go NAME` (all wait for all), `step` / `ok` (all take part), `made N D` (N tokens so far, D of 1: some were decoded).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import argv as arguments
from argv import Settings

CONNECT_S = 5.0
RETRY_S = 0.05
STORE_TIMEOUT_S = 1800.0
_LIMIT = 2**20


class Lost(Exception):
    """Another rank's process is gone."""


class NotMet(Exception):
    """The ranks did not come together; the text is what the engine prints."""


@dataclass(slots=True, eq=False)
class Line:
    """One connection. `lost` is set when the other end is gone."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    rank: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    said: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write(text.encode() + b"\n")

    async def listen(self) -> None:
        """Move what is said into `said` until the other end is gone."""
        with contextlib.suppress(OSError):
            while raw := await self.reader.readline():
                self.said.put_nowait(raw.decode().strip())
        self.lost.set()

    async def hear(self) -> str:
        """The next line; raises Lost when none comes any more."""
        heard, lost = asyncio.ensure_future(self.said.get()), asyncio.ensure_future(self.lost.wait())
        await asyncio.wait({heard, lost}, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if heard.done():
            return heard.result()
        heard.cancel()
        raise Lost

    async def expect(self, text: str) -> None:
        while await self.hear() != text:
            pass


class Head:
    """Rank 0: listens for the others and leads them."""

    def __init__(self, settings: Settings, argv: list[str]) -> None:
        self._settings, self._argv = settings, argv
        self._complete = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.lines: dict[int, Line] = {}
        self.lossy = 0

    async def meet(self) -> None:
        """Until every rank is there. Raises NotMet for a port that is taken, or after the store's time-out."""
        where = self._settings.master_addr, self._settings.master_port
        if self._settings.nnodes == 1:
            return
        try:
            self._server = await asyncio.start_server(self._hello, *where, limit=_LIMIT)
        except OSError as error:
            text = f"The server socket has failed to listen on any local network address. port: {where[1]}, code: -{error.errno}"
            raise NotMet(f"torch.distributed.DistNetworkError: {text}, message: {error.strerror}") from error
        try:
            await asyncio.wait_for(self._complete.wait(), STORE_TIMEOUT_S)
        except TimeoutError as error:
            here = f"{len(self.lines) + 1}/{self._settings.nnodes} clients joined"
            text = f"Timed out after {STORE_TIMEOUT_S + 1:.0f} seconds waiting for clients. {here}."
            raise NotMet(f"torch.distributed.DistStoreError: {text}") from error
        await self.together("world")

    async def _hello(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = json.loads(await reader.readline())
            rank, argv, lossy = int(hello["rank"]), list(hello["argv"]), int(hello.get("lossy") or 0)
        except (ValueError, KeyError, TypeError, OSError):
            writer.close()
            return
        if not 0 < rank < self._settings.nnodes or rank in self.lines:
            return
        line = Line(reader, writer, rank)
        self.lines[rank] = line
        self.lossy = self.lossy or lossy
        task = asyncio.create_task(line.listen())
        self._tasks.add(task)
        self._same = getattr(self, "_same", True) and arguments.comparable(argv) == arguments.comparable(self._argv)
        if len(self.lines) == self._settings.nnodes - 1 and self._same:
            self._complete.set()

    async def together(self, name: str) -> None:
        """Until all ranks have come to this point. One that is lost on the way keeps the others waiting, silently."""
        for line in self.lines.values():
            with contextlib.suppress(Lost):
                await line.expect(f"at {name}")
                continue
            await asyncio.Event().wait()
        for line in self.lines.values():
            line.say(f"go {name}")

    async def step(self) -> None:
        """One round trip to every worker. Raises Lost."""
        for line in self.lines.values():
            line.say("step")
        for line in self.lines.values():
            await line.expect("ok")

    def made(self, tokens: int, decoded: bool) -> None:
        for line in self.lines.values():
            line.say(f"made {tokens} {int(decoded)}")

    async def lost(self) -> None:
        """Until the first worker is gone."""
        waits = [asyncio.ensure_future(line.lost.wait()) for line in self.lines.values()]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED) if waits else await asyncio.Event().wait()


class Worker:
    """Any other rank: joins the head and follows it."""

    def __init__(self, settings: Settings, argv: list[str], lossy: int = 0) -> None:
        self._settings, self._argv, self._lossy = settings, argv, lossy
        self.line: Line | None = None

    async def meet(self) -> None:
        """Until the head is there and all ranks have come. Raises NotMet after the store's time-out, Lost."""
        async with asyncio.timeout(STORE_TIMEOUT_S):
            line = self.line = await self._connected()
        line.say(json.dumps({"rank": self._settings.node_rank, "argv": self._argv, "lossy": self._lossy}))
        self._listening = asyncio.create_task(line.listen())
        await self.together("world")

    async def _connected(self) -> Line:
        where = self._settings.master_addr, self._settings.master_port
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    return Line(*await asyncio.open_connection(*where, limit=_LIMIT))
            await asyncio.sleep(RETRY_S)

    async def together(self, name: str) -> None:
        assert self.line is not None
        self.line.say(f"at {name}")
        await self.line.expect(f"go {name}")

    async def follow(self, made: Callable[[int, bool], None], answers: Callable[[], bool]) -> None:
        """Take part in the steps until the head is gone (raises Lost). `answers` says whether this rank still does."""
        assert self.line is not None
        while True:
            word, *values = (await self.line.hear()).split(" ")
            if word == "step" and answers():
                self.line.say("ok")
            elif word == "made":
                made(int(values[0]), values[1] == "1")
