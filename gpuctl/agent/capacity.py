"""What a memory plan is made from, raw: the GPUs' memory, model configurations, the text of installed engines, space.

Job (JSON on stdin): {"models": [path...], "engines": [{"python": executable, "package": name, "files": [path in it...],
"flags": [pattern in it...], "program": [word...], "path": its PATH or null}...], "help": {key: [[word...]...]},
"space": [path...]}
Answer (one JSON line): {"gpus": [...], "memory": {...}, "models": {path: {...}}, "engines": [{...}...],
"help": {key: text}, "space": {path: {...}}}

The digest of the files that define an engine's flags names the version whose --help is worth remembering: a fork keeps
the number of what it was forked from. Standard library only, Python 3.9. Changes nothing.
"""

import ctypes
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys

MIB = 1 << 20
TEXT = 4 * MIB  # of one file, and of one help text


def run(argv, timeout):
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it started would hold the pipes open
            raise
    return process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")


def read(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(TEXT)


# GPUs


def buses():
    """Width of each GPU's memory bus in bits by its place on the PCI bus; {} where NVML does not tell."""
    found = {}
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return found
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            handle, bits, pci = ctypes.c_void_p(), ctypes.c_uint(), ctypes.create_string_buffer(256)
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
                continue
            if nvml.nvmlDeviceGetMemoryBusWidth(handle, ctypes.byref(bits)) != 0:
                continue
            # nvmlPciInfo_t: the old bus id (16 bytes), five numbers, the bus id of 32 bytes
            if nvml.nvmlDeviceGetPciInfo_v3(handle, pci) == 0:
                found[pci.raw[36:68].split(b"\0")[0].decode().lower()[-12:]] = bits.value
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        pass
    return found


def gpus():
    """As nvidia-smi tells them. Opens no device node that is not there: nvidia-smi mends nodes."""
    if not os.path.exists("/dev/nvidiactl"):
        return []
    asked = ("pci.bus_id", "name", "memory.total", "memory.free", "clocks.max.mem")
    try:
        status, out, _ = run(["nvidia-smi", "--query-gpu=" + ",".join(asked), "--format=csv,noheader,nounits"], 20)
    except (OSError, subprocess.SubprocessError):
        return []
    widths = buses()
    found = []
    for line in out.splitlines() if status == 0 else ():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(asked):
            gpu = dict(zip(("pci", "name", "total_mib", "free_mib", "memory_mhz"), values))
            gpu["bus_bits"] = widths.get(gpu["pci"].lower()[-12:])
            found.append(gpu)
    return found


# Models

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SHORT = 4096  # elements of an array that are brought; a vocabulary is longer, and its length is enough


class Gguf:
    """The header of a GGUF file (its specification: ggml/docs/gguf.md): metadata, and the bytes of its tensors."""

    def __init__(self, file, size):
        self.file, self.size = file, size

    def number(self, code):
        piece = self.file.read(struct.calcsize(code))
        return struct.unpack("<" + code, piece)[0]

    def text(self):
        length = self.number("Q")
        if length > self.size:
            raise ValueError("a text longer than the file")
        return self.file.read(length).decode("utf-8", "replace")

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind != 9:
            return self.number(_CODES[kind])
        inside, length = self.number("I"), self.number("Q")
        if length <= _SHORT:
            return [self.value(inside) for _ in range(length)]
        if inside in _SIZES:
            self.file.seek(length * _SIZES[inside], 1)
        else:
            for _ in range(length):
                self.value(inside)
        return {"length": length}

    def header(self):
        if self.file.read(4) != b"GGUF":
            return None
        version, tensors, pairs = self.number("I"), self.number("Q"), self.number("Q")
        metadata = {}
        for _ in range(pairs):
            key = self.text()
            metadata[key] = self.value(self.number("I"))
        places = []
        for _ in range(tensors):
            name = self.text()
            for _ in range(self.number("I")):
                self.number("Q")
            self.number("I")
            places.append((self.number("Q"), name))
        start = self.file.tell()
        places.sort()
        ends = [offset for offset, _ in places[1:]] + [max(self.size - start, 0)]
        return {
            "version": version,
            "metadata": metadata,
            "tensors": {name: end - offset for (offset, name), end in zip(places, ends)},
        }


def model(path):
    path = os.path.expanduser(path)
    try:
        if os.path.isdir(path):
            found = {"bytes": 0}
            for name in os.listdir(path):
                if re.search(r"\.(safetensors|gguf|bin|pt)$", name):
                    found["bytes"] += os.stat(os.path.join(path, name)).st_size
            for key, name in (("config", "config.json"), ("index", "model.safetensors.index.json")):
                full = os.path.join(path, name)
                if os.path.exists(full) and os.path.getsize(full) < 64 * MIB:
                    with open(full, encoding="utf-8", errors="replace") as file:
                        text = file.read()
                    if key == "config":
                        found["config"] = text
                    else:
                        total = json.loads(text).get("metadata", {}).get("total_size")
                        found["stored"] = total if isinstance(total, int) else None
            return found
        size = os.stat(path).st_size
        parts = [path]
        split = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path)
        if split:
            parts = ["%s-%05d-of-%s.gguf" % (split[1], n + 1, split[2]) for n in range(int(split[2]))]
            size = sum(os.stat(part).st_size for part in parts)
        header = None
        for part in parts:
            with open(part, "rb") as file:
                one = Gguf(file, os.stat(part).st_size).header()
            if header is None:
                header = one
            elif one is not None:
                header["tensors"].update(one["tensors"])
        if header is not None:
            header["tensors"] = tensors(header["tensors"])
        return {"bytes": size, "gguf": header}
    except OSError as error:
        return {"error": "%s: %s" % (error.filename or path, error.strerror)}
    except (ValueError, struct.error, KeyError, AttributeError, MemoryError) as error:
        return {"error": "%s: cannot be read: %s" % (path, error)}


