"""moto's S3 behind answers that go wrong when they are told to."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from checkrun_format.testing import servers

How = Literal["answer", "drop", "lose", "half"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with the next requests that match.

    `answer`: an error is answered, and nothing done. `drop`: the connection ends, and nothing is done. `lose`: the
    request is carried out, and the connection ends instead of an answer. `half`: it ends in the middle of the body.
    """

    how: How = "answer"
    code: str = ""
    status: int = 503
    message: str = "told to fail"
    method: str = ""
    key: str = ""
    times: int = 1


class FlakyS3:
    """A server in this process.

    Attributes
    ----------
    faults : list of Fault
        The first that matches happens, `times` times.
    happened : list of text
        Method and path of each request that went wrong.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.happened: list[str] = []
        self._left: dict[int, int] = {}
        self._lock = threading.Lock()
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=_Quiet)
        self.endpoint_url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def arm(self, *faults: Fault) -> None:
        self.faults, self.happened = list(faults), []
        self._left = {id(fault): fault.times for fault in self.faults}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def bucket(self) -> str:
        name = f"bucket-{time.monotonic_ns()}"
        servers.create_bucket(self.endpoint_url, name)
        return name

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        fault = self._next(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if fault is None:
            answer: Iterable[bytes] = self._moto(environ, start_response)
            return answer
        if fault.how == "answer":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            text = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>{fault.message}</Message></Error>"
            body = text.encode()
            start_response(
                f"{fault.status} x", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
            )
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]
        if fault.how == "half":
            return self._half(environ, start_response)
        if fault.how == "lose":
            list(self._moto(environ, lambda *_: None))
        _end(environ)
        raise ConnectionResetError

    def _half(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        body = b"".join(self._moto(environ, start_response))
        yield body[: len(body) // 2]
        time.sleep(0.05)
        _end(environ)
        raise ConnectionResetError

    def _next(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.method in ("", method) and fault.key in path and self._left[id(fault)] > 0:
                    self._left[id(fault)] -= 1
                    self.happened.append(f"{method} {path}")
                    return fault
        return None


class _Quiet(MotoRequestHandler):
    def log(self, *_: Any, **__: Any) -> None:
        pass


def _end(environ: dict[str, Any]) -> None:
    found: socket.socket = environ["werkzeug.socket"]
    with contextlib.suppress(OSError):
        found.shutdown(socket.SHUT_RDWR)
