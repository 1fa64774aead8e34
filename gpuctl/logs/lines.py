"""From the bytes of a log to the few lines worth reading: fast, in constant memory, whatever the bytes are.

A server that runs for a week writes gigabytes of a handful of *shapes*: the same line with other numbers. So a line
is looked at only while its shape (the line without its digits, hexadecimal ones too) is new; what was dull once is
skipped inside the interpreter's own C loops. That reads several hundred MB/s where a regular expression for each line
reads ten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

BLOCK = 1 << 18  # bytes that are looked at together
LONGEST = 1 << 16  # of a longer line the rest is not read
HEAD, TAIL = 4096, 2048  # of a long line these are searched
ENOUGH = 64  # so often a shape that may matter is shown; after that it says nothing new
HELD = 1 << 24  # bytes of shapes remembered before starting over

_DIGITS = b"0123456789abcdef"  # hexadecimal: every request has an id of its own
_NO_COLOUR = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")


class Sieve:
    """Cuts bytes into lines and lets through those that may matter.

    `gates` are literals: a line without any of them is dull. While `attend` is true every line is let through
    (inside a traceback). Bytes come in pieces of any size; lines may be ended by \\n, \\r\\n or a progress bar's \\r.
    """

    def __init__(self, gates: tuple[bytes, ...]) -> None:
        self.attend = False
        self.last = b""  # the last line that is not empty
        self._gates = gates
        self._parts: list[bytes] = []
        self._size = 0
        self._skipping = False  # inside a line that was too long
        self._dull: set[bytes] = set()
        self._seen: dict[bytes, int] = {}
        self.held = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Takes the next bytes; gives the lines that matter as soon as a block is full."""
        self._parts.append(data)
        self._size += len(data)
        if self._size >= BLOCK:
            yield from self.flush()

    def flush(self) -> Iterator[bytes]:
        """Gives what matters of all lines that are complete so far."""
        block = b"".join(self._parts)
        cut = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        rest = block[cut:]
        if len(rest) > LONGEST:
            cut, rest = len(block), b""
            ends = False
        else:
            ends = True
        self._parts, self._size = ([rest] if rest else []), len(rest)
        skip, self._skipping = self._skipping, (self._skipping and cut == 0) or not ends
        if cut:
            yield from self._pick(block[:cut], skip)

    def close(self) -> Iterator[bytes]:
        """Gives what matters of the rest, which has no end of line."""
        yield from self.flush()
        rest, skip = b"".join(self._parts), self._skipping
        self._parts, self._size, self._skipping = [], 0, False
        if rest:
            yield from self._pick(rest, skip)

    def _pick(self, block: bytes, skip: bool) -> Iterator[bytes]:
        if b"\r" in block:
            block = block.replace(b"\r", b"\n")
        if skip:
            end = block.find(b"\n")
            if end < 0:
                return
            block = block[end + 1 :]
        if b'"MESSAGE"' in block:
            block = b"\n".join(map(_message, block.split(b"\n")))
        tail = block[-LONGEST:].rstrip()
        if tail:
            self.last = tail[tail.rfind(b"\n") + 1 :][:HEAD]
        shapes = block.translate(None, _DIGITS).split(b"\n")
        if not self.attend and self._dull.issuperset(shapes):
            return
        dull, seen, gates = self._dull, self._seen, self._gates
        for line, shape in zip(block.split(b"\n"), shapes, strict=True):
            if self.attend:
                yield line[:LONGEST]
                continue
            if shape in dull:
                continue
            looked = line if len(line) <= HEAD + TAIL else line[:HEAD] + line[-TAIL:]
            for gate in gates:
                if gate in looked:
                    times = seen.get(shape, 0) + 1
                    seen[shape] = times
                    if times == 1:
                        self.held += len(shape)
                    elif times > ENOUGH:
                        dull.add(shape)
                        break
                    yield line[:LONGEST]
                    break
            else:
                if len(shape) <= HEAD:
                    dull.add(shape)
                    self.held += len(shape)
            if self.held > HELD:
                dull.clear()
                seen.clear()
                self.held = 0


