"""requests over a link that is neither TCP nor TLS: a unix socket, or a channel of an ssh connection."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

from pytest_dspark.errors import HostError

MAX_LINKS = 4
LINK_S = 10.0
Dial = Callable[[], Any]


def dial_unix(path: str) -> socket.socket:
    """A connected unix socket. Raises OSError, and leaves nothing open then."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(LINK_S)
        link.connect(path)
    except OSError:
        link.close()
        raise
    return link


class _Connection(HTTPConnection):
    """HTTP over a dialed link. A link that knows why it ended (`failure()`) is asked before the error goes on."""

    def __init__(self, *args: Any, dial: Dial, **more: Any) -> None:
        super().__init__(*args, **more)
        self._dial = dial
        self._link: Any = None

    def connect(self) -> None:
        self.sock = self._link = self._dial()

    @property
    def is_connected(self) -> bool:
        alive: bool | None = getattr(self.sock, "alive", None)
        return super().is_connected if alive is None else alive

    def send(self, data: Any) -> None:
        with self._explained():
            super().send(data)

    def getresponse(self) -> Any:
        with self._explained():
            return super().getresponse()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (HTTPException, OSError) as error:
            why: HostError | None = getattr(self._link, "failure", lambda: None)()
            if why:
                raise why from error
            raise


class _Pool(HTTPConnectionPool):
    """Waits a bounded time for one of its links."""

    ConnectionCls = _Connection

    def _get_conn(self, timeout: float | None = None) -> Any:
        return super()._get_conn(timeout or LINK_S)


class LinkAdapter(HTTPAdapter):
    """At most four links to one server, each used again or closed."""

    def __init__(self, dial: Dial) -> None:
        self._pool = _Pool("localhost", maxsize=MAX_LINKS, block=True, dial=dial)
        super().__init__()

    def get_connection_with_tls_context(self, *_args: Any, **_more: Any) -> HTTPConnectionPool:
        return self._pool

    def get_connection(self, *_args: Any, **_more: Any) -> HTTPConnectionPool:
        return self._pool

    def request_url(self, request: requests.PreparedRequest, proxies: Any) -> str:
        return request.path_url

    def close(self) -> None:
        self._pool.close()
        super().close()
