"""What can go wrong on the way: which requests, how, and how often."""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

KINDS = {
    "slow": "`rate` bytes a second",
    "stall": "sends `after` bytes, then nothing for `seconds` (default: until the hub ends)",
    "cut": "sends `after` bytes, then closes the connection",
    "reset": "sends `after` bytes, then resets the connection (RST), as a killed proxy does",
    "truncated": "an answer that is complete and `after` bytes long, though the file is longer",
    "flipped": "the byte at `after` (default: the middle) has one bit changed; the length is right",
    "status": "answers `status`, with `retry_after` seconds where given",
    "page": "answers 200 and a web page instead of the file, as a captive portal does",
    "no-ranges": "ignores Range and sends the whole file",
    "refuse": "closes the connection without an answer",
    "late": "answers after `seconds`",
}
BODY = ("slow", "stall", "cut", "reset", "truncated", "flipped", "no-ranges", "page")


@dataclass
class Fault:
    """`match` is a pattern on the path in the repository (`*.safetensors`) or, with a leading slash, on the request's
    path (`/api/*`); `method` narrows it further. `times` requests suffer, None: all.
    """

    kind: str
    match: str = "*"
    method: str = "GET"
    times: int | None = None
    after: int | None = None
    rate: int = 64 << 10
    seconds: float | None = None
    status: int = 503
    retry_after: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault of kind {self.kind!r}: there are {', '.join(KINDS)}")

    def hits(self, method: str, target: str, file: str | None) -> bool:
        if self.method not in ("*", method):
            return False
        # What is about a file's bytes is not about questions for it.
        if self.kind in BODY and file is None:
            return False
        subject = target if self.match.startswith("/") else file
        return subject is not None and fnmatch.fnmatchcase(subject, self.match)


class Faults:
    """The faults in force, changed at any time from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listed: list[Fault] = []

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._listed.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._listed.clear()

    def replace(self, documents: list[Mapping[str, Any]]) -> None:
        """Puts others in force. Raises ValueError where one is not a fault; then nothing changes."""
        try:
            wanted = [Fault(**document) for document in documents]
        except TypeError as error:
            raise ValueError(str(error).replace("Fault.__init__() ", "a fault ")) from None
        with self._lock:
            self._listed = wanted

    def listed(self) -> list[dict[str, Any]]:
        with self._lock:
            return [asdict(fault) for fault in self._listed]

    def find(self, method: str, target: str, file: str | None) -> Fault | None:
        """The first fault that this request suffers; counts it."""
        with self._lock:
            for fault in self._listed:
                if fault.times != 0 and fault.hits(method, target, file):
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None
