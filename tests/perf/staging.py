"""How fast a model comes into memory: stage.py beside what people use, in one run, on the same files.

    staging.py [--bytes 2G] [--cached 2G] [--files 8] [--rounds 3] [--on FOLDER] [--memory /dev/shm] [--write]

Cold: the page cache has none of the files. stage.py hashes every byte on the way; the others do not (rclone compares
nothing for local files either, when told to transfer by size). "Direct reads" is what the disk gives: the same files read by as
many threads past the page cache into nothing, in pieces and in huge pages as stage.py does it; "and SHA-256" is that with
every byte hashed, which nothing that verifies can be faster than here. Warm: all of them are in the page cache (`--cached`:
the size of that model). All fill a folder of a tmpfs that is empty before. Rounds go through all contenders in turn, forwards and
backwards; the medians are compared. Memory is the highest VmRSS of stage.py's process: what it holds beside the model itself,
which it does not map. `--write` puts it into docs/staging.md.

On a virtual machine whose hypervisor takes free memory back, that is switched off before it is measured: who comes first after
a pause pays for getting it again, up to two seconds of processor a gigabyte.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpuctl.agent.stage import PIECE, in_huge_pages

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "staging.md"
PROGRAM = ROOT / "gpuctl" / "agent" / "stage.py"
PYTHON = getattr(sys, "_base_executable", sys.executable)  # a machine's own, not one with an environment to set up
DISK_AIM, MEMORY_AIM = 0.95, 300e6
SLOW = ("`cp -r`", "`rsync -a`", "`rclone copy --multi-thread-streams`")


def size(text: str) -> int:
    found = re.fullmatch(r"(\d+)([MG]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, as 2G")
    return int(found[1]) << {"": 0, "M": 20, "G": 30}[found[2]]


def write_model(folder: Path, files: int, each: int) -> None:
    """Safetensors files of random bytes, which no disk can compress or deduplicate."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")

    def write(number: int) -> None:
        header = json.dumps({f"t{number}": {"dtype": "U8", "shape": [each], "data_offsets": [0, each]}}).encode()
        with open(folder / f"model-{number:05d}-of-{files:05d}.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for at in range(0, each, 16 << 20):
                file.write(os.urandom(min(16 << 20, each - at)))
            file.flush()
            os.fsync(file.fileno())

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(write, range(1, files + 1)))


def forget(folder: Path) -> None:
    """Takes the files out of the page cache."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def remember(folder: Path) -> None:
    """Reads the files into the page cache."""

    def read(path: Path) -> None:
        with open(path, "rb", buffering=0) as file:
            piece = bytearray(1 << 20)
            while file.readinto(piece):
                pass

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(read, folder.iterdir()))


def direct_reads(source: Path, _: Path, threads: int, *, hashed: bool = False) -> None:
    """All files, by pieces, by several threads past the page cache, into a buffer that is thrown away."""
    pieces = [
        (path, at) for path in sorted(source.glob("*.safetensors")) for at in range(0, path.stat().st_size, PIECE)
    ]
    lock, left = threading.Lock(), iter(pieces)

    def work() -> None:
        buffer, opened = in_huge_pages(PIECE), {}
        while True:
            with lock:
                one = next(left, None)
            if one is None:
                break
            path, at = one
            if path not in opened:
                opened[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
            got = os.preadv(opened[path], [buffer], at)
            if hashed:
                hashlib.sha256(buffer[:got]).digest()
        for fd in opened.values():
            os.close(fd)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


class Staged:
    """stage.py as it runs on a machine, in a process of its own; notes how much memory it had."""

    def __init__(self, hashed: bool) -> None:
        self.hashed, self.peak = hashed, 0

    def __call__(self, source: Path, to: Path, threads: int) -> None:
        job = {"to": str(to / "m"), "source": str(source), "json": True, "hash": self.hashed, "headroom_bytes": 0}
        process = subprocess.Popen(
            [PYTHON, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "GPUCTL_STATE": str(to)},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job).encode())
        process.stdin.close()
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
                own = re.findall(r"^VmRSS:\s+(\d+) kB", status, re.M)
                self.peak = max(self.peak, sum(map(int, own)) * 1024)
            except OSError:
                pass
            time.sleep(0.02)
        last = json.loads(process.stdout.read().splitlines()[-1])
        process.stdout.close()
        if last.get("state") != "staged":
            raise SystemExit(f"stage.py: {last}")


def command(*words: str) -> Callable[[Path, Path, int], None]:
    """A shell's line; SOURCE and TO are the folders."""

    def run(source: Path, to: Path, threads: int) -> None:
        line = " ".join(words).replace("THREADS", str(threads))
        subprocess.run(["sh", "-c", line, "sh", str(source), str(to)], check=True, stdout=subprocess.DEVNULL)

    return run