def tensors(sizes):
    """Bytes by what they are for, since a model has thousands of tensors."""
    found = {"experts": 0, "embedding": 0, "head": 0, "rest": 0}
    for name, size in sizes.items():
        kind = "experts" if "_exps" in name else "rest"
        kind = {"token_embd.weight": "embedding", "output.weight": "head"}.get(name, kind)
        found[kind] += size
    return found


# Engines


_ASK = """
import importlib.metadata as m, importlib.util as u, json, sys
spec = u.find_spec(sys.argv[1])
if spec is None:
    sys.exit("no package " + sys.argv[1])
try:
    version = m.version(sys.argv[1])
except Exception:
    version = ""
print(json.dumps([spec.submodule_search_locations[0], version]))
"""


def engine(asked):
    """Where a package lies, the text of the files asked for, and the digest of those that define its flags."""
    found = {"python": asked.get("python"), "program": asked.get("program"), "path": asked.get("path")}
    if asked.get("program"):
        found["missing"] = missing(asked["program"][0], asked.get("path"))
    try:
        if asked.get("package"):
            status, out, err = run([os.path.expanduser(asked["python"]), "-c", _ASK, asked["package"]], 60)
            if status != 0:
                said = err.strip().splitlines()
                return dict(found, error="%s: %s" % (asked["python"], said[-1] if said else "no package"))
            folder, found["version"] = json.loads(out.splitlines()[-1])
            found["folder"] = folder
            found["files"] = {}
            for name in asked.get("files", ()):
                if os.path.isfile(os.path.join(folder, name)):
                    found["files"][os.path.basename(name)] = read(os.path.join(folder, name))
            paths = sorted({path for name in asked.get("flags", ()) for path in glob.glob(os.path.join(folder, name))})
        else:
            paths = [which(asked["program"][0])]
        summary = hashlib.sha256()
        for path in paths:
            with open(path, "rb") as file:
                for piece in iter(lambda: file.read(MIB), b""):
                    summary.update(piece)
        if not paths:  # a package laid out in a way not known here: its number has to do
            summary.update(json.dumps([found.get("folder"), found.get("version")]).encode())
        found["digest"] = summary.hexdigest()[:16]
    except (OSError, ValueError, subprocess.SubprocessError, IndexError) as error:
        found["error"] = str(error)
    return found


def missing(program, path):
    """Whether a program is not there for a server with that PATH; None where it cannot be seen."""
    place = os.path.expanduser(program)
    if "/" not in place:
        return shutil.which(place, path=path) is None
    if not os.path.isabs(place):
        return None  # seen from the folder that the server runs in
    try:
        os.stat(place)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return None
    return False


def which(program):
    if "/" in program:
        return os.path.expanduser(program)
    for folder in os.environ.get("PATH", os.defpath).split(":"):
        if os.access(os.path.join(folder, program), os.X_OK):
            return os.path.join(folder, program)
    raise OSError("%s: not on the PATH" % program)


def help_text(forms):
    """What the first of several forms of asking says that is understood."""
    said = {"error": "not asked"}
    for argv in forms:
        try:
            status, out, err = run([os.path.expanduser(argv[0]), *argv[1:]], 240)
        except (OSError, subprocess.SubprocessError) as error:
            said = {"error": str(error)}
            continue
        if status == 0:
            return {"text": (out if len(out) >= len(err) else err)[:TEXT]}
        said = {"error": "%s: exit status %s" % (" ".join(argv), status)}
    return said


# Space


def space(path):
    """The file system that a path lies in, or will lie in: of its nearest folder that is there."""
    here = os.path.expanduser(path)
    while not os.path.exists(here) and os.path.dirname(here) != here:
        here = os.path.dirname(here)
    try:
        told = os.statvfs(here)
        mounts = []
        for line in read("/proc/self/mounts").splitlines():
            fields = line.split()
            where = fields[1].encode().decode("unicode_escape")
            if here == where or here.startswith(where.rstrip("/") + "/"):
                mounts.append((len(where), where, fields[2]))
        _, where, kind = max(mounts) if mounts else (0, "/", "")
        return {
            "mount": where,
            "kind": kind,
            "total": told.f_blocks * told.f_frsize,
            "free": told.f_bavail * told.f_frsize,
        }
    except (OSError, IndexError) as error:
        return {"error": str(error)}


def memory():
    try:
        told = dict(re.findall(r"^(\w+):\s+(\d+) kB", read("/proc/meminfo"), re.M))
        return {name: int(told[name]) * 1024 for name in ("MemTotal", "MemAvailable") if name in told}
    except OSError:
        return {}


def main():
    job = json.loads(sys.stdin.buffer.readline())
    answer = {
        "gpus": gpus(),
        "memory": memory(),
        "models": {path: model(path) for path in job.get("models", [])},
        "engines": [engine(asked) for asked in job.get("engines", [])],
        "help": {key: help_text(forms) for key, forms in job.get("help", {}).items()},
        "space": {path: space(path) for path in job.get("space", [])},
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
