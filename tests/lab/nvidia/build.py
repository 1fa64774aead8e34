"""Compiles the C sources of the double, once for each state of them, into a cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "src"

HIDDEN = "-fvisibility=hidden"  # only what is marked is exported

# what is built -> its source and flags
LIBRARIES = {
    "gate.so": ("gate.c", []),
    "libcuda.so": ("libcuda.c", [HIDDEN, "-Wl,-soname,libcuda.so.1", "-ldl"]),
    "libcuda-stub.so": ("stub.c", ["-Wl,-soname,libcuda.so.1"]),
    "libnvidia-ml.so": ("libnvidia-ml.c", [HIDDEN, "-Wl,-soname,libnvidia-ml.so.1", "-ldl"]),
}
PROGRAMS = {
    "attempt": ("attempt.c", []),
    "nvidia-smi": ("nvidia-smi.c", ["-ldl"]),
    "nvidia-modprobe": ("nvidia-modprobe.c", []),
    "nvidia-persistenced": ("nvidia-persistenced.c", []),
    "nvidia-double": ("nvidia-double.c", []),
}


@dataclass(frozen=True)
class Built:
    folder: Path

    @property
    def gate(self) -> Path:
        return self.folder / "gate.so"

    def __getitem__(self, name: str) -> Path:
        return self.folder / name


@cache
def built() -> Built:
    """The compiled double. Raises RuntimeError with what the compiler said."""
    sources = sorted(p for p in SOURCES.iterdir() if p.suffix in (".c", ".h"))
    digest = hashlib.sha256(Path(__file__).read_bytes() + b"".join(p.read_bytes() for p in sources)).hexdigest()[:16]
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuctl-lab" / "nvidia"
    folder = cached / digest
    if folder.exists():
        return Built(folder)
    cached.mkdir(parents=True, exist_ok=True)
    with (cached / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return Built(folder)
        partial = cached / f"{digest}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for name, (source, flags) in LIBRARIES.items():
            _compile(partial / name, source, ["-shared", "-fPIC", *flags])
        for name, (source, flags) in PROGRAMS.items():
            _compile(partial / name, source, flags)
        partial.rename(folder)
        for old in sorted(cached.iterdir(), key=lambda p: p.stat().st_mtime)[:-4]:
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
    return Built(folder)


def _compile(target: Path, source: str, flags: list[str]) -> None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler: the NVIDIA double needs gcc (apt-get install gcc libc6-dev)")
    usual = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
    command = [compiler, *usual, "-o", str(target), str(SOURCES / source), *flags]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"{source} does not compile:\n{done.stderr}")
