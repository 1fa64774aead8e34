"""Python tracebacks out of the lines of a log, also where the lines of several processes are mixed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from gpuctl.logs.rule import Line, Raised

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*(?:\| )?\s*File "(?P<file>[^"]{1,400})", line (?P<line>\d+)(?:, in (?P<name>\S.{0,120}))?')
_ENDS = re.compile(r"^(?P<type>[A-Za-z_][\w.]{0,120})(?:: ?(?P<message>.*))?$")
_LEVELS = frozenset({"INFO", "WARNING", "ERROR", "DEBUG", "CRITICAL", "NOTE", "NOTSET"})
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
LONGEST = 2000  # lines of one traceback that are read
AFTER = 12  # lines after the exception that may belong to its message
KEPT = 40  # frames


@dataclass
class _Open:
    rank: str
    fatal: bool
    frames: list[str] = field(default_factory=list)
    lines: int = 0
    root: Raised | None = None


class Traces:
    """Follows the tracebacks of each rank. `open` says that the next lines are wanted whatever they look like."""

    def __init__(self, fatal: tuple[str, ...]) -> None:
        self._fatal = fatal
        self.reset()

    def reset(self) -> None:
        self._traces: dict[str, _Open] = {}
        self._rank = ""  # of the last line that said it
        self._latest: dict[str, Raised] = {}
        self._chained: dict[str, Raised] = {}
        self._announced: dict[str, bool] = {}  # by rank: the last line said that it dies
        self._after = 0

    @property
    def open(self) -> bool:
        return bool(self._traces) or self._after > 0

    def line(self, line: Line, tagged: bool, where: tuple[str, bool]) -> Line | None:
        """The line to look at, with its rank and the exception it ends; None for a line inside a traceback.

        `where`: the stage reached, and whether the server had been ready.
        """
        rank = line.rank if tagged else self._continues(line.rank)
        if tagged:
            self._rank = rank
        line = replace(line, rank=rank)
        text = line.text
        if _HEADER in text:
            fatal = any(mark in text for mark in self._fatal) or self._announced.get(rank, False)
            self._traces[rank] = _Open(rank, fatal, root=self._chained.pop(rank, None))
            self._after = 0
            return line if text.strip() != _HEADER else None
        self._announced[rank] = any(mark in text for mark in self._fatal)
        trace = self._traces.get(rank)
        if trace is None:
            if self._after:
                self._after -= 1
            for words in _CHAINED:
                if words in text and rank in self._latest:
                    self._chained[rank] = self._latest[rank]
                    self._after = AFTER
                    return None
            return line
        return self._inside(trace, line, where)

    def _continues(self, rank: str) -> str:
        """Whose line an untagged one is: that of the last tagged line, or of the traceback that is open."""
        if rank:
            return rank
        if self._rank in self._traces or not self._traces:
            return self._rank
        return next(reversed(self._traces))

    def _inside(self, trace: _Open, line: Line, where: tuple[str, bool]) -> Line | None:
        text = line.text
        trace.lines += 1
        if trace.lines > LONGEST:
            del self._traces[trace.rank]
            return line
        found = _FRAME.match(text)
        if found is not None:
            trace.frames.append(f"{found['file']}:{found['line']} {found['name'] or ''}".rstrip())
            del trace.frames[:-KEPT]
            return None
        if text[:1].isspace() or text.startswith("| "):
            code = text.strip(" |")
            if trace.frames and code and not set(code) <= set("^~ "):
                trace.frames[-1] = f"{trace.frames[-1].partition(' | ')[0]} | {code[:200]}"
            return None
        ended = _ENDS.match(text)
        if ended is None or ended["type"] in _LEVELS or not (trace.frames or ended["type"].endswith("Error")):
            return line
        del self._traces[trace.rank]
        self._after = AFTER
        raised = Raised(
            type=ended["type"],
            message=(ended["message"] or "")[:4000],
            frames=tuple(trace.frames),
            rank=trace.rank,
            order=line.order,
            fatal=trace.fatal or (trace.root is not None and trace.root.fatal),
            stage=where[0],
            ready=where[1],
            root=trace.root,
        )
        self._latest[trace.rank] = raised
        return replace(line, raised=raised)