COPY = 'mkdir "$2/m"; ls -d "$1"/* | xargs -P THREADS -I{} cp {} "$2/m"'
CHECK = '; ls -d "$2/m"/* | xargs -P THREADS -n 1 sha256sum'


def contenders(threads: int) -> tuple[dict[str, Callable], dict[str, Callable]]:
    cold: dict[str, Callable] = {
        "stage.py, SHA-256 of every file": Staged(True),
        "direct reads into nothing": direct_reads,
        "direct reads into nothing and SHA-256": functools.partial(direct_reads, hashed=True),
        "stage.py, without SHA-256": Staged(False),
        "`cp -r`": command('cp -r "$1" "$2/m"'),
        "`xargs -P8 cp`": command(COPY.replace("THREADS", "8")),
        f"`xargs -P{threads} cp`": command(COPY),
        f"`xargs -P{threads} cp`, then `sha256sum` as many at a time": command(COPY + CHECK),
    }
    if shutil.which("rsync"):
        cold["`rsync -a`"] = command('rsync -a "$1/" "$2/m/"')
    if shutil.which("rclone"):
        cold["`rclone copy --multi-thread-streams`"] = command(
            'rclone copy --config /dev/null -q --transfers THREADS --multi-thread-streams 4 "$1" "$2/m"'
        )
    warm: dict[str, Callable] = {
        "stage.py, without SHA-256": Staged(False),
        "stage.py, SHA-256 of every file": Staged(True),
        "`xargs -P16 cp`": command(COPY.replace("THREADS", "16")),
        "`xargs -P16 cp`, then `sha256sum` as many at a time": command((COPY + CHECK).replace("THREADS", "16")),
        "`xargs -P8 cp`": command(COPY.replace("THREADS", "8")),
        "`cp -r`": command('cp -r "$1" "$2/m"'),
    }
    if shutil.which("rsync"):
        warm["`rsync -a`"] = cold["`rsync -a`"]
    return cold, warm


def measure(
    which: dict[str, Callable], source: Path, memory: str, rounds: int, threads: int, warm: bool
) -> dict[str, list[float]]:
    """Bytes a second of each contender, by round. Each starts with an empty folder; every other round goes backwards.
    Those that are far behind, and take most of the time, run in every third round.
    """
    total = sum(path.stat().st_size for path in source.iterdir())
    rates: dict[str, list[float]] = {name: [] for name in which}
    for turn in range(1, rounds + 1):
        for name, run in [*which.items()][:: 1 if turn % 2 else -1]:
            if name in SLOW and turn % 3 != 1:
                continue
            with tempfile.TemporaryDirectory(prefix="gpuctl-perf-", dir=memory) as to:
                remember(source) if warm else forget(source)
                began = time.perf_counter()
                run(source, Path(to), threads)
                took = time.perf_counter() - began
            rates[name].append(total / took)
            print(
                f"{'warm' if warm else 'cold'} {turn}/{rounds} {name}: {total / took / 1e9:.2f} GB/s",
                file=sys.stderr,
                flush=True,
            )
    return rates


def table(rates: dict[str, list[float]], against: str) -> list[str]:
    base = statistics.median(rates[against])
    lines = [f"| | median GB/s | slowest, fastest | of {against} |", "|---|---:|---:|---:|"]
    for name, seen in rates.items():
        median = statistics.median(seen)
        lines.append(
            f"| {name} | {median / 1e9:.2f} | {min(seen) / 1e9:.2f}, {max(seen) / 1e9:.2f} | {median / base:.2f} |"
        )
    return lines


