"""libcuda and libnvidia-ml: which file is really loaded, of which version, and what else lies around."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpuctl.box import Fact, Snapshot, Unknown
from gpuctl.facts import cuda, nvidia

_SUFFIX = re.compile(rf"\.so\.({nvidia.VERSION})$")


def version_of(path: str) -> str | None:
    """The driver version in a library's real name: libcuda.so.580.159.04."""
    found = _SUFFIX.search(path)
    return found.group(1) if found else None


def is_stub(path: str) -> bool:
    return "/stubs/" in path or "/stub/" in path


def is_compat(path: str) -> bool:
    return bool(re.search(r"/compat(?:/|-|_)|/cuda-compat", path))


@dataclass(frozen=True)
class Library:
    """A library file: where it was found, and the file it leads to (None: a link to nowhere)."""

    path: str
    real: str | None
    size: int | None = None

    @property
    def version(self) -> str | None:
        return version_of(self.real or "") or version_of(self.path)


def _found(snapshot: Snapshot) -> tuple[Library, ...]:
    found: list[Library] = []
    known = False
    for path, answer in snapshot.mapping("libraries").items():
        known = True
        if isinstance(answer, Mapping):
            broken = answer.get("error") == "ENOENT"
            size = answer.get("size")
            found.append(
                Library(
                    path, None if broken else str(answer.get("real", path)), int(size) if size is not None else None
                )
            )
        else:
            found.append(Library(path, str(answer)))
    for command in snapshot.mapping("commands"):
        if re.match(r"(?:/sbin/)?ldconfig\b.*(-p|-v)", command):
            known = True
            for line in snapshot.output(command).stdout.splitlines():
                entry = re.match(r"\s*(\S+\.so\S*) .*=> (\S+)", line)
                wanted = entry and re.match(r"libcuda\.so|libnvidia-ml\.so", entry.group(1))
                if entry and wanted and all(entry.group(2) != library.path for library in found):
                    found.append(Library(entry.group(2), entry.group(2)))
        elif re.match(r"(ls|find|readlink)\b.*(libcuda|libnvidia)", command):
            known = True
            for line in snapshot.output(command).text.splitlines():
                entry = re.search(r"(\S*lib(?:cuda|nvidia-ml)\.so\S*)(?: -> (\S+))?\s*$", line)
                if entry:
                    target = entry.group(2)
                    if target and "/" not in target:
                        target = entry.group(1).rpartition("/")[0] + "/" + target
                    found.append(Library(entry.group(1), target or entry.group(1)))
    if not known:
        raise Unknown("libraries: not in the snapshot")
    return tuple(found)


# Files of libcuda and libnvidia-ml in the usual folders and in the loader's cache.
FOUND: Fact[tuple[Library, ...]] = Fact((("section", "libraries"), ("command", "ldconfig -p")), _found)


def _libcuda(snapshot: Snapshot) -> str:
    mapped = snapshot.get(cuda.CUDA)
    if mapped is not None and mapped.libcuda:
        return mapped.libcuda
    service = snapshot.mapping("service").get("mapped")
    for path in service if isinstance(service, list) else ():
        if re.search(r"/libcuda\.so", str(path)):
            return str(path)
    raise Unknown("the libcuda that was loaded: not in the snapshot")


# The libcuda that was really mapped: by the probe with the service's environment, else by the running service.
LIBCUDA: Fact[str] = Fact((("section", "cuda"), ("section", "service")), _libcuda)


@dataclass(frozen=True)
class Version:
    """A version of the driver's libraries and where it was seen."""

    number: str
    source: str


def _userland(snapshot: Snapshot) -> tuple[Version, ...]:
    found: list[Version] = []
    path = snapshot.get(LIBCUDA)
    if path is not None and version_of(path) and not is_compat(path) and not is_stub(path):
        found.append(Version(str(version_of(path)), f"libcuda loaded: {path}"))
    for answers in snapshot.mapping("nvml").values():
        paths = answers.get("mapped") if isinstance(answers, Mapping) else None
        loaded = (
            [str(path) for path in paths or () if "libnvidia-ml.so" in str(path)] if isinstance(paths, list) else []
        )
        found += [Version(str(version_of(path)), f"NVML loaded: {path}") for path in loaded if version_of(path)]
    nvml = snapshot.get(nvidia.NVML)
    if nvml is not None and nvml.library_version:
        found.append(Version(nvml.library_version, "NVML library version"))
    for library in snapshot.get(FOUND) or ():
        real = library.real or ""
        if library.version and not is_compat(real) and not is_stub(real):
            found.append(Version(library.version, real))
    for line in package_lines(snapshot):
        package = re.match(
            rf"ii\s+(libcuda1|nvidia-driver-libs|libnvidia-compute-\d+\S*|libnvidia-ml1)\S*\s+(?:\d+:)?({nvidia.VERSION})",
            line,
        )
        if package:
            found.append(Version(package.group(2), f"package {package.group(1)}"))
    if not found:
        raise Unknown("version of the driver's libraries: not in the snapshot")
    return tuple(dict.fromkeys(found))


# Versions of the driver's libraries, what was really loaded first.
USERLAND: Fact[tuple[Version, ...]] = Fact(
    (("section", "cuda"), ("section", "libraries"), ("section", "packages")), _userland
)


def package_lines(snapshot: Snapshot) -> list[str]:
    """`ii  name version` lines of dpkg, from the probe or from a pasted `dpkg -l`."""
    packages = snapshot.mapping("packages")
    lines = [str(line) for line in packages.get("lines", ())]
    for command in snapshot.mapping("commands"):
        if re.match(r"(dpkg|apt list|rpm)\b", command):
            try:
                lines += [re.sub(r"\s+", " ", line) for line in snapshot.output(command).stdout.splitlines()]
            except Unknown:
                continue
    return lines
