"""Repositories as the hub keeps them: commits of files, each a git blob or a large file known by its sha256."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

LARGE_NAMES = (".safetensors", ".bin", ".gguf", ".pt", ".onnx", ".model", "tokenizer.json")
LARGE_BYTES = 10 << 20  # beyond this git takes no file
BLOCK = 1 << 20


@dataclass(frozen=True)
class File:
    """A file of a commit. `content` is its bytes, or the path it is read from when asked for."""

    path: str
    content: bytes | Path
    size: int
    sha256: str
    blob: str  # git's id: of the content, or of the pointer to a large file
    large: bool

    def open(self) -> BinaryIO:
        return io.BytesIO(self.content) if isinstance(self.content, bytes) else self.content.open("rb")

    @property
    def etag(self) -> str:
        """What the client calls the file in its cache."""
        return self.sha256 if self.large else self.blob

    @property
    def pointer(self) -> bytes:
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size}\n".encode()


def _blocks(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as stream:
        while block := stream.read(BLOCK):
            yield block


def _git_blob(content: bytes | Path, size: int) -> str:
    digest = hashlib.sha1(b"blob %d\0" % size)
    for block in _blocks(content):
        digest.update(block)
    return digest.hexdigest()


def describe(path: str, content: bytes | Path) -> File:
    """Hashes a file as git and LFS do."""
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    sha256 = hashlib.sha256()
    for block in _blocks(content):
        sha256.update(block)
    large = path.endswith(LARGE_NAMES) or size > LARGE_BYTES
    file = File(path, content, size, sha256.hexdigest(), "", large)
    blob = _git_blob(file.pointer, len(file.pointer)) if large else _git_blob(content, size)
    return File(path, content, size, file.sha256, blob, large)


@dataclass
class Repository:
    """Commits by id, and the branches and tags that name them."""

    id: str
    token: str | None = None  # asked for; without it the repository does not seem to exist
    gated: bool = False  # seen by everybody, read with the token only
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes | Path], branch: str = "main") -> str:
        """Adds a commit of exactly these files and moves the branch to it; returns its id."""
        described = {path: describe(path, content) for path, content in sorted(files.items())}
        text = "\n".join(f"{file.blob} {path}" for path, file in described.items())
        sha = hashlib.sha1(f"{self.id}\n{self.branches.get(branch)}\n{text}".encode()).hexdigest()
        self.commits[sha] = described
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        """The commit a branch, a tag or an id names."""
        named = self.branches.get(revision) or self.tags.get(revision)
        return named or (revision if revision in self.commits else None)

    def large(self, sha256: str) -> File | None:
        for files in self.commits.values():
            for file in files.values():
                if file.large and file.sha256 == sha256:
                    return file
        return None


def files_of(folder: Path) -> dict[str, bytes | Path]:
    """The files below a folder by relative path; hidden ones are left out."""
    return {
        file.relative_to(folder).as_posix(): file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    }
