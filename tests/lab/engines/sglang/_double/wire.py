"""HTTP/1.1 as uvicorn speaks it, for one thread: connections that read requests and write what a loop hands them."""

import selectors
import time
from email.utils import formatdate

from sglang._double import log

PHRASES = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}
MOST_HEADER, MOST_BODY = 65536, 256 << 20


class Incoming:
    __slots__ = ("body", "close", "headers", "method", "path", "query")

    def __init__(self, method, target, headers, body, close):
        self.method, self.headers, self.body, self.close = method, headers, body, close
        self.path, _, self.query = target.partition("?")


class Connection:
    """One client. `handle(connection, incoming)` is called for each request, one at a time."""

    def __init__(self, loop, sock, peer, handle):
        self.loop, self.socket, self.peer, self.handle = loop, sock, peer, handle
        self.input, self.output = bytearray(), bytearray()
        self.busy = self.closing = self.chunked = self.closed = False
        self.incoming = None
        self.on_close = None
        loop.selector.register(sock, selectors.EVENT_READ, self)

    def ready(self, mask):
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if mask & selectors.EVENT_READ and not self.closed:
            self._read()

    def _read(self):
        try:
            data = self.socket.recv(1 << 18)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self.input += data
        self._next()

    def _next(self):
        while not self.busy and not self.closed:
            end = self.input.find(b"\r\n\r\n")
            if end < 0:
                if len(self.input) > MOST_HEADER:
                    self.close()
                return
            lines = bytes(self.input[:end]).decode("latin-1").split("\r\n")
            method, _, rest = lines[0].partition(" ")
            target, _, version = rest.partition(" ")
            if not method.isalpha() or not version.startswith("HTTP/1."):
                self._refuse()
                return
            headers = {}
            for line in lines[1:]:
                key, _, value = line.partition(":")
                headers[key.strip().lower()] = value.strip()
            length = int(headers.get("content-length") or 0)
            if length > MOST_BODY:
                self.close()
                return
            if headers.get("expect", "").lower() == "100-continue" and len(self.input) < end + 4 + length:
                self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
                headers.pop("expect")
            if len(self.input) < end + 4 + length:
                return
            body = bytes(self.input[end + 4 : end + 4 + length])
            del self.input[: end + 4 + length]
            close = headers.get("connection", "").lower() == "close" or version == "HTTP/1.0"
            self.busy = True
            self.incoming = Incoming(method, target, headers, body, close)
            self.handle(self, self.incoming)

    def _refuse(self):
        log.line("WARNING:  Invalid HTTP request received.")
        self.closing = True
        self.send(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\r\n"
            b"Invalid HTTP request received."
        )
        self._flush()

    def respond(self, status, body=b"", kind="application/json", extra=()):
        head = ["HTTP/1.1 %d %s" % (status, PHRASES.get(status, "")), "date: " + self.loop.date(), "server: uvicorn"]
        head.append("content-length: %d" % len(body))
        if body and kind:
            head.append("content-type: " + kind)
        head += ["%s: %s" % pair for pair in extra]
        if self.incoming.close:
            head.append("connection: close")
        self.send(("\r\n".join(head) + "\r\n\r\n").encode() + body)
        self.done()

    def begin(self, kind):
        """Starts a chunked response."""
        self.chunked = True
        self.send(
            (
                "HTTP/1.1 200 OK\r\ndate: %s\r\nserver: uvicorn\r\ncontent-type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
                % (self.loop.date(), kind)
            ).encode()
        )

    def chunk(self, *parts):
        """Writes parts, each a chunk of its own, with one send(2)."""
        self.send(b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts))

    def end(self):
        self.send(b"0\r\n\r\n")
        self.chunked = False
        self.done()

    def done(self):
        """The answer is complete; the next request, if one came already, is taken up."""
        self.busy, self.on_close = False, None
        if self.incoming.close:
            self.closing = True
            self._flush()
        else:
            self._next()

    def send(self, data):
        if self.closed:
            return
        if not self.output:
            try:
                sent = self.socket.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self.close()
                return
            if sent == len(data):
                return
            data = data[sent:]
        self.output += data
        self.loop.selector.modify(self.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def _flush(self):
        if self.output and not self.closed:
            try:
                sent = self.socket.send(self.output)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self.close()
                return
            del self.output[:sent]
        if not self.output and not self.closed:
            self.loop.selector.modify(self.socket, selectors.EVENT_READ, self)
            if self.closing:
                self.close()

    def close(self):
        if self.closed:
            return
        self.closed = True
        try:
            self.loop.selector.unregister(self.socket)
        except KeyError:
            pass
        self.socket.close()
        if self.on_close:
            self.on_close()


class Date:
    """The `date` header, made once a second."""

    def __init__(self):
        self._second, self._text = 0, ""

    def __call__(self):
        second = int(time.time())
        if second != self._second:
            self._second, self._text = second, formatdate(second, usegmt=True)
        return self._text
