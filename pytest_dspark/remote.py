"""How xdist workers reach the stage: one private AF_UNIX listener of the controller, whose address and key travel in
`workerinput`. One request is one call by name; errors travel as themselves.
"""

from __future__ import annotations

import secrets
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from pytest_dspark.errors import BlockedError, DsparkError
from pytest_dspark.stage import Stage
from pytest_dspark.verdict import Finding

CALLS = frozenset(
    {
        "expect",
        "acquire",
        "enter",
        "leave",
        "alive",
        "diagnose",
        "readings",
        "launch_finding",
        "gate_finding",
        "teardown_finding",
    }
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the stage listens; `key` authenticates both sides."""

    path: str
    key: str


class StageServer:
    """Answers workers, one thread a connection, until the process ends."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._folder = tempfile.TemporaryDirectory(prefix="dspark-")
        key = secrets.token_bytes(32)
        self.address = Address(str(Path(self._folder.name) / "stage"), key.hex())
        self._listener = Listener(self.address.path, family="AF_UNIX", authkey=key)
        threading.Thread(target=self._accept, name="dspark-stage", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, ConnectionError):
                continue  # a stranger that failed the authentication
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Answer one worker's requests; what it holds when it goes away (a crash) is given back."""
        held: list[bool] = []
        try:
            while True:
                name, args, keywords = connection.recv()
                answer = self._answer(name, args, keywords)
                if name == "enter" and answer[0]:
                    held.append(args[1])
                connection.send(answer)
                if name == "leave":
                    held.remove(args[0])
        except (EOFError, OSError):
            pass  # the worker is gone
        finally:
            connection.close()  # whatever ended this thread, the worker must not wait for an answer
            for exclusive in held:
                self._stage.leave(exclusive)

    def _answer(self, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[bool, Any]:
        if name not in CALLS:
            return False, BlockedError("HARNESS", f"the stage has no call {name!r}")
        try:
            return True, getattr(self._stage, name)(*args, **keywords)
        except DsparkError as error:
            return False, error

    def close(self) -> None:
        self._listener.close()
        self._folder.cleanup()


class RemoteStage:
    """The stage as a worker sees it: the same calls, each a request to the controller."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._local = threading.local()

    def _connection(self) -> Connection:
        if not hasattr(self._local, "connection"):
            self._local.connection = Client(
                self._address.path, family="AF_UNIX", authkey=bytes.fromhex(self._address.key)
            )
        connection: Connection = self._local.connection
        return connection

    def _call(self, name: str, *args: Any, **keywords: Any) -> Any:
        try:
            connection = self._connection()
            connection.send((name, args, keywords))
            good, value = connection.recv()
        except (EOFError, OSError) as error:
            raise BlockedError("BLOCKED", f"the controller is gone: {error}") from error
        if not good:
            raise value
        return value

    def expect(self, cases: Sequence[tuple[str, str, str]], suites: Sequence[str] = ()) -> None:
        self._call("expect", list(cases), list(suites))

    def acquire(self, mark: str) -> dict[str, Any]:
        result: dict[str, Any] = self._call("acquire", mark, patient=True)
        return result

    def enter(self, mark: str, exclusive: bool) -> None:
        self._call("enter", mark, exclusive)

    def leave(self, exclusive: bool) -> None:
        self._call("leave", exclusive)

    def alive(self, mark: str) -> None:
        self._call("alive", mark)

    def diagnose(self, mark: str) -> DsparkError | None:
        result: DsparkError | None = self._call("diagnose", mark)
        return result

    def readings(self, mark: str) -> dict[str, dict[str, Any]]:
        result: dict[str, dict[str, Any]] = self._call("readings", mark)
        return result

    def launch_finding(self, mark: str) -> Finding:
        result: Finding = self._call("launch_finding", mark, patient=True)
        return result

    def gate_finding(self, mark: str, requirement: str) -> Finding:
        result: Finding = self._call("gate_finding", mark, requirement, patient=True)
        return result

    def teardown_finding(self, mark: str) -> Finding:
        result: Finding = self._call("teardown_finding", mark, patient=True)
        return result
