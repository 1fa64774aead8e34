"""The run folder: runs/<campaign>/ with events, cells, raw stamps and logs. Every file appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from gpuctl.records import CellId, NotARecord, Record, from_json


class StoreError(Exception):
    """The run folder cannot be used. One line: what, where, what to do. `full`: the disk is full, and room helps."""

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message)
        self.full = full


class Busy(StoreError):
    """Another gpuctl works on this campaign; the message names it."""


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_ANOTHER = "--runs names another folder"


@contextlib.contextmanager
def _explained(path: Path, instead: str = _ANOTHER) -> Iterator[None]:
    """OSErrors as one line with the place and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"{path}: the disk is full; free some room, then give the same command", full=True
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise StoreError(f"{path}: cannot be written ({error.strerror}); {instead}") from error
        # a folder that is to be made where a file is
        why = os.strerror(errno.ENOTDIR) if error.errno == errno.EEXIST else error.strerror
        raise StoreError(f"{path}: {why}; {instead}") from error


def read(path: Path) -> bytes:
    """A file of a run folder. Raises OSError, also for what is no regular file: a pipe would be waited for."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def write(path: Path, data: bytes, *, instead: str = _ANOTHER, make_folder: bool = False) -> None:
    """By temporary file, fsync and rename: after a crash there is the old file or the new one. A link stays, and leads
    to the new one. A device, a pipe and /dev/stdout are written into: in the place of /dev/null, a file harms others.

    `make_folder`: not for a place that a person named, where one that is not there is a mistake. `instead`: what to do
    where it cannot be written, for the message. Raises StoreError.
    """
    with _explained(path, instead):
        if _is_stream(path):
            with path.open("wb") as stream:
                stream.write(data)
            return
        to = Path(os.path.realpath(path))
        if to.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if make_folder:
            to.parent.mkdir(parents=True, exist_ok=True)
        draft = _draft(to, data)
        try:
            draft.replace(to)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        _sync(to.parent)


def _is_stream(path: Path) -> bool:
    """Neither a file nor a folder nor nothing; or what somebody has open already, whatever it is: /dev/stdout."""
    there = str(path.readlink()) if path.is_symlink() else str(path)
    if there.startswith(("/proc/", "/dev/fd/")):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def _draft(path: Path, data: bytes) -> Path:
    """The data on the disk, beside `path`: only its rename is left to do. Leaves nothing when it fails."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Run:
    """One campaign's folder. Used as a context manager it is locked: one gpuctl at a time writes to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.boot: Mapping[str, Any] = {}  # of the box, as each event keeps it
        self._lock: int | None = None
        self._new = False

    # -- the lock

    def __enter__(self) -> Run:
        path = self.folder / "lock"
        self._new = not self.folder.exists()
        with _explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it when its holder dies
        except BlockingIOError:
            holder = os.pread(handle, 1000, 0).decode("utf-8", "replace").strip() or "somebody"
            os.close(handle)
            raise Busy(f"{self.folder}: in use by {holder}; wait for it, or stop it") from None
        except OSError as error:
            os.close(handle)
            raise StoreError(f"{path}: cannot be locked ({error.strerror}); put --runs on a local disk") from error
        with _explained(path):
            holder = f"gpuctl with pid {os.getpid()} on {socket.gethostname()}, since {now()}"
            os.ftruncate(handle, 0)
            os.pwrite(handle, holder.encode(), 0)
        self._lock = handle
        self._tidy()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock, 0)
            if error is not None and self._new:
                self._drop_if_nothing_happened()
            os.close(self._lock)
            self._lock = None

    def _drop_if_nothing_happened(self) -> None:
        """Takes away a new folder in which nothing has happened: it would stand before the runs that have something."""
        begun = {"lock", "campaign.json", "events.jsonl"}
        with contextlib.suppress(OSError):
            there = {path.name for path in self.folder.iterdir()}
            if there <= begun and {event["event"] for event in self.events()} <= {"run_started"}:
                shutil.rmtree(self.folder)

    def holder(self) -> str:
        """Who works on it now; empty: nobody. Looked up and not tried, so that nobody's start is refused by it."""
        path = self.folder / "lock"
        try:
            inode, text = path.stat().st_ino, read(path).decode("utf-8", "replace")
            locks = Path("/proc/locks").read_text(encoding="ascii")
        except FileNotFoundError as error:
            # no such table on this system: the holder takes its name out at its end, unless it was killed
            return "" if error.filename == str(path) else text.strip()
        except OSError:
            return ""
        return (text.strip() or "somebody") if re.search(rf"FLOCK .*:{inode} ", locks) else ""

    def _tidy(self) -> None:
        """Takes away drafts that a killed run left, and ends an event line that it left half-written."""
        for draft in self.folder.glob("**/.*.tmp"):
            with contextlib.suppress(OSError):
                draft.unlink()
        events = self.folder / "events.jsonl"
        with _explained(events):
            if events.is_file() and events.stat().st_size:
                with events.open("rb+") as file:
                    data = file.read()
                    if not data.endswith(b"\n"):
                        file.truncate(data.rfind(b"\n") + 1)

    # -- events

    def event(self, name: str, **facts: Any) -> None:
        """Appends one line to events.jsonl, and it is on the disk when this returns."""
        path = self.folder / "events.jsonl"
        line = json.dumps({"t": now(), "event": name, **facts, **({"boot": self.boot} if self.boot else {})}) + "\n"
        with _explained(path):
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)  # a pipe is refused
            whole = os.fstat(handle).st_size
            try:
                left = memoryview(line.encode())
                while left:  # a disk that has room for half of it takes the half, and says so the next time
                    left = left[os.write(handle, left) :]
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, whole)  # the next event would be lost in the half of this one
                raise
            finally:
                os.close(handle)

    def events(self) -> list[dict[str, Any]]:
        """All events that can be read."""
        found = []
        try:
            text = read(self.folder / "events.jsonl").decode("utf-8", "replace")
        except OSError:
            return []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    found.append(value)
        return found

    # -- cells

    def _path(self, cell: CellId) -> Path:
        return self.folder.joinpath("cells", *cell[:3], f"{cell.point}.json")

    def save(self, record: Record, raw: Iterable[Mapping[str, Any]] = ()) -> None:
        """A record that is there has its own stamps: killed between, there is none, and the cell is measured again."""
        path = self._path(record.cell)
        stamps = path.with_suffix(".raw.jsonl")
        lines = "".join(json.dumps(line) + "\n" for line in raw).encode()
        drafts = []
        with _explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                for to, data in ((stamps, lines), (path, (json.dumps(record.as_json(), indent=1) + "\n").encode())):
                    drafts.append((_draft(to, data), to))
                path.unlink(missing_ok=True)
                for draft, to in drafts:
                    draft.replace(to)
                if not lines:
                    stamps.unlink()
            except BaseException:
                for draft, _ in drafts:
                    draft.unlink(missing_ok=True)
                raise
            _sync(path.parent)

    def load(self, cell: CellId) -> Record | None:
        """The record of a cell, or None when there is none that can be read: then it is measured again."""
        try:
            return from_json(json.loads(read(self._path(cell))))
        except (OSError, ValueError, NotARecord):
            return None

    def records(self) -> list[Record]:
        """Every record that can be read, in the order of their names."""
        found = []
        for path in sorted(self.folder.glob("cells/*/*/*/*.json")):
            with contextlib.suppress(OSError, ValueError, NotARecord):
                found.append(from_json(json.loads(read(path))))
        return found

    # -- what was asked

    def identity(self) -> str:
        """Of this run, wherever its folder is taken: what it starts is known by it. As campaign.json has it, or new."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = str(json.loads(read(self.folder / "campaign.json"))["run"])
            if re.fullmatch(r"[0-9a-f]{8}", known):
                return known
        return secrets.token_hex(4)

    def commands(self) -> dict[str, list[str]]:
        """By phase, the last command that was given for it, as campaign.json has them from earlier."""
        try:
            phases = json.loads(read(self.folder / "campaign.json"))["phases"]
            found = {str(name): phase.get("command") for name, phase in phases.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        return {
            name: words
            for name, words in found.items()
            if isinstance(words, list) and all(isinstance(word, str) for word in words)
        }

    # -- logs and others

    def log_path(self, server: str) -> Path:
        """A new file for a server's log: none that is there is written over, also when the clock was set back."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        folder = self.folder / "logs" / server
        path, more = folder / f"{stamp}.log", 1
        with _explained(path):
            folder.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    path.open("x").close()
                    return path
                except FileExistsError:
                    more += 1
                    path = folder / f"{stamp}-{more}.log"

    def put(self, name: str, value: Any) -> None:
        """A JSON document at the top of the folder."""
        write(self.folder / name, (json.dumps(value, indent=1, default=str) + "\n").encode())
