"""How fast `gpuctl diagnose` reads, and how much memory it takes: on stdin, so that no disk is measured.

    python tests/perf/diagnose.py [MEGABYTES] [--write]    (docs/diagnose.md)

Two logs: one server that starts once and then says a line per decoded batch for days, and one that starts anew again and
again (the densest a log can be). MB are 10^6 bytes; time is the processor's, since the machine may be busy.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

TRUTH = Path(__file__).parents[1] / "ground_truth/sglang"
BATCH = (
    "[2026-11-29 18:{:02}:{:02}] Decode batch, #running-req: {}, #token: {}, token usage: 0.{:02}, cuda graph: True, "
    "gen throughput (token/s): {:.2f}, #queue-req: 0\n"
)


def serving(size: int) -> Iterator[bytes]:
    start = (TRUTH / "ok-27b-default/server.log").read_bytes()
    many = "".join(
        BATCH.format(n // 60 % 60, n % 60, n % 32, n * 37, n % 90, 500 + n % 700 / 3) for n in range(20_000)
    ).encode()
    yield start
    for _ in range(size // len(many)):
        yield many


def starting(size: int) -> Iterator[bytes]:
    several = b"".join(path.read_bytes() for path in sorted(TRUTH.glob("*/server.log")))
    for _ in range(size // len(several)):
        yield several


def measure(pieces: Iterator[bytes]) -> tuple[float, float, float]:
    """(MB, seconds of processor time, MB of memory at most)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuctl", "diagnose", "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert process.stdin is not None
    sent = 0
    for piece in pieces:
        process.stdin.write(piece)
        sent += len(piece)
    process.stdin.close()
    process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return sent / 1e6, seconds, after.ru_maxrss / 1e3


DOCUMENT = Path(__file__).parents[2] / "docs/diagnose.md"
TEXT = """# How fast `gpuctl diagnose` reads

Made by `make perf` on {when}: {cores} cores, Linux {kernel}, Python {python}. From stdin, so that no disk is measured; time is the
processor's, of the whole program with its start. MB are 10^6 bytes.

| log | MB | s | MB/s | memory at most, MB |
|---|---:|---:|---:|---:|
{rows}

Aim: 200 MB/s on the log of a server that serves. Memory does not grow with the log.
"""


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--write"]
    size = int(float(words[0] if words else 1000) * 1e6)
    rows = []
    for name, log in (("one that serves", serving), ("one that starts again and again", starting)):
        sent, seconds, memory = measure(log(size))
        rows.append(f"| {name} | {sent:.0f} | {seconds:.2f} | {sent / seconds:.0f} | {memory:.0f} |")
        print(rows[-1])
    if "--write" in sys.argv:
        when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        DOCUMENT.write_text(TEXT.format(
            when=when, cores=os.cpu_count(), kernel=platform.release(), python=platform.python_version(),
            rows="\n".join(rows),
        ))  # fmt: skip


if __name__ == "__main__":
    main()