_FIELD = rb'"\s*:\s*("[^"\\]*(?:\\.[^"\\]*)*"|\[[\d,\s]*\])'
_MESSAGE = re.compile(rb'"MESSAGE' + _FIELD)
_IDENTIFIER = re.compile(rb'"SYSLOG_IDENTIFIER' + _FIELD)
_MARK = b"\x01"  # in front of what came out of the journal's JSON: \x01identifier\x01message


def _message(line: bytes) -> bytes:
    """The message in a line of `journalctl -o json`, marked with who wrote it; any other line as it is."""
    if b"{" not in line[:32]:
        return line
    start = line.find(b'"MESSAGE":"') + 11
    text = line[start : line.find(b'"', start)] if start > 10 else b"\\"
    name = line.find(b'"SYSLOG_IDENTIFIER":"') + 21
    who = line[name : line.find(b'"', name)] if name > 20 else b""
    if b"\\" not in text:
        return _MARK + who + _MARK + text
    found = _MESSAGE.search(line)
    if found is None:
        return line
    if not who and (named := _IDENTIFIER.search(line)) is not None:
        who = named[1].strip(b'"')
    prefix, text = _MARK + who + _MARK, found[1]
    try:
        value = json.loads(text)
        plain = bytes(value) if isinstance(value, list) else value.encode("utf-8", "replace")
    except (ValueError, RecursionError):
        return line
    return b"\n".join(prefix + part for part in plain.replace(b"\r", b"\n").split(b"\n"))


_SHORT = re.compile(
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?|\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d))"
    r" \S+ ([^\s:\[\]]+)(?:\[\d+\])?: ?"
)
_CONTAINER = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?")
_COMPOSE = re.compile(r"[\w.-]{1,64} +\| ")
_DMESG = re.compile(r"\[ *\d+\.\d{6}\] ")
_PREFIXES = (
    # SGLang: [2026-11-29 18:38:07 TP1]
    re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?P<rank>(?: [A-Z]+\d+)*)\] ?"),
    # vLLM: (Worker_TP1 pid=820) ERROR 08-09 20:55:03 [multiproc_executor.py:962]
    re.compile(r"\((?P<rank>[A-Za-z][\w-]*)(?: \w+=\w+)*? pid=\d+\) ?"),
    re.compile(r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?"),
    # torch: [rank0]:[W1129 18:45:19.490575976 ProcessGroupNCCL.cpp:1575]
    re.compile(r"\[(?P<rank>rank\d+)\]: ?"),
    re.compile(r"\[[WEIF]\d{3,4} [^\]]*\] ?"),
    # llama.cpp with --log-prefix and --log-timestamps: 0.00.123.456 E
    re.compile(r"\d+\.\d\d\.\d{3}\.\d{3} [DIWE] "),
)


def read(raw: bytes) -> tuple[str, str, str, bool]:
    """A raw line as (text, rank, source, tagged): colours and prefixes off, bad bytes replaced.

    `tagged` is false for a line without the program's own prefix: it may continue the one before. Indentation that
    belongs to the text stays.
    """
    if b"\x1b" in raw:
        raw = _NO_COLOUR.sub(b"", raw)
    source = ""
    text = raw.decode("utf-8", "replace").rstrip()
    if text.startswith("\x01") and text.count("\x01") >= 2:
        _, source, text = text.split("\x01", 2)
    elif (found := _SHORT.match(text)) is not None:
        source, text = found[1], text[found.end() :]
    elif (found := _CONTAINER.match(text)) is not None:
        text = text[found.end() :]
    elif (found := _DMESG.match(text)) is not None:
        source, text = "kernel", text[found.end() :]
    if (found := _COMPOSE.match(text)) is not None:
        text = text[found.end() :]
    rank, tagged = "", False
    for _ in range(4):
        for prefix in _PREFIXES:
            found = prefix.match(text)
            if found is not None:
                text = text[found.end() :]
                rank = (found.groupdict().get("rank") or rank).strip()
                tagged = True
                break
        else:
            break
    return text, rank, source, tagged