def sha256_rate(threads: int) -> float:
    """Bytes a second that so many threads hash together: what they hash stays in each one's cache."""
    data, times = bytes(1 << 20), 256

    def work(_: int) -> None:
        one = hashlib.sha256()
        for _ in range(times):
            one.update(data)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return threads * times * len(data) / (time.perf_counter() - began)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=size, default=size("2G"))
    parser.add_argument("--cached", type=size, help="of the model in the page cache (default: as --bytes)")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--on", default="/var/tmp", help="folder on the disk that is read")
    parser.add_argument("--memory", default="/dev/shm")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    threads = max(8, min(32, 2 * cores))  # as stage.py does
    with tempfile.TemporaryDirectory(prefix="gpuctl-perf-", dir=options.on) as folder:
        source = large = Path(folder) / "model"
        write_model(source, options.files, options.bytes // options.files)
        cold, warm = contenders(threads)
        from_disk = measure(cold, source, options.memory, options.rounds, threads, warm=False)
        cached = options.cached or options.bytes
        if cached != options.bytes:
            large = Path(folder) / "large"
            write_model(large, options.files, cached // options.files)
        from_cache = measure(warm, large, options.memory, options.rounds, threads, warm=True)
    peak = max(one.peak for one in [*cold.values(), *warm.values()] if isinstance(one, Staged))
    middle = {name: statistics.median(seen) for name, seen in from_disk.items()}
    ours, direct = middle["stage.py, SHA-256 of every file"], middle["direct reads into nothing"]
    bound = middle["direct reads into nothing and SHA-256"]
    hashing = sha256_rate(cores)
    plain = statistics.median(from_cache["stage.py, without SHA-256"]) / statistics.median(
        from_cache["`xargs -P16 cp`"]
    )
    hashed = statistics.median(from_cache["stage.py, SHA-256 of every file"])
    checked = statistics.median(from_cache["`xargs -P16 cp`, then `sha256sum` as many at a time"])
    others = {name: rate for name, rate in middle.items() if not name.startswith(("stage.py", "direct"))}
    limit = f"All cores together hash {hashing / 1e9:.1f} GB/s here and the disk gives {direct / 1e9:.1f}: " + (
        "the disk is the limit." if hashing > 1.5 * direct else "SHA-256 is the limit, not the disk."
    )
    lines = [
        "# How fast a model comes into memory",
        "",
        f"Made by `make perf` (tests/perf/staging.py) on {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC: {cores} cores, Linux "
        f"{platform.release()}, Python {platform.python_version()}; {options.files} safetensors files, "
        f"{options.bytes / 1e9:.1f} GB of random bytes (in the page cache: {cached / 1e9:.1f}), into a tmpfs; {options.rounds} rounds (those far behind: every third), {threads} threads; load of the machine "
        f"when it began: {load:.1f}.",
        "",
        "## From disk, nothing in the page cache",
        "",
        *table(from_disk, "direct reads into nothing"),
        "",
        f"stage.py gives {ours / direct:.2f} of what the disk gives (aim: {DISK_AIM}), with every SHA-256 compared; the next best "
        f"copies at {max(others.values()) / direct:.2f} and compares nothing. Reading and hashing alone, with no copy made, gives "
        f"{bound / direct:.2f}; stage.py is at {ours / bound:.2f} of that. {limit}",
        "",
        "## From the page cache",
        "",
        *table(from_cache, "`xargs -P16 cp`"),
        "",
        f"Without hashing (`gpuctl stage --no-hash`) stage.py gives {plain:.2f} of `xargs -P16 cp` (aim: 1). With every SHA-256 "
        f"compared it gives {hashed / checked:.2f} of the same `cp` followed by `sha256sum`; the cores together hash "
        f"{hashing / 1e9:.1f} GB/s here when they do nothing else.",
        "",
        "## Memory",
        "",
        f"stage.py itself held {peak / 1e6:.0f} MB at most (aim: under {MEMORY_AIM / 1e6:.0f}): its buffers are 1 MiB a "
        "thread, and the page cache takes nothing beside the copy.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        DOCUMENT.write_text(text, encoding="utf-8")
    well = (
        ours >= DISK_AIM * direct and all(ours > rate for rate in others.values()) and plain >= 1 and peak < MEMORY_AIM
    )
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
