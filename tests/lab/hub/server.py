"""The hub over HTTP: what huggingface_hub asks, answered with the hub's paths, headers and error codes.

A small file is redirected within the hub (307, relative), a large one to the storage (302, another origin, with X-Linked-Etag and
X-Linked-Size), as the real hub does; both serve ranges. No Xet: without its headers the client downloads over HTTP.
"""

from __future__ import annotations

import email.utils
import json
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.lab.hub.faults import Fault, Faults
from tests.lab.hub.repositories import BLOCK, File, Repository, files_of

PAGE = 1000  # entries of a tree listing in one answer
API = re.compile(
    r"/api/models/(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<what>revision|tree|refs|paths-info)(?:/(?P<rest>.*))?)?"
)
RESOLVE = re.compile(r"/(?P<repo>[\w.-]+/[\w.-]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
CACHED = re.compile(r"/api/resolve-cache/models/(?P<repo>[\w.-]+/[\w.-]+)/(?P<revision>[0-9a-f]{40})/(?P<path>.+)")
STORED = re.compile(r"/storage/(?P<repo>[\w.-]+/[\w.-]+)/(?P<sha>[0-9a-f]{64})")
WEB_PAGE = b"<!doctype html><html><title>Sign in to the network</title><body>Please sign in.</body></html>\n"


@dataclass
class Seen:
    """A request that was answered, or is being answered: `sent` grows."""

    method: str
    path: str
    range: str | None
    status: int
    sent: int  # bytes of the body


class Hub:
    """A hub on an address; `url` is what HF_ENDPOINT says. `requests` lists what was asked, oldest first."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults = Faults()
        self.requests: list[Seen] = []
        self.ending = threading.Event()
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        # The storage is another origin: the client must not follow there with its token, nor when it asks for metadata.
        self._servers = [_Server((host, port), Handler), _Server((host, 0), Handler)]
        self._threads = [
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
            for server in self._servers
        ]

    @property
    def url(self) -> str:
        return self._address(0)

    @property
    def storage(self) -> str:
        """Where large files are."""
        return self._address(1)

    def _address(self, which: int) -> str:
        host, port = self._servers[which].server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> Hub:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()

    def commit(
        self, repo: str, source: Path | Mapping[str, bytes | Path], *, token: str | None = None, gated: bool = False
    ) -> str:
        """Commits a folder, or files by path, to the main branch; returns the commit's id."""
        repository = self.repositories.setdefault(repo, Repository(repo))
        repository.token, repository.gated = token or repository.token, gated or repository.gated
        return repository.commit(files_of(source) if isinstance(source, Path) else source)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Refused(Exception):
    """An error answer: status, X-Error-Code, message."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "hub-double", ""
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.seen: Seen | None = None
        length = int(self.headers.get("content-length") or 0)
        self.body = self.rfile.read(length) if length else b""
        target = urllib.parse.unquote(self.path.partition("?")[0])
        try:
            self._route(target)
        except _Refused as error:
            status, code, message = error.args
            headers = {"X-Error-Code": code, "X-Error-Message": message} if code else {"X-Error-Message": message}
            self._json(status, {"error": message}, headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _route(self, target: str) -> None:
        if target == "/-/faults":
            self._control()
            return
        resolve, cached, stored = RESOLVE.fullmatch(target), CACHED.fullmatch(target), STORED.fullmatch(target)
        # The redirect answers for nothing: the file's bytes come from the storage or the cache.
        place = None
        if cached:
            place = cached["path"]
        elif stored:
            place = self._name_of(stored["repo"], stored["sha"])
        fault = self.hub.faults.find(
            self.command, target, place or (resolve["path"] if resolve and self.command == "HEAD" else None)
        )
        if fault is not None and self._suffers(fault):
            return
        if stored:
            self._stored(stored["repo"], stored["sha"], fault)
        elif cached:
            self._cached(cached["repo"], cached["revision"], cached["path"], fault)
        elif resolve:
            self._resolve(resolve["repo"], resolve["revision"], resolve["path"])
        elif api := API.fullmatch(target):
            self._api(api["repo"], api["what"] or "revision", api["rest"] or "")
        else:
            raise _Refused(404, "", "Not Found")

    def _suffers(self, fault: Fault) -> bool:
        """Faults that need no file. Whether the answer is given."""
        if fault.kind == "status":
            headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
            self._json(fault.status, {"error": self.responses[fault.status][0]}, headers)
            return True
        if fault.kind == "refuse":
            self._leave(reset=True)
            return True
        if fault.kind == "late":
            self.hub.ending.wait(fault.seconds or 3600)
        return False

    # -- questions

    def _repository(self, name: str, reading: bool = False) -> Repository:
        repository = self.hub.repositories.get(name)
        given = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if repository is not None and repository.gated and (not reading or given == repository.token):
            return repository
        if repository is not None and repository.gated:
            raise _Refused(401 if not given else 403, "GatedRepo", f"Access to model {name} is restricted. You must have access to it and be authenticated to access it. Please log in.")  # fmt: skip
        if repository is None or (repository.token is not None and given != repository.token):
            # Who is not known is not told whether it exists.
            if given:
                raise _Refused(404, "RepoNotFound", "Repository not found")
            raise _Refused(401, "RepoNotFound", "Invalid username or password.")
        return repository

    def _commit(self, repository: Repository, revision: str) -> tuple[str, dict[str, File]]:
        sha = repository.resolve(urllib.parse.unquote(revision))
        if sha is None:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, repository.commits[sha]

    def _api(self, name: str, what: str, rest: str) -> None:
        repository = self._repository(name)
        if what == "refs":
            self._json(
                200,
                {
                    "branches": [
                        {"name": n, "ref": f"refs/heads/{n}", "targetCommit": s} for n, s in repository.branches.items()
                    ],
                    "tags": [
                        {"name": n, "ref": f"refs/tags/{n}", "targetCommit": s} for n, s in repository.tags.items()
                    ],
                    "converts": [],
                },
            )
        elif what == "revision":
            self._info(repository, rest or "main")
        elif what == "tree":
            revision, _, below = rest.partition("/")
            sha, files = self._commit(repository, revision)
            self._tree(files, below, sha)
        else:
            sha, files = self._commit(repository, rest)
            self._paths(files)

    def _query(self) -> dict[str, str]:
        return dict(urllib.parse.parse_qsl(self.path.partition("?")[2]))

    def _info(self, repository: Repository, revision: str) -> None:
        sha, files = self._commit(repository, revision)
        blobs = self._query().get("blobs") in ("1", "true", "True")
        siblings = []
        for file in files.values():
            row: dict[str, Any] = {"rfilename": file.path}
            if blobs:
                row.update(size=file.size, blobId=file.blob)
                if file.large:
                    row["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": len(file.pointer)}
            siblings.append(row)
        self._json(
            200,
            {
                "_id": sha[:24],
                "id": repository.id,
                "modelId": repository.id,
                "author": repository.id.partition("/")[0],
                "sha": sha,
                "lastModified": "2026-11-01T00:00:00.000Z",
                "createdAt": "2026-11-01T00:00:00.000Z",
                "private": repository.token is not None and not repository.gated,
                "gated": "manual" if repository.gated else False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": siblings,
                "usedStorage": sum(file.size for file in files.values()),
            },
        )

    def _entry(self, file: File) -> dict[str, Any]:
        row: dict[str, Any] = {"type": "file", "oid": file.blob, "size": file.size, "path": file.path}
        if file.large:
            row["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": len(file.pointer)}
        return row

    def _tree(self, files: dict[str, File], below: str, sha: str) -> None:
        query = self._query()
        recursive = query.get("recursive", "").lower() in ("1", "true")
        prefix = below.rstrip("/") + "/" if below else ""
        rows: dict[str, dict[str, Any]] = {}
        for path, file in files.items():
            if not path.startswith(prefix):
                continue
            parts = path[len(prefix) :].split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                folder = prefix + "/".join(parts[:depth])
                rows.setdefault(folder, {"type": "directory", "oid": sha, "size": 0, "path": folder})
            if recursive or len(parts) == 1:
                rows[path] = self._entry(file)
        if not rows and prefix:
            raise _Refused(404, "EntryNotFound", f"{below} does not exist on {sha}")
        listed, start = list(rows.values()), int(query.get("cursor") or 0)
        limit = min(int(query.get("limit") or PAGE), PAGE)
        headers = {}
        if start + limit < len(listed):
            following = urllib.parse.urlencode({**query, "cursor": start + limit})
            headers["Link"] = f'<{self.hub.url}{self.path.partition("?")[0]}?{following}>; rel="next"'
        self._json(200, listed[start : start + limit], headers)

    def _paths(self, files: dict[str, File]) -> None:
        if "json" in (self.headers.get("content-type") or ""):
            wanted = json.loads(self.body or b"{}").get("paths", [])
        else:
            wanted = urllib.parse.parse_qs(self.body.decode()).get("paths", [])
        self._json(200, [self._entry(files[path]) for path in wanted if path in files])

    # -- files

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self._repository(name, reading=True)
        sha, files = self._commit(repository, revision)
        file = files.get(path)
        if file is None:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        common = {"X-Repo-Commit": sha, "Accept-Ranges": "bytes", "ETag": f'"{file.etag}"'}
        if file.large:
            query = urllib.parse.urlencode({"Expires": int(time.time()) + 3600, "filename": path})
            place = f"{self.hub.storage}/storage/{name}/{file.sha256}?{query}"
            self._redirect(302, place, {**common, "X-Linked-Size": str(file.size), "X-Linked-ETag": f'"{file.sha256}"'})
        else:
            self._redirect(307, f"/api/resolve-cache/models/{name}/{sha}/{urllib.parse.quote(path)}", common)

    def _name_of(self, name: str, sha256: str) -> str | None:
        repository = self.hub.repositories.get(name)
        file = repository.large(sha256) if repository else None
        return file.path if file else None

    def _stored(self, name: str, sha256: str, fault: Fault | None) -> None:
        repository = self.hub.repositories.get(name)
        file = repository.large(sha256) if repository else None
        if file is None:
            raise _Refused(404, "", "NoSuchKey")
        if int(self._query().get("Expires") or 0) < time.time():
            raise _Refused(403, "", "Request has expired")
        self._file(file, fault, {"ETag": f'"{sha256[:32]}"'})

    def _cached(self, name: str, sha: str, path: str, fault: Fault | None) -> None:
        repository = self._repository(name, reading=True)
        file = repository.commits.get(sha, {}).get(path)
        if file is None:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        self._file(file, fault, {"ETag": f'"{file.etag}"', "X-Repo-Commit": sha})

    def _file(self, file: File, fault: Fault | None, headers: dict[str, str]) -> None:
        if self.headers.get("if-none-match") == headers["ETag"]:
            self._head(304, headers)
            return
        if fault is not None and fault.kind == "page":
            self._whole(200, WEB_PAGE, {"Content-Type": "text/html; charset=utf-8"})
            return
        start, end, status = 0, file.size, 200
        wanted = self.headers.get("range")
        current = self.headers.get("if-range") in (None, headers["ETag"])
        if wanted and current and not (fault is not None and fault.kind == "no-ranges"):
            span = byte_range(wanted, file.size)
            if span is None:
                self._head(416, {"Content-Range": f"bytes */{file.size}", "Content-Length": "0"})
                return
            if span != (0, 0):
                (start, end), status = span, 206
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.size}"
        headers |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        headers["Content-Disposition"] = (
            f"inline; filename*=UTF-8''{urllib.parse.quote(file.path)}; filename=\"{Path(file.path).name}\";"
        )
        if fault is not None and fault.kind == "truncated":
            end = min(end, start + (fault.after if fault.after is not None else (end - start) // 2))
        headers["Content-Length"] = str(end - start)
        self._head(status, headers)
        if self.command != "HEAD":
            self._bytes(file, start, end, fault)

    def _bytes(self, file: File, start: int, end: int, fault: Fault | None) -> None:
        kind = fault.kind if fault is not None else ""
        after = (fault.after if fault is not None and fault.after is not None else file.size // 2) if kind else 0
        began = time.monotonic()
        for position, block in _read(file, start, end, after if kind in ("stall", "cut", "reset") else None):
            if kind == "flipped" and position <= after < position + len(block):
                changed = bytearray(block)
                changed[after - position] ^= 1
                block = bytes(changed)
            if kind == "slow":
                assert fault is not None
                self._slowly(block, fault.rate, began)
                continue
            if kind in ("stall", "cut", "reset") and position >= after:
                if kind != "stall":
                    self._leave(reset=kind == "reset")
                    return
                assert fault is not None
                self.wfile.flush()
                if self.hub.ending.wait(fault.seconds if fault.seconds is not None else 3600):
                    self.close_connection = True
                    return
            self._send(block)

    def _slowly(self, block: bytes, rate: int, began: float) -> None:
        step = max(1, min(len(block), rate // 20 or 1))
        for at in range(0, len(block), step):
            part = block[at : at + step]
            self._send(part)
            sent = self.seen.sent if self.seen is not None else 0
            ahead = sent / rate - (time.monotonic() - began)
            if ahead > 0 and self.hub.ending.wait(ahead):
                self.close_connection = True
                return

    # -- answers

    def _control(self) -> None:
        """`GET` shows the faults, `PUT`'s stand-in `POST` replaces them: for hands and for other processes."""
        if self.command == "POST":
            try:
                self.hub.faults.replace(json.loads(self.body))
            except (ValueError, TypeError) as error:
                raise _Refused(400, "", str(error)) from None
        self._json(200, self.hub.faults.listed(), record=False)

    def _json(self, status: int, document: Any, headers: Mapping[str, str] = {}, record: bool = True) -> None:
        body = json.dumps(document).encode()
        self._whole(status, body, {"Content-Type": "application/json; charset=utf-8", **headers}, record)

    def _redirect(self, status: int, place: str, headers: Mapping[str, str]) -> None:
        self._whole(
            status,
            f"Found. Redirecting to {place}".encode(),
            {"Content-Type": "text/plain; charset=utf-8", "Location": place, **headers},
        )

    def _whole(self, status: int, body: bytes, headers: Mapping[str, str], record: bool = True) -> None:
        self._head(status, {**headers, "Content-Length": str(len(body))}, record)
        if self.command != "HEAD":
            self._send(body)

    def _head(self, status: int, headers: Mapping[str, str], record: bool = True) -> None:
        if record:
            self._record(status)
        self.send_response_only(status)
        self.send_header("Date", email.utils.formatdate(usegmt=True))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()

    def _record(self, status: int) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        self.seen = Seen(self.command, path, self.headers.get("range"), status, 0)
        self.hub.requests.append(self.seen)

    def _send(self, data: bytes) -> None:
        self.wfile.write(data)
        if self.seen is not None:
            self.seen.sent += len(data)

    def _leave(self, reset: bool) -> None:
        """Ends the connection in the middle: with RST, or as if all had been said."""
        self.wfile.flush()
        self.close_connection = True
        if self.seen is None:
            self._record(0)
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """(start, end) of a Range header; None where nothing of the file is asked for, (0, 0) where it is to be ignored."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip())
    if found is None or header.strip() == "bytes=-":
        return 0, 0
    if not found[1]:
        length = int(found[2])
        return (max(0, size - length), size) if length and size else None
    start = int(found[1])
    end = min(size, int(found[2]) + 1) if found[2] else size
    if start >= size:
        return None
    return (start, end) if start < end else (0, 0)


def _read(file: File, start: int, end: int, edge: int | None) -> Iterator[tuple[int, bytes]]:
    """(position, bytes) from start to end in blocks, none of which crosses `edge`; an empty one at the edge's place."""
    with file.open() as stream:
        stream.seek(start)
        position = start
        while position < end:
            most = min(BLOCK, end - position)
            if edge is not None and position < edge:
                most = min(most, edge - position)
            block = stream.read(most)
            if not block:
                return
            yield position, block
            position += len(block)
