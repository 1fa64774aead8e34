"""A server double that sends exactly the bytes a test wants, in exactly the pieces it wants.

Real sockets, a thread a connection. `serving(answer)` yields a Server; `answer(request)` gives the steps of the answer:
bytes (one send each), a float (seconds to wait), or one of CLOSE, RESET and HANG. The functions below build the bytes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

CLOSE, RESET, HANG = "close", "reset", "hang"
DONE = b"data: [DONE]\n\n"
MODELS = json.dumps({"object": "list", "data": [{"id": "double", "object": "model"}]}).encode()

Step = bytes | float | str


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int  # number of the connection it came on, from 0


@dataclass
class Server:
    port: int
    requests: list[Request] = field(default_factory=list)  # those for completions
    models: bytes = MODELS  # what a GET is answered with

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def head(status: str = "200 OK", kind: str = "text/event-stream", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


CHUNKED = head(Transfer_Encoding="chunked")
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(document: Any) -> bytes:
    text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
    return b"data: " + text.encode() + b"\n\n"


def usage(completion: Any, prompt: Any = 7, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, **more}


def said(text: str, count: Any = None, *, reason: str | None = None) -> bytes:
    """A chunk of /v1/completions, with the running count when `count` is given."""
    document: dict[str, Any] = {
        "id": "cmpl-1",
        "model": "double",
        "choices": [{"index": 0, "text": text, "finish_reason": reason}],
    }
    if count is not None:
        document["usage"] = usage(count)
    return event(document)


def delta(delta: dict[str, Any], *, reason: str | None = None, count: Any = None) -> bytes:
    """A chunk of /v1/chat/completions."""
    document: dict[str, Any] = {
        "id": "chat-1",
        "model": "double",
        "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
    }
    if count is not None:
        document["usage"] = usage(count)
    return event(document)


def total(completion: Any, prompt: Any = 7, **more: Any) -> bytes:
    """The last chunk: no choices, the usage of all."""
    return event({"id": "cmpl-1", "model": "double", "choices": [], "usage": usage(completion, prompt, **more)})


def stream(*events: bytes) -> list[Step]:
    """A whole chunked answer, each event its own HTTP chunk and its own send."""
    return [CHUNKED, *(chunk(one) for one in events), END]


def plain(status: str, body: bytes, kind: str = "application/json", **headers: str) -> list[Step]:
    return [head(status, kind, Content_Length=str(len(body)), **headers) + body]


def _read(sock: socket.socket, held: bytearray, connection: int) -> Request | None:
    while (end := held.find(b"\r\n\r\n")) < 0:
        data = sock.recv(65536)
        if not data:
            return None
        held += data
    lines = held[:end].decode().split("\r\n")
    del held[: end + 4]
    method, path, _ = lines[0].split(" ")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
    length = int(headers.get("content-length", 0))
    while len(held) < length:
        data = sock.recv(65536)
        if not data:
            return None
        held += data
    body = json.loads(bytes(held[:length])) if length else None
    del held[:length]
    return Request(method, path, headers, body, connection)


@contextlib.contextmanager
def serving(answer: Callable[[Request], Iterable[Step]], tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """Serves until the block is left. The list of models is answered by itself."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    server = Server(listener.getsockname()[1])
    sockets: list[socket.socket] = []
    over = threading.Event()

    def handle(sock: socket.socket, number: int) -> None:
        held = bytearray()
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stack.enter_context(sock)
            if tls is not None:
                sock = stack.enter_context(tls.wrap_socket(sock, server_side=True))
            while (request := _read(sock, held, number)) is not None:
                if request.method == "GET":
                    steps: Iterable[Step] = plain("200 OK", server.models)
                else:
                    server.requests.append(request)
                    steps = answer(request)
                for step in steps:
                    if isinstance(step, bytes):
                        sock.sendall(step)
                    elif isinstance(step, float):
                        time.sleep(step)
                    elif step == HANG:
                        over.wait(30)
                        return
                    else:
                        if step == RESET:
                            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        else:
                            sock.shutdown(socket.SHUT_RDWR)
                        return

    def accept() -> None:
        with contextlib.suppress(OSError):
            for number in range(1 << 30):
                sock, _ = listener.accept()
                sockets.append(sock)
                threading.Thread(target=handle, args=(sock, number), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        thread.join(5)
