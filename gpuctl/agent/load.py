"""Load generator for OpenAI-compatible servers: one file, standard library, Python 3.9 and newer, Linux.

Reads one job (JSON) from stdin, writes JSON lines to stdout: one per finished request, a summary last. Several jobs to
be done one after another are {"jobs": [...]}: each has its summary, and after one with a failed request none is begun.

One thread, one epoll loop over raw sockets. While requests run it only notes when bytes came, and keeps them; they are
parsed when the stream has ended and nothing is waiting to be read. The kernel stamps each segment as it arrives
(SO_TIMESTAMPNS), so a stamp stays right when this process comes late to read it, and how late it came is known: that is
the lag in the summary. Where the kernel has no stamp, the moment just after recv(2) is taken.

The job. Only `url`, `requests` and one of `concurrency` and `rate` are needed:
  url            http[s]://host[:port] with or without /v1, or the full path of the endpoint
  api            "completions" | "chat" (default: by the url, else completions)
  model          name to send; without it the first one of /v1/models
  api_key        sent as bearer token; headers: {name: value} to add
  requests       [{"id", "prompt"} | {"id", "messages"} | {"id", "turns", "system"}], each with "max_tokens", "body" if
                 it differs. `turns` is a session: each turn (a string, a message or a list of messages) is one
                 request, sent after the answer to the one before, which stays in the conversation.
  max_tokens     asked for by every request
  body           fields for every request ({"temperature": 0, "ignore_eos": true}); null takes a field away
  usage          "continuous" (default) | "final" | "none" | "auto" (asks the server once, for one token, what it takes)
  concurrency    so many at a time; with `rate`: at most so many at a time
  rate           requests a second; arrival: "constant" (default) | "poisson"; seed: of its intervals
  duration_s     goes through `requests` again and again for so long
  timeout_s      of a request (600); stall_s: without data, once an answer has begun to hold some (60); connect_s (10)
  text           true: the answers' text in the lines; starts: true: a line when a request starts

A line of a finished request. Times are seconds of CLOCK_MONOTONIC, to the microsecond:
  type "request", id, prompt (the id in the job), turn (from 0; null outside sessions), response_id, model, status,
  t_scheduled (open loop), t_request (just before the first byte is sent; before connecting, where that was needed),
  connect_ms (0 on a connection kept alive), t_chunks (of each chunk with content), tokens (cumulative at each of them,
  null where the server does not say), t_end, usage, finish_reason, max_tokens, timings, spec, bytes, text, reasoning,
  error: null or {"kind", "message"}; kinds: refused unreachable connect_timeout timeout stalled cut http_error
  server_error not_streaming bad_response empty not_sent interrupted

Exit: 0 the job was done (also when requests failed), 2 the job is wrong, 3 the server could not be reached,
4 interrupted (SIGTERM, SIGINT). 2 and 3 say why in one line on stderr. When stdout's reader goes away, it ends at once.
"""

from __future__ import annotations

import array
import errno
import gc
import json
import os
import platform
import random
import re
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Optional

if sys.version_info < (3, 9):
    sys.exit("the load generator needs Python 3.9 or newer, and %s is %s" % (sys.executable, platform.python_version()))

VERSION = "1"

_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; x86, arm, riscv, power. Elsewhere setsockopt fails or the stamp is refused
_TIMESPEC = struct.Struct("ll")
_READ = 65536
_USAGE = ("continuous", "final", "none")
_SLICE = 24  # events parsed between two looks at the sockets: about 0.1 ms

monotonic_ns = time.monotonic_ns

Failure = Optional[tuple[str, str]]  # (kind, message)
Piece = tuple[int, bytes]  # (stamp in ns, data)


class BadJob(Exception):
    """The job cannot be done as it is written."""


class NoServer(Exception):
    """The server cannot be reached."""


class BadAnswer(Exception):
    """What came is not HTTP."""


# --- the answer, after it ended


