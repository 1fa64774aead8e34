"""Saved answers in place of a machine: `Replay`, for tests and for looking at an incident again."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from gpuctl.transport.contract import Completed, TransportError

Answer = Completed | TransportError | bytes


class Replay:
    """Answers by the command line: the first pattern (as of fnmatch) that the line matches. `asked` keeps the lines.

    An answer is a Completed, the bytes of a stdout with rc 0, or an error to raise. No pattern: rc 127, as of a command
    that the machine does not have.
    """

    def __init__(self, name: str, answers: Mapping[str, Answer]) -> None:
        self.name = name
        self.answers = answers
        self.asked: list[str] = []

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        line = shlex.join(argv)
        self.asked.append(line)
        for pattern, answer in self.answers.items():
            if not fnmatchcase(line, pattern):
                continue
            if isinstance(answer, TransportError):
                raise answer
            done = Completed(0, answer, b"") if isinstance(answer, bytes) else answer
            if on_stdout is None:
                return done
            on_stdout(done.stdout)
            return Completed(done.rc, b"", done.stderr)
        return Completed(127, b"", f"{argv[0]}: command not found".encode())

    def close(self) -> None:
        """Nothing is held."""