class Framer:
    """Takes an HTTP/1.x answer apart: head, and body pieces with the stamps of the reads that completed them."""

    __slots__ = ("body", "close", "ended", "headers", "left", "mode", "rest", "state", "status")

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body: list[Piece] = []
        self.mode = "head"  # head | chunked | length | until close
        self.state = "size"  # of chunked: size | data | data end | trailer
        self.left = 0
        self.rest = b""  # of a line that is not complete yet
        self.close = False  # the server will not keep the connection
        self.ended = False

    def feed(self, stamp: int, data: bytes) -> None:
        """Takes the next piece. Raises BadAnswer."""
        if self.ended:
            self.close = True  # bytes after the end: nothing that we asked for
            return
        while self.mode == "head":  # more than once when a 1xx comes first
            data = self.rest + data
            self.rest = b""
            if not data.startswith(b"HTTP/1."[: len(data)]):
                raise BadAnswer("the answer is not HTTP: %r" % data[:60])
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > 1 << 18:
                    raise BadAnswer("the head of the answer does not end within 256 KiB")
                self.rest = data
                return
            self._head(data[:end])
            data = data[end + 4 :]
        if self.mode == "chunked":
            self._chunks(stamp, data)
        elif self.mode == "length":
            if data:
                self.body.append((stamp, data[: self.left]))
            if len(data) > self.left:
                self.close = True
            self.left -= len(data)
            self.ended = self.left <= 0
        elif data:
            self.body.append((stamp, data))

    def _head(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        words = lines[0].split(None, 2)
        if len(words) < 2 or not re.fullmatch(rb"[1-9]\d\d", words[1]):
            raise BadAnswer("no HTTP status: %r" % lines[0][:60])
        status = int(words[1])
        if status < 200:
            return
        self.status = status
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            self.headers[name.strip().lower().decode("latin-1")] = value.strip().decode("latin-1")
        connection = self.headers.get("connection", "").lower()
        self.close = "close" in connection or (words[0] == b"HTTP/1.0" and "keep-alive" not in connection)
        length = self.headers.get("content-length", "")
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self.mode = "chunked"
        elif re.fullmatch(r"\d{1,15}", length):
            self.mode = "length"
            self.left = int(length)
        elif status in (204, 304):
            self.mode = "length"
        else:
            self.mode = "until close"
            self.close = True

    def _chunks(self, stamp: int, data: bytes) -> None:
        at = 0
        while True:
            if self.state == "data":
                piece = data[at : at + self.left]
                if piece:
                    self.body.append((stamp, piece))
                at += len(piece)
                self.left -= len(piece)
                if self.left:
                    return
                self.state = "data end"
            end = data.find(b"\n", at)
            if end < 0:
                self.rest += data[at:]
                if len(self.rest) > 1 << 16:
                    raise BadAnswer("a chunk's size does not end within 64 KiB")
                return
            line = (self.rest + data[at:end]).rstrip(b"\r")
            self.rest = b""
            at = end + 1
            if self.state == "size":
                size = line.split(b";", 1)[0].strip()
                if not re.fullmatch(rb"[0-9a-fA-F]{1,12}", size):
                    raise BadAnswer("not the size of a chunk: %r" % line[:60])
                self.left = int(size, 16)
                self.state = "data" if self.left else "trailer"
            elif self.state == "data end":
                if line:
                    raise BadAnswer("a chunk is longer than its size: %r" % line[:60])
                self.state = "size"
            elif not line:
                self.ended = True
                if at < len(data):
                    self.close = True
                return


def lines_of(body: Iterable[Piece]) -> Iterator[Piece]:
    """Lines of stamped pieces, and the stamp of the piece that completed each. Only \\n ends one: U+2028 is text."""
    held: list[bytes] = []
    stamp = 0
    for stamp, data in body:
        at = 0
        end = data.find(b"\n")
        while end >= 0:
            if held:
                held.append(data[at:end])
                yield stamp, b"".join(held)
                held = []
            else:
                yield stamp, data[at:end]
            at = end + 1
            end = data.find(b"\n", at)
        if at < len(data):
            held.append(data[at:])
    if held:
        yield stamp, b"".join(held)


def _decode(data: bytes) -> Any:
    """JSON of one event, or None. NaN and infinity are no JSON and become null."""
    try:
        return json.loads(data, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def words_of(document: Any) -> str:
    """The server's own words in an error document, in the shapes servers use."""
    if isinstance(document, dict):
        for key in ("error", "message", "detail"):
            value = document.get(key)
            if isinstance(value, dict):
                value = value.get("message") or value
            if value:
                return value if isinstance(value, str) else json.dumps(value)
    return document if isinstance(document, str) else json.dumps(document)


def _is_error(document: Any) -> bool:
    return isinstance(document, dict) and (bool(document.get("error")) or document.get("object") == "error")


_SAYS = ("content", "reasoning_content", "reasoning", "refusal")
_SPEC = ("spec_accept_length", "spec_verify_ct", "spec_accept_rate", "spec_accept_token_num", "spec_draft_token_num")


class Answer:
    """What one answer held."""

    def __init__(self) -> None:
        self.response_id: str | None = None
        self.model: str | None = None
        self.finish_reason: Any = None
        self.usage: dict[str, Any] | None = None
        self.timings: dict[str, Any] | None = None
        self.spec: dict[str, Any] | None = None
        self.stamps: list[int] = []
        self.tokens: list[Any] = []
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.events = 0
        self.done = False
        self.whole = True  # the body did not end in the middle of an event
        self.error: Failure = None  # found inside the stream

    def read(self, body: Iterable[Piece]) -> Iterator[None]:
        """Reads a body of server-sent events. A generator: every yield is a moment to look at the sockets."""
        held = b""
        for stamp, line in lines_of(body):
            line = line.rstrip(b"\r")
            if not line:
                if held:
                    self._odd(held)
                held = b""
                continue
            if not line.startswith(b"data:"):  # a comment, event:, id:, retry:, or no event stream at all
                continue
            self.events += 1
            if not self.events % _SLICE:
                yield
            data = line[5:].strip()
            if data == b"[DONE]":
                self.done = True
                continue
            if held:  # an event may spread over several data lines
                data = held + b"\n" + data
            document = _decode(data)
            if document is None:
                held = data
                continue
            held = b""
            if isinstance(document, dict):
                self._event(stamp, document)
            else:
                self._odd(data)
        self.whole = not held

    def _odd(self, data: bytes) -> None:
        if self.error is None:
            text = data[:120].decode("utf-8", "replace")
            self.error = ("bad_response", "event %d is no JSON object: %s" % (self.events, text))

    def _event(self, stamp: int, document: dict[str, Any]) -> None:
        if _is_error(document):
            self.error = ("server_error", words_of(document)[:2000])
            return
        usage = document.get("usage")
        timings = document.get("timings")
        count = None
        if isinstance(usage, dict):
            self.usage = usage
            count = usage.get("completion_tokens")
        if isinstance(timings, dict):  # llama.cpp; in every chunk with timings_per_token
            self.timings = timings
            if count is None:
                count = timings.get("predicted_n")
        for key in ("metrics", "meta_info", "sglext"):  # vLLM's last chunk; SGLang's extras
            extra = document.get(key)
            if isinstance(extra, dict):
                if key == "metrics":
                    self.timings = {**(self.timings or {}), **extra}
                found = {name: extra[name] for name in _SPEC if name in extra}
                if found:
                    self.spec = {**(self.spec or {}), **found}
        if self.response_id is None and isinstance(document.get("id"), str):
            self.response_id = document["id"]
        if self.model is None and isinstance(document.get("model"), str):
            self.model = document["model"]
        choices = document.get("choices")
        says = False
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            if choice.get("finish_reason") is not None:
                self.finish_reason = choice["finish_reason"]
            text = choice.get("text")
            if isinstance(text, str) and text:
                says = True
                self.text.append(text)
            delta = choice.get("delta")
            if not isinstance(delta, dict):
                continue
            for key in _SAYS:
                text = delta.get(key)
                if isinstance(text, str) and text:
                    says = True
                    (self.text if key == "content" else self.reasoning).append(text)
            if delta.get("tool_calls") or delta.get("function_call"):
                says = True
        if says:
            self.stamps.append(stamp)
            self.tokens.append(count)


def read_answer(framer: Framer, failure: Failure) -> Generator[None, None, tuple[Answer, Failure]]:
    """Reads what a framer took apart. Returns (Answer, error or None) from a generator.

    `failure` is (kind, message) of the connection. It is forgiven when the answer was complete before it.
    """
    answer = Answer()
    status = framer.status
    if status is None:
        return answer, failure or ("cut", "the connection was closed without an answer")
    if not 200 <= status < 300:
        said = b"".join(data for _, data in framer.body)[:20000]
        document = _decode(said)
        words = words_of(document) if document is not None else said.decode("utf-8", "replace").strip()
        message = "HTTP %d" % status
        if "location" in framer.headers:
            message += " to %s: give that address instead" % framer.headers["location"]
        return answer, ("http_error", (message + (": " + words if words else ""))[:2000])
    yield from answer.read(framer.body)
    if answer.error is not None:
        return answer, answer.error
    if answer.events == 0 and not failure:
        said = b"".join(data for _, data in framer.body)
        document = _decode(said)
        kind = framer.headers.get("content-type", "no content type")
        if _is_error(document):
            return answer, ("server_error", words_of(document)[:2000])
        if isinstance(document, dict) and "choices" in document:
            return answer, ("not_streaming", "the server sent its answer in one piece (%s)" % kind)
        text = said[:200].decode("utf-8", "replace").strip()
        if kind.startswith("text/event-stream"):
            return answer, ("bad_response", "an event stream without an event%s" % (": " + text if text else ""))
        return answer, ("bad_response", "no event stream but %s: %s" % (kind, text or "nothing"))
    if not answer.done and answer.finish_reason is None:
        return answer, failure or ("cut", "the stream ended after %d events, without a finish_reason" % answer.events)
    if not answer.done and (failure or not answer.whole):
        return answer, failure or ("cut", "the stream ended in the middle of event %d" % answer.events)
    if not answer.stamps:
        return answer, ("empty", "no chunk had any content (finish_reason %s)" % answer.finish_reason)
    return answer, None


# --- the job


def endpoint(url: Any, api: str | None = None) -> tuple[str, str, int, str, str, str]:
    """(scheme, host, port, path of the completions endpoint, base path, api) of a server's address. Raises BadJob."""
    if not isinstance(url, str):
        raise BadJob("url: not a string")
    if "://" not in url:
        url = "http://" + url
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https"):
        raise BadJob("url: %s is neither http nor https" % url)
    match = re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^\s/:?#@\[\]]+)(?::(\d{1,5}))?(/(?!/)[^\s?#]*)?", rest)
    if match is None or not all(" " < c < "\x7f" for c in rest):
        raise BadJob("url: %s is not like http://host:port" % url)
    host, port, path = match.group(1).strip("[]"), match.group(2), (match.group(3) or "").rstrip("/")
    number = int(port) if port else (443 if scheme == "https" else 80)
    if not 0 < number < 65536:
        raise BadJob("url: there is no port %d" % number)
    for ending, kind in (("/chat/completions", "chat"), ("/completions", "completions")):
        if path.endswith(ending):
            if api not in (None, kind):
                raise BadJob("url: %s is not the address of the %s endpoint" % (url, api))
            return scheme, host, number, path, path[: -len(ending)], kind
    base = path if re.search(r"/v\d+$", path) else path + "/v1"
    api = api or "completions"
    return scheme, host, number, base + ("/chat" if api == "chat" else "") + "/completions", base, api


def _number(job: dict[str, Any], name: str, default: Any, least: float, whole: bool = False) -> Any:
    value = job.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise BadJob("%s: %r is not a %snumber" % (name, value, "whole " if whole else ""))
    if not least <= value < float("inf"):
        raise BadJob("%s: %r is less than %g" % (name, value, least))
    return value


_KEYS = frozenset(
    "url api model api_key headers requests max_tokens body usage concurrency rate arrival seed duration_s timeout_s"
    " stall_s connect_s text starts".split()
)


class Job:
    """The job, checked."""

    def __init__(self, job: Any) -> None:
        if not isinstance(job, dict):
            raise BadJob("the job is not a JSON object")
        unknown = sorted(set(job) - _KEYS)
        if unknown:
            raise BadJob("unknown key: %s" % ", ".join(unknown))
        api = job.get("api")
        if api not in (None, "completions", "chat"):
            raise BadJob("api: %r is neither completions nor chat" % (api,))
        self.scheme, self.host, self.port, self.path, self.base, self.api = endpoint(job.get("url"), api)
        self.model = job.get("model")
        self.max_tokens = _number(job, "max_tokens", None, 1, whole=True)
        self.concurrency: int | None = _number(job, "concurrency", None, 1, whole=True)
        self.rate = _number(job, "rate", None, 1e-6)
        if self.concurrency is None and self.rate is None:
            raise BadJob("neither concurrency nor rate is given")
        self.arrival = job.get("arrival", "constant")
        if self.arrival not in ("constant", "poisson"):
            raise BadJob("arrival: %r is neither constant nor poisson" % (self.arrival,))
        self.seed = job.get("seed", 0)
        self.duration_s = _number(job, "duration_s", None, 0.001)
        self.timeout_s = _number(job, "timeout_s", 600, 0.001)
        self.stall_s = _number(job, "stall_s", 60, 0.001)
        self.connect_s = _number(job, "connect_s", 10, 0.001)
        self.text = bool(job.get("text"))
        self.starts = bool(job.get("starts"))
        self.usage = job.get("usage", "continuous")
        if self.usage not in (*_USAGE, "auto"):
            raise BadJob("usage: %r is none of continuous, final, none, auto" % (self.usage,))
        self.body = job.get("body") or {}
        if not isinstance(self.body, dict):
            raise BadJob("body: not an object")
        self.requests: list[dict[str, Any]] = job.get("requests") or []
        if not isinstance(self.requests, list) or not self.requests:
            raise BadJob("requests: not a list with at least one request")
        for index, request in enumerate(self.requests):
            self._check(index, request)
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "User-Agent": "gpuctl"}
        if job.get("api_key"):
            headers["Authorization"] = "Bearer %s" % job["api_key"]
        headers.update(job.get("headers") or {})
        for name, value in headers.items():
            if not re.fullmatch(r"[!-~]+", str(name)) or not re.fullmatch(r"[\t -~\x80-\xff]*", str(value)):
                raise BadJob("headers: %s has a character that no header may have" % ascii(name))
        self.headers = headers
        host = "[%s]" % self.host if ":" in self.host else self.host
        lines = ["POST %s HTTP/1.1" % self.path, "Host: %s:%d" % (host, self.port)]
        lines += ["%s: %s" % item for item in headers.items()]
        self.head = "\r\n".join(lines).encode("latin-1") + b"\r\nContent-Length: "

    def _check(self, index: int, request: Any) -> None:
        where = "requests[%d]" % index
        if not isinstance(request, dict):
            raise BadJob("%s: not an object" % where)
        kinds = [key for key in ("prompt", "messages", "turns") if key in request]
        if len(kinds) != 1:
            raise BadJob("%s: exactly one of prompt, messages and turns is needed" % where)
        if kinds == ["messages"] and self.api != "chat":
            raise BadJob("%s: messages need the chat api" % where)
        if kinds != ["prompt"] and not (isinstance(request[kinds[0]], list) and request[kinds[0]]):
            raise BadJob("%s: %s is not a list with at least one entry" % (where, kinds[0]))
        for turn in request.get("turns", ()):
            if self.api != "chat" and not isinstance(turn, str):
                raise BadJob("%s: a turn that is not a string needs the chat api" % where)
        _number(request, "max_tokens", None, 1, whole=True)
        if not isinstance(request.get("body") or {}, dict):
            raise BadJob("%s: body is not an object" % where)

    def asked(self, request: dict[str, Any]) -> Any:
        """How many tokens the request asks for at most; None when it does not say."""
        for body in (request.get("body") or {}, self.body):
            for name in ("max_completion_tokens", "max_tokens"):
                if name in body:
                    return body[name]
        return request.get("max_tokens", self.max_tokens)

    def payload(self, request: dict[str, Any], content: Any) -> bytes:
        """The bytes of a request, head and body. `content` is the prompt, or the messages."""
        document = {"model": self.model, "messages" if self.api == "chat" else "prompt": content, "stream": True}
        if self.usage != "none":
            document["stream_options"] = {"include_usage": True}
            if self.usage == "continuous":
                document["stream_options"]["continuous_usage_stats"] = True
        document["max_tokens"] = request.get("max_tokens", self.max_tokens)
        document.update(self.body)
        document.update(request.get("body") or {})
        body = json.dumps({key: value for key, value in document.items() if value is not None}).encode()
        return self.head + b"%d\r\n\r\n" % len(body) + body


class Unit:
    """One entry of `requests`: a single request, or a session with its conversation so far."""

    def __init__(self, job: Job, request: dict[str, Any], index: int) -> None:
        self.job = job
        self.request = request
        self.prompt = str(request.get("id", index))
        self.turns: list[Any] = request.get("turns") or []
        self.turn = 0
        self.content: Any = request.get("prompt", "")  # the prompt, or the messages
        if job.api == "chat":
            self.content = list(request.get("messages") or [])
            for role, text in (("system", request.get("system")), ("user", request.get("prompt"))):
                if text is not None:
                    self.content.append({"role": role, "content": text})
        elif self.turns:
            self.content = request.get("system") or ""
        if self.turns:
            self._say(self.turns[0])
        self.payload = job.payload(request, self.content)

    def _say(self, turn: Any) -> None:
        if self.job.api != "chat":
            self.content += turn
        elif isinstance(turn, list):
            self.content += turn
        else:
            self.content.append(turn if isinstance(turn, dict) else {"role": "user", "content": turn})

    def last(self) -> bool:
        return self.turn + 1 >= len(self.turns)

    def go_on(self, answer: str) -> None:
        """Takes the answer into the conversation and prepares the next turn."""
        if self.job.api == "chat":
            self.content.append({"role": "assistant", "content": answer})
        else:
            self.content += answer
        self.turn += 1
        self._say(self.turns[self.turn])
        self.payload = self.job.payload(self.request, self.content)


# --- before anything is timed


def reach(job: Job) -> tuple[int, Any]:
    """Address of the server: (family, sockaddr). Takes the first that accepts. Raises NoServer."""
    where = "%s:%d" % (job.host, job.port)
    try:
        found = socket.getaddrinfo(job.host, job.port, 0, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NoServer("cannot find %s: %s" % (job.host, getattr(error, "strerror", None) or error)) from None
    why = None
    for family, _, _, _, address in found:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(job.connect_s)
            try:
                probe.connect(address)
                return family, address
            except socket.timeout:
                why = why or "%s did not answer within %g s" % (where, job.connect_s)
            except ConnectionRefusedError:
                why = "%s refused the connection: nothing listens there" % where
            except OSError as error:
                why = why or "cannot reach %s: %s" % (where, error.strerror or error)
    raise NoServer(why or "cannot find %s" % job.host)


def _ask(job: Job, method: str, path: str, body: bytes | None = None, timeout: float = 30.0) -> tuple[int, bytes]:
    """(status, body) of one plain request."""
    import http.client

    kind = http.client.HTTPSConnection if job.scheme == "https" else http.client.HTTPConnection
    connection = kind(job.host, job.port, timeout=timeout)
    try:
        connection.request(method, path, body, dict(job.headers))
        response = connection.getresponse()
        return response.status, response.read(1 << 20)
    except (OSError, http.client.HTTPException) as error:
        raise NoServer("%s:%d does not answer %s: %s" % (job.host, job.port, path, error)) from None
    finally:
        connection.close()


def first_model(job: Job) -> str | None:
    """Name of the first model the server lists, None when it lists none."""
    status, said = _ask(job, "GET", job.base + "/models", timeout=job.connect_s)
    document = _decode(said) if status == 200 else None
    data = document.get("data") if isinstance(document, dict) else None
    if isinstance(data, list) and data and isinstance(data[0], dict) and isinstance(data[0].get("id"), str):
        return str(data[0]["id"])
    return None


def usage_taken(job: Job) -> str:
    """The most exact kind of usage that the server does not refuse. Costs one token."""
    unit = {"max_tokens": 1}
    for level in _USAGE:
        job.usage = level
        content = [{"role": "user", "content": "Hi"}] if job.api == "chat" else "Hi"
        body = job.payload(unit, content).partition(b"\r\n\r\n")[2]
        status, said = _ask(job, "POST", job.path, body, timeout=job.timeout_s)
        if status not in (400, 422) or not re.search(rb"stream_options|continuous_usage|include_usage", said):
            return level
    return "none"


# --- the load


class Tls:
    """TLS over a socket that we read ourselves: the stamp is taken before anything is deciphered."""

    def __init__(self, context: Any, host: str) -> None:
        import ssl

        self.ssl = ssl
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.object = context.wrap_bio(self.incoming, self.outgoing, server_hostname=host)
        self.ready = False
        self.plain = b""

    def pump(self) -> None:
        """Goes on with the handshake. Raises OSError (SSLError)."""
        if not self.ready:
            try:
                self.object.do_handshake()
                self.ready = True
            except (self.ssl.SSLWantReadError, self.ssl.SSLWantWriteError):
                return
        if self.plain:
            self.object.write(self.plain)
            self.plain = b""

    def decipher(self, data: bytes) -> bytes:
        self.incoming.write(data)
        self.pump()
        out = []
        while self.ready:
            try:
                piece = self.object.read(_READ)
            except (self.ssl.SSLWantReadError, self.ssl.SSLZeroReturnError):
                break
            if not piece:
                break
            out.append(piece)
        return b"".join(out)


class Connection:
    __slots__ = ("exchange", "fd", "mask", "open", "out", "since", "sock", "tls", "used")

    def __init__(self, sock: socket.socket, since: int) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.since = since  # ns, when it began to connect
        self.open = False
        self.used = False  # has carried an answer
        self.exchange: Exchange | None = None
        self.out = memoryview(b"")
        self.mask = 0
        self.tls: Tls | None = None


class Exchange:
    """One request in flight."""

    def __init__(self, unit: Unit, number: int, scheduled: int | None) -> None:
        self.unit = unit
        self.number = number
        self.prompt = unit.prompt
        self.turn = unit.turn if unit.turns else None
        self.asked = unit.job.asked(unit.request)
        self.scheduled = scheduled
        self.started = 0
        self.connect_ms = 0.0
        self.pieces: list[Piece] = []  # read, and not yet given to the framer
        self.framer = Framer()
        self.spoke_at = 0  # ns of the last read that held data
        self.connection: Connection | None = None
        self.again = False  # sent a second time: the kept connection was closed under it

    def take(self, stamp: int, data: bytes) -> bool:
        """Keeps what was read; true when the answer ends with it. Raises BadAnswer.

        In a chunked body only a piece that ends like its last line, or a fragment, can be the end: the rest waits.
        """
        self.pieces.append((stamp, data))
        if b"data:" in data or (len(data) > 64 and self.framer.mode != "head"):
            self.spoke_at = stamp  # neither the head alone nor a comment, which only keeps the connection
        if self.framer.mode != "chunked" or len(data) < 4 or data.endswith(b"\r\n\r\n"):
            self.advance()
        return self.framer.ended

    def advance(self) -> None:
        """Feeds the pieces that came since to the framer. Raises BadAnswer."""
        pieces, self.pieces = self.pieces, []
        for stamp, data in pieces:
            self.framer.feed(stamp, data)


def _seconds(ns: int) -> float:
    return round(ns / 1e9, 6)


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """p50, p99 and max of milliseconds, to the microsecond; None without any."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {
        "p50": round(_quantile(ordered, 0.5), 4),
        "p99": round(_quantile(ordered, 0.99), 4),
        "max": round(ordered[-1], 4),
    }


class Load:
    def __init__(self, job: Job, address: tuple[int, Any]) -> None:
        self.job = job
        self.family, self.address = address
        self.epoll = select.epoll()
        self.connections: dict[int, Connection] = {}  # by fd
        self.idle: list[Connection] = []
        self.flying: set[Exchange] = set()
        self.closing: list[
            socket.socket
        ] = []  # closed between two turns, so that no event meets the next owner of its number
        self.reading: deque[tuple[Any, Exchange, int]] = deque()  # answers still to be parsed, and when they ended
        self.out: deque[bytes] = deque()  # lines still to be written
        self.sent = self.failed = self.reads = self.sessions = 0
        self.lags = array.array("d")
        self.delays = array.array("d")
        self.stop: str | None = None  # a signal's name, or "stdout" when nobody reads it
        self.kernel_stamps = True
        self.offset = 0  # ns, wall clock - CLOCK_MONOTONIC
        self.looked = 0  # ns, when the sockets were last asked
        self.area = self.area_at_start = self.changed = self.peak = 0
        self.first_start = self.last_start = self.last_scheduled = 0
        self.context = None
        if job.scheme == "https":
            import ssl

            self.context = ssl.create_default_context()
        self.out_pollable = True
        try:
            self.epoll.register(1, 0)  # errors are always told: stdout's reader is gone
        except PermissionError:
            self.out_pollable = False  # a file
        except OSError as error:
            raise BadJob("stdout: %s" % error.strerror) from None

    # -- starting

    def _schedule(self) -> Iterator[tuple[Unit, int | None]]:
        """(unit, ns after the beginning) of every request to start; None instead of a time in a closed loop."""
        job = self.job
        dice = random.Random(job.seed)
        # Written before anything is timed, unless there is no end to them.
        units = None if job.duration_s else deque(Unit(job, request, i) for i, request in enumerate(job.requests))
        at = None if job.rate is None else 0.0
        index = 0
        while units is None or units:
            if units is None:
                if at is not None and at >= job.duration_s:
                    return
                index %= len(job.requests)
                unit = Unit(job, job.requests[index], index)
            else:
                unit = units.popleft()
            yield unit, None if at is None else int(at * 1e9)
            index += 1
            if at is not None:
                at += dice.expovariate(job.rate) if job.arrival == "poisson" else 1.0 / job.rate

    def _connect(self) -> Connection:
        sock = socket.socket(self.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        except OSError:
            self.kernel_stamps = False
        connection = Connection(sock, monotonic_ns())
        if self.context is not None:
            connection.tls = Tls(self.context, self.job.host)
        code = sock.connect_ex(self.address)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(code, os.strerror(code))
        self.connections[connection.fd] = connection
        self._listen(connection, select.EPOLLOUT)
        return connection

    def _listen(self, connection: Connection, mask: int) -> None:
        if connection.mask == 0:
            self.epoll.register(connection.fd, mask)
        elif connection.mask != mask:
            self.epoll.modify(connection.fd, mask)
        connection.mask = mask

    def _begin(self, unit: Unit, scheduled: int | None) -> None:
        exchange = Exchange(unit, self.sent, scheduled)
        self.sent += 1
        self._count()
        self.area_at_start = self.area  # a later turn of a session is a start as well
        self.flying.add(exchange)
        self.peak = max(self.peak, len(self.flying))
        if self.job.starts:
            self._say({"type": "start", "id": str(exchange.number), "prompt": exchange.prompt, "turn": exchange.turn})
        exchange.started = self.last_start = monotonic_ns()
        if scheduled is not None:
            self.last_scheduled = scheduled
            self.delays.append((exchange.started - scheduled) / 1e6)
        self._send(exchange)

    def _send(self, exchange: Exchange) -> None:
        connection: Connection | None = None
        while self.idle and not exchange.again:
            candidate = self.idle.pop()
            if self.connections.get(candidate.fd) is candidate:
                connection = candidate
                break
        if connection is None:
            try:
                connection = self._connect()
            except OSError as error:
                self._end(exchange, ("unreachable", "cannot connect: %s" % (error.strerror or error)))
                return
        connection.exchange = exchange
        exchange.connection = connection
        if connection.open:
            self._write(connection, exchange.unit.payload)

    def _write(self, connection: Connection, data: bytes) -> None:
        if connection.tls is not None:
            connection.tls.plain += data
            try:
                connection.tls.pump()
            except OSError as error:
                self._broken(connection, ("unreachable", "TLS: %s" % error))
                return
            data = connection.tls.outgoing.read()
        left = memoryview(data)
        if connection.out:
            left = memoryview(bytes(connection.out) + data)
        connection.out = left
        self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        try:
            while connection.out:
                connection.out = connection.out[connection.sock.send(connection.out) :]
        except BlockingIOError:
            self._listen(connection, select.EPOLLIN | select.EPOLLOUT)
            return
        except OSError:  # it closes before it has read all; what it said may still be there to read
            connection.out = memoryview(b"")
            connection.used = False
        self._listen(connection, select.EPOLLIN)

    def _count(self) -> None:
        """In-flight requests over time, for load kept."""
        now = monotonic_ns()
        self.area += len(self.flying) * (now - self.changed)
        self.changed = now

    # -- what happens on a connection

    def _opened(self, connection: Connection) -> None:
        code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            kind = "refused" if code == errno.ECONNREFUSED else "unreachable"
            self._broken(connection, (kind, "cannot connect: %s" % os.strerror(code)))
            return
        connection.open = True
        exchange = connection.exchange
        if exchange is None:
            if connection.tls is not None:
                self._write(connection, b"")
            else:
                self._listen(connection, select.EPOLLIN)
                self.idle.append(connection)
            return
        exchange.connect_ms = (monotonic_ns() - connection.since) / 1e6
        self._write(connection, exchange.unit.payload)

    def _receive(self, connection: Connection, earliest: int) -> None:
        """Reads all that is there. `earliest`: nothing was there at that moment."""
        while True:
            try:
                data, extra, _, _ = connection.sock.recvmsg(_READ, 64)
            except BlockingIOError:
                return
            except OSError as error:
                self._broken(connection, ("cut", "the connection was lost: %s" % (error.strerror or error)), gone=True)
                return
            now = stamp = monotonic_ns()
            if not data:
                self._closed(connection)
                return
            if extra:
                seconds, nanos = _TIMESPEC.unpack_from(extra[0][2])
                seen = seconds * 1000000000 + nanos - self.offset
                # The wall clock may be set while we run: a stamp that cannot be is not taken.
                if earliest <= seen <= now:
                    stamp = seen
                    self.lags.append((now - seen) / 1e6)
                else:
                    self._calibrate()
            self.reads += 1
            size = len(data)
            if connection.tls is not None:
                data = self._decipher(connection, connection.tls, data)
            if data:
                self._take(connection, stamp, data)
            if size < _READ or connection.fd not in self.connections:
                return

    def _decipher(self, connection: Connection, tls: Tls, data: bytes) -> bytes:
        try:
            data = tls.decipher(data)
        except OSError as error:
            self._broken(connection, ("unreachable", "TLS: %s" % error))
            return b""
        if tls.outgoing.pending:
            self._write(connection, b"")
        if tls.ready and connection.exchange is None and connection not in self.idle:
            self.idle.append(connection)
        return data

    def _take(self, connection: Connection, stamp: int, data: bytes) -> None:
        exchange = connection.exchange
        if exchange is None:
            self._drop(connection)  # nothing was asked
            return
        try:
            if exchange.take(stamp, data):
                connection.used = True
                self._end(exchange, None)
        except BadAnswer as error:
            self._broken(connection, ("bad_response", str(error)))

    def _closed(self, connection: Connection) -> None:
        exchange = connection.exchange
        if exchange is None:
            self._drop(connection)
            return
        try:
            exchange.advance()
        except BadAnswer as error:
            self._broken(connection, ("bad_response", str(error)))
            return
        framer = exchange.framer
        if framer.mode == "until close":
            framer.ended = True
            self._drop(connection)
            self._end(exchange, None)
            return
        what = "without an answer" if framer.status is None else "in the middle of the answer"
        self._broken(connection, ("cut", "the server closed the connection %s" % what), gone=True)

    def _broken(self, connection: Connection, failure: Failure, gone: bool = False) -> None:
        exchange = connection.exchange
        retry = gone and connection.used and exchange is not None and not exchange.again and not exchange.pieces
        self._drop(connection)
        if exchange is None:
            return
        if retry and exchange.framer.status is None:  # it closed an idle connection just as we took it
            exchange.again = True
            self._send(exchange)
        else:
            self._end(exchange, failure)

    def _drop(self, connection: Connection) -> None:
        if self.connections.pop(connection.fd, None) is not None:
            self.closing.append(connection.sock)

    def _end(self, exchange: Exchange, failure: Failure) -> None:
        self._count()
        self.flying.discard(exchange)
        connection = exchange.connection
        if connection is not None and connection.fd in self.connections:
            connection.exchange = None
            if failure or exchange.framer.close or connection.out or not exchange.framer.ended:
                self._drop(connection)
            else:
                self.idle.append(connection)
        try:
            exchange.advance()
        except BadAnswer as error:
            failure = failure or ("bad_response", str(error))
        entry = (read_answer(exchange.framer, failure), exchange, monotonic_ns())
        if exchange.unit.last():
            self.reading.append(entry)
        else:
            self.sessions += 1
            self.reading.appendleft(entry)  # somebody waits for it

    def _sweep(self, now: int) -> None:
        job = self.job
        for exchange in list(self.flying):
            connection = exchange.connection
            if now - exchange.started > job.timeout_s * 1e9:
                failure = ("timeout", "not done within %g s" % job.timeout_s)
            elif connection is not None and not connection.open and now - connection.since > job.connect_s * 1e9:
                failure = ("connect_timeout", "no connection within %g s" % job.connect_s)
            elif exchange.spoke_at and now - exchange.spoke_at > job.stall_s * 1e9:
                failure = ("stalled", "nothing came for %g s" % job.stall_s)
            else:
                continue
            self._end(exchange, failure)

    # -- after an answer ended

    def _parse_some(self) -> None:
        generator, exchange, ended = self.reading[0]
        try:
            next(generator)
            return
        except StopIteration as result:
            answer, error = result.value
        self.reading.popleft()
        unit = exchange.unit
        stamps = answer.stamps
        counts = answer.tokens
        row = {
            "type": "request",
            "id": str(exchange.number),
            "prompt": exchange.prompt,
            "turn": exchange.turn,
            "response_id": answer.response_id,
            "model": answer.model,
            "status": exchange.framer.status,
            "t_scheduled": None if exchange.scheduled is None else _seconds(exchange.scheduled),
            "t_request": _seconds(exchange.started),
            "connect_ms": round(exchange.connect_ms, 3),
            "t_chunks": [_seconds(stamp) for stamp in stamps],
            "tokens": counts if counts and all(isinstance(count, int) for count in counts) else None,
            "t_end": _seconds(exchange.framer.body[-1][0] if exchange.framer.body else ended),
            "usage": answer.usage,
            "finish_reason": answer.finish_reason,
            "max_tokens": exchange.asked,
            "timings": answer.timings,
            "spec": answer.spec,
            "bytes": sum(len(data) for _, data in exchange.framer.body),
            "error": None if error is None else {"kind": error[0], "message": error[1]},
        }
        if self.job.text:
            row["text"] = "".join(answer.text)
            row["reasoning"] = "".join(answer.reasoning)
        if error is not None:
            self.failed += 1
        self._say(row)
        if unit.last():
            return
        self.sessions -= 1
        if error is None and self.stop is None:
            unit.go_on("".join(answer.text))
            self._begin(unit, None)
            return
        why = "turn %d of the session failed" % unit.turn
        while not unit.last():
            unit.turn += 1
            self.failed += 1
            line = {
                "type": "request",
                "id": str(self.sent),
                "prompt": unit.prompt,
                "turn": unit.turn,
                "t_request": None,
            }
            line.update(response_id=None, status=None, t_chunks=[], tokens=None, usage=None, finish_reason=None)
            line.update(max_tokens=exchange.asked, error={"kind": "not_sent", "message": why})
            self.sent += 1
            self._say(line)

    def _say(self, row: dict[str, Any]) -> None:
        try:
            line = json.dumps(row, allow_nan=False)
        except ValueError:  # 1e999 in a server's usage: infinity is no JSON
            line = json.dumps(_finite(row))
        self.out.append(line.encode() + b"\n")

    def _write_some(self) -> None:
        """Writes at most what a pipe takes without making us wait."""
        data = self.out[0]
        try:
            count = os.write(1, data[:4096])
        except BlockingIOError:
            return
        except OSError:
            self.stop = "stdout"
            return
        if count == len(data):
            self.out.popleft()
        else:
            self.out[0] = data[count:]

    def _can_write(self) -> bool:
        return not self.out_pollable or bool(select.select([], [1], [], 0)[1])

    # -- the loop

    def _calibrate(self) -> None:
        """Offset of the wall clock, which the kernel stamps with, from CLOCK_MONOTONIC. Both run at the same speed."""
        best = None
        for _ in range(5):
            before = monotonic_ns()
            wall = time.clock_gettime_ns(time.CLOCK_REALTIME)
            after = monotonic_ns()
            if best is None or after - before < best:
                best = after - before
                self.offset = wall - (before + after) // 2

    def _turn(self, wait: float) -> tuple[int, bool]:
        """One turn of the loop: waits at most `wait` seconds. Returns (when it woke, whether anything happened)."""
        # What was there when we asked the last time has been read: what we find now came later.
        earliest, self.looked = self.looked, monotonic_ns()
        while self.closing:
            self.closing.pop().close()  # this also takes it out of the epoll set
        events = self.epoll.poll(wait, 4096)
        woke = monotonic_ns()
        connections = self.connections
        for fd, mask in events:
            connection = connections.get(fd)
            if connection is None:
                if fd == 1 and mask & (select.EPOLLERR | select.EPOLLHUP):
                    self.stop = "stdout"
            elif not connection.open:
                self._opened(connection)
            else:
                if mask & select.EPOLLOUT:
                    self._flush(connection)
                if mask & ~select.EPOLLOUT and connection.fd in connections:
                    self._receive(connection, earliest)
        return woke, bool(events)

    def run(self) -> dict[str, Any]:
        """Does the job; returns the summary."""
        job = self.job
        schedule = self._schedule()
        upcoming = next(schedule, None)
        self._calibrate()
        if job.rate is None:
            self._connect_all()
        gc.collect()
        gc.disable()
        cpu = time.process_time()
        begin = self.changed = swept = monotonic_ns()
        turn = 0
        while (upcoming or self.flying or self.reading) and self.stop is None:
            now = monotonic_ns()
            while upcoming is not None and self.stop is None:
                unit, after = upcoming
                if after is None and job.duration_s and now - begin > job.duration_s * 1e9:
                    upcoming = None
                    break
                if job.concurrency is not None and len(self.flying) + self.sessions >= job.concurrency:
                    break
                if after is not None and begin + after > now:
                    break
                self._begin(unit, None if after is None else begin + after)
                self.first_start = self.first_start or self.last_start
                upcoming = next(schedule, None)
            if upcoming is None and not self.sessions:
                while self.idle:  # a server with a thread a connection may want the thread
                    self._drop(self.idle.pop())
            busy = bool(self.reading) or (bool(self.out) and self._can_write())
            wait = 0.0 if busy else 0.05
            if upcoming is not None and upcoming[1] is not None:
                left = (begin + upcoming[1] - monotonic_ns()) / 1e9
                if 0 < left < 0.002:  # epoll counts in whole milliseconds
                    if not busy:
                        time.sleep(min(left, 0.0002))
                    wait = 0.0
                elif 0 < left < wait:
                    wait = left - 0.001
            woke, happened = self._turn(wait)
            turn += 1
            if not happened or not turn % 8:
                if self.reading:
                    self._parse_some()
                elif self.out and self._can_write():
                    self._write_some()
            if woke - swept > 50000000:
                swept = woke
                self._sweep(woke)
                self._calibrate()
        cpu = time.process_time() - cpu
        ended = monotonic_ns()
        if self.stop != "stdout":
            for exchange in list(self.flying):
                self._end(exchange, ("interrupted", "stopped by %s" % self.stop))
            while self.reading:
                self._parse_some()
        gc.enable()
        return self._summary(begin, ended, cpu)

    def _connect_all(self) -> None:
        """Opens the connections of a closed loop ahead: connecting is not part of what is measured."""
        limit = monotonic_ns() + 1000000000
        try:
            for _ in range(self._many()):
                self._connect()
        except OSError:
            pass  # each request will try for itself and say what happened
        while len(self.idle) < len(self.connections) and monotonic_ns() < limit and self.stop is None:
            self._turn(0.05)
        for connection in list(self.connections.values()):
            if connection not in self.idle:
                self._drop(connection)

    def _many(self) -> int:
        """How many can be in flight at a time in a closed loop."""
        job = self.job
        many = job.concurrency or 1
        return many if job.duration_s else min(many, len(job.requests))

    def _summary(self, begin: int, ended: int, cpu: float) -> dict[str, Any]:
        job = self.job
        if job.rate is not None:
            # The time the arrivals should have taken over the time they took.
            took = self.last_start - begin
            kept = min(1.0, (self.last_scheduled - begin) / took) if len(self.delays) > 1 else 1.0
        else:
            # Requests in flight, averaged until the last one started, over the concurrency asked for.
            window = self.last_start - self.first_start
            kept = min(1.0, self.area_at_start / (window * self._many())) if window > 0 else 1.0
        return {
            "type": "summary",
            "version": VERSION,
            "requests": self.sent,
            "failed": self.failed,
            "t_start": _seconds(begin),
            "wall_s": _seconds(ended - begin),
            "concurrency": job.concurrency,
            "rate": job.rate,
            "arrival": None if job.rate is None else job.arrival,
            "load_kept": round(kept, 5),
            "peak_in_flight": self.peak,
            "start_delay_ms": spread(self.delays),
            "lag_ms": spread(self.lags),
            "stamps": "kernel" if len(self.lags) * 2 > self.reads else "recv",
            "reads": self.reads,
            "cpu_s": round(cpu, 4),
            "ceiling_reads_s": round(self.reads / cpu) if cpu > 0 and self.reads else None,
            "usage": job.usage,
            "model": job.model,
            "api": job.api,
            "interrupted": self.stop,
            "python": platform.python_version(),
        }

    def drain(self) -> None:
        """Writes what is left to write, however long stdout's reader takes."""
        try:
            while self.out:
                data = memoryview(self.out.popleft())
                while data:
                    data = data[os.write(1, data) :]
        except OSError:
            self.stop = "stdout"

    def close(self) -> None:
        """Closes the connections that were kept."""
        for connection in self.connections.values():
            connection.sock.close()
        self.epoll.close()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def _allow_files() -> None:
    """One connection is one file: as many as the system lets us have."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass


def main() -> int:
    load: Load | None = None

    def stop(number: int, _frame: Any) -> None:
        if load is not None:
            load.stop = load.stop or signal.Signals(number).name
        else:
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        document = json.loads(sys.stdin.buffer.read())
        jobs = [Job(one) for one in document["jobs"]] if isinstance(document, dict) and "jobs" in document else None
        _allow_files()
        for job in [Job(document)] if jobs is None else jobs:
            address = reach(job)
            if job.model is None:
                job.model = first_model(job)
            if job.usage == "auto":
                job.usage = usage_taken(job)
            load = Load(job, address)
            summary = load.run()
            load._say(summary)
            load.drain()
            load.close()
            if load.stop is not None:
                return 4
            if load.failed:
                break
    except KeyboardInterrupt:
        return 4
    except NoServer as error:
        sys.stderr.write("%s\n" % error)
        return 3
    except BadJob as error:
        sys.stderr.write("the job of the load generator: %s\n" % error)
        return 2
    except (ValueError, RecursionError) as error:
        sys.stderr.write("the job of the load generator is not JSON: %s\n" % error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
